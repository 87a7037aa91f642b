"""Numbers that YAML 1.1 reads as text, such as 1e-5 and 1e3, which other tools take for numbers.

Values whose key is one of a name, a path or a column stay text.
"""

import re
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_TEXT_KEYS = re.compile(
    r"(name|path|dir|project|model|source|files|dataset|template|column)$"
    r"|^(test_)?datasets\.|^dataset\.column_map\."
)


def parse_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return values by dotted key, with numbers in place of text that is one, no null in lists."""
    return {
        key: _clean_text(value) if _TEXT_KEYS.search(key) else _parse_number(value)
        for key, value in values.items()
    }


def _clean_text(value: Any) -> Any:
    """Return a name or names as they are, without null in a list; other values with numbers."""
    if isinstance(value, list):
        return [
            item if isinstance(item, str) else _parse_number(item)
            for item in value
            if item is not None
        ]
    return value if isinstance(value, str) else _parse_number(value)


def _parse_number(value: Any) -> Any:
    if isinstance(value, list):
        return [_parse_number(item) for item in value if item is not None]
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    number = float(value)
    return int(number) if number.is_integer() and "." not in value else number
