import json
import os
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_tune.data import chunks, raw_files
from hpc_tune.data.chunks import list_chunks, read_chunk, source_fingerprint
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.files import find_files
from hpc_tune.data.raw_files import READ_BUFFER_BYTES, read_json_array
from hpc_tune.data.reading import DEFAULT_READ_OPTIONS
from hpc_tune.data.records import (
    Chat,
    Completion,
    NoLearnedTextError,
    Text,
    WrongRecord,
    to_example,
)
from hpc_tune.errors import DataError
from tests.support.data import chat, write_jsonl


def _read(path):
    return [example for chunk in list_chunks(str(path)) for example in read_chunk(chunk)]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 64, 1000, 1 << 20])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
def test_every_line_is_read_once_however_the_file_is_cut(
    tmp_path, monkeypatch, chunk_bytes, line_end, last_end
):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(raw_files, "READ_BUFFER_BYTES", 5)
    texts = ["a", "b" * 200, "é😀", "", "c"]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    rows.insert(2, "  ")
    data = line_end.join(rows) + (line_end if last_end else "")
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + data.encode())
    assert [example.text for example in _read(tmp_path / "d.jsonl")] == texts


def test_a_large_file_has_a_bounded_number_of_chunks(tmp_path):
    with (tmp_path / "d.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # sparse: one tebibyte
    chunks = list_chunks(str(tmp_path / "d.jsonl"))
    assert len(chunks) == 1 << 15
    assert chunks[-1].stop == 1 << 40
    assert all(a.stop == b.start for a, b in zip(chunks[:-1], chunks[1:], strict=True))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (chat("q", "a"), Chat(chat("q", "a")["messages"])),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
            },
            Chat([{"role": "system", "content": "s"}, *chat("q", "a")["messages"]]),
        ),
        ({"conversations": chat("q", "a")["messages"]}, Chat(chat("q", "a")["messages"])),
        ({"prompt": "q", "completion": "a"}, Completion("q", "a", "q")),
        (
            {"prompt": chat("q")["messages"], "completion": chat("q", "a")["messages"][1:]},
            Chat(chat("q", "a")["messages"]),
        ),
        ({"text": "t"}, Text("t")),
    ],
)
def test_each_known_form_becomes_an_example(record, expected):
    assert to_example(record) == expected


def test_alpaca_with_and_without_input():
    plain = to_example({"instruction": "Add.", "input": "", "output": "4"})
    assert (plain.prompt, plain.completion) == ("Add.", "4")
    assert "### Input" not in plain.plain_prompt
    given = to_example(
        {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."}
    )
    assert given.prompt == "Add.\n\n2, 2"
    assert "### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n" in given.plain_prompt
    assert given.system == "Be brief."


AREA = {"name": "area", "arguments": {"sides": [5, 3]}}


@pytest.mark.parametrize(
    "turns",
    [
        # LLaMA-Factory's, ms-swift's, and both with the field called as the other's.
        [("human", "q"), ("function_call", json.dumps(AREA)), ("observation", "15"), ("gpt", "a")],
        [
            ("user", "q"),
            ("tool_call", json.dumps(AREA)),
            ("tool_response", "15"),
            ("assistant", "a"),
        ],
    ],
)
@pytest.mark.parametrize("field", ["conversations", "messages"])
@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_calls_of_tools_as_turns_are_what_they_are_as_messages(turns, field, keys):
    if keys == ("role", "content"):
        turns = [({"human": "user", "gpt": "assistant"}.get(who, who), said) for who, said in turns]
    record = {
        field: [dict(zip(keys, turn, strict=True)) for turn in turns],
        "tools": json.dumps([{"name": "area", "parameters": {}}]),
        "system": "s",
    }
    call = {"type": "function", "function": AREA}
    assert to_example(record) == Chat(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "15"},
            {"role": "assistant", "content": "a"},
        ],
        tools=[{"name": "area", "parameters": {}}],
    )


def test_calls_after_one_another_are_of_one_turn():
    """As in ms-swift (_swift_prepare_inputs) and NeMo AutoModel (make_agent_chat_dataset)."""
    calls = [{"type": "function", "function": {**AREA, "name": name}} for name in ("a", "b")]
    texts = [("tool_call", json.dumps(call["function"])) for call in calls]
    turns = [("user", "q"), ("assistant", "I look."), *texts, ("tool_response", "1")]
    messages = [{"role": role, "content": said} for role, said in [*turns, ("tool_response", "2")]]
    answer = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    asked, *found = to_example({"messages": [*messages, *messages[1:]]}).messages
    results = [{"role": "tool", "content": said} for said in "12"]
    assert found == [answer, *results] * 2
    messages[2]["loss"] = False
    assert len(to_example({"messages": messages}).messages) == 7 - 1, "of two marks, two turns"
    assert asked["role"] == "user"


