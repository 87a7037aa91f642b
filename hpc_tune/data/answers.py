"""Find which characters of a rendered chat the assistant wrote.

    {% generation %} blocks of the template -> beginnings -> calls -> probes: the first that fits

*Blocks* are marked by the template itself. *Beginnings*: answer i is the text between
render(messages[:i], with the generation prompt) and render(messages[:i + 1]), if both are prefixes
of the whole text: it is what the model must write after the prompt that it gets at inference.
Templates that render a turn differently once others follow (they drop earlier reasoning, or append
an end to the whole chat) break this. *Calls*: an answer that calls tools lies between the contents
of its neighbors, and ends as it does when it ends the chat. *Probes*: the whole chat is rendered
again with another text in place of answer i. What both texts share before and after that place is
not part of the answer.

An answer ends with the special token that ends its turn, which the model must learn as well.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from hpc_tune.data.counts import Counters

# -- A chat as its template renders it: whole, only its first messages, or with probes in it.


PROBE = "xPr0be7Qx"
QUESTION = {"role": "user", "content": PROBE}
RESULT = {"role": "tool", "content": PROBE}
Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]


class Render(Protocol):
    """Renders messages to text, or returns None if the template refuses them."""

    def __call__(self, messages: Messages, generation: bool = False) -> str | None:
        """Return the text, with the generation prompt at its end if ``generation``."""


@dataclass
class RenderedChat:
    """The messages of a chat, and their text ``full``, which is ``render(messages)``.

    ``special`` is a pattern that matches special tokens.
    """

    render: Render
    messages: Messages
    full: str
    special: re.Pattern[str]
    _beginnings: dict[tuple[int, bool], str | None] = field(default_factory=dict)

    def render_first(self, count: int, generation: bool = False) -> str | None:
        """Return the (cached) text of the first ``count`` messages; None if it is refused."""
        if count == len(self.messages) and not generation:
            return self.full
        key = (count, generation)
        if key not in self._beginnings:
            self._beginnings[key] = self.render(self.messages[:count], generation)
        return self._beginnings[key]

    def prompt(self, number: int) -> str | None:
        """Return the prompt from which message ``number`` is generated; None for the first one.

        Templates cannot render an empty list.
        """
        return self.render_first(number, generation=True) if number else None

    def prompt_end(self, number: int, text: str) -> int | None:
        """Return the length of message ``number``'s prompt, or None if ``text`` lacks it."""
        prompt = self.prompt(number)
        return len(prompt) if prompt and text.startswith(prompt) else None

    def with_probe(self, number: int) -> list[dict[str, Any]]:
        """Return the messages with a probe in place of the content of message ``number``."""
        probe = {**self.messages[number], "content": PROBE}
        return [*self.messages[:number], probe, *self.messages[number + 1 :]]

    def text_after_probe(self, messages: Messages) -> str:
        """Return what follows the probe in the text of ``messages``; empty without a probe."""
        return (self.render(messages) or "").partition(PROBE)[2]

    def next_content_start(self, number: int) -> int:
        """Return where the content of the message after ``number`` begins, or ``full`` ends."""
        if number + 1 == len(self.messages):
            return len(self.full)
        before, found, _ = (self.render(self.with_probe(number + 1)) or "").partition(PROBE)
        return len(os.path.commonprefix([self.full, before])) if found else len(self.full)

    @cached_property
    def generation_prompt(self) -> str:
        """The generation prompt alone, such as ``<|im_start|>assistant`` and a newline.

        It is taken after a turn of another role: a final answer may end with a token of its own.
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
                at = token.start()  # two tokens with a common prefix
        return prompted[at:]


# -- Special tokens that users typed, kept apart from those that the chat template writes.
#
#     messages -> hide -> chat template -> split -> tokens; typed special tokens become plain text
#
# A typed special token is replaced by two characters: ``ESCAPE`` and one that encodes its number.
# A typed ``ESCAPE`` is replaced in the same way, so that any text can be restored exactly.


ESCAPE = "\U000f0000"
ESCAPED_IN_JSON = "\\udb80\\udc00"  # ``ESCAPE`` in ASCII JSON, which some templates write
_FIRST = ord(ESCAPE) + 1
_REASONING = re.compile(r"think|thought|reason", re.IGNORECASE)


class SpecialTokenEscapes:
    """Replaces one tokenizer's special tokens in the text of messages, and counts them."""

    def __init__(
        self, special_tokens: Sequence[str], turn_tokens: Collection[str], counters: Counters
    ) -> None:
        """Take the special tokens as text; ``turn_tokens``: those that no answer may contain."""
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
        """Return messages with typed special tokens hidden in all of their text.

        The assistant's own tokens stay, for reasoning (``</think>``) and calls (``<tool_call>``):
        they are part of an answer's format. Tokens around turns are hidden in every message.
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
        """Return a JSON value with typed special tokens hidden in all of its strings."""
        if isinstance(value, str):
            return (typed or self._all).sub(self._hide_one, value)
        if isinstance(value, dict):
            return {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
        return [self.hide(item, typed) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield a text in pieces: (piece, None), or for an escape (escape, what was typed)."""
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

    The pattern shares common prefixes: some models have thousands of reserved tokens, and a plain
    alternation would try each of them at each position.
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


