"""The hash of the documents in a file of prepared data, and what is checked by reading them all.

``TokenStore.open`` reads no documents: it takes the same time for any size. ``verify_content``
reads each byte, a second or two for a GB. All other ranks wait for rank 0 meanwhile, so a run does
it once for each file, before the first step, and again only if its size or the time of its change
is another.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hpc_tune.atomic_file import write_file
from hpc_tune.data.hdf5_format import PREPARE_AGAIN, Column, TokenStore
from hpc_tune.errors import DataError
from hpc_tune.log import log
from hpc_tune.units import format_bytes

VERIFIED_FILE = "data-verified.json"
HASHED_DATASETS = ("documents/offsets", "tokens", "loss_mask")  # then what a form has beside them
# The same labelled answers were packed into other rows before: a run does not go on with these.
_LABELS_SALT = b"each side by itself"
_LARGE_BYTES = 1 << 30
_PIECE = 1 << 22
_DOCUMENTS = 1 << 20


def new_hash() -> Any:
    """Return the hash of one dataset, before its first byte."""
    return hashlib.blake2b(digest_size=32)


def combine_hashes(hashes: Sequence[Any], has_labels: bool) -> str:
    """Return the hash of the documents from those of ``HASHED_DATASETS``, in their order."""
    mark = _LABELS_SALT if has_labels else b""
    return hashlib.sha256(b"".join(h.digest() for h in hashes) + mark).hexdigest()


def verify_content(store: TokenStore) -> None:
    """Read every document of a prepared file and compare it with what was written.

    Raises:
        DataError: if a byte has changed since.
    """
    columns = [store.offsets[1:], store.tokens, store.loss_mask]
    further = store.borders, store.labels, store.loss_weights
    columns += [column for column in further if column is not None]
    with ThreadPoolExecutor(len(columns)) as pool:
        hashes = [*pool.map(_hash_column, columns)]
    content, expected = combine_hashes(hashes, store.labels is not None), store.attributes.content
    if content != expected or not _is_sorted(store):
        what = "documents" if content != expected else "order of the documents by length"
        raise DataError(
            f"{store.path}: its {what} are not as `prepare` wrote them (hash {content[:12]}, "
            f"expected {expected[:12]}): the file was damaged or changed since. Copy it again, or"
            f" {PREPARE_AGAIN}"
        )


def verify_content_once(store: TokenStore, known: Path, is_new: bool = False) -> None:
    """Verify a prepared file unless ``known``, a file of the run, records that it was verified.

    ``is_new``: this process has just written it.

    Raises:
        DataError: if a byte has changed since it was written.
    """
    status, name = store.path.stat(), str(store.path.resolve())
    times = status.st_mtime_ns, status.st_ctime_ns
    mark = [store.attributes.content, status.st_size, *times]
    try:
        marks = dict(json.loads(known.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        marks = {}
    if marks.get(name) == mark:
        return
    if not is_new:
        if status.st_size > _LARGE_BYTES:
            log.info("verifying %s, %s, once", store.path, format_bytes(status.st_size))
        verify_content(store)
    with contextlib.suppress(OSError):  # it is verified again then
        write_file(known, json.dumps({**marks, name: mark}))


def _hash_column(values: Column) -> Any:
    hashed = new_hash()
    for at in range(0, len(values), _PIECE):
        hashed.update(values[at : at + _PIECE])
    return hashed


def _is_sorted(store: TokenStore) -> bool:
    """Return whether by_length and the lengths are what follows from the offsets.

    They are if (length, number) rises from document to document: then none is there twice.
    """
    values, counts = store.length_values, np.zeros(len(store.length_values), dtype=np.int64)
    all_lengths = np.empty(store.num_documents, dtype=np.uint32)
    for at in range(0, store.num_documents, _DOCUMENTS):
        piece = store.sizes(at, min(at + _DOCUMENTS, store.num_documents))
        all_lengths[at : at + len(piece)] = piece
    last = np.full((2, 1), -1)
    for at in range(0, store.num_documents, _DOCUMENTS):
        numbers = store.by_length[at : at + _DOCUMENTS].astype(np.int64)
        if numbers.max() >= store.num_documents or numbers.min() < 0:
            return False
        lengths = all_lengths[numbers].astype(np.int64)
        columns = np.searchsorted(values, lengths).clip(max=len(values) - 1)
        both = np.concatenate([last, [lengths, numbers]], axis=1)
        longer, later = np.diff(both)
        if not ((longer > 0) | ((longer == 0) & (later > 0))).all():
            return False
        if not np.array_equal(values[columns], lengths):
            return False
        counts += np.bincount(columns, minlength=len(counts))
        last = both[:, -1:]
    return np.array_equal(counts, store.length_counts)
