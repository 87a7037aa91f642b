"""Fields of records: their names, how their values are read and quoted, and ``WrongRecord``."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# Fields by what they hold; FORMS in records.py says which form of a row has them.
CHAT_FIELDS = ("messages", "conversations")
CHOSEN_FIELDS = ("chosen", "chosen_response", "preferred_output")
REJECTED_FIELDS = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
LABEL_FIELDS = ("label", "kto_tag")
PREFERENCE_FIELDS = ("chosen", "rejected", "kto_tag")  # any one of them marks a row of preferences


class WrongRecord(ValueError):
    """A record that is not a valid example; the reader adds file and line to the message."""


def require_object(record: Any) -> None:
    """Refuse a row that has no fields.

    Raises:
        WrongRecord: if it is not an object.
    """
    if not isinstance(record, dict):
        raise WrongRecord(f"found a JSON {json_type_name(record)}, expected an object with fields")


def parse_json_text(value: Any, location: str, blank_value: Any) -> Any:
    """Parse a text as JSON, with ``blank_value`` for blank text; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else blank_value
    except (ValueError, RecursionError) as error:
        raise WrongRecord(
            f"{location} is text that is not JSON ({error}): {format_value(value)}"
        ) from error


def is_unset(value: Any) -> bool:
    """Return whether a value is null or empty, as tools write it for keys without a value."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def json_type_name(value: Any) -> str:
    """Return what kind of JSON value this is."""
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    name = names.get(type(value), "number")
    return f"empty {name}" if value in ([], {}, "") else name


def format_value(value: Any) -> str:
    """Return a value as JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_fields(record: dict[str, Any]) -> str:
    """Return the fields of a row, and which of them have no value."""
    if not record:
        return "no fields"
    empty = [str(name) for name, value in record.items() if value is None]
    nulls = f" ({', '.join(empty)} without a value)" if empty else ""
    return f"the fields {', '.join(map(str, record))}{nulls}"


# -- Marks of a row or a turn: whether it is learned, and with which weight in the loss.
#
# OpenAI, Mistral   weight            0 or 1, on turns of the assistant
# ms-swift          loss, loss_scale  whether it is learned; its weight
# axolotl, verl     train, training; loss_mask


_NUMERIC_WEIGHT_FIELDS = ("weight", "loss_scale")
LOSS_WEIGHT_FIELDS = (*_NUMERIC_WEIGHT_FIELDS, "train", "training", "loss", "loss_mask")
# Advantages of reinforcement learning, which are not read: see docs/data.md.
ADVANTAGE_FIELDS = ("advantage", "advantages")


def read_loss_weight(fields: dict[str, Any], location: str) -> float | None:
    """Return the weight in the loss that a turn's, or a row's, own marks give it; None without any.

    Raises:
        WrongRecord: if a mark is not a valid number, or two of them contradict each other.
    """
    marks = {n: fields[n] for n in LOSS_WEIGHT_FIELDS if not is_unset(fields.get(n))}
    weights = {n: _parse_loss_weight(n, value, location) for n, value in marks.items()}
    # A mark that only says "learned" leaves the weight to the other marks.
    values = {weights[n] for n in _NUMERIC_WEIGHT_FIELDS if n in weights} or set(weights.values())
    if len(values) > 1 or len(set(map(bool, weights.values()))) > 1:
        raise WrongRecord(f"{location}: {' and '.join(marks)} contradict each other")
    return values.pop() if values else None


def _parse_loss_weight(name: str, value: Any, location: str) -> float:
    if name not in _NUMERIC_WEIGHT_FIELDS:
        if value not in (0, 1):
            raise WrongRecord(
                f"{location}: {name} is {format_value(value)}, expected 0 or 1, false or true: an "
                "answer is learned or not; weight says how much it counts"
            )
        return float(value)
    if isinstance(value, int | float):
        with np.errstate(over="ignore", under="ignore"):
            stored_weight = float(np.float32(min(value, 1e300)))  # as it is kept in prepared data
        if value == 0 or 0 < stored_weight < float("inf"):
            return stored_weight
    raise WrongRecord(
        f"{location}: {name} is {format_value(value)}, expected a number from 0 on: how much it "
        "counts in the loss (0: not learned; 1: as without a weight)"
    )


