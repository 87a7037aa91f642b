"""Files of columns, Parquet and Arrow, as examples; one batch of rows is held at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_tune.data.records import COLUMNS, Example, WrongRecord, to_example
from hpc_tune.errors import DataError

PARQUET_ROWS = 256
_READ_BYTES = 1 << 20


def open_parquet(file: Path) -> Any:
    """Return pyarrow's reader of a Parquet file.

    Raises:
        DataError: if it is none.
    """
    import pyarrow.parquet

    with _told(f"{file} cannot be read as Parquet"):
        opened = pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES)
        opened.schema_arrow.names  # noqa: B018  # of a damaged file they may be no text
        return opened


def read_parquet(file: Path, group: int) -> Iterator[Example]:
    """Yield the examples of one row group.

    Raises:
        DataError: naming file and row.
    """
    with open_parquet(file) as parquet:
        columns = _columns(file, parquet.schema_arrow.names)
        first = sum(parquet.metadata.row_group(g).num_rows for g in range(group))
        batches = parquet.iter_batches(PARQUET_ROWS, [group], columns, use_threads=False)
        yield from _examples(file, batches, first)


def batch_marks(file: Path, num_bytes: int) -> list[int]:
    """Cut the record batches of an Arrow stream into parts of about ``num_bytes``.

    Returns the numbers of the batches at which parts begin, and that of the end. The file is mapped
    and only the heads of its batches are read.

    Raises:
        DataError: if it is no such file.
    """
    marks, filled, number = [0], 0, 0
    for number, batch in enumerate(_batches(file), 1):
        filled += batch.nbytes
        if filled >= num_bytes:
            marks.append(number)
            filled = 0
    return marks if marks[-1] == number else [*marks, number]


def read_arrow(file: Path, start: int, stop: int) -> Iterator[Example]:
    """Yield the examples of the record batches ``start`` up to ``stop``.

    Raises:
        DataError: naming file and row.
    """
    first, wanted = 0, []
    for number, batch in enumerate(_batches(file)):
        if number >= stop:
            break
        if number >= start:
            wanted.append(batch)
        else:
            first += batch.num_rows
    if wanted:
        columns = _columns(file, wanted[0].schema.names)
        pieces = (
            batch.slice(at, PARQUET_ROWS).select(columns)
            for batch in wanted
            for at in range(0, batch.num_rows, PARQUET_ROWS)
        )
        yield from _examples(file, pieces, first)


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow

    with (
        _told(f"{file} cannot be read as an Arrow stream"),
        pyarrow.memory_map(str(file)) as mapped,
    ):
        for batch in pyarrow.ipc.open_stream(mapped):
            batch.validate()  # or damaged places would be followed anywhere in memory
            batch.schema.names  # noqa: B018  # of a damaged file they may be no text
            yield batch


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into an error for the user."""
    import pyarrow

    known = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError)
    try:
        yield
    except known as error:
        raise DataError(f"{what}: {error}; write it again") from error


def _columns(file: Path, names: list[str]) -> list[str]:
    columns = [name for name in names if name in COLUMNS]
    if not columns:
        raise DataError(
            f"{file} has the columns {', '.join(names)}; expected {', '.join(COLUMNS)}"
            " (some of them, as in docs/data.md)"
        )
    return columns


def _examples(file: Path, batches: Iterator[Any], first: int) -> Iterator[Example]:
    """Yield the rows of batches as examples; ``first`` rows of the file are before them."""
    number = first
    try:
        while True:
            with _told(f"{file}, after row {number}: cannot be read"):
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)
                rows = batch.to_pylist()
            for row in rows:
                number += 1
                yield to_example(_without_nulls(row))
    except WrongRecord as error:
        raise DataError(f"{file}, row {number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Drop the keys that a struct column fills with nulls because other rows have them."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
