"""Raw data as chunks of work, and chunks as examples.

    paths -> files (files.py) -> [Chunk] -> rows (raw_files.py) -> Example (reading.py)

A chunk is a byte range of about 4 MiB, a Parquet row group, some Arrow record batches (as written
by Hugging Face datasets' save_to_disk), some Megatron documents, a CSV file, a compressed file or a
standard-library module. How a source is cut depends on the source alone, never on the number of
ranks. Byte ranges are nominal: a line belongs to the chunk in which it starts, so cutting reads no
data. Memory is bounded by one line (for plain text by one chunk, for tables by one batch), however
large the file.
"""

import ast
import hashlib
import inspect
import itertools
import json
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_tune.config.data import is_prepared
from hpc_tune.data import raw_files
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.fields import WrongRecord
from hpc_tune.data.files import (
    KNOWN_KINDS_TEXT,
    FileKind,
    FoundFiles,
    Paths,
    as_list,
    describe_skipped_files,
    find_files,
    find_kind,
    join_paths,
    megatron_index_path,
)
from hpc_tune.data.reading import DEFAULT_READ_OPTIONS, ParsedRow, ReadOptions, read_example
from hpc_tune.data.records import Completion, Tokens
from hpc_tune.errors import DataError

# -- Token IDs from Megatron-LM's preprocessing: NAME.bin, and NAME.idx, which is its index.
#
#     9 bytes   MMIDIDX and two zeros       int32 [sequences]      tokens of each
#     uint64    the version, 1              int64 [sequences]      where each begins, in bytes
#     uint8     the type of the tokens      int64 [documents + 1]  first sequence of each
#     uint64    sequences                   (int8 [sequences]      modes, of images: not read)
#     uint64    documents + 1
#
# All little-endian:
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/readme.md and
# indexed_dataset.py beside it. In the .bin the sequences follow one another without gaps.


_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")
_IDX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_IDX_FLOAT_CODES = (6, 7)  # which of them is which depends on the writer's age
_MEGATRON_ADVICE = "copy both files again, or preprocess the data again"


@dataclass(frozen=True)
class MegatronIndex:
    """The index of the file ``data``; its columns are read on demand."""

    data: Path
    dtype: np.dtype
    num_sequences: int
    num_documents: int

    def sequence_lengths(self) -> np.ndarray:
        """Return the number of tokens in each sequence."""
        return self._read_values("<i4", _IDX_HEADER.size, self.num_sequences)

    def sequence_byte_offsets(self, start: int, stop: int) -> np.ndarray:
        """Return the byte offsets of sequences; one past the last of them, the size of the .bin."""
        offset = _IDX_HEADER.size + 4 * self.num_sequences + 8 * start
        bounds = self._read_values("<i8", offset, min(stop, self.num_sequences) - start)
        return np.append(bounds, self.data.stat().st_size) if stop > self.num_sequences else bounds

    def first_sequence_indices(self, start: int, stop: int) -> np.ndarray:
        """Return documents' first sequences; one past the last document, the sequence count."""
        offset = _IDX_HEADER.size + 12 * self.num_sequences + 8 * start
        return self._read_values("<i8", offset, stop - start)

    def document_byte_offsets(self, start: int, stop: int) -> np.ndarray:
        """Return the byte offsets of documents ``start`` to ``stop``, and of the last one's end.

        Shape [stop - start + 1].
        """
        sequences = self.first_sequence_indices(start, stop + 1)
        offsets = self.sequence_byte_offsets(int(sequences[0]), int(sequences[-1]) + 1)
        return offsets[sequences - sequences[0]]

    def _read_values(self, dtype: str, offset: int, count: int) -> np.ndarray:
        file = megatron_index_path(self.data)
        values = np.fromfile(file, np.dtype(dtype), count=count, offset=offset)
        if len(values) < count:
            raise DataError(f"{file} was cut off while it was read; {_MEGATRON_ADVICE}")
        return values


