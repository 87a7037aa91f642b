"""Each wrong input gives one clear message, the right exit code, and nothing half-written."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from hpc_tune.model.builtin import write_tiny_model
from tests.support.ranks import HANG_S, ROOT, find_mpirun, python, rank_environment, run_ranks
from tests.support.training import TRAIN, many_runs, train

BASE = [
    "tune.method=full",
    "batch.global_size=16",
    "data.eval_path=null",
    "data.seq_len=64",
    "train.max_steps=2",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
]
CHAT = {"prompt": "Say one.", "completion": "one"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="module")
def a_run(tmp_path_factory, model):
    """A finished run of one checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    overrides = [*BASE, f"run.dir={folder / 'run'}", f"model.path={model}"]
    overrides.append("data.path=builtin:pydocs:heldout")
    assert many_runs(1, [{"overrides": overrides}], folder) == [0]
    return folder / "run"


SAID_BY_A_RANK = r"^(?:error on rank \d+ on \S+|rank \d+ on \S+|hpc_tune): "


def refused(done, *words, code=2):
    """The output of one refusal: exit code, no traceback, one message of one rank, in it each word.

    A word may be twice in a message, as a path that is cited is.
    """
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    _, *messages = re.split(SAID_BY_A_RANK, done.stderr, flags=re.MULTILINE)
    assert len(messages) == 1, done.stderr
    for word in words:
        assert word in messages[0], done.stderr


def no_partial_files(run_dir):
    left = [p for p in run_dir.rglob("*") if p.name.endswith(".tmp") or ".parts" in p.name]
    assert [p for p in left if p.is_file()] == []
    assert list(run_dir.rglob("*.h5")) == []


def test_an_unknown_key_and_a_wrong_type_are_both_named_once_by_16_ranks(tmp_path):
    done = train(["trian.max_steps=3", "optim.lr=fast", f"run.dir={tmp_path / 'run'}"], n=16)
    refused(done, "did you mean train", "optim.lr='fast'")
    assert not (tmp_path / "run").exists()


def test_a_missing_data_file_is_said_once_by_4_ranks(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(CHAT))
    done = train(
        [*BASE, f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'trian.jsonl'}"], n=4
    )
    refused(done, "trian.jsonl", "train.jsonl")
    no_partial_files(tmp_path / "run")


def test_missing_data_is_found_before_links_are_measured(tmp_path):
    run = [*BASE, f"run.dir={tmp_path / 'run'}", "parallel.layout=auto"]
    done = train([*run, f"data.path={tmp_path / 'none.jsonl'}"], n=2)
    refused(done, "none.jsonl")
    assert "measuring links" not in done.stdout + done.stderr


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_data_is_refused(tmp_path, content):
    (tmp_path / "d.jsonl").write_text(content)
    done = train([*BASE, f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'd.jsonl'}"])
    refused(done, "d.jsonl")
    no_partial_files(tmp_path / "run")


def test_a_line_that_is_not_json_is_named_by_file_and_line(tmp_path):
    lines = [json.dumps(CHAT)] * 40
    lines[29] = '{"prompt": "Say'
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    done = train([*BASE, f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'd.jsonl'}"], n=2)
    refused(done, "d.jsonl", "30")
    assert re.search(r"d\.jsonl\D{1,12}30\b", done.stderr), done.stderr
    no_partial_files(tmp_path / "run")


def test_data_prepared_with_another_tokenizer_is_refused(tmp_path, a_run, model):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    text = (other / "chat_template.jinja").read_text().replace("<|start|>", "<|pad|>")
    (other / "chat_template.jinja").write_text(text)
    prepared = next((a_run / "data").glob("*.h5"))
    done = train(
        [*BASE, f"run.dir={tmp_path / 'run'}", f"model.path={other}", f"data.path={prepared}"]
    )
    refused(done, "tokenizer", str(prepared))


@pytest.mark.parametrize("kept", [0.5, 0.0001])
def test_truncated_safetensors_are_refused_by_name(tmp_path, model, kept):
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    file = damaged / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * kept))
    done = train([*BASE, f"run.dir={tmp_path / 'run'}", f"model.path={damaged}"])
    refused(done, "model.safetensors", "copy it again")


def test_a_checkpoint_from_another_model_is_refused(tmp_path, a_run):
    directory = tmp_path / "wider"
    write_tiny_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = 1234.0
    config["rope_parameters"] = {"rope_theta": 1234.0, "rope_type": "default"}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = a_run / "checkpoints" / "step-00000002"
    done = train(
        [
            *BASE,
            "data.path=builtin:pydocs:heldout",
            f"run.dir={tmp_path / 'run'}",
            f"model.path={directory}",
            f"checkpoint.resume={checkpoint}",
        ]
    )
    refused(done, "it is not the checkpoint's model")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def two_ranks(folder, *words_of_each, cold=False):
    """Train with two ranks, each with words of its own."""
    argv = [find_mpirun()]
    for words in words_of_each:
        argv += ["-np", "1", *python(cold), *TRAIN, *BASE, f"run.dir={folder}", *words, ":"]
    return run_ranks(argv[:-1], rank_environment(2), HANG_S)


