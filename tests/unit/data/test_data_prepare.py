import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hpc_tune.data import chunks
from hpc_tune.data import prepare as module
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.prepare import (
    PreparePlan,
    PrepareSettings,
    PreparingRanks,
    cache_file_name,
    join_parts,
    plan_preparation,
    prepare_data,
    tokenize_chunks,
)
from hpc_tune.data.tokenizer import fingerprint
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer, chat, write_jsonl
from tests.support.ranks import HANG_S

ROOT = Path(__file__).parents[3]
RECORDS = [chat(f"question {n}", "answer " * (n % 40)) for n in range(300)]


WATCH_MEMORY = """
import sys, threading
from tests.support.data import byte_tokenizer
from hpc_tune.data.prepare import PrepareSettings, prepare_data

def anonymous_mib():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

def watch():
    while not done.wait(0.01):
        samples.append(anonymous_mib())

tokenizer, done = byte_tokenizer(), threading.Event()
samples = [anonymous_mib()]
thread = threading.Thread(target=watch)
thread.start()
prepare_data(sys.argv[1], sys.argv[2], tokenizer, PrepareSettings(512))
done.set()
thread.join()
print(max(samples) - samples[0])
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)
    return str(write_jsonl(tmp_path / "raw.jsonl", RECORDS))


def _prepare_with(source, out, size):
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, out, tokenizer, PrepareSettings(200))
    for rank in reversed(range(size)):
        tokenize_chunks(work, tokenizer, PreparingRanks(rank, size))
    return join_parts(work)


def test_any_number_of_ranks_gives_the_same_bytes(source, tmp_path):
    counters = [_prepare_with(source, tmp_path / f"{n}.h5", n) for n in (1, 3)]
    time.sleep(1.1)  # HDF5 can note the time in seconds: it must not
    counters.append(_prepare_with(source, tmp_path / "16.h5", 16))
    assert counters[0] == counters[1] == counters[2]
    one = (tmp_path / "1.h5").read_bytes()
    assert one == (tmp_path / "3.h5").read_bytes() == (tmp_path / "16.h5").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["1.h5", "16.h5", "3.h5", "raw.jsonl"]


def test_documents_are_in_the_order_of_the_source_and_counted(source, tmp_path):
    tokenizer = byte_tokenizer()
    counters = prepare_data(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    store = TokenStore.open(tmp_path / "d.h5")
    store.require_tokenizer(tokenizer, fingerprint(tokenizer))
    asked = [tokenizer.decode(store.document(d)[0]) for d in range(store.num_documents)]
    # 40 lengths of answers: the one without words teaches nothing.
    used = [n for n, record in enumerate(RECORDS) if record["messages"][-1]["content"]]
    assert len(asked) == len(used) == 300 - counters.dropped["empty answer"]
    assert len(used) < 300
    assert all(f"user\nquestion {n}<|im_end|>" in text for n, text in zip(used, asked, strict=True))
    lengths = [len(tokenizer.apply_chat_template(r["messages"])["input_ids"]) for r in RECORDS]
    whole = [lengths[n] for n in used]
    assert counters.truncated == sum(length > 200 for length in whole)
    assert counters.tokens == store.num_tokens == sum(min(length, 200) for length in whole)
    assert counters.loss_tokens == int(store.loss_mask[:].sum())
    assert store.attributes.counters == counters
    assert (store.attributes.seq_len, store.attributes.source) == (200, source)


def test_finished_parts_of_a_killed_run_are_used_by_another_number_of_ranks(
    source, tmp_path, monkeypatch
):
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    tokenize_chunks(work, tokenizer, PreparingRanks(0, 2))
    (work.parts_folder / "00000001.part").write_bytes(b"cut off by the kill")
    written = []
    write_part = module._write_part
    monkeypatch.setattr(
        module, "_write_part", lambda w, n, e: (written.append(n), write_part(w, n, e))
    )
    for rank in range(3):
        tokenize_chunks(work, tokenizer, PreparingRanks(rank, 3))
    assert sorted(written) == list(range(1, len(work.chunks), 2))
    join_parts(work)
    _prepare_with(source, tmp_path / "plain.h5", 1)
    assert (tmp_path / "d.h5").read_bytes() == (tmp_path / "plain.h5").read_bytes()


def test_parts_belong_to_one_source_one_tokenizer_and_one_setting(source, tmp_path):
    out, tokenizer = tmp_path / "d.h5", byte_tokenizer()
    folders = {
        plan_preparation(source, out, tokenizer, PrepareSettings(n)).parts_folder
        for n in (100, 200)
    }
    folders.add(plan_preparation(source, out, tokenizer, PrepareSettings(100, "all")).parts_folder)
    folders.add(
        plan_preparation(source, out, byte_tokenizer(bos=True), PrepareSettings(100)).parts_folder
    )
    Path(source).touch()
    folders.add(plan_preparation(source, out, tokenizer, PrepareSettings(100)).parts_folder)
    assert len(folders) == 5


def test_old_parts_of_the_same_output_are_removed_and_young_ones_kept(source, tmp_path):
    old, young = tmp_path / ".d.h5.00.parts", tmp_path / ".d.h5.11.parts"
    for folder in (old, young):
        folder.mkdir()
        (folder / "00000000.part").write_bytes(b"x")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    _prepare_with(source, tmp_path / "d.h5", 1)
    assert not old.exists()
    assert young.exists()


def test_where_all_answers_begin_too_late_the_length_to_raise_is_named(tmp_path):
    source = write_jsonl(tmp_path / "d.jsonl", [chat("question " * 40, "answer")] * 5)
    with pytest.raises(DataError) as refused:
        _prepare_with(str(source), tmp_path / "d.h5", 1)
    assert str(refused.value).endswith(
        "d.jsonl: all 5 answers begin after token 200: raise data.seq_len"
    )


def test_missing_parts_point_to_a_folder_that_is_not_shared(source, tmp_path):
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    tokenize_chunks(work, tokenizer, PreparingRanks(0, 2))
    with pytest.raises(DataError, match=r"chunk 2 of \d+ are missing .* all nodes share"):
        join_parts(work)
    assert not (tmp_path / "d.h5").exists()


def test_a_part_that_was_damaged_since_is_refused_by_name(source, tmp_path):
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    tokenize_chunks(work, tokenizer)
    data = bytearray(work.part_file(2).read_bytes())
    data[len(data) // 2] ^= 1  # within the tokens or the mask of its one block
    work.part_file(2).write_bytes(data)
    with pytest.raises(DataError, match=r"00000002\.part is damaged .*remove its folder"):
        join_parts(work)
    assert not (tmp_path / "d.h5").exists()


def test_an_error_on_one_rank_is_handed_to_the_agreement_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    source = write_jsonl(tmp_path / "raw.jsonl", [*RECORDS[:50], {"wrong": 1}])
    errors = []

    class Stop(Exception):
        pass

    def run_and_agree(what, work):
        found = None
        try:
            found = work()
            errors.append(None)
        except DataError as error:
            errors.append(error)
        if len(errors) % 2 == 0:  # after the plan, and after the tokenizing
            raise Stop
        return found

    out, tokenizer = tmp_path / "d.h5", byte_tokenizer()
    for rank in range(2):
        with pytest.raises(Stop):
            prepare_data(
                str(source),
                out,
                tokenizer,
                PrepareSettings(64),
                PreparingRanks(rank, 2, run_and_agree),
            )
    assert sum(error is not None for error in errors) == 1
    assert not (tmp_path / "d.h5").exists()


def test_rank_0_alone_looks_for_the_file_before_it_is_there(source, tmp_path, monkeypatch):
    """To a node that has looked in vain, NFS tells for a while that there is none."""
    looked, real, calls = [], Path.stat, []

    def stat(path, **more):
        looked.append(path)
        return real(path, **more)

    class Stop(Exception):
        pass

    def run_and_agree(what, work):
        calls.append(what)
        if len(calls) == 3:
            raise Stop
        return work()

    monkeypatch.setattr(Path, "stat", stat)
    out = tmp_path / "d.h5"
    for rank, looks in ((1, False), (0, True)):
        calls.clear()
        ranks = PreparingRanks(rank, 2, run_and_agree)
        with pytest.raises(Stop):
            prepare_data(source, out, byte_tokenizer(), PrepareSettings(200), ranks)
        assert calls == ["preparing the data"] * 3
        assert (out in looked) == looks


@pytest.mark.parametrize("when", [1, "last"])
def test_a_job_that_is_overtaken_by_another_takes_its_file(source, tmp_path, when):
    out = tmp_path / "d.h5"

    def report(done, total):
        if done == (total if when == "last" else when):
            _prepare_with(source, out, 1)

    counters = prepare_data(source, out, byte_tokenizer(), PrepareSettings(200), report=report)
    assert counters == _prepare_with(source, tmp_path / "alone.h5", 1)
    assert out.read_bytes() == (tmp_path / "alone.h5").read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["alone.h5", "d.h5", "raw.jsonl"]


def test_copies_of_the_source_on_other_nodes_may_have_other_times_but_no_other_content(
    source, tmp_path
):
    out, tokenizer = tmp_path / "d.h5", byte_tokenizer()
    of_rank_0 = plan_preparation(source, out, tokenizer, PrepareSettings(200))

    def broadcast(own):
        return of_rank_0 if isinstance(own, PreparePlan) else own

    os.utime(source, (1, 1))
    assert (
        plan_preparation(source, out, tokenizer, PrepareSettings(200)).parts_folder
        != of_rank_0.parts_folder
    )
    prepare_data(source, out, tokenizer, PrepareSettings(200), PreparingRanks(broadcast=broadcast))
    _prepare_with(source, tmp_path / "alone.h5", 1)
    assert out.read_bytes() == (tmp_path / "alone.h5").read_bytes()
    data = Path(source).read_bytes()
    for other in (data[:-1] + b" ", data + b"\n"):
        Path(source).write_bytes(other)
        with pytest.raises(DataError, match="is not the same on all nodes: .*bytes on this one"):
            prepare_data(
                source, out, tokenizer, PrepareSettings(200), PreparingRanks(broadcast=broadcast)
            )


def test_numbers_behind_a_gap_are_kept_in_prepared_data(tmp_path):
    tokenizer = byte_tokenizer(template=None)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 66000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 66000
    far = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|im_end|>"
    )
    source = write_jsonl(tmp_path / "d.jsonl", [{"text": "near"}, {"text": "a <far> b"}])
    prepare_data(str(source), tmp_path / "d.h5", far, PrepareSettings(200))
    store = TokenStore.open(tmp_path / "d.h5")
    assert store.attributes.vocab_size == 66001
    assert (store.attributes.highest_token, store.tokens.dtype.itemsize) == (66000, 4)
    assert far.decode(store.document(1)[0]) == "a <far> b<|im_end|>"


JOB = """
import sys
from tests.support.data import byte_tokenizer
from hpc_tune.data.prepare import PrepareSettings, prepare_data
tokenizer = byte_tokenizer()
print("ready", flush=True)
sys.stdin.readline()
print(prepare_data(sys.argv[1], sys.argv[2], tokenizer, PrepareSettings(200)))
"""


@pytest.mark.full
def test_jobs_that_prepare_into_one_cache_at_once_all_get_the_whole_file(tmp_path):
    source = str(write_jsonl(tmp_path / "raw.jsonl", RECORDS * 100))
    _prepare_with(source, tmp_path / "alone.h5", 1)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", JOB, source, str(tmp_path / "d.h5")]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    jobs = [subprocess.Popen(command, **pipe) for _ in range(3)]
    assert [job.stdout.readline() for job in jobs] == ["ready\n"] * 3
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    said = {job.communicate(timeout=HANG_S)[0] for job in jobs}
    assert len(said) == 1
    assert "30,000 examples" in said.pop()
    assert (tmp_path / "d.h5").read_bytes() == (tmp_path / "alone.h5").read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["alone.h5", "d.h5", "raw.jsonl"]


def test_data_without_any_example_are_refused_with_the_reasons(tmp_path):
    source = write_jsonl(tmp_path / "raw.jsonl", [chat("no answer"), chat("nor here")])
    with pytest.raises(DataError, match="no example .*2 dropped: no answer of the assistant"):
        prepare_data(str(source), tmp_path / "d.h5", byte_tokenizer(), PrepareSettings(64))
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no example .*it holds no records"):
        prepare_data(
            str(tmp_path / "blank.jsonl"), tmp_path / "d.h5", byte_tokenizer(), PrepareSettings(64)
        )


def test_cache_name_changes_with_everything_that_changes_the_tokens(source):
    tokenizer = byte_tokenizer()
    name = cache_file_name(source, fingerprint(tokenizer), PrepareSettings(64))
    assert name.startswith("raw-")
    assert name.endswith(".h5")
    assert cache_file_name(source, fingerprint(tokenizer), PrepareSettings(64)) == name
    names = {
        name,
        cache_file_name(source, fingerprint(tokenizer), PrepareSettings(65)),
        cache_file_name(source, fingerprint(tokenizer), PrepareSettings(64, "all")),
        cache_file_name(source, fingerprint(byte_tokenizer(template=None)), PrepareSettings(64)),
        cache_file_name("builtin:pydocs", fingerprint(tokenizer), PrepareSettings(64)),
    }
    Path(source).touch()
    names.add(cache_file_name(source, fingerprint(tokenizer), PrepareSettings(64)))
    assert len(names) == 6
    assert not any(":" in one or "/" in one for one in names)


def test_threads_of_the_tokenizer_are_set_for_the_time_of_the_call_only(
    source, tmp_path, monkeypatch
):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    seen = []
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    for threads in (None, 1, 2):
        tokenize_chunks(
            work,
            tokenizer,
            PreparingRanks(threads=threads),
            report=lambda done, total: seen.append(os.environ.get("TOKENIZERS_PARALLELISM")),
        )
    assert list(dict.fromkeys(seen)) == [None, "false", "true"]
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert os.environ["RAYON_NUM_THREADS"] == "3"


def test_progress_counts_the_chunks_of_this_rank(source, tmp_path):
    tokenizer = byte_tokenizer()
    work = plan_preparation(source, tmp_path / "d.h5", tokenizer, PrepareSettings(200))
    seen = []
    tokenize_chunks(
        work, tokenizer, PreparingRanks(1, 3), report=lambda *counts: seen.append(counts)
    )
    total = len(range(1, len(work.chunks), 3))
    assert seen == [(n, total) for n in range(1, total + 1)]


def prepare_peak(path, tmp_path):
    """Return the MiB of anonymous memory that preparing a file takes at most."""
    result = subprocess.run(
        [sys.executable, "-c", WATCH_MEMORY, str(path), str(tmp_path / "d.h5")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (tmp_path / "d.h5").unlink()
    return float(result.stdout)


NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@NEEDS_PROC
def test_memory_of_preparing_chats_does_not_grow_with_the_file(tmp_path):
    line = json.dumps(chat("why? " * 40, "because " * 200)) + "\n"
    path = tmp_path / "raw.jsonl"
    path.write_text(line * (10 * 1024 * 1024 // len(line)))
    assert prepare_peak(path, tmp_path) < 90, "MiB for 10 MiB of text, a token per byte"


@NEEDS_PROC
@pytest.mark.full
def test_memory_of_preparing_one_text_does_not_grow_with_it(tmp_path):
    path, peaks = tmp_path / "raw.txt", []
    for num_mib in (10, 30):
        path.write_text("some words of a line\n" * (num_mib * 1024 * 1024 // 21))
        peaks.append(prepare_peak(path, tmp_path))
    print(f"\nof 10 and 30 MiB of text, a token per byte: {peaks} MiB")
    assert peaks[1] - peaks[0] < 5
    assert peaks[1] < 100
