"""Pairs and labelled answers -> documents of two sides each.

    PreferencePair   chosen and rejected answer -> both sides -> one document
    LabelledAnswers  an answer, and after the same prompt that of another -> both -> one document

Both sides begin with the same tokens up to the first learned one: else the sums of their
log-probabilities would be of different prompts. A pair that is longer than ``seq_len``, both sides
together, loses the left of its prompt, on both sides alike, and nothing of an answer. The sides of
a labelled answer are never in one row, and each is cut by itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hpc_tune.config.data import Form
from hpc_tune.data.chats import LossOn, RenderedText
from hpc_tune.data.counts import Counters
from hpc_tune.data.encode import BATCH_CHARS, Encoder
from hpc_tune.data.preferences import (
    LabelledAnswers,
    PreferencePair,
    find_answer_start,
    swap_answer,
)
from hpc_tune.data.reading import Row
from hpc_tune.data.records import Chat, Completion
from hpc_tune.data.tokenizer import FastTokenizer
from hpc_tune.data.writer import Block, token_dtype
from hpc_tune.errors import DataError

Side = tuple[np.ndarray, np.ndarray]  # tokens and loss mask
_SAME = "the two answers are the same to the model"
_OTHER_PROMPT = "the prompt has other tokens before one answer than before the other"
_TOO_LONG = "the answers leave no room in seq_len for a token of the prompt"


@dataclass(frozen=True)
class _Item:
    """The sides of a document as text; ``label`` of labelled answers, whose second may lack."""

    sides: tuple[RenderedText, ...]
    label: bool | None = None


class PreferenceEncoder:
    """Turns pairs or labelled answers into blocks of documents; counts what it cuts and drops."""

    def __init__(self, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn) -> None:
        """Take a fast tokenizer.

        Raises:
            DataError: if more than answers is to be learned.
        """
        if loss_on != "answers":
            raise DataError(
                f"data.loss_on={loss_on}: with preferences only the answers are compared; set"
                " data.loss_on=answers"
            )
        self._seq_len, self._bos = seq_len, tokenizer.bos_token_id
        self._own = Encoder(tokenizer, seq_len, loss_on)
        # Another row's answer is counted where it is that row's own.
        self._others = Encoder(tokenizer, seq_len, loss_on)
        self.counters: Counters = self._own.counters

    def encode(self, rows: Iterable[Row]) -> Iterator[Block]:
        """Yield blocks; labelled answers take others' from the next row of another prompt, the last
        from the first row.

        Raises:
            DataError: for messages where the tokenizer has no chat template.
        """
        held: list[_Item] = []
        num_chars = 0
        for row, following in _pair_with_next(rows):
            for item in self._render_row(row, following):
                held.append(item)
                num_chars += sum(len(side.text) for side in item.sides)
            if num_chars >= BATCH_CHARS:
                yield from self._blocks(held)
                held, num_chars = [], 0
        yield from self._blocks(held)

    def _render_row(self, row: Row, following: Row | None) -> Iterator[_Item]:
        """Render a row; ``following`` gives the mismatched answers of a labelled one."""
        if isinstance(row, PreferencePair):
            self.counters.examples += 1
            chosen = self._render(row.chosen)
            if chosen and (rejected := self._render(row.rejected)):
                yield _Item((chosen, rejected))
            return
        assert isinstance(row, LabelledAnswers), "rows of preferences are pairs or labelled answers"
        self.counters.unpaired += len(row.answers) > 1
        others = following.answers if isinstance(following, LabelledAnswers) else ()
        for number, (answer, label) in enumerate(zip(row.answers, row.labels, strict=True)):
            self.counters.examples += 1
            if (own := self._render(answer)) is None:
                continue
            sides = [own]
            if others:
                other = others[min(number, len(others) - 1)]
                rendered = self._others.render(swap_answer(answer, other))
                sides += [] if isinstance(rendered, str) else [rendered]
            yield _Item(tuple(sides), label)

    def _render(self, answer: Chat | Completion) -> RenderedText | None:
        """Render a side; None, and counted, if it cannot be used."""
        rendered = self._own.render(answer)
        self.counters.marked_answers = 0  # earlier turns are never learned: nothing to report
        if not isinstance(rendered, str):
            return rendered
        self.counters.drop(rendered)
        return None

    def _blocks(self, items: list[_Item]) -> Iterator[Block]:
        """Yield the documents of some items as one block."""
        texts = [side for item in items for side in item.sides]
        sides = iter(self._own.tokenize(texts) if texts else [])
        documents, made_of = [], []
        for item in items:
            own = [next(sides) for _ in item.sides]
            made = self._pair(own) if item.label is None else self._labelled(own)
            if made:
                documents.append(made)
                made_of.append(item.label)
        if not documents:
            return
        labels = None if made_of[0] is None else np.array(made_of, dtype=np.uint8)
        tokens = np.concatenate([tokens for made in documents for tokens, _ in made])
        mask = np.concatenate([mask for made in documents for _, mask in made])
        self.counters.documents += len(documents)
        # Of labelled answers only the own side is learned.
        counted = [side for made in documents for side in made[: 2 if labels is None else 1]]
        self.counters.tokens += sum(len(tokens) for tokens, _ in counted)
        self.counters.loss_tokens += sum(int(mask.sum()) for _, mask in counted)
        yield Block(
            np.array([sum(len(side) for side, _ in made) for made in documents], dtype=np.int64),
            tokens.astype(token_dtype(int(tokens.max()) + 1), copy=False),
            mask,
            np.array([len(made[0][0]) for made in documents], dtype=np.int64),
            labels,
        )

    def _pair(self, sides: list[Side]) -> list[Side]:
        """Return the sides of a pair as they fit; nothing, and counted, if they do not."""
        why = _why_unfit(sides)
        fitting = None if why else self._fit(sides)
        if fitting is None:
            self.counters.drop(why or _TOO_LONG)
            return []
        self.counters.cut_prompts += _is_cut(fitting, sides)
        return fitting

    def _labelled(self, sides: list[Side]) -> list[Side]:
        """Return the sides of a labelled answer as they fit, its own one if the other does not."""
        own, other = sides[:1], sides[1:]
        why = _why_unfit(own)
        fitting = None if why else self._fit(own)
        if fitting is None:
            self.counters.drop(why or _TOO_LONG)
            return []
        self.counters.cut_prompts += _is_cut(fitting, own)
        is_comparable = bool(other) and _why_unfit(sides) in (None, _SAME)
        fitting_other = self._fit(other) if is_comparable else None
        if fitting_other is None:
            self.counters.unmatched += 1
            return fitting
        self.counters.cut_others += _is_cut(fitting_other, other)
        return fitting + fitting_other

    def _fit(self, sides: list[Side]) -> list[Side] | None:
        """Cut the left of the prompt until all sides together fit into ``seq_len``.

        A BOS in front is kept. None if no token of the prompt would be left beside it.
        """
        prompt = int(np.argmax(sides[0][1]))
        num_answers = sum(len(tokens) - prompt for tokens, _ in sides)
        kept = min(prompt, (self._seq_len - num_answers) // len(sides))
        bos = int(sides[0][0][0] == self._bos)
        if kept < min(bos + 1, prompt):
            return None
        if kept == prompt:
            return sides
        chosen = np.r_[:bos, prompt - kept + bos : prompt]
        return [
            (np.r_[tokens[chosen], tokens[prompt:]], np.r_[mask[chosen], mask[prompt:]])
            for tokens, mask in sides
        ]


def make_encoder(
    form: Form, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn
) -> Encoder | PreferenceEncoder:
    """Return what turns rows of a form into blocks."""
    if form == "answers":
        return Encoder(tokenizer, seq_len, loss_on)
    return PreferenceEncoder(tokenizer, seq_len, loss_on)


def _is_cut(fitting: list[Side], sides: list[Side]) -> bool:
    return len(fitting[0][0]) < len(sides[0][0])


def _why_unfit(sides: list[Side]) -> str | None:
    """Return why sides cannot be compared; None if they can."""
    if not all(mask.any() for _, mask in sides):
        return "empty answer"
    (tokens, mask), *others = sides
    prompt = int(np.argmax(mask))
    for other, other_mask in others:
        if int(np.argmax(other_mask)) != prompt or (other[:prompt] != tokens[:prompt]).any():
            return _OTHER_PROMPT
        if np.array_equal(tokens, other):
            return _SAME
    return None


def _pair_with_next(rows: Iterable[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yield each row with the next one that has another prompt, and the last ones with the first;
    with None where there is no other prompt.

    Rows of one prompt are often neighbours: pairs that were split into labelled answers.
    """
    groups = (list(rows) for _, rows in groupby(rows, _prompt_key))
    first = before = next(groups, None)
    for group in groups:
        assert before is not None
        yield from ((row, group[0]) for row in before)
        before = group
    if first is not None and before is not None:
        is_other = _prompt_key(first[0]) != _prompt_key(before[0])
        yield from ((row, first[0] if is_other else None) for row in before)


def _prompt_key(row: Row) -> Any:
    """Return what rows with the same prompt have in common; of pairs, which need none, all."""
    if not isinstance(row, LabelledAnswers):
        return row
    answer = row.answers[0]
    if isinstance(answer, Completion):
        return answer.prompt, answer.system, answer.history
    return answer.messages[: find_answer_start(answer)], answer.tools
