"""Megatron's .bin and .idx, written here by the rules of its own writer.

https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
(_IndexWriter and IndexedDatasetBuilder)
"""

import logging
import struct

import numpy as np
import pytest

from hpc_tune import cli
from hpc_tune.data.chunks import (
    list_chunks,
    read_chunk,
    read_megatron_documents,
    split_megatron_documents,
)
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import ReadOptions
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6, 7, 8]], [[9, 10]], [[11, 12, 13, 14]]]


def write(prefix, documents, dtype="uint16", code=None, modes=False):
    """Documents of sentences of tokens."""
    sentences = [sentence for document in documents for sentence in document]
    data = b"".join(np.array(sentence, dtype).tobytes() for sentence in sentences)
    ends = np.cumsum([0, *map(len, sentences)]) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
    index += struct.pack("<B", CODES.get(dtype) if code is None else code)
    index += struct.pack("<Q", len(sentences)) + struct.pack("<Q", len(firsts))
    index += np.array([*map(len, sentences)], np.int32).tobytes()
    index += np.array(ends[:-1], np.int64).tobytes() + np.array(firsts, np.int64).tobytes()
    index += bytes(len(sentences)) if modes else b""
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "x_text_document", DOCUMENTS)


def flat(documents):
    return [[token for sentence in document for token in sentence] for document in documents]


def prepared(path, out, **reading):
    settings = PrepareSettings(16, "answers", ReadOptions(**reading))
    prepare_data(str(path), out, byte_tokenizer(), settings)
    store = TokenStore.open(out)
    return [tuple(part.tolist() for part in store.document(n)) for n in range(store.num_documents)]


@pytest.mark.parametrize("dtype", CODES)
def test_documents_of_each_type_are_learned_as_they_are_but_for_the_first_token(tmp_path, dtype):
    path = write(tmp_path / "x", DOCUMENTS, dtype)
    expected = [(tokens, [0] + [1] * (len(tokens) - 1)) for tokens in flat(DOCUMENTS)]
    assert prepared(path, tmp_path / "out.h5") == expected


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_either_file_and_what_they_have_in_common_name_the_data(prefix, ending):
    chunks = list_chunks(f"{prefix}{ending}")
    found = [row.token_ids.tolist() for chunk in chunks for row in read_chunk(chunk)]
    assert found == flat(DOCUMENTS)


def test_a_folder_of_such_files_is_read_and_a_bin_of_others_is_not(prefix, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"weights")
    (chunk,) = list_chunks(str(tmp_path))
    assert chunk.path == f"{prefix}.bin"


def test_long_documents_are_split_and_counted(tmp_path):
    path = write(tmp_path / "x", [[list(range(40))], [[7]]])
    documents = prepared(path, tmp_path / "out.h5")
    assert [tokens for tokens, _ in documents] == [[*range(16)], [*range(16, 32)], [*range(32, 40)]]
    counters = TokenStore.open(tmp_path / "out.h5").attributes.counters
    assert (counters.examples, counters.split, counters.dropped) == (2, 1, {"empty text": 1})


def test_any_number_of_chunks_gives_the_same_documents_in_their_order(tmp_path):
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(0, 200, rng.integers(0, 9)).tolist() for _ in range(rng.integers(0, 4))]
        for _ in range(60)
    ]
    path = write(tmp_path / "x", documents, "int32")
    data = path.with_name("x.bin")
    for chunk_bytes in (1, 7, 64, 1 << 20):
        ranges = split_megatron_documents(data, chunk_bytes, 1000)
        found = [
            row.token_ids.tolist()
            for a, b in ranges
            for _, row in read_megatron_documents(data, a, b)
        ]
        assert found == flat(documents)
        assert len(ranges) > 1 or chunk_bytes > 64


def test_a_part_is_held_out_by_content(tmp_path):
    path = write(tmp_path / "x", [[[n, n + 1, n + 2]] for n in range(100)] * 2)
    parts = {
        part: {
            tuple(tokens)
            for tokens, _ in prepared(path, tmp_path / f"{part}.h5", held_out=0.3, part=part)
        }
        for part in ("train", "held-out")
    }
    assert len(parts["train"]) + len(parts["held-out"]) == 100
    assert 10 < len(parts["held-out"]) < 50


