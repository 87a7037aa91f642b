"""One record of raw data -> one example: which fields are known, and what they must hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpc_tune.data.calls import calls_of, tools_of
from hpc_tune.data.cells import ROLES, is_chat, opened
from hpc_tune.data.marks import MARKS, weight_of
from hpc_tune.data.values import WrongRecord, fields_of, from_json, is_unset, name_of, shown

EXPECTED = (
    "expected one of: messages (chat), conversations (ShareGPT), instruction and output (alpaca),"
    " prompt and completion, text; data.columns={NAME: prompt, OTHER: completion} names fields that"
    " are called something else"
)
# Turns that are calls of tools as JSON text: of LLaMA-Factory, of ms-swift.
_CALLS = ("function_call", "tool_call")
_BLANK = [("messages", ""), ("conversations", "")]
_CALL_KEYS = ("tool_calls", "function_call")
PREFERENCES = ("chosen", "rejected", "kto_tag")


class NotLearned(Exception):
    """A record that is marked as not to be learned."""


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template, with whatever further keys they carry.

    ``unlearned``: numbers of messages of the assistant whose data say that they are not learned.
    ``weight``: what it counts in the loss, and ``weights`` what messages count that have their own.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    unlearned: frozenset[int] = frozenset()
    weight: float = 1.0
    weights: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A prompt and the answer that is to be learned.

    ``plain_prompt`` replaces the prompt where the tokenizer has no chat template. ``history``:
    earlier questions and answers, in order, and ``plain_answers`` their answers' characters in it:
    without these they are not learned. ``weight``: what it counts in the loss.
    """

    prompt: str
    completion: str
    plain_prompt: str
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    plain_answers: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0

    def messages(self) -> list[dict[str, Any]]:
        """Return the system prompt, all questions and all answers as messages of a chat."""
        turns = [("system", self.system)] if self.system else []
        for question, answer in (*self.history, (self.prompt, self.completion)):
            turns += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": text} for role, text in turns]

    def as_chat(self, tools: list[Any] | None = None) -> Chat:
        """Return all of it as a chat."""
        messages = self.messages()
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        earlier = () if self.plain_answers else answers[:-1]
        return Chat(messages, tools, frozenset(earlier), self.weight)


@dataclass(frozen=True)
class Text:
    """Plain text, learned as a whole; ``begins`` and ``ends`` the text that it may be a part of."""

    text: str
    begins: bool = True
    ends: bool = True
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token numbers of a document, learned as a whole, which stands at ``where``."""

    numbers: np.ndarray
    where: str


Example = Chat | Completion | Text


def to_example(record: Any) -> Example:
    """Turn a record into an example, by the first known field that it has.

    Raises:
        WrongRecord: if it is no object, has none of the known fields, or one of the wrong type.
        NotLearned: if it is marked so as a whole.
    """
    if not isinstance(record, dict):
        raise WrongRecord(f"found a JSON {name_of(record)}, expected an object with fields")
    readers: dict[str, Callable[[dict[str, Any]], Example]] = {
        "messages": lambda fields: _dialogue(fields, "messages"),
        "conversations": lambda fields: _dialogue(fields, "conversations"),
        "instruction": _alpaca,
        "prompt": _completion,
        "text": lambda fields: Text(_string(fields, "text")),
    }
    _refuse_preferences(record)
    record = _opened(record)
    fields = [f for f in readers if record.get(f) is not None and (f, record[f]) not in _BLANK]
    if fields:
        field = next((field for field in fields if record[field] != []), fields[0])
        return _marked(readers[field](record), record)
    raise WrongRecord(f"found {fields_of(record)}; {_known_form(record) or EXPECTED}")


def _opened(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose chats in other forms are messages.

    A completion that is the text of a chat, but of no answer, stays text after a prompt as text.
    """
    record = opened(record, ("messages", "conversations"))
    both = opened(record, ("prompt", "completion"))
    are_messages = is_chat(both.get("prompt")) or _role(both.get("completion"), 0) == "assistant"
    return both if are_messages else record


