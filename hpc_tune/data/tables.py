"""Files of columns, Parquet, Arrow and CSV, as rows; one batch of rows is held at a time.

pyarrow reads them. Each reader yields (number of the row, row), a ``WrongRecord`` in place of a
row that alone is wrong; what is wrong with the file is an error.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_tune.data.counts import Findings
from hpc_tune.data.lines import open_bytes
from hpc_tune.data.marks import MARK_FIELDS
from hpc_tune.data.preferences import LABEL_FIELDS
from hpc_tune.data.reading import Reading, choose_columns
from hpc_tune.data.records import PREFERENCE_FIELDS
from hpc_tune.data.values import WrongRecord
from hpc_tune.errors import DataError

PARQUET_ROWS = 256
# The longest row of CSV: pyarrow reads in blocks of this size, and a row must not be longer.
CSV_BLOCK_BYTES = 16 << 20
_CSV_HEAD = 1  # rows of names
_MARK_COLUMNS = (*MARK_FIELDS, *LABEL_FIELDS)  # numbers, or true and false
_READ_BYTES = 1 << 20
_FILE_MAGIC = b"ARROW1"

Rows = Iterator[tuple[int, Any]]


def open_parquet(file: Path) -> Any:
    """Return pyarrow's reader of a Parquet file.

    Raises:
        DataError: if it is none.
    """
    import pyarrow.parquet

    with _as_data_error(f"{file} cannot be read as Parquet"):
        opened = pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES)
        opened.schema_arrow.names  # noqa: B018  # of a damaged file they may be no text
        return opened


def read_parquet(file: Path, group: int, reading: Reading, findings: Findings) -> Rows:
    """Yield the rows of one row group.

    Raises:
        DataError: for a damaged file, or columns that are not known.
    """
    with open_parquet(file) as parquet:
        columns = choose_columns(file, parquet.schema_arrow.names, reading, findings)
        first = sum(parquet.metadata.row_group(g).num_rows for g in range(group))
        batches = parquet.iter_batches(PARQUET_ROWS, [group], columns, use_threads=False)
        yield from _read_rows(file, batches, first)


def cut_batches(file: Path, num_bytes: int) -> list[int]:
    """Cut the record batches of an Arrow file or stream into parts of about ``num_bytes``.

    Returns the numbers of the batches at which parts begin, and that of the end. The file is mapped
    and only the heads of its batches are read.

    Raises:
        DataError: if it is no such file.
    """
    marks, filled, number = [0], 0, 0
    for number, batch in enumerate(_read_batches(file), 1):
        filled += _batch_bytes(batch)
        if filled >= num_bytes:
            marks.append(number)
            filled = 0
    return marks if marks[-1] == number else [*marks, number]


def _batch_bytes(batch: Any) -> int:
    """Return the bytes of a record batch; pyarrow before 24 cannot count views."""
    import pyarrow

    try:
        return int(batch.nbytes)
    except pyarrow.lib.ArrowTypeError:
        return int(batch.get_total_buffer_size())


def read_arrow(file: Path, start: int, stop: int, reading: Reading, findings: Findings) -> Rows:
    """Yield the rows of the record batches ``start`` up to ``stop``.

    Raises:
        DataError: for a damaged file, or columns that are not known.
    """
    first, wanted = 0, []
    for number, batch in enumerate(_read_batches(file)):
        if number >= stop:
            break
        if number >= start:
            wanted.append(batch)
        else:
            first += batch.num_rows
    if wanted:
        columns = choose_columns(file, wanted[0].schema.names, reading, findings)
        yield from _read_rows(file, _cut_batches(wanted, columns), first)


def read_csv(file: Path, reading: Reading, findings: Findings) -> Rows:
    """Yield the rows of a CSV file, whose first line names the columns.

    Text stays text, also where it looks like a number; an empty cell is empty text.

    Raises:
        DataError: for a file that is no CSV, or columns that are not known.
    """
    import pyarrow
    from pyarrow import csv

    ragged: list[Any] = []

    def skip(row: Any) -> str:
        ragged.append(row)
        return "skip"

    read = csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
    parse = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip)
    what = f"{file} cannot be read as CSV, whose rows have {CSV_BLOCK_BYTES >> 20} MiB at most"
    with (
        open_bytes(file) as opened,
        _as_data_error(what),
        csv.open_csv(opened, read, parse) as head,
    ):
        names = head.schema.names
    ragged.clear()
    if len(names) == 1 and (found := next((mark for mark in ";\t|" if mark in names[0]), "")):
        raise DataError(
            f"{file} begins with the names {names[0]!r}: separated by {found!r}, expected commas"
        )
    columns = choose_columns(file, names, reading, findings)
    marks = (*_MARK_COLUMNS, *PREFERENCE_FIELDS) if reading.form == "answers" else _MARK_COLUMNS
    fields = {name: dict(reading.columns).get(name, name) for name in columns}
    convert = csv.ConvertOptions(
        include_columns=columns,
        # As bytes: a row with odd bytes is a wrong row, and no end of the reading.
        column_types={c: pyarrow.binary() for c, field in fields.items() if field not in marks},
        strings_can_be_null=False,
    )
    with open_bytes(file) as opened:
        with _as_data_error(what):
            batches = csv.open_csv(opened, read, parse, convert)
        shift = 0
        for number, row in _read_rows(file, _cut_batches(batches, columns), 0):
            while ragged and ragged[0].number - _CSV_HEAD <= number + shift:
                yield _make_ragged_error(ragged.pop(0))
                shift += 1
            yield number + shift, row
        yield from map(_make_ragged_error, ragged)


def _make_ragged_error(row: Any) -> tuple[int, WrongRecord]:
    return row.number - _CSV_HEAD, WrongRecord(
        f"found {row.actual_columns} cells, expected {row.expected_columns}; put quotes around text"
        " with commas, line ends or quotes in it"
    )


def _cut_batches(batches: Any, columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        for at in range(0, batch.num_rows, PARQUET_ROWS):
            yield batch.slice(at, PARQUET_ROWS).select(columns)


def _read_batches(file: Path) -> Iterator[Any]:
    import pyarrow

    with (
        _as_data_error(f"{file} cannot be read as Arrow data"),
        pyarrow.memory_map(str(file)) as mapped,
    ):
        is_stream = mapped.read(len(_FILE_MAGIC)) != _FILE_MAGIC
        mapped.seek(0)
        if is_stream:
            source = pyarrow.ipc.open_stream(mapped)
            batches = iter(source)
        else:
            source = pyarrow.ipc.open_file(mapped)
            batches = (source.get_batch(n) for n in range(source.num_record_batches))
        for batch in batches:
            batch.validate()  # or damaged offsets would be followed anywhere in memory
            batch.schema.names  # noqa: B018  # of a damaged file they may be no text
            yield batch


@contextmanager
def _as_data_error(what: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a DataError.

    What goes wrong where pyarrow calls back, as at a ragged row that is no UTF-8, is an error of
    its own soon after; Python would print it with a traceback as well.
    """
    import pyarrow

    known = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError)
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    except known as error:
        raise DataError(f"{what}: {error}; write it again") from error
    finally:
        sys.unraisablehook = before