def test_turns_stored_as_a_list_per_key_are_what_they_are_as_a_list_of_turns():
    turns = {"from": ["human", "gpt"], "value": ["q", "a"], "weight": [None, 0]}
    rows = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]
    assert to_example({"conversations": turns}) == to_example({"conversations": rows})
    with pytest.raises(WrongRecord, match="conversations is object, expected a list"):
        to_example({"conversations": {**turns, "value": ["q"]}})


def test_pairs_with_tools_are_chats_and_pairs_marked_not_to_be_learned_are_not():
    tools = [{"name": "f"}]
    alpaca = {"instruction": "Add.", "output": "4", "history": [["q", "a"]], "system": "s"}
    asked = chat("q", "a", "Add.", "4")["messages"]
    expected = Chat([{"role": "system", "content": "s"}, *asked], tools)
    assert to_example({**alpaca, "tools": json.dumps(tools)}) == expected
    with pytest.raises(WrongRecord, match="history is of type number, expected a list"):
        to_example({**alpaca, "history": 3})
    for row in (alpaca, {"prompt": "q", "completion": "a"}, {"text": "t"}):
        assert to_example({**row, "weight": 1}) == to_example(row)
        with pytest.raises(NoLearnedTextError):
            to_example({**row, "train": False})
        with pytest.raises(WrongRecord, match=r"train is 0\.5, expected 0 or 1"):
            to_example({**row, "train": 0.5})


def test_two_system_messages_that_differ_are_refused():
    system = {"role": "system", "content": "one"}
    record = {"messages": [system, *chat("q", "a")["messages"]], "system": "one"}
    assert to_example(record).messages == record["messages"]
    with pytest.raises(WrongRecord, match="begins with a system message, but system is another"):
        to_example({**record, "system": "two"})


