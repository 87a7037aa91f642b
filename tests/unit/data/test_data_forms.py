"""The same rows in each form of file give the same examples; other writers than ours made them."""

import bz2
import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from hpc_tune.data import chunks, raw_files, records
from hpc_tune.data.chunks import list_chunks, read_chunk
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.fields import WrongRecord
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import DEFAULT_READ_OPTIONS, read_example
from hpc_tune.data.records import to_example
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer, chat, write_jsonl

PAIRS = [
    {"prompt": f'q{n}, "quoted"\nsecond line é😀', "completion": f"{n}" if n % 2 else "a, b"}
    for n in range(700)
]
CHATS = [chat(f"q{n}", "a" * (n % 7 + 1)) for n in range(50)]


def _read(path):
    return [example for chunk in list_chunks(str(path)) for example in read_chunk(chunk)]


def _csv(file, rows):
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _packed(pack, suffix, inner):
    def write(file, rows):
        plain = file.with_name(f"plain{suffix}")
        inner(plain, rows)
        file.write_bytes(pack(plain.read_bytes()))
        plain.unlink()

    return write


def _zstd(data):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def _arrow(open_writer, **options):
    def write(file, rows):
        table = pa.Table.from_pylist(rows)
        with open_writer(file, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=100)

    return write


def _array(file, rows):
    file.write_text(json.dumps(rows, indent=1), "utf-8")


FORMS = {
    "d.json": _array,
    "d.csv": _csv,
    "d.parquet": lambda file, rows: pq.write_table(pa.Table.from_pylist(rows), file),
    "stream.arrow": _arrow(pa.ipc.new_stream),
    "file.arrow": _arrow(pa.ipc.new_file),
    "lz4.arrow": _arrow(pa.ipc.new_file, options=pa.ipc.IpcWriteOptions(compression="lz4")),
    "d.jsonl.gz": _packed(gzip.compress, ".jsonl", write_jsonl),
    "d.jsonl.zst": _packed(_zstd, ".jsonl", write_jsonl),
    "d.json.gz": _packed(gzip.compress, ".json", _array),
    "d.csv.gz": _packed(gzip.compress, ".csv", _csv),
    "d.csv.zst": _packed(_zstd, ".csv", _csv),
}


@pytest.mark.parametrize("name", FORMS)
def test_pairs_in_each_form_are_what_they_are_as_lines_of_json(tmp_path, name):
    write_jsonl(tmp_path / "reference.jsonl", PAIRS)
    FORMS[name](tmp_path / name, PAIRS)
    found = _read(tmp_path / name)
    assert found == _read(tmp_path / "reference.jsonl")
    assert len(found) == len(PAIRS)


@pytest.mark.parametrize("block_bytes", [200, 1001, 5000])
def test_a_csv_is_the_same_rows_however_it_is_read_in_blocks(tmp_path, monkeypatch, block_bytes):
    """Line ends within quotes are at the ends of blocks, too."""
    monkeypatch.setattr(raw_files, "CSV_BLOCK_BYTES", block_bytes)
    write_jsonl(tmp_path / "reference.jsonl", PAIRS)
    _csv(tmp_path / "d.csv", PAIRS)
    assert _read(tmp_path / "d.csv") == _read(tmp_path / "reference.jsonl")


@pytest.mark.parametrize("name", [name for name in FORMS if "csv" not in name])
def test_chats_in_each_form_are_what_they_are_as_lines_of_json(tmp_path, name):
    write_jsonl(tmp_path / "reference.jsonl", CHATS)
    FORMS[name](tmp_path / name, CHATS)
    assert _read(tmp_path / name) == _read(tmp_path / "reference.jsonl")


@pytest.mark.parametrize("name", ["d.csv", "d.parquet", "stream.arrow"])
def test_chats_as_json_text_in_a_column_are_what_they_are_as_lists(tmp_path, name):
    write_jsonl(tmp_path / "reference.jsonl", CHATS)
    rows = [{"messages": json.dumps(row["messages"])} for row in CHATS]
    FORMS[name](tmp_path / name, rows)
    assert _read(tmp_path / name) == _read(tmp_path / "reference.jsonl")
    FORMS[name](tmp_path / name, [*rows, {"messages": str(CHATS[0]["messages"])}])
    with pytest.raises(DataError, match=r"row 51: messages is text that is not JSON .*'role'"):
        _read(tmp_path / name)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", _zstd)])
