"""Find which characters of a rendered chat the assistant wrote.

    {% generation %} blocks of the template -> beginnings -> calls -> sentinels: the first that fits

*Blocks* are marked by the template itself. *Beginnings*: answer i is the text between
render(messages[:i], with the generation prompt) and render(messages[:i + 1]), if both are prefixes
of the whole text: it is what the model must write after the prompt that it gets at inference.
Templates that render a turn differently once others follow (they drop earlier reasoning, or append
an end to the whole chat) break this. *Calls*: an answer that calls tools lies between the contents
of its neighbors, and ends as it does when it ends the chat. *Sentinels*: the whole chat is rendered
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

# -- A chat as its template renders it: whole, only its first messages, or with sentinels in it.


SENTINEL = "xPr0be7Qx"
SENTINEL_QUESTION = {"role": "user", "content": SENTINEL}
SENTINEL_TOOL_RESULT = {"role": "tool", "content": SENTINEL}
Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]


class RenderFunction(Protocol):
    """Renders messages to text, or returns None if the template refuses them."""

    def __call__(self, messages: Messages, include_generation_prompt: bool = False) -> str | None:
        """Return the text; ``include_generation_prompt``: with the generation prompt at its end."""


@dataclass
class RenderedChat:
    """The messages of a chat, and their text ``full_text``, which is ``render(messages)``.

    ``special`` is a pattern that matches special tokens.
    """

    render: RenderFunction
    messages: Messages
    full_text: str
    special: re.Pattern[str]
    _rendered_prefixes: dict[tuple[int, bool], str | None] = field(default_factory=dict)

    def render_first_messages(
        self, count: int, include_generation_prompt: bool = False
    ) -> str | None:
        """Return the (cached) text of the first ``count`` messages; None if it is refused."""
        if count == len(self.messages) and not include_generation_prompt:
            return self.full_text
        key = (count, include_generation_prompt)
        if key not in self._rendered_prefixes:
            self._rendered_prefixes[key] = self.render(
                self.messages[:count], include_generation_prompt
            )
        return self._rendered_prefixes[key]

    def prompt(self, index: int) -> str | None:
        """Return the prompt from which message ``index`` is generated; None for the first one.

        Templates cannot render an empty list.
        """
        return self.render_first_messages(index, include_generation_prompt=True) if index else None

    def prompt_end(self, index: int, text: str) -> int | None:
        """Return the length of message ``index``'s prompt, or None if ``text`` lacks it."""
        prompt = self.prompt(index)
        return len(prompt) if prompt and text.startswith(prompt) else None

    def messages_with_sentinel(self, index: int) -> list[dict[str, Any]]:
        """Return the messages with a sentinel in place of the content of message ``index``."""
        sentinel = {**self.messages[index], "content": SENTINEL}
        return [*self.messages[:index], sentinel, *self.messages[index + 1 :]]

    def text_after_sentinel(self, messages: Messages) -> str:
        """Return what follows the sentinel in the text of ``messages``; empty without one."""
        return (self.render(messages) or "").partition(SENTINEL)[2]

    def next_content_start(self, index: int) -> int:
        """Return where the content after message ``index`` begins, or ``full_text`` ends."""
        if index + 1 == len(self.messages):
            return len(self.full_text)
        text = self.render(self.messages_with_sentinel(index + 1)) or ""
        prefix, mark, _ = text.partition(SENTINEL)
        return len(os.path.commonprefix([self.full_text, prefix])) if mark else len(self.full_text)

    @cached_property
    def generation_prompt(self) -> str:
        """The generation prompt alone, such as ``<|im_start|>assistant`` and a newline.

        It is taken after a turn of another role: a final answer may end with a token of its own.
        """
        turns = [n for n, m in enumerate(self.messages, 1) if m["role"] != "assistant"]
        if turns:
            plain_text = self.render_first_messages(turns[-1])
            prompted_text = self.render_first_messages(turns[-1], include_generation_prompt=True)
        else:
            plain_text = self.render([SENTINEL_QUESTION])
            prompted_text = self.render([SENTINEL_QUESTION], include_generation_prompt=True)
        plain_text, prompted_text = plain_text or "", prompted_text or plain_text or ""
        start = len(os.path.commonprefix([plain_text, prompted_text]))
        for token in self.special.finditer(prompted_text):
            if token.start() < start < token.end():
                start = token.start()  # two tokens with a common prefix
        return prompted_text[start:]


