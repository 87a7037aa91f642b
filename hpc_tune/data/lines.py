"""Rows of JSON, as lines or as one array, and plain text; packed by gzip or zstd or not.

Each reader yields (position, row). In place of a row that cannot be read there is a
``WrongRecord``, and the rows after it are read; where they cannot be found, it is an error.
"""

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpc_tune.data.files import COMPRESSIONS
from hpc_tune.data.records import Text
from hpc_tune.data.values import WrongRecord
from hpc_tune.errors import DataError

READ_BYTES = 1 << 20
MAX_LINE_BYTES = 128 << 20  # a line is held whole, and takes some times as much where it is parsed
BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_TOO_LONG = f"a line or element of more than {MAX_LINE_BYTES >> 20} MiB"
_GAP = re.compile(r"[\s,]*")


def is_compressed(file: Path) -> bool:
    """Return whether a file is one compressed stream, which is read from its beginning only."""
    return file.suffix.lower() in COMPRESSIONS


@contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked.

    Raises:
        DataError: if its content cannot be unpacked.
    """
    if not is_compressed(file):
        with file.open("rb") as opened:
            yield opened
        return
    import pyarrow

    try:
        packed = pyarrow.input_stream(str(file), COMPRESSIONS[file.suffix.lower()], READ_BYTES)
        with packed, io.BufferedReader(packed, READ_BYTES) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        long = "too much memory" in str(error)
        todo = "it was packed with --long: pack it with --long=27 at most" if long else "write it"
        raise DataError(f"{file} cannot be unpacked ({error}); {todo} again") from error


def is_array(file: Path) -> bool:
    """Return whether a file of JSON is one array instead of one object per line."""
    with open_bytes(file) as opened:
        return opened.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def read_lines(file: Path, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield (position, value) of the lines of JSON that start within a range of the file.

    A position is the byte at which the line starts; in a packed file, which is read whole, the
    line's number.
    """
    lines = _iterate_positions(file) if is_compressed(file) else _iterate_lines(file, start, stop)
    for position, line in lines:
        if len(line) > MAX_LINE_BYTES:
            yield position, WrongRecord(f"{_TOO_LONG}; write it as several")
        elif not line.isspace() and line:
            yield position, _parse(line)


def line_number(file: Path, position: int) -> int:
    """Return the number of the line at a position; lines are counted for errors alone."""
    if is_compressed(file):
        return position
    number, left = 1, position
    with file.open("rb") as opened:
        while left > 0:
            part = opened.read(min(left, READ_BYTES))
            if not part:
                break
            number, left = number + part.count(b"\n"), left - len(part)
    return number


def _iterate_positions(file: Path) -> Iterator[tuple[int, bytes]]:
    with open_bytes(file) as opened:
        number = 1
        while line := opened.readline(MAX_LINE_BYTES + 1):
            yield number, line.removeprefix(BOM) if number == 1 else line
            _skip_line(opened, line)
            number += 1


