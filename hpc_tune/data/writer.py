"""Write the file of prepared data: streaming, deterministic, under its name only when complete.

HDF5 makes the (still empty) contiguous datasets; their bytes are then written in place by plain
writes, so that memory does not grow with the data and a full disk is an error, not a SIGBUS. The
file is written under a temporary name, fsynced and renamed; then its folder is fsynced.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpc_tune.data.counts import OPTIONAL_COUNTERS, PREFERENCE_COUNTERS
from hpc_tune.data.hdf5_format import (
    FORM_DATASETS,
    FORMAT,
    PREPARE_AGAIN_ADVICE,
    WEIGHT_DATASETS,
    Attributes,
    Column,
    TokenStore,
    append_checksum,
    compute_packed_lengths,
)
from hpc_tune.errors import DataError
from hpc_tune.files import read_json_object, replace_atomically, write_file
from hpc_tune.log import log
from hpc_tune.units import format_bytes

# -- The hash of the documents in a file of prepared data, and what is checked by reading them all.
#
# ``TokenStore.open`` reads no documents: it takes the same time for any size. ``verify_content``
# reads each byte, a second or two for a GB. All other ranks wait for rank 0 meanwhile, so a run
# does it once for each file, before the first step, and again only if the file's size, modification
# time or change time differs.


VERIFIED_FILE = "data-verified.json"
HASHED_DATASETS = ("documents/offsets", "tokens", "loss_mask")  # then a form's own
# Earlier versions packed the same labeled answers into other rows: such a run cannot resume.
_LABELS_SALT = b"each side by itself"
_MIN_LOGGED_BYTES = 1 << 30
_PIECE_ELEMENTS = 1 << 22
_PIECE_DOCUMENTS = 1 << 20


def make_hash() -> Any:
    """Return an empty hash for one dataset."""
    return hashlib.blake2b(digest_size=32)


def combine_hashes(hashes: Sequence[Any], has_labels: bool) -> str:
    """Return the hash of the documents from those of ``HASHED_DATASETS``, in their order."""
    salt = _LABELS_SALT if has_labels else b""
    return hashlib.sha256(b"".join(h.digest() for h in hashes) + salt).hexdigest()


def verify_content(store: TokenStore) -> None:
    """Read every document of a prepared file and compare it with what was written.

    Raises:
        DataError: if a byte has changed since.
    """
    columns = [store.offsets[1:], store.tokens, store.loss_mask]
    optional_columns = store.borders, store.labels, store.loss_weights
    columns += [column for column in optional_columns if column is not None]
    with ThreadPoolExecutor(len(columns)) as pool:
        hashes = [*pool.map(_hash_column, columns)]
    content, expected = combine_hashes(hashes, store.labels is not None), store.attributes.content
    if content != expected:
        hashes_text = f"hash {content[:12]}, expected {expected[:12]}"
        problem = f"documents are not as `prepare` wrote them ({hashes_text})"
    elif not _are_lengths_consistent(store):
        problem = "order of the documents by length is not as `prepare` wrote it"
    else:
        return
    raise DataError(
        f"{store.path}: its {problem}: the file has been damaged or changed. Copy it again, or"
        f" {PREPARE_AGAIN_ADVICE}"
    )


def verify_content_once(store: TokenStore, record_file: Path, is_new: bool = False) -> None:
    """Verify a prepared file unless ``record_file``, a file of the run, records that it was
    verified.

    ``is_new``: this process has just written it.

    Raises:
        DataError: if a byte has changed since it was written.
    """
    status, name = store.path.stat(), str(store.path.resolve())
    times = status.st_mtime_ns, status.st_ctime_ns
    stamp = [store.attributes.content, status.st_size, *times]
    stamps = read_json_object(record_file)
    if stamps.get(name) == stamp:
        return
    if not is_new:
        if status.st_size > _MIN_LOGGED_BYTES:
            log.info("verifying %s, %s, once", store.path, format_bytes(status.st_size))
        verify_content(store)
    with contextlib.suppress(OSError):  # then the next start verifies it again
        write_file(record_file, json.dumps({**stamps, name: stamp}))


def _hash_column(values: Column) -> Any:
    hasher = make_hash()
    for start in range(0, len(values), _PIECE_ELEMENTS):
        hasher.update(values[start : start + _PIECE_ELEMENTS])
    return hasher


def _are_lengths_consistent(store: TokenStore) -> bool:
    """Return whether by_length and the lengths agree with the offsets.

    In by_length, (length, number) must rise from document to document, so that none occurs twice.
    """
    values, counts = store.length_values, np.zeros(len(store.length_values), dtype=np.int64)
    all_lengths = np.empty(store.num_documents, dtype=np.uint32)
    for start in range(0, store.num_documents, _PIECE_DOCUMENTS):
        piece = store.packed_lengths(start, min(start + _PIECE_DOCUMENTS, store.num_documents))
        all_lengths[start : start + len(piece)] = piece
    last = np.full((2, 1), -1)
    for start in range(0, store.num_documents, _PIECE_DOCUMENTS):
        numbers = store.documents_by_length[start : start + _PIECE_DOCUMENTS].astype(np.int64)
        if numbers.max() >= store.num_documents or numbers.min() < 0:
            return False
        lengths = all_lengths[numbers].astype(np.int64)
        columns = np.searchsorted(values, lengths).clip(max=len(values) - 1)
        pairs = np.concatenate([last, [lengths, numbers]], axis=1)
        length_diffs, number_diffs = np.diff(pairs)
        if not ((length_diffs > 0) | ((length_diffs == 0) & (number_diffs > 0))).all():
            return False
        if not np.array_equal(values[columns], lengths):
            return False
        counts += np.bincount(columns, minlength=len(counts))
        last = pairs[:, -1:]
    return np.array_equal(counts, store.length_counts)


# -- Writing a file of prepared data.


MAX_UNSORTED_DOCUMENTS = 1 << 20  # 8 MB of lengths are held before they are sorted into by_length


@dataclass(frozen=True)
class Block:
    """Documents one after the other: lengths [documents], tokens and loss mask [their sum].

    Preferences also have ``borders`` [documents], the tokens of their first sides, and labeled
    answers ``labels`` [documents]. ``loss_weights`` [tokens], if documents have weights, are 0
    where a token is not learned, like the loss mask.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray
    borders: np.ndarray | None = None
    labels: np.ndarray | None = None
    loss_weights: np.ndarray | None = None

    @property
    def packed_lengths(self) -> np.ndarray:
        """How many of a row's ``seq_len`` tokens each document takes."""
        return compute_packed_lengths(
            self.lengths, self.borders if self.labels is not None else None
        )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are not None, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}


