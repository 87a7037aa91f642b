"""Raw data as chunks of work, and chunks as examples.

    path -> list_chunks -> [Chunk] -> read_chunk -> records -> Example (records.py)

A chunk is a byte range of about 4 MiB, a Parquet row group, some record batches of an Arrow file
(what Hugging Face datasets' save_to_disk writes) or a standard-library module. How a
source is cut depends on the source alone, never on the number of ranks. Byte ranges are nominal: a
line belongs to the chunk in which it starts, so that cutting reads no data. Memory is bounded by
one line (for plain text by one chunk, for Parquet by one batch), however large the file.
"""

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from hpc_tune.data import pydocs, tables
from hpc_tune.data.records import Completion, Example, Text, WrongRecord, to_example
from hpc_tune.errors import DataError

Kind = Literal["jsonl", "array", "parquet", "arrow", "text", "pydocs"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
CHUNK_BYTES = 4 << 20
MAX_CHUNKS_PER_FILE = 1 << 15  # of a very large file the chunks grow instead
READ_BYTES = 1 << 20
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
_GAP = re.compile(r"[\s,]*")
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?:[-_.]|$)", re.I)
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """A piece of work: bytes, row groups, batches or a module, from ``start`` up to ``stop``."""

    kind: Kind
    path: str
    start: int
    stop: int


def is_builtin(path: str) -> bool:
    """Say whether ``path`` names data that comes with the package."""
    return path.startswith("builtin:")


def list_chunks(path: str) -> list[Chunk]:
    """Cut the source at ``path`` into chunks.

    Raises:
        DataError: if it is missing, of no known kind, a mix of kinds, or empty.
    """
    if is_builtin(path):
        return [Chunk("pydocs", name, 0, 1) for name in _builtin_modules(path)]
    chunks = [chunk for file in _list_files(Path(path)) for chunk in _cut(file)]
    if not chunks:
        raise DataError(f"{path} is empty; it must hold at least one example")
    return chunks


def read_chunk(chunk: Chunk) -> Iterator[Example]:
    """Yield the examples of a chunk in order.

    Raises:
        DataError: naming file and line (or row), what was found and what is expected.
    """
    match chunk.kind:
        case "jsonl":
            return _read_jsonl(chunk)
        case "array":
            return _read_array(chunk)
        case "parquet":
            return tables.read_parquet(Path(chunk.path), chunk.start)
        case "arrow":
            return tables.read_arrow(Path(chunk.path), chunk.start, chunk.stop)
        case "text":
            return _read_text(chunk)
        case "pydocs":
            return _read_pydocs(chunk)


def identity(path: str) -> str:
    """Return a hash of the source's place, sizes and times of change."""
    if is_builtin(path):
        facts: list[Any] = [path, sys.version, _builtin_modules(path)]
    else:
        facts = [str(Path(path).resolve())]
        for file in _list_files(Path(path)):
            status = file.stat()
            facts.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _builtin_modules(path: str) -> list[str]:
    names = {pydocs.NAME: False, pydocs.HELDOUT_NAME: True}
    if path not in names:
        raise DataError(f"there is no {path}; the built-in data are {' and '.join(names)}")
    modules = pydocs.list_modules(names[path])
    if not modules:
        raise DataError(
            f"{path}: this Python has no standard library sources on disk; set data.path to a file"
        )
    return modules


def _list_files(path: Path) -> list[Path]:
    """Return the files of a source: the file itself, or a folder's files of one kind, sorted."""
    if not path.exists():
        raise DataError(f"there is no data at {path}{_near(path)}")
    if path.is_file():
        if path.suffix.lower() not in KINDS:
            raise DataError(
                f"{path}: files of type {path.suffix or '(none)'} are not known; expected a"
                f" prepared .h5 file or raw data as {', '.join(KINDS)}"
            )
        return [path]
    if (path / SPLITS_FILE).is_file() or (path / STATE_FILE).is_file():
        return _saved_dataset(path)
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"{path} cannot be read as a folder: {error.strerror}") from None
    files = [
        file
        for file in entries
        if file.suffix.lower() in KINDS and file.is_file() and not file.name.startswith((".", "_"))
    ]
    if not files:
        raise DataError(f"{path} is a folder without any {', '.join(KINDS)} file")
    kinds = {KINDS[file.suffix.lower()]: file.name for file in files}
    if len(kinds) > 1:
        found = " and ".join(f"{name} ({kind})" for kind, name in sorted(kinds.items()))
        raise DataError(f"{path} mixes kinds of data: {found}; keep one kind in a folder")
    held_out = _held_out(files)
    return [file for file in files if file not in held_out]


def left_out(path: str) -> list[Path]:
    """Return the files of a folder that are named after a split to be held out, and not read."""
    folder = Path(path)
    return _held_out(sorted(folder.iterdir())) if folder.is_dir() else []


def _held_out(files: list[Path]) -> list[Path]:
    """Return files such as test-00000-of-00001.parquet, where one for training is beside them."""
    known = [file for file in files if file.suffix.lower() in KINDS]
    split_of = {file: found[1].lower() for file in known if (found := _SPLIT.search(file.stem))}
    if "train" not in split_of.values():
        return []
    return [file for file, split in split_of.items() if split != "train"]


