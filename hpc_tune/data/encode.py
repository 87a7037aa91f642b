"""Examples -> tokens and loss masks.

    examples -> rendered text with the spans to learn -> tokenised in batches -> documents -> Blocks

A text is tokenised once, whole. A token is learned if it overlaps an answer (see ``chats.py``); a
control token only if it begins in one, since some swallow the white space behind them. The first
token of a document never is.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from hpc_tune.data.answers import Span
from hpc_tune.data.chats import LossOn, Rendered, Renderer, controls_of
from hpc_tune.data.layout import Counters
from hpc_tune.data.records import Chat, Completion, Example, Text
from hpc_tune.data.tokenizer import FastTokenizer, require_fast
from hpc_tune.data.writer import Block, token_dtype

# One call of the tokenizer gets about this much text. A token costs it some 200 bytes while it
# works, so a call peaks at about 25 MB even where each byte is a token; that is also enough text to
# keep several cores busy.
BATCH_CHARS = 128 << 10
PARTS_PER_BATCH = 4  # of a long text, for as many cores
UNSURE_CHARS = 4096  # before the place where a text is cut, its tokens may be others


class Encoder:
    """Turns examples into blocks of documents, counting what it cuts and drops."""

    def __init__(self, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn) -> None:
        """Take a fast tokenizer; its truncation and padding are switched off."""
        self._backend = require_fast(tokenizer).backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._seq_len = seq_len
        self._dtype = token_dtype(len(tokenizer))
        own = self._backend.encode("", add_special_tokens=True).ids
        self._bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id in own else []
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        added = self._backend.get_added_tokens_decoder()
        self._control_ids = {number for number, token in added.items() if token.special}
        self._plain_ids: dict[str, list[int]] = {}
        self.counters = Counters()
        self._renderer = Renderer(tokenizer, controls_of(tokenizer), loss_on, self.counters)
        self._control_of = {char: token for token, char in self._renderer.stand_ins.items()}
        self._stand_in = re.compile(f"([{''.join(self._control_of)}])")

    def encode(self, examples: Iterable[Example]) -> Iterator[Block]:
        """Yield blocks; the documents do not depend on how the examples are grouped into blocks.

        Raises:
            DataError: for messages where the tokenizer has no chat template.
        """
        held: list[Rendered] = []
        num_chars = 0
        for rendered in self._render_all(examples):
            held.append(rendered)
            num_chars += len(rendered.text)
            if num_chars >= BATCH_CHARS:
                yield from self._tokenize(held)
                held, num_chars = [], 0
        yield from self._tokenize(held)

    def _render_all(self, examples: Iterable[Example]) -> Iterator[Rendered]:
        for example in examples:
            self.counters.examples += isinstance(example, Chat | Completion) or example.begins
            rendered: Rendered | str
            if isinstance(example, Text):
                rendered = Rendered(example.text, None, example.begins, example.ends, split=True)
            else:
                rendered = self._renderer.render(example)
            if isinstance(rendered, Rendered) and not _is_unicode(rendered.text):
                rendered = "half a character in it (a surrogate alone, as \\ud83d in JSON)"
            if isinstance(rendered, str):
                self.counters.drop(rendered)
            else:
                yield rendered

    def _tokenize(self, rendered: list[Rendered]) -> Iterator[Block]:
        """Yield the documents of some texts as one block, long plain texts apart from it."""
        short: list[Rendered] = []
        for item in rendered:
            if len(item.text) <= BATCH_CHARS or not item.split:
                short.append(item)
                continue
            yield from self._short_block(short)
            short = []
            yield from self._block(self._pieces(self._long_text(item)))
        yield from self._short_block(short)

    def _long_text(self, item: Rendered) -> np.ndarray:
        """Tokenise a text of any length, part by part."""
        parts = [np.array(self._bos if item.bos else [], dtype=self._dtype)]
        texts = _parts(item.text)
        while batch := list(islice(texts, PARTS_PER_BATCH)):
            for encoding in self._backend.encode_batch(batch, add_special_tokens=False):
                parts.append(np.array(encoding.ids, dtype=self._dtype))
        parts.append(np.array(self._eos if item.eos else [], dtype=self._dtype))
        return np.concatenate(parts)

    def _short_block(self, rendered: list[Rendered]) -> Iterator[Block]:
        if not rendered:
            return
        rendered = [self._head(item) for item in rendered]
        texts = [item.text for item in rendered]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        documents: list[tuple[np.ndarray, np.ndarray]] = []
        for item, encoding in zip(rendered, encodings, strict=True):
            tokens, mask = self._with_mask(item, *self._ids_of(item.text, encoding))
            documents += self._pieces(tokens) if item.split else self._cut(item, tokens, mask)
        yield from self._block(documents)

    def _head(self, item: Rendered) -> Rendered:
        """Return as much of a long chat as its first ``seq_len`` tokens come from.

        The rest is cut off in any case, and its tokens would take 400 bytes of memory each.
        """
        size = BATCH_CHARS
        while not item.split and len(item.text) > size:
            head = self._backend.encode(item.text[:size], add_special_tokens=False)
            if len(head.ids) > self._seq_len:
                _, end = head.token_to_chars(self._seq_len)
                if end < size - UNSURE_CHARS:
                    return replace(item, text=item.text[:size])
            size *= 2
        return item

    def _ids_of(self, text: str, encoding: Any) -> tuple[list[int], list[Span]]:
        """Return tokens and their characters, with the stand-ins of control tokens as text."""
        pieces = self._stand_in.split(text) if self._control_of else [text]
        if len(pieces) == 1:
            return encoding.ids, encoding.offsets
        ids: list[int] = []
        offsets: list[Span] = []
        at = 0
        for piece in pieces:
            if piece in self._control_of:
                plain = self._as_plain_text(self._control_of[piece])
                ids += plain
                offsets += [(at, at + 1)] * len(plain)
            elif piece:
                part = self._backend.encode(piece, add_special_tokens=False)
                ids += part.ids
                offsets += [(at + start, at + stop) for start, stop in part.offsets]
            at += len(piece)
        return ids, offsets

    def _as_plain_text(self, token: str) -> list[int]:
        """Return the tokens of what a control token looks like."""
        if token not in self._plain_ids:
            self._backend.encode_special_tokens = True
            self._plain_ids[token] = self._backend.encode(token, add_special_tokens=False).ids
            self._backend.encode_special_tokens = False
        return self._plain_ids[token]

    def _with_mask(
        self, item: Rendered, ids: list[int], offsets: list[Span]
    ) -> tuple[np.ndarray, np.ndarray]:
        bos = self._bos if item.bos and ids[:1] != self._bos else []
        eos = self._eos if item.eos and ids[-1:] != self._eos else []
        whole = np.array([*bos, *ids, *eos], dtype=np.int64)
        mask = np.ones(len(whole), dtype=np.uint8)
        if item.spans is not None and ids:
            begins, ends = np.array(offsets).T
            is_control = np.isin(ids, [*self._control_ids])
            inside = np.zeros(len(ids), dtype=bool)
            for start, stop in item.spans:
                overlaps = (begins < stop) & (ends > start)
                inside |= overlaps & ((begins >= start) | ~is_control)
            mask[len(bos) : len(bos) + len(ids)] = inside
        mask[:1] = 0
        return whole, mask

    def _pieces(self, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Split plain text into documents of at most ``seq_len`` tokens."""
        self.counters.split += len(tokens) > self._seq_len
        pieces = [
            tokens[at : at + self._seq_len] for at in range(0, max(len(tokens), 1), self._seq_len)
        ]
        if len(pieces[-1]) < 2:
            pieces.pop()
            if not pieces:
                self.counters.drop("empty text")
        masks = [np.ones(len(piece), dtype=np.uint8) for piece in pieces]
        for mask in masks:
            mask[0] = 0
        return list(zip(pieces, masks, strict=True))

    def _cut(
        self, item: Rendered, tokens: np.ndarray, mask: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Cut an example at ``seq_len``; drop it if nothing in it is learned."""
        goes_on = any(stop > len(item.text) for _, stop in item.spans or ())
        if not mask.any() and not goes_on:
            self.counters.drop("empty answer")
            return []
        if len(tokens) > self._seq_len:
            if not mask[: self._seq_len].any():
                self.counters.drop("the answer begins behind seq_len")
                return []
            self.counters.truncated += 1
        return [(tokens[: self._seq_len], mask[: self._seq_len])]

    def _block(self, documents: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[Block]:
        if not documents:
            return
        lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.int64)
        tokens = np.concatenate([tokens for tokens, _ in documents])
        mask = np.concatenate([mask for _, mask in documents])
        largest = np.iinfo(self._dtype).max
        assert tokens.max() <= largest, f"token {tokens.max()} is outside the vocabulary"
        self.counters.documents += len(lengths)
        self.counters.tokens += len(tokens)
        self.counters.loss_tokens += int(mask.sum())
        yield Block(lengths, tokens.astype(self._dtype, copy=False), mask)


def _is_unicode(text: str) -> bool:
    """Whether a text can be written at all: JSON may name halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(text: str) -> Iterator[str]:
    """Cut a long text, at line ends or else at spaces, into parts for the tokenizer."""
    at, size = 0, max(BATCH_CHARS // PARTS_PER_BATCH, 1)
    while at < len(text):
        stop = at + size
        if stop < len(text):
            line, space = text.rfind("\n", at, stop), text.rfind(" ", at + 1, stop)
            stop = line + 1 if line >= 0 else space if space > at else stop
        yield text[at:stop]
        at = stop
