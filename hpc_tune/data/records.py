"""One record of raw data -> one example: which fields are known, and what they must hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpc_tune.data.fields import (
    CHAT_FIELDS,
    LOSS_WEIGHT_FIELDS,
    PREFERENCE_FIELDS,
    ROLES,
    WrongRecord,
    format_fields,
    format_value,
    is_chat,
    is_unset,
    json_type_name,
    parse_json_text,
    read_loss_weight,
    read_tool_calls,
    read_tools,
    require_object,
    unpack_chats,
)

# Roles of turns that are tool calls as JSON text: LLaMA-Factory's and ms-swift's.
_CALL_ROLES = ("function_call", "tool_call")
_BLANK_FIELDS = [(name, "") for name in CHAT_FIELDS]
_CALL_KEYS = ("tool_calls", "function_call")


class NoLearnedTextError(Exception):
    """Raised for a record that is marked as not to be learned."""


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template, with whatever further keys they carry.

    ``unlearned``: numbers of the assistant's messages that the data mark as not learned.
    ``weight``: the weight of the chat in the loss; ``weights``: those of messages with their own.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    unlearned: frozenset[int] = frozenset()
    weight: float = 1.0
    weights: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A prompt and the answer that is to be learned.

    ``plain_prompt`` replaces the prompt if the tokenizer has no chat template. ``history``: earlier
    questions and answers, in order; ``plain_answers``: the spans of these answers in
    ``plain_prompt``, without which they are not learned. ``weight``: its weight in the loss.
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
        """Return the prompt, its history and the answer as a chat."""
        messages = self.messages()
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        unlearned = () if self.plain_answers else answers[:-1]
        return Chat(messages, tools, frozenset(unlearned), self.weight)


@dataclass(frozen=True)
class Text:
    """Plain text, learned as a whole; ``begins``, ``ends``: whether its start and end are in it."""

    text: str
    begins: bool = True
    ends: bool = True
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token IDs of a document, learned as a whole; ``location`` says where the document is."""

    token_ids: np.ndarray
    location: str


Example = Chat | Completion | Text


def to_example(record: Any) -> Example:
    """Turn a record into an example, by the first known field that it has.

    Raises:
        WrongRecord: if it is not an object, has no known field, or one of the wrong type.
        NoLearnedTextError: if the whole record is marked as not to be learned.
    """
    require_object(record)
    _refuse_preferences(record)
    record = _unpack_chats(record)
    fields = {
        name: value
        for name, value in record.items()
        if value is not None and (name, value) not in _BLANK_FIELDS
    }
    if forms := [form for form in FORMS if form.required_fields[0] in fields]:
        form = next((form for form in forms if fields[form.required_fields[0]] != []), forms[0])
        return _add_weight_and_tools(form.read(record), record)
    raise WrongRecord(
        f"found {format_fields(record)}; {_advise_on_form(record) or EXPECTED_FIELDS_TEXT}"
    )


