"""Control tokens that people have typed, kept apart from those that a chat template writes.

    people's text -> hide -> the template -> split -> tokens; typed ones become those of plain text

A typed one is replaced by two characters: ``ESCAPE`` and one that numbers it. ``ESCAPE`` in
people's text is replaced in the same way, so that any text comes back as it was.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hpc_tune.data.counts import Counters

ESCAPE = "\U000f0000"
ESCAPED_IN_JSON = "\\udb80\\udc00"  # what a template makes of it that writes JSON in ASCII
_FIRST = ord(ESCAPE) + 1
_REASONING = re.compile(r"think|thought|reason", re.IGNORECASE)


class SpecialTokenEscapes:
    """Stands for the control tokens of one tokenizer in people's text, counting them."""

    def __init__(
        self, controls: Sequence[str], turn_controls: Collection[str], counters: Counters
    ) -> None:
        """Take the control tokens as text; ``turn_controls``: those that no answer has."""
        self._counters = counters
        self._typed = [ESCAPE, *sorted(set(controls), key=len, reverse=True)]
        self._number = {text: number for number, text in enumerate(self._typed)}
        self._all = longest_match_pattern(self._typed)
        others = [text for text in self._typed if not _REASONING.search(text)]
        self._but_reasoning = longest_match_pattern(others)
        own = {text for text in others if text != ESCAPE and text not in turn_controls}
        self._but_own = longest_match_pattern([text for text in others if text not in own])
        self._own = longest_match_pattern(sorted(own))
        last = chr(_FIRST + len(self._typed) - 1)
        self._stand_in = re.compile(f"{ESCAPE}([{chr(_FIRST)}-{last}])")

    def hide_in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with typed control tokens hidden, in whatever text they have.

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
        """Return a value of JSON types with typed control tokens hidden in all of its texts."""
        if isinstance(value, str):
            return (typed or self._all).sub(self._hide_one, value)
        if isinstance(value, dict):
            return {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
        return [self.hide(item, typed) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield the pieces of a text: (piece, None), or for a stand-in (it, what was typed)."""
        for number, piece in enumerate(self._stand_in.split(text)):
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
    return re.compile(_alternatives(tree) or r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    ways = [re.escape(char) + _alternatives(below) for char, below in node.items() if char]
    if not ways:
        return ""
    either = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return f"{either}?" if "" in node else either
