"""Which characters of a rendered chat the assistant wrote.

    {% generation %} blocks of the template -> beginnings -> calls -> probes: the first that fits

*Blocks* are the template's own word. *Beginnings*: answer i is the text between
render(messages[:i], with the generation prompt) and render(messages[:i + 1]), where both are
beginnings of the whole text: what the model has to write after the prompt that it gets in use.
Templates that render a turn differently once others follow (they drop earlier reasoning, or append
an end to the whole) break that. *Calls* of tools lie between the contents of their neighbours, and
end as they do alone. *Probes*: the whole chat is rendered again with another text in place of
answer i. What the two have in common before and after it is not the answer's.

An answer ends with the special token that ends its turn, which the model has to learn as well.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from hpc_tune.data.counts import Counters

# -- A chat as its template renders it: whole, its beginnings, and with another text in places.


PROBE = "xPr0be7Qx"
QUESTION = {"role": "user", "content": PROBE}
RESULT = {"role": "tool", "content": PROBE}
Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]


class Render(Protocol):
    """Renders messages to text; None where the template refuses them."""

    def __call__(self, messages: Messages, generation: bool = False) -> str | None:
        """Return the text, with the prompt for another answer at its end if ``generation``."""


@dataclass
class RenderedChat:
    """The messages of a chat, and their text ``full``, which is ``render(messages)``.

    ``special``: what special tokens match.
    """

    render: Render
    messages: Messages
    full: str
    special: re.Pattern[str]
    _beginnings: dict[tuple[int, bool], str | None] = field(default_factory=dict)

    def render_first(self, count: int, generation: bool = False) -> str | None:
        """Return the text of the first ``count`` messages, rendered once; None if refused."""
        if count == len(self.messages) and not generation:
            return self.full
        key = (count, generation)
        if key not in self._beginnings:
            self._beginnings[key] = self.render(self.messages[:count], generation)
        return self._beginnings[key]

    def prompt(self, number: int) -> str | None:
        """Return the text up to message ``number``, which is to be generated; None for the first.

        Templates render no empty list.
        """
        return self.render_first(number, generation=True) if number else None

    def prompt_end(self, number: int, text: str) -> int | None:
        """Return where the prompt of message ``number`` ends if ``text`` begins with it."""
        prompt = self.prompt(number)
        return len(prompt) if prompt and text.startswith(prompt) else None

    def with_probe(self, number: int) -> list[dict[str, Any]]:
        """Return the messages with a probe in place of one's content."""
        probe = {**self.messages[number], "content": PROBE}
        return [*self.messages[:number], probe, *self.messages[number + 1 :]]

    def text_after_probe(self, messages: Messages) -> str:
        """Return what follows the probe in the text of ``messages``; nothing if there is none."""
        return (self.render(messages) or "").partition(PROBE)[2]

    def next_content_start(self, number: int) -> int:
        """Return where the content of the message after one begins, or ``full`` ends."""
        if number + 1 == len(self.messages):
            return len(self.full)
        before, found, _ = (self.render(self.with_probe(number + 1)) or "").partition(PROBE)
        return len(os.path.commonprefix([self.full, before])) if found else len(self.full)

    @cached_property
    def generation_prompt(self) -> str:
        """The generation prompt alone, such as ``<|im_start|>assistant`` and a line end.

        That is what it adds to a turn of another role: a last answer may end by a token of its own.
        """
        others = [n for n, message in enumerate(self.messages, 1) if message["role"] != "assistant"]
        if others:
            plain, prompted = (
                self.render_first(others[-1]),
                self.render_first(others[-1], generation=True),
            )
        else:
            plain, prompted = self.render([QUESTION]), self.render([QUESTION], generation=True)
        plain, prompted = plain or "", prompted or plain or ""
        at = len(os.path.commonprefix([plain, prompted]))
        for token in self.special.finditer(prompted):
            if token.start() < at < token.end():
                at = token.start()  # two tokens that begin alike
        return prompted[at:]


# -- Special tokens that people have typed, kept apart from those that a chat template writes.
#
#     people's text -> hide -> the template -> split -> tokens; typed ones become plain text's
#
# A typed one is replaced by two characters: ``ESCAPE`` and one that numbers it. ``ESCAPE`` in
# people's text is replaced in the same way, so that any text comes back as it was.


ESCAPE = "\U000f0000"
ESCAPED_IN_JSON = "\\udb80\\udc00"  # what a template makes of it that writes JSON in ASCII
_FIRST = ord(ESCAPE) + 1
_REASONING = re.compile(r"think|thought|reason", re.IGNORECASE)


