"""Read rows from JSON (lines or one array), plain text and tables, compressed or not.

Each reader yields (position, row). A row that cannot be read is replaced by a ``WrongRecord``, and
the rows after it are read; if these cannot be found, it is an error.
"""

import io
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.fields import LABEL_FIELDS, LOSS_WEIGHT_FIELDS, PREFERENCE_FIELDS, WrongRecord
from hpc_tune.data.files import COMPRESSIONS
from hpc_tune.data.reading import ReadOptions, choose_columns
from hpc_tune.data.records import Text
from hpc_tune.errors import DataError

READ_BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 128 << 20  # a line is held whole, and takes several times as much to parse
BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_LONG_LINE_PROBLEM = f"a line or element of more than {MAX_LINE_BYTES >> 20} MiB"
_ELEMENT_SEPARATOR = re.compile(r"[\s,]*")


def is_compressed(file: Path) -> bool:
    """Return whether a file is one compressed stream, which can be read only from its beginning."""
    return file.suffix.lower() in COMPRESSIONS


@contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; a compressed one is decompressed.

    Raises:
        DataError: if its content cannot be decompressed.
    """
    if not is_compressed(file):
        with file.open("rb") as handle:
            yield handle
        return
    import pyarrow

    try:
        stream = pyarrow.input_stream(
            str(file), COMPRESSIONS[file.suffix.lower()], READ_BUFFER_BYTES
        )
        with stream, io.BufferedReader(stream, READ_BUFFER_BYTES) as handle:
            yield handle
    except (pyarrow.ArrowException, OSError) as error:
        long = "too much memory" in str(error)
        advice = "--long was above 27: use at most --long=27 and pack it" if long else "write it"
        raise DataError(f"{file} cannot be unpacked ({error}); {advice} again") from error


def is_json_array(file: Path) -> bool:
    """Return whether a file of JSON is one array instead of one object per line."""
    with open_bytes(file) as handle:
        return handle.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def read_json_lines(file: Path, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield (position, value) of the lines of JSON that start at bytes ``start`` to ``stop``.

    A position is the byte at which the line starts; in a compressed file, which is read whole, the
    line's number, from 1. The value of a line that cannot be used is a WrongRecord.
    """
    lines = (
        _iterate_compressed_lines(file)
        if is_compressed(file)
        else _iterate_lines(file, start, stop)
    )
    for position, line in lines:
        if len(line) > MAX_LINE_BYTES:
            yield position, WrongRecord(f"{_LONG_LINE_PROBLEM}; write it as several")
        elif not line.isspace() and line:
            yield position, _parse_json_line(line)


def line_number(file: Path, position: int) -> int:
    """Return the number of the line at a position; lines are counted only for error messages."""
    if is_compressed(file):
        return position
    number, remaining_bytes = 1, position
    with file.open("rb") as handle:
        while remaining_bytes > 0:
            part = handle.read(min(remaining_bytes, READ_BUFFER_BYTES))
            if not part:
                break
            number, remaining_bytes = number + part.count(b"\n"), remaining_bytes - len(part)
    return number


def _iterate_compressed_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with open_bytes(file) as handle:
        number = 1
        while line := handle.readline(MAX_LINE_BYTES + 1):
            yield number, line.removeprefix(BOM) if number == 1 else line
            _skip_rest_of_line(handle, line)
            number += 1


