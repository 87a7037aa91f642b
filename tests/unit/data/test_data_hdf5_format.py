import io
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc_tune.data.hdf5_format import TokenStore, append_checksum, is_structure_intact
from hpc_tune.data.tokenizer import fingerprint
from hpc_tune.data.writer import Block, verify_content, verify_content_once, write_store
from hpc_tune.errors import DataError
from tests.support.data import attributes, byte_tokenizer, store_of_lengths, zero_tokens

LENGTHS = [5, 2, 9, 2, 5, 1, 9, 9]
DATASETS = ("tokens", "loss_mask", "documents/offsets", "documents/by_length")
DATASETS += ("lengths/values", "lengths/counts")


def test_documents_come_back_as_they_were_written(tmp_path):
    store = store_of_lengths(tmp_path / "s.h5", LENGTHS)
    assert store.num_documents == 8
    assert store.num_tokens == 42
    assert store.tokens.dtype == np.uint16
    for number, length in enumerate(LENGTHS):
        tokens, mask = store.document(number)
        assert tokens.tolist() == list(range(number, number + length))
        assert mask.tolist() == [0] + [1] * (length - 1)
    assert store.documents_by_length[:].tolist() == [5, 1, 3, 0, 4, 2, 6, 7]
    assert store.length_values.tolist() == [1, 2, 5, 9]
    assert store.length_counts.tolist() == [1, 2, 2, 3]


def test_any_hdf5_program_can_read_the_file(tmp_path):
    store_of_lengths(tmp_path / "s.h5", LENGTHS)
    with h5py.File(tmp_path / "s.h5") as file:
        assert file["tokens"][:5].tolist() == [0, 1, 2, 3, 4]
        assert file["documents/offsets"][-1] == 42
        assert file["documents/by_length"].dtype == np.uint32
        assert file.attrs["format"] == "hpc_tune tokens"


def test_large_vocabulary_takes_four_bytes_per_token(tmp_path):
    block = Block(np.array([2]), np.array([1, 150_000]), np.array([0, 1]))
    write_store(tmp_path / "s.h5", [block], {2: 1}, attributes(vocab_size=152_000))
    store = TokenStore.open(tmp_path / "s.h5")
    assert store.tokens.dtype == np.uint32
    assert store.tokens[:].tolist() == [1, 150_000]