class SpecialTokenEscapes:
    """Replaces the special tokens of one tokenizer in people's text, counting them."""

    def __init__(
        self, special_tokens: Sequence[str], turn_tokens: Collection[str], counters: Counters
    ) -> None:
        """Take the special tokens as text; ``turn_tokens``: those that no answer has."""
        self._counters = counters
        self._typed = [ESCAPE, *sorted(set(special_tokens), key=len, reverse=True)]
        self._number = {text: number for number, text in enumerate(self._typed)}
        self._all = longest_match_pattern(self._typed)
        others = [text for text in self._typed if not _REASONING.search(text)]
        self._but_reasoning = longest_match_pattern(others)
        own = {text for text in others if text != ESCAPE and text not in turn_tokens}
        self._but_own = longest_match_pattern([text for text in others if text not in own])
        self._own = longest_match_pattern(sorted(own))
        last = chr(_FIRST + len(self._typed) - 1)
        self._escaped = re.compile(f"{ESCAPE}([{chr(_FIRST)}-{last}])")

    def hide_in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with typed special tokens hidden, in whatever text they have.

        An assistant's own marks stay, of reasoning (``</think>``) and of calls (``<tool_call>``):
        they are the answer's form. Those around turns are nobody's to write.
        """
        return [
            self._hide_in_answer(m) if m["role"] == "assistant" else self.hide(m) for m in messages
        ]

    def _hide_in_answer(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message.get("content")
        self._counters.own_controls += len(self._own.findall(text)) if text else 0
        return {
            key: self.hide(value, self._but_own if key == "content" else self._but_reasoning)
            for key, value in message.items()
        }

    def hide(self, value: Any, typed: re.Pattern[str] | None = None) -> Any:
        """Return a value of JSON types with typed special tokens hidden in all of its texts."""
        if isinstance(value, str):
            return (typed or self._all).sub(self._hide_one, value)
        if isinstance(value, dict):
            return {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
        return [self.hide(item, typed) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield the pieces of a text: (piece, None), or for an escape (it, what was typed)."""
        for number, piece in enumerate(self._escaped.split(text)):
            if number % 2:
                yield ESCAPE + piece, self._typed[ord(piece) - _FIRST]
            elif piece:
                yield piece, None

    def _hide_one(self, found: re.Match[str]) -> str:
        self._counters.control_texts += found[0] != ESCAPE
        return ESCAPE + chr(_FIRST + self._number[found[0]])