def _known_form(record: dict[str, Any]) -> str:
    """Return what to do with a record of a form that others read; empty if it is none."""
    if "input_ids" in record:
        return (
            "rows of token numbers are of one tokenizer, and which they are is not said in them: "
            "give the text or the messages that they were made of"
        )
    lists = [key for key, value in record.items() if isinstance(value, list) and value]
    rows = next((key for key in lists if _is_known(record[key][0])), None)
    return f"its rows are the list in {rows}: write that as a file of its own" if rows else ""


def _is_known(record: Any) -> bool:
    try:
        to_example(record)
    except WrongRecord:
        return False
    except NotLearned:
        return True
    return True


def _marked(example: Example, record: dict[str, Any]) -> Example:
    """Apply a row's own mark for learning, and add its tools; chats have done so already."""
    if isinstance(example, Chat):
        return example
    weight = weight_of(record, "the row")
    if weight == 0:
        raise NotLearned
    if weight is not None:
        example = replace(example, weight=weight)
    if isinstance(example, Text) or not (tools := tools_of(record)):
        return example
    return example.as_chat(tools)


def _refuse_preferences(record: dict[str, Any]) -> None:
    """Refuse rows for preference tuning: half of their answers are examples of what not to say."""
    fields = [name for name in PREFERENCES if record.get(name) is not None]
    answers = ("completion", "output", "messages", "conversations")
    if isinstance(record.get("label"), bool) and any(record.get(name) for name in answers):
        fields.append("label")
    if fields:
        raise WrongRecord(
            f"{' and '.join(fields)}: rows of preferences are not for this kind of tuning:"
            " tune.objective=dpo (or kto) trains on them; else say what is to be learned:"
            f" data.columns={{{_columns_of(record)}}}"
        )


def _columns_of(record: dict[str, Any]) -> str:
    """Return the columns by which the better answers of a row of preferences are learned."""
    answers = ("chosen", "output", "completion", "response")
    record = opened(record, ("messages", "conversations", *answers))
    has = [name for name, value in record.items() if not is_unset(value)]
    whole = next((name for name in ("messages", "conversations") if name in has), None)
    answer = next((name for name in answers if name in has), "ANSWER")
    if whole is not None and _role(record[whole], -1) == "assistant":
        return f"{whole}: {whole}"
    if _role(record.get(answer), 0) not in ("", "assistant"):
        return f"{answer}: messages"
    if "instruction" in has and whole is None:
        return f"instruction: instruction, {answer}: output"
    prompts = (whole, "prompt", "question", "query", "input")
    if (prompt := next((name for name in prompts if name in has), None)) is None:
        return f"{answer}: text"
    return f"{prompt}: prompt, {answer}: completion"


def _role(messages: Any, at: int) -> str:
    """Return the role of a message, as templates know it; empty where there are no messages."""
    message = messages[at] if isinstance(messages, list) and messages else messages
    role = message.get("role", message.get("from")) if isinstance(message, dict) else ""
    role = role[at] if isinstance(role, list) and role else role  # one list per key
    return ROLES.get(str(role), str(role))


def _as_chat(messages: list[dict[str, Any]], field: str, record: dict[str, Any]) -> Chat:
    """Bring messages to the form that chat templates expect."""
    checked, unlearned, tools = [], set(), tools_of(record)
    row, weights = weight_of(record, "the row"), {}
    for number, message in enumerate(messages):
        where = f"{field}: message {number + 1} ({message['role']})"
        own = weight_of(message, where)
        if own and message["role"] != "assistant":
            raise WrongRecord(
                f"{where} is marked to be learned; only the assistant's are, or all text with "
                "data.loss_on=all: take the mark away"
            )
        if message["role"] == "assistant" and (row if own is None else own) == 0:
            unlearned.add(number)
        elif own is not None and own not in (0, 1):
            weights[number] = own * (row or 1.0)
        # A template asks whether a key is there, and others' rows have it.
        plain = {
            key: value
            for key, value in message.items()
            if key == "content" or not (key in (*MARKS, *_CALL_KEYS) or is_unset(value))
        }
        if "content" in plain:
            plain["content"] = _content(plain["content"], where)
        if calls := calls_of(message, tools, where):
            plain["tool_calls"] = calls
        if plain["role"] == "function":  # OpenAI's older name
            plain["role"] = "tool"
        checked.append(plain)
    return Chat(checked, tools, frozenset(unlearned), row or 1.0, weights)


