import timeit
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_tune.data.order import (
    PackedSampler,
    SampleOrder,
    Shuffle,
    pack_documents,
    pack_one_per_row,
)
from tests.support.data import histogram_of


def _order(lengths, seq_len, packing=True, seed=0):
    lengths = np.asarray(lengths)
    values, counts = np.unique(lengths, return_counts=True)
    by_length = np.argsort(lengths, kind="stable")
    return PackedSampler(values, counts, by_length, SampleOrder(seq_len, packing, seed))


def _best_fit_decreasing(lengths, seq_len):
    """The textbook algorithm, one document at a time; returns the sorted contents of the rows."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= seq_len]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
@settings(max_examples=200, deadline=None)
def test_packing_by_histogram_needs_as_many_rows_as_best_fit_one_by_one(lengths, seq_len):
    patterns = pack_documents(histogram_of(lengths), seq_len)
    used = Counter()
    for pattern in patterns:
        assert sum(length * copies for length, copies in pattern.items) <= seq_len
        for length, copies in pattern.items:
            used[length] += copies * pattern.num_rows
    assert used == Counter(lengths)
    assert sum(p.num_rows for p in patterns) == len(_best_fit_decreasing(lengths, seq_len))


def test_rows_by_hand():
    # 7 opens a row of 10 and takes the 3; both 5s share one; 4 + 4 leave 2 for both 1s.
    patterns = pack_documents({7: 1, 5: 2, 4: 2, 3: 1, 1: 2}, 10)
    rows = sorted((p.items, p.num_rows) for p in patterns)
    assert rows == [(((4, 2), (1, 2)), 1), (((5, 2),), 1), (((7, 1), (3, 1)), 1)]
    assert pack_one_per_row({3: 2, 8: 1})[0].items == ((3, 1),)


@pytest.mark.parametrize("seq_len", [1024, 2048, 8192])
@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_padding_is_under_two_percent_for_lognormal_lengths(seq_len, sigma):
    lengths = np.random.default_rng(0).lognormal(5.3, sigma, 5000).astype(int)  # median 200
    order = _order(np.clip(lengths, 4, seq_len), seq_len)
    assert order.padding < 0.02


def many_documents():
    """Return the histogram of ten million documents."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 10_000_000).astype(np.int64)
    return histogram_of(np.clip(lengths, 4, 4096))


def test_kinds_of_rows_do_not_grow_with_the_number_of_documents():
    histogram = many_documents()
    assert len(pack_documents(histogram, 4096)) < 3 * len(histogram)


@pytest.mark.soak
def test_ten_million_documents_pack_in_less_than_a_second():
    histogram = many_documents()
    # The fastest of three: a machine that stands still for a while says nothing about packing.
    assert min(timeit.repeat(lambda: pack_documents(histogram, 4096), number=1, repeat=3)) < 1


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=80),
    st.integers(10, 60),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_each_document_comes_exactly_once_in_every_epoch(lengths, seq_len, packing, seed):
    order = _order(lengths, seq_len, packing, seed)
    for epoch in range(3):
        first = epoch * order.num_rows
        rows = [order.documents_of(first + position) for position in range(order.num_rows)]
        assert sorted(d for row in rows for d in row) == list(range(len(lengths)))
        assert all(sum(min(lengths[d], seq_len) for d in row) <= seq_len for row in rows)
        assert packing or all(len(row) == 1 for row in rows)


def test_rows_are_composed_afresh_in_each_epoch():
    order = _order(np.random.default_rng(0).integers(10, 60, 500), 128)

    def partners(epoch):
        rows = (order.documents_of(epoch * order.num_rows + p) for p in range(order.num_rows))
        return {(a, b) for row in rows for a in row for b in row if a < b}

    first, second = partners(0), partners(1)
    assert len(first & second) < 0.2 * len(first)


def test_order_depends_on_seed_and_epoch_and_not_on_what_was_asked_before():
    lengths = np.random.default_rng(1).integers(5, 60, 200)
    one, two = _order(lengths, 64, seed=1), _order(lengths, 64, seed=1)
    last = 3 * one.num_rows - 1
    assert two.documents_of(last) == [one.documents_of(i) for i in range(last + 1)][-1]
    other = _order(lengths, 64, seed=2)
    assert [one.documents_of(i) for i in range(20)] != [other.documents_of(i) for i in range(20)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 4999])
def test_shuffle_is_a_permutation(n):
    shuffle = Shuffle(n, 0, n)
    assert sorted(map(shuffle, range(n))) == list(range(n))


def test_shuffle_looks_random():
    n = 20_000
    order = np.array([Shuffle(n, 7, 0)(i) for i in range(n)])
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.03  # 4 sigma of 1 / sqrt(n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert np.sum(order == np.arange(n)) < 10  # expected 1
    # Where 64 neighbors go: 20 bins, chi-square with 19 degrees of freedom, 99.99% below 52.
    bins = np.array(
        [np.bincount(order[s : s + 1000] // 1000, minlength=20) for s in range(0, n, 1000)]
    )
    assert np.all(((bins - 50) ** 2 / 50).sum(axis=1) < 52)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_shuffle_of_a_few_sends_each_place_everywhere_equally_often(n):
    hits = np.zeros((n, n))
    for key in range(3000):
        shuffle = Shuffle(n, key, "few")
        for i in range(n):
            hits[i, shuffle(i)] += 1
    assert np.all(abs(hits / 3000 - 1 / n) < 0.05)