@pytest.mark.parametrize(("dtype", "token"), [("int32", 258), ("int32", -1), ("int64", 1 << 40)])
def test_a_token_beyond_the_vocabulary_is_one_error_with_its_place(tmp_path, dtype, token):
    path = write(tmp_path / "x", [[[1, 2]], [[3, token, 4]]], dtype)
    with pytest.raises(DataError) as raised:
        prepared(path, tmp_path / "out.h5")
    assert f"x.bin, document 2: it has the token {token}, but" in str(raised.value)
    assert "has only tokens 0 to 257" in str(raised.value)


@pytest.mark.parametrize("size", [0, 5, 20, 33, 34, 60, -1])
def test_a_truncated_index_is_one_error(prefix, size):
    index = prefix.with_name(f"{prefix.name}.idx")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(DataError, match=r"x_text_document\.idx "):
        list_chunks(str(prefix))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"1", lambda _: b""]
)
def test_data_that_do_not_have_what_the_index_says_are_one_error(prefix, change):
    data = prefix.with_name(f"{prefix.name}.bin")
    data.write_bytes(change(data.read_bytes()))
    with pytest.raises(DataError, match=r"but x_text_document\.idx describes 28: one of them"):
        list_chunks(str(prefix))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"code": 6}, "floating-point"),
        ({"code": 7}, "floating-point"),
        ({"code": 99}, "unknown code 99"),
        ({"modes": True}, "data with images"),
    ],
)
def test_what_holds_no_token_numbers_is_refused(tmp_path, changes, why):
    with pytest.raises(DataError, match=why):
        list_chunks(str(write(tmp_path / "x", DOCUMENTS, **changes)))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"TNTIDX\x00\x00\x00", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2, expected 1"),
        (34, struct.pack("<i", -3), "contradicts itself"),
        (34 + 4 * 5, struct.pack("<q", 2), "contradicts itself"),
        (34 + 12 * 5, struct.pack("<q", 1), "contradicts itself"),
        (34 + 12 * 5 + 8, struct.pack("<q", 4), "contradicts itself"),
    ],
)
def test_a_damaged_index_is_one_error(prefix, at, value, why):
    index = prefix.with_name(f"{prefix.name}.idx")
    data = index.read_bytes()
    index.write_bytes(data[:at] + value + data[at + len(value) :])
    with pytest.raises(DataError, match=why):
        list_chunks(str(prefix))


def test_a_file_without_the_other_is_told_of(prefix):
    prefix.with_name(f"{prefix.name}.bin").rename(prefix.with_name("y.bin"))
    for name in (prefix, f"{prefix}.idx"):
        with pytest.raises(DataError, match=r"an index .*\.idx, but not its data, .*\.bin"):
            list_chunks(str(name))
    with pytest.raises(DataError, match=r"y\.bin: files of type \.bin .* Megatron with its \.idx"):
        list_chunks(str(prefix.with_name("y.bin")))


def test_an_empty_set_is_told_of(tmp_path):
    with pytest.raises(DataError, match="is empty; it must hold"):
        list_chunks(str(write(tmp_path / "x", [])))


def test_a_change_of_the_index_alone_is_another_source(prefix, tmp_path):
    out = tmp_path / "out.h5"
    assert len(prepared(prefix, out)) == 4
    write(prefix, [[sentence] for document in DOCUMENTS for sentence in document])
    assert len(prepared(prefix, out)) == 5


def test_preferences_are_not_read_from_it(prefix, tmp_path):
    with pytest.raises(DataError, match="document 1: found text or an answer, expected rows"):
        prepared(prefix, tmp_path / "out.h5", form="pairs")


def test_show_and_prepare_say_that_the_tokenizer_is_unknown(prefix, tmp_path, capsys, caplog):
    assert cli.main(["show", f"{prefix}.idx"]) == 0
    shown = capsys.readouterr().out
    assert "do not say which tokenizer made their tokens: it is assumed to be" in shown
    assert "4 examples -> 4 documents, 14 tokens, 10 of them learned" in shown
    with caplog.at_level(logging.WARNING, "hpc_tune"):
        words = ["prepare", f"data.path={prefix}", "--out", str(tmp_path / "out.h5")]
        assert cli.main(words) == 0
    assert "do not say which tokenizer" in caplog.text + capsys.readouterr().err
    store = TokenStore.open(tmp_path / "out.h5")
    assert [store.document(n)[0].tolist() for n in range(4)] == flat(DOCUMENTS)


def test_the_working_directory_can_be_named(prefix, monkeypatch):
    monkeypatch.chdir(prefix.parent)
    assert len(list_chunks(".")) == len(list_chunks("x_text_document")) == 1