# -- Special tokens that users typed, kept apart from those that the chat template writes.
#
#     messages -> hide -> chat template -> split -> tokens; typed special tokens become plain text
#
# A typed special token is replaced by two characters: ``ESCAPE`` and one that encodes its number.
# A typed ``ESCAPE`` is replaced in the same way, so that any text can be restored exactly.


ESCAPE = "\U000f0000"
ESCAPE_IN_ASCII_JSON = "\\udb80\\udc00"  # ``ESCAPE`` in ASCII JSON, which some templates write
_FIRST_ESCAPE_CODE = ord(ESCAPE) + 1
_REASONING_PATTERN = re.compile(r"think|thought|reason", re.IGNORECASE)


class SpecialTokenEscapes:
    """Replaces one tokenizer's special tokens in the text of messages, and counts them."""

    def __init__(
        self, special_tokens: Sequence[str], turn_tokens: Collection[str], counters: Counters
    ) -> None:
        """Take the special tokens as text; ``turn_tokens``: those that no answer may contain."""
        self._counters = counters
        self._typed_tokens = [ESCAPE, *sorted(set(special_tokens), key=len, reverse=True)]
        self._token_indices = {text: index for index, text in enumerate(self._typed_tokens)}
        self._all_pattern = longest_match_pattern(self._typed_tokens)
        other_tokens = [text for text in self._typed_tokens if not _REASONING_PATTERN.search(text)]
        self._all_but_reasoning_pattern = longest_match_pattern(other_tokens)
        own_tokens = {text for text in other_tokens if text != ESCAPE and text not in turn_tokens}
        self._all_but_own_pattern = longest_match_pattern(
            [text for text in other_tokens if text not in own_tokens]
        )
        self._own_pattern = longest_match_pattern(sorted(own_tokens))
        last = chr(_FIRST_ESCAPE_CODE + len(self._typed_tokens) - 1)
        self._escape_pattern = re.compile(f"{ESCAPE}([{chr(_FIRST_ESCAPE_CODE)}-{last}])")

    def hide_in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with typed special tokens hidden in all of their text.

        The assistant's own tokens stay, for reasoning (``</think>``) and calls (``<tool_call>``):
        they are part of an answer's format. Tokens around turns are hidden in every message.
        """
        return [
            self._hide_special_tokens_in_answer(m)
            if m["role"] == "assistant"
            else self.hide_special_tokens(m)
            for m in messages
        ]

    def _hide_special_tokens_in_answer(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message.get("content")
        self._counters.own_controls += len(self._own_pattern.findall(text)) if text else 0
        return {
            key: self.hide_special_tokens(
                value,
                self._all_but_own_pattern if key == "content" else self._all_but_reasoning_pattern,
            )
            for key, value in message.items()
        }

    def hide_special_tokens(self, value: Any, typed_pattern: re.Pattern[str] | None = None) -> Any:
        """Return a JSON value with typed special tokens hidden in all of its strings."""
        if isinstance(value, str):
            return (typed_pattern or self._all_pattern).sub(self._hide_token, value)
        if isinstance(value, dict):
            return {
                self.hide_special_tokens(key, typed_pattern): self.hide_special_tokens(
                    item, typed_pattern
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.hide_special_tokens(item, typed_pattern) for item in value]
        return value

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield a text in pieces: (piece, None), or for an escape (escape, what was typed)."""
        for index, piece in enumerate(self._escape_pattern.split(text)):
            if index % 2:
                yield ESCAPE + piece, self._typed_tokens[ord(piece) - _FIRST_ESCAPE_CODE]
            elif piece:
                yield piece, None

    def _hide_token(self, match: re.Match[str]) -> str:
        self._counters.control_texts += match[0] != ESCAPE
        return ESCAPE + chr(_FIRST_ESCAPE_CODE + self._token_indices[match[0]])


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
    branches = [re.escape(char) + _join_alternatives(child) for char, child in node.items() if char]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if "" in node else pattern


# -- Blocks: what a template marks with {% generation %}.


