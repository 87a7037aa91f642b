"""Examples -> tokens and loss masks.

    examples -> rendered text with the spans to learn -> tokenized in batches -> documents -> Blocks

Each text is tokenized once, as a whole. A token is learned if it overlaps an answer (see
``chats.py``), a special token only if it begins in one, since some swallow the whitespace after
them. The first token of a document is never learned. A loss mask is uint8, 0 or 1; if it has a
weight other than 1, it is fp32 and holds the weight of each token in the loss.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import Any

import numpy as np

from hpc_tune.config.data import DataForm
from hpc_tune.data.answers import Span
from hpc_tune.data.chats import LossOn, RenderedText, Renderer
from hpc_tune.data.counts import ANSWER_BEYOND_SEQ_LEN, Counters
from hpc_tune.data.hdf5_format import TokensAndMask
from hpc_tune.data.preferences import (
    LabeledAnswers,
    PreferencePair,
    find_first_learned_answer,
    replace_answer,
)
from hpc_tune.data.reading import ParsedRow
from hpc_tune.data.records import Chat, Completion, Example, Text, Tokens
from hpc_tune.data.tokenizer import (
    FastTokenizer,
    num_ids,
    require_fast_tokenizer,
    splits_special_tokens,
    tokenizer_name,
)
from hpc_tune.data.writer import Block, token_dtype
from hpc_tune.errors import DataError

# Each call of the tokenizer gets about this much text. The tokenizer needs some 200 bytes per
# token, so a call peaks at about 25 MB even if each byte is a token; that is also enough text to
# keep several cores busy.
BATCH_CHARS = 128 << 10
PARTS_PER_BATCH = 4  # of a long text, for as many cores
# This close to the end of a cut text, its tokens may differ from the whole text's.
TRUNCATION_MARGIN_CHARS = 4096


class Encoder:
    """Turns examples into blocks of documents; counts what it cuts and drops."""

    def __init__(self, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn) -> None:
        """Take a fast tokenizer; its truncation and padding are switched off."""
        self._backend = require_fast_tokenizer(tokenizer).backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._num_ids, self._name = num_ids(tokenizer), tokenizer_name(tokenizer)
        self._seq_len, self._dtype = seq_len, token_dtype(self._num_ids)
        self._learns_prompts = loss_on == "all"
        added_ids = self._backend.encode("", add_special_tokens=True).ids
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and bos in added_ids else []
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._newline_ids = self._backend.encode("\n", add_special_tokens=False).ids
        added_tokens = self._backend.get_added_tokens_decoder()
        self._special_ids = [number for number, token in added_tokens.items() if token.special]
        self._splits_special_tokens = splits_special_tokens(tokenizer)
        self.counters = Counters()
        self._renderer = Renderer(tokenizer, loss_on, self.counters)

    def encode(self, examples: Iterable[Any]) -> Iterator[Block]:
        """Yield blocks; the documents do not depend on how the examples are grouped into blocks.

        Raises:
            DataError: for messages if the tokenizer has no chat template or one that cannot be
                parsed, and for token IDs that it does not have.
        """
        batch: list[RenderedText] = []
        num_chars = 0
        for item in self._render_all(examples):
            if isinstance(item, Tokens):
                yield from self._tokenize(batch)
                batch, num_chars = [], 0
                yield from self._encode_token_ids(item)
                continue
            batch.append(item)
            num_chars += len(item.text)
            if num_chars >= BATCH_CHARS:
                yield from self._tokenize(batch)
                batch, num_chars = [], 0
        yield from self._tokenize(batch)

    def render(self, example: Chat | Completion) -> RenderedText | str:
        """Return an example's text with its learned spans, or the reason to drop the example.

        Raises:
            DataError: for messages if the tokenizer has no chat template that can be parsed.
        """
        return self._renderer.render(example)

    def prompt(self, chat: Chat) -> list[int]:
        """Return the tokens of the prompt for the next answer in a chat, as training has them.

        Raises:
            DataError: if the template refuses or misrenders the messages; without a template, if
                there is more than one prompt, with or without a system prompt.
        """
        rendered_prompt = self._renderer.prompt(chat)
        (tokens, _) = self.tokenize([rendered_prompt])[0]
        return [int(token) for token in tokens]

    def tokenize(self, items: list[RenderedText]) -> list[TokensAndMask]:
        """Return tokens and loss mask of each whole text. All texts are chats, or none is."""
        encodings = self._encode_batch(
            [i.text for i in items], self._takes_special_tokens_as_text(items[0])
        )
        return [
            self._add_mask(item, *self._tokenize_chat(item, encoding))
            for item, encoding in zip(items, encodings, strict=True)
        ]

    def _encode_token_ids(self, example: Tokens) -> Iterator[Block]:
        for number in (example.token_ids.min(initial=0), example.token_ids.max(initial=0)):
            if not 0 <= number < self._num_ids:
                raise DataError(
                    f"{example.location}: it has the token {number}, but the tokenizer "
                    f"{self._name} has only tokens 0 to {self._num_ids - 1}; set model.path to a "
                    "model whose tokenizer made the data"
                )
        item = RenderedText("", None, split=True)
        yield from self._make_block(
            self._split_plain_text(item, example.token_ids.astype(self._dtype))
        )

    def _render_all(self, examples: Iterable[Example | Tokens]) -> Iterator[RenderedText | Tokens]:
        for example in examples:
            self.counters.examples += not isinstance(example, Text) or example.begins
            if isinstance(example, Tokens):
                yield example
            elif isinstance(example, Text):
                yield RenderedText(
                    example.text,
                    None,
                    is_plain=True,
                    bos=example.begins,
                    eos=example.ends,
                    split=True,
                    weights=() if example.weight == 1 else (example.weight,),
                )
            elif isinstance(text_or_reason := self._renderer.render(example), str):
                self.counters.count_dropped_example(text_or_reason)
            else:
                yield text_or_reason

    def _tokenize(self, items: list[RenderedText]) -> Iterator[Block]:
        """Yield the documents of texts in blocks: short texts together, long plain texts alone."""
        batch: list[RenderedText] = []
        for item in items:
            if len(item.text) <= BATCH_CHARS or not item.split:
                specials_are_text = self._takes_special_tokens_as_text(item)
                if batch and self._takes_special_tokens_as_text(batch[0]) != specials_are_text:
                    yield from self._encode_short_texts(batch)
                    batch = []
                batch.append(item)
                continue
            yield from self._encode_short_texts(batch)
            batch = []
            yield from self._make_block(self._split_plain_text(item, self._encode_long_text(item)))
        yield from self._encode_short_texts(batch)

    def _takes_special_tokens_as_text(self, item: RenderedText) -> bool:
        """Whether special tokens in a text are tokenized as text; a template's never are."""
        return item.is_plain and self._splits_special_tokens

    def _encode_batch(self, texts: list[str], specials_are_text: bool) -> list[Any]:
        self._backend.encode_special_tokens = specials_are_text
        encodings: list[Any] = self._backend.encode_batch(texts, add_special_tokens=False)
        self._backend.encode_special_tokens = False
        return encodings

    def _encode_long_text(self, item: RenderedText) -> np.ndarray:
        parts, texts = [], _split_text(item.text)
        while batch := list(islice(texts, PARTS_PER_BATCH)):
            for encoding in self._encode_batch(batch, self._takes_special_tokens_as_text(item)):
                parts.append(np.array(encoding.ids, dtype=self._dtype))
        ids = np.concatenate(parts)
        bos, eos = self._missing_bos_eos_ids(item, ids)
        return np.concatenate([np.array(bos, self._dtype), ids, np.array(eos, self._dtype)])

    def _encode_short_texts(self, items: list[RenderedText]) -> Iterator[Block]:
        if not items:
            return
        heads = [self._truncate_long_chat(item) for item in items]
        documents: list[TokensAndMask] = []
        for item, head, (tokens, mask) in zip(items, heads, self.tokenize(heads), strict=True):
            # If the rest was not tokenized, its length is estimated from the characters per token.
            whole_length = len(tokens) * len(item.text) // max(len(head.text), 1)
            documents += (
                self._split_plain_text(head, tokens)
                if head.split
                else self._truncate_to_seq_len(head, tokens, mask, whole_length)
            )
        yield from self._make_block(documents)

    def _truncate_long_chat(self, item: RenderedText) -> RenderedText:
        """Return the part of a long chat that its first ``seq_len`` tokens come from.

        The rest is cut off in any case, and its tokens would take 400 bytes of memory each.
        """
        size = BATCH_CHARS
        while not item.split and len(item.text) > size:
            head = replace(item, text=item.text[:size])
            (encoding,) = self._encode_batch([head.text], self._takes_special_tokens_as_text(head))
            ids, offsets = self._tokenize_chat(head, encoding)
            if (
                len(ids) > self._seq_len
                and offsets[self._seq_len][1] < size - TRUNCATION_MARGIN_CHARS
            ):
                return head
            size *= 2
        return item

    def _tokenize_chat(self, item: RenderedText, encoding: Any) -> tuple[list[int], list[Span]]:
        """Return tokens and their character spans; typed special tokens are tokenized as text."""
        pieces = [] if item.is_plain else [*self._renderer.escapes.split(item.text)]
        if all(typed_token is None for _, typed_token in pieces):
            return encoding.ids, encoding.offsets
        ids: list[int] = []
        offsets: list[Span] = []
        position = 0
        for piece, typed_token in pieces:
            if typed_token is not None:
                token_ids = self._tokenize_as_text(typed_token, position > 0)
                ids += token_ids
                offsets += [(position, position + len(piece))] * len(token_ids)
            else:
                piece_ids, piece_offsets = self._encode_piece(piece, position > 0)
                ids += piece_ids
                offsets += [(position + start, position + stop) for start, stop in piece_offsets]
            position += len(piece)
        return ids, offsets

    def _tokenize_as_text(self, token: str, follows_text: bool) -> list[int]:
        self._backend.encode_special_tokens = True
        ids, _ = self._encode_piece(token, follows_text)
        if not {*ids}.isdisjoint(self._special_ids):  # plain text can merge into one, too
            ids = [n for char in token for n in self._encode_piece(char, True)[0]]
        self._backend.encode_special_tokens = False
        return ids

    def _encode_piece(self, text: str, follows_text: bool) -> tuple[list[int], list[Span]]:
        """Encode a piece of a text; if ``follows_text``, as if it followed a newline.

        Tokenizers like Llama 2's add a space at the beginning of a text.
        """
        if follows_text:
            encoding = self._backend.encode(f"\n{text}", add_special_tokens=False)
            if encoding.ids[: len(self._newline_ids)] == self._newline_ids:
                tail = slice(len(self._newline_ids), None)
                return encoding.ids[tail], [(a - 1, b - 1) for a, b in encoding.offsets[tail]]
        text_encoding = self._backend.encode(text, add_special_tokens=False)
        return text_encoding.ids, text_encoding.offsets

    def _missing_bos_eos_ids(self, item: RenderedText, ids: Any) -> tuple[list[int], list[int]]:
        """Return the BOS and EOS tokens that a text lacks; count its other special tokens."""
        brings_bos = item.bos and [*ids[:1]] == self._bos != []
        brings_eos = item.eos and [*ids[-1:]] == self._eos != []
        if item.is_plain:
            inner_ids = ids[brings_bos : len(ids) - brings_eos]
            self.counters.control_tokens += int(np.isin(inner_ids, self._special_ids).sum())
        self.counters.unended_texts += item.eos and not self._eos
        bos = self._bos if item.bos and not brings_bos else []
        return bos, self._eos if item.eos and not brings_eos else []

    def _add_mask(self, item: RenderedText, ids: list[int], offsets: list[Span]) -> TokensAndMask:
        bos, eos = self._missing_bos_eos_ids(item, ids)
        token_ids = np.array([*bos, *ids, *eos], dtype=np.int64)
        mask = _full_mask(item, len(token_ids))
        if item.spans is not None and ids:
            begins, ends = np.array(offsets).T
            is_special = np.isin(ids, self._special_ids)
            text_mask = np.zeros(len(ids), dtype=mask.dtype)
            weights = item.weights or (1,) * len(item.spans)
            for (start, stop), weight in zip(item.spans, weights, strict=True):
                is_learned = (begins < stop) & (ends > start) & ((begins >= start) | ~is_special)
                if start and not self._learns_prompts:
                    self.counters.joined_starts += bool((begins[is_learned] < start).any())
                text_mask[is_learned] = weight
            mask[len(bos) : len(bos) + len(ids)] = text_mask
        mask[:1] = 0
        return token_ids, mask

    def _split_plain_text(self, item: RenderedText, tokens: np.ndarray) -> list[TokensAndMask]:
        """Split plain text into documents of at most ``seq_len`` tokens."""
        self.counters.split += len(tokens) > self._seq_len
        pieces = [
            tokens[i : i + self._seq_len] for i in range(0, max(len(tokens), 1), self._seq_len)
        ]
        if len(pieces[-1]) < 2:
            pieces.pop()
            if not pieces:
                self.counters.count_dropped_example("empty text")
        masks = [_full_mask(item, len(piece)) for piece in pieces]
        for mask in masks:
            mask[0] = 0
        return list(zip(pieces, masks, strict=True))

    def _truncate_to_seq_len(
        self, item: RenderedText, tokens: np.ndarray, mask: np.ndarray, whole_length: int
    ) -> list[TokensAndMask]:
        """Cut an example of ``whole_length`` tokens to fit; drop it if no learned token is left."""
        goes_on = any(stop > len(item.text) for _, stop in item.spans or ())
        if not mask.any() and not goes_on:
            self.counters.count_dropped_example("empty answer")
            return []
        if len(tokens) > self._seq_len:
            if not mask[: self._seq_len].any():
                self.counters.count_dropped_example(ANSWER_BEYOND_SEQ_LEN)
                self.counters.count_truncation(whole_length, 0)
                return []
            self.counters.truncated += 1
            self.counters.count_truncation(whole_length, self._seq_len)
        return [(tokens[: self._seq_len], mask[: self._seq_len])]

    def _make_block(self, documents: list[TokensAndMask]) -> Iterator[Block]:
        if not documents:
            return
        lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.int64)
        tokens = np.concatenate([tokens for tokens, _ in documents])
        masks = [mask for _, mask in documents]
        mask = np.concatenate(masks)
        self.counters.weighted += sum(mask.dtype == np.float32 for mask in masks)
        self.counters.documents += len(lengths)
        self.counters.tokens += len(tokens)
        self.counters.loss_tokens += int(np.count_nonzero(mask))
        tokens = tokens.astype(token_dtype(int(tokens.max()) + 1), copy=False)
        weights = mask if mask.dtype == np.float32 else None
        yield Block(lengths, tokens, (mask > 0).astype(np.uint8), loss_weights=weights)


