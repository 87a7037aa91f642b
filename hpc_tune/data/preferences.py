"""Rows of preferences -> pairs of answers to one prompt, or answers with a label.

    row -> its prompt and its two answers -> records.py, once for each -> PreferencePair
    row -> records.py -> LabeledAnswers; for a pair, both answers, the chosen one as desirable

The formats of trl, LLaMA-Factory, axolotl, ms-swift, OpenAI, UltraFeedback and hh-rlhf are known.
Only the answers are learned, nothing that the assistant says in the prompt.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_tune.data.fields import (
    CHAT_FIELDS,
    CHOSEN_FIELDS,
    LABEL_FIELDS,
    LOSS_WEIGHT_FIELDS,
    REJECTED_FIELDS,
    WrongRecord,
    format_fields,
    format_value,
    is_unset,
    json_type_name,
    parse_input_field,
    read_loss_weight,
    read_tools,
    require_object,
    unpack_chats,
)
from hpc_tune.data.records import Chat, Completion, NoLearnedTextError, Text, read_turns, to_example
from hpc_tune.errors import DataError

# -- The prompt of two answers, if it is given only as their common beginning.
#
# two chats -> the messages that both begin with -> what follows in each
# two texts -> a dialogue of Human and Assistant (hh-rlhf) -> as two chats
#           -> the characters that both begin with, cut back to the last white space


_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}
_SPEAKER_OF_ROLE = {role: name for name, role in _ROLE_OF_SPEAKER.items()}

Messages = list[dict[str, Any]]
Prompt = Completion | Messages  # a Completion without its completion
Answer = str | Messages


def split_chats(
    chosen: Messages, rejected: Messages, fields: Sequence[str]
) -> tuple[Messages, Messages, Messages]:
    """Return the messages that two chats begin with, and what follows in each.

    ``fields``: the fields of the two chats.

    Raises:
        WrongRecord: if the chats are the same, begin differently, or go on with no answer.
    """
    both = " and ".join(fields)
    if chosen == rejected:
        raise WrongRecord(
            f"{both} are the same: neither is preferred; take the row out, or set"
            " data.bad_rows=skip"
        )
    begin = 0
    while begin < min(len(chosen), len(rejected)) and chosen[begin] == rejected[begin]:
        begin += 1
    tails = chosen[begin:], rejected[begin:]
    for name, tail in zip(fields, tails, strict=True):
        if not tail:
            raise _make_missing_answer_error(name)
        if not begin or tail[0]["role"] != "assistant":
            raise WrongRecord(
                f"{both} do not begin with the same prompt: they differ in message {begin + 1}, "
                f"which is {format_value(tail[0])} in {name}; expected the same messages, and then "
                "the assistant's"
            )
    return chosen[:begin], *tails


def split_texts(chosen: str, rejected: str, fields: Sequence[str]) -> tuple[Prompt, Answer, Answer]:
    """Return the prompt that two texts begin with, and what follows in each.

    Raises:
        WrongRecord: if one of the three would be empty, or what follows in a dialogue is Human's.
    """
    chosen_turns = _split_turns(chosen, fields[0])
    rejected_turns = _split_turns(rejected, fields[1])
    if chosen_turns and rejected_turns:
        prompt, *answer_turns = split_chats(chosen_turns, rejected_turns, fields)
        completion = _as_completion(prompt)
        if completion is None or [*map(len, answer_turns)] != [1, 1]:
            return prompt, answer_turns[0], answer_turns[1]
        return completion, answer_turns[0][0]["content"], answer_turns[1][0]["content"]
    # Answers that begin alike must not be cut inside a word, where tokens would differ.
    prefix = re.sub(r"\S+\Z", "", os.path.commonprefix([chosen, rejected]))
    answers = [text[len(prefix) :].lstrip() for text in (chosen, rejected)]
    if not prefix.strip():
        raise WrongRecord(
            f"{' and '.join(fields)} are texts that begin with different words, but there is "
            "no prompt; expected one beside them, or texts that begin with it"
        )
    for name, answer in zip(fields, answers, strict=True):
        if not answer:
            raise _make_missing_answer_error(name)
    return Completion(prefix.rstrip(), "", plain_prompt=prefix), answers[0], answers[1]


def _make_missing_answer_error(name: str) -> WrongRecord:
    return WrongRecord(
        f"{name} is only what the other begins with, expected an answer of its own after the prompt"
    )


def _split_turns(text: str, name: str) -> Messages:
    """Return the turns of a dialogue of Human and Assistant as messages; empty for other text."""
    preamble, *parts = _TURN.split(f"\n\n{text.strip()}")
    if preamble or parts[:1] != ["Human"] or "Assistant" not in parts[::2]:
        return []
    turns = [
        {"role": _ROLE_OF_SPEAKER[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
        raise WrongRecord(f"{name} ends without an answer of Assistant, expected one after Human's")
    return turns


def _as_completion(prompt: Messages) -> Completion | None:
    """Return a dialogue's prompt with its history; None if the turns do not alternate."""
    texts = [turn["content"] for turn in prompt]
    if [turn["role"] for turn in prompt] != (["user", "assistant"] * len(texts))[: len(texts)]:
        return None
    plain = "".join(f"\n\n{_SPEAKER_OF_ROLE[turn['role']]}: {turn['content']}" for turn in prompt)
    history = tuple(zip(texts[:-1:2], texts[1::2], strict=True))
    return Completion(texts[-1], "", f"{plain}\n\nAssistant: ", history=history)