def token_dtype(num_ids: int) -> np.dtype:
    """Return the smallest unsigned type that holds every token number below ``num_ids``."""
    return np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32)


def write_store(
    path: Path,
    blocks: Iterable[Block],
    histogram: dict[int, int],
    attributes: Attributes,
    num_tokens: int | None = None,
) -> None:
    """Write documents to ``path``; ``histogram``: how many there are of each packed length.

    ``num_tokens``: of all documents, if these lengths do not add up to it (labeled answers).

    ``content`` and ``highest_token`` of the attributes are replaced by the documents' own. If
    anything fails, nothing is left, and what was at ``path`` before is untouched.
    """
    with replace_atomically(path, durable=True) as temporary:
        if num_tokens is None:
            num_tokens = sum(size * count for size, count in histogram.items())
        extents = _allocate_datasets(temporary, histogram, num_tokens, attributes)
        with temporary.open("r+b", buffering=0) as file:
            content, highest = _write_datasets(
                file.fileno(), extents, blocks, histogram, num_tokens
            )
        _write_attributes(temporary, replace(attributes, content=content, highest_token=highest))
        append_checksum(temporary)


def _allocate_datasets(
    path: Path, histogram: dict[int, int], num_tokens: int, attributes: Attributes
) -> dict[str, tuple[int, np.dtype]]:
    """Create the HDF5 file with unwritten datasets; return where each begins, and its type."""
    num_documents = sum(histogram.values())
    number_dtype = np.dtype(np.uint32 if num_documents < 1 << 32 else np.int64)
    shapes = {
        "tokens": (num_tokens, token_dtype(attributes.vocab_size)),
        "loss_mask": (num_tokens, np.dtype(np.uint8)),
        "documents/offsets": (num_documents + 1, np.dtype(np.int64)),
        "documents/by_length": (num_documents, number_dtype),
        "lengths/values": (len(histogram), np.dtype(np.int64)),
        "lengths/counts": (len(histogram), np.dtype(np.int64)),
    }
    if attributes.has_weights:
        shapes |= {
            name: (num_tokens, np.dtype(dtype)) for name, (dtype,) in WEIGHT_DATASETS.items()
        }
    for name, (dtype,) in FORM_DATASETS[attributes.form].items():
        shapes[name] = (num_documents, np.dtype(dtype))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    extents = {}
    with h5py.File(path, "w", locking=False, alignment_threshold=64, alignment_interval=64) as file:
        for group in ("documents", "lengths"):
            file.create_group(group)
        for name, (length, kind) in shapes.items():
            # Without times: the same documents give the same bytes.
            dataset = file.create_dataset(
                name, (length,), kind.newbyteorder("<"), dcpl=properties, track_times=False
            )
            extents[name] = (dataset.id.get_offset(), kind)
    return extents