def _full_mask(item: RenderedText, length: int) -> np.ndarray:
    """Return a mask with which every token is learned, by the weight of the last span if any."""
    if item.weights:
        return np.full(length, item.weights[-1], dtype=np.float32)
    return np.ones(length, dtype=np.uint8)


def _split_text(text: str) -> Iterator[str]:
    """Cut a long text, at line ends or else at spaces, into parts for the tokenizer."""
    start, size = 0, max(BATCH_CHARS // PARTS_PER_BATCH, 1)
    while start < len(text):
        stop = start + size
        if stop < len(text):
            line, space = text.rfind("\n", start, stop), text.rfind(" ", start + 1, stop)
            stop = line + 1 if line >= 0 else space if space > start else stop
        yield text[start:stop]
        start = stop


# -- Pairs and labeled answers -> documents of two sides each.
#
#     PreferencePair  chosen and rejected answer -> both sides -> one document
#     LabeledAnswers  an answer, and another row's after the same prompt -> both -> one document
#
# Both sides have the same tokens up to the first learned one: otherwise the sums of their
# log-probabilities would belong to different prompts. If both sides of a pair together are longer
# than ``seq_len``, their prompt is cut from the left, on both sides alike; answers are never cut.
# The sides of a labeled answer are never in one row, and each is cut by itself.


_SAME_ANSWERS_REASON = "the two answers are the same to the model"
_PROMPT_MISMATCH_REASON = "the prompt has other tokens before one answer than before the other"
_LONG_ANSWERS_REASON = "the answers leave no room in seq_len for a token of the prompt"


@dataclass(frozen=True)
class _RenderedSides:
    """The sides of a document as text. Labeled answers have a ``label``, and one or two sides."""

    sides: tuple[RenderedText, ...]
    label: bool | None = None


class PreferenceEncoder:
    """Turns pairs or labeled answers into blocks of documents; counts what it cuts and drops."""

    def __init__(self, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn) -> None:
        """Take a fast tokenizer.

        Raises:
            DataError: if ``loss_on`` is not "answers".
        """
        if loss_on != "answers":
            raise DataError(
                f"data.loss_on={loss_on}: with preferences only the answers are compared; set"
                " data.loss_on=answers"
            )
        self._seq_len, self._bos = seq_len, tokenizer.bos_token_id
        self._own_encoder = Encoder(tokenizer, seq_len, loss_on)
        # Its counters are not used: another row's answer is counted with that row.
        self._other_encoder = Encoder(tokenizer, seq_len, loss_on)
        self.counters: Counters = self._own_encoder.counters

    def encode(self, rows: Iterable[ParsedRow]) -> Iterator[Block]:
        """Yield blocks; a labeled answer is joined with an answer of the next row that has another
        prompt, where the first row comes after the last one.

        Raises:
            DataError: for messages if the tokenizer has no chat template that can be parsed.
        """
        batch: list[_RenderedSides] = []
        num_chars = 0
        for row, next_row in _add_next_prompt(rows):
            for item in self._render_row(row, next_row):
                batch.append(item)
                num_chars += sum(len(side.text) for side in item.sides)
            if num_chars >= BATCH_CHARS:
                yield from self._make_block(batch)
                batch, num_chars = [], 0
        yield from self._make_block(batch)

    def _render_row(self, row: ParsedRow, next_row: ParsedRow | None) -> Iterator[_RenderedSides]:
        """Render a row; ``next_row`` gives the mismatched answers if the row is labeled."""
        if isinstance(row, PreferencePair):
            self.counters.examples += 1
            chosen = self._render(row.chosen)
            if chosen and (rejected := self._render(row.rejected)):
                yield _RenderedSides((chosen, rejected))
            return
        assert isinstance(row, LabeledAnswers), "rows of preferences are pairs or labeled answers"
        self.counters.unpaired += len(row.answers) > 1
        other_answers = next_row.answers if isinstance(next_row, LabeledAnswers) else ()
        for number, (answer, label) in enumerate(zip(row.answers, row.labels, strict=True)):
            self.counters.examples += 1
            if (own_side := self._render(answer)) is None:
                continue
            sides = [own_side]
            if other_answers:
                other_answer = other_answers[min(number, len(other_answers) - 1)]
                other_side = self._other_encoder.render(replace_answer(answer, other_answer))
                sides += [] if isinstance(other_side, str) else [other_side]
            yield _RenderedSides(tuple(sides), label)

    def _render(self, answer: Chat | Completion) -> RenderedText | None:
        """Render a side; count it and return None if it cannot be used."""
        text_or_reason = self._own_encoder.render(answer)
        self.counters.marked_answers = 0  # earlier turns are never learned: nothing to report
        if not isinstance(text_or_reason, str):
            return text_or_reason
        self.counters.count_dropped_example(text_or_reason)
        return None

    def _make_block(self, items: list[_RenderedSides]) -> Iterator[Block]:
        """Yield the documents of some items as one block."""
        texts = [side for item in items for side in item.sides]
        sides = iter(self._own_encoder.tokenize(texts) if texts else [])
        documents, labels = [], []
        for item in items:
            whole = [next(sides) for _ in item.sides]
            is_pair = item.label is None
            fitted_sides = self._fit_pair(whole) if is_pair else self._fit_labeled_answer(whole)
            if fitted_sides:
                documents.append(fitted_sides)
                labels.append(item.label)
        if not documents:
            return
        tokens = np.concatenate([tokens for document in documents for tokens, _ in document])
        mask = np.concatenate([mask for document in documents for _, mask in document])
        has_labels = labels[0] is not None
        self.counters.documents += len(documents)
        # Only the first side of a labeled answer, its own, is learned.
        used_sides = [side for document in documents for side in document[: 1 if has_labels else 2]]
        self.counters.tokens += sum(len(tokens) for tokens, _ in used_sides)
        self.counters.loss_tokens += sum(int(mask.sum()) for _, mask in used_sides)
        yield Block(
            np.array([_num_tokens(document) for document in documents], dtype=np.int64),
            tokens.astype(token_dtype(int(tokens.max()) + 1), copy=False),
            mask,
            borders=np.array([len(document[0][0]) for document in documents], dtype=np.int64),
            labels=np.array(labels, dtype=np.uint8) if has_labels else None,
        )

    def _fit_pair(self, sides: list[TokensAndMask]) -> list[TokensAndMask]:
        """Return the sides of a pair, cut to fit; count it and return none if they do not fit."""
        reason = _find_drop_reason(sides)
        fitted_sides = None if reason else self._fit_sides(sides)
        if fitted_sides is None:
            self._count_dropped_sides(sides, reason)
            return []
        self._count_truncation(sides, fitted_sides)
        return fitted_sides

    def _fit_labeled_answer(self, sides: list[TokensAndMask]) -> list[TokensAndMask]:
        """Return the sides of a labeled answer, cut to fit; only its own if the other does not."""
        own, other = sides[:1], sides[1:]
        reason = _find_drop_reason(own)
        fitted_sides = None if reason else self._fit_sides(own)
        if fitted_sides is None:
            self._count_dropped_sides(own, reason)
            return []
        self._count_truncation(own, fitted_sides)
        is_comparable = bool(other) and _find_drop_reason(sides) in (None, _SAME_ANSWERS_REASON)
        fitting_other = self._fit_sides(other) if is_comparable else None
        if fitting_other is None:
            self.counters.unmatched += 1
            return fitted_sides
        self.counters.cut_others += _is_truncated(fitting_other, other)
        return fitted_sides + fitting_other

    def _count_dropped_sides(self, sides: list[TokensAndMask], reason: str | None) -> None:
        """Count sides that cannot be used; without ``reason``, because they do not fit."""
        self.counters.count_dropped_example(reason or _LONG_ANSWERS_REASON)
        if reason is None:
            self.counters.count_truncation(_num_tokens(sides), 0)

    def _count_truncation(
        self, sides: list[TokensAndMask], fitted_sides: list[TokensAndMask]
    ) -> None:
        if _is_truncated(fitted_sides, sides):
            self.counters.cut_prompts += 1
            self.counters.count_truncation(_num_tokens(sides), _num_tokens(fitted_sides))

    def _fit_sides(self, sides: list[TokensAndMask]) -> list[TokensAndMask] | None:
        """Cut the left of the prompt until all sides together fit into ``seq_len``.

        A leading BOS is kept. Return None if no other token of the prompt would be left.
        """
        prompt_len = int(np.argmax(sides[0][1]))
        num_answer_tokens = sum(len(tokens) - prompt_len for tokens, _ in sides)
        num_kept = min(prompt_len, (self._seq_len - num_answer_tokens) // len(sides))
        num_bos = int(sides[0][0][0] == self._bos)
        if num_kept < min(num_bos + 1, prompt_len):
            return None
        if num_kept == prompt_len:
            return sides
        indices = np.r_[:num_bos, prompt_len - num_kept + num_bos : prompt_len]
        return [
            (np.r_[tokens[indices], tokens[prompt_len:]], np.r_[mask[indices], mask[prompt_len:]])
            for tokens, mask in sides
        ]


def make_encoder(
    form: DataForm, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn
) -> Encoder | PreferenceEncoder:
    """Return the encoder that turns rows of ``form`` into blocks."""
    if form == "answers":
        return Encoder(tokenizer, seq_len, loss_on)
    return PreferenceEncoder(tokenizer, seq_len, loss_on)


def _is_truncated(fitted_sides: list[TokensAndMask], sides: list[TokensAndMask]) -> bool:
    return len(fitted_sides[0][0]) < len(sides[0][0])


def _num_tokens(sides: list[TokensAndMask]) -> int:
    return sum(len(tokens) for tokens, _ in sides)


def _find_drop_reason(sides: list[TokensAndMask]) -> str | None:
    """Return why sides cannot be compared; None if they can."""
    if not all(mask.any() for _, mask in sides):
        return "empty answer"
    (tokens, mask), *other_sides = sides
    start = int(np.argmax(mask))
    for other_tokens, other_mask in other_sides:
        if int(np.argmax(other_mask)) != start or (other_tokens[:start] != tokens[:start]).any():
            return _PROMPT_MISMATCH_REASON
        if np.array_equal(tokens, other_tokens):
            return _SAME_ANSWERS_REASON
    return None


def _add_next_prompt(rows: Iterable[ParsedRow]) -> Iterator[tuple[ParsedRow, ParsedRow | None]]:
    """Yield each row with the next row that has another prompt, or with None if none has.

    After the last row comes the first one again. Rows with the same prompt are often adjacent:
    pairs that were split into labeled answers.
    """
    groups = (list(group) for _, group in groupby(rows, _prompt_key))
    first_two = [*islice(groups, 2)]  # at most one of them has the last row's prompt
    last: list[ParsedRow] = []
    for group in chain(first_two, groups):
        yield from ((row, group[0]) for row in last)
        last = group
    candidates = (one[0] for one in first_two if _prompt_key(one[0]) != _prompt_key(last[0]))
    next_row = next(candidates, None)
    yield from ((row, next_row) for row in last)


def _prompt_key(row: ParsedRow) -> Any:
    """Return a key that rows with the same prompt share; for pairs, which need none, the row."""
    if not isinstance(row, LabeledAnswers):
        return row
    answer = row.answers[0]
    if isinstance(answer, Completion):
        return answer.prompt, answer.system, answer.history
    return answer.messages[: find_first_learned_answer(answer)], answer.tools