def test_further_keys_of_messages_and_tools_are_kept():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    record = {"messages": [{"role": "user", "content": "q"}, call], "tools": '[{"name": "f"}]'}
    assert to_example(record) == Chat(record["messages"], tools=[{"name": "f"}])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "found a JSON list, expected an object"),
        ({"question": "q"}, "found the fields question; expected one of: messages"),
        ({}, "found no fields"),
        ({"prompt": "q"}, "completion is missing"),
        ({"instruction": "q", "output": 3}, "output is number, expected text"),
        ({"text": ["a"]}, "text is list, expected text"),
        ({"messages": []}, "messages is empty list"),
        ({"messages": "hello"}, "messages is text"),
        ({"messages": [{"content": "x"}]}, "message 1 is .*expected an object with role"),
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no content"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 1 is .*alien.*expected from"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 1"),
        ({**chat("q", "a"), "tools": "{"}, "tools is text that is not JSON"),
        ({**chat("q", "a"), "tools": {"a": 1}}, "tools is object"),
    ],
)
def test_wrong_records_say_what_was_found_and_expected(record, message):
    with pytest.raises(WrongRecord, match=message):
        to_example(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 301: not JSON .*expected one JSON object per line"),
        (b'{"txt": "a"}', "line 301: found the fields txt; expected one of"),
        (b'{"text": "\xff"}', "line 301: not UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    good = b'{"text": "abc"}\n'
    (tmp_path / "d.jsonl").write_bytes(good * 300 + line + b"\n" + good)
    with pytest.raises(DataError, match=rf"d\.jsonl, {message}"):
        _read(tmp_path / "d.jsonl")


@pytest.mark.parametrize("read_bytes", [4, 30, 1 << 20])
def test_a_json_array_is_read_element_by_element(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(raw_files, "READ_BUFFER_BYTES", read_bytes)
    records = [{"text": "é" * n, "more": [1, {"a": "]"}]} for n in range(30)]
    for indent in (None, 2):
        (tmp_path / "d.json").write_text(json.dumps(records, indent=indent), "utf-8")
        assert [example.text for example in _read(tmp_path / "d.json")] == [
            "é" * n for n in range(30)
        ]


def test_errors_in_a_json_array_name_the_element(tmp_path):
    (tmp_path / "d.json").write_text('[{"text": "a"}, {"tex": "b"}]')
    with pytest.raises(DataError, match=r"element 2 of the array: found the fields tex"):
        _read(tmp_path / "d.json")
    (tmp_path / "d.json").write_text('[{"text": "a"}, {"text": "b", "text": "c"}]')
    with pytest.raises(DataError, match=r"element 2 of the array: the key 'text' is there twice"):
        _read(tmp_path / "d.json")
    (tmp_path / "d.json").write_text('[{"text": "a"}, {"text": ')
    with pytest.raises(DataError, match=r"element 2 of the array: not JSON"):
        _read(tmp_path / "d.json")
    (tmp_path / "d.json").write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(DataError, match=r"element 1 of the array: 'utf-8' codec"):
        _read(tmp_path / "d.json")


def test_parquet_is_read_by_row_group_without_the_nulls_of_its_columns(tmp_path):
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    rows = [chat("q", "a"), {"messages": [*chat("q")["messages"], *call]}, chat("r", "b")]
    table = pa.Table.from_pylist([{**row, "id": n} for n, row in enumerate(rows)])
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=2)
    assert len(list_chunks(str(tmp_path / "d.parquet"))) == 2
    assert [example.messages for example in _read(tmp_path / "d.parquet")] == [
        r["messages"] for r in rows
    ]


def test_bad_parquet_is_named(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="has the columns a, b; expected one of: messages"):
        _read(tmp_path / "d.parquet")
    pq.write_table(pa.table({"text": ["a", "b", None]}), tmp_path / "d.parquet", row_group_size=2)
    with pytest.raises(DataError, match="row 3: all its columns are null"):
        _read(tmp_path / "d.parquet")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        _read(tmp_path / "d.parquet")


@pytest.mark.parametrize("chunk_bytes", [1, 10, 1 << 20])
def test_plain_text_comes_whole_and_says_where_it_begins_and_ends(
    tmp_path, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    text = "first\n\nsecond line é\nlast without an end, longer than a chunk"
    (tmp_path / "b.txt").write_bytes(text.replace("\n", "\r\n").encode())
    parts = _read(tmp_path / "b.txt")
    assert "".join(part.text for part in parts) == text
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "README").write_text("ignored")
    (tmp_path / ".hidden.txt").write_text("ignored")
    assert [example.text for example in _read(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(
        DataError, match=r"mixes kinds of data: c.jsonl \(jsonl\) and d.txt \(text\)"
    ):
        list_chunks(str(tmp_path))


def test_missing_unknown_and_empty_sources_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl\?"):
        list_chunks(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="folder .*nowhere does not exist"):
        list_chunks(str(tmp_path / "nowhere" / "a.jsonl"))
    with pytest.raises(DataError, match="is empty"):
        list_chunks(str(tmp_path / "train.jsonl"))
    (tmp_path / "d.xlsx").write_text("a,b")
    with pytest.raises(DataError, match=r"type \.xlsx are not known; expected .*\.jsonl"):
        list_chunks(str(tmp_path / "d.xlsx"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="folder without any"):
        list_chunks(str(tmp_path / "empty"))
    with pytest.raises(
        DataError, match="built-in data are builtin:pydocs and builtin:pydocs:heldout"
    ):
        list_chunks("builtin:pydoc")


def test_a_source_that_is_neither_file_nor_folder_is_refused():
    with pytest.raises(DataError, match="/dev/null cannot be read as a folder: Not a directory"):
        list_chunks("/dev/null")
    with pytest.raises(DataError, match="it is no regular file: write the data into one"):
        list_chunks("/dev/null")


@pytest.mark.parametrize("target", ["gone.jsonl", "link.jsonl"])
def test_of_a_link_that_leads_to_no_file_its_target_is_named(tmp_path, target):
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    with pytest.raises(DataError, match=f"it is a link to {target}, which leads to no file"):
        list_chunks(str(link))


def test_identity_follows_size_and_time_of_the_files(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    first = source_fingerprint(str(path))
    assert source_fingerprint(str(path)) == first
    path.touch()
    assert source_fingerprint(str(path)) != first
    assert source_fingerprint("builtin:pydocs") != source_fingerprint("builtin:pydocs:heldout")


def test_data_edited_in_place_with_the_same_size_and_time_are_other_data(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    first, status = source_fingerprint(str(path)), path.stat()
    write_jsonl(path, [{"text": "b"}])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert source_fingerprint(str(path)) != first


def test_pydocs_gives_thousands_of_pairs_with_whole_modules_held_out():
    train, heldout = chunks.list_pydocs_modules(False), chunks.list_pydocs_modules(True)
    assert not set(train) & set(heldout)
    assert 0.04 < len(heldout) / len(train + heldout) < 0.2
    pairs = [pair for name in train for pair in chunks.read_pydocs_module(name)]
    assert len(pairs) > 2000
    assert len({question for question, _ in pairs}) > 0.95 * len(pairs)
    assert all(30 <= len(answer) <= 1000 for _, answer in pairs)
    assert len([pair for name in heldout for pair in chunks.read_pydocs_module(name)]) > 100


def test_pydocs_knows_what_json_dumps_does():
    answers = dict(chunks.read_pydocs_module("json"))
    question = next(q for q in answers if q.startswith("What does json.dumps do?"))
    assert "dumps(obj, *, skipkeys=False" in question
    assert answers[question].startswith("Serialize ``obj`` to a JSON formatted ``str``.")
    examples = [e for c in list_chunks("builtin:pydocs")[:3] for e in read_chunk(c)]
    assert all(isinstance(example, Completion) for example in examples)


def test_a_dataset_saved_by_hugging_face_datasets_is_read_however_it_is_cut(tmp_path, monkeypatch):
    """Shuffled and selected before it was saved, in two files, with columns that are not ours."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [chat(f"q{n}", "a" * n) | {"id": n} for n in range(30)]
    rows[7]["messages"][1]["tool_calls"] = [{"function": {"name": "f"}}]
    saved = datasets.Dataset.from_list(rows).shuffle(seed=1).select(range(25))
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    expected = [saved[n]["id"] for n in range(25)]
    for chunk_bytes, num_chunks in ((1 << 20, 2), (1, 2)):
        monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
        found = _read(tmp_path / "one")
        assert [int(example.messages[0]["content"][1:]) for example in found] == expected
        assert len(list_chunks(str(tmp_path / "one"))) == num_chunks
    with_tools = found[expected.index(7)].messages[1]
    assert with_tools["tool_calls"] == [{"function": {"name": "f"}}]
    assert all("tool_calls" not in e.messages[1] for e in found if e.messages[1] != with_tools)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    assert [int(e.messages[0]["content"][1:]) for e in _read(tmp_path / "two")] == expected
    assert [left[0].name for left in find_files(str(tmp_path / "two")).skipped_files] == ["test"]
    datasets.DatasetDict({"a": saved, "test": saved}).save_to_disk(tmp_path / "three")
    with pytest.raises(DataError, match="the splits a, test .* name one, such as .*three/a"):
        list_chunks(str(tmp_path / "three"))
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DataError, match="lacks data-00001-of-00002.arrow, listed in its state.json"
    ):
        list_chunks(str(tmp_path / "one"))


def test_arrow_batches_are_cut_into_parts_that_hold_each_row_once(tmp_path):
    table, file = pa.table({"text": [f"t{n}" for n in range(1000)]}), tmp_path / "d.arrow"
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=30)
    marks = raw_files.split_arrow_batches(file, 1000)
    assert marks[0] == 0
    assert marks[-1] == 34
    assert len(marks) > 5
    parts = zip(marks, marks[1:], strict=False)
    rows = [
        row
        for a, b in parts
        for _, row in raw_files.read_arrow(file, a, b, DEFAULT_READ_OPTIONS, ReadFindings())
    ]
    assert [row["text"] for row in rows] == [f"t{n}" for n in range(1000)]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as Arrow data"):
        _read(file)


@pytest.mark.parametrize(
    "state", ["{", "[]", '{"_data_files": [{"filename": "../../etc/passwd"}]}']
)
def test_the_state_of_a_saved_dataset_names_files_of_its_folder_only(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match="save it again|lacks passwd"):
        list_chunks(str(tmp_path))


@pytest.mark.parametrize("splits", ["{", "[]", '{"splits": []}', "[" * 100_000])
def test_an_unreadable_list_of_splits_is_named_even_if_there_is_a_state_beside_it(tmp_path, splits):
    (tmp_path / "dataset_dict.json").write_text(splits)
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(DataError, match="its dataset_dict.json cannot be read"):
        list_chunks(str(tmp_path))


def test_text_after_an_array_is_refused_however_far_it_is(tmp_path):
    file = tmp_path / "rows.json"
    for after, is_refused in (
        (" " * 3 * READ_BUFFER_BYTES, False),
        (" " * 3 * READ_BUFFER_BYTES + "{}", True),
    ):
        file.write_text('[{"text": "a"}]' + after, encoding="utf-8")
        with (
            pytest.raises(DataError, match="more after the array") if is_refused else nullcontext()
        ):
            assert [number for number, _ in read_json_array(file)] == [1]