def _content(content: Any, where: str) -> str | None:
    """Return the text of a message, parts of text joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WrongRecord(f"{where}: content is {name_of(content)}, expected text")
    texts = []
    for part in content:
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind != "text":
                raise WrongRecord(
                    f"{where}: a part of its content is of type {kind}; only text is learned"
                )
            part = part.get("text")
        if not isinstance(part, str):
            raise WrongRecord(f"{where}: a part of its content is {name_of(part)}, expected text")
        texts.append(part)
    return "".join(texts)


def _not_empty(messages: Any, field: str) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise WrongRecord(
            f"{field} is {name_of(messages)}, expected a list with at least one message"
        )
    return messages


def _messages(messages: Any, field: str) -> list[dict[str, Any]]:
    """Check a list of messages, each with a role and with content or calls of tools."""
    for number, message in enumerate(_not_empty(messages, field), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongRecord(
                f"{field}: message {number} is {shown(message)}, expected an object with role and"
                " content"
            )
        if "content" not in message and all(is_unset(message.get(key)) for key in _CALL_KEYS):
            raise WrongRecord(f"{field}: message {number} ({message['role']}) has no content")
    return messages


def _dialogue(record: dict[str, Any], field: str) -> Chat:
    """Read turns of role and content, or ShareGPT's of from and value, in either field."""
    turns = turns_of(record[field], field)
    return _as_chat(_with_system(turns, field, record), field, record)


def turns_of(value: Any, field: str) -> list[dict[str, Any]]:
    """Return turns as messages, each with a role and with content or calls of tools.

    Raises:
        WrongRecord: if they are none.
    """
    turns = from_json(value, field, [])
    if isinstance(turns, dict):
        turns = _rows_of(turns, field)
    first = _not_empty(turns, field)[0]
    if isinstance(first, dict) and first.get("from") is not None and first.get("role") is None:
        turns = [_turn(turn, number, field) for number, turn in enumerate(turns, 1)]
    return _messages(_with_calls(turns, field), field)


