import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from hpc_tune.data import chunks, raw_files
from hpc_tune.data.chunks import list_chunks, read_chunk
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import DEFAULT_READ_OPTIONS, ReadOptions
from hpc_tune.data.records import Completion, to_example
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer, chat, write_jsonl


def _read(path, reading=DEFAULT_READ_OPTIONS, findings=None):
    chunks = list_chunks(str(path))
    return [example for chunk in chunks for example in read_chunk(chunk, reading, findings)]


def _one(folder, row, columns=None):
    """Return the example of one row, and what is said of it."""
    findings = ReadFindings()
    write_jsonl(folder / "one.jsonl", [row])
    reading = ReadOptions(tuple((columns or {}).items()))
    (example,) = _read(folder / "one.jsonl", reading, findings)
    return example, findings.lines()


ASKS, SAYS = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ALPACA = {"instruction": "Add.", "input": "2, 2", "output": "4"}


@pytest.mark.parametrize(
    ("row", "same_as"),
    [
        ({"question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
        ({"query": "q", "response": "a"}, {"prompt": "q", "completion": "a"}),
        ({"prompt": "q", "response": "a"}, {"prompt": "q", "completion": "a"}),
        ({"instruction": "Add.", "context": "2, 2", "response": "4", "category": "x"}, ALPACA),
        ({"instruction": "Add.", "context": "2, 2", "output": "4"}, ALPACA),
        ({"question": "Add.", "context": "2, 2", "answer": "4"}, ALPACA),
        (
            {"query": "q", "response": "a", "history": [["b", "c"]]},
            {"instruction": "q", "output": "a", "history": [["b", "c"]]},
        ),
        (
            {"system_prompt": "s", "messages": [ASKS, SAYS]},
            {"messages": [{"role": "system", "content": "s"}, ASKS, SAYS]},
        ),
        (
            {"system_prompt": "s", "system": None, "conversations": [ASKS, SAYS]},
            {"messages": [{"role": "system", "content": "s"}, ASKS, SAYS]},
        ),
        ({"prompt": [ASKS], "completion": "a"}, {"messages": [ASKS, SAYS]}),
        (
            {"prompt": json.dumps([ASKS]), "completion": json.dumps([SAYS])},
            {"messages": [ASKS, SAYS]},
        ),
        (
            {"prompt": [{"from": "human", "value": "q"}], "completion": SAYS},
            {"messages": [ASKS, SAYS]},
        ),
        ({"prompt": None, "question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            {"prompt": "q", "completion": "a", "system": "s"},
        ),
        ({"prompt": "q", "completion": "a", "answer": "b"}, {"prompt": "q", "completion": "a"}),
        ({**ALPACA, "context": "more"}, ALPACA),
        ({"text": "t", "question": "q", "answer": "a"}, {"text": "t"}),
    ],
)
def test_well_known_names_are_read_as_what_they_are(tmp_path, row, same_as):
    assert _one(tmp_path, row)[0] == to_example(same_as)


def test_what_is_read_under_another_name_and_what_is_not_read_is_said(tmp_path):
    row = {"id": 1, "instruction": "i", "context": "c", "response": "r", "category": "x"}
    assert _one(tmp_path, row)[1] == [
        "columns read under another name: context as input, response as output "
        "(data.columns can change that)",
        "columns not read: category, id",
    ]
    assert _one(tmp_path, {**chat("q", "a"), "prompt": "q"})[1] == ["columns not read: prompt"]
    assert _one(tmp_path, {"text": "t", "label": 1, "system": "s"})[1] == [
        "columns not read: label, system"
    ]
    assert _one(tmp_path, {"": 0, "text": "t"})[1] == ['columns not read: ""']
    assert _one(tmp_path, {"prompt": "q", "completion": "a", "system": None})[1] == []


def test_rows_left_out_for_their_own_marks_are_counted(tmp_path):
    rows = [{"prompt": "q", "completion": "a", "train": n > 2} for n in range(5)]
    findings = ReadFindings()
    assert len(_read(write_jsonl(tmp_path / "d.jsonl", rows), DEFAULT_READ_OPTIONS, findings)) == 2
    assert findings.lines() == ["3 rows left out, as the data mark them"]


def test_two_fields_that_could_be_meant_are_refused_until_columns_say_which(tmp_path):
    row = {"question": "q", "answer": "4", "response": "2 + 2 is 4"}
    with pytest.raises(DataError, match="line 1: found the fields answer and response, and either"):
        _one(tmp_path, row)
    columns = {"question": "prompt", "response": "completion"}
    assert _one(tmp_path, row, columns)[0] == Completion("q", "2 + 2 is 4", "q")


@pytest.mark.parametrize(
    ("columns", "row", "same_as"),
    [
        ({"problem": "prompt", "solution": "completion"}, {"problem": "p", "solution": "s"}, "ps"),
        ({"problem": "prompt"}, {"problem": "p", "completion": "s"}, "ps"),
        ({"problem": "prompt"}, {"problem": "p", "answer": "s"}, "ps"),
        ({"question": "prompt", "answer": "response"}, {"question": "p", "answer": "s"}, "ps"),
        ({"a": "prompt", "b": "completion"}, {"a": "p", "b": "s", "text": "t", "prompt": 7}, "ps"),
        (
            {"completion": "prompt", "prompt": "completion"},
            {"completion": "p", "prompt": "s"},
            "ps",
        ),
    ],
)
def test_columns_say_under_which_field_a_column_is_read(tmp_path, columns, row, same_as):
    assert _one(tmp_path, row, columns)[0] == Completion(same_as[0], same_as[1], same_as[0])


def test_columns_name_chats_and_their_further_fields(tmp_path):
    row = {"dialogue": chat("q", "a")["messages"], "functions": '[{"name": "f"}]', "who": "s"}
    columns = {"dialogue": "messages", "functions": "tools", "who": "system"}
    expected = {**chat("q", "a"), "tools": [{"name": "f"}], "system": "s"}
    assert _one(tmp_path, row, columns)[0] == to_example(expected)


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    rows = [{"prompt": "q", "completion": "a", "note": "n"}] * 3
    write_jsonl(tmp_path / "d.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    reading = ReadOptions((("systm", "system"),))
    message = r"data\.columns names systm, but .* has the columns completion, note, prompt"
    with pytest.raises(DataError, match=message):
        _read(tmp_path / "d.parquet", reading)
    for name in ("d.jsonl", "d.parquet"):
        with pytest.raises(DataError, match=message):
            prepare_data(
                str(tmp_path / name),
                tmp_path / "d.h5",
                byte_tokenizer(),
                PrepareSettings(64, reading=reading),
            )
    assert not (tmp_path / "d.h5").exists()


def test_a_wrong_value_is_told_under_its_own_name(tmp_path):
    with pytest.raises(DataError, match="completion is number.*answer is read as completion"):
        _one(tmp_path, {"question": "q", "answer": 42})


BAD_LINES = {
    b'{"text": ': "not JSON",
    b'{"text": "a\x01"}': r"not JSON \(Invalid control character at column 12\)",
    b'{"text": "\xff"}': "not UTF-8",
    b"null": "found a JSON null",
    b'{"text": null}': r"found the fields text \(text without a value\)",
    # A table gives the rows of one form null for the columns of another (prime-rl#2942).
    b'{"prompt": null, "completion": "a"}': r"prompt, completion \(prompt without a value\)",
    b'{"text": 7}': "text is number",
    b'{"text": "half \\ud83d"}': "one half of a surrogate pair",
    b'{"messages": [{"role": "assistant", "content": "half \\ud83d"}]}': "half of a surrogate pair",
    b'{"prompt": "half \\ud83d", "completion": "a"}': "one half of a surrogate pair",
    b'{"text": "a", "text": "b"}': "the key 'text' is there twice",
    b'{"messages": [{"role": "user", "content": "q", "content": "r"}]}': "the key 'content' is",
    b'{"n": ' + b"1" * 5000 + b"}": "cannot be read",
    b'{"messages": "[{"}': "messages is text that is not JSON",
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "type image",
    b'{"messages": ' + b"[" * 5000 + b"}": "nested too deeply|not JSON",
}


@pytest.mark.parametrize(("line", "why"), BAD_LINES.items(), ids=BAD_LINES.values())
def test_a_bad_row_is_refused_with_its_place_or_skipped_and_counted(tmp_path, line, why):
    good = b'{"text": "good"}\n'
    (tmp_path / "d.jsonl").write_bytes(good * 2 + line + b"\n" + good)
    with pytest.raises(DataError, match=rf"d\.jsonl, line 3: .*({why})"):
        _read(tmp_path / "d.jsonl")
    findings = ReadFindings()
    assert len(_read(tmp_path / "d.jsonl", ReadOptions(bad_rows="skip"), findings)) == 3
    assert (findings.num_bad, len(findings.first_bad)) == (1, 1)
    assert "d.jsonl, line 3: " in findings.first_bad[0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_long_rows_of_tables_are_held_one_after_the_other(tmp_path, monkeypatch, suffix):
    long, words = 3000, ["short", "is", "row"]
    texts = [*words, *(char * long for char in "abcdef"), *words]
    table, path = pa.table({"text": texts}), tmp_path / f"d.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "csv":
        write_csv(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    held, check = [], raw_files._convert_rows
    monkeypatch.setattr(raw_files, "_convert_rows", lambda b: held.append(b["text"]) or check(b))
    monkeypatch.setattr(raw_files, "BATCH_BYTES", 2 * long)
    assert [example.text for example in _read(path)] == texts
    most = max(sum(len(text.as_py()) for text in column) for column in held)
    assert most <= 2 * long
    assert 1 < len(held) < len(texts)


def test_of_a_parquet_file_no_row_group_is_held_whole(tmp_path):
    rng = random.Random(5)
    texts = [rng.randbytes(2000).hex() for _ in range(8000)]  # 32 MB that do not get smaller
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet", compression="none")
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    default = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        assert len(_read(tmp_path / "d.parquet")) == len(texts)
    finally:
        pa.set_memory_pool(default)
    assert pool.max_memory() < 16 << 20


def test_rows_that_share_the_values_of_a_dictionary_stay_together(monkeypatch):
    texts = pa.array([f"{n}" * 100 for n in range(10)] * 10).dictionary_encode()
    batch = pa.record_batch({"text": texts})
    monkeypatch.setattr(raw_files, "BATCH_BYTES", 500)
    assert [part.num_rows for part in raw_files._slice_batches([batch], ["text"])] == [100]


def test_bad_rows_of_tables_are_skipped_alone(tmp_path):
    odd = pa.array([b"a", b"\xff", b"c", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, odd.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_bytes(b"text,n\na,1\n\xff,1\nragged\nc,1\n" + b"c,1,2\n")
    for name, num_bad in (("d.parquet", 2), ("d.csv", 3)):
        findings = ReadFindings()
        found = _read(tmp_path / name, ReadOptions(bad_rows="skip"), findings)
        assert [example.text for example in found] == ["a", "c"]
        assert findings.num_bad == num_bad
    assert [bad.partition(":")[0].rpartition(" ")[2] for bad in findings.first_bad] == list("235")


def test_skipped_rows_are_counted_over_all_chunks_and_the_first_reasons_said(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    lines = ['{"text": "good"}' if n % 3 else "{" for n in range(60)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    with caplog.at_level("INFO", logger="hpc_tune"):
        counters = prepare_data(
            str(tmp_path / "d.jsonl"),
            tmp_path / "d.h5",
            byte_tokenizer(),
            PrepareSettings(64, reading=ReadOptions(bad_rows="skip")),
        )
    assert (counters.examples, counters.bad_rows) == (40, 20)
    assert "20 bad rows skipped" in str(counters)
    assert "d.jsonl, line 1: not JSON" in caplog.text
    assert "; and 15 more" in caplog.text
    (tmp_path / "d.jsonl").write_text("{\n{\n")
    with pytest.raises(DataError, match="no example to learn from .*2 bad rows skipped"):
        prepare_data(
            str(tmp_path / "d.jsonl"),
            tmp_path / "e.h5",
            byte_tokenizer(),
            PrepareSettings(64, reading=ReadOptions(bad_rows="skip")),
        )


ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(400)]


def _parts(path, fraction=0.25):
    return [
        [e.prompt for e in _read(path, ReadOptions(held_out=fraction, part=part))]
        for part in ("train", "held-out")
    ]


def test_a_fraction_is_held_out_by_content_whatever_the_order_the_form_and_the_cut(
    tmp_path, monkeypatch
):
    write_jsonl(tmp_path / "d.jsonl", ROWS)
    train, held_out = _parts(tmp_path / "d.jsonl")
    assert sorted(train + held_out) == sorted(row["prompt"] for row in ROWS)
    assert 70 < len(held_out) < 130  # 100 expected, 9 the standard deviation
    write_jsonl(tmp_path / "d.jsonl", ROWS[::-1] + ROWS)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    assert set(_parts(tmp_path / "d.jsonl")[1]) == set(held_out)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    assert _parts(tmp_path / "d.parquet") == [train, held_out]
    assert set(_parts(tmp_path / "d.parquet", 0.5)[1]) > set(held_out)


def test_both_parts_are_prepared_apart_on_any_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    path, tokenizer = write_jsonl(tmp_path / "d.jsonl", ROWS), byte_tokenizer()
    num = {}
    for part in ("train", "held-out"):
        reading = ReadOptions(held_out=0.25, part=part)
        out = tmp_path / f"{part}.h5"
        num[part] = prepare_data(
            str(path), out, tokenizer, PrepareSettings(64, reading=reading)
        ).documents
    assert num["train"] + num["held-out"] == 400
    asked = {
        tokenizer.decode(store.document(d)[0])
        for store in (TokenStore.open(tmp_path / f"{part}.h5") for part in num)
        for d in range(store.num_documents)
    }
    assert len(asked) == 400


def test_a_fraction_that_leaves_nothing_is_refused(tmp_path):
    write_jsonl(tmp_path / "d.jsonl", ROWS[:3])
    with pytest.raises(DataError, match=r"eval_fraction=0\.001 leaves no example of .*held-out"):
        prepare_data(
            str(tmp_path / "d.jsonl"),
            tmp_path / "d.h5",
            byte_tokenizer(),
            PrepareSettings(64, reading=ReadOptions(held_out=0.001, part="held-out")),
        )


def test_one_long_text_is_not_split_by_a_fraction(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    (tmp_path / "d.txt").write_text("line\n" * 100)
    with pytest.raises(DataError, match="a text of several MiB is one document"):
        _read(tmp_path / "d.txt", ReadOptions(held_out=0.5, part="train"))
    for n in range(40):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{n:02}.txt").write_text(json.dumps(n))
    parts = [
        [e.text for e in _read(tmp_path / "texts", ReadOptions(held_out=0.5, part=part))]
        for part in ("train", "held-out")
    ]
    assert sorted(map(int, parts[0] + parts[1])) == list(range(40))
    assert all(parts)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_whose_answer_has_another_name_is_refused_with_all_its_columns(tmp_path, suffix):
    file, rows = tmp_path / f"d.{suffix}", pa.table({"prompt": ["p"], "solution": ["s"], "n": [1]})
    (write_csv if suffix == "csv" else pq.write_table)(rows, file)
    with pytest.raises(DataError, match=r"completion is missing.*further columns: n, solution"):
        _read(file, findings=ReadFindings())
