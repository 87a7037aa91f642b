"""Tables as duckdb, polars, Spark and pyarrow of today write them give the rows of JSON lines."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from hpc_tune.data.chunks import list_chunks, read_chunk
from hpc_tune.data.files import find_files
from hpc_tune.errors import DataError
from hpc_tune.packages import parse_release

ROWS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(5)
]
MAP = pa.map_(pa.string(), pa.string())


def examples(path):
    return [example for chunk in list_chunks(str(path)) for example in read_chunk(chunk)]


def of(text, pair=None):
    pair = pair or pa.struct([("role", text), ("content", text)])
    return pair


TYPES = {
    "list": pa.list_(of(pa.string())),
    "large": pa.large_list(of(pa.large_string())),
    "fixed": pa.list_(of(pa.string()), 2),
    "dictionary": pa.list_(of(pa.string(), pa.struct(
        [("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.string())]))),
    "list view": pa.list_view(of(pa.string())),
    "large list view": pa.large_list_view(of(pa.string())),
    "string view": pa.list_(of(pa.string_view())),
    "binary": pa.list_(of(pa.binary())),
    "binary view": pa.list_(of(pa.binary_view())),
    "map": pa.list_(MAP),
}  # fmt: skip


@pytest.fixture
def expected(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return examples(tmp_path / "d.jsonl")


def table_of(kind):
    values = [row["messages"] for row in ROWS]
    if kind == "map":
        values = [[list(message.items()) for message in messages] for messages in values]
    return pa.table({"messages": pa.array(values, TYPES[kind])})


# pyarrow writes no views into Parquet.
FORMS = [
    (kind, form)
    for kind in TYPES
    for form in ("parquet", "arrow", "stream")
    if form != "parquet" or kind not in ("string view", "binary view")
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_any_type_of_column_gives_the_same_rows(kind, form, tmp_path, expected):
    table = table_of(kind)
    file = tmp_path / f"d.{'parquet' if form == 'parquet' else 'arrow'}"
    if form == "parquet":
        if "list view" in kind and parse_release(pa.__version__) < (25, 0):
            pytest.skip("pyarrow before 25 writes no views of lists into Parquet")
        pq.write_table(table, file)
    else:
        make = ipc.new_file if form == "arrow" else ipc.new_stream
        with make(file, table.schema) as out:
            out.write_table(table)
    assert examples(file) == expected


def test_arguments_in_a_map_are_an_object(tmp_path):
    call = {"function": {"name": "get", "arguments": [("city", "Oslo")]}}
    kind = pa.list_(pa.struct([("role", pa.string()), ("tool_calls", pa.list_(pa.struct(
        [("function", pa.struct([("name", pa.string()), ("arguments", MAP)]))])))]))  # fmt: skip
    messages = [{"role": "user", "content": "w?"}, {"role": "assistant", "tool_calls": [call]}]
    kind = pa.list_(pa.struct([("content", pa.string()), *kind.value_type]))
    pq.write_table(pa.table({"messages": pa.array([messages], kind)}), tmp_path / "d.parquet")
    (example,) = examples(tmp_path / "d.parquet")
    assert example.messages[1]["tool_calls"] == [
        {"function": {"name": "get", "arguments": {"city": "Oslo"}}}
    ]


def test_a_map_with_a_key_twice_is_a_wrong_row(tmp_path):
    pairs = [[("role", "user"), ("content", "a"), ("content", "b")]]
    table = pa.table({"messages": pa.array([pairs], pa.list_(MAP))})
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match="row 1: .*content"):
        examples(tmp_path / "d.parquet")


@pytest.mark.parametrize("suffix", ["json", "json.gz", "csv", "parquet", "arrow", "jsonl.zst"])
def test_empty_parts_are_left_out_and_said(suffix, tmp_path):
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / f".part-1.{suffix}.crc").write_text("x")
    (tmp_path / f"part-0.{suffix}").touch()
    row, table = (
        b'{"prompt": "q", "completion": "a"}\n',
        pa.table({"prompt": ["q"], "completion": ["a"]}),
    )
    part = tmp_path / f"part-1.{suffix}"
    match suffix:
        case "json":
            part.write_bytes(row)
        case "json.gz":
            part.write_bytes(gzip.compress(row))
        case "jsonl.zst":
            part.write_bytes(pa.Codec("zstd").compress(row, asbytes=True))
        case "csv":
            part.write_text("prompt,completion\nq,a\n")
        case "parquet":
            pq.write_table(table, part)
            pq.write_table(table.slice(0, 0), tmp_path / "part-2.parquet")
        case "arrow":
            with ipc.new_file(part, table.schema) as out:
                out.write_table(table)
    assert [(e.prompt, e.completion) for e in examples(tmp_path)] == [("q", "a")]
    assert (tmp_path / f"part-0.{suffix}", "empty") in find_files(str(tmp_path)).skipped_files


def test_data_that_are_all_empty_are_refused(tmp_path):
    (tmp_path / "part-0.json").touch()
    for path in (tmp_path, tmp_path / "part-0.json"):
        with pytest.raises(DataError, match="is empty; it must hold at least one example"):
            list_chunks(str(path))


def test_a_column_that_is_there_twice_matters_only_where_it_is_read(tmp_path):
    names = ["prompt", "completion", "__index_level_0__", "__index_level_0__"]
    table = pa.Table.from_arrays([pa.array([name]) for name in "qaxy"], names)
    with ipc.new_file(tmp_path / "d.arrow", table.schema) as out:
        out.write_table(table)
    assert [e.completion for e in examples(tmp_path / "d.arrow")] == ["a"]
    twice = table.rename_columns(["prompt", "completion", "prompt", "x"])
    with ipc.new_file(tmp_path / "d.arrow", twice.schema) as out:
        out.write_table(twice)
    with pytest.raises(DataError, match="the column prompt twice"):
        examples(tmp_path / "d.arrow")