def _iterate_lines(file: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as opened:
        position = _seek_line_start(opened, start, stop)
        while position < stop:
            line = opened.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            yield position, line.removeprefix(BOM) if position == 0 else line
            position += len(line) + _skip_line(opened, line)


def _skip_line(file: BinaryIO, begun: bytes) -> int:
    """Read what is left of a line of which ``begun`` was read; return how many bytes that is."""
    num_bytes, part = 0, begun
    while part and not part.endswith(b"\n"):
        part = file.readline(READ_BYTES)
        num_bytes += len(part)
    return num_bytes


def _seek_line_start(file: BinaryIO, position: int, enough: float = math.inf) -> int:
    """Seek the first line that starts at ``position`` or later; return where it starts.

    If none starts before ``enough``, any place from there on may be returned.
    """
    file.seek(max(position - 1, 0))
    while position and file.tell() < enough:
        part = file.readline(READ_BYTES)
        if not part or part.endswith(b"\n"):
            break
    return file.tell()


def _text_line_start(file: Path, opened: BinaryIO, position: int) -> int:
    """Return ``_seek_line_start`` of a file of text.

    Raises:
        DataError: if the line before it is too long.
    """
    start = _seek_line_start(opened, position, position + MAX_LINE_BYTES)
    if start >= position + MAX_LINE_BYTES:
        raise DataError(f"{file}: {_TOO_LONG}; break its lines")
    return start


class _ObjectHook:
    """Makes JSON's objects and notes keys that one has twice: a dict would keep the last alone."""

    def __init__(self) -> None:
        self.twice: list[str] = []

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            self.twice.append(next(name for name in names if names.count(name) > 1))
        return made

    def checked(self, value: Any) -> Any:
        """Return a value, or in its place what is wrong if objects in it had a key twice."""
        if not self.twice:
            return value
        name, self.twice = self.twice[0], []
        return WrongRecord(f"the key {name!r} is there twice in one object; keep one of them")


def _parse(line: bytes) -> Any:
    objects = _ObjectHook()
    try:
        return objects.checked(json.loads(line.decode("utf-8"), object_pairs_hook=objects))
    except UnicodeDecodeError as error:
        if line.startswith(_GZIP):
            return WrongRecord("compressed by gzip; give the file a name that ends with .gz")
        return WrongRecord(f"not UTF-8 text ({error}); convert the file to UTF-8")
    except json.JSONDecodeError as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        why = error.msg.removesuffix(" at")  # "Invalid control character at"
        return WrongRecord(
            f"not JSON ({why} at column {error.colno}): {shown!r}; expected one JSON object per "
            "line, or one array of objects"
        )
    except ValueError as error:  # a number of thousands of digits
        return WrongRecord(f"JSON that cannot be read ({error})")
    except RecursionError:
        return WrongRecord("JSON that is nested too deeply")


def read_array(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a JSON array's elements, holding one element and one read at a time.

    Raises:
        DataError: for what is no JSON: where the next element begins is not known then.
    """
    objects, number, position, is_end = _ObjectHook(), 1, 1, False
    decoder = json.JSONDecoder(object_pairs_hook=objects)
    where = f"{file}, element"
    with open_bytes(file) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig") as text_file:
        try:
            text = text_file.read(READ_BYTES).lstrip()
            while True:
                position = _GAP.match(text, position).end()  # type: ignore[union-attr]  # it matches ""
                if text.startswith("]", position):
                    if (text[position + 1 :] + text_file.read(READ_BYTES)).strip():
                        raise DataError(
                            f"{file}: there is more after the array that it begins with; expected"
                            " one array of objects, or one object per line"
                        )
                    return
                try:
                    value, position = decoder.raw_decode(text, position)
                except json.JSONDecodeError:
                    objects.twice.clear()  # it is read again with what follows
                    if is_end:
                        raise
                    if len(text) - position > MAX_LINE_BYTES:
                        raise DataError(
                            f"{where} {number}: {_TOO_LONG}; write it as several"
                        ) from None
                    more = text_file.read(max(READ_BYTES, len(text) - position))
                    text, position, is_end = text[position:] + more, 0, not more
                    continue
                yield number, objects.checked(value)
                number += 1
        except UnicodeDecodeError as error:
            raise DataError(f"{where} {number} of the array: {error}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where} {number} of the array: not JSON ({error.msg.removesuffix(' at')}); "
                "expected an array of objects, or one object per line"
            ) from error
        except ValueError as error:
            raise DataError(f"{where} {number}: cannot be read ({error})") from error
        except RecursionError:
            raise DataError(f"{where} {number}: nested too deeply") from None


def read_text(file: Path, start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, Text]]:
    """Yield the text between the lines at ``start`` and ``stop``; that of a packed file in pieces.

    Raises:
        DataError: if it is not UTF-8.
    """
    if not is_compressed(file):
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            stop = _text_line_start(file, opened, stop)
            start = _text_line_start(file, opened, start)
            data = opened.read(stop - start)
        if data:
            yield start, _make_text(file, data, start == 0, stop == size)
        return
    with open_bytes(file) as opened:
        position, data = 0, _read_lines(file, opened, piece_bytes)
        while data:
            following = _read_lines(file, opened, piece_bytes)
            yield position, _make_text(file, data, position == 0, not following)
            position, data = position + len(data), following


def _read_lines(file: Path, opened: BinaryIO, num_bytes: int) -> bytes:
    """Return whole lines of about ``num_bytes``."""
    data, rest = opened.read(num_bytes), opened.readline(MAX_LINE_BYTES + 1)
    if len(rest) > MAX_LINE_BYTES:
        raise DataError(f"{file}: {_TOO_LONG}; break its lines")
    return data + rest


def _make_text(file: Path, data: bytes, begins: bool, ends: bool) -> Text:
    try:
        decoded = data.removeprefix(BOM if begins else b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error}); convert it to UTF-8") from error
    return Text(decoded.replace("\r\n", "\n"), begins=begins, ends=ends)