# -- The form of a pair: a chosen and a rejected answer, their prompt, and optional fields.


_TEXT_FIELDS = ("prompt", "instruction", "question", "query", "input")
_SYSTEM_FIELDS = ("system", "system_prompt")
_FURTHER_FIELDS = (
    *("history", "context", "tools", "functions", "rejected_tools"),
    *LOSS_WEIGHT_FIELDS,
)
PAIR_FIELDS = frozenset(
    CHOSEN_FIELDS + REJECTED_FIELDS + CHAT_FIELDS + _TEXT_FIELDS + _SYSTEM_FIELDS + _FURTHER_FIELDS
)
_EXPECTED_PAIRS = (
    "expected pairs: chosen and rejected, with prompt, messages, conversations, instruction or"
    " question, or each of the two a whole chat; data.columns={GOOD: chosen, BAD: rejected} names"
    " fields that are called something else"
)
_EXPECTED_LABELS = (
    "expected label, true or false, beside prompt and completion or messages, or pairs with chosen"
    " and rejected; data.columns={NAME: label} names a field that is called something else"
)


@dataclass(frozen=True)
class PreferencePair:
    """A chosen and a rejected answer to the same prompt."""

    chosen: Chat | Completion
    rejected: Chat | Completion


@dataclass(frozen=True)
class LabeledAnswers:
    """Answers of one row, each with whether it is desirable: one, or the two of a pair."""

    answers: tuple[Chat | Completion, ...]
    labels: tuple[bool, ...]


def to_pair(record: Any) -> PreferencePair:
    """Turn a record into a pair.

    Raises:
        WrongRecord: if it is not a valid pair.
        NoLearnedTextError: if it is marked as not to be learned.
    """
    require_object(record)
    record = unpack_chats(
        parse_input_field(record), (*CHOSEN_FIELDS, *REJECTED_FIELDS, *CHAT_FIELDS, "prompt")
    )
    better = _find_only_field(record, CHOSEN_FIELDS)
    worse = _find_only_field(record, REJECTED_FIELDS)
    if better is None and worse is None:
        raise WrongRecord(
            f"found {format_fields(record)}; {_advise_other_objective(record)}{_EXPECTED_PAIRS}"
        )
    weight = read_loss_weight(record, "the row")
    if weight == 0:
        raise NoLearnedTextError
    _refuse_row_weight(weight is None or weight == 1)
    _require_same_tools(record)
    prompt, chosen, rejected = _split_row(record, better, worse)
    if chosen == rejected:
        raise WrongRecord(
            f"chosen and rejected are the same, {format_value(chosen)}: neither is preferred; take "
            "the row out, or set data.bad_rows=skip"
        )
    return PreferencePair(
        _add_answer(record, prompt, chosen, better or "chosen"),
        _add_answer(record, prompt, rejected, worse or "rejected"),
    )


