"""The file of prepared data: its format and its reader.

One HDF5 file that describes itself. All datasets are contiguous and uncompressed, so each of them
is one range of bytes that can be read without HDF5::

    /  (attributes)        format, version, content, tokenizer, tokenizer_fingerprint, vocab_size,
       |                   highest_token, seq_len, loss_on, template_date, source, counters (JSON),
       |                   hpc_tune_version
       +- tokens               uint16 or uint32 [num_tokens]    the documents one after the other
       +- loss_mask            uint8 [num_tokens]               1: learned as a target
       +- documents/offsets    int64 [num_documents + 1]        i: tokens[offsets[i]:offsets[i + 1]]
       +- documents/by_length  uint32 or int64 [num_documents]  document numbers by length, stable
       +- lengths/values       int64 [num_lengths]              the distinct lengths, rising
       +- lengths/counts       int64 [num_lengths]              how many documents have each
    (at the end)           a checksum of everything but the datasets: see below

That is version 4, for answers. Files of preferences have the attribute form, and each document has
two sides, one after the other: in version 5 the chosen and the rejected answer (pairs), in version
7 its own answer and another row's to the same prompt (labels). In version 7, lengths are those of
the longer side, as the two sides are never in one row::

       +- documents/borders    int64 [num_documents]            tokens of the first side
       +- documents/labels     uint8 [num_documents]            version 7 only: 1 is desirable

Files of answers with weights other than 0 and 1 have version 6, and beside loss_mask::

       +- loss_weights         float32 [num_tokens]             what each token counts in the loss

The reader asks HDF5 for the datasets' offsets, closes the file and reads each document's bytes when
they are needed: no HDF5 handle is inherited through a fork, no HDF5 lock is taken on a parallel
file system, and opening takes the same time for ten documents as for ten million. What was read
before is in the page cache, which the kernel shrinks under pressure. The file is not mapped into
memory: if it were cut off while in use, or the disk failed, SIGBUS would kill the process.
"""

import contextlib
import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import h5py
import numpy as np

from hpc_tune.config.data import DataForm
from hpc_tune.data.counts import Counters
from hpc_tune.data.files import KNOWN_KINDS_TEXT, Paths, join_paths
from hpc_tune.data.tokenizer import FastTokenizer, num_ids, tokenizer_name
from hpc_tune.errors import DataError
from hpc_tune.files import explain_pointer_file

# -- The seal at the end of a file of prepared data: a checksum of everything but the datasets.
#
# The HDF5 library trusts the structure of a file, and some damaged bytes in it crash the process.
# So the structure (superblock, headers, attributes: some kilobytes) is compared with its checksum
# before the library sees it. Datasets are left out: it would take too long to read large ones.
#
# After HDF5's last byte, where its readers do not look::
#
#     {"datasets": [[offset, bytes], ...], "sha256": "..."}   JSON
#     length of that                                          8 bytes, little-endian
#     b"hpctune\n"


_MAGIC = b"hpctune\n"
_TRAILER = struct.Struct("<Q8s")
_MAX_CHECKSUM_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20

ByteRanges = Sequence[tuple[int, int]]


def append_checksum(path: Path) -> None:
    """Append the seal to a file whose structure is final."""
    datasets = _find_dataset_ranges(path)
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        content = {"datasets": datasets, "sha256": _hash_outside_datasets(file, datasets, size)}
        text = json.dumps(content).encode()
        file.seek(size)
        file.write(text + _TRAILER.pack(len(text), _MAGIC))


def is_structure_intact(file: BinaryIO) -> bool:
    """Return whether the file ends with a seal, and its structure is as it was sealed."""
    size = file.seek(0, 2)
    if size < _TRAILER.size:
        return False
    file.seek(size - _TRAILER.size)
    length, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    end = size - _TRAILER.size - length
    if magic != _MAGIC or length > _MAX_CHECKSUM_BYTES or end < 0:
        return False
    file.seek(end)
    try:
        content = json.loads(file.read(length))
        datasets = [(int(offset), int(num)) for offset, num in content["datasets"]]
        return bool(content["sha256"] == _hash_outside_datasets(file, datasets, end))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False