def open_megatron_index(data: Path) -> MegatronIndex:
    """Read the header of the index of a .bin, and check the index's size against it.

    Raises:
        DataError: if it is cut off, is no index, or has a form that is not read (images, floats).
    """
    file = megatron_index_path(data)
    with file.open("rb") as stream:
        header = stream.read(_IDX_HEADER.size)
        size = os.fstat(stream.fileno()).st_size
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise DataError(
            f"{file} is not a Megatron index: it begins with {header[:9]!r}, expected {_MAGIC!r} "
            "(the older formats lazy and cached are not read; preprocess with --dataset-impl mmap)"
        )
    if len(header) < _IDX_HEADER.size:
        raise DataError(
            f"{file} is cut off within its first {_IDX_HEADER.size} bytes; {_MEGATRON_ADVICE}"
        )
    _, version, code, num_sequences, num_indices = _IDX_HEADER.unpack(header)
    if version != 1 or code not in _IDX_DTYPES:
        kind = (
            "of floating-point numbers"
            if code in _IDX_FLOAT_CODES
            else f"of the unknown code {code}"
        )
        fault = f"has version {version}, expected 1" if version != 1 else f"says tokens are {kind}"
        raise DataError(f"{file} {fault}; {_MEGATRON_ADVICE}")
    expected_size = _IDX_HEADER.size + 12 * num_sequences + 8 * num_indices
    if size == expected_size + num_sequences > expected_size:
        raise DataError(
            f"{file} has sequence modes, as data with images does; only text is read here"
        )
    if size != expected_size:
        raise DataError(
            f"{file} has {size:,} bytes, but its {num_sequences:,} sequences and "
            f"{max(num_indices - 1, 0):,} documents take {expected_size:,}; {_MEGATRON_ADVICE}"
        )
    return MegatronIndex(data, np.dtype(_IDX_DTYPES[code]), num_sequences, max(num_indices - 1, 0))


