"""Values of records as messages name them, and what is raised for a wrong one."""

import json
from typing import Any


class WrongRecord(ValueError):
    """A record that is no example; the reader adds file and line to the message."""


def parse_json_text(value: Any, where: str, blank: Any) -> Any:
    """Return what a text holds as JSON, ``blank`` if it is blank; what is no text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else blank
    except (ValueError, RecursionError) as error:
        raise WrongRecord(
            f"{where} is text that is not JSON ({error}): {format_value(value)}"
        ) from error


def is_unset(value: Any) -> bool:
    """Return whether a value is null or empty: what tools write under keys that say nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def json_type_name(value: Any) -> str:
    """Return what kind of JSON value this is."""
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    name = names.get(type(value), "number")
    return f"empty {name}" if value in ([], {}, "") else name


def format_value(value: Any) -> str:
    """Return a value as JSON, cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_fields(record: dict[str, Any]) -> str:
    """Return the fields of a row, and which of them have no value."""
    if not record:
        return "no fields"
    empty = [str(name) for name, value in record.items() if value is None]
    nulls = f" ({', '.join(empty)} without a value)" if empty else ""
    return f"the fields {', '.join(map(str, record))}{nulls}"