def _find_dataset_ranges(path: Path) -> list[tuple[int, int]]:
    ranges = []

    def visit(_: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and (offset := item.id.get_offset()) is not None:
            ranges.append((offset, item.nbytes))

    with h5py.File(path, "r", locking=False) as hdf5_file:
        hdf5_file.visititems(visit)
    return sorted(ranges)


def _hash_outside_datasets(file: BinaryIO, datasets: ByteRanges, end: int) -> str:
    """Hash the datasets' ranges, and the bytes before ``end`` that are outside the datasets."""
    hasher = hashlib.sha256(repr([*datasets, end]).encode())
    for start, stop in _ranges_outside_datasets(datasets, end):
        file.seek(start)
        while start < stop:
            piece = file.read(min(_PIECE_BYTES, stop - start))
            if not piece:
                raise ValueError("the file is shorter than its seal says")
            hasher.update(piece)
            start += len(piece)
    return hasher.hexdigest()


def _ranges_outside_datasets(datasets: ByteRanges, end: int) -> Iterator[tuple[int, int]]:
    start = 0
    for offset, num_bytes in datasets:
        if not start <= offset <= offset + num_bytes <= end:
            raise ValueError("datasets overlap or are not in the file")
        yield start, offset
        start = offset + num_bytes
    yield start, end


# -- The file of prepared data.


TokensAndMask = tuple[np.ndarray, np.ndarray]  # tokens and loss mask, of fp32 if it has weights
FORMAT = "hpc_tune tokens"
# 1 had no seal, 2 missed answers of templates that rewrite earlier turns, 3 took special tokens
# that users typed into tool calls for real ones.
VERSION = 4
PAIR_VERSION, WEIGHT_VERSION, LABEL_VERSION = 5, 6, 7
_ANSWER_VERSIONS = (VERSION, WEIGHT_VERSION)
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
PREPARE_AGAIN_ADVICE = "prepare it again with: python -m hpc_tune prepare"

# What h5py raises if a file's structure is damaged.
_HDF5_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError)
_DTYPES = {
    "tokens": ("uint16", "uint32"),
    "loss_mask": ("uint8",),
    "documents/offsets": ("int64",),
    "documents/by_length": ("uint32", "int64"),
    "lengths/values": ("int64",),
    "lengths/counts": ("int64",),
}
# Additional datasets of each form.
FORM_DATASETS: dict[DataForm, dict[str, tuple[str, ...]]] = {
    "answers": {},
    "pairs": {"documents/borders": ("int64",)},
    "labels": {"documents/borders": ("int64",), "documents/labels": ("uint8",)},
}
WEIGHT_DATASETS = {"loss_weights": ("float32",)}  # of files with weights
_FORM_NAMES: dict[DataForm, str] = {
    "answers": "answers to learn",
    "pairs": "pairs of a chosen and a rejected answer",
    "labels": "answers with labels",
}


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """The file's description of itself.

    ``content`` is a hash of the documents; like ``highest_token`` and ``counters``, it is known
    only when all are written. ``template_date`` is the date that a chat template printed in place
    of today's; it is empty for templates that print no date.
    """

    content: str = ""
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    highest_token: int = 0
    seq_len: int
    loss_on: str
    template_date: str
    source: str
    counters: Counters = field(default_factory=Counters)
    hpc_tune_version: str
    form: DataForm = "answers"

    @property
    def has_weights(self) -> bool:
        """Whether tokens count in the loss by weights other than 0 and 1."""
        return self.counters.weighted > 0

    @property
    def version(self) -> int:
        """The format version of a file with these attributes."""
        if self.form != "answers":
            return PAIR_VERSION if self.form == "pairs" else LABEL_VERSION
        return WEIGHT_VERSION if self.has_weights else VERSION


class _OpenFile:
    """An open file that any thread or forked process can read at any place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes; DataError if the file cannot be read any more."""
        try:
            data = os.pread(self._handle, num_bytes, offset)
            while len(data) < num_bytes:  # the kernel returns 2 GiB at most
                piece = os.pread(self._handle, num_bytes - len(data), offset + len(data))
                if not piece:
                    break
                data += piece
        except OSError as error:
            raise DataError(f"{self._path} cannot be read any more: {error.strerror}") from error
        if len(data) < num_bytes:
            raise DataError(
                f"{self._path} was cut off while it was in use: it ends before byte "
                f"{offset + num_bytes:,}. Copy it again, or {PREPARE_AGAIN_ADVICE}"
            )
        return data


