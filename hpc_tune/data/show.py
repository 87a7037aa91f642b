"""Show documents as the model will see them, as text: ``show`` and ``inspect FILE.h5``.

    raw data -> one example at a time -> encode.py -> its documents, and counts -> lines

Learned text is in color or between marks, special tokens are bold. Text that only looks like a
special token is preceded by a backslash; terminal control characters are shown as escapes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hpc_tune.config.data import DataForm
from hpc_tune.data.answers import longest_match_pattern
from hpc_tune.data.chats import list_special_tokens
from hpc_tune.data.chunks import describe_unread_files, is_builtin, list_chunks, read_chunk
from hpc_tune.data.counts import Counters, ReadFindings
from hpc_tune.data.encode import make_encoder
from hpc_tune.data.files import Paths, find_files, join_paths
from hpc_tune.data.hdf5_format import TokensAndMask, TokenStore, split_sides
from hpc_tune.data.prepare import PrepareSettings
from hpc_tune.data.reading import ParsedRow, ReadOptions, require_columns
from hpc_tune.data.tokenizer import FastTokenizer, tokenizer_name
from hpc_tune.data.writer import Block, verify_content
from hpc_tune.errors import DataError

# After the rows that are shown, further rows are counted up to these limits, which takes seconds.
MAX_COUNTED_ROWS = 1000
MAX_COUNTED_TOKENS = 1 << 20
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


_FORM_LABELS: dict[DataForm, str] = {
    "answers": "documents  ",
    "pairs": "pairs      ",
    "labels": "answers    with labels, sized by the longer of its own and another row's answer: ",
}


@dataclass(frozen=True)
class ShownDocument:
    """The sides of a document: one, or a chosen and a rejected answer after their prompt."""

    sides: Sequence[TokensAndMask]
    is_desirable: bool | None = None

    @property
    def side_names(self) -> Sequence[str]:
        """Names of the sides for the user; none for plain documents."""
        if self.is_desirable is not None:
            return ("desirable" if self.is_desirable else "undesirable",)
        return ("chosen", "rejected") if len(self.sides) > 1 else ()


@dataclass(frozen=True)
class TextStyle:
    """The marks around learned text and around special tokens: (before, after)."""

    learned: tuple[str, str]
    special: tuple[str, str] = ("", "")

    def paint(self, text: str, marks: tuple[str, str]) -> str:
        """Put marks around a text; terminal escapes around each line of it, for pagers."""
        begin, end = marks
        if not begin.startswith("\x1b"):
            return f"{begin}{text}{end}"
        return "\n".join(f"{begin}{line}{end}" if line else "" for line in text.split("\n"))


PLAIN_STYLE = TextStyle(("«", "»"))
COLOR_STYLE = TextStyle(("\x1b[32m", "\x1b[39m"), ("\x1b[1m", "\x1b[22m"))


def show_documents(
    paths: Paths,
    tokenizer: FastTokenizer,
    settings: PrepareSettings,
    num_rows: int,
    style: TextStyle,
) -> Iterator[str]:
    """Yield lines about raw data: the first ``num_rows`` documents, then counts.

    A row without documents counts as one. The counts are of all rows, or of the first ones, up to
    MAX_COUNTED_ROWS or MAX_COUNTED_TOKENS.

    Raises:
        DataError: for raw data that cannot be used, with file and line.
    """
    decoder, reading = DocumentDecoder(tokenizer, style), settings.reading
    found_files = None if is_builtin(join_paths(paths)) else find_files(paths)
    notes = [*describe_unread_files(found_files, tokenizer_name(tokenizer))] if found_files else []
    yield (
        f"{join_paths(paths)}, as the model with the tokenizer {tokenizer_name(tokenizer)} gets "
        f"it: data.seq_len={settings.seq_len} data.loss_on={settings.loss_on}; {decoder.legend}"
    )
    encoder = make_encoder(reading.form, tokenizer, settings.seq_len, settings.loss_on)
    num_shown = num_read = 0
    is_all = True
    findings = ReadFindings()
    for label, example in _read_examples(paths, reading, findings):
        counters = encoder.counters
        counters.unmatched = 0  # each row is encoded alone, without other rows' answers
        is_enough = num_read >= MAX_COUNTED_ROWS or counters.tokens >= MAX_COUNTED_TOKENS
        if num_shown >= num_rows and is_enough:
            is_all = False
            break
        counts_before = asdict(counters)
        blocks = list(encoder.encode([example]))
        counters.unmatched = 0
        num_read += 1
        if num_shown < num_rows:
            remarks = _subtract_counts(counts_before, counters).remarks()
            documents = [document for block in blocks for document in _read_documents(block)]
            shown_documents = documents[: num_rows - num_shown]
            yield from _describe_row(label, shown_documents, len(documents), remarks, decoder)
            num_shown += max(len(shown_documents), 1)
    yield ""
    yield f"{'all' if is_all else 'the first'} {num_read:,} rows: {encoder.counters}"
    if is_all:
        require_columns(join_paths(paths), reading, findings)
    yield from [*findings.lines(), *notes]


def show_prepared_file(
    store: TokenStore, tokenizer: FastTokenizer, num_rows: int, style: TextStyle
) -> Iterator[str]:
    """Yield lines about the first ``num_rows`` documents of prepared data."""
    decoder = DocumentDecoder(tokenizer, style)
    yield f"{store.path}, as it was prepared; {decoder.legend}"
    for number in range(min(num_rows, store.num_documents)):
        is_desirable = None if store.labels is None else bool(store.labels[number])
        sides = store.sides(number)[: 2 if is_desirable is None else 1]
        document = ShownDocument(sides, is_desirable)
        yield from _describe_row(f"document {number + 1}", [document], 1, [], decoder)
    yield ""
    yield f"all {store.num_documents:,} documents: {store.attributes.counters}"


def describe_prepared_file(path: Path) -> tuple[list[str], bool]:
    """Return lines about a file of prepared data, and whether each byte is as it was written.

    Raises:
        DataError: if it is not such a file, or is damaged outside its documents.
    """
    store = TokenStore.open(path)
    attributes = store.attributes
    lengths = store.length_values
    lines = [
        f"{path}: prepared data, version {attributes.version} of the format, by hpc_tune"
        f" {attributes.hpc_tune_version}",
        f"source     {attributes.source}",
        f"{_FORM_LABELS[store.form]}{store.num_documents:,} of {lengths[0]:,} to {lengths[-1]:,} "
        f"tokens, cut at data.seq_len={attributes.seq_len}",
        f"learned    {attributes.counters.loss_tokens:,} of {attributes.counters.tokens:,} tokens,"
        f" data.loss_on={attributes.loss_on}",
        f"tokenizer  {attributes.tokenizer} (fingerprint {attributes.tokenizer_fingerprint[:12]},"
        f" {attributes.vocab_size:,} tokens, the highest used is {attributes.highest_token:,})",
    ]
    if attributes.template_date:
        day = date.fromisoformat(attributes.template_date)
        lines.append(f"date       the chat template printed {day:%-d %B %Y} as today's date")
    lines.append(f"counts     {attributes.counters}")
    try:
        verify_content(store)
    except DataError as error:
        return [*lines, f"content    NOT VALID: {error}"], False
    return [*lines, f"content    verified, hash {attributes.content[:12]}"], True


class DocumentDecoder:
    """Decodes documents into text, with marks around what is learned and around special tokens."""

    def __init__(self, tokenizer: FastTokenizer, style: TextStyle) -> None:
        """Take the tokenizer that the documents were made with."""
        self._backend, self._style = tokenizer.backend_tokenizer, style
        tokens = self._backend.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in tokens.items() if token.special}
        self._typed_token_pattern = longest_match_pattern(list_special_tokens(tokenizer))
        self.legend = style.paint("learned", style.learned)

    def text_of(self, tokens: np.ndarray, mask: np.ndarray, start: int = 0) -> str:
        """Return a document as text, from its token ``start`` on."""
        ids, parts = tokens.tolist(), []
        for is_learned, run in groupby(range(start, len(ids)), lambda index: bool(mask[index])):
            text = "".join(
                self._special_text(ids, [*positions])
                if is_special
                else self._decode_plain_text(ids, [*positions])
                for is_special, positions in groupby(run, lambda index: ids[index] in self._special)
            )
            parts.append(self._style.paint(text, self._style.learned) if is_learned else text)
        return "".join(parts)

    def _special_text(self, ids: Sequence[int], positions: Sequence[int]) -> str:
        text = "".join(self._special[ids[index]] for index in positions)
        return self._style.paint(text, self._style.special)

    def _decode_plain_text(self, ids: Sequence[int], positions: Sequence[int]) -> str:
        """Decode a run of tokens together with the one before it: alone, some lose a space."""
        start, stop = positions[0], positions[-1] + 1
        first = max(start - 1, 0)
        prefix = self._backend.decode(ids[first:start], skip_special_tokens=False)
        full_text = self._backend.decode(ids[first:stop], skip_special_tokens=False)
        # Else the one before it ends in half a character.
        own_ids = None if full_text.startswith(prefix) else [ids[index] for index in positions]
        text = full_text[len(prefix) :] if own_ids is None else self._backend.decode(own_ids)
        text = self._typed_token_pattern.sub(r"\\\g<0>", text)
        return _CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


def _describe_row(
    label: str,
    documents: Sequence[ShownDocument],
    num_documents: int,
    remarks: Sequence[str],
    decoder: DocumentDecoder,
) -> Iterator[str]:
    """Yield the lines of one row: its documents, or why there are none."""
    notes = "".join(f"; {remark}" for remark in remarks)
    if not documents:
        yield from ("", f"{label}{notes or '; nothing in it'}")
    for number, document in enumerate(documents, 1):
        part = f", part {number} of {num_documents:,}" if num_documents > 1 else ""
        num_tokens = " and ".join(f"{len(tokens):,}" for tokens, _ in document.sides)
        num_learned = " and ".join(f"{np.count_nonzero(mask):,}" for _, mask in document.sides)
        weights = "".join(_describe_weights(mask) for _, mask in document.sides)
        yield ""
        yield f"{label}{part}: {num_tokens} tokens, {num_learned} learned{weights}{notes}"
        if not document.side_names:
            yield decoder.text_of(*document.sides[0])
            continue
        tokens, mask = document.sides[0]
        prompt = int(np.argmax(mask))
        yield decoder.text_of(tokens[:prompt], mask[:prompt])
        for name, side in zip(document.side_names, document.sides, strict=True):
            yield f"{name}: {decoder.text_of(*side, prompt)}"


def _describe_weights(mask: np.ndarray) -> str:
    """Return the weights of learned tokens in words; empty if there are none."""
    weights = mask[mask > 0]
    if mask.dtype != np.float32 or not len(weights):
        return ""
    lowest, highest = weights.min(), weights.max()
    return f" with weight {lowest:g}" + (f" to {highest:g}" if highest > lowest else "")


def _read_documents(block: Block) -> Iterator[ShownDocument]:
    ends = np.cumsum(block.lengths)[:-1]
    mask = block.loss_mask if block.loss_weights is None else block.loss_weights
    parts = zip(np.split(block.tokens, ends), np.split(mask, ends), strict=True)
    for number, (tokens, mask) in enumerate(parts):
        if block.borders is None:
            yield ShownDocument([(tokens, mask)])
            continue
        sides = split_sides(tokens, mask, int(block.borders[number]))
        if block.labels is None:
            yield ShownDocument(sides)
        else:
            yield ShownDocument(sides[:1], bool(block.labels[number]))


def _read_examples(
    paths: Paths, reading: ReadOptions, findings: ReadFindings
) -> Iterator[tuple[str, ParsedRow]]:
    """Yield (label, example); the label has the number of the row among those read of its file."""
    chunks = list_chunks(paths)
    has_many = len({chunk.path for chunk in chunks}) > 1
    for file, parts in groupby(chunks, lambda chunk: chunk.path):
        examples = (example for chunk in parts for example in read_chunk(chunk, reading, findings))
        for number, example in enumerate(examples, 1):
            yield f"{Path(file).name}, row {number}" if has_many else f"row {number}", example


def _subtract_counts(counts_before: dict[str, Any], counters: Counters) -> Counters:
    new: dict[str, Any] = {}
    for name, value in asdict(counters).items():
        if isinstance(value, dict):
            changes = {key: count - counts_before[name].get(key, 0) for key, count in value.items()}
            new[name] = {key: count for key, count in changes.items() if count}
        else:
            new[name] = value - counts_before[name]
    return Counters(**new)
