"""Raw data as chunks of work, and chunks as examples.

    paths -> files (files.py) -> [Chunk] -> rows (lines.py, tables.py) -> Example (reading.py)

A chunk is a byte range of about 4 MiB, a Parquet row group, some record batches of Arrow data (such
as Hugging Face datasets' save_to_disk writes), some documents of Megatron's, a file of CSV, a
packed file or a standard-library module. How a source is cut depends on the source alone, never on
the number of ranks. Byte ranges are nominal: a line belongs to the chunk in which it starts, so
that cutting reads no data. Memory is bounded by one line (for plain text by one chunk, for tables
by one batch), however large the file.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.config.data import is_prepared
from hpc_tune.data import lines, megatron, pydocs, tables
from hpc_tune.data.counts import Findings
from hpc_tune.data.files import (
    KNOWN_KINDS,
    FileKind,
    Paths,
    as_list,
    find_files,
    find_kind,
    join_paths,
    megatron_index,
)
from hpc_tune.data.reading import DEFAULT_READING, Reading, Row, read_example
from hpc_tune.data.records import Completion
from hpc_tune.data.values import WrongRecord
from hpc_tune.errors import DataError

CHUNK_BYTES = 4 << 20
MAX_CHUNKS_PER_FILE = 1 << 15  # of a very large file the chunks grow instead
_END_BYTES = 1 << 16


@dataclass(frozen=True)
class Chunk:
    """A piece of work: bytes, row groups, batches or a module, from ``start`` up to ``stop``."""

    kind: FileKind
    path: str
    start: int
    stop: int


def is_builtin(path: str) -> bool:
    """Return whether ``path`` names data that comes with the package."""
    return path.startswith("builtin:")


def list_chunks(paths: Paths) -> list[Chunk]:
    """Cut the source at ``paths`` into chunks.

    Raises:
        DataError: if it is missing, of no known kind, a mix of kinds, or empty.
    """
    if isinstance(paths, str) and is_builtin(paths):
        return [Chunk("pydocs", name, 0, 1) for name in _builtin_modules(paths)]
    chunks = [chunk for file in find_files(paths).files for chunk in _cut_file(file)]
    if not chunks:
        raise DataError(f"{join_paths(paths)} is empty; it must hold at least one example")
    return chunks


def read_chunk(
    chunk: Chunk, reading: Reading = DEFAULT_READING, findings: Findings | None = None
) -> Iterator[Row]:
    """Yield the examples of a chunk in order; ``findings`` counts what is worth reporting.

    Raises:
        DataError: naming file and line (or row), what was found and what is expected.
    """
    findings = Findings() if findings is None else findings
    is_first = True
    for position, row in _read_rows(chunk, reading, findings):
        try:
            example = read_example(row, reading, findings)
        except WrongRecord as error:
            problem = f"{_describe_position(chunk, position)}: {error}" if findings.has_room else ""
            if reading.bad_rows == "refuse":
                raise DataError(problem + _advise_on_bad_row(problem, reading, is_first)) from error
            findings.skip(problem)
            continue
        is_first = False
        if example is not None:
            yield example


def _advise_on_bad_row(problem: str, reading: Reading, is_first: bool) -> str:
    """Return that a bad row of preferences among good ones may be skipped."""
    if reading.form == "answers" or is_first or "data.bad_rows" in problem:
        return ""
    return "; data.bad_rows=skip leaves such rows out, and counts them"


def identity(paths: Paths) -> str:
    """Return a hash of the source's paths and sizes, and of when its files were changed.

    The time of change is the file system's own: what edits a file in place may set its modification
    time back, as ``touch -r`` and ``rsync --times`` do, and cannot set this one.
    """
    if isinstance(paths, str) and is_builtin(paths):
        facts: list[Any] = [paths, sys.version, _builtin_modules(paths)]
    else:
        facts = [str(Path(path).resolve()) for path in as_list(paths)]
        for file in _list_files(paths):
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            facts.append((str(file.resolve()), status.st_size, *times))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def list_source_files(paths: Paths) -> set[str]:
    """Return the files of a source, prepared or raw, or the name of a built-in one."""
    if isinstance(paths, str) and (is_builtin(paths) or is_prepared(paths)):
        return {paths}
    return {str(file.resolve()) for file in find_files(paths).files}


def hash_file_ends(paths: Paths) -> tuple[tuple[str, int, str], ...]:
    """Return (file, size, hash of its two ends), by which copies on several nodes are compared."""
    if isinstance(paths, str) and is_builtin(paths):
        return ((paths, len(_builtin_modules(paths)), sys.version),)
    facts = []
    for file in _list_files(paths):
        with file.open("rb") as opened:
            data = opened.read(_END_BYTES)
            size = opened.seek(0, 2)
            opened.seek(max(size - _END_BYTES, 0))
            data += opened.read(_END_BYTES)
        facts.append((str(file), size, hashlib.sha256(data).hexdigest()))
    return tuple(facts)


def _list_files(paths: Paths) -> list[Path]:
    """Return the files of a source, and beside each .bin of Megatron its index."""
    return [
        file
        for found in find_files(paths).files
        for file in ([found, megatron_index(found)] if find_kind(found) == "megatron" else [found])
    ]


def _builtin_modules(path: str) -> list[str]:
    names = {pydocs.PYDOCS_NAME: False, pydocs.PYDOCS_HELDOUT_NAME: True}
    if path not in names:
        raise DataError(f"there is no {path}; the built-in data are {' and '.join(names)}")
    modules = pydocs.list_pydocs_modules(names[path])
    if not modules:
        raise DataError(
            f"{path}: this Python has no standard library sources on disk; set data.path to a file"
        )
    return modules


def _cut_file(file: Path) -> list[Chunk]:
    kind, size = find_kind(file), file.stat().st_size
    if kind is None:
        raise DataError(f"{file} is of no known kind of data; expected {KNOWN_KINDS}")
    if kind == "parquet":
        num_groups = tables.open_parquet(file).metadata.num_row_groups
        return [Chunk(kind, str(file), group, group + 1) for group in range(num_groups)]
    if kind == "arrow":
        marks = tables.cut_batches(file, CHUNK_BYTES)
        return [Chunk(kind, str(file), a, b) for a, b in zip(marks, marks[1:], strict=False)]
    if kind == "megatron":
        marked = megatron.cut_megatron_documents(file, CHUNK_BYTES, MAX_CHUNKS_PER_FILE)
        return [Chunk(kind, str(file), a, b) for a, b in marked]
    if kind == "jsonl" and lines.is_array(file):
        return [Chunk("array", str(file), 0, size)]
    if kind == "csv" or lines.is_compressed(file):
        return [Chunk(kind, str(file), 0, size)]
    step = max(CHUNK_BYTES, -(-size // MAX_CHUNKS_PER_FILE))
    return [Chunk(kind, str(file), at, min(at + step, size)) for at in range(0, size, step)]


def _read_rows(chunk: Chunk, reading: Reading, findings: Findings) -> Iterator[tuple[int, Any]]:
    """Yield (position, row), a WrongRecord in place of a row that alone is wrong."""
    file = Path(chunk.path)
    match chunk.kind:
        case "jsonl":
            return lines.read_lines(file, chunk.start, chunk.stop)
        case "array":
            return lines.read_array(file)
        case "parquet":
            return tables.read_parquet(file, chunk.start, reading, findings)
        case "arrow":
            return tables.read_arrow(file, chunk.start, chunk.stop, reading, findings)
        case "csv":
            return tables.read_csv(file, reading, findings)
        case "text":
            return lines.read_text(file, chunk.start, chunk.stop, CHUNK_BYTES)
        case "megatron":
            return megatron.read_megatron_documents(file, chunk.start, chunk.stop)
        case "pydocs":
            pairs = pydocs.read_pydocs_module(chunk.path)
            return (
                (n, Completion(q, a, plain_prompt=f"{q}\n\n")) for n, (q, a) in enumerate(pairs)
            )


def _describe_position(chunk: Chunk, position: int) -> str:
    match chunk.kind:
        case "jsonl":
            return f"{chunk.path}, line {lines.line_number(Path(chunk.path), position)}"
        case "array":
            return f"{chunk.path}, element {position} of the array"
        case "megatron":
            return f"{chunk.path}, document {position}"
        case _:
            return f"{chunk.path}, row {position}"
