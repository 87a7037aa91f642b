"""Examples -> tokens and loss masks.

    examples -> rendered text with the spans to learn -> tokenised in batches -> documents -> Blocks

A chat is rendered as one text by the chat template and tokenised once. What the assistant says in
turn i is the text between render(messages[:i], with the generation prompt) and render(messages[:i +
1]): exactly what the model will have to write after the prompt that it gets in use. Both must be
beginnings of the whole text. Templates that render a turn differently once others follow (they drop
earlier reasoning) break that: then only the last answer is learned. A token is learned if its last
character lies in such a span. The first token of a document never is.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from hpc_tune.data.layout import Counters
from hpc_tune.data.records import Chat, Completion, Example, Text
from hpc_tune.data.tokenizer import FastTokenizer, describe, require_fast
from hpc_tune.data.writer import Block, token_dtype
from hpc_tune.errors import DataError

LossOn = Literal["answers", "all"]
# One call of the tokenizer gets about this much text. A token costs it some 200 bytes while it
# works, so a call peaks at about 25 MB even where each byte is a token; that is also enough text to
# keep several cores busy.
BATCH_CHARS = 128 << 10
PARTS_PER_BATCH = 4  # of a long text, for as many cores
_Span = tuple[int, int]


@dataclass(frozen=True)
class _Rendered:
    """Text ready for the tokenizer; ``spans`` (characters) are learned, None means all."""

    text: str
    spans: list[_Span] | None
    bos: bool
    eos: bool
    split: bool


class Encoder:
    """Turns examples into blocks of documents, counting what it cuts and drops."""

    def __init__(self, tokenizer: FastTokenizer, seq_len: int, loss_on: LossOn) -> None:
        """Take a fast tokenizer; its truncation and padding are switched off."""
        self._tokenizer = require_fast(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._seq_len, self._loss_on = seq_len, loss_on
        self._dtype = token_dtype(len(tokenizer))
        own = self._backend.encode("", add_special_tokens=True).ids
        self._bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id in own else []
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        added = self._backend.get_added_tokens_decoder().values()
        self._ends = (*tokenizer.all_special_tokens, *(t.content for t in added if t.special))
        self.counters = Counters()

    def encode(self, examples: Iterable[Example]) -> Iterator[Block]:
        """Yield blocks; the documents do not depend on how the examples are grouped into blocks.

        Raises:
            DataError: for messages where the tokenizer has no chat template.
        """
        held: list[_Rendered] = []
        num_chars = 0
        for rendered in self._render_all(examples):
            held.append(rendered)
            num_chars += len(rendered.text)
            if num_chars >= BATCH_CHARS:
                yield from self._tokenize(held)
                held, num_chars = [], 0
        yield from self._tokenize(held)

    def _render_all(self, examples: Iterable[Example]) -> Iterator[_Rendered]:
        for example in examples:
            self.counters.examples += isinstance(example, Chat | Completion) or example.begins
            rendered: _Rendered | str
            if isinstance(example, Text):
                rendered = _Rendered(example.text, None, example.begins, example.ends, split=True)
            else:
                rendered = self._render(example)
            if isinstance(rendered, _Rendered) and not _is_unicode(rendered.text):
                rendered = "half a character in it (a surrogate alone, as \\ud83d in JSON)"
            if isinstance(rendered, str):
                self.counters.drop(rendered)
            else:
                yield rendered

    def _render(self, example: Chat | Completion) -> _Rendered | str:
        """Return the text and its spans, or the reason to drop the example."""
        if isinstance(example, Completion):
            if not self._tokenizer.chat_template:
                return self._render_plain(example)
            turns = [("system", example.system)] if example.system else []
            turns += [("user", example.prompt), ("assistant", example.completion)]
            example = Chat([{"role": role, "content": text} for role, text in turns])
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the data are chats (messages), but the tokenizer {describe(self._tokenizer)} has"
                " no chat template; set data.chat_template to a Jinja file, or use the instruct"
                " model's"
            )
        full = self._template(example, len(example.messages))
        if full is None:
            return "the chat template refused the messages"
        if self._loss_on == "all":
            return _Rendered(full, None, bos=False, eos=False, split=False)
        answers = [n for n, m in enumerate(example.messages) if m["role"] == "assistant"]
        if not answers:
            return "no answer of the assistant"
        spans = [self._answer_span(example, number, full) for number in answers]
        if None in spans:
            spans = [spans[-1] or self._loose_span(example, answers[-1], full)]
            self.counters.last_answer_only += len(answers) > 1 and None not in spans
        found = [span for span in spans if span is not None]
        if not found:
            return "the chat template does not show where the answer begins"
        return _Rendered(full, found, bos=False, eos=False, split=False)

    def _render_plain(self, example: Completion) -> _Rendered:
        prompt = (
            f"{example.system}\n\n{example.plain_prompt}"
            if example.system
            else example.plain_prompt
        )
        text = prompt + example.completion
        spans = None if self._loss_on == "all" else [(len(prompt), len(text))]
        return _Rendered(text, spans, bos=True, eos=True, split=False)

    def _template(self, chat: Chat, stop: int, generation: bool = False) -> str | None:
        """Render the first ``stop`` messages; None if the template refuses them."""
        try:
            return self._tokenizer.apply_chat_template(
                chat.messages[:stop],
                tools=chat.tools,
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return None

    def _answer_span(self, chat: Chat, number: int, full: str) -> _Span | None:
        """Return the characters of message ``number`` in the whole text; None if unsure."""
        if number == 0:
            return self._first_span(chat, full)
        before = self._template(chat, number, generation=True)
        is_last = number + 1 == len(chat.messages)
        after = full if is_last else self._template(chat, number + 1)
        if before is None or after is None or not full.startswith(after):
            return None
        return self._trim(full, len(before), len(after)) if after.startswith(before) else None

    def _first_span(self, chat: Chat, full: str) -> _Span | None:
        """Find an answer that begins the chat: templates render no empty list to compare with."""
        after, prompt = self._template(chat, 1), self._template(chat, 1, generation=True)
        if not after or not prompt or not (full.startswith(after) and prompt.startswith(after)):
            return None
        header = prompt[len(after) :]
        start = after.find(header) + len(header)
        return self._trim(full, start, len(after)) if header and header in after else None

    def _loose_span(self, chat: Chat, number: int, full: str) -> _Span | None:
        """Find the last answer where the generation prompt itself is not part of the whole text.

        That is so where it opens a block of reasoning that the finished turn does not have. What
        both texts share is the prompt then.
        """
        before, prompt = self._template(chat, number), self._template(chat, number, generation=True)
        after = self._template(chat, number + 1)
        if before is None or prompt is None or after is None:
            return None
        if not (full.startswith(after) and after.startswith(before)):
            return None
        start = len(os.path.commonprefix([prompt, after]))
        return self._trim(full, start, len(after)) if start >= len(before) else None

    def _trim(self, full: str, start: int, stop: int) -> _Span:
        """Leave out white space behind the end-of-turn token: that token ends the answer."""
        trimmed = full[start:stop].rstrip()
        return (start, start + len(trimmed)) if trimmed.endswith(self._ends) else (start, stop)

    def _tokenize(self, rendered: list[_Rendered]) -> Iterator[Block]:
        """Yield the documents of some texts as one block, long plain texts apart from it."""
        short: list[_Rendered] = []
        for item in rendered:
            if len(item.text) <= BATCH_CHARS or not item.split:
                short.append(item)
                continue
            yield from self._short_block(short)
            short = []
            yield from self._block(self._pieces(self._long_text(item)))
        yield from self._short_block(short)

    def _long_text(self, item: _Rendered) -> np.ndarray:
        """Tokenise a text of any length, part by part."""
        parts = [np.array(self._bos if item.bos else [], dtype=self._dtype)]
        texts = _parts(item.text)
        while batch := list(islice(texts, PARTS_PER_BATCH)):
            for encoding in self._backend.encode_batch(batch, add_special_tokens=False):
                parts.append(np.array(encoding.ids, dtype=self._dtype))
        parts.append(np.array(self._eos if item.eos else [], dtype=self._dtype))
        return np.concatenate(parts)

    def _short_block(self, rendered: list[_Rendered]) -> Iterator[Block]:
        if not rendered:
            return
        texts = [item.text for item in rendered]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        documents: list[tuple[np.ndarray, np.ndarray]] = []
        for item, encoding in zip(rendered, encodings, strict=True):
            tokens, mask = self._with_mask(item, encoding)
            documents += self._pieces(tokens) if item.split else self._cut(tokens, mask)
        yield from self._block(documents)

    def _with_mask(self, item: _Rendered, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = [*(self._bos if item.bos else []), *encoding.ids, *(self._eos if item.eos else [])]
        mask = np.ones(len(ids), dtype=np.uint8)
        if item.spans is not None and encoding.ids:
            first = len(self._bos) if item.bos else 0
            stops = np.array(encoding.offsets)[:, 1]
            inside = np.zeros(len(stops), dtype=bool)
            for start, stop in item.spans:
                inside |= (stops > start) & (stops <= stop)
            mask[first : first + len(stops)] = inside
        mask[:1] = 0
        return np.array(ids, dtype=np.int64), mask

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

    def _cut(self, tokens: np.ndarray, mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Cut an example at ``seq_len``; drop it if nothing in it is learned."""
        if not mask.any():
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
