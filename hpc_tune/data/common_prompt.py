"""The prompt of two answers, where it is only what both begin with.

two chats -> the messages that both begin with -> what follows in each
two texts -> a dialogue of Human and Assistant (hh-rlhf) -> as two chats
          -> the characters that both begin with, cut back to the last white space
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from hpc_tune.data.records import Completion
from hpc_tune.data.values import WrongRecord, format_value

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_NAMES = {role: name for name, role in _ROLES.items()}

Messages = list[dict[str, Any]]
Prompt = Completion | Messages  # a Completion without its completion
Answer = str | Messages


def split_chats(
    chosen: Messages, rejected: Messages, names: Sequence[str]
) -> tuple[Messages, Messages, Messages]:
    """Return the messages that two chats begin with, and what follows in each.

    ``names``: their fields.

    Raises:
        WrongRecord: if what follows is no answer, or nothing is before it.
    """
    both = " and ".join(names)
    if chosen == rejected:
        raise WrongRecord(
            f"{both} are the same: neither is preferred; take the row out, or set"
            " data.bad_rows=skip"
        )
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    rests = chosen[same:], rejected[same:]
    for name, rest in zip(names, rests, strict=True):
        if not rest:
            raise WrongRecord(
                f"{name} is only what the other begins with, expected an answer of its own after"
                " the prompt"
            )
        if not same or rest[0]["role"] != "assistant":
            raise WrongRecord(
                f"{both} do not begin with the same prompt: they differ in message {same + 1}, "
                f"which is {format_value(rest[0])} in {name}; expected the same messages, and then "
                "the assistant's"
            )
    return chosen[:same], *rests


def split_texts(chosen: str, rejected: str, names: Sequence[str]) -> tuple[Prompt, Answer, Answer]:
    """Return the prompt that two texts begin with, and what follows in each.

    Raises:
        WrongRecord: if one of the three would be empty.
    """
    one, other = _split_turns(chosen, names[0]), _split_turns(rejected, names[1])
    if one and other:
        prompt, *rests = split_chats(one, other, names)
        asked = _as_completion(prompt)
        if asked is None or [*map(len, rests)] != [1, 1]:
            return prompt, rests[0], rests[1]
        return asked, rests[0][0]["content"], rests[1][0]["content"]
    # Answers that begin alike must not be cut inside a word, where tokens would differ.
    same = re.sub(r"\S+\Z", "", os.path.commonprefix([chosen, rejected]))
    answers = [text[len(same) :].lstrip() for text in (chosen, rejected)]
    if not same.strip():
        raise WrongRecord(
            f"{' and '.join(names)} are texts that begin with different words, but there is "
            "no prompt; expected one beside them, or texts that begin with it"
        )
    for name, answer in zip(names, answers, strict=True):
        if not answer:
            raise WrongRecord(
                f"{name} is only what the other begins with, expected an answer of its own after"
                " the prompt"
            )
    return Completion(same.rstrip(), "", plain_prompt=same), answers[0], answers[1]


def _split_turns(text: str, name: str) -> Messages:
    """Return the turns of a dialogue of Human and Assistant as messages; empty if it is none."""
    before, *parts = _TURN.split(f"\n\n{text.strip()}")
    if before or parts[:1] != ["Human"] or "Assistant" not in parts[::2]:
        return []
    turns = [
        {"role": _ROLES[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
        raise WrongRecord(f"{name} ends without an answer of Assistant, expected one after Human's")
    return turns


def _as_completion(prompt: Messages) -> Completion | None:
    """Return a dialogue's prompt with its history; None where the turns do not alternate."""
    said = [message["content"] for message in prompt]
    if [message["role"] for message in prompt] != (["user", "assistant"] * len(said))[: len(said)]:
        return None
    plain = "".join(f"\n\n{_NAMES[message['role']]}: {message['content']}" for message in prompt)
    history = tuple(zip(said[:-1:2], said[1::2], strict=True))
    return Completion(said[-1], "", f"{plain}\n\nAssistant: ", history=history)
