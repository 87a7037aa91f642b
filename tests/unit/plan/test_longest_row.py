"""The longest row that fits, searched with few traces."""

import pytest

from hpc_tune.plan.memory_model import _find_longest_row_len


@pytest.mark.parametrize("power", [1, 1.2, 2])
@pytest.mark.parametrize("allowed", [70, 2_000, 40_000])
def test_the_longest_row_is_found_with_few_traces(power, allowed):
    traced = []

    def spare_bytes_at(length):
        traced.append(length)
        return int(allowed**power - length**power)

    longest = _find_longest_row_len(spare_bytes_at, {65_536: int(allowed**power - 65_536**power)})
    if allowed < 1024:
        assert longest == 0
    else:
        assert longest <= allowed < 1.05 * longest
    assert len(set(traced)) <= (7 if power < 2 else 13)


def test_above_a_length_that_does_not_fit_by_chance_a_longer_one_is_found():
    """What a heap reaches dips: 7,546 tokens fit, though 7,140 do not."""
    traced = []

    def spare_bytes_at(length):
        traced.append(length)
        return 7_000 - length + (1_500 if 7_300 <= length < 8_000 else 0)

    longest = _find_longest_row_len(spare_bytes_at, {65_536: spare_bytes_at(65_536)})
    assert spare_bytes_at(longest) >= 0
    assert spare_bytes_at(longest * 11 // 10) < 0
    assert any(spare_bytes_at(length) < 0 for length in traced if length < longest)
    assert len(set(traced)) <= 7


def test_no_length_is_tried_beyond_the_one_that_is_known_not_to_fit():
    def spare_bytes_at(length):
        assert length < 64_000
        return 63_999 - length

    assert _find_longest_row_len(spare_bytes_at, {64_000: -1}) >= 60_000
