"""Documents by limit, and the tokens that are learned, compared with counting them."""

import numpy as np
import pytest

from hpc_tune.data import packed_rows
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.packed_rows import (
    PackedRows,
    count_learned_tokens,
    count_tokens,
    select_documents,
    sort_by_length,
)
from hpc_tune.data.writer import Block, write_store
from tests.support.data import attributes, histogram_of


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 60, 200)
    mask = rng.integers(0, 2, sizes.sum()).astype(np.uint8)
    mask[np.cumsum(sizes) - sizes] = 0
    block = Block(sizes, np.ones(len(mask), np.uint16), mask)
    said = attributes(seq_len=64)
    said.counters.loss_tokens = int(mask.sum())
    write_store(tmp_path / "d.h5", [block], histogram_of(sizes), said)
    return TokenStore.open(tmp_path / "d.h5")


@pytest.mark.parametrize("limit", [None, 1, 7, 150, 200, 999])
@pytest.mark.parametrize("seq_len", [8, 40, 64])
def test_learned_tokens_are_those_of_the_rows(store, limit, seq_len, monkeypatch):
    monkeypatch.setattr(packed_rows, "_TOKENS_PER_READ", 100)
    rows = PackedRows(store, SampleOrder(seq_len, True, 3), limit)
    numbers = [n for row in range(rows.num_rows) for n in rows.sampler.documents_of(row)]
    assert len(numbers) == len(set(numbers)) == min(limit or 200, 200)
    by_hand = sum(int(store.document(n)[1][:seq_len].sum()) for n in numbers)
    assert count_learned_tokens(store, seq_len, limit) == by_hand


@pytest.mark.parametrize("limit", [1, 7, 150, 199])
def test_tokens_of_a_limit_are_those_of_its_documents(store, limit):
    used = [store.document(int(number)) for number in select_documents(200, limit)]
    by_hand = sum(len(tokens) for tokens, _ in used), sum(int(mask.sum()) for _, mask in used)
    assert count_tokens(store, limit) == by_hand


def test_the_same_documents_are_drawn_each_time_and_more_of_them_include_the_fewer(store):
    few, more = select_documents(200, 20), select_documents(200, 50)
    assert few.tolist() == select_documents(200, 20).tolist() == sorted(set(few.tolist()))
    assert set(few) < set(more)
    assert few.max() > 100, "not the first ones"


def test_lengths_of_drawn_documents_fit_their_numbers(store):
    values, counts, numbers = sort_by_length(store, 30)
    lengths = np.repeat(values, counts)
    assert lengths.tolist() == [len(store.document(int(n))[0]) for n in numbers]