def _unpack_chats(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row with chats of other forms converted to messages.

    After a prompt that is text, a completion with a chat as JSON stays text unless the chat begins
    with the assistant.
    """
    record = unpack_chats(record, CHAT_FIELDS)
    row = unpack_chats(record, ("prompt", "completion"))
    are_messages = is_chat(row.get("prompt")) or _role_at(row.get("completion"), 0) == "assistant"
    return row if are_messages else record


def _advise_on_form(record: dict[str, Any]) -> str:
    """Return what to do with a record in a form that only other programs read; else empty."""
    if "input_ids" in record:
        return (
            "token IDs belong to one tokenizer, which the rows do not name: "
            "give the text or the messages that they were made from"
        )
    lists = [key for key, value in record.items() if isinstance(value, list) and value]
    rows = next((key for key in lists if _has_known_field(record[key][0])), None)
    return f"its rows are the list in {rows}: write that as a file of its own" if rows else ""


def _has_known_field(record: Any) -> bool:
    try:
        to_example(record)
    except WrongRecord:
        return False
    except NoLearnedTextError:
        return True
    return True


def _add_weight_and_tools(example: Example, record: dict[str, Any]) -> Example:
    """Apply a row's own marks for learning, and add its tools; chats already have both."""
    if isinstance(example, Chat):
        return example
    weight = read_loss_weight(record, "the row")
    if weight == 0:
        raise NoLearnedTextError
    if weight is not None:
        example = replace(example, weight=weight)
    if isinstance(example, Text) or not (tools := read_tools(record)):
        return example
    return example.as_chat(tools)


def _refuse_preferences(record: dict[str, Any]) -> None:
    """Refuse rows for preference tuning: half of their answers are examples of what not to say."""
    fields = [name for name in PREFERENCE_FIELDS if record.get(name) is not None]
    answers = ("completion", "output", *CHAT_FIELDS)
    if isinstance(record.get("label"), bool) and any(record.get(name) for name in answers):
        fields.append("label")
    if fields:
        raise WrongRecord(
            f"{' and '.join(fields)}: rows of preferences cannot be used here:"
            " tune.objective=dpo (or kto) trains on them; to learn only the better answers, set"
            f" data.columns={{{_advise_columns(record)}}}"
        )


def _advise_columns(record: dict[str, Any]) -> str:
    """Return the data.columns with which the better answer of a preference row is learned."""
    answers = ("chosen", "output", "completion", "response")
    record = unpack_chats(record, (*CHAT_FIELDS, *answers))
    field_names = [name for name, value in record.items() if not is_unset(value)]
    chat_field = next((name for name in CHAT_FIELDS if name in field_names), None)
    answer = next((name for name in answers if name in field_names), "ANSWER")
    if chat_field is not None and _role_at(record[chat_field], -1) == "assistant":
        return f"{chat_field}: {chat_field}"
    if _role_at(record.get(answer), 0) not in ("", "assistant"):
        return f"{answer}: messages"
    if "instruction" in field_names and chat_field is None:
        return f"instruction: instruction, {answer}: output"
    prompts = (chat_field, "prompt", "question", "query", "input")
    if (prompt := next((name for name in prompts if name in field_names), None)) is None:
        return f"{answer}: text"
    return f"{prompt}: prompt, {answer}: completion"


def _role_at(messages: Any, index: int) -> str:
    """Return the role of a message, as templates know it; empty if there are no messages."""
    message = messages[index] if isinstance(messages, list) and messages else messages
    role = message.get("role", message.get("from")) if isinstance(message, dict) else ""
    role = role[index] if isinstance(role, list) and role else role  # one list per key
    return ROLES.get(str(role), str(role))


def _make_chat(messages: list[dict[str, Any]], field: str, record: dict[str, Any]) -> Chat:
    plain_messages, unlearned, tools = [], set(), read_tools(record)
    row_weight, weights = read_loss_weight(record, "the row"), {}
    for number, message in enumerate(messages):
        location = f"{field}: message {number + 1} ({message['role']})"
        weight = read_loss_weight(message, location)
        if weight and message["role"] != "assistant":
            raise WrongRecord(
                f"{location} is marked to be learned, but only the assistant's are, or all text "
                "with data.loss_on=all: remove the mark"
            )
        if message["role"] == "assistant" and (row_weight if weight is None else weight) == 0:
            unlearned.add(number)
        elif weight is not None and weight not in (0, 1):
            weights[number] = weight * (row_weight or 1.0)
        # Templates check whether a key exists, and other rows may have given it to this one.
        plain_message = {
            k: v
            for k, v in message.items()
            if k == "content" or not (k in (*LOSS_WEIGHT_FIELDS, *_CALL_KEYS) or is_unset(v))
        }
        if "content" in plain_message:
            plain_message["content"] = _read_content(plain_message["content"], location)
        if calls := read_tool_calls(message, tools, location):
            plain_message["tool_calls"] = calls
        if plain_message["role"] == "function":  # OpenAI's older name
            plain_message["role"] = "tool"
        plain_messages.append(plain_message)
    return Chat(plain_messages, tools, frozenset(unlearned), row_weight or 1.0, weights)


def _read_content(content: Any, location: str) -> str | None:
    """Return the text of a message; a list of text parts is joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WrongRecord(f"{location}: content is {json_type_name(content)}, expected text")
    texts = []
    for part in content:
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind != "text":
                raise WrongRecord(
                    f"{location}: a part of its content is of type {kind}; only text is learned"
                )
            part = part.get("text")
        if not isinstance(part, str):
            raise WrongRecord(
                f"{location}: a part of its content is {json_type_name(part)}, expected text"
            )
        texts.append(part)
    return "".join(texts)


def _require_nonempty_list(messages: Any, field: str) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise WrongRecord(
            f"{field} is {json_type_name(messages)}, expected a list with at least one message"
        )
    return messages


def _check_messages(messages: Any, field: str) -> list[dict[str, Any]]:
    """Check a list of messages, each with a role and with content or tool calls."""
    for number, message in enumerate(_require_nonempty_list(messages, field), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongRecord(
                f"{field}: message {number} is {format_value(message)}, expected an object with "
                "role and content"
            )
        if "content" not in message and all(is_unset(message.get(key)) for key in _CALL_KEYS):
            raise WrongRecord(f"{field}: message {number} ({message['role']}) has no content")
    return messages


def _read_dialogue(record: dict[str, Any], field: str) -> Chat:
    """Read turns with role and content, or ShareGPT's with from and value, in either field."""
    turns = read_turns(record[field], field)
    return _make_chat(_prepend_system(turns, field, record), field, record)


def read_turns(value: Any, field: str) -> list[dict[str, Any]]:
    """Return turns as messages, each with a role and with content or tool calls.

    Raises:
        WrongRecord: if they are not valid messages.
    """
    turns = parse_json_text(value, field, [])
    if isinstance(turns, dict):
        turns = _turns_from_columns(turns, field)
    first = _require_nonempty_list(turns, field)[0]
    if isinstance(first, dict) and first.get("from") is not None and first.get("role") is None:
        turns = [
            _convert_sharegpt_turn(turn, number, field) for number, turn in enumerate(turns, 1)
        ]
    return _check_messages(_merge_tool_calls(turns, field), field)


def _prepend_system(
    messages: list[dict[str, Any]], field: str, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """Put the system message from a field of its own before the others."""
    if not (system := _optional_string(record, "system")):
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise WrongRecord(
            f"{field} begins with a system message, but system is another one; keep one of them"
        )
    return messages


def _turns_from_columns(columns: dict[str, Any], field: str) -> list[Any]:
    """Return turns that are stored as one list per key, as datasets stores a Sequence."""
    lists = [values for values in columns.values() if isinstance(values, list)]
    if len(lists) < len(columns) or len({len(values) for values in lists}) != 1:
        raise WrongRecord(f"{field} is {json_type_name(columns)}, expected a list with messages")
    turns = [dict(zip(columns, turn, strict=True)) for turn in zip(*lists, strict=True)]
    return [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns]


def _convert_sharegpt_turn(turn: Any, number: int, field: str) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message."""
    role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        raise WrongRecord(
            f"{field}: turn {number} is {format_value(turn)}, expected from (one of"
            f" {', '.join(ROLES)}) and value (text)"
        )
    known_keys = ("from", "value", "role", "content")
    other_fields = {key: value for key, value in turn.items() if key not in known_keys}
    role = turn["from"] if turn["from"] in _CALL_ROLES else role
    return {"role": role, "content": turn["value"], **other_fields}


def _merge_tool_calls(turns: list[Any], field: str) -> list[Any]:
    """Return turns, those that are tool calls as the assistant's, and tools' answers as tool's.

    Consecutive calls, or calls after the assistant's text, become one turn, as in ms-swift and NeMo
    AutoModel: nobody answers between them. Turns whose further keys (marks) differ stay apart.
    """
    messages: list[Any] = []
    for number, turn in enumerate(turns, 1):
        message = _convert_tool_turn(turn, number, field)
        last = messages[-1] if messages else None
        is_call = isinstance(turn, dict) and turn.get("role") in _CALL_ROLES and message is not turn
        if is_call and isinstance(last, dict) and last.get("role") == "assistant":
            calls = last.get("tool_calls") or []
            if _extra_fields(last) == _extra_fields(message) and isinstance(calls, list):
                messages[-1] = {**last, "tool_calls": [*calls, *message["tool_calls"]]}
                continue
        messages.append(message)
    return messages


def _extra_fields(message: dict[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in message.items() if key not in ("content", *_CALL_KEYS)}


def _convert_tool_turn(message: Any, number: int, field: str) -> Any:
    """Return a tool call, or a tool's answer, in the form that templates expect; else the turn."""
    role = message.get("role") if isinstance(message, dict) else None
    if role in ("observation", "tool_response", "function_response", "function"):
        return {**message, "role": "tool"}
    if role not in _CALL_ROLES or not isinstance(message.get("content"), str):
        return message
    calls = parse_json_text(message["content"], f"{field}: turn {number} ({role})", {})
    calls = calls if isinstance(calls, list) else [calls]
    calls = [{"type": "function", "function": call} for call in calls]
    return {**message, "role": "assistant", "content": "", "tool_calls": calls}


def _read_alpaca(record: dict[str, Any]) -> Completion:
    instruction = _required_string(record, "instruction")
    output = _required_string(record, "output")
    input_text = _optional_string(record, "input")
    plain = "Carry out the task that follows.\n\n"
    history, answers = _read_history(parse_json_text(record.get("history"), "history", [])), []
    for question, answer in history:
        plain += f"### Instruction:\n{question}\n\n### Response:\n"
        answers.append((len(plain), len(plain) + len(answer)))
        plain += f"{answer}\n\n"
    plain += f"### Instruction:\n{instruction}\n\n"
    if input_text:
        plain += f"### Input:\n{input_text}\n\n"
    return Completion(
        prompt=f"{instruction}\n\n{input_text}" if input_text else instruction,
        completion=output,
        plain_prompt=f"{plain}### Response:\n",
        system=_optional_string(record, "system"),
        history=history,
        plain_answers=tuple(answers),
    )


def _read_history(turns: Any) -> tuple[tuple[str, str], ...]:
    """Return alpaca's earlier turns: a list of [question, answer]."""
    if turns and not isinstance(turns, list | tuple):
        raise WrongRecord(
            f"history is of type {json_type_name(turns)}, expected a list of [question, answer]"
        )
    for turn in turns or ():
        if not isinstance(turn, list | tuple) or [*map(type, turn)] != [str, str]:
            raise WrongRecord(f"history has {format_value(turn)}, expected [question, answer]")
    return tuple((question, answer) for question, answer in turns or ())


def _read_completion(record: dict[str, Any]) -> Example:
    prompt, answer = record["prompt"], record.get("completion")
    if isinstance(prompt, list | dict) or isinstance(answer, list | dict):
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt, answer = _read_messages(prompt, "prompt"), _read_messages(answer, "completion")
        unlearned_prompt = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in prompt]
        field = "prompt and completion"
        return _make_chat(_prepend_system(unlearned_prompt + answer, field, record), field, record)
    text, completion = _required_string(record, "prompt"), _required_string(record, "completion")
    return Completion(
        text, completion, plain_prompt=text, system=_optional_string(record, "system")
    )


def _read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt or an answer, which may also be one message, or text."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    return read_turns([value] if isinstance(value, dict) and is_chat([value]) else value, field)


def _optional_string(record: dict[str, Any], field: str) -> str:
    return _required_string(record, field) if record.get(field) else ""


def _required_string(record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise WrongRecord(
            f"found {format_fields(record)}, but {field} is missing; {EXPECTED_FIELDS_TEXT}"
        )
    if not isinstance(record[field], str):
        raise WrongRecord(f"{field} is {json_type_name(record[field])}, expected text")
    return record[field]


# -- The known forms of rows that are learned, in the order in which they are tried.


@dataclass(frozen=True)
class RecordForm:
    """A form of rows: ``required_fields``, of which the first identifies it; ``optional_fields``;
    ``shared_fields``, which other forms have too; its reader and its name.
    """

    required_fields: tuple[str, ...]
    optional_fields: tuple[str, ...]
    shared_fields: tuple[str, ...]
    read: Callable[[dict[str, Any]], Example]
    name: str = ""

    @property
    def own_fields(self) -> tuple[str, ...]:
        """The fields that say that a row is of this form."""
        return self.required_fields + self.optional_fields


_SHARED_FIELDS = ("system", "tools", "functions", *LOSS_WEIGHT_FIELDS)
# ms-swift's queries and responses have a history, too.
_HISTORY_FIELDS = ("history", *_SHARED_FIELDS)
FORMS = (
    RecordForm(
        ("messages",), (), _SHARED_FIELDS, lambda row: _read_dialogue(row, "messages"), "chat"
    ),
    RecordForm(
        ("conversations",),
        (),
        _SHARED_FIELDS,
        lambda row: _read_dialogue(row, "conversations"),
        "ShareGPT",
    ),
    RecordForm(("instruction", "output"), ("input",), _HISTORY_FIELDS, _read_alpaca, "alpaca"),
    RecordForm(("prompt", "completion"), ("response",), _SHARED_FIELDS, _read_completion),
    RecordForm(("text",), (), LOSS_WEIGHT_FIELDS, lambda row: Text(_required_string(row, "text"))),
)
_FORM_DESCRIPTIONS = (
    f"{' and '.join(f.required_fields)}{f' ({f.name})' if f.name else ''}" for f in FORMS
)
EXPECTED_FIELDS_TEXT = (
    f"expected one of: {', '.join(_FORM_DESCRIPTIONS)}; "
    "data.columns={NAME: prompt, OTHER: completion} names fields that are called something else"
)