def _saved_dataset(path: Path) -> list[Path]:
    """Return the files of a folder that Hugging Face datasets' ``save_to_disk`` has written."""
    try:
        if (path / SPLITS_FILE).is_file():
            splits = json.loads((path / SPLITS_FILE).read_text(encoding="utf-8"))["splits"]
            raise DataError(
                f"{path} holds the splits {', '.join(splits)} of a saved dataset; name one of "
                f"them, such as {path / splits[0]}"
            )
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        # Only names: nothing outside of the folder is read.
        files = [path / Path(one["filename"]).name for one in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} looks like a dataset saved by save_to_disk, but its {STATE_FILE} cannot be "
            f"read ({error!r}); save it again"
        ) from None
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{path}: {', '.join(missing)} is missing; copy the whole folder")
    return files


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return (
        f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
    )


def _cut(file: Path) -> list[Chunk]:
    kind, size = KINDS[file.suffix.lower()], file.stat().st_size
    if kind == "parquet":
        num_groups = tables.open_parquet(file).metadata.num_row_groups
        return [Chunk(kind, str(file), group, group + 1) for group in range(num_groups)]
    if kind == "arrow":
        marks = tables.batch_marks(file, CHUNK_BYTES)
        return [Chunk(kind, str(file), a, b) for a, b in zip(marks, marks[1:], strict=False)]
    if kind == "jsonl" and _is_array(file):
        return [Chunk("array", str(file), 0, size)]
    step = max(CHUNK_BYTES, -(-size // MAX_CHUNKS_PER_FILE))
    return [Chunk(kind, str(file), at, min(at + step, size)) for at in range(0, size, step)]


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield (place in the file, line) for the lines that start within the chunk."""
    with open(chunk.path, "rb") as file:
        place = _line_start(file, chunk.start)
        while place < chunk.stop:
            line = file.readline()
            if not line:
                return
            yield place, line.removeprefix(BOM) if place == 0 else line
            place += len(line)


def _line_start(file: BinaryIO, place: int) -> int:
    """Go to the first line that starts at ``place`` or behind it; return where that is."""
    file.seek(max(place - 1, 0))
    while place:
        part = file.readline(READ_BYTES)
        if not part or part.endswith(b"\n"):
            break
    return file.tell()


def _read_jsonl(chunk: Chunk) -> Iterator[Example]:
    for place, line in _lines(chunk):
        if line.isspace() or not line:
            continue
        try:
            yield to_example(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{_where(chunk, place)}: not UTF-8 text ({error}); convert the file to UTF-8"
            ) from error
        except json.JSONDecodeError as error:
            shown = line[:60].decode("utf-8", "replace").strip()
            raise DataError(
                f"{_where(chunk, place)}: not JSON ({error.msg} at column {error.colno}):"
                f" {shown!r}; expected one JSON object per line"
            ) from error
        except WrongRecord as error:
            raise DataError(f"{_where(chunk, place)}: {error}") from error
        except RecursionError:
            raise DataError(f"{_where(chunk, place)}: JSON that is nested too deeply") from None


def _where(chunk: Chunk, place: int) -> str:
    """Return "file, line N" for a place in the file; only an error pays for the counting."""
    number, left = 1, place
    with open(chunk.path, "rb") as file:
        while left > 0:
            part = file.read(min(left, READ_BYTES))
            if not part:
                break
            number, left = number + part.count(b"\n"), left - len(part)
    return f"{chunk.path}, line {number}"


def _is_array(file: Path) -> bool:
    """Say whether a .json file is one JSON array instead of one object per line."""
    with file.open("rb") as opened:
        return opened.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def _read_array(chunk: Chunk) -> Iterator[Example]:
    """Read a JSON array element by element, holding one element and one read at a time."""
    decoder, number, place, is_end = json.JSONDecoder(), 1, 1, False
    with open(chunk.path, encoding="utf-8-sig") as file:
        try:
            text = file.read(READ_BYTES).lstrip()
            while True:
                place = _GAP.match(text, place).end()  # type: ignore[union-attr]  # it matches ""
                if text.startswith("]", place):
                    return
                try:
                    value, place = decoder.raw_decode(text, place)
                except json.JSONDecodeError:
                    if is_end:
                        raise
                    more = file.read(max(READ_BYTES, len(text) - place))
                    text, place, is_end = text[place:] + more, 0, not more
                    continue
                yield to_example(value)
                number += 1
        except (WrongRecord, UnicodeDecodeError) as error:
            raise DataError(f"{chunk.path}, element {number} of the array: {error}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{chunk.path}, element {number} of the array: not JSON ({error.msg}); expected an"
                " array of objects, or one object per line"
            ) from error
        except RecursionError:
            raise DataError(f"{chunk.path}, element {number}: nested too deeply") from None


def _read_text(chunk: Chunk) -> Iterator[Example]:
    with open(chunk.path, "rb") as file:
        size = file.seek(0, 2)
        stop = _line_start(file, chunk.stop)
        start = _line_start(file, chunk.start)
        text = file.read(stop - start).removeprefix(BOM if start == 0 else b"")
    if not text:
        return
    try:
        decoded = text.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{chunk.path}: not UTF-8 text ({error}); convert it to UTF-8") from error
    yield Text(decoded, begins=start == 0, ends=stop == size)


def _read_pydocs(chunk: Chunk) -> Iterator[Example]:
    for question, answer in pydocs.read_module(chunk.path):
        yield Completion(question, answer, plain_prompt=f"{question}\n\n")
