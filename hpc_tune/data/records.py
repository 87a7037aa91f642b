"""One record of raw data -> one example: which fields are known, and what they must hold."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLUMNS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text",
    "tools", "system",
)  # fmt: skip
_EXPECTED = (
    "expected one of: messages (chat), conversations (ShareGPT), instruction and output (alpaca),"
    " prompt and completion, text"
)
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class WrongRecord(ValueError):
    """A record that is no example; the reader adds the place to the message."""


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template, with whatever further keys they carry."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to be learned after it.

    ``plain_prompt`` takes the prompt's place where the tokenizer has no chat template.
    """

    prompt: str
    completion: str
    plain_prompt: str
    system: str = ""


@dataclass(frozen=True)
class Text:
    """Plain text, learned as a whole; a part of a longer one says whether it begins and ends it."""

    text: str
    begins: bool = True
    ends: bool = True


Example = Chat | Completion | Text


def to_example(record: Any) -> Example:
    """Turn a record into an example, by the first known field that it has.

    Raises:
        WrongRecord: if it is no object, has none of the known fields, or one of the wrong type.
    """
    if not isinstance(record, dict):
        raise WrongRecord(f"found a JSON {_name(record)}, expected an object with fields")
    readers: dict[str, Callable[[dict[str, Any]], Example]] = {
        "messages": _chat,
        "conversations": _sharegpt,
        "instruction": _alpaca,
        "prompt": _completion,
        "text": lambda fields: Text(_string(fields, "text")),
    }
    for field, reader in readers.items():
        if record.get(field) is not None:
            return reader(record)
    found = ", ".join(map(str, record)) or "no fields"
    raise WrongRecord(f"found the fields {found}; {_EXPECTED}")


def _chat(record: dict[str, Any]) -> Chat:
    return Chat(_messages(record["messages"], "messages"), _tools(record))


def _messages(messages: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise WrongRecord(
            f"{field} is {_name(messages)}, expected a list with at least one message"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongRecord(
                f"{field}: message {number} is {_shown(message)}, expected an object with role and"
                " content"
            )
        if "content" not in message and "tool_calls" not in message:
            raise WrongRecord(f"{field}: message {number} ({message['role']}) has no content")
    return messages


def _sharegpt(record: dict[str, Any]) -> Chat:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise WrongRecord(f"conversations is {_name(turns)}, expected a list with turns")
    if isinstance(turns[0], dict) and "role" in turns[0]:
        return Chat(_messages(turns, "conversations"), _tools(record))
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": _string(record, "system")})
    for number, turn in enumerate(turns, 1):
        role = _SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise WrongRecord(
                f"conversations: turn {number} is {_shown(turn)}, expected from (one of"
                f" {', '.join(_SHAREGPT_ROLES)}) and value (text)"
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": role, "content": turn["value"], **others})
    return Chat(messages, _tools(record))


def _alpaca(record: dict[str, Any]) -> Completion:
    instruction, output = _string(record, "instruction"), _string(record, "output")
    given = _string(record, "input") if record.get("input") else ""
    plain = f"Carry out the task that follows.\n\n### Instruction:\n{instruction}\n\n"
    if given:
        plain += f"### Input:\n{given}\n\n"
    return Completion(
        prompt=f"{instruction}\n\n{given}" if given else instruction,
        completion=output,
        plain_prompt=f"{plain}### Response:\n",
        system=_string(record, "system") if record.get("system") else "",
    )


def _completion(record: dict[str, Any]) -> Example:
    if isinstance(record["prompt"], list):
        prompt = _messages(record["prompt"], "prompt")
        return Chat(prompt + _messages(record.get("completion"), "completion"), _tools(record))
    prompt_text, completion = _string(record, "prompt"), _string(record, "completion")
    system = _string(record, "system") if record.get("system") else ""
    return Completion(prompt_text, completion, plain_prompt=prompt_text, system=system)


def _tools(record: dict[str, Any]) -> list[Any] | None:
    """Return the tools for the template; files of one type per column hold them as JSON text."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise WrongRecord(f"tools is text that is not JSON ({error.msg})") from error
    if tools and not isinstance(tools, list):
        raise WrongRecord(f"tools is {_name(tools)}, expected a list")
    return tools or None


def _string(record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise WrongRecord(
            f"found the fields {', '.join(record)}, but {field} is missing; {_EXPECTED}"
        )
    if not isinstance(record[field], str):
        raise WrongRecord(f"{field} is {_name(record[field])}, expected text")
    return record[field]


def _name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    name = names.get(type(value), "number")
    return f"empty {name}" if value in ([], {}, "") else name


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
