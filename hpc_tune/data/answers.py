"""Which characters of a rendered chat the assistant wrote.

    {% generation %} blocks of the template -> beginnings -> probes: the first that fits

*Blocks* are the template's own word. *Beginnings*: answer i is the text between
render(messages[:i], with the generation prompt) and render(messages[:i + 1]), where both are
beginnings of the whole text: what the model has to write after the prompt that it gets in use.
Templates that render a turn differently once others follow (they drop earlier reasoning, or append
an end to the whole) break that. *Probes*: the whole chat is rendered again with another text in
place of answer i. What the two have in common before and after it is not the answer's. *Calls* of
tools have no such text: they lie between the probes of their neighbours, and end as they do alone.

An answer ends with the control token that ends its turn, which the model has to learn as well.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpc_tune.data.controls import any_of

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
RenderFirst = Callable[[int, bool], str | None]
PROBE = "xPr0be7Qx"
_QUESTION = {"role": "user", "content": PROBE}
_RESULT = {"role": "tool", "content": PROBE}
MARK = "\ufdd0"  # no character, by Unicode
_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class Render(Protocol):
    """Renders messages to text; None where the template refuses them."""

    def __call__(self, messages: Messages, generation: bool = False) -> str | None:
        """Return the text, with the prompt for another answer at its end if ``generation``."""


def with_marks(template: Any) -> str | None:
    """Return a template with MARK at the begin and end of its {% generation %} blocks, if any."""
    if not isinstance(template, str) or not _BLOCK.search(template):
        return None

    def marked(found: re.Match[str]) -> str:
        left, end, right = found.groups()
        if end:
            return f"{{%{left} print '{MARK}' %}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{% print '{MARK}' {right}%}}"

    return _BLOCK.sub(marked, template)


def blocks_of(marked: str, full: str) -> list[Span]:
    """Return what lies between marks; nothing if ``full`` is not the same text without them."""
    pieces, spans, at = marked.split(MARK), [], 0
    if "".join(pieces) != full:
        return []
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return spans


class AnswerFinder:
    """Finds answers in texts of one template, whose control tokens are ``controls``."""

    def __init__(self, controls: Sequence[str]) -> None:
        """Take the control tokens as text."""
        self._controls, self._control = tuple(controls), any_of(controls)
        self._next_control = re.compile(rf"\s*({self._control.pattern})")

    def find(
        self, render: Render, messages: Messages, answers: Sequence[int], full: str
    ) -> list[Span | None]:
        """Return the characters of each of ``answers`` (numbers of messages); None if unsure.

        ``full`` is ``render(messages)``.
        """
        beginnings: dict[tuple[int, bool], str | None] = {(len(messages), False): full}

        def render_first(count: int, generation: bool) -> str | None:
            """Render the first ``count`` messages, once."""
            key = (count, generation)
            if key not in beginnings:
                beginnings[key] = render(messages[:count], generation)
            return beginnings[key]

        spans = [self._by_beginnings(render_first, messages, number, full) for number in answers]
        if None in spans:
            opening = self._opening(render, render_first, messages)
            spans = [
                self._by_calls(render, render_first, messages, number, full, opening)
                or self._by_probe(render, render_first, messages, number, full, opening)
                or known
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
        """Return whether an answer ends with a control token, at which a model stops.

        White space behind it, in a block that the template marks, does not matter. A token with
        which its own words end is none.
        """
        answer = full[slice(*span)].rstrip()
        words = (message.get("content") or "").rpartition("</think>")[2].strip()
        is_own = words.endswith(self._controls) and answer.endswith(words)
        return answer.endswith(self._controls) and not is_own

    def with_next_opening(
        self, render: Render, messages: Messages, number: int, full: str, span: Span
    ) -> tuple[str, Span] | None:
        """Return ``full``, and an answer together with the control token that follows it.

        Of a template that ends no answer it is the one at which a model stops: it opens the turn
        of the user, or of the tools that the answer calls. Behind a last answer, which stays as the
        template writes it, it is added to ``full``: as it follows another text that is answered
        there. None if there is no such token.
        """
        stop = span[0] + len(full[slice(*span)].rstrip())
        if number + 1 < len(messages):
            is_end = messages[number + 1]["role"] not in ("assistant", "system")
            found = self._next_control.match(full, stop) if is_end else None
            return (full, (span[0], found.end())) if found else None
        if full[stop:].strip():
            return None  # what ends the whole chat
        probed = _with_probe(messages, number)
        alone = (render(probed) or "").partition(PROBE)[2]
        last = alone.rstrip()  # calls of tools
        for follower in [*([_RESULT] if messages[number].get("tool_calls") else []), _QUESTION]:
            followed = (render([*probed, follower]) or "").partition(PROBE)[2]
            found = self._next_control.match(followed, len(last))
            if found and followed.startswith(last):
                full = full.removesuffix(alone[len(last) :]) + found[0]
                return full, (span[0], len(full))
        return None

    def _by_beginnings(
        self, render_first: RenderFirst, messages: Messages, number: int, full: str
    ) -> Span | None:
        if number == 0:
            return None  # templates render no empty list to compare with
        before, after = render_first(number, True), render_first(number + 1, False)
        if before is None or after is None or not full.startswith(after):
            return None
        if not after.startswith(before) or after == before:
            return None
        span = len(before), len(after)
        if self.is_ended(full, span, messages[number]):
            return span[0], len(after.rstrip())  # white space after the end is not the answer's
        return span

    def _by_probe(
        self,
        render: Render,
        render_first: RenderFirst,
        messages: Messages,
        number: int,
        full: str,
        opening: str,
    ) -> Span | None:
        # Calls are written after the content, and belong to the answer.
        own = messages[number]
        if "tool_calls" in own:
            own = {key: value for key, value in own.items() if key != "tool_calls"}
        probed = [*messages[:number], {**own, "content": PROBE}, *messages[number + 1 :]]
        whole = render(probed)
        if whole is None or whole.count(PROBE) != 1:
            return None
        is_last = number + 1 == len(messages)
        alone = whole if is_last else render(probed[: number + 1])
        before, _, after = whole.partition(PROBE)
        prompt = render_first(number, True) if number else None
        if prompt and before.startswith(prompt):
            start = len(prompt)
        else:
            start = (
                self._behind_opening(before, opening, is_first=number == 0)
                or self._behind_prompt(render, messages, number, full, opening)
                or len(before)
            )
        start = min(start, len(before))
        if full[:start] != before[:start]:
            return None
        after_alone = (alone or "").partition(PROBE)[2]
        ends = self._common_run(after, after_alone)
        if not ends and (alone is None or self._next_control.match(after_alone)):
            ends = self._end_of_any_turn(render, messages, number, after, opening)
        if full.endswith(after):
            stop = len(full) - len(after) + ends
        else:  # the turn ends with another token: calls of tools have their own in some templates
            first = self._next_control.match(after)
            rest = after[first.end() :] if first else after
            stop = len(full) - len(rest)
            if not full.endswith(rest) or not full[:stop].endswith(self._controls):
                return None
        if own is not messages[number] and stop > self._begin_of_next(
            render, messages, number, full
        ):
            return None  # its calls are written elsewhere, and others' words lie between
        return (start, stop) if start < stop else None

    def _by_calls(
        self,
        render: Render,
        render_first: RenderFirst,
        messages: Messages,
        number: int,
        full: str,
        opening: str,
    ) -> Span | None:
        """Return the characters of an answer that calls tools.

        It ends before the next message's content, with the control token behind which most is as
        where it ends the chat: its reasoning may be left out later, its calls are not.
        """
        if not messages[number].get("tool_calls"):
            return None
        prompt = render_first(number, True) if number else None
        if prompt and full.startswith(prompt):
            start: int | None = len(prompt)
        else:
            start = self._behind_prompt(render, messages, number, full, opening)
        limit = self._begin_of_next(render, messages, number, full)
        alone = (render_first(number + 1, False) or "").rstrip()
        if start is None or not alone.endswith(self._controls):
            return None
        end = max((c for c in self._controls if alone.endswith(c)), key=len)
        stop = self._most_alike(full[:limit], start, alone.removesuffix(end), end)
        names = [call.get("function", call)["name"] for call in messages[number]["tool_calls"]]
        if stop is None or not any(name in full[start:stop] for name in names):
            return None
        return start, stop

    def _begin_of_next(self, render: Render, messages: Messages, number: int, full: str) -> int:
        """Return where the content of the message behind an answer begins, or ``full`` ends."""
        if number + 1 == len(messages):
            return len(full)
        before, found, _ = (render(_with_probe(messages, number + 1)) or "").partition(PROBE)
        return len(os.path.commonprefix([full, before])) if found else len(full)

    def _most_alike(self, text: str, start: int, answer: str, end: str) -> int | None:
        """Return the end of that ``end`` in ``text`` before which it is most like ``answer``'s end.

        It stands behind ``start``; of several it is the last.
        """
        best, most = None, 1
        for control in self._control.finditer(text, start):
            before = text[: control.start()].rstrip()
            same = len(os.path.commonprefix([before[::-1], answer[::-1]]))
            if same >= most and control[0] == end:
                best, most = control.end(), same
        return best

    def _behind_prompt(
        self, render: Render, messages: Messages, number: int, full: str, opening: str
    ) -> int | None:
        """Return where an answer begins: behind the prompt that follows the message before it.

        Where the prompt opens a block of reasoning that a finished turn does not have, behind what
        both have. A finished turn may have an opening that the prompt leaves out (after tools).
        """
        if number == 0:
            return None
        probed = _with_probe(messages, number - 1)
        texts = [render(probed), render(probed[:number]), render(probed[:number], generation=True)]
        if any(text is None or text.count(PROBE) != 1 for text in texts):
            return None
        rest, told, prompt = ((text or "").partition(PROBE)[2] for text in texts)
        if not full.endswith(rest):
            return None
        # The end of the turn before may be another than where it ends the chat.
        least = len(os.path.commonprefix([told, prompt]))
        least = max(least, len(prompt) - len(opening) if prompt.endswith(opening) else 0)
        for length in [len(prompt), *self._pieces(prompt)]:
            if (length > least or length == len(prompt)) and rest.startswith(prompt[:length]):
                start = len(full) - len(rest) + length
                return start + len(opening) * full.startswith(opening, start)
        return None

    def _pieces(self, opening: str) -> list[int]:
        """Return where control tokens and lines of an opening end, the longest part first."""
        ends = [found.end() for found in re.finditer(rf"{self._control.pattern}|\n", opening)]
        return sorted({*ends, len(opening)} - {0}, reverse=True)

    def _behind_opening(self, before: str, opening: str, is_first: bool) -> int | None:
        """Return where an answer begins in ``before``, the text up to its content; None if unsure.

        Behind what opens an answer's turn, or the part of it that is there. In front of a chat's
        first message there is no other turn, whose opening could be taken for its own.
        """
        for length in self._pieces(opening):
            at = before.rfind(opening[:length])
            is_own = is_first and length == len(opening)
            if at >= 0 and (is_own or not self._control.search(before, at + length)):
                return at + length
        return None

    def _opening(self, render: Render, render_first: RenderFirst, messages: Messages) -> str:
        """Return the generation prompt alone, such as ``<|im_start|>assistant`` and a line end.

        That is what it adds to a turn of another role: a last answer may end by a token of its own.
        """
        roles = [message["role"] for message in messages]
        count = next((n for n in range(len(roles), 0, -1) if roles[n - 1] != "assistant"), 0)
        if count:
            full, asked = render_first(count, False), render_first(count, True)
        else:
            full, asked = render([_QUESTION]), render([_QUESTION], generation=True)
        full, asked = full or "", asked or full or ""
        at = len(os.path.commonprefix([full, asked]))
        for control in self._control.finditer(asked):
            if control.start() < at < control.end():
                at = control.start()  # two tokens that begin alike
        return asked[at:]

    def _end_of_any_turn(
        self, render: Render, messages: Messages, number: int, after: str, opening: str
    ) -> int:
        """Return the length of a control token in front of ``after`` that ends others' turns too.

        Some templates end the last answer by a token of its own. What follows another answer may
        then be the opening of the next turn: the generation prompt begins with it, or it follows
        only those that the same role follows.
        """
        first = self._next_control.match(after)
        if first is None or opening.lstrip().startswith(first[1]):
            return 0
        roles = [*(message["role"] for message in messages), None]
        follower = roles[number + 1]
        probed = [_QUESTION, *messages]
        for other, message in enumerate(messages):
            if message["role"] != "assistant" and not roles[other + 1] == follower != "assistant":
                probe = {**message, "content": PROBE}
                probed = [*messages[:other], probe, *messages[other + 1 :]]
                break
        end = self._next_control.match((render(probed) or "").partition(PROBE)[2])
        return first.end() if end and end[1] == first[1] else 0

    def _common_run(self, one: str, other: str) -> int:
        """Return how far the same control tokens begin both texts."""
        end = 0
        while (a := self._next_control.match(one, end)) and other.startswith(a[0], end):
            end = a.end()
        return end


def _with_probe(messages: Messages, number: int) -> Messages:
    """Return messages with a probe in place of one's content."""
    return [*messages[:number], {**messages[number], "content": PROBE}, *messages[number + 1 :]]
