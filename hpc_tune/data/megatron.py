"""Token numbers of Megatron-LM's preprocessing: NAME.bin, and NAME.idx, which says what is where.

    9 bytes   MMIDIDX and two zeros       int32 [sequences]      tokens of each
    uint64    the version, 1              int64 [sequences]      where each begins, in bytes
    uint8     the type of the tokens      int64 [documents + 1]  sequence numbers, from 0
    uint64    sequences                   (int8 [sequences]      modes, of images: not read)
    uint64    documents + 1

All little-endian: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/readme.md
and indexed_dataset.py beside it. In the .bin the sequences follow one another without gaps.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc_tune.data.files import megatron_index
from hpc_tune.data.records import Tokens
from hpc_tune.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)  # in either order, by the age of the writer
_MEGATRON_ADVICE = "copy both files again, or preprocess the data again"


@dataclass(frozen=True)
class MegatronIndex:
    """The index of ``data``, whose columns are read when they are asked for."""

    data: Path
    dtype: np.dtype
    num_sequences: int
    num_documents: int

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sequence."""
        return self._read("<i4", _HEADER.size, self.num_sequences)

    def pointers(self, start: int, stop: int) -> np.ndarray:
        """Return where sequences begin, in bytes; behind the last one the file ends."""
        at = _HEADER.size + 4 * self.num_sequences + 8 * start
        found = self._read("<i8", at, min(stop, self.num_sequences) - start)
        return np.append(found, self.data.stat().st_size) if stop > self.num_sequences else found

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Return the first sequence of documents, and behind the last one all sequences."""
        at = _HEADER.size + 12 * self.num_sequences + 8 * start
        return self._read("<i8", at, stop - start)

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Return where the documents from ``start`` to ``stop`` begin, and the last of them ends.

        In bytes, shape [stop - start + 1].
        """
        sequences = self.documents(start, stop + 1)
        pointers = self.pointers(int(sequences[0]), int(sequences[-1]) + 1)
        return pointers[sequences - sequences[0]]

    def _read(self, dtype: str, offset: int, count: int) -> np.ndarray:
        file = megatron_index(self.data)
        found = np.fromfile(file, np.dtype(dtype), count=count, offset=offset)
        if len(found) < count:
            raise DataError(f"{file} was cut off while it was read; {_MEGATRON_ADVICE}")
        return found


def open_megatron_index(data: Path) -> MegatronIndex:
    """Read the header of the index of a .bin, and compare the index's size with it.

    Raises:
        DataError: if it is cut off, or not what Megatron writes.
    """
    file = megatron_index(data)
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
        size = os.fstat(opened.fileno()).st_size
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise DataError(
            f"{file} is no index of Megatron: it begins with {header[:9]!r}, expected {_MAGIC!r} "
            "(the older formats lazy and cached are not read; preprocess with --dataset-impl mmap)"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"{file} is cut off within its first {_HEADER.size} bytes; {_MEGATRON_ADVICE}"
        )
    _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        kind = "of floating-point numbers" if code in _FLOATS else f"of the unknown code {code}"
        found = f"has version {version}, expected 1" if version != 1 else f"says tokens are {kind}"
        raise DataError(f"{file} {found}; {_MEGATRON_ADVICE}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size == expected + num_sequences > expected:
        raise DataError(
            f"{file} has modes of sequences, as data with images have; only text is read here"
        )
    if size != expected:
        raise DataError(
            f"{file} has {size:,} bytes, and its {num_sequences:,} sequences and "
            f"{max(num_indices - 1, 0):,} documents take {expected:,}; {_MEGATRON_ADVICE}"
        )
    return MegatronIndex(data, np.dtype(_DTYPES[code]), num_sequences, max(num_indices - 1, 0))


def cut_megatron_documents(data: Path, chunk_bytes: int, max_chunks: int) -> list[tuple[int, int]]:
    """Return ranges of documents with about ``chunk_bytes`` of tokens; checks the whole index.

    Raises:
        DataError: if the index contradicts itself, or the .bin does not have what it says.
    """
    index = open_megatron_index(data)
    lengths = index.lengths()
    ends = np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    begins, last = np.append(0, ends[:-1]), int(ends[-1]) if len(ends) else 0
    sequences = index.documents(0, index.num_documents + 1) if index.num_documents else np.zeros(1)
    if (
        (lengths < 0).any()
        or (len(ends) and (index.pointers(0, index.num_sequences) != begins).any())
        or sequences[0] != 0
        or sequences[-1] != index.num_sequences
        or (np.diff(sequences) < 0).any()
    ):
        raise DataError(f"{megatron_index(data)} contradicts itself; {_MEGATRON_ADVICE}")
    if (size := data.stat().st_size) != last:
        raise DataError(
            f"{data} has {size:,} bytes, and {megatron_index(data).name} describes {last:,}: one "
            f"of both is cut off, or they do not belong together; {_MEGATRON_ADVICE}"
        )
    if not last:
        return []
    starts = np.append(0, ends)[sequences]
    step = max(chunk_bytes, -(-last // max_chunks))
    marks = np.unique(np.searchsorted(starts[:-1], np.arange(0, last, step)))
    marks = np.unique([0, *marks.tolist(), index.num_documents]).tolist()
    return [*zip(marks, marks[1:], strict=False)]


def read_megatron_documents(data: Path, start: int, stop: int) -> Iterator[tuple[int, Tokens]]:
    """Yield (number from 1, tokens) of the documents from ``start`` to ``stop``.

    Raises:
        DataError: if one of the files was cut off since they were looked at.
    """
    index = open_megatron_index(data)
    begins, size = index.begins(start, stop), index.dtype.itemsize
    for number, (begin, end) in enumerate(zip(begins, begins[1:], strict=False), start + 1):
        count = int(end - begin) // size
        tokens = np.fromfile(data, index.dtype, count=count, offset=int(begin))
        if len(tokens) < count:
            raise DataError(f"{data} was cut off while it was read; {_MEGATRON_ADVICE}")
        yield number, Tokens(tokens, f"{data}, document {number}")


def describe_megatron_tokenizer(name: str) -> str:
    """Return that nothing says which tokenizer made the tokens; ``name``: of the model's."""
    return (
        "Megatron's files do not say which tokenizer made their tokens: they are taken for those "
        f"of {name}; look at them with show"
    )