def _iterate_lines(file: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as handle:
        position = _seek_line_start(handle, start, stop)
        while position < stop:
            line = handle.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            yield position, line.removeprefix(BOM) if position == 0 else line
            position += len(line) + _skip_rest_of_line(handle, line)


def _skip_rest_of_line(file: BinaryIO, line_start: bytes) -> int:
    """Read the rest of a line of which ``line_start`` was read; return its number of bytes."""
    num_bytes, part = 0, line_start
    while part and not part.endswith(b"\n"):
        part = file.readline(READ_BUFFER_BYTES)
        num_bytes += len(part)
    return num_bytes


def _seek_line_start(file: BinaryIO, position: int, search_end: float = math.inf) -> int:
    """Seek the first line that starts at ``position`` or later; return where it starts.

    If none starts before ``search_end``, return any place from there on, or the file's end.
    """
    file.seek(max(position - 1, 0))
    while position and file.tell() < search_end:
        part = file.readline(READ_BUFFER_BYTES)
        if not part or part.endswith(b"\n"):
            break
    return file.tell()


def _seek_text_line_start(file: Path, handle: BinaryIO, position: int) -> int:
    """Do as ``_seek_line_start``, without looking further than MAX_LINE_BYTES.

    Raises:
        DataError: if the line that ``position`` is in goes on for that long.
    """
    start = _seek_line_start(handle, position, position + MAX_LINE_BYTES)
    if start >= position + MAX_LINE_BYTES:
        raise DataError(f"{file}: {_LONG_LINE_PROBLEM}; break its lines")
    return start


class _ObjectHook:
    """Builds JSON objects and notes duplicate keys: a dict would keep only the last of them."""

    def __init__(self) -> None:
        self.duplicate_keys: list[str] = []

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            self.duplicate_keys.append(next(name for name in names if names.count(name) > 1))
        return result

    def value_or_duplicate_key_error(self, value: Any) -> Any:
        """Return a value, or a WrongRecord in its place if an object in it had a key twice."""
        if not self.duplicate_keys:
            return value
        name, self.duplicate_keys = self.duplicate_keys[0], []
        return WrongRecord(f"the key {name!r} is there twice in one object; keep one of them")


def _parse_json_line(line: bytes) -> Any:
    objects = _ObjectHook()
    try:
        return objects.value_or_duplicate_key_error(
            json.loads(line.decode("utf-8"), object_pairs_hook=objects)
        )
    except UnicodeDecodeError as error:
        if line.startswith(_GZIP_MAGIC):
            return WrongRecord("compressed by gzip; give the file a name that ends with .gz")
        return WrongRecord(f"not UTF-8 text ({error}); convert the file to UTF-8")
    except json.JSONDecodeError as error:
        start = line[:60].decode("utf-8", "replace").strip()
        reason = error.msg.removesuffix(" at")  # "Invalid control character at"
        return WrongRecord(
            f"not JSON ({reason} at column {error.colno}): {start!r}; expected one JSON object per "
            "line, or one array of objects"
        )
    except ValueError as error:  # a number of thousands of digits
        return WrongRecord(f"JSON that cannot be read ({error})")
    except RecursionError:
        return WrongRecord("JSON that is nested too deeply")


def read_json_array(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a JSON array's elements, holding one element and one read at a time.

    The value of an element with a duplicate key is a WrongRecord.

    Raises:
        DataError: for invalid JSON, after which the start of the next element is unknown; for an
            element that is too long or nested too deeply, and for text after the array.
    """
    objects, number, position, is_end = _ObjectHook(), 1, 1, False
    decoder = json.JSONDecoder(object_pairs_hook=objects)
    location = f"{file}, element"
    with open_bytes(file) as handle, io.TextIOWrapper(handle, encoding="utf-8-sig") as text_file:
        try:
            text = text_file.read(READ_BUFFER_BYTES).lstrip()
            while True:
                position = _ELEMENT_SEPARATOR.match(text, position).end()  # type: ignore[union-attr]  # it matches ""
                if text.startswith("]", position):
                    remainder = text[position + 1 :]
                    while not remainder.strip() and (chunk := text_file.read(READ_BUFFER_BYTES)):
                        remainder = chunk
                    if remainder.strip():
                        raise DataError(
                            f"{file}: there is more after the array that it begins with; expected"
                            " one array of objects, or one object per line"
                        )
                    return
                try:
                    value, position = decoder.raw_decode(text, position)
                except json.JSONDecodeError:
                    objects.duplicate_keys.clear()  # it is read again with what follows
                    if is_end:
                        raise
                    if len(text) - position > MAX_LINE_BYTES:
                        raise DataError(
                            f"{location} {number}: {_LONG_LINE_PROBLEM}; write it as several"
                        ) from None
                    chunk = text_file.read(max(READ_BUFFER_BYTES, len(text) - position))
                    text, position, is_end = text[position:] + chunk, 0, not chunk
                    continue
                yield number, objects.value_or_duplicate_key_error(value)
                number += 1
        except UnicodeDecodeError as error:
            raise DataError(f"{location} {number} of the array: {error}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{location} {number} of the array: not JSON ({error.msg.removesuffix(' at')}); "
                "expected an array of objects, or one object per line"
            ) from error
        except ValueError as error:
            raise DataError(f"{location} {number}: cannot be read ({error})") from error
        except RecursionError:
            raise DataError(f"{location} {number}: nested too deeply") from None


def read_text(file: Path, start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, Text]]:
    """Yield (position, text) of the lines that start within a range; of a compressed file, all
    lines in pieces of about ``piece_bytes``.

    Raises:
        DataError: if they are not UTF-8, cannot be unpacked, or one is too long.
    """
    if not is_compressed(file):
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            stop = _seek_text_line_start(file, handle, stop)
            start = _seek_text_line_start(file, handle, start)
            data = handle.read(stop - start)
        if data:
            yield start, _make_text(file, data, start == 0, stop == size)
        return
    with open_bytes(file) as handle:
        position, data = 0, _read_whole_lines(file, handle, piece_bytes)
        while data:
            next_data = _read_whole_lines(file, handle, piece_bytes)
            yield position, _make_text(file, data, position == 0, not next_data)
            position, data = position + len(data), next_data


def _read_whole_lines(file: Path, handle: BinaryIO, num_bytes: int) -> bytes:
    """Return whole lines of about ``num_bytes``."""
    data, line_end = handle.read(num_bytes), handle.readline(MAX_LINE_BYTES + 1)
    if len(line_end) > MAX_LINE_BYTES:
        raise DataError(f"{file}: {_LONG_LINE_PROBLEM}; break its lines")
    return data + line_end


def _make_text(file: Path, data: bytes, begins: bool, ends: bool) -> Text:
    try:
        text = data.removeprefix(BOM if begins else b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error}); convert it to UTF-8") from error
    return Text(text.replace("\r\n", "\n"), begins=begins, ends=ends)


# -- Tables (Parquet, Arrow and CSV) as rows; one batch of rows is held at a time, of up to
# ``BATCH_BYTES`` or of one row.
#
# pyarrow reads them. Each reader yields (number of the row, row), with a ``WrongRecord`` in place
# of a single wrong row; if the file itself is damaged, it is an error.


BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
# The longest row of CSV: pyarrow reads in blocks of this size, and a row must not be longer.
CSV_BLOCK_BYTES = 16 << 20
_CSV_HEADER_ROWS = 1
_NUMERIC_COLUMNS = (*LOSS_WEIGHT_FIELDS, *LABEL_FIELDS)  # numbers, or true and false
_ARROW_FILE_MAGIC = b"ARROW1"

NumberedRows = Iterator[tuple[int, Any]]


def open_parquet(file: Path) -> Any:
    """Return pyarrow's reader of a Parquet file.

    Raises:
        DataError: if it is not one.
    """
    import pyarrow.parquet

    with _raise_as_data_error(f"{file} cannot be read as Parquet"):
        # Otherwise pyarrow holds all bytes of a row group, whatever the buffer size.
        handle = pyarrow.parquet.ParquetFile(file, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
        handle.schema_arrow.names  # noqa: B018  # in a damaged file they may not be text
        return handle


def read_parquet(
    file: Path, row_group: int, reading: ReadOptions, findings: ReadFindings
) -> NumberedRows:
    """Yield the rows of one row group.

    Raises:
        DataError: for a damaged file, or columns that cannot be used.
    """
    with open_parquet(file) as parquet:
        columns = choose_columns(file, parquet.schema_arrow.names, reading, findings)
        num_rows_before = sum(parquet.metadata.row_group(g).num_rows for g in range(row_group))
        num_rows = _rows_per_batch(parquet.metadata.row_group(row_group), columns)
        batches = parquet.iter_batches(num_rows, [row_group], columns, use_threads=False)
        yield from _read_rows(file, _slice_batches(batches, columns), num_rows_before)


def _rows_per_batch(row_group: Any, columns: list[str]) -> int:
    """Return how many rows of a row group have about ``BATCH_BYTES`` in ``columns``."""
    parts = [row_group.column(n) for n in range(row_group.num_columns)]
    num_bytes = sum(
        part.total_uncompressed_size
        for part in parts
        if part.path_in_schema.split(".")[0] in columns
    )
    return min(max(BATCH_BYTES * row_group.num_rows // max(num_bytes, 1), 1), BATCH_ROWS)


def split_arrow_batches(file: Path, num_bytes: int) -> list[int]:
    """Cut the record batches of an Arrow file or stream into parts of about ``num_bytes``.

    Returns the numbers of the batches at which parts begin, and the number of batches. The file is
    mapped into memory, and only the headers of its batches are read.

    Raises:
        DataError: if it is not an Arrow file or stream.
    """
    cuts, part_bytes, number = [0], 0, 0
    for number, batch in enumerate(_read_batches(file), 1):
        part_bytes += _batch_bytes(batch)
        if part_bytes >= num_bytes:
            cuts.append(number)
            part_bytes = 0
    return cuts if cuts[-1] == number else [*cuts, number]


def _batch_bytes(batch: Any) -> int:
    """Return the bytes of a record batch; pyarrow before 24 cannot count views."""
    import pyarrow

    try:
        return int(batch.nbytes)
    except pyarrow.lib.ArrowTypeError:
        return int(batch.get_total_buffer_size())


def read_arrow(
    file: Path, start: int, stop: int, reading: ReadOptions, findings: ReadFindings
) -> NumberedRows:
    """Yield the rows of the record batches ``start`` up to ``stop``.

    Raises:
        DataError: for a damaged file, or columns that cannot be used.
    """
    num_rows_before, batches = 0, []
    for number, batch in enumerate(_read_batches(file)):
        if number >= stop:
            break
        if number >= start:
            batches.append(batch)
        else:
            num_rows_before += batch.num_rows
    if batches:
        columns = choose_columns(file, batches[0].schema.names, reading, findings)
        yield from _read_rows(file, _slice_batches(batches, columns), num_rows_before)


def read_csv(file: Path, reading: ReadOptions, findings: ReadFindings) -> NumberedRows:
    """Yield the rows of a CSV file, whose first line names the columns.

    Cells are text, even if they look like numbers or are empty; only columns for weights, labels
    and other marks hold numbers, or true and false.

    Raises:
        DataError: for a file that is not CSV, or columns that cannot be used.
    """
    import pyarrow
    from pyarrow import csv

    ragged_rows: list[Any] = []

    def skip(row: Any) -> str:
        ragged_rows.append(row)
        return "skip"

    read_options = csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
    parse_options = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip)
    problem = f"{file} cannot be read as CSV (with rows of at most {CSV_BLOCK_BYTES >> 20} MiB)"
    with (
        open_bytes(file) as handle,
        _raise_as_data_error(problem),
        csv.open_csv(handle, read_options, parse_options) as reader,
    ):
        names = reader.schema.names
    ragged_rows.clear()
    if len(names) == 1 and (sep := next((mark for mark in ";\t|" if mark in names[0]), "")):
        raise DataError(
            f"{file} begins with the names {names[0]!r}: separated by {sep!r}, expected commas"
        )
    columns = choose_columns(file, names, reading, findings)
    marks = (
        (*_NUMERIC_COLUMNS, *PREFERENCE_FIELDS) if reading.form == "answers" else _NUMERIC_COLUMNS
    )
    fields = {name: dict(reading.columns).get(name, name) for name in columns}
    convert_options = csv.ConvertOptions(
        include_columns=columns,
        # As bytes: a row that is not UTF-8 is then only one wrong row, and reading continues.
        column_types={c: pyarrow.binary() for c, field in fields.items() if field not in marks},
        strings_can_be_null=False,
    )
    with open_bytes(file) as handle:
        with _raise_as_data_error(problem):
            batches = csv.open_csv(handle, read_options, parse_options, convert_options)
        shift = 0
        for number, row in _read_rows(file, _slice_batches(batches, columns), 0):
            while ragged_rows and ragged_rows[0].number - _CSV_HEADER_ROWS <= number + shift:
                yield _make_ragged_row_error(ragged_rows.pop(0))
                shift += 1
            yield number + shift, row
        yield from map(_make_ragged_row_error, ragged_rows)


def _make_ragged_row_error(row: Any) -> tuple[int, WrongRecord]:
    return row.number - _CSV_HEADER_ROWS, WrongRecord(
        f"found {row.actual_columns} cells, expected {row.expected_columns}; put quotes around text"
        " with commas, line ends or quotes in it"
    )


def _slice_batches(batches: Any, columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield from _split_large_batch(batch.slice(start, BATCH_ROWS).select(columns))


def _split_large_batch(batch: Any) -> Iterator[Any]:
    """Yield a batch in parts of ``BATCH_BYTES`` at most, or of one row."""
    halves = [batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2)]
    num_bytes = _batch_bytes(batch)
    has_shared_values = sum(map(_batch_bytes, halves)) > 1.5 * num_bytes  # a dictionary's values
    if num_bytes <= BATCH_BYTES or batch.num_rows < 2 or has_shared_values:
        yield batch
        return
    for half in halves:
        yield from _split_large_batch(half)


def _read_batches(file: Path) -> Iterator[Any]:
    import pyarrow

    with (
        _raise_as_data_error(f"{file} cannot be read as Arrow data"),
        pyarrow.memory_map(str(file)) as mapped_file,
    ):
        is_stream = mapped_file.read(len(_ARROW_FILE_MAGIC)) != _ARROW_FILE_MAGIC
        mapped_file.seek(0)
        if is_stream:
            source = pyarrow.ipc.open_stream(mapped_file)
            batches = iter(source)
        else:
            source = pyarrow.ipc.open_file(mapped_file)
            batches = (source.get_batch(n) for n in range(source.num_record_batches))
        for batch in batches:
            batch.validate()  # else damaged offsets would be followed anywhere in memory
            batch.schema.names  # noqa: B018  # in a damaged file they may not be text
            yield batch


@contextmanager
def _raise_as_data_error(problem: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a DataError.

    If a callback from pyarrow fails, as at a ragged row that is not UTF-8, pyarrow itself raises
    soon after; Python would also print the callback's traceback, which the hook prevents.
    """
    import pyarrow

    errors = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError)
    old_hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    except errors as error:
        raise DataError(f"{problem}: {error}; write it again") from error
    finally:
        sys.unraisablehook = old_hook


def _read_rows(file: Path, batches: Iterator[Any], num_rows_before: int) -> NumberedRows:
    """Yield the rows of batches; ``num_rows_before`` rows of the file come before them."""
    number = num_rows_before
    while True:
        with _raise_as_data_error(f"{file}, after row {number}: cannot be read"):
            batch = next(batches, None)
            if batch is None:
                return
            rows = _convert_rows(batch)
        yield from enumerate(rows, number + 1)
        number += len(rows)
        del batch, rows  # a long document is not held while the next one is read


def _convert_rows(batch: Any) -> list[Any]:
    """Return a batch's rows as objects, with a WrongRecord in place of each wrong one."""
    import pyarrow

    try:
        batch.validate(full=True)
        # pyarrow takes several times as long if it is asked for dicts.
        maps = {"maps_as_pydicts": "strict"} if "map<" in str(batch.schema) else {}
        return [_row_as_json(row) for row in batch.to_pylist(**maps)]
    except (pyarrow.ArrowException, ValueError, KeyError) as error:  # KeyError: a map's key twice
        if batch.num_rows == 1:
            return [WrongRecord(f"cannot be read ({error})")]
    return [row for index in range(batch.num_rows) for row in _convert_rows(batch.slice(index, 1))]


def _row_as_json(row: dict[str, Any]) -> Any:
    """Return a row without nulls, with bytes as text."""
    try:
        plain = _as_json(row)
    except UnicodeDecodeError as error:
        return WrongRecord(f"not UTF-8 text ({error}); convert the file to UTF-8")
    if all(value is None for value in row.values()):
        return WrongRecord("all its columns are null")
    return plain


def _as_json(value: Any) -> Any:
    """Return a value with bytes and keys of maps as text; drop null values, except of content.

    A struct column has keys with null because other rows have values there.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {
            str(_as_json(key)): _as_json(item)
            for key, item in value.items()
            if item is not None or key == "content"
        }
    return [_as_json(item) for item in value] if isinstance(value, list) else value
