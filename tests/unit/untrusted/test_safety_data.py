"""What somebody else may have put into data: links out of a file, code in a template, bombs."""

import gzip
import os
import tracemalloc

import h5py
import numpy as np
import pytest
import yaml

from hpc_tune.data import raw_files
from hpc_tune.data.hdf5_format import TokenStore, append_checksum
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer, chat, store_of_lengths, write_jsonl

TYPES = {"tokens": "uint16", "documents/offsets": "int64"}


def external_link(file, name, elsewhere):
    file[name] = h5py.ExternalLink(elsewhere, "/secret")


def external_storage(file, name, elsewhere):
    file.create_dataset(name, (4,), TYPES[name], external=[(elsewhere, 0, 32)])


def virtual(file, name, elsewhere):
    layout = h5py.VirtualLayout((4,), TYPES[name])
    layout[:] = h5py.VirtualSource(elsewhere, "secret", (4,))
    file.create_virtual_dataset(name, layout)


def soft_link(file, name, elsewhere):
    file[name] = h5py.SoftLink("/loss_mask")


@pytest.mark.parametrize("plant", [external_link, external_storage, virtual, soft_link])
@pytest.mark.parametrize("name", TYPES)
def test_a_prepared_file_whose_data_are_in_another_file_is_refused(tmp_path, plant, name):
    """It would bring what only its reader may read into a model; sealed, as by who wrote it."""
    with h5py.File(tmp_path / "elsewhere.h5", "w") as file:
        file["secret"] = np.arange(4, dtype="uint16")
    path = tmp_path / "s.h5"
    store_of_lengths(path, [5, 9])
    with h5py.File(path, "r+") as file:
        del file[name]
        plant(file, name, str(tmp_path / "elsewhere.h5"))
    append_checksum(path)
    with pytest.raises(DataError, match=r"s\.h5: .* (to another place|in another file)"):
        TokenStore.open(path)


def test_a_prepared_file_that_is_in_a_group_of_another_file_is_refused(tmp_path):
    path = tmp_path / "s.h5"
    store_of_lengths(path, [5, 9])
    (tmp_path / "other.h5").write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        del file["documents"]
        file["documents"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/documents")
    append_checksum(path)
    with pytest.raises(DataError, match="ExternalLink to another place"):
        TokenStore.open(path)


@pytest.mark.parametrize(
    "name", ["../*.jsonl", "{tmp}/*.jsonl", "x/../../*.jsonl", "file://{tmp}/*"]
)
def test_a_card_of_a_dataset_does_not_lead_out_of_its_folder(tmp_path, name):
    write_jsonl(tmp_path / "secret.jsonl", [chat("Key?", "my key")])
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "d.jsonl", [chat("Hi?", "Yes.")])
    head = {"configs": [{"config_name": "x", "data_files": name.format(tmp=tmp_path)}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n")
    prepare_data(str(folder), tmp_path / "o.h5", byte_tokenizer(), PrepareSettings(64))
    assert b"my key" not in bytes(TokenStore.open(tmp_path / "o.h5").tokens[:].astype("uint8"))
    assert TokenStore.open(tmp_path / "o.h5").num_documents == 1


def test_the_name_of_a_prepared_file_is_no_pattern_of_what_is_removed(tmp_path):
    theirs = tmp_path / ".mine.h5.abc.parts"
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    source = write_jsonl(tmp_path / "d.jsonl", [chat("Hi?", "Yes.")])
    prepare_data(str(source), tmp_path / "*.h5", byte_tokenizer(), PrepareSettings(64))
    assert theirs.is_dir()


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch {ran}') }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}{{ p }}",
    "{% for n in range(10 ** 9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 / 0 }}",
    "{{ messages.append(1) }}",
    "{% if %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_reaches_neither_python_nor_files(tmp_path, template):
    ran = tmp_path / "ran"
    tokenizer = byte_tokenizer(template.replace("{ran}", str(ran)))
    source = write_jsonl(tmp_path / "d.jsonl", [chat("Hi?", "Yes.")])
    with pytest.raises(
        DataError, match="the chat template (refused|does not show|of .* cannot be read)"
    ):
        prepare_data(str(source), tmp_path / "o.h5", tokenizer, PrepareSettings(64))
    assert not ran.exists()


@pytest.mark.full
def test_a_line_of_a_gigabyte_is_named_and_not_held_in_memory(tmp_path):
    with (tmp_path / "d.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b'\n{"text": "short"}\n')
    tracemalloc.start()
    try:
        rows = list(raw_files.read_json_lines(tmp_path / "d.jsonl", 0, 4 << 20))
        rows += list(raw_files.read_json_lines(tmp_path / "d.jsonl", 1 << 30, (1 << 30) + 99))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "a line or element of more than 128 MiB" in str(rows[0][1])
    assert [row for _, row in rows[1:]] == [{"text": "short"}]
    assert peak < 300 << 20


@pytest.mark.parametrize(
    "name", ["d.jsonl.gz", "d.json.gz", "d.txt.gz", "d.csv.gz", "d.md", "d.json"]
)
def test_a_bomb_that_unpacks_to_one_line_is_refused_with_a_message(tmp_path, name, monkeypatch):
    """By a lower limit than the real one, which takes seconds to reach."""
    monkeypatch.setattr(raw_files, "MAX_LINE_BYTES", 8 << 20)
    begin = {"d.json.gz": b'[{"text": "', "d.json": b'[{"text": "', "d.csv.gz": b'text\n"'}
    text = begin.get(name, b'{"text": "') + b"x" * (40 << 20)
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(text))
    with pytest.raises(DataError, match=rf"{name}.*(128 MiB|cannot be read as CSV)"):
        prepare_data(str(tmp_path / name), tmp_path / "o.h5", byte_tokenizer(), PrepareSettings(64))
    assert not [f for f in tmp_path.rglob("*") if f.name.endswith((".tmp", ".h5", ".part"))]


@pytest.mark.parametrize("depth", [300, 900, 3_000, 100_000])
@pytest.mark.parametrize("where", ["row", "content", "tools"])
def test_json_that_is_nested_too_deeply_is_a_message(tmp_path, depth, where):
    deep = "[" * depth + "]" * depth
    text = {
        "row": deep,
        "content": f'{{"messages": [{{"role": "user", "content": {deep}}}]}}',
        "tools": f'{{"messages": [{{"role": "user", "content": "a"}}, '
        f'{{"role": "assistant", "content": "b"}}], "tools": {deep}}}',
    }[where]
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"d\.jsonl"):
        prepare_data(
            str(tmp_path / "d.jsonl"), tmp_path / "o.h5", byte_tokenizer(), PrepareSettings(64)
        )