# -- Blocks: what a template marks with {% generation %}.


MARK = "\ufdd0"  # a Unicode noncharacter
_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def mark_generation_blocks(template: Any) -> str | None:
    """Return a template with MARK at both ends of its {% generation %} blocks; None without any."""
    if not isinstance(template, str) or not _BLOCK.search(template):
        return None

    def marked(found: re.Match[str]) -> str:
        left, end, right = found.groups()
        if end:
            return f"{{%{left} print '{MARK}' %}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{% print '{MARK}' {right}%}}"

    return _BLOCK.sub(marked, template)


def find_marked_blocks(marked: str, full: str) -> list[Span] | None:
    """Return the spans between marks; None if ``marked`` without its marks is not ``full``."""
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
    """Return the blocks in each answer, for when there are not as many blocks as answers.

    A block belongs to the last answer that begins before the block ends.
    """
    shares: list[list[Span]] = [[] for _ in answers]
    for block in blocks:
        begun = [n for n, span in enumerate(answers) if span is not None and span[0] < block[1]]
        if block[0] < block[1]:
            shares[begun[-1] if begun else 0].append(block)
    return [*map(tuple, shares)]


# -- Answers of a template without blocks: one strategy after another.


class AnswerFinder:
    """Finds answers in the texts of one template; ``special`` matches its special tokens."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        """Take the special tokens as text."""
        self._tokens, self.special = tuple(special_tokens), longest_match_pattern(special_tokens)
        self._next_special = re.compile(rf"\s*({self.special.pattern})")

    def find(self, chat: RenderedChat, answers: Sequence[int]) -> list[Span | None]:
        """Return the span of each of ``answers`` (numbers of messages); None where unsure."""
        spans = [self._find_by_beginnings(chat, number) for number in answers]
        if None in spans:  # beginnings cannot be trusted in this chat: try the others first
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

        Whitespace after the token, in a block that the template marks, does not matter. A special
        token at the end of the message's own content does not count.
        """
        answer = full[slice(*span)].rstrip()
        words = (message.get("content") or "").rpartition("</think>")[2].strip()
        is_own = words.endswith(self._tokens) and answer.endswith(words)
        return answer.endswith(self._tokens) and not is_own

    def extend_to_next_opening(
        self, chat: RenderedChat, number: int, span: Span
    ) -> tuple[str, Span] | None:
        """Return the text, and an answer's span extended by the special token that follows it.

        If a template ends answers with no special token, a model stops at the one that opens the
        next turn: the user's, or that of the tools that the answer calls. If the answer is the
        last message, this token is appended to the text, as it is written when that turn follows.
        None if there is no such token.
        """
        full, messages = chat.full, chat.messages
        stop = span[0] + len(full[slice(*span)].rstrip())
        if number + 1 < len(messages):
            is_end = messages[number + 1]["role"] not in ("assistant", "system")
            found = self._next_special.match(full, stop) if is_end else None
            return (full, (span[0], found.end())) if found else None
        if full[stop:].strip():
            return None  # text that ends the whole chat
        probed = chat.with_probe(number)
        alone = chat.text_after_probe(probed)
        last = alone.rstrip()  # tool calls
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
            return span[0], len(after.rstrip())  # without the whitespace after the end token
        return span

    # -- By tool calls.

    def _find_by_calls(self, chat: RenderedChat, number: int) -> Span | None:
        """Return the span of an answer that calls tools.

        The answer ends before the next message's content, at the special token whose preceding
        text is most like the answer as the end of the chat: a template may leave out the reasoning
        of earlier answers, but not their calls.
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
        """Return the end of the ``end`` token whose preceding text is most like ``answer``'s end.

        Only tokens in ``text`` after ``start`` count; among equally good ones, the last is taken.
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
            return None  # its calls are written elsewhere, with other messages in between
        return (start, stop) if start < stop else None

    def _end_after_probe(
        self, chat: RenderedChat, number: int, after: str, alone: str | None
    ) -> int | None:
        """Return where an answer ends, with the special tokens that end its turn; None if unsure.

        ``after`` follows its probe in the whole chat; ``alone`` is the chat up to this answer.
        """
        full, after_alone = chat.full, (alone or "").partition(PROBE)[2]
        ends = self._common_length(after, after_alone)
        if not ends and (alone is None or self._next_special.match(after_alone)):
            ends = self._shared_end_length(chat, number, after)
        if full.endswith(after):
            return len(full) - len(after) + ends
        # The turn ends with another token: some templates have a separate one for tool calls.
        first = self._next_special.match(after)
        rest = after[first.end() :] if first else after
        stop = len(full) - len(rest)
        return stop if full.endswith(rest) and full[:stop].endswith(self._tokens) else None

    def _shared_end_length(self, chat: RenderedChat, number: int, after: str) -> int:
        """Return the length of the token that begins ``after`` if it also ends other roles' turns.

        Some templates end the final answer with a token of its own. The token after an earlier
        answer may then open the next turn instead: the generation prompt begins with that token, or
        it only stands before turns of one role.
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
        """Return the length of the special tokens with which both texts begin."""
        end = 0
        while (a := self._next_special.match(one, end)) and other.startswith(a[0], end):
            end = a.end()
        return end

    # -- Where an answer starts, if the text does not begin with its prompt.

    def _start_after_prompt(self, chat: RenderedChat, number: int) -> int | None:
        """Return where an answer begins: after the prompt that follows the previous message.

        If the prompt opens a reasoning block that a finished turn lacks, it is after the part that
        both share. A finished turn may have an opening that the prompt leaves out (after tools).
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
        # The previous turn may end differently here than when it ends the chat.
        least = len(os.path.commonprefix([plain, prompt]))
        least = max(least, len(prompt) - len(opening) if prompt.endswith(opening) else 0)
        for length in [len(prompt), *self._piece_ends(prompt)]:
            if (length > least or length == len(prompt)) and rest.startswith(prompt[:length]):
                start = len(full) - len(rest) + length
                return start + len(opening) * full.startswith(opening, start)
        return None

    def _start_after_opening(self, before: str, opening: str, is_first: bool) -> int | None:
        """Return where an answer begins in ``before``, the text up to its content; None if unsure.

        It begins after its turn's opening, or after as much of the opening as is there. If the
        answer is the chat's first message, the opening cannot be mistaken for another turn's.
        """
        for length in self._piece_ends(opening):
            at = before.rfind(opening[:length])
            is_own = is_first and length == len(opening)
            if at >= 0 and (is_own or not self.special.search(before, at + length)):
                return at + length
        return None

    def _piece_ends(self, opening: str) -> list[int]:
        """Return where special tokens and lines end in ``opening``, the last place first."""
        ends = [found.end() for found in re.finditer(rf"{self.special.pattern}|\n", opening)]
        return sorted({*ends, len(opening)} - {0}, reverse=True)
