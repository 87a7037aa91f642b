"""Parse and print bytes, counts and durations."""

import re
from collections.abc import Iterable

_BYTE_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
    **{p: 1024**i for i, p in enumerate("KMGT", 1)},
}
_SECOND_FACTORS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MIN_MEMORY_BYTES = 10**6
_CLOCK_PATTERN = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")


def parse_bytes(text: str | int) -> int:
    """Return the bytes named by ``"512MiB"``, ``"80GB"``, ``"4G"`` (binary) or a plain number.

    Raises:
        ValueError: if the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    factor = _BYTE_FACTORS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write a number with B, KB, MiB, GB, GiB ...")
    return int(float(match[1]) * factor)


def parse_memory(text: str | int) -> int:
    """Return the bytes of an amount of memory; refuse a number whose unit was forgotten.

    Raises:
        ValueError: if the text is not a size, or too small for any machine.
    """
    num_bytes = parse_bytes(text)
    if 0 < num_bytes < _MIN_MEMORY_BYTES:
        raise ValueError(
            f"{text} is {num_bytes} bytes of memory, less than any run takes; write its unit, such "
            "as 64GiB"
        )
    return num_bytes


def parse_seconds(text: str | int | float) -> float:
    """Return the seconds named by ``"90s"``, ``"30m"``, ``"3.5h"``, ``"1-12:00:00"`` or a number.

    Raises:
        ValueError: if the text is not a duration.
    """
    clock = _CLOCK_PATTERN.fullmatch(str(text).strip())
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text))
    factor = _SECOND_FACTORS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 30m, 3.5h or [DAYS-]HH:MM:SS")
    return float(match[1]) * factor


def format_bytes(num_bytes: float) -> str:
    """Format a size in binary units with three digits, such as ``"1.46 GiB"``."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{sign}{size:.{digits}f} {unit}"


def format_count(count: float) -> str:
    """Format a count, such as ``"134.5M"`` or ``"1.2k"``."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.1f}{suffix}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as ``"42s"``, ``"3m20s"`` or ``"2h05m"``."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"


def format_energy(joules: float) -> str:
    """Format an energy with three digits, such as ``"1.23 kWh"``; below 1 Wh in joules."""
    for size, unit in ((3.6e9, "MWh"), (3.6e6, "kWh"), (3.6e3, "Wh")):
        if joules >= 0.9995 * size:
            return f"{joules / size:.{_num_decimals(joules / size)}f} {unit}"
    return f"{joules:.{_num_decimals(joules)}f} J"


def format_quantity(number: int, noun: str) -> str:
    """Format a number with its noun, such as ``"1 rank"`` or ``"3 ranks"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def list_some(items: Iterable[object], limit: int, separator: str = "") -> str:
    """List the first ``limit`` items and how many more there are, such as ``"a, b and 3 more"``.

    ``separator`` replaces the comma between items, and the space before "and".
    """
    texts = list(map(str, items))
    suffix = f"{separator or ' '}and {len(texts) - limit} more" if len(texts) > limit else ""
    return (separator or ", ").join(texts[:limit]) + suffix


def _num_decimals(value: float) -> int:
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2