def test_a_packed_text_is_one_document_in_pieces(tmp_path, monkeypatch, suffix, pack):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    text = "".join(f"line {n} é\n" for n in range(200)) + "the end"
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(text.encode()))
    parts = _read(tmp_path / f"b.txt{suffix}")
    assert "".join(part.text for part in parts) == text
    assert len(parts) > 5
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_what_cannot_be_unpacked_is_named(tmp_path, suffix, form):
    file = tmp_path / f"d.{form}{suffix}"
    whole = _zstd(b"text\n" * 9) if suffix == ".zst" else gzip.compress(b"text\n" * 9)
    for data in (whole[:-6], bz2.compress(b"text\n" * 9)):
        file.write_bytes(data)
        with pytest.raises(DataError, match=rf"d\.{form}{suffix}.* (unpacked|read as CSV)"):
            _read(file)


def test_several_packed_streams_one_after_the_other_are_all_read(tmp_path):
    lines = [json.dumps({"text": f"t{n}"}).encode() + b"\n" for n in range(3)]
    for suffix, pack in ((".gz", gzip.compress), (".zst", _zstd)):
        (tmp_path / f"d.jsonl{suffix}").write_bytes(b"".join(map(pack, lines)))
        assert [e.text for e in _read(tmp_path / f"d.jsonl{suffix}")] == ["t0", "t1", "t2"]


def test_a_bad_line_of_a_packed_file_is_named_by_its_number(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 300 + b"{\n"))
    with pytest.raises(DataError, match=r"d\.jsonl\.gz, line 301: not JSON"):
        _read(tmp_path / "d.jsonl.gz")


def test_a_csv_without_quotes_where_they_are_needed_is_named_by_its_row(tmp_path):
    lines = ["prompt,completion", *(["q,a"] * 600), "q,a,b", "q,c"]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"d\.csv, row 601: found 3 cells, expected 2; put quotes"):
        _read(tmp_path / "d.csv")


