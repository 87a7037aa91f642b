"""Tools and calls of tools in records, in the form that chat templates expect.

    tools, functions (OpenAI's older name)           -> a list of {type, function}
    tool_calls, function_call (OpenAI's older form)  -> a list of {type, function: {name, ...}}

Either may be JSON as text, as files of one type per column hold them. Arguments become an object:
templates write them as JSON, but for a few that want a text.
"""

import json
from collections.abc import Sequence
from typing import Any

from hpc_tune.data.values import (
    WrongRecord,
    format_value,
    is_unset,
    json_type_name,
    parse_json_text,
)

_ARGUMENTS = ("arguments", "parameters")  # the latter as Llama 3 writes them
# Where a null is a value of a JSON schema; elsewhere in one it fills a key that others have.
_NULLABLE_KEYS = ("default", "const", "example")


def read_tools(record: dict[str, Any]) -> list[Any] | None:
    """Return the tools of a row for the template; None without any.

    Raises:
        WrongRecord: if they are no list, or two different ones.
    """
    tools = [_read_tool(tool) for tool in _read_list(record, "tools")]
    functions = [
        {"type": "function", "function": _read_tool(function)}
        for function in _read_list(record, "functions")
    ]
    if tools and functions and _unwrap_functions(tools) != _unwrap_functions(functions):
        raise WrongRecord("tools and functions are there, and they differ; keep one of them")
    return tools or functions or None


def read_calls(
    message: dict[str, Any], tools: list[Any] | None, where: str
) -> list[dict[str, Any]]:
    """Return the calls of a message.

    Raises:
        WrongRecord: if one has no name, or tool_calls and function_call differ.
    """
    given = parse_json_text(message.get("tool_calls"), f"{where}: tool_calls", [])
    if not is_unset(given) and not isinstance(given, list):
        raise WrongRecord(f"{where}: tool_calls is {json_type_name(given)}, expected a list")
    calls = [_read_call(call, where) for call in given or ()]
    older = parse_json_text(message.get("function_call"), f"{where}: function_call", None)
    if not is_unset(older):
        call = _read_call({"type": "function", "function": older}, where)
        if calls and _unwrap_functions(calls) != _unwrap_functions([call]):
            raise WrongRecord(
                f"{where}: tool_calls and function_call are there, and they differ; keep one"
            )
        calls = calls or [call]
    known = {
        function["name"]: (function.get("parameters") or {}).get("properties")
        for function in _unwrap_functions(tools or [])
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    }
    for call in calls:
        function = call.get("function", call)
        properties = known.get(function["name"])
        if isinstance(properties, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = {
                name: value
                for name, value in function["arguments"].items()
                if value is not None or name in properties
            }
    return calls


def serialise_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have their arguments as JSON in a text."""
    return [
        {**message, "tool_calls": [_serialise_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _serialise_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if isinstance(function.get("arguments"), dict):
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function = {**function, "arguments": text}
    return {**call, "function": function} if "function" in call else function


def _read_list(record: dict[str, Any], field: str) -> list[Any]:
    tools = parse_json_text(record.get(field), field, [])
    if tools and not isinstance(tools, list):
        raise WrongRecord(f"{field} is {json_type_name(tools)}, expected a list")
    return tools or []


def _read_tool(tool: Any) -> Any:
    try:
        return _without_nulls(parse_json_text(tool, "a tool", {}))
    except RecursionError:
        raise WrongRecord("nested too deeply") from None


def _unwrap_functions(entries: list[Any]) -> list[Any]:
    return [(e.get("function") or e) if isinstance(e, dict) else e for e in entries]


def _without_nulls(value: Any) -> Any:
    """Drop the keys of a schema that are null because other tools of the file have them."""
    if isinstance(value, dict):
        return {
            key: item if key in _NULLABLE_KEYS else _without_nulls(item)
            for key, item in value.items()
            if item is not None or key in _NULLABLE_KEYS
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_call(given: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool as new objects, with its arguments as an object."""
    entries = given.items() if isinstance(given, dict) else ()
    call = {k: v for k, v in entries if k in _ARGUMENTS or not is_unset(v)}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WrongRecord(
            f"{where}: a tool call is {format_value(given)}, expected a name and arguments"
        )
    function = dict(function)
    for field in _ARGUMENTS:
        if field in function:
            arguments = parse_json_text(function.pop(field), f"{where}: {field}", {})
            function["arguments"] = {} if arguments is None else arguments
            break
    return {**call, "function": function} if "function" in call else function
