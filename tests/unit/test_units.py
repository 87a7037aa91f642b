import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_tune.units import (
    format_bytes,
    format_count,
    format_energy,
    format_quantity,
    format_seconds,
    list_some,
    parse_bytes,
    parse_memory,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        (17, 17),
        ("17B", 17),
        ("80GB", 80_000_000_000),
        ("1.5 KB", 1500),
        ("4G", 4 * 1024**3),
        ("512MiB", 512 * 1024**2),
        (" 2 TiB ", 2 * 1024**4),
        ("0.5K", 512),
    ],
)
def test_sizes_mean_what_they_say(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e9", "1,5G", "True", "4 G B"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["80", 80, "900KB", "0.5K"])
def test_a_memory_that_has_lost_its_unit_is_refused(text):
    with pytest.raises(ValueError, match="bytes of memory.*write its unit"):
        parse_memory(text)


def test_no_memory_and_a_memory_in_bytes_are_taken():
    assert [parse_memory(text) for text in ("0", 1 << 30, "80GiB")] == [0, 1 << 30, 80 << 30]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90s", 90),
        ("30m", 1800),
        ("30min", 1800),
        ("3.5h", 12_600),
        ("2 d", 172_800),
        ("03:30:00", 12_600),
        ("1-12:00:00", 129_600),
        ("0:00:07", 7),
    ],
)
def test_durations_mean_what_they_say(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-5s", "3 weeks", "1:2:3", "1e3"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="HH:MM:SS"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1567, "1.53 KiB"),
        (15 * 1024**2, "15.0 MiB"),
        (768 * 1024**3, "768 GiB"),
        (5000 * 1024**4, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_printed_with_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**50))
def test_a_printed_size_is_within_one_percent_of_the_size(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.01, abs=1)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1234, "1.2k"),
        (134_515_008, "134.5M"),
        (7e9, "7.0B"),
        (3e12, "3.0T"),
    ],
)
def test_counts_are_printed_short(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (42.4, "42s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (7500, "2h05m"),
        (360_000, "100h00m"),
    ],
)
def test_durations_are_printed_short(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0.5, "0.50 J"),
        (3590, "3590 J"),
        (3600, "1.00 Wh"),
        (3.6e6 - 1, "1.00 kWh"),
        (4.43e7, "12.3 kWh"),
        (3.6e8, "100 kWh"),
        (5.4e9, "1.50 MWh"),
    ],
)
def test_energies_have_three_digits(joules, text):
    assert format_energy(joules) == text


def test_a_long_list_is_cut_and_a_noun_follows_its_number():
    assert list_some([1, 2, 3], 3) == "1, 2, 3"
    assert list_some("abcde", 2) == "a, b and 3 more"
    assert list_some(["only"], 1) == "only"
    assert [format_quantity(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