BLOCK_MARKER = "\ufdd0"  # a Unicode noncharacter
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def mark_generation_blocks(template: Any) -> str | None:
    """Return a template with its {% generation %} blocks between BLOCK_MARKERs; None without."""
    if not isinstance(template, str) or not _GENERATION_TAG.search(template):
        return None

    def marked_text(match: re.Match[str]) -> str:
        left, end, right = match.groups()
        if end:
            return f"{{%{left} print '{BLOCK_MARKER}' %}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{% print '{BLOCK_MARKER}' {right}%}}"

    return _GENERATION_TAG.sub(marked_text, template)


def find_marked_blocks(marked_text: str, full_text: str) -> list[Span] | None:
    """Return the spans between marks; None if ``marked_text`` is not ``full_text`` but for them."""
    pieces, spans, position = marked_text.split(BLOCK_MARKER), [], 0
    if "".join(pieces) != full_text:
        return None
    for index, piece in enumerate(pieces):
        if index % 2:
            spans.append((position, position + len(piece)))
        position += len(piece)
    return spans


def group_by_answer(
    blocks: Sequence[Span], answers: Sequence[Span | None]
) -> list[tuple[Span, ...]]:
    """Return the blocks in each answer, for when there are not as many blocks as answers.

    A block belongs to the last answer that begins before the block ends, else to the first one.
    Empty blocks are left out.
    """
    shares: list[list[Span]] = [[] for _ in answers]
    for block in blocks:
        indices = [n for n, span in enumerate(answers) if span is not None and span[0] < block[1]]
        if block[0] < block[1]:
            shares[indices[-1] if indices else 0].append(block)
    return [*map(tuple, shares)]


# -- Answers of a template without blocks: one strategy after another.