class Column:
    """One dataset of the file; an index or a slice of it is read on demand."""

    def __init__(self, file: _OpenFile, offset: int, dtype: Any, length: int) -> None:
        """Use ``TokenStore.open``."""
        self._file, self._offset, self.dtype, self._length = file, offset, np.dtype(dtype), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int | slice) -> Any:
        start, stop, step = (
            position.indices(self._length)
            if isinstance(position, slice)
            else (position, position + 1, 1)
        )
        size, num = self.dtype.itemsize, max(stop - start, 0)
        assert step == 1, "only what lies together is read"
        values = np.frombuffer(self._file.read(self._offset + start * size, num * size), self.dtype)
        return values if isinstance(position, slice) else values[0]


class TokenStore:
    """Read access to prepared data, without an open HDF5 handle and safe across forks."""

    def __init__(self, path: Path, attributes: Attributes, columns: dict[str, Column]) -> None:
        """Use ``TokenStore.open``."""
        self.path = path
        self.attributes = attributes
        self.tokens = columns["tokens"]
        self.loss_mask = columns["loss_mask"]
        self.loss_weights = columns.get("loss_weights")
        self.offsets = columns["documents/offsets"]
        self.documents_by_length = columns["documents/by_length"]
        self.length_values: np.ndarray = columns["lengths/values"][:]
        self.length_counts: np.ndarray = columns["lengths/counts"][:]
        self.form: DataForm = attributes.form
        self.borders = columns.get("documents/borders")
        self.labels = columns.get("documents/labels")

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Open the file at ``path``.

        Raises:
            DataError: if it is missing, not HDF5, of another format, cut off, damaged in its
                structure, or contradicts itself.
        """
        path = Path(path)
        _require_format(path)
        try:
            with h5py.File(path, "r", locking=False) as hdf5_file:
                attributes = _read_attributes(path, hdf5_file)
                dtypes = {**_DTYPES, **FORM_DATASETS[attributes.form]}
                dtypes |= WEIGHT_DATASETS if attributes.has_weights else {}
                extents = {n: _find_dataset(path, hdf5_file, n, dtypes[n]) for n in dtypes}
        except _HDF5_ERRORS as error:
            raise DataError(
                f"{path} cannot be read as HDF5 ({error!r}); copy it again, or "
                f"{PREPARE_AGAIN_ADVICE}"
            ) from error
        file = _OpenFile(path)
        store = cls(path, attributes, {n: Column(file, *extent) for n, extent in extents.items()})
        store._require_consistent()
        return store

    @property
    def num_documents(self) -> int:
        """The number of documents in the file."""
        return len(self.documents_by_length)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self.tokens)

    def document(self, index: int) -> TokensAndMask:
        """Return a document's tokens and loss mask, both of shape [length].

        A mask with weights is fp32, and holds the weight of each token in the loss.

        Raises:
            DataError: if the file was cut off since it was opened.
        """
        start, stop = map(int, self.offsets[index : index + 2])
        mask = self.loss_mask if self.loss_weights is None else self.loss_weights
        return self.tokens[start:stop], mask[start:stop]

    def packed_lengths(self, start: int, stop: int) -> np.ndarray:
        """Return how many tokens of a row each of the documents from ``start`` to ``stop`` takes.

        Raises:
            DataError: if the file was cut off since it was opened.
        """
        borders = self.borders if self.labels is not None else None
        lengths = np.diff(self.offsets[start : stop + 1])
        return compute_packed_lengths(lengths, None if borders is None else borders[start:stop])

    def longest_side_tokens(self) -> int:
        """Return the number of tokens in the longest side, that is the longest text, of the file.

        Raises:
            DataError: if the file was cut off since it was opened.
        """
        if self.borders is None or self.labels is not None:
            return int(self.length_values[-1])
        borders = self.borders[:]
        return int(max(borders.max(), (np.diff(self.offsets[:]) - borders).max()))

    def sides(self, index: int) -> list[TokensAndMask]:
        """Return tokens and loss mask of each side: one, or for preferences two if both are there.

        Raises:
            DataError: if the file was cut off since it was opened.
        """
        tokens, mask = self.document(index)
        if self.borders is None:
            return [(tokens, mask)]
        return split_sides(tokens, mask, int(self.borders[index]))

    def require_form(self, form: DataForm) -> None:
        """Check that the file was prepared for ``form``.

        Raises:
            DataError: if it was prepared for another form.
        """
        if form != self.form:
            raise DataError(
                f"{self.path} holds {_FORM_NAMES[self.form]}, but this training needs "
                f"{_FORM_NAMES[form]}: set tune.objective to the one it was prepared for, or give "
                "raw data, which is then prepared for your objective"
            )

    def require_tokenizer(self, tokenizer: FastTokenizer, fingerprint: str) -> None:
        """Check by its ``fingerprint`` that ``tokenizer``, chat template included, made the file.

        Raises:
            DataError: if it is another one: the token IDs would mean other words.
        """
        made_with = self.attributes.tokenizer_fingerprint
        if fingerprint != made_with:
            raise DataError(
                f"{self.path} was prepared with the tokenizer {self.attributes.tokenizer}"
                f" (fingerprint {made_with[:12]}, {self.attributes.vocab_size} tokens), but the"
                f" model's tokenizer is {tokenizer_name(tokenizer)} ({fingerprint[:12]}, "
                f"{num_ids(tokenizer)} tokens); vocabulary, special tokens and chat template must "
                "be the same. Set model.path or data.chat_template to what it was made with, or "
                f"{PREPARE_AGAIN_ADVICE}"
            )

    def require_embeddings(self, num_embeddings: int, token_name: str) -> None:
        """Check that a model with ``num_embeddings`` embeddings has one for each token.

        ``token_name`` is the name of the file's highest token.

        Raises:
            DataError: if the highest token has none.
        """
        if (highest := self.attributes.highest_token) >= num_embeddings:
            raise DataError(
                f"{self.path} has the token {highest} ({token_name}), but the model has embeddings "
                f"for only {num_embeddings} tokens; take that token out of the data, or resize the "
                "model's embeddings first (resize_token_embeddings)"
            )

    def _require_consistent(self) -> None:
        """Check what can be checked without reading the documents."""
        values, counts = self.length_values, self.length_counts
        min_tokens = int(values @ counts)
        max_tokens = min_tokens if self.labels is None else 2 * min_tokens
        flaws = [
            flaw
            for flaw, is_right in {
                "no documents": self.num_documents > 0,
                "tokens and loss_mask differ in size": len(self.loss_mask) == self.num_tokens,
                "loss_weights do not fit the tokens": self.loss_weights is None
                or len(self.loss_weights) == self.num_tokens,
                "offsets do not fit the documents": len(self.offsets) == self.num_documents + 1,
                "borders do not fit the documents": self.borders is None
                or len(self.borders) == self.num_documents,
                "labels do not fit the documents": self.labels is None
                or len(self.labels) == self.num_documents,
                "lengths are not rising": len(values) == len(counts)
                and bool((np.diff(values) > 0).all())
                and bool((values > 0).all()),
                "lengths do not add up to the documents": int(counts.sum()) == self.num_documents,
                "lengths do not add up to the tokens": min_tokens <= self.num_tokens <= max_tokens,
                "offsets do not end at the last token": len(self.offsets) > 0
                and int(self.offsets[0]) == 0
                and int(self.offsets[len(self.offsets) - 1]) == self.num_tokens,
            }.items()
            if not is_right
        ]
        if flaws:
            raise DataError(f"{self.path} is damaged: {'; '.join(flaws)}; {PREPARE_AGAIN_ADVICE}")


def split_sides(tokens: np.ndarray, mask: np.ndarray, len_first: int) -> list[TokensAndMask]:
    """Split a document into its sides, the first of ``len_first`` tokens: two, or one alone."""
    sides = [(tokens[:len_first], mask[:len_first]), (tokens[len_first:], mask[len_first:])]
    return sides if len_first < len(tokens) else sides[:1]


def compute_packed_lengths(lengths: np.ndarray, borders: np.ndarray | None) -> np.ndarray:
    """Return how many tokens of a row documents take: with ``borders``, only their longer side."""
    return lengths if borders is None else np.maximum(borders, lengths - borders)


def find_prepared_files(source: Paths, folders: Iterable[Path]) -> list[Path]:
    """Return the files in ``folders`` that were prepared from ``source``, oldest first."""
    prepared_files = []
    for file in {file for folder in folders for file in folder.glob("*.h5")}:
        with contextlib.suppress(DataError, OSError):
            if TokenStore.open(file).attributes.source == join_paths(source):
                prepared_files.append(file)
    return sorted(prepared_files, key=lambda file: file.stat().st_mtime)


def _require_format(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no prepared data file at {path}; {PREPARE_AGAIN_ADVICE}")
    if problem := explain_pointer_file(path):
        raise DataError(problem)
    with path.open("rb") as file:
        start = file.read(len(HDF5_MAGIC))
        is_intact = start == HDF5_MAGIC and is_structure_intact(file)
    if start != HDF5_MAGIC:
        raise DataError(
            f"{path} is not an HDF5 file (it starts with {start!r}); data.path takes a file made by"
            f" `python -m hpc_tune prepare`, or raw data as {KNOWN_KINDS_TEXT}"
        )
    if not is_intact:
        raise DataError(
            f"{path} is not as `prepare` wrote it: cut off or damaged since, or written by another"
            f" program or by an earlier hpc_tune. Copy it again, or {PREPARE_AGAIN_ADVICE}"
        )


def _read_attributes(path: Path, file: h5py.File) -> Attributes:
    attributes = dict(file.attrs)
    version = attributes.get("version")
    if version not in (*_ANSWER_VERSIONS, PAIR_VERSION, LABEL_VERSION):
        raise DataError(
            f"{path} has version {version} of the format, this hpc_tune reads "
            f"versions {VERSION} to {LABEL_VERSION}; {PREPARE_AGAIN_ADVICE}"
        )
    if version == PAIR_VERSION and attributes.get("form") == "labels":
        raise DataError(
            f"{path} has answers with labels in version {version} of the format, whose prompts an "
            "earlier hpc_tune cut to make room for the answers of other rows; this one reads "
            f"version {LABEL_VERSION}. A run that was trained on it cannot be resumed: "
            f"{PREPARE_AGAIN_ADVICE}, and train in another run.dir"
        )
    if version in _ANSWER_VERSIONS:
        attributes["form"] = "answers"
    try:
        kinds = {**get_type_hints(Attributes), "form": str}
        counters = kinds.pop("counters")(**json.loads(attributes["counters"]))
        FORM_DATASETS[attributes["form"]]  # a KeyError for an unknown one
        values = {name: kind(attributes[name]) for name, kind in kinds.items()}
        parsed = Attributes(**values, counters=counters)
        if parsed.version != version:
            raise ValueError(f"version {version} of a file of version {parsed.version}")
        return parsed
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} lacks a usable attribute: {error!r}; {PREPARE_AGAIN_ADVICE}"
        ) from error


def _find_dataset(
    path: Path, file: h5py.File, name: str, dtypes: tuple[str, ...]
) -> tuple[int, Any, int]:
    """Return where a dataset's bytes are: (offset, dtype, length)."""
    dataset: Any = file
    for part in name.split("/"):
        link = dataset.get(part, getlink=True) if isinstance(dataset, h5py.Group) else None
        if link is None:
            raise DataError(f"{path} has no dataset {name}; {PREPARE_AGAIN_ADVICE}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(
                f"{path}: {name} is a {type(link).__name__} to another place; prepared data is one"
                f" self-contained file; {PREPARE_AGAIN_ADVICE}"
            )
        dataset = dataset[part]
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1:
        raise DataError(f"{path}: {name} is not a one-dimensional dataset; {PREPARE_AGAIN_ADVICE}")
    offset = dataset.id.get_offset()
    if dataset.dtype.name not in dtypes or dataset.dtype.byteorder == ">":
        raise DataError(
            f"{path}: {name} holds {dataset.dtype}, expected {' or '.join(dtypes)};"
            f" {PREPARE_AGAIN_ADVICE}"
        )
    if dataset.external or dataset.is_virtual or dataset.chunks or offset is None:
        raise DataError(
            f"{path}: {name} is stored in chunks, compressed, or in another file; it must be"
            f" contiguous. Was the file repacked? {PREPARE_AGAIN_ADVICE}"
        )
    return offset, dataset.dtype, dataset.size
