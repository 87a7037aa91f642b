"""The order of a mixture, compared with counting row by row and with its definition."""

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from hpc_tune.data.order import (
    Interleaving,
    MixturePhase,
    MixtureSource,
    phases_from_json,
    rows_before,
)

FIBONACCI_BOUND = 1.68  # half of 1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ...


def rates_of(draw, num):
    return [Fraction(draw.randint(1, 10 ** draw.randint(1, 4))) for _ in range(num)]


def part(rows, learned, **share):
    return MixtureSource("hash", None, rows, learned, **share)


@pytest.mark.parametrize("seed", range(6))
def test_two_sources_follow_the_largest_deficit(seed):
    rates = rates_of(random.Random(seed), 2)
    shares = [rate / sum(rates) for rate in rates]
    order, counts = Interleaving(rates), [0, 0]
    for place in range(500):
        # Both deficits are equal at half a row; then the smaller rate, which is first, has it.
        behind = [share * (place + 1) - count for share, count in zip(shares, counts, strict=True)]
        first = min(range(2), key=lambda at: (rates[at], at))
        due = first if behind[first] >= Fraction(1, 2) else 1 - first
        assert order.source_and_row_at(place) == (due, counts[due])
        counts[due] += 1
        assert order.counts(place + 1) == counts


@pytest.mark.parametrize(
    ("num", "bound"),
    [(1, 0), (2, 0.5), (3, 1), (7, 1.68), pytest.param(20, 1.68, marks=pytest.mark.full)],
)
def test_every_source_is_near_its_share_after_every_row(num, bound):
    worst = 0.0
    for seed in range(12):
        rates = rates_of(random.Random(seed), num)
        order, counts = Interleaving(rates), [0] * num
        for place in range(400):
            source, before = order.source_and_row_at(place)
            assert counts[source] == before, "its rows come one after the other"
            counts[source] += 1
            due = [float(rate * (place + 1) / sum(rates)) for rate in rates]
            worst = max(worst, *(abs(c - d) for c, d in zip(counts, due, strict=True)))
        assert order.counts(400) == counts
    assert worst <= bound
    fibonacci, sums = [1, 1], 0.0
    for _ in range(30):
        sums += 0.5 / fibonacci[-2]
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert sums < FIBONACCI_BOUND


def test_a_place_far_away_is_found_at_once():
    order = Interleaving([Fraction(n * n + 1, 7 * n + 3) for n in range(40)])
    far = 10**15  # counted row by row, it would take weeks
    for place in range(far, far + 100):
        source, before = order.source_and_row_at(place)
        assert order.counts(place)[source] == before


def test_weights_are_shares_of_learned_tokens_not_of_rows():
    # Rows of chat hold 10 learned tokens, rows of code 200.
    parts = {"chat": part(500, 5_000, weight=0.5), "code": part(100, 20_000, weight=0.5)}
    phase = MixturePhase(parts)
    rows = phase.count_rows_before(2_100)
    assert rows == {"chat": 2_000, "code": 100}
    assert rows["chat"] * 10 == rows["code"] * 200


def test_an_epoch_of_weights_has_as_many_learned_tokens_as_all_sources():
    parts = {"a": part(40, 1_000, weight=0.2), "b": part(10, 3_000, weight=0.8)}
    phase = MixturePhase(parts)
    assert phase.num_rows == math.ceil(0.2 * 4_000 / 25 + 0.8 * 4_000 / 300)
    at = phase.count_rows_before(phase.num_rows)
    assert abs(at["a"] * 25 - 800) <= 25
    assert abs(at["b"] * 300 - 3_200) <= 300
    # In proportion to their tokens: one pass over each, as of one file with both.
    parts = {"a": part(40, 1_000, weight=0.25), "b": part(10, 3_000, weight=0.75)}
    assert MixturePhase(parts).num_rows == 50
    assert MixturePhase(parts).count_rows_before(50) == {"a": 40, "b": 10}


def test_epochs_are_exact_whatever_the_sizes():
    draw = random.Random(1)
    for _ in range(20):
        parts = {
            name: part(draw.randint(1, 3_000), draw.randint(1, 10**6), epochs=draw.randint(1, 4))
            for name in "abcde"
        }
        phase = MixturePhase(parts)
        whole = {name: p.num_rows * p.epochs for name, p in parts.items()}
        assert phase.num_rows == sum(whole.values())
        assert phase.count_rows_before(phase.num_rows) == whole


def test_weights_like_a_third_are_taken_as_they_are_meant():
    parts = {name: part(10, 100, weight=0.333333) for name in "abc"}
    assert MixturePhase(parts).num_rows == 30
    assert MixturePhase(parts).count_rows_before(30) == dict.fromkeys("abc", 10)


def test_a_new_phase_goes_on_where_each_source_was():
    first = {"a": part(10, 100, weight=0.5), "b": part(10, 100, weight=0.5)}
    phases = [MixturePhase(first)]
    before = rows_before(phases, 7)
    assert sorted(before.values()) == [3, 4]
    second = {
        "a": part(10, 100, weight=0.9, rows_before=before["a"]),
        "c": part(10, 100, weight=0.1),
    }
    phases.append(MixturePhase(second, first_row=7, first_epoch=phases[0].epoch_at(7)))
    assert rows_before(phases, 7) == {**before, "c": 0}
    assert rows_before(phases, 17) == {"a": before["a"] + 9, "b": before["b"], "c": 1}
    assert phases[1].epoch_at(7 + phases[1].num_rows) == pytest.approx(7 / 20 + 1)
    assert phases[1].row_at(2.0) == 7 + math.ceil((2 - 7 / 20) * 20)


def test_the_order_of_phases_from_a_file_is_that_of_names():
    parts = {"b": part(10, 100, weight=0.5), "a": part(10, 100, weight=0.5)}
    values = [
        {"parts": {name: vars(p) for name, p in parts.items()}, "first_row": 0, "first_epoch": 0.0}
    ]
    (phase,) = phases_from_json(values)
    assert list(phase.parts) == ["a", "b"]
    assert phase == replace(MixturePhase(parts), parts=dict(sorted(parts.items())))
    for wrong in ([], None, [{"parts": {}, "more": 1}], [{"parts": {"a": {"content": "x"}}}]):
        with pytest.raises(ValueError, match=r"phase|validation error"):
            phases_from_json(wrong)


def test_each_place_is_used_once():
    order = Interleaving([Fraction(3), Fraction(5), Fraction(11)])
    seen = [order.source_and_row_at(place) for place in range(19 * 4)]
    assert sorted(seen) == [
        *itertools.chain.from_iterable(
            [(s, k) for k in range(4 * n)] for s, n in enumerate((3, 5, 11))
        )
    ]