def test_ranks_with_different_settings_are_refused_by_field(tmp_path):
    done = two_ranks(tmp_path / "run", ["optim.lr=1e-6"], ["optim.lr=0.1", "train.seed=7"])
    refused(done, "optim.lr=0.1 on rank 1, 1e-06 on rank 0", "train.seed=7 on rank 1")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_what_is_wrong_on_one_rank_alone_is_said(tmp_path):
    done = two_ranks(tmp_path / "run", [], ["data.cache=$NOT_ON_THIS_NODE/data"], cold=True)
    refused(done, "rank 1: ", "NOT_ON_THIS_NODE is not set in the environment")


def test_a_folder_that_is_no_checkpoint_is_refused_before_data_is_read(tmp_path):
    asked = f"checkpoint.resume={tmp_path / 'step-00000007'}"
    done = train([f"run.dir={tmp_path / 'run'}", asked])
    refused(done, asked, "no manifest.json in it", "give auto, none, or a folder")
    no_partial_files(tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.shard=3"], ("parallel.shard",)),
        (["tune.method=lora", "tune.init_from=/etc"], ("tune.init_from=/etc", "adapter_config")),
    ],
    ids=["layout", "adapter"],
)
def test_what_needs_no_data_is_refused_before_they_are_prepared(tmp_path, overrides, words):
    done = train([*BASE, f"run.dir={tmp_path / 'run'}", *overrides])
    refused(done, *words)
    assert "tokenizing" not in done.stderr


def test_a_resume_with_another_seed_or_length_is_refused_with_all_differences(a_run, model):
    before = sorted(p.stat().st_mtime_ns for p in (a_run / "checkpoints").rglob("*"))
    done = train(
        [
            *BASE,
            "data.path=builtin:pydocs:heldout",
            f"run.dir={a_run}",
            f"model.path={model}",
            "train.seed=7",
            "batch.global_size=3",
        ]
    )
    refused(done, "train.seed: 0 in the checkpoint, 7 now", "batch.global_size: 16", code=2)
    assert sorted(p.stat().st_mtime_ns for p in (a_run / "checkpoints").rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a read-only mount")
def test_a_read_only_run_directory_is_refused_before_any_work(tmp_path):
    place = tmp_path / "ro"
    place.mkdir()
    with mounted(place, "size=1m,ro"):
        done = train([*BASE, f"run.dir={place / 'run'}"])
    refused(done, "cannot be written", "ead-only")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small tmpfs")
@pytest.mark.parametrize(
    ("size_kib", "data"),
    [(64, ""), (4500, ""), pytest.param(9000, ":heldout", marks=pytest.mark.full)],
)
def test_a_full_run_directory_ends_the_run_with_one_message(tmp_path, size_kib, data):
    """64 KiB stop the model, 4500 the data, 9000 the first checkpoint."""
    place = tmp_path / "small"
    place.mkdir()
    with mounted(place, f"size={size_kib}k"):
        done = train([*BASE, f"run.dir={place / 'run'}", f"data.path=builtin:pydocs{data}"])
        left = list(place.rglob("step-*"))
    assert done.returncode in (1, 2), done.stderr
    assert "No space left" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [p for p in left if not p.name.endswith(".tmp")] == []


class mounted:
    """A tmpfs on a folder."""

    def __init__(self, place, options):
        self.place, self.options = place, options

    def __enter__(self):
        command = ["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", str(self.place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine does not let root mount a tmpfs")

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", str(self.place)], check=True)


def test_config_errors_come_in_under_a_second_without_torch(tmp_path):
    program = "import sys, hpc_tune.cli as c; print(c.main(['x.y=1']), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(1),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_a_limit_below_what_the_processes_take_is_refused_once(tmp_path):
    done = train([*BASE, f"run.dir={tmp_path / 'run'}", "memory.host_limit=1MB"], n=2)
    refused(done, "before the model is loaded", "977 KiB")


@pytest.mark.full
def test_what_cannot_fit_by_the_plan_is_refused_with_what_would_help(tmp_path):
    wide = ["batch.micro_size=16", "batch.global_size=16", "data.seq_len=512"]
    done = train([*BASE, *wide, f"run.dir={tmp_path / 'run'}", "memory.host_limit=600MiB"])
    refused(done, "this run does not fit into memory", "steady: batch.micro_size=", "--force")