def to_labeled_answers(record: Any) -> LabeledAnswers:
    """Turn a record into labeled answers.

    Raises:
        WrongRecord: if it has no valid ones.
        NoLearnedTextError: if it is marked as not to be learned.
    """
    require_object(record)
    field, worse = _find_only_field(record, LABEL_FIELDS), _find_only_field(record, REJECTED_FIELDS)
    if field is None and worse is not None:
        pair = to_pair(record)
        return LabeledAnswers((pair.chosen, pair.rejected), (True, False))
    if field is None:
        raise WrongRecord(f"found {format_fields(record)}; {_EXPECTED_LABELS}")
    if worse is None and (better := _find_only_field(record, CHOSEN_FIELDS)) is not None:
        raise WrongRecord(
            f"{field} and {better} are both there: expected an answer with a label, in completion "
            f"or as the last of messages; data.columns={{{better}: completion}} names it"
        )
    if worse is not None:
        raise WrongRecord(
            f"{field} and {worse} are both there: expected an answer with a label, or a pair of"
            " answers; keep one of them"
        )
    label = record[field]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise WrongRecord(
            f"{field} is {format_value(label)}, expected true or false (or 1 or 0): whether the "
            "answer is desirable"
        )
    example = to_example({name: value for name, value in record.items() if name != field})
    covers_round = field != "kto_tag"  # LLaMA-Factory's, which labels the last message
    return LabeledAnswers((_read_labeled_answer(example, record, covers_round),), (bool(label),))


def has_label(record: dict[str, Any]) -> bool:
    """Return whether a row is an answer with a label."""
    return any(record.get(name) is not None for name in LABEL_FIELDS)


def replace_answer(example: Chat | Completion, source: Chat | Completion) -> Chat | Completion:
    """Return ``example`` with all messages of ``source``'s answer in place of its own."""
    if isinstance(example, Completion) and isinstance(source, Completion):
        return replace(example, completion=source.completion)
    chat, answers = (e.as_chat() if isinstance(e, Completion) else e for e in (example, source))
    begin, others_begin = find_first_learned_answer(chat), find_first_learned_answer(answers)
    later = {n for n in answers.unlearned if n > others_begin}
    unlearned = {n for n in chat.unlearned if n < begin} | {n - others_begin + begin for n in later}
    messages = [*chat.messages[:begin], *answers.messages[others_begin:]]
    return replace(chat, messages=messages, unlearned=frozenset(unlearned))


def find_first_learned_answer(chat: Chat) -> int:
    """Return the number of the first learned message, with which a preference's answer begins.

    If none is learned, return the number of messages.
    """
    learned_numbers = (
        number
        for number, message in enumerate(chat.messages)
        if message["role"] == "assistant" and number not in chat.unlearned
    )
    return next(learned_numbers, len(chat.messages))


def _advise_other_objective(record: dict[str, Any]) -> str:
    """Return which objective accepts a row that is not a pair; empty if none does."""
    if has_label(record):
        return "answers with a label are for tune.objective=kto; "
    if any(
        not is_unset(record.get(name)) for name in (*CHAT_FIELDS, "completion", "output", "text")
    ):
        return "answers alone are for tune.objective=sft; "
    return ""