def longest_match_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of ``texts`` at a position.

    It shares their beginnings: some models have thousands of reserved tokens, and each alternative
    would be tried at each position.
    """
    tree: dict[str, Any] = {}
    for text in filter(None, texts):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_join_alternatives(tree) or r"(?!)")


def _join_alternatives(node: dict[str, Any]) -> str:
    ways = [re.escape(char) + _join_alternatives(below) for char, below in node.items() if char]
    if not ways:
        return ""
    either = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return f"{either}?" if "" in node else either


# -- Blocks: what a template marks by {% generation %}.


MARK = "\ufdd0"  # no character, by Unicode
_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def mark_generation_blocks(template: Any) -> str | None:
    """Return a template with MARK at the begin and end of its {% generation %} blocks, if any."""
    if not isinstance(template, str) or not _BLOCK.search(template):
        return None

    def marked(found: re.Match[str]) -> str:
        left, end, right = found.groups()
        if end:
            return f"{{%{left} print '{MARK}' %}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{% print '{MARK}' {right}%}}"

    return _BLOCK.sub(marked, template)


def find_marked_blocks(marked: str, full: str) -> list[Span] | None:
    """Return what lies between marks; None if ``full`` is not the same text without them."""
    pieces, spans, at = marked.split(MARK), [], 0
    if "".join(pieces) != full:
        return None
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return spans


def group_by_answer(
    blocks: Sequence[Span], answers: Sequence[Span | None]
) -> list[tuple[Span, ...]]:
    """Return the blocks in each answer, where there are not as many as answers.

    A block is of the last answer that begins before its end.
    """
    shares: list[list[Span]] = [[] for _ in answers]
    for block in blocks:
        begun = [n for n, span in enumerate(answers) if span is not None and span[0] < block[1]]
        if block[0] < block[1]:
            shares[begun[-1] if begun else 0].append(block)
    return [*map(tuple, shares)]


# -- Answers of a template without blocks: one strategy after another.


class AnswerFinder:
    """Finds answers in texts of one template, whose special tokens match ``special``."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        """Take the special tokens as text."""
        self._tokens, self.special = tuple(special_tokens), longest_match_pattern(special_tokens)
        self._next_special = re.compile(rf"\s*({self.special.pattern})")

    def find(self, chat: RenderedChat, answers: Sequence[int]) -> list[Span | None]:
        """Return the characters of each of ``answers`` (numbers of messages); None if unsure."""
        spans = [self._find_by_beginnings(chat, number) for number in answers]
        if None in spans:  # beginnings are not to be relied on: the others go first
            spans = [
                self._find_by_calls(chat, number) or self._find_by_probe(chat, number) or known
                for number, known in zip(answers, spans, strict=True)
            ]
        end = 0
        for at, span in enumerate(spans):
            if span is not None and span[0] < end:
                spans[at] = None
            elif span is not None:
                end = span[1]
        return spans

    def is_ended(self, full: str, span: Span, message: dict[str, Any]) -> bool:
        """Return whether an answer ends with a special token, at which a model stops.

        White space after it, in a block that the template marks, does not matter. A token with
        which its own words end is none.
        """
        answer = full[slice(*span)].rstrip()
        words = (message.get("content") or "").rpartition("</think>")[2].strip()
        is_own = words.endswith(self._tokens) and answer.endswith(words)
        return answer.endswith(self._tokens) and not is_own

    def extend_to_next_opening(
        self, chat: RenderedChat, number: int, span: Span
    ) -> tuple[str, Span] | None:
        """Return the text, and an answer together with the special token that follows it.

        Of a template that ends no answer it is the one at which a model stops: it opens the turn
        of the user, or of the tools that the answer calls. After a last answer, which stays as the
        template writes it, it is added to the text: as it follows another that is answered there.
        None if there is no such token.
        """
        full, messages = chat.full, chat.messages
        stop = span[0] + len(full[slice(*span)].rstrip())
        if number + 1 < len(messages):
            is_end = messages[number + 1]["role"] not in ("assistant", "system")
            found = self._next_special.match(full, stop) if is_end else None
            return (full, (span[0], found.end())) if found else None
        if full[stop:].strip():
            return None  # what ends the whole chat
        probed = chat.with_probe(number)
        alone = chat.text_after_probe(probed)
        last = alone.rstrip()  # calls of tools
        for follower in [*([RESULT] if messages[number].get("tool_calls") else []), QUESTION]:
            followed = chat.text_after_probe([*probed, follower])
            found = self._next_special.match(followed, len(last))
            if found and followed.startswith(last):
                full = full.removesuffix(alone[len(last) :]) + found[0]
                return full, (span[0], len(full))
        return None

    # -- By beginnings.

    def _find_by_beginnings(self, chat: RenderedChat, number: int) -> Span | None:
        before, after = chat.prompt(number), chat.render_first(number + 1)
        if before is None or after is None or not chat.full.startswith(after):
            return None
        if not after.startswith(before) or after == before:
            return None
        span = len(before), len(after)
        if self.is_ended(chat.full, span, chat.messages[number]):
            return span[0], len(after.rstrip())  # white space after the end is not the answer's
        return span

    # -- By calls of tools.

    def _find_by_calls(self, chat: RenderedChat, number: int) -> Span | None:
        """Return the characters of an answer that calls tools.

        It ends before the next message's content, with the special token before which the text is
        most like the answer that ends the chat: its reasoning may be left out later, its calls are
        not.
        """
        full, calls = chat.full, chat.messages[number].get("tool_calls")
        if not calls:
            return None
        start = chat.prompt_end(number, full) or self._start_after_prompt(chat, number)
        limit = chat.next_content_start(number)
        alone = (chat.render_first(number + 1) or "").rstrip()
        if start is None or not alone.endswith(self._tokens):
            return None
        end = max((token for token in self._tokens if alone.endswith(token)), key=len)
        stop = self._find_most_similar_end(full[:limit], start, alone.removesuffix(end), end)
        names = [call.get("function", call)["name"] for call in calls]
        if stop is None or not any(name in full[start:stop] for name in names):
            return None
        return start, stop

    def _find_most_similar_end(self, text: str, start: int, answer: str, end: str) -> int | None:
        """Return the end of that ``end`` in ``text`` before which it is most like ``answer``'s end.

        It is after ``start``; of several it is the last.
        """
        best, most = None, 1
        for token in self.special.finditer(text, start):
            before = text[: token.start()].rstrip()
            same = len(os.path.commonprefix([before[::-1], answer[::-1]]))
            if same >= most and token[0] == end:
                best, most = token.end(), same
        return best

    # -- By a probe.

    def _find_by_probe(self, chat: RenderedChat, number: int) -> Span | None:
        # Calls are written after the content, and belong to the answer.
        probed = chat.with_probe(number)
        has_calls = probed[number].pop("tool_calls", None) is not None
        whole = chat.render(probed)
        if whole is None or whole.count(PROBE) != 1:
            return None
        before, _, after = whole.partition(PROBE)
        start = (
            chat.prompt_end(number, before)
            or self._start_after_opening(before, chat.generation_prompt, is_first=number == 0)
            or self._start_after_prompt(chat, number)
            or len(before)
        )
        start = min(start, len(before))
        if chat.full[:start] != before[:start]:
            return None
        is_last = number + 1 == len(chat.messages)
        alone = whole if is_last else chat.render(probed[: number + 1])
        stop = self._end_after_probe(chat, number, after, alone)
        if stop is None or (has_calls and stop > chat.next_content_start(number)):
            return None  # its calls are written elsewhere, and others' words lie between
        return (start, stop) if start < stop else None

    def _end_after_probe(
        self, chat: RenderedChat, number: int, after: str, alone: str | None
    ) -> int | None:
        """Return where an answer ends, with the special tokens that end its turn; None if unsure.

        ``after``: what follows its probe. ``alone``: the text in which it ends the chat.
        """
        full, after_alone = chat.full, (alone or "").partition(PROBE)[2]
        ends = self._common_length(after, after_alone)
        if not ends and (alone is None or self._next_special.match(after_alone)):
            ends = self._shared_end_length(chat, number, after)
        if full.endswith(after):
            return len(full) - len(after) + ends
        # The turn ends with another token: calls of tools have their own in some templates.
        first = self._next_special.match(after)
        rest = after[first.end() :] if first else after
        stop = len(full) - len(rest)
        return stop if full.endswith(rest) and full[:stop].endswith(self._tokens) else None

    def _shared_end_length(self, chat: RenderedChat, number: int, after: str) -> int:
        """Return the length of a special token at the start of ``after`` that ends others' turns.

        Some templates end the last answer by a token of its own. What follows another answer may
        then be the opening of the next turn: the generation prompt begins with it, or it follows
        only those that the same role follows.
        """
        first = self._next_special.match(after)
        if first is None or chat.generation_prompt.lstrip().startswith(first[1]):
            return 0
        roles = [*(message["role"] for message in chat.messages), None]
        follower = roles[number + 1]
        probed = [QUESTION, *chat.messages]
        for other, role in enumerate(roles[:-1]):
            if role != "assistant" and not roles[other + 1] == follower != "assistant":
                probed = chat.with_probe(other)
                break
        end = self._next_special.match(chat.text_after_probe(probed))
        return first.end() if end and end[1] == first[1] else 0

    def _common_length(self, one: str, other: str) -> int:
        """Return how far the same special tokens begin both texts."""
        end = 0
        while (a := self._next_special.match(one, end)) and other.startswith(a[0], end):
            end = a.end()
        return end

    # -- Where an answer starts, if the text does not begin with its prompt.

    def _start_after_prompt(self, chat: RenderedChat, number: int) -> int | None:
        """Return where an answer begins: after the prompt that follows the message before it.

        Where the prompt opens a block of reasoning that a finished turn does not have, after what
        both have. A finished turn may have an opening that the prompt leaves out (after tools).
        """
        if number == 0:
            return None
        probed, full, opening = chat.with_probe(number - 1), chat.full, chat.generation_prompt
        before = probed[:number]
        texts = [chat.render(probed), chat.render(before), chat.render(before, generation=True)]
        if any(text is None or text.count(PROBE) != 1 for text in texts):
            return None
        rest, plain, prompt = ((text or "").partition(PROBE)[2] for text in texts)
        if not full.endswith(rest):
            return None
        # The end of the turn before may be another than where it ends the chat.
        least = len(os.path.commonprefix([plain, prompt]))
        least = max(least, len(prompt) - len(opening) if prompt.endswith(opening) else 0)
        for length in [len(prompt), *self._piece_ends(prompt)]:
            if (length > least or length == len(prompt)) and rest.startswith(prompt[:length]):
                start = len(full) - len(rest) + length
                return start + len(opening) * full.startswith(opening, start)
        return None

    def _start_after_opening(self, before: str, opening: str, is_first: bool) -> int | None:
        """Return where an answer begins in ``before``, the text up to its content; None if unsure.

        After what opens an answer's turn, or the part of it that is there. Before a chat's first
        message there is no other turn, whose opening could be taken for its own.
        """
        for length in self._piece_ends(opening):
            at = before.rfind(opening[:length])
            is_own = is_first and length == len(opening)
            if at >= 0 and (is_own or not self.special.search(before, at + length)):
                return at + length
        return None

    def _piece_ends(self, opening: str) -> list[int]:
        """Return where special tokens and lines of an opening end, the longest part first."""
        ends = [found.end() for found in re.finditer(rf"{self.special.pattern}|\n", opening)]
        return sorted({*ends, len(opening)} - {0}, reverse=True)