def test_odd_bytes_and_rows_too_long_in_a_csv_are_named(tmp_path, monkeypatch):
    (tmp_path / "d.csv").write_bytes(b"prompt,completion\nq,a\nq,\xff\n")
    with pytest.raises(DataError, match=r"d\.csv, row 2: not UTF-8 text"):
        _read(tmp_path / "d.csv")
    monkeypatch.setattr(raw_files, "CSV_BLOCK_BYTES", 1000)
    (tmp_path / "d.csv").write_text('prompt,completion\nq,"never closed' + "\nq,a" * 1000)
    with pytest.raises(DataError, match=r"d\.csv.*cannot be read"):
        _read(tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("")
    with pytest.raises(DataError, match=r"d\.csv cannot be read as CSV"):
        _read(tmp_path / "d.csv")


def test_marks_in_a_csv_are_numbers_and_preferences_are_refused(tmp_path):
    _csv(tmp_path / "d.csv", [{**row, "weight": n % 2} for n, row in enumerate(PAIRS[:4])])
    assert [e.completion for e in _read(tmp_path / "d.csv")] == ["1", "3"]
    _csv(tmp_path / "d.csv", [{**PAIRS[0], "label": "true"}, {**PAIRS[0], "label": "false"}])
    with pytest.raises(DataError, match="row 1: label: rows of preferences"):
        _read(tmp_path / "d.csv")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_with_other_separators_is_refused_by_name(tmp_path, separator):
    (tmp_path / "d.csv").write_text(f"prompt{separator}completion\nq{separator}a\n")
    with pytest.raises(DataError, match="separated by .*, expected commas"):
        _read(tmp_path / "d.csv")


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,completion,prompt\na,b,c\n")
    with pytest.raises(DataError, match="has the column prompt twice"):
        _read(tmp_path / "d.csv")


def test_text_as_bytes_in_parquet_is_text_and_odd_bytes_are_named_by_their_row(tmp_path):
    as_bytes = pa.array([b"a", b"b", b"\xff"], pa.binary())
    pq.write_table(pa.table({"text": as_bytes}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"row 3: not UTF-8"):
        _read(tmp_path / "d.parquet")
    not_text = pa.Array.from_buffers(pa.string(), 3, as_bytes.buffers())
    pq.write_table(pa.table({"text": not_text}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"row 3: cannot be read \(.*UTF8"):
        _read(tmp_path / "d.parquet")


def test_prepared_files_do_not_depend_on_the_form(tmp_path):
    contents = set()
    from hpc_tune.data.hdf5_format import TokenStore

    write_jsonl(tmp_path / "d.jsonl", PAIRS[:60])
    for name in ("d.jsonl", "d.csv", "d.parquet", "d.jsonl.zst"):
        if name != "d.jsonl":
            FORMS[name](tmp_path / name, PAIRS[:60])
        prepare_data(str(tmp_path / name), tmp_path / "d.h5", byte_tokenizer(), PrepareSettings(64))
        contents.add(TokenStore.open(tmp_path / "d.h5").attributes.content)
    assert len(contents) == 1


def test_an_array_with_something_behind_it_is_refused(tmp_path):
    (tmp_path / "d.json").write_text('[{"text": "a"}]\n[{"text": "b"}]\n')
    with pytest.raises(DataError, match="more after the array"):
        _read(tmp_path / "d.json")


@pytest.mark.parametrize("layout", ["data/train-00000-of-00001", "train/part", "train"])
@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "jsonl.gz"])
def test_a_folder_gives_the_rows_that_hugging_face_datasets_finds_in_it(tmp_path, layout, suffix):
    """Its training split, with a card and another split beside it."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    folder = tmp_path / "set"
    write = {**FORMS, "d.jsonl": write_jsonl}[f"d.{suffix}"]
    for split, rows in (("train", PAIRS[:30]), ("test", PAIRS[30:40])):
        file = folder / f"{layout.replace('train', split)}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, rows)
    (folder / "README.md").write_text("A card.\n" * 50)
    (folder / "LICENSE").write_text("A licence.\n")
    expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    found = _read(folder)
    assert [(e.prompt, e.completion) for e in found] == [
        (row["prompt"], str(row["completion"])) for row in expected
    ]
    assert len(found) == 30


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "token IDs belong to one tokenizer"),
        (
            {"version": "1", "tags": ["x"], "data": [{"prompt": "a", "completion": "b"}]},
            "the list in data: write",
        ),
        ({"data": ["a"]}, "expected one of: messages"),
        ({"conversation": [{"input": "a", "output": "b"}]}, "expected one of: messages"),
    ],
)
def test_rows_of_others_forms_are_refused_with_what_to_do(record, said):
    with pytest.raises(WrongRecord, match="found the fields") as refused:
        to_example(record)
    assert said in str(refused.value)


def test_a_second_answer_beside_the_one_that_is_read_is_named_as_not_read():
    findings = ReadFindings()
    row = {"prompt": "a", "completion": "b", "response": "c"}
    example = read_example(row, DEFAULT_READ_OPTIONS, findings)
    assert (example.prompt, example.completion) == ("a", "b")
    assert "response" in findings.unread
    findings = ReadFindings()
    assert (
        read_example({"prompt": "a", "response": "c"}, DEFAULT_READ_OPTIONS, findings).completion
        == "c"
    )
    assert not findings.unread


def test_a_packed_file_whose_name_does_not_say_so_is_told(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(gzip.compress(b'{"prompt": "a", "completion": "b"}'))
    with pytest.raises(DataError, match=r"compressed by gzip; .* ends with \.gz"):
        _read(file)


def test_the_docs_name_the_fields_of_each_form():
    text = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for form in records.FORMS:
        assert not [
            name for name in form.own_fields + form.shared_fields if f"`{name}`" not in text
        ], form.required_fields