class AnswerFinder:
    """Finds answers in the texts of one template; ``special`` matches its special tokens."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        """Take the special tokens as text."""
        self._tokens, self.special = tuple(special_tokens), longest_match_pattern(special_tokens)
        self._next_special_token = re.compile(rf"\s*({self.special.pattern})")

    def find(self, chat: RenderedChat, answer_indices: Sequence[int]) -> list[Span | None]:
        """Return the span of each of ``answer_indices`` (of messages); None where unsure."""
        spans = [self._find_by_prefixes(chat, index) for index in answer_indices]
        if None in spans:  # beginnings cannot be trusted in this chat: try the others first
            spans = [
                self._find_by_tool_calls(chat, index)
                or self._find_by_sentinel(chat, index)
                or prefix_span
                for index, prefix_span in zip(answer_indices, spans, strict=True)
            ]
        end = 0
        for number, span in enumerate(spans):
            if span is not None and span[0] < end:
                spans[number] = None
            elif span is not None:
                end = span[1]
        return spans

    def has_end_token(self, full_text: str, span: Span, message: dict[str, Any]) -> bool:
        """Return whether an answer ends with a special token, at which a model stops.

        Whitespace after the token, in a block that the template marks, does not matter. A special
        token at the end of the message's own content does not count.
        """
        answer = full_text[slice(*span)].rstrip()
        content = (message.get("content") or "").rpartition("</think>")[2].strip()
        is_own = content.endswith(self._tokens) and answer.endswith(content)
        return answer.endswith(self._tokens) and not is_own

    def extend_by_next_turn_token(
        self, chat: RenderedChat, index: int, span: Span
    ) -> tuple[str, Span] | None:
        """Return the text, and an answer's span extended by the special token that follows it.

        If a template ends answers with no special token, a model stops at the one that opens the
        next turn: the user's, or that of the tools that the answer calls. If the answer is the
        last message, this token is appended to the text, as it is written when that turn follows.
        None if there is no such token.
        """
        full_text, messages = chat.full_text, chat.messages
        stop = span[0] + len(full_text[slice(*span)].rstrip())
        if index + 1 < len(messages):
            is_end = messages[index + 1]["role"] not in ("assistant", "system")
            match = self._next_special_token.match(full_text, stop) if is_end else None
            return (full_text, (span[0], match.end())) if match else None
        if full_text[stop:].strip():
            return None  # text that ends the whole chat
        sentinel_messages = chat.messages_with_sentinel(index)
        text_as_last_turn = chat.text_after_sentinel(sentinel_messages)
        last = text_as_last_turn.rstrip()  # tool calls
        followers = [SENTINEL_TOOL_RESULT] if messages[index].get("tool_calls") else []
        for follower in [*followers, SENTINEL_QUESTION]:
            followed_text = chat.text_after_sentinel([*sentinel_messages, follower])
            match = self._next_special_token.match(followed_text, len(last))
            if match and followed_text.startswith(last):
                full_text = full_text.removesuffix(text_as_last_turn[len(last) :]) + match[0]
                return full_text, (span[0], len(full_text))
        return None

    # -- By beginnings.

    def _find_by_prefixes(self, chat: RenderedChat, index: int) -> Span | None:
        text_before, text_after = chat.prompt(index), chat.render_first_messages(index + 1)
        if text_before is None or text_after is None or not chat.full_text.startswith(text_after):
            return None
        if not text_after.startswith(text_before) or text_after == text_before:
            return None
        span = len(text_before), len(text_after)
        if self.has_end_token(chat.full_text, span, chat.messages[index]):
            return span[0], len(text_after.rstrip())  # without the whitespace after the end token
        return span

    # -- By tool calls.

    def _find_by_tool_calls(self, chat: RenderedChat, index: int) -> Span | None:
        """Return the span of an answer that calls tools.

        The answer is also rendered as the last turn. Here it ends with the same special token,
        before the next message's content, where the text before the token matches that answer's end
        best: a template may leave out the reasoning of earlier answers, but not their calls.
        """
        full_text, calls = chat.full_text, chat.messages[index].get("tool_calls")
        if not calls:
            return None
        start = chat.prompt_end(index, full_text) or self._start_after_prompt(chat, index)
        limit = chat.next_content_start(index)
        text_as_last_turn = (chat.render_first_messages(index + 1) or "").rstrip()
        if start is None or not text_as_last_turn.endswith(self._tokens):
            return None
        end = max((token for token in self._tokens if text_as_last_turn.endswith(token)), key=len)
        answer = text_as_last_turn.removesuffix(end).rstrip()
        stop = self._find_most_similar_end(full_text[:limit], start, answer, end)
        names = [call.get("function", call)["name"] for call in calls]
        if stop is None or not any(name in full_text[start:stop] for name in names):
            return None
        return start, stop

    def _find_most_similar_end(
        self, text: str, start: int, answer: str, end_token: str
    ) -> int | None:
        """Return the end of the ``end_token`` whose preceding text is most like ``answer``'s end.

        Only tokens in ``text`` after ``start`` count; of equally good ones, the last. None if no
        text before one ends as ``answer`` does, without the whitespace before the token.
        """
        best_end, max_common = None, 1
        for token in self.special.finditer(text, start):
            text_before = text[: token.start()].rstrip()
            num_common = len(os.path.commonprefix([text_before[::-1], answer[::-1]]))
            if num_common >= max_common and token[0] == end_token:
                best_end, max_common = token.end(), num_common
        return best_end

    # -- By a sentinel.

    def _find_by_sentinel(self, chat: RenderedChat, index: int) -> Span | None:
        # Calls are written after the content, and belong to the answer.
        messages = chat.messages_with_sentinel(index)
        has_calls = messages[index].pop("tool_calls", None) is not None
        sentinel_text = chat.render(messages)
        if sentinel_text is None or sentinel_text.count(SENTINEL) != 1:
            return None
        text_before, _, text_after = sentinel_text.partition(SENTINEL)
        start = (
            chat.prompt_end(index, text_before)
            or self._start_after_opening(
                text_before, chat.generation_prompt, is_first_message=index == 0
            )
            or self._start_after_prompt(chat, index)
            or len(text_before)
        )
        start = min(start, len(text_before))
        if chat.full_text[:start] != text_before[:start]:
            return None
        is_last = index + 1 == len(chat.messages)
        text_as_last_turn = sentinel_text if is_last else chat.render(messages[: index + 1])
        stop = self._end_after_sentinel(chat, index, text_after, text_as_last_turn)
        if stop is None or (has_calls and stop > chat.next_content_start(index)):
            return None  # its calls are written elsewhere, with other messages in between
        return (start, stop) if start < stop else None

    def _end_after_sentinel(
        self, chat: RenderedChat, index: int, text_after: str, text_as_last_turn: str | None
    ) -> int | None:
        """Return where an answer ends, with the special tokens that end its turn; None if unsure.

        ``text_after`` follows its sentinel in the whole chat; ``text_as_last_turn`` is the chat up
        to this answer, with the sentinel; None if the template refuses that.
        """
        full_text, ending = chat.full_text, (text_as_last_turn or "").partition(SENTINEL)[2]
        end_length = self._common_special_prefix_length(text_after, ending)
        if not end_length and (text_as_last_turn is None or self._next_special_token.match(ending)):
            end_length = self._shared_end_token_length(chat, index, text_after)
        if full_text.endswith(text_after):
            return len(full_text) - len(text_after) + end_length
        # The turn ends with another token: some templates have a separate one for tool calls.
        first_token = self._next_special_token.match(text_after)
        remaining_text = text_after[first_token.end() :] if first_token else text_after
        stop = len(full_text) - len(remaining_text)
        is_end = full_text.endswith(remaining_text) and full_text[:stop].endswith(self._tokens)
        return stop if is_end else None

    def _shared_end_token_length(self, chat: RenderedChat, index: int, text_after: str) -> int:
        """Return the length of the special token that begins ``text_after`` if it also ends other
        roles' turns, else 0.

        Some templates end the final answer with a token of its own. The token after an earlier
        answer may then open the next turn instead: the generation prompt begins with that token, or
        it only stands before turns of one role.
        """
        first_token = self._next_special_token.match(text_after)
        if first_token is None or chat.generation_prompt.lstrip().startswith(first_token[1]):
            return 0
        roles = [*(message["role"] for message in chat.messages), None]
        follower = roles[index + 1]
        sentinel_messages = [SENTINEL_QUESTION, *chat.messages]
        for number, role in enumerate(roles[:-1]):
            if role != "assistant" and not roles[number + 1] == follower != "assistant":
                sentinel_messages = chat.messages_with_sentinel(number)
                break
        end = self._next_special_token.match(chat.text_after_sentinel(sentinel_messages))
        return first_token.end() if end and end[1] == first_token[1] else 0

    def _common_special_prefix_length(self, text: str, other_text: str) -> int:
        """Return the length of the special tokens with which both texts begin."""
        end = 0
        while (a := self._next_special_token.match(text, end)) and other_text.startswith(a[0], end):
            end = a.end()
        return end

    # -- Where an answer starts, if the text does not begin with its prompt.

    def _start_after_prompt(self, chat: RenderedChat, index: int) -> int | None:
        """Return where an answer begins: after the prompt that follows the previous message.

        If the prompt opens a reasoning block that a finished turn lacks, it is after the part that
        both share. A finished turn may have an opening that the prompt leaves out (after tools).
        None for the first message, or if unsure.
        """
        if index == 0:
            return None
        sentinel_messages = chat.messages_with_sentinel(index - 1)
        full_text = chat.full_text
        opening = chat.generation_prompt
        earlier_messages = sentinel_messages[:index]
        texts = [
            chat.render(sentinel_messages),
            chat.render(earlier_messages),
            chat.render(earlier_messages, include_generation_prompt=True),
        ]
        if any(text is None or text.count(SENTINEL) != 1 for text in texts):
            return None
        rest, plain, prompt = ((text or "").partition(SENTINEL)[2] for text in texts)
        if not full_text.endswith(rest):
            return None
        # The previous turn may end differently here than when it ends the chat.
        min_length = len(os.path.commonprefix([plain, prompt]))
        min_length = max(min_length, len(prompt) - len(opening) if prompt.endswith(opening) else 0)
        for length in [len(prompt), *self._token_and_line_ends(prompt)]:
            if (length > min_length or length == len(prompt)) and rest.startswith(prompt[:length]):
                start = len(full_text) - len(rest) + length
                return start + len(opening) * full_text.startswith(opening, start)
        return None

    def _start_after_opening(self, prefix: str, opening: str, is_first_message: bool) -> int | None:
        """Return where an answer begins in ``prefix``, the text up to its content; None if unsure.

        It begins after its turn's opening, or after as much of the opening as is there. If the
        answer is the chat's first message, the opening cannot be mistaken for another turn's.
        """
        for length in self._token_and_line_ends(opening):
            start = prefix.rfind(opening[:length])
            is_own = is_first_message and length == len(opening)
            if start >= 0 and (is_own or not self.special.search(prefix, start + length)):
                return start + length
        return None

    def _token_and_line_ends(self, opening: str) -> list[int]:
        """Return where special tokens and lines end in ``opening``, the last place first."""
        ends = [match.end() for match in re.finditer(rf"{self.special.pattern}|\n", opening)]
        return sorted({*ends, len(opening)} - {0}, reverse=True)
