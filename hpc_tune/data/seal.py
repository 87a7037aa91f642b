"""The seal at the end of a file of prepared data: a checksum of all that is not a dataset.

HDF5's library trusts the structure of a file, and some damaged bytes of it end the process. So the
structure (superblock, headers, attributes: some kilobytes) is compared with its checksum before the
library sees it. Datasets are left out: to read them all would take as long as the file is large.

After HDF5's last byte, where its readers do not look::

    {"datasets": [[offset, bytes], ...], "sha256": "..."}   JSON
    length of that                                          8 bytes, little-endian
    b"hpctune\\n"
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import h5py

_MAGIC = b"hpctune\n"
_TRAILER = struct.Struct("<Q8s")
_MAX_SEAL_BYTES = 1 << 16
_PIECE = 1 << 20

Ranges = Sequence[tuple[int, int]]


def append_checksum(path: Path) -> None:
    """Append the seal to a file whose structure is final."""
    datasets = _find_datasets(path)
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        content = {"datasets": datasets, "sha256": _hash(file, datasets, size)}
        text = json.dumps(content).encode()
        file.seek(size)
        file.write(text + _TRAILER.pack(len(text), _MAGIC))


def is_intact(file: BinaryIO) -> bool:
    """Return whether the file ends with a seal and has the structure that it was sealed with."""
    size = file.seek(0, 2)
    if size < _TRAILER.size:
        return False
    file.seek(size - _TRAILER.size)
    length, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    end = size - _TRAILER.size - length
    if magic != _MAGIC or length > _MAX_SEAL_BYTES or end < 0:
        return False
    file.seek(end)
    try:
        content = json.loads(file.read(length))
        datasets = [(int(offset), int(num)) for offset, num in content["datasets"]]
        return bool(content["sha256"] == _hash(file, datasets, end))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False


def _find_datasets(path: Path) -> list[tuple[int, int]]:
    ranges = []

    def visit(_: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and (offset := item.id.get_offset()) is not None:
            ranges.append((offset, item.nbytes))

    with h5py.File(path, "r", locking=False) as opened:
        opened.visititems(visit)
    return sorted(ranges)


def _hash(file: BinaryIO, datasets: Ranges, end: int) -> str:
    """Return the hash of the bytes before ``end`` outside the datasets, and of their ranges."""
    hashed = hashlib.sha256(repr([*datasets, end]).encode())
    for start, stop in _ranges_outside(datasets, end):
        file.seek(start)
        while start < stop:
            piece = file.read(min(_PIECE, stop - start))
            if not piece:
                raise ValueError("the file is shorter than its seal says")
            hashed.update(piece)
            start += len(piece)
    return hashed.hexdigest()


def _ranges_outside(datasets: Ranges, end: int) -> Iterator[tuple[int, int]]:
    start = 0
    for offset, num_bytes in datasets:
        if not start <= offset <= offset + num_bytes <= end:
            raise ValueError("datasets overlap or are not in the file")
        yield start, offset
        start = offset + num_bytes
    yield start, end