def refuse_advantages(record: dict[str, Any]) -> None:
    """Refuse a row with a reinforcement-learning advantage.

    Raises:
        WrongRecord: if it has one.
    """
    if fields := [name for name in ADVANTAGE_FIELDS if record.get(name) is not None]:
        raise WrongRecord(
            f"{fields[0]}: advantages belong to reinforcement learning, where each update needs "
            "the probabilities with which the answers were sampled; they are not used here. "
            "Keep the best answers, or give each a weight from 0 on (data.columns="
            f"{{{fields[0]}: weight}} if none is negative), or remove the field"
        )


# -- Tools and tool calls in records, in the form that chat templates expect.
#
#     tools, functions (OpenAI's older name)           -> a list of {type, function}
#     tool_calls, function_call (OpenAI's older form)  -> a list of {type, function: {name, ...}}
#
# Either may be a JSON string, as in files with one type per column. Arguments become an object:
# most templates write it as JSON, a few want a string.


_ARGUMENT_KEYS = ("arguments", "parameters")  # the latter is Llama 3's name
# Keys of a JSON schema where null is a value; elsewhere it fills a key that other tools have.
_NULLABLE_KEYS = ("default", "const", "example")


def read_tools(record: dict[str, Any]) -> list[Any] | None:
    """Return the tools of a row for the template; None without any.

    Raises:
        WrongRecord: if they are not a list, or not JSON, or tools and functions differ.
    """
    tools = [_read_tool(tool) for tool in _read_list(record, "tools")]
    functions = [
        {"type": "function", "function": _read_tool(function)}
        for function in _read_list(record, "functions")
    ]
    if tools and functions and _unwrap_functions(tools) != _unwrap_functions(functions):
        raise WrongRecord("tools and functions are both given, and differ; keep one of them")
    return tools or functions or None