def split_megatron_documents(
    data: Path, chunk_bytes: int, max_chunks: int
) -> list[tuple[int, int]]:
    """Return ranges of documents with about ``chunk_bytes`` of tokens; check the whole index.

    With more than ``max_chunks`` ranges of that size, ranges are larger.

    Raises:
        DataError: if the index contradicts itself, or does not fit the size of the .bin.
    """
    index = open_megatron_index(data)
    sequence_lengths = index.sequence_lengths()
    ends = np.cumsum(sequence_lengths, dtype=np.int64) * index.dtype.itemsize
    begins, last = np.append(0, ends[:-1]), int(ends[-1]) if len(ends) else 0
    sequences = (
        index.first_sequence_indices(0, index.num_documents + 1)
        if index.num_documents
        else np.zeros(1)
    )
    if (
        (sequence_lengths < 0).any()
        or (len(ends) and (index.sequence_byte_offsets(0, index.num_sequences) != begins).any())
        or sequences[0] != 0
        or sequences[-1] != index.num_sequences
        or (np.diff(sequences) < 0).any()
    ):
        raise DataError(f"{megatron_index_path(data)} contradicts itself; {_MEGATRON_ADVICE}")
    if (size := data.stat().st_size) != last:
        raise DataError(
            f"{data} has {size:,} bytes, but {megatron_index_path(data).name} describes {last:,}: "
            f"one of them is cut off, or they do not belong together; {_MEGATRON_ADVICE}"
        )
    if not last:
        return []
    starts = np.append(0, ends)[sequences]
    step = max(chunk_bytes, -(-last // max_chunks))
    cuts = np.unique(np.searchsorted(starts[:-1], np.arange(0, last, step)))
    return [*itertools.pairwise(np.unique([0, *cuts.tolist(), index.num_documents]).tolist())]


def read_megatron_documents(data: Path, start: int, stop: int) -> Iterator[tuple[int, Tokens]]:
    """Yield (number from 1, tokens) of the documents from ``start`` to ``stop``.

    Raises:
        DataError: if one of the files was cut off since they were checked.
    """
    index = open_megatron_index(data)
    begins, size = index.document_byte_offsets(start, stop), index.dtype.itemsize
    for number, (begin, end) in enumerate(zip(begins, begins[1:], strict=False), start + 1):
        count = int(end - begin) // size
        tokens = np.fromfile(data, index.dtype, count=count, offset=int(begin))
        if len(tokens) < count:
            raise DataError(f"{data} was cut off while it was read; {_MEGATRON_ADVICE}")
        yield number, Tokens(tokens, f"{data}, document {number}")


def describe_unread_files(found_files: FoundFiles, tokenizer: str) -> Iterator[str]:
    """Yield which files are not read and why, and for Megatron data that its tokenizer is unknown;
    ``tokenizer``: the name of the model's tokenizer.
    """
    yield from describe_skipped_files(found_files)
    if any(find_kind(file) == "megatron" for file in found_files.files):
        yield (
            "Megatron's files do not say which tokenizer made their tokens: it is assumed to be "
            f"{tokenizer}; check them with show"
        )


# -- ``builtin:pydocs``: questions about Python's standard library, with docstrings as answers.
#
# Real text that every machine has offline: a few thousand pairs such as "What does json.dumps do?".
# The source files are parsed, never imported. One top-level module in about ten (by a hash of its
# name) is held out for evaluation.


PYDOCS_NAME = "builtin:pydocs"
PYDOCS_HELDOUT_NAME = "builtin:pydocs:heldout"

MIN_ANSWER_CHARS = 30
MAX_ANSWER_CHARS = 1000
_SKIPPED_MODULES = {
    "antigravity", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "this",
    "tkinter", "turtledemo",
}  # fmt: skip
_STDLIB_ROOT = Path(sysconfig.get_path("stdlib"))
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "_vendor"}


def list_pydocs_modules(is_heldout: bool) -> list[str]:
    """Return the top-level modules of one split, sorted."""
    names = sorted(sys.stdlib_module_names - _SKIPPED_MODULES)
    return [name for name in names if _is_heldout(name) == is_heldout and _module_files(name)]


def read_pydocs_module(name: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs for a top-level module and everything in it."""
    seen = set()
    for module_name, path in _module_files(name):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates that a distributor leaves among the sources
            continue
        for pair in _module_qa_pairs(module_name, tree):
            if pair not in seen:
                seen.add(pair)
                yield pair


def _is_heldout(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


def _module_files(name: str) -> list[tuple[str, Path]]:
    """Return (dotted module name, source file) of a top-level module, sorted."""
    if (file := _STDLIB_ROOT / f"{name}.py").is_file():
        return [(name, file)]
    sources = []
    for path in sorted((_STDLIB_ROOT / name).rglob("*.py")):
        parts = path.relative_to(_STDLIB_ROOT).with_suffix("").parts
        if not _SKIPPED_FOLDERS.intersection(parts):
            sources.append((".".join(parts).removesuffix(".__init__"), path))
    return sources


def _module_qa_pairs(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    answer = _docstring_answer(tree)
    if answer:
        yield f"What is the Python module {module} for?", answer
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_qa_pairs(module, node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            answer = _docstring_answer(node)
            if answer:
                yield f"What is the Python class {module}.{node.name}?", answer
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _function_qa_pairs(f"{module}.{node.name}", member)


def _function_qa_pairs(
    owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, str]]:
    answer = _docstring_answer(node)
    if answer and not node.name.startswith("_"):
        signature = f"{node.name}({ast.unparse(node.args)})"
        yield f"What does {owner}.{node.name} do? Its signature is {signature}", answer


def _docstring_answer(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> str:
    """Return the docstring's first paragraphs up to the limit, "" if nothing is fit to learn."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    answer = ""
    for paragraph in text.split("\n\n"):
        if answer and len(answer) + 2 + len(paragraph) > MAX_ANSWER_CHARS:
            break
        answer = f"{answer}\n\n{paragraph}" if answer else paragraph
    answer = answer.strip()
    return answer if MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS else ""


# -- Raw data as chunks of work, and chunks as examples.


CHUNK_BYTES = 4 << 20
MAX_CHUNKS_PER_FILE = 1 << 15  # in a very large file, chunks grow instead
_HASHED_END_BYTES = 1 << 16


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
        DataError: if the source is missing or empty, of no known kind or (a folder) of several,
            or names a file twice.
    """
    if isinstance(paths, str) and is_builtin(paths):
        return [Chunk("pydocs", name, 0, 1) for name in _builtin_modules(paths)]
    chunks = [chunk for file in find_files(paths).files for chunk in _split_file(file)]
    if not chunks:
        raise DataError(f"{join_paths(paths)} is empty; it must hold at least one example")
    return chunks


def read_chunk(
    chunk: Chunk, reading: ReadOptions = DEFAULT_READ_OPTIONS, findings: ReadFindings | None = None
) -> Iterator[ParsedRow]:
    """Yield the examples of a chunk in order; ``findings`` counts what is worth reporting.

    Raises:
        DataError: for a bad row, with file and line (or row), unless ``reading`` says to skip it;
            for data that cannot be read.
    """
    findings = ReadFindings() if findings is None else findings
    is_first = True
    for position, row in _read_rows(chunk, reading, findings):
        try:
            example = read_example(row, reading, findings)
        except WrongRecord as error:
            problem = ""
            if findings.has_room_for_bad_row:
                problem = f"{_describe_position(chunk, position)}: {error}"
            if reading.bad_rows == "refuse":
                raise DataError(problem + _advise_on_bad_row(problem, reading, is_first)) from error
            findings.count_bad_row(problem)
            continue
        is_first = False
        if example is not None:
            yield example


def _advise_on_bad_row(problem: str, reading: ReadOptions, is_first: bool) -> str:
    """Return advice to skip bad rows of preferences, if a good row came before; else nothing."""
    if reading.form == "answers" or is_first or "data.bad_rows" in problem:
        return ""
    return "; data.bad_rows=skip leaves such rows out, and counts them"


def source_fingerprint(paths: Paths) -> str:
    """Return a hash of the source's paths, file sizes, modification times and change times.

    Only the file system sets the change time (ctime): a tool that edits a file in place may set its
    modification time back, as ``touch -r`` and ``rsync --times`` do, but not its change time.
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
    """Return (file, size, hash of its two ends) per file, to compare copies on several nodes."""
    if isinstance(paths, str) and is_builtin(paths):
        return ((paths, len(_builtin_modules(paths)), sys.version),)
    facts = []
    for file in _list_files(paths):
        with file.open("rb") as stream:
            data = stream.read(_HASHED_END_BYTES)
            size = stream.seek(0, 2)
            stream.seek(max(size - _HASHED_END_BYTES, 0))
            data += stream.read(_HASHED_END_BYTES)
        facts.append((str(file), size, hashlib.sha256(data).hexdigest()))
    return tuple(facts)


def _list_files(paths: Paths) -> list[Path]:
    """Return the files of a source, including the index of each Megatron .bin."""
    files = []
    for file in find_files(paths).files:
        files += [file, megatron_index_path(file)] if find_kind(file) == "megatron" else [file]
    return files


def _builtin_modules(path: str) -> list[str]:
    names = {PYDOCS_NAME: False, PYDOCS_HELDOUT_NAME: True}
    if path not in names:
        raise DataError(f"there is no {path}; the built-in data are {' and '.join(names)}")
    modules = list_pydocs_modules(names[path])
    if not modules:
        raise DataError(
            f"{path}: this Python has no standard library sources on disk; set data.path to a file"
        )
    return modules


def _split_file(file: Path) -> list[Chunk]:
    kind, size = find_kind(file), file.stat().st_size
    if kind is None:
        raise DataError(f"{file} is of no known kind of data; expected {KNOWN_KINDS_TEXT}")
    if kind == "parquet":
        num_groups = raw_files.open_parquet(file).metadata.num_row_groups
        return [Chunk(kind, str(file), group, group + 1) for group in range(num_groups)]
    if kind == "arrow":
        cuts = raw_files.split_arrow_batches(file, CHUNK_BYTES)
        return [Chunk(kind, str(file), *bounds) for bounds in itertools.pairwise(cuts)]
    if kind == "megatron":
        ranges = split_megatron_documents(file, CHUNK_BYTES, MAX_CHUNKS_PER_FILE)
        return [Chunk(kind, str(file), *bounds) for bounds in ranges]
    if kind == "jsonl" and raw_files.is_json_array(file):
        return [Chunk("array", str(file), 0, size)]
    if kind == "csv" or raw_files.is_compressed(file):
        return [Chunk(kind, str(file), 0, size)]
    step = max(CHUNK_BYTES, -(-size // MAX_CHUNKS_PER_FILE))
    return [Chunk(kind, str(file), i, min(i + step, size)) for i in range(0, size, step)]


def _read_rows(
    chunk: Chunk, reading: ReadOptions, findings: ReadFindings
) -> Iterator[tuple[int, Any]]:
    """Yield (position, row), with a WrongRecord in place of a row that cannot be read."""
    file = Path(chunk.path)
    match chunk.kind:
        case "jsonl":
            return raw_files.read_json_lines(file, chunk.start, chunk.stop)
        case "array":
            return raw_files.read_json_array(file)
        case "parquet":
            return raw_files.read_parquet(file, chunk.start, reading, findings)
        case "arrow":
            return raw_files.read_arrow(file, chunk.start, chunk.stop, reading, findings)
        case "csv":
            return raw_files.read_csv(file, reading, findings)
        case "text":
            return raw_files.read_text(file, chunk.start, chunk.stop, CHUNK_BYTES)
        case "megatron":
            return read_megatron_documents(file, chunk.start, chunk.stop)
        case "pydocs":
            pairs = read_pydocs_module(chunk.path)
            return (
                (n, Completion(q, a, plain_prompt=f"{q}\n\n")) for n, (q, a) in enumerate(pairs)
            )


def _describe_position(chunk: Chunk, position: int) -> str:
    match chunk.kind:
        case "jsonl":
            return f"{chunk.path}, line {raw_files.line_number(Path(chunk.path), position)}"
        case "array":
            return f"{chunk.path}, element {position} of the array"
        case "megatron":
            return f"{chunk.path}, document {position}"
        case _:
            return f"{chunk.path}, row {position}"