def _write_datasets(
    file: int,
    extents: dict[str, tuple[int, np.dtype]],
    blocks: Iterable[Block],
    histogram: dict[int, int],
    expected_tokens: int,
) -> tuple[str, int]:
    """Write every dataset's bytes; return the hash of the documents and their highest token."""
    values = np.array(sorted(histogram), dtype=np.int64)
    counts = np.array([histogram[length] for length in values.tolist()], dtype=np.int64)
    sorter = _LengthSorter(file, *extents["documents/by_length"], values, counts)
    optional_names = [n for names in FORM_DATASETS.values() for n in names if n in extents]
    optional_names += [name for name in WEIGHT_DATASETS if name in extents]
    hashed_names = [*HASHED_DATASETS, *dict.fromkeys(optional_names)]
    hashes = {name: make_hash() for name in hashed_names}
    ends = {name: extents[name][0] for name in hashed_names}

    def append(name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, dtype=extents[name][1]).view(np.uint8).data
        hashes[name].update(data)
        _write(file, data, ends[name])
        ends[name] += len(data)

    num_tokens = highest = 0
    _write(file, np.zeros(1, np.int64).view(np.uint8).data, ends["documents/offsets"])
    ends["documents/offsets"] += np.dtype(np.int64).itemsize
    for block in blocks:
        offsets = num_tokens + np.cumsum(block.lengths, dtype=np.int64)
        append("documents/offsets", offsets)
        append("tokens", block.tokens)
        append("loss_mask", block.loss_mask)
        arrays = {"loss_weights": block.loss_mask, **block.arrays}
        for name in hashed_names[len(HASHED_DATASETS) :]:
            append(name, arrays[name.removeprefix("documents/")])
        highest = max(highest, int(np.max(block.tokens, initial=0)))
        sorter.add(block.packed_lengths)
        num_tokens = int(offsets[-1]) if len(offsets) else num_tokens
    sorter.flush()
    assert num_tokens == expected_tokens, (
        f"blocks hold {num_tokens} tokens, expected {expected_tokens}"
    )
    _write(file, values.view(np.uint8).data, extents["lengths/values"][0])
    _write(file, counts.view(np.uint8).data, extents["lengths/counts"][0])
    return combine_hashes(
        [hashes[name] for name in hashed_names], "documents/labels" in hashed_names
    ), highest


class _LengthSorter:
    """Sorts document numbers by length, stably, as they stream past (counting sort on the disk)."""

    def __init__(
        self, file: int, offset: int, dtype: np.dtype, values: np.ndarray, counts: np.ndarray
    ) -> None:
        self._file, self._offset, self._dtype = file, offset, dtype
        starts = np.cumsum(counts) - counts
        self._next_indices = dict(zip(values.tolist(), starts.tolist(), strict=True))
        self._held_lengths: list[np.ndarray] = []
        self._num_held = self._num_done = 0

    def add(self, lengths: np.ndarray) -> None:
        self._held_lengths.append(np.asarray(lengths, dtype=np.int64))
        self._num_held += len(lengths)
        if self._num_held >= MAX_UNSORTED_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        if not self._num_held:
            return
        lengths = np.concatenate(self._held_lengths)
        order = np.argsort(lengths, kind="stable")
        numbers = (order + self._num_done).astype(self._dtype)
        for value, start, stop in _find_runs(lengths[order]):
            offset = self._offset + self._next_indices[value] * self._dtype.itemsize
            _write(self._file, numbers[start:stop].view(np.uint8).data, offset)
            self._next_indices[value] += stop - start
        self._num_done += self._num_held
        self._held_lengths, self._num_held = [], 0


def _find_runs(sorted_values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (value, start, stop) for each run of equal values."""
    starts = np.flatnonzero(np.diff(sorted_values, prepend=sorted_values[0] - 1))
    stops = np.append(starts[1:], len(sorted_values))
    yield from zip(sorted_values[starts].tolist(), starts.tolist(), stops.tolist(), strict=True)


def _write(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes at ``offset``; a single call may write fewer."""
    while len(data):
        num_written = os.pwrite(file, data[: 1 << 30], offset)
        data, offset = data[num_written:], offset + num_written


def _write_attributes(path: Path, attributes: Attributes) -> None:
    values = asdict(attributes)
    for name in OPTIONAL_COUNTERS:
        if not values["counters"][name]:
            del values["counters"][name]
    if attributes.form == "answers":
        for name in PREFERENCE_COUNTERS:
            del values["counters"][name]
        del values["form"]
    values["counters"] = json.dumps(values["counters"], sort_keys=True)
    with h5py.File(path, "r+", locking=False) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = attributes.version
        for name, value in values.items():
            file.attrs[name] = value