def read_tool_calls(
    message: dict[str, Any], tools: list[Any] | None, location: str
) -> list[dict[str, Any]]:
    """Return the tool calls of a message, without null arguments that ``tools`` do not define.

    Raises:
        WrongRecord: if they are not JSON or not a list, one has no name, or tool_calls and
            function_call differ.
    """
    raw_calls = parse_json_text(message.get("tool_calls"), f"{location}: tool_calls", [])
    if not is_unset(raw_calls) and not isinstance(raw_calls, list):
        raise WrongRecord(f"{location}: tool_calls is {json_type_name(raw_calls)}, expected a list")
    calls = [_read_tool_call(call, location) for call in raw_calls or ()]
    legacy_call = parse_json_text(message.get("function_call"), f"{location}: function_call", None)
    if not is_unset(legacy_call):
        call = _read_tool_call({"type": "function", "function": legacy_call}, location)
        if calls and _unwrap_functions(calls) != _unwrap_functions([call]):
            raise WrongRecord(
                f"{location}: tool_calls and function_call are both given, and differ; keep one"
            )
        calls = calls or [call]
    tool_properties = {
        function["name"]: (function.get("parameters") or {}).get("properties")
        for function in _unwrap_functions(tools or [])
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    }
    for call in calls:
        function = call.get("function", call)
        properties = tool_properties.get(function["name"])
        if isinstance(properties, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = {
                name: value
                for name, value in function["arguments"].items()
                if value is not None or name in properties
            }
    return calls


def serialize_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of their calls as JSON strings."""
    return [
        {**message, "tool_calls": [_serialize_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _serialize_call(call: dict[str, Any]) -> dict[str, Any]:
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
    parsed_tool = _parse_schema(tool, "a tool")
    [function] = _unwrap_functions([parsed_tool])
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if isinstance(parameters, str) and parameters:
        parameters = _parse_schema(parameters, "a tool's parameters")
        function["parameters"] = parameters = {} if parameters is None else parameters
    if not is_unset(parameters) and not isinstance(parameters, dict):
        raise WrongRecord(
            f"a tool's parameters is {json_type_name(parameters)}, expected an object"
        )
    return parsed_tool


def _parse_schema(value: Any, location: str) -> Any:
    """Return a tool or its parameters, which may be JSON text, without keys that are null."""
    try:
        return _drop_null_keys(parse_json_text(value, location, {}))
    except RecursionError:
        raise WrongRecord("nested too deeply") from None


def _unwrap_functions(entries: list[Any]) -> list[Any]:
    return [(e.get("function") or e) if isinstance(e, dict) else e for e in entries]


def _drop_null_keys(value: Any) -> Any:
    """Drop the keys of a schema that are null because other tools of the file have them."""
    if isinstance(value, dict):
        return {
            key: item if key in _NULLABLE_KEYS else _drop_null_keys(item)
            for key, item in value.items()
            if item is not None or key in _NULLABLE_KEYS
        }
    return [_drop_null_keys(item) for item in value] if isinstance(value, list) else value


def _read_tool_call(raw_call: Any, location: str) -> dict[str, Any]:
    """Return a tool call as new objects, with its arguments as an object."""
    entries = raw_call.items() if isinstance(raw_call, dict) else ()
    call = {k: v for k, v in entries if k in _ARGUMENT_KEYS or not is_unset(v)}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WrongRecord(
            f"{location}: a tool call is {format_value(raw_call)}, expected a name and arguments"
        )
    function = dict(function)
    for field in _ARGUMENT_KEYS:
        if field in function:
            arguments = parse_json_text(function.pop(field), f"{location}: {field}", {})
            function["arguments"] = {} if arguments is None else arguments
            break
    return {**call, "function": function} if "function" in call else function


# -- Fields that hold a chat in a form other than a list of messages.
#
# a JSON string of messages, as in files with one type per column -> the messages
# an object with messages and tools, or a JSON string of one      -> the messages; the row's tools


# The roles of ShareGPT's turns, and the chat roles that they become.
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


def unpack_chats(record: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return a row with chats of other forms in ``fields`` converted to lists of messages.

    Raises:
        WrongRecord: if the chats have different tools, or other tools than the row.
    """
    chats = {name: chat for name in fields if (chat := _find_chat(record.get(name))) is not None}
    row = {**record, **{name: messages for name, (messages, _) in chats.items()}}
    for name, (_, tools) in chats.items():
        if is_unset(tools):
            continue
        row_tools = parse_json_text(row.get("tools"), "tools", [])
        if not is_unset(row_tools) and row_tools != tools:
            raise WrongRecord(f"{name} has other tools than the rest of the row; keep one of them")
        row["tools"] = tools
    return row


def parse_input_field(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of OpenAI's form with ``input`` as an object, if it is a JSON string of one."""
    raw_input = record.get("input")
    data = _parse_json(raw_input) if isinstance(raw_input, str) else None
    return {**record, "input": data} if isinstance(data, dict) and _find_chat_key(data) else record


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, with role and content or from and value."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    role = value.get("role", value.get("from")) if isinstance(value, dict) else None
    return isinstance(role, str) and role in _KNOWN_ROLES


def _find_chat(value: Any) -> tuple[Any, Any] | None:
    """Return messages and tools of a chat in another form; None for a list, or if it is no chat."""
    if isinstance(value, str):
        value = _parse_json(value)
        if is_chat(value) or (isinstance(value, dict) and _is_columnar_chat(value)):
            return value, None
        if _is_message(value) and not {"content", "value"}.isdisjoint(value):
            return [value], None
    if not isinstance(value, dict) or (name := _find_chat_key(value)) is None:
        return None
    return value[name], parse_json_text(value.get("tools"), "tools", [])


def _find_chat_key(value: dict[str, Any]) -> str | None:
    return next((name for name in CHAT_FIELDS if is_chat(value.get(name))), None)


def _is_columnar_chat(value: dict[str, Any]) -> bool:
    """Return whether this is messages as one list per key, as datasets stores a Sequence."""
    roles = value.get("role", value.get("from"))
    return isinstance(roles, list) and bool(roles) and all(role in _KNOWN_ROLES for role in roles)


def _parse_json(text: str) -> Any:
    """Parse a text that looks like a JSON list or object; None for other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
