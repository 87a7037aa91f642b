"""Cells of a table that hold a chat in another form than a list of messages.

JSON text of messages, as files of one type per column keep them -> the messages
an object of messages and tools, or JSON text of one             -> the messages; the row's tools
"""

import json
from collections.abc import Iterable
from typing import Any

from hpc_tune.data.values import WrongRecord, is_unset, parse_json_text

# The roles of ShareGPT's turns, and what they are in a chat.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_KNOWN_ROLES = {*ROLES, "developer"}
_CHAT_FIELDS = ("messages", "conversations")


def unpack_chats(record: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return a row whose ``fields`` hold messages where they held a chat in another form.

    Raises:
        WrongRecord: if the chats have different tools, or others than the row.
    """
    found = {name: chat for name in fields if (chat := _find_chat(record.get(name))) is not None}
    row = {**record, **{name: messages for name, (messages, _) in found.items()}}
    for name, (_, tools) in found.items():
        if is_unset(tools):
            continue
        given = parse_json_text(row.get("tools"), "tools", [])
        if not is_unset(given) and given != tools:
            raise WrongRecord(f"{name} has other tools than the rest of the row; keep one of them")
        row["tools"] = tools
    return row


def parse_input(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of OpenAI's form whose input is an object, where it is JSON text of one."""
    given = record.get("input")
    inner = _parse_json(given) if isinstance(given, str) else None
    return (
        {**record, "input": inner} if isinstance(inner, dict) and _find_inner_key(inner) else record
    )


def is_chat(value: Any) -> bool:
    """Return whether a value is messages, of role and content or of from and value."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    role = value.get("role", value.get("from")) if isinstance(value, dict) else None
    return isinstance(role, str) and role in _KNOWN_ROLES


def _find_chat(value: Any) -> tuple[Any, Any] | None:
    """Return messages and tools of a chat in another form; None of what is none, or a list."""
    if isinstance(value, str):
        value = _parse_json(value)
        if is_chat(value) or (isinstance(value, dict) and _is_list_per_key(value)):
            return value, None
        if _is_message(value) and not {"content", "value"}.isdisjoint(value):
            return [value], None
    if not isinstance(value, dict) or (name := _find_inner_key(value)) is None:
        return None
    return value[name], parse_json_text(value.get("tools"), "tools", [])


def _find_inner_key(value: dict[str, Any]) -> str | None:
    return next((name for name in _CHAT_FIELDS if is_chat(value.get(name))), None)


def _is_list_per_key(value: dict[str, Any]) -> bool:
    """Return whether this is messages as one list per key, as a Sequence of datasets is."""
    roles = value.get("role", value.get("from"))
    return isinstance(roles, list) and bool(roles) and all(role in _KNOWN_ROLES for role in roles)


def _parse_json(text: str) -> Any:
    """Return what a text is as JSON; None of prose."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