def _read_rows(file: Path, batches: Iterator[Any], first: int) -> Rows:
    """Yield the rows of batches; ``first`` rows of the file are before them."""
    number = first
    while True:
        with _as_data_error(f"{file}, after row {number}: cannot be read"):
            batch = next(batches, None)
            if batch is None:
                return
            rows = _check_rows(batch)
        for row in rows:
            number += 1
            yield number, row


def _check_rows(batch: Any) -> list[Any]:
    """Return a batch's rows as objects, wrong ones as what is wrong with them."""
    import pyarrow

    try:
        batch.validate(full=True)
        # pyarrow takes several times as long where it is asked for dicts.
        maps = {"maps_as_pydicts": "strict"} if "map<" in str(batch.schema) else {}
        return [_clean_row(row) for row in batch.to_pylist(**maps)]
    except (pyarrow.ArrowException, ValueError, KeyError) as error:  # KeyError: a map's key twice
        if batch.num_rows == 1:
            return [WrongRecord(f"cannot be read ({error})")]
    return [row for at in range(batch.num_rows) for row in _check_rows(batch.slice(at, 1))]


def _clean_row(row: dict[str, Any]) -> Any:
    """Return a row without nulls, its bytes as text."""
    try:
        plain = _as_json(row)
    except UnicodeDecodeError as error:
        return WrongRecord(f"not UTF-8 text ({error}); convert the file to UTF-8")
    if all(value is None for value in row.values()):
        return WrongRecord("all its columns are null")
    return plain


def _as_json(value: Any) -> Any:
    """Return bytes as text and keys of maps as text; drop the keys that are null.

    A struct column has them because other rows do.
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
