"""A chat as its template renders it: whole, its beginnings, and with another text in places."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PROBE = "xPr0be7Qx"
QUESTION = {"role": "user", "content": PROBE}
RESULT = {"role": "tool", "content": PROBE}
Messages = Sequence[dict[str, Any]]


class Render(Protocol):
    """Renders messages to text; None where the template refuses them."""

    def __call__(self, messages: Messages, generation: bool = False) -> str | None:
        """Return the text, with the prompt for another answer at its end if ``generation``."""


@dataclass
class RenderedChat:
    """The messages of a chat, and their text ``full``, which is ``render(messages)``."""

    render: Render
    messages: Messages
    full: str
    _beginnings: dict[tuple[int, bool], str | None] = field(default_factory=dict)

    def first(self, count: int, generation: bool = False) -> str | None:
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
        return self.first(number, generation=True) if number else None

    def with_probe(self, number: int) -> Messages:
        """Return the messages with a probe in place of one's content."""
        probe = {**self.messages[number], "content": PROBE}
        return [*self.messages[:number], probe, *self.messages[number + 1 :]]

    def text_after_probe(self, messages: Messages) -> str:
        """Return what follows the probe in the text of ``messages``; nothing if there is none."""
        return (self.render(messages) or "").partition(PROBE)[2]

    def next_content_start(self, number: int) -> int:
        """Return where the content of the message behind one begins, or ``full`` ends."""
        if number + 1 == len(self.messages):
            return len(self.full)
        before, found, _ = (self.render(self.with_probe(number + 1)) or "").partition(PROBE)
        return len(os.path.commonprefix([self.full, before])) if found else len(self.full)