def _with_system(
    messages: list[dict[str, Any]], field: str, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """Put the system message that is a field of its own in front of the others."""
    if not (system := _optional(record, "system")):
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise WrongRecord(
            f"{field} begins with a system message, and system is another one; keep one of them"
        )
    return messages


def _rows_of(columns: dict[str, Any], field: str) -> list[Any]:
    """Return turns that are stored as one list per key, as a Sequence of datasets is."""
    lists = [values for values in columns.values() if isinstance(values, list)]
    if len(lists) < len(columns) or len({len(values) for values in lists}) != 1:
        raise WrongRecord(f"{field} is {name_of(columns)}, expected a list with messages")
    turns = [dict(zip(columns, turn, strict=True)) for turn in zip(*lists, strict=True)]
    return [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns]


def _turn(turn: Any, number: int, field: str) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message."""
    role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        raise WrongRecord(
            f"{field}: turn {number} is {shown(turn)}, expected from (one of"
            f" {', '.join(ROLES)}) and value (text)"
        )
    named = ("from", "value", "role", "content")
    others = {key: value for key, value in turn.items() if key not in named}
    role = turn["from"] if turn["from"] in _CALLS else role
    return {"role": role, "content": turn["value"], **others}


def _with_calls(turns: list[Any], field: str) -> list[Any]:
    """Return turns with those that are calls as the assistant's.

    Calls after one another, or after the assistant's text, are of one turn, as in ms-swift and NeMo
    AutoModel: nobody answers between them. Those of another mark stay apart.
    """
    found: list[Any] = []
    for number, turn in enumerate(turns, 1):
        message = _as_call(turn, number, field)
        last = found[-1] if found else None
        is_call = isinstance(turn, dict) and turn.get("role") in _CALLS and message is not turn
        if is_call and isinstance(last, dict) and last.get("role") == "assistant":
            calls = last.get("tool_calls") or []
            if _others_of(last) == _others_of(message) and isinstance(calls, list):
                found[-1] = {**last, "tool_calls": [*calls, *message["tool_calls"]]}
                continue
        found.append(message)
    return found


def _others_of(message: dict[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in message.items() if key not in ("content", *_CALL_KEYS)}


def _as_call(message: Any, number: int, field: str) -> Any:
    """Return a turn that is a call of tools, or its answer, in the form that templates expect."""
    role = message.get("role") if isinstance(message, dict) else None
    if role in ("observation", "tool_response", "function_response", "function"):
        return {**message, "role": "tool"}
    if role not in _CALLS or not isinstance(message.get("content"), str):
        return message
    calls = from_json(message["content"], f"{field}: turn {number} ({role})", {})
    calls = calls if isinstance(calls, list) else [calls]
    calls = [{"type": "function", "function": call} for call in calls]
    return {**message, "role": "assistant", "content": "", "tool_calls": calls}


def _alpaca(record: dict[str, Any]) -> Completion:
    instruction, output = _string(record, "instruction"), _string(record, "output")
    given = _optional(record, "input")
    plain = "Carry out the task that follows.\n\n"
    history, answers = _history(from_json(record.get("history"), "history", [])), []
    for question, answer in history:
        plain += f"### Instruction:\n{question}\n\n### Response:\n"
        answers.append((len(plain), len(plain) + len(answer)))
        plain += f"{answer}\n\n"
    plain += f"### Instruction:\n{instruction}\n\n"
    if given:
        plain += f"### Input:\n{given}\n\n"
    return Completion(
        prompt=f"{instruction}\n\n{given}" if given else instruction,
        completion=output,
        plain_prompt=f"{plain}### Response:\n",
        system=_optional(record, "system"),
        history=history,
        plain_answers=tuple(answers),
    )


def _history(turns: Any) -> tuple[tuple[str, str], ...]:
    """Return alpaca's earlier turns: a list of [question, answer]."""
    for turn in turns or ():
        if not isinstance(turn, list | tuple) or [*map(type, turn)] != [str, str]:
            raise WrongRecord(f"history has {shown(turn)}, expected [question, answer]")
    return tuple((question, answer) for question, answer in turns or ())


def _completion(record: dict[str, Any]) -> Example:
    prompt, answer = record["prompt"], record.get("completion")
    if isinstance(prompt, list | dict) or isinstance(answer, list | dict):
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt, answer = _turns(prompt, "prompt"), _turns(answer, "completion")
        asked = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in prompt]
        field = "prompt and completion"
        return _as_chat(_with_system(asked + answer, field, record), field, record)
    text, completion = _string(record, "prompt"), _string(record, "completion")
    return Completion(text, completion, plain_prompt=text, system=_optional(record, "system"))


def _turns(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt, or of an answer, which may be one of them or its text."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    return turns_of([value] if isinstance(value, dict) and is_chat([value]) else value, field)


def _optional(record: dict[str, Any], field: str) -> str:
    return _string(record, field) if record.get(field) else ""


def _string(record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise WrongRecord(f"found {fields_of(record)}, but {field} is missing; {EXPECTED}")
    if not isinstance(record[field], str):
        raise WrongRecord(f"{field} is {name_of(record[field])}, expected text")
    return record[field]
