"""Which characters of a rendered chat the assistant wrote.

    {% generation %} blocks of the template -> beginnings -> probes: the first that fits

*Blocks* are the template's own word. *Beginnings*: answer i is the text between
render(messages[:i], with the generation prompt) and render(messages[:i + 1]), where both are
beginnings of the whole text: what the model has to write after the prompt that it gets in use.
Templates that render a turn differently once others follow (they drop earlier reasoning, or append
an end to the whole) break that. *Probes*: the whole chat is rendered again with another text in
place of answer i. What the two have in common before and after it is not the answer's.

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

        spans = [self._by_beginnings(render_first, number, full) for number in answers]
        if None in spans:
            opening = self._opening(render, render_first, messages)
            spans = [
                self._by_probe(render, render_first, messages, number, full, opening) or known
                for number, known in zip(answers, spans, strict=True)
            ]
        end = 0
        for at, span in enumerate(spans):
            if span is not None and span[0] < end:
                spans[at] = None
            elif span is not None:
                end = span[1]
        return spans

    def is_ended(self, full: str, span: Span) -> bool:
        """Return whether an answer ends with a control token, at which a model stops."""
        return full[span[0] : span[1]].endswith(self._controls)

    def _by_beginnings(self, render_first: RenderFirst, number: int, full: str) -> Span | None:
        if number == 0:
            return None  # templates render no empty list to compare with
        before, after = render_first(number, True), render_first(number + 1, False)
        if before is None or after is None or not full.startswith(after):
            return None
        if not after.startswith(before) or after == before:
            return None
        # White space after the end of the turn is not the answer's.
        answer = full[len(before) : len(after)]
        trimmed = answer.rstrip()
        stop = len(before) + len(trimmed if trimmed.endswith(self._controls) else answer)
        return len(before), stop

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
        own = {key: value for key, value in messages[number].items() if key != "tool_calls"}
        probed = [*messages[:number], {**own, "content": PROBE}, *messages[number + 1 :]]
        whole = render(probed)
        if whole is None or whole.count(PROBE) != 1:
            return None
        is_last = number + 1 == len(messages)
        alone = whole if is_last else render(probed[: number + 1])
        before, _, after = whole.partition(PROBE)
        prompt = render_first(number, True) if number else None
        start = self._start(before, prompt, opening, is_first=number == 0)
        if full[:start] != before[:start]:
            return None
        after_alone = (alone or "").partition(PROBE)[2]
        ends = self._common_run(after, after_alone)
        if not ends and self._next_control.match(after_alone):
            ends = self._end_of_any_turn(render, messages, number, after, opening)
        if full.endswith(after):
            stop = len(full) - len(after) + ends
        else:  # the turn ends with another token: calls of tools have their own in some templates
            first = self._next_control.match(after)
            rest = after[first.end() :] if first else after
            stop = len(full) - len(rest)
            if not full.endswith(rest) or not full[:stop].endswith(self._controls):
                return None
        return (start, stop) if start < stop else None

    def _start(self, before: str, prompt: str | None, opening: str, is_first: bool) -> int:
        """Return where an answer begins in ``before``, the text up to its content.

        Behind the prompt that the model gets in use; where that opens a block of reasoning that a
        finished turn does not have, behind what both have. In front of a chat's first message there
        is no other turn, whose opening could be taken for its own.
        """
        if prompt and before.startswith(prompt):
            return len(prompt)
        pieces = [m.end() for m in re.finditer(rf"{self._control.pattern}|\n", opening)]
        for length in sorted({*pieces, len(opening)} - {0}, reverse=True):
            at = before.rfind(opening[:length])
            is_own = is_first and length == len(opening)
            if at >= 0 and (is_own or not self._control.search(before, at + length)):
                return at + length
        return len(before)

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