def _find_only_field(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return which of ``names`` a row has; None without any."""
    matches = [name for name in names if record.get(name) is not None]
    if len(matches) > 1:
        raise WrongRecord(
            f"found the fields {' and '.join(matches)}, and either could be meant; say which: "
            f"data.columns={{{matches[0]}: {names[0]}}}"
        )
    return matches[0] if matches else None


def _split_row(
    record: dict[str, Any], chosen_field: str | None, rejected_field: str | None
) -> tuple[Prompt, Answer, Answer]:
    """Return prompt, chosen and rejected answer; the fields are those of the answers."""
    chat_field = next((name for name in CHAT_FIELDS if not is_unset(record.get(name))), None)
    if chosen_field is None and rejected_field != "rejected" and chat_field is not None:
        return _split_ms_swift_row(record, chat_field, str(rejected_field))
    if chosen_field is None or rejected_field is None:
        found, missing = (chosen_field, "rejected") if chosen_field else (rejected_field, "chosen")
        raise WrongRecord(f"found {found}, but {missing} is missing; {_EXPECTED_PAIRS}")
    chosen, rejected = _read_answer(record, chosen_field), _read_answer(record, rejected_field)
    names = (chosen_field, rejected_field)
    if isinstance(chosen, list) and isinstance(rejected, list):
        are_whole = [side[0]["role"] != "assistant" for side in (chosen, rejected)]
        if any(are_whole):
            parts = split_chats(chosen, rejected, names)
            _require_same_prompt(record, parts[0], names)
            return parts
    _refuse_mixed_sides((chosen, rejected), names)
    if (prompt := _read_prompt(record)) is not None:
        return prompt, chosen, rejected
    if isinstance(chosen, str) and isinstance(rejected, str):
        text, *answers = split_texts(chosen, rejected, names)
        return _add_system(text, record), answers[0], answers[1]
    both = " and ".join(names)
    raise WrongRecord(f"{both} are answers, and their prompt is missing; {_EXPECTED_PAIRS}")


def _refuse_mixed_sides(sides: tuple[Answer, Answer], field_names: tuple[str, str]) -> None:
    """Refuse a whole chat beside an answer that is text."""
    for side, name, other in zip(sides, field_names, reversed(field_names), strict=True):
        if isinstance(side, list) and side[0]["role"] != "assistant":
            raise WrongRecord(
                f"{name} is a whole chat and {other} is text: expected two whole chats, or a prompt"
                " and two answers; data.bad_rows=skip leaves such rows out"
            )


def _split_ms_swift_row(
    record: dict[str, Any], field: str, rejected_field: str
) -> tuple[Messages, Answer, Answer]:
    """Return prompt, chosen and rejected answer of a row whose messages end with the chosen one.

    It is all after the user's last turn, or what differs if the rejected one is a whole chat.
    """
    messages = _read_turns(record[field], field)
    rejected = _read_answer(record, rejected_field)
    if messages[-1]["role"] != "assistant":
        raise WrongRecord(
            f"{field} ends with a turn of {messages[-1]['role']}, expected the assistant's: the"
            f" answer that is preferred to {rejected_field}"
        )
    if isinstance(rejected, list) and rejected[0]["role"] != "assistant":
        return split_chats(messages, rejected, (field, rejected_field))
    begin = _last_round_start(messages)
    if not begin:
        raise WrongRecord(f"{field} begins with its answer, expected a turn of the user before it")
    return messages[:begin], messages[begin:], rejected


def _last_round_start(messages: Messages) -> int:
    """Return the number of the assistant's first message after the user's last one."""
    last_user = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
    return next(n for n, m in enumerate(messages) if n > last_user and m["role"] == "assistant")


def _require_same_tools(record: dict[str, Any]) -> None:
    """Refuse other tools for the rejected answer (ms-swift): its prompt would be another."""
    rejected_tools = read_tools({"tools": record.get("rejected_tools")})
    if rejected_tools is not None and rejected_tools != _read_tools(record):
        raise WrongRecord(
            "rejected_tools and tools differ: two answers are compared after the same prompt, of "
            "which the tools are a part; keep tools alone"
        )


def _read_answer(record: dict[str, Any], field: str) -> Answer:
    value = record[field]
    if isinstance(value, str):
        if not value.strip():
            raise WrongRecord(f"{field} is empty text, expected an answer")
        return value
    if isinstance(value, dict) and isinstance(value.get("role", value.get("from")), str):
        value = [value]
    if not isinstance(value, list | dict):
        raise WrongRecord(f"{field} is {json_type_name(value)}, expected text or messages")
    return _read_turns(value, field)


def _read_turns(value: Any, field: str) -> Messages:
    """Return messages without keys that have no value, so that messages can be compared."""
    return [
        {key: item for key, item in message.items() if key == "content" or not is_unset(item)}
        for message in read_turns(value, field)
    ]


def _read_prompt(record: dict[str, Any]) -> Prompt | None:
    """Return the prompt from a field of its own, or from several; None without one."""
    if isinstance(openai_input := record.get("input"), dict):  # OpenAI
        return _read_turns(openai_input.get("messages"), "input.messages")
    prompt = record.get("prompt")
    if not is_unset(prompt) and not isinstance(prompt, str):
        return _read_turns(prompt, "prompt")
    if is_unset(prompt):
        for name in CHAT_FIELDS:
            if not is_unset(record.get(name)):
                return _read_turns(record[name], name)
    field = next((name for name in _TEXT_FIELDS if not is_unset(record.get(name))), None)
    if field is None:
        if blank := [name for name in _TEXT_FIELDS if record.get(name) is not None]:
            raise WrongRecord(
                f"{blank[0]} is {json_type_name(record[blank[0]])}, expected a prompt"
            )
        return None
    if not isinstance(record[field], str) or not record[field].strip():
        raise WrongRecord(f"{field} is {format_value(record[field])}, expected a prompt as text")
    if field != "instruction" and is_unset(record.get("history")):
        return _add_system(Completion(record[field], "", plain_prompt=record[field]), record)
    input_field = next((f for f in ("input", "context") if not is_unset(record.get(f))), None)
    fields = {"instruction": record[field], "history": record.get("history"), "output": ""}
    if field == "instruction" and input_field is not None:
        fields["input"] = record[input_field]
    alpaca = to_example({name: value for name, value in fields.items() if value is not None})
    assert isinstance(alpaca, Completion)
    return _add_system(replace(alpaca, plain_answers=()), record)


def _add_system(prompt: Prompt, record: dict[str, Any]) -> Prompt:
    """Add the row's system prompt to a prompt that is text; if the row has tools, return a chat."""
    if isinstance(prompt, list):
        return prompt
    prompt = replace(prompt, system=_read_system(record))
    return prompt.messages()[:-1] if _read_tools(record) else prompt


def _read_system(record: dict[str, Any]) -> str:
    fields = [field for field in _SYSTEM_FIELDS if not is_unset(record.get(field))]
    for field in fields:
        if not isinstance(record[field], str):
            raise WrongRecord(f"{field} is {json_type_name(record[field])}, expected text")
    if len(fields) > 1 and record["system"] != record["system_prompt"]:
        raise WrongRecord("system and system_prompt are both given, and differ; keep one of them")
    return record[fields[0]] if fields else ""


def _read_tools(record: dict[str, Any]) -> list[Any] | None:
    openai_input = record.get("input")
    return read_tools(openai_input if isinstance(openai_input, dict) else record)


def _require_same_prompt(record: dict[str, Any], prompt: Messages, fields: Sequence[str]) -> None:
    """Check that the prompt field agrees with the prompt that two whole chats begin with."""
    value = record.get("prompt")
    if is_unset(value):
        return
    if isinstance(value, str):
        texts = [str(m.get("content") or "").strip() for m in prompt if m["role"] != "assistant"]
        is_same = any(text and (text in value or value.strip() in text) for text in texts)
    else:
        turns = _read_turns(value, "prompt")
        is_same = turns == prompt[: len(turns)]
    if not is_same:
        raise WrongRecord(
            f"prompt is {format_value(value)}, but the chats of {' and '.join(fields)} begin with"
            f" {format_value(prompt[-1])}; take one of the prompts out"
        )


def _add_answer(
    record: dict[str, Any], prompt: Prompt, answer: Answer, field: str
) -> Chat | Completion:
    if isinstance(prompt, Completion):
        if isinstance(answer, str):
            return replace(prompt, completion=answer)
        prompt = prompt.messages()[:-1]
    if prompt[-1]["role"] == "assistant":
        raise WrongRecord(
            f"the turn before {field} is also the assistant's; expected a question or the result of"
            " a tool"
        )
    answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if answer[0]["role"] != "assistant" or not any(map(_has_content, answer)):
        raise WrongRecord(
            f"{field} is {format_value(answer[0])}, expected an answer of the assistant"
        )
    fields = {name: record[name] for name in LOSS_WEIGHT_FIELDS if name in record}
    try:
        chat = to_example(
            {
                **fields,
                "system": _read_system(record),
                "tools": _read_tools(record),
                "messages": [*prompt, *answer],
            }
        )
    except WrongRecord as error:
        raise WrongRecord(f"with {field}: {error}") from error
    assert isinstance(chat, Chat)
    return _exclude_answers_before(chat, len(chat.messages) - len(answer))


def _read_labeled_answer(
    example: Any, record: dict[str, Any], covers_round: bool
) -> Chat | Completion:
    """Return a labeled answer; nothing before it is learned.

    In a chat, the answer is the last message, or if ``covers_round`` all messages after the
    user's last (ms-swift). Beside a prompt, it is the whole completion (trl).
    """
    if isinstance(example, Text):
        raise WrongRecord(f"found text with a label, and no prompt; {_EXPECTED_LABELS}")
    if isinstance(example, Completion):
        for name, text in (("prompt", example.prompt), ("answer", example.completion)):
            if not text.strip():
                raise WrongRecord(f"the {name} is empty text, expected a prompt and its answer")
        _refuse_row_weight(example.weight == 1)
        return replace(example, plain_answers=())
    last = example.messages[-1]
    if last["role"] != "assistant" or not _has_content(last):
        raise WrongRecord(
            f"the last message is {format_value(last)}, expected an answer of the assistant"
        )
    if all(message["role"] == "assistant" for message in example.messages):
        raise WrongRecord("found an answer of the assistant alone, expected a prompt before it")
    if "completion" in record and not any(record.get(name) for name in CHAT_FIELDS):
        return _exclude_answers_before(example, find_first_learned_answer(example))
    begin = _last_round_start(example.messages) if covers_round else len(example.messages) - 1
    return _exclude_answers_before(example, begin)


def _refuse_row_weight(is_weight_one: bool) -> None:
    """Refuse a weight of a row, or of a turn in it, other than 0 and 1."""
    if not is_weight_one:
        raise WrongRecord(
            "weights other than 0 and 1 are for answers to be learned (tune.objective=sft), but "
            "each pair, and each answer with a label, counts once; remove the weight, or set "
            "weight: 0 to leave a row out"
        )


def _exclude_answers_before(chat: Chat, first_index: int) -> Chat:
    _refuse_row_weight(chat.weight == 1 and not chat.weights)
    answers = {n for n, m in enumerate(chat.messages) if m["role"] == "assistant"}
    unlearned = chat.unlearned | {number for number in answers if number < first_index}
    if unlearned == answers:
        raise NoLearnedTextError
    return replace(chat, unlearned=frozenset(unlearned))


def _has_content(message: dict[str, Any]) -> bool:
    """Return whether a message has text, or a call of tools."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else content
    calls = message.get("tool_calls"), message.get("function_call")
    return not all(is_unset(value) for value in (text, *calls))


# -- What kto needs of labeled answers: both kinds of them, with about the same total weight.


# The total weight of the good answers over that of the others should be within these limits
# (arXiv:2402.01306, 4.2).
MIN_WEIGHT_RATIO, MAX_WEIGHT_RATIO = 1.0, 1.33


def require_both_labels(num_good: int, num_bad: int, source: str) -> None:
    """Check that there are good answers and others.

    Raises:
        DataError: if there is one kind alone.
    """
    if num_good and num_bad:
        return
    label = "true" if num_good else "false"
    advice = "or tune.objective=sft, which learns answers that are all good" if num_good else ""
    raise DataError(
        f"all {num_good + num_bad} labels of {source} are {label}: kto compares good answers with "
        f"others; give answers of both kinds{', ' if advice else ''}{advice}"
    )


def describe_label_imbalance(
    num_good: int, num_bad: int, desirable_weight: float, undesirable_weight: float
) -> str | None:
    """Return a warning if the two kinds do not weigh about the same, with a weight that helps."""
    ratio = desirable_weight * num_good / (undesirable_weight * num_bad)
    if MIN_WEIGHT_RATIO <= ratio <= MAX_WEIGHT_RATIO:
        return None
    weights = f"tune.desirable_weight={undesirable_weight * num_bad / num_good:.3g}"
    if num_bad < num_good:
        weights = f"tune.undesirable_weight={desirable_weight * num_good / num_bad:.3g}"
    return (
        f"{num_good} answers are good and {num_bad} are not, so the good ones weigh "
        f"{ratio:.3g} times as much in kto as the others, but {MIN_WEIGHT_RATIO:g} to "
        f"{MAX_WEIGHT_RATIO:g} is usual: {weights} makes it 1"
    )