def test_content_and_bytes_do_not_depend_on_how_documents_are_grouped(tmp_path):
    lengths, tokens = np.array([2, 3, 2]), np.arange(7)
    parts = [
        Block(lengths[:1], tokens[:2], tokens[:2] > 0),
        Block(lengths[1:], tokens[2:], tokens[2:] > 0),
    ]
    write_store(tmp_path / "a.h5", [Block(lengths, tokens, tokens > 0)], {2: 2, 3: 1}, attributes())
    write_store(tmp_path / "b.h5", parts, {3: 1, 2: 2}, attributes())
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    changed = Block(lengths, tokens + 1, tokens > 0)
    write_store(tmp_path / "c.h5", [changed], {2: 2, 3: 1}, attributes())
    contents = [TokenStore.open(tmp_path / f"{n}.h5").attributes.content for n in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_no_hdf5_handle_stays_open_and_a_forked_process_reads_on(tmp_path):
    store = store_of_lengths(tmp_path / "s.h5", LENGTHS)
    kinds = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET | h5py.h5f.OBJ_GROUP | h5py.h5f.OBJ_ATTR
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, kinds) == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if store.document(2)[0].tolist() == list(range(2, 11)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_opening_works_where_another_process_has_the_file_locked(tmp_path):
    store_of_lengths(tmp_path / "s.h5", LENGTHS)
    import fcntl

    with (tmp_path / "s.h5").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert TokenStore.open(tmp_path / "s.h5").num_documents == 8


def test_a_failed_write_leaves_nothing_behind_and_the_old_file_untouched(tmp_path):
    store_of_lengths(tmp_path / "s.h5", LENGTHS)
    before = (tmp_path / "s.h5").read_bytes()

    def blocks():
        yield Block(np.array([2]), np.arange(2), np.ones(2))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_store(tmp_path / "s.h5", blocks(), {2: 2}, attributes())
    assert os.listdir(tmp_path) == ["s.h5"]
    assert (tmp_path / "s.h5").read_bytes() == before


def test_missing_and_foreign_files_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match="no prepared data file .* prepare"):
        TokenStore.open(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("not HDF5 at all")
    with pytest.raises(DataError, match="is not an HDF5 file"):
        TokenStore.open(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros(3)
    with pytest.raises(DataError, match="written by another program .* prepare"):
        TokenStore.open(tmp_path / "other.h5")
    append_checksum(tmp_path / "other.h5")
    with pytest.raises(DataError, match="has version None of the format"):
        TokenStore.open(tmp_path / "other.h5")


@pytest.mark.parametrize("keep", [4, 100, 0.3, 0.6, -1])
def test_a_cut_off_file_is_refused_wherever_it_is_cut(tmp_path, keep):
    store_of_lengths(tmp_path / "s.h5", [50] * 400)
    data = (tmp_path / "s.h5").read_bytes()
    size = keep if keep >= 1 else len(data) - 1 if keep < 0 else int(len(data) * keep)
    (tmp_path / "s.h5").write_bytes(data[:size])
    with pytest.raises(DataError, match="cut off|not an HDF5"):
        TokenStore.open(tmp_path / "s.h5")


def test_a_changed_bit_outside_the_datasets_is_noticed_before_hdf5_sees_it(tmp_path):
    store_of_lengths(tmp_path / "s.h5", LENGTHS)
    data = (tmp_path / "s.h5").read_bytes()
    with h5py.File(tmp_path / "s.h5") as file:
        found = [file[name] for name in DATASETS]
        inside = {d.id.get_offset() + n for d in found for n in range(d.size * d.dtype.itemsize)}
    for place in range(0, len(data), 5):
        changed = io.BytesIO(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        assert is_structure_intact(changed) == (place in inside), place


def _edit(path, change):
    """Change the file as a program that seals it again would."""
    with h5py.File(path, "r+") as file:
        change(file)
    append_checksum(path)


def _replace(name, make):
    def change(file):
        data = file[name][:]
        del file[name]
        make(file, name, data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.__setitem__("version", 99), "version 99"),
        (lambda f: f.attrs.__delitem__("seq_len"), "lacks a usable attribute: KeyError.*seq_len"),
        (lambda f: f.attrs.__setitem__("counters", "{"), "lacks a usable attribute"),
        (lambda f: f.attrs.__setitem__("counters", "[" * 60_000), "lacks a usable attribute"),
        (lambda f: f.__delitem__("loss_mask"), "no dataset loss_mask"),
        (lambda f: f.__delitem__("documents"), "no dataset documents/offsets"),
        (
            _replace("tokens", lambda f, n, d: f.create_dataset(n, data=d, compression="gzip")),
            "contiguous",
        ),
        (_replace("tokens", lambda f, n, d: f.create_dataset(n, data=d.astype("f4"))), "float32"),
        (_replace("tokens", lambda f, n, d: f.create_dataset(n, data=d[:-1])), "differ in size"),
        (
            _replace("tokens", lambda f, n, d: f.__setitem__(n, h5py.ExternalLink("x.h5", "/t"))),
            "ExternalLink",
        ),
        (
            _replace("tokens", lambda f, n, d: f.__setitem__(n, h5py.SoftLink("/loss_mask"))),
            "SoftLink",
        ),
        (
            _replace(
                "tokens",
                lambda f, n, d: f.create_dataset(
                    n, d.shape, d.dtype, external=[("raw.bin", 0, d.nbytes)]
                ),
            ),
            "in another file",
        ),
        (lambda f: f["lengths/counts"].__setitem__(0, 7), "do not add up"),
        (lambda f: f["documents/offsets"].__setitem__(-1, 7), "offsets do not end"),
    ],
)
def test_a_damaged_or_altered_file_is_refused(tmp_path, change, message):
    store_of_lengths(tmp_path / "s.h5", LENGTHS)
    _edit(tmp_path / "s.h5", change)
    with pytest.raises(DataError, match=message):
        TokenStore.open(tmp_path / "s.h5")


def test_another_tokenizer_is_refused_by_name(tmp_path):
    right, other = byte_tokenizer(), byte_tokenizer(template=None)
    other.name_or_path = "models/other"
    block = Block(np.array([2]), np.arange(2), np.ones(2))
    marks = attributes(tokenizer_fingerprint=fingerprint(right), tokenizer="models/right")
    write_store(tmp_path / "s.h5", [block], {2: 1}, marks)
    store = TokenStore.open(tmp_path / "s.h5")
    store.require_tokenizer(right, fingerprint(right))
    with pytest.raises(DataError, match=r"models/right .* models/other .* prepare"):
        store.require_tokenizer(other, fingerprint(other))


@pytest.mark.parametrize("dataset", ["tokens", "loss_mask", "documents/by_length"])
def test_bytes_that_were_zeroed_since_are_found_by_reading_all(tmp_path, dataset):
    verify_content(store_of_lengths(tmp_path / "s.h5", LENGTHS))
    zero_tokens(tmp_path / "s.h5", dataset)
    store = TokenStore.open(tmp_path / "s.h5")
    with pytest.raises(DataError, match=r"s\.h5: its .* not as `prepare` wrote .* damaged"):
        verify_content(store)


def test_the_order_by_length_is_checked_in_pieces(tmp_path, monkeypatch):
    lengths = np.random.default_rng(1).integers(1, 6, 100).tolist()
    store = store_of_lengths(tmp_path / "s.h5", lengths)
    monkeypatch.setattr("hpc_tune.data.writer._PIECE_DOCUMENTS", 7)
    verify_content(store)
    for a, b in ((0, 1), (6, 7), (98, 99)):
        changed = store.documents_by_length[:].copy()
        changed[[a, b]] = changed[[b, a]]
        store.documents_by_length, kept = changed, store.documents_by_length
        with pytest.raises(DataError, match="order of the documents by length is not .* wrote it:"):
            verify_content(store)
        store.documents_by_length = kept


def test_a_run_verifies_a_file_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    store, times = store_of_lengths(tmp_path / "s.h5", LENGTHS), []
    monkeypatch.setattr("hpc_tune.data.writer.verify_content", times.append)
    for _ in range(2):
        verify_content_once(store, tmp_path / "known.json")
    assert len(times) == 1
    os.utime(tmp_path / "s.h5", (1, 1))
    verify_content_once(store, tmp_path / "known.json")
    assert len(times) == 2
    other = store_of_lengths(tmp_path / "o.h5", LENGTHS)
    verify_content_once(other, tmp_path / "known.json", is_new=True)
    verify_content_once(other, tmp_path / "known.json")
    verify_content_once(store, tmp_path / "known.json")
    assert len(times) == 2
    (tmp_path / "known.json").write_text("[1")
    verify_content_once(store, tmp_path / "known.json")
    assert len(times) == 3
    status = store.path.stat()
    with store.path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    os.utime(store.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    verify_content_once(store, tmp_path / "known.json")
    assert len(times) == 4


def test_the_highest_token_is_known_and_must_have_an_embedding(tmp_path):
    block = Block(np.array([2, 1]), np.array([3, 319, 7]), np.array([0, 1, 0]))
    write_store(tmp_path / "s.h5", [block], {2: 1, 1: 1}, attributes())
    store = TokenStore.open(tmp_path / "s.h5")
    assert store.attributes.highest_token == 319
    store.require_embeddings(320, "<image>")
    with pytest.raises(DataError, match=r"token 319 \(<image>\), but .* embeddings for only 319"):
        store.require_embeddings(319, "<image>")


def test_fingerprint_sees_vocabulary_and_template_but_not_the_settings_of_calls():
    plain = byte_tokenizer()
    mark = fingerprint(plain)
    plain("a b", truncation=True, max_length=1)
    assert fingerprint(plain) == mark == fingerprint(byte_tokenizer())
    plain.chat_template += " "
    assert fingerprint(plain) != mark
    grown = byte_tokenizer()
    grown.add_tokens(["<tool>"])
    assert fingerprint(grown) != mark


def test_slow_tokenizer_is_refused_with_the_remedy():
    with pytest.raises(DataError, match="fast tokenizer"):
        fingerprint(object())


def test_by_length_is_stable_when_it_is_sorted_in_several_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_tune.data.writer.MAX_UNSORTED_DOCUMENTS", 7)
    lengths = np.random.default_rng(0).integers(1, 6, 100)
    blocks = [
        Block(part, np.zeros(part.sum()), np.zeros(part.sum())) for part in np.split(lengths, 20)
    ]
    histogram = dict(
        zip(*(a.tolist() for a in np.unique(lengths, return_counts=True)), strict=True)
    )
    write_store(tmp_path / "s.h5", blocks, histogram, attributes())
    store = TokenStore.open(tmp_path / "s.h5")
    assert store.documents_by_length[:].tolist() == np.argsort(lengths, kind="stable").tolist()


def num_read():
    """Return how many bytes this process has read from files."""
    io_counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(io_counts["rchar"])


def test_opening_does_not_read_the_documents(tmp_path):
    """15 MB of them; their lengths and their order take 100 kB."""
    path = tmp_path / "s.h5"
    store_of_lengths(path, [1000] * 5000)
    before = num_read()
    store = TokenStore.open(path)
    assert num_read() - before < 2 << 20
    assert str(path) not in Path("/proc/self/maps").read_text(), "a file cut off would kill"
    assert store.tokens[:].sum() > 0
    assert num_read() - before > 8 << 20, "what is read is seen"


@pytest.mark.parametrize("keep", [0, 4096, 9_000])
def test_a_file_that_is_cut_off_while_it_is_in_use_is_an_error_with_its_name(tmp_path, keep):
    path = tmp_path / "s.h5"
    store = store_of_lengths(path, [1000] * 50)
    assert len(store.document(40)[0]) == 1000
    with path.open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(DataError, match=r"s\.h5 was cut off while it was in use: .* prepare"):
        store.document(40)


def test_a_file_that_is_replaced_while_it_is_in_use_is_read_as_it_was(tmp_path):
    store = store_of_lengths(tmp_path / "s.h5", LENGTHS)
    store_of_lengths(tmp_path / "s.h5", [1])
    assert store.document(2)[0].tolist() == list(range(2, 11))
