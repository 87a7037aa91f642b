"""What somebody else may have put into a file, a setting, a port or the environment: each is tried.

Data and models are downloaded, run directories are shared, ports and logs are open to a cluster.
"""

import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file

from hpc_tune import cli
from hpc_tune.checkpoint import store
from hpc_tune.checkpoint.locate import locate
from hpc_tune.cluster.slurm import render
from hpc_tune.config.load import load_config, mask_secrets
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.data.prepare import PrepareSettings, PreparingRanks, prepare_data
from hpc_tune.errors import CheckpointError, ConfigError, DataError
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.language import read_config
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.weights import index_model_directory
from hpc_tune.report.page import write_report
from hpc_tune.safe_yaml import load_yaml
from hpc_tune.world import json_channel
from hpc_tune.world.json_channel import StarChannel
from hpc_tune.world.rendezvous import local_addresses
from tests.support.data import byte_tokenizer, chat, write_jsonl
from tests.support.ranks import HANG_S, rank_environment, run_ranks
from tests.support.training import SMALL, give_manifest
from tests.unit.world.test_world_rendezvous import on_threads, world_of

ROOT = Path(__file__).parents[3]


class Evil:
    """Makes the file ``ran`` where a pickle of it is loaded."""

    def __init__(self, ran):
        self._ran = str(ran)

    def __reduce__(self):
        return Path.touch, (Path(self._ran),)


@pytest.fixture
def ran(tmp_path):
    """The file that exists once code of somebody else has run."""
    file = tmp_path / "ran"
    yield file
    assert not file.exists(), "code of somebody else has run"


@pytest.fixture
def model(tmp_path):
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_no_code_of_ours_reads_a_pickle_from_a_disk():
    loads = (
        r"\b(torch\.load|pickle\.loads?|joblib\.load|allow_pickle=True|np\.load\((?!.*allow_pi))"
    )
    code = [*(ROOT / "hpc_tune").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    assert not [file.name for file in code if re.search(loads, file.read_text(encoding="utf-8"))]


def test_weights_and_adapters_that_are_pickles_are_refused_unread(tmp_path, ran):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(DataError, match=r"only \.bin \(pickle\) weights"):
        index_model_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(DataError, match="not a whole safetensors file"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("is_member", [True, False])
def test_a_pickle_among_the_parts_that_prepare_left_is_refused_unread(tmp_path, ran, is_member):
    """Its folder may be on a file system that others write to."""
    source, replaced = write_jsonl(tmp_path / "d.jsonl", [chat("Hi?", "Yes.")]), []

    def plant(what, work):
        found = work()
        for part in tmp_path.glob(".out.h5.*.parts/*.part"):
            with part.open("wb") as file:
                if is_member:
                    np.savez(file, **{"facts.json": np.array([Evil(ran)], dtype=object)})
                else:
                    pickle.dump(Evil(ran), file)
            replaced.append(part)
        return found

    with pytest.raises(DataError, match=r"\.part is damaged"):
        prepare_data(
            str(source),
            tmp_path / "out.h5",
            byte_tokenizer(),
            PrepareSettings(64),
            PreparingRanks(run_and_agree=plant),
        )
    assert replaced


REMOTE = """
import pathlib, transformers
pathlib.Path({ran!r}).touch()
class Config(transformers.PretrainedConfig):
    model_type = "evil"
class Tokenizer(transformers.PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def remote(model, ran, monkeypatch):
    """A model directory with code in it, and a user who says yes to all that asks."""
    (model / "evil.py").write_text(REMOTE.format(ran=str(ran)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return model


def test_code_of_a_model_directory_is_not_run_and_that_is_said(remote):
    change(remote / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(DataError, match="no code of a model directory is run"):
        read_config(remote)


def test_code_of_a_tokenizer_is_not_run_and_that_is_said(remote):
    named = {"AutoTokenizer": [None, "evil.Tokenizer"]}
    change(remote / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=named)
    with pytest.raises(DataError, match="no code of a model directory is run"):
        load_tokenizer(remote)


def test_code_beside_a_model_that_transformers_knows_is_left_alone(remote):
    change(remote / "config.json", auto_map={"AutoConfig": "evil.Config"})
    assert type(read_config(remote)).__name__ == "LlamaConfig"


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_kernel_of_the_hub_that_a_config_names_is_not_fetched_and_run(model, key):
    change(model / "config.json", **{key: "somebody/kernel"})
    with pytest.raises(DataError, match=f"{key} is somebody/kernel, code of the Hugging Face hub"):
        read_config(model)


OBJECT = "!!python/object/apply:os.system ['touch {ran}']"


def test_no_yaml_that_we_read_makes_an_object_of_python(tmp_path, ran):
    text = OBJECT.format(ran=ran)
    file, folder = tmp_path / "c.yaml", tmp_path / "data"
    file.write_text(f"run:\n  name: {text}\n")
    with pytest.raises(ConfigError, match="not valid YAML: could not determine a constructor"):
        load_config(str(file))
    with pytest.raises(ConfigError, match="cannot be applied"):
        load_config(None, [f"run.name={text}"])
    file.write_text(f"model_name_or_path: {text}\nstage: sft\n")
    assert cli.main(["convert", str(file)]) == 2
    folder.mkdir()
    write_jsonl(folder / "d.jsonl", [chat("Hi?", "Yes.")])
    (folder / "README.md").write_text(f"---\nconfigs: {text}\n---\n")
    prepare_data(str(folder), tmp_path / "out.h5", byte_tokenizer(), PrepareSettings(64))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(f"run:\n  name: {text}\n")
    write_report([run])


def bomb(levels):
    """Return YAML of a few lines that stands for 10 ** levels values."""
    rows = ["a0: &a0 [x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels + 1)]
    return "\n".join(rows)


@pytest.mark.parametrize("text", [bomb(9), "&a [*a]", "a: &a {b: *a}"])
def test_yaml_whose_aliases_stand_for_more_than_a_machine_holds_is_refused(text):
    with pytest.raises(ValueError, match="over 100,000 values"):
        load_yaml(text)
    assert len(load_yaml(bomb(3))["a3"]) == 10


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 9999, marks=pytest.mark.full),
        *("{a: " * 9999, "- " * 9999, "a: [" * 40 + "]" * 40),
    ],
)
def test_yaml_that_is_nested_too_deeply_is_refused(text):
    with pytest.raises(ValueError, match="nested in more than|expected|not allowed"):
        load_yaml(text)


OUTSIDE = ["../secret", "/etc/passwd", "a/../../secret"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_weights_does_not_lead_out_of_its_folder(tmp_path, name):
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match="not in this folder"):
        index_model_directory(folder)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_does_not_lead_out_of_its_checkpoint(tmp_path, name):
    body = {"format": store.FORMAT, "files": {name: {"bytes": 1, "sha256": "0"}}, "state": {}}
    manifest = body | {"sha256": store._hash_of(body)}
    (tmp_path / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="which is not in the checkpoint"):
        store.verify_checkpoint(tmp_path)


def test_a_run_of_somebody_else_does_not_export_a_file_of_mine_as_its_template(tmp_path):
    (tmp_path / "id_rsa").write_text("my key")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    give_manifest(checkpoint, f"data.chat_template={tmp_path / 'id_rsa'}")
    with pytest.raises(ConfigError, match=r"the run's copy of it, .*/run/chat_template\.jinja"):
        locate(tmp_path / "run")


NASTY = [
    "a b",
    "$(touch {ran})",
    "`touch {ran}`",
    "'; touch {ran} #",
    '"; touch {ran} "',
    "\ntouch {ran}\n",
]
TEXTS = [name for name, field in SlurmConfig.model_fields.items() if "str" in str(field.annotation)]
LINES_OF_SBATCH = ("account", "partition", "qos", "job_name", "output")


@pytest.fixture
def cluster(tmp_path, ran):
    """The commands of a cluster: they print their arguments, and run in an empty folder."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (bin / "python").chmod(0o755)
    env = {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    env["BASH_FUNC_module%%"] = "() { :; }"
    return env


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("name", TEXTS)
def test_no_field_of_slurm_can_bring_a_command_into_the_batch_script(cluster, ran, name, text):
    text = text.format(ran=ran)
    value = [text] if name in ("modules", "binds") else text
    if name in ("memory", "time"):  # which have a form of their own
        with pytest.raises(ValidationError, match=f"{name}\n.*Slurm takes"):
            SlurmConfig(**{name: value})
        return
    if name == "options":
        with pytest.raises(ValidationError, match="options\n.*is not an sbatch option"):
            SlurmConfig(options=[f"--constraint={text}"])
        return
    others = {"image": "i.sif"} if name == "binds" else {}
    wanted, words = SlurmConfig(**{name: value}, **others), [text, f"run.name={text}"]
    if name in LINES_OF_SBATCH or (name in ("launch", "container") and text.count("'") == 1):
        with pytest.raises(ConfigError, match=f"slurm.{name}="):
            render(wanted, words, ran.parent)
        return
    script = render(wanted, words, ran.parent)
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    file = ran.parent / f"./{text}"
    if name in ("env_file", "venv"):
        file = file / "bin/activate" if name == "venv" else file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    done = subprocess.run(
        ["bash"], input=script.encode(), env=cluster, capture_output=True, check=True
    )
    told = done.stdout.decode().split("\0")[:-1]
    assert told[-2:] == words
    if name in ("image", "binds"):
        assert any(text in word for word in shlex.split(told[4]))
    if name == "launch":
        assert shlex.split(told[4]) == shlex.split(text)


@pytest.mark.parametrize("field", ["launch", "container"])
def test_a_launcher_that_is_no_words_of_a_command_is_refused_before_the_job_waits(field):
    with pytest.raises(ConfigError, match="the words of a shell command: No closing quotation"):
        render(SlurmConfig(**{field: "srun 'x"}), [], Path("/"))


def test_a_null_character_which_no_script_can_hold_is_refused():
    with pytest.raises(ConfigError, match="null character"):
        render(SlurmConfig(), ["run.name=a\0b"], Path("/"))


def test_no_setting_of_a_pbs_job_is_run_by_the_shell_or_taken_for_names_of_files(
    cluster, tmp_path, ran
):
    here = tmp_path / "here"
    (here / "env/bin").mkdir(parents=True)
    (here / "env/bin/activate").touch()
    (here / "run.name=x").touch()
    words = [f"a=$(touch${{IFS}}{ran})", f"b=`touch${{IFS}}{ran}`", f"c=;touch<{ran}", "run.name=*"]
    given = {
        "PBS_O_WORKDIR": str(here),
        "PBS_NODEFILE": "/dev/null",
        "PBS_JOBID": f"$(touch {ran})",
    }
    given |= {"SETTINGS": " ".join(words), "HPC_TUNE_VENV": "env", "SCRATCH": "/s"}
    script = str(ROOT / "pbs" / "70b_lora.pbs")
    done = subprocess.run(["bash", script], env=cluster | given, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1][-4:] == words, done.stderr


TOKEN = "hf_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3"
SECRETS = [
    ("my-wandb-key-0123", {"WANDB_API_KEY": "my-wandb-key-0123"}),
    ("https://me:pass0word@host/x", {}),
    ("mpirun -x HF_TOKEN=pass0word", {}),
    ("https://host/x?access_token=pass0word", {}),
    (f"x {TOKEN}", {}),
]


@pytest.mark.parametrize(("text", "environ"), SECRETS)
def test_a_secret_in_a_setting_is_refused_and_not_repeated(monkeypatch, capsys, text, environ):
    """Settings are written into run directories, checkpoints, cards and reports."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for setting in (f"run.name={text}", f"run.tags=[a, '{text}']", f"slurm.launch={text}"):
        assert cli.main(["submit", "--dry-run", setting]) == 2
        said = capsys.readouterr().err
        assert "it contains a secret" in said
        assert not [part for part in ("pass0word", "0123", TOKEN) if part in said]


@pytest.mark.parametrize(("text", "environ"), SECRETS)
def test_a_secret_is_masked_where_a_command_is_recorded(text, environ):
    masked = mask_secrets(text, environ)
    assert "***" in masked
    assert not [part for part in ("pass0word", "0123", TOKEN) if part in masked]


@pytest.mark.parametrize(
    "text",
    ["runs/a-token-model", "data/token=gpt2/x.jsonl", "ssh://git@host/x", "TOKENIZERS=1", "a:b@c"],
)
def test_what_only_looks_like_a_secret_is_none(text):
    assert mask_secrets(text, {"TOKENIZERS_PARALLELISM": text, "HF_TOKEN": "short"}) == text
    load_config(None, [f"run.name='{text}'"])


@pytest.mark.full
def test_no_file_and_no_line_of_a_run_has_a_token_of_its_environment(tmp_path):
    """In the environment of the job, and in the command that starts its ranks."""
    hidden = {"WANDB_API_KEY": "w" + "0123456789" * 4, "HF_TOKEN": TOKEN}
    launch = f"env HF_TOKEN={TOKEN}"
    words = ["supervise", "--launch", launch, "--python", sys.executable, *SMALL]
    words += [f"run.dir={tmp_path / 'run'}", "run.report=true", "run.tensorboard=true"]
    words += ["train.max_steps=2", f"data.cache={tmp_path / 'run' / 'cache'}"]
    environment = {**rank_environment(1), "WANDB_API_KEY": hidden["WANDB_API_KEY"]}
    done = run_ranks([sys.executable, "-m", "hpc_tune", *words], environment, HANG_S)
    assert done.returncode == 0, done.stderr
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {"report.html", "starts.jsonl", "events.jsonl"} <= {file.name for file in files}
    told = [done.stdout.encode(), done.stderr.encode(), *(file.read_bytes() for file in files)]
    assert not [name for name, value in hidden.items() if any(value.encode() in t for t in told)]


def test_what_a_run_says_of_itself_is_text_in_its_report_and_no_script(tmp_path):
    """A report is mailed, and opened by somebody else's browser."""
    script = "<script>alert(1)</script>"
    said = {"time": 1.0, "step": 1, "kind": "warning", "message": script}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(said)}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_s": 1.0, "time": 2.0}\n')
    settings = {"run": {"name": script, "tags": [script]}, script: {script: script}}
    (tmp_path / "config.resolved.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "outcome.json").write_text(json.dumps({"status": "failed", "reason": script}))
    page = Path(write_report([tmp_path])).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert script not in page


def test_ranks_meet_at_the_interface_that_is_named_and_at_no_other():
    ips = [a.ip for a in local_addresses() if ":" not in a.ip and not a.ip.startswith("127.")]
    if not ips:
        pytest.skip("this host has loopback alone")
    own = json_channel._own_addresses([ips[0], "no.such.host.invalid", ips[0], "127.0.0.1"])
    assert own == [ips[0]]
    (only,) = json_channel._listen(own, [0])
    with only as listener:
        address, port = listener.getsockname()[:2]
        assert address == ips[0]
        socket.create_connection((address, port), timeout=5).close()


STRANGERS = [
    b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    json_channel._encode_message({"token": "guessed", "rank": 1}),
    json_channel._encode_message([1]),
    json_channel._encode_message({"rank": 1}),
    b"\xff" * 64,
    b"\0\0\0\2{]",
]


@pytest.mark.parametrize("greeting", STRANGERS)
def test_a_stranger_on_the_port_of_the_rendezvous_is_turned_away(greeting):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    turned_away = threading.Event()

    def rank(number):
        if number == 1:
            turned_away.wait(60)
        star = StarChannel(world_of(number, 2), ["127.0.0.1"], "ours", 60, [port])
        told = star.all_gather(number)
        star.close()
        return told

    def stranger():
        while True:
            try:
                peer = socket.create_connection(("127.0.0.1", port), timeout=60)
                break
            except ConnectionRefusedError:
                continue
        with peer:
            peer.sendall(greeting)
            try:
                answer = peer.recv(100)
            except ConnectionResetError:
                answer = b""
        turned_away.set()
        return answer

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stranger)
        assert on_threads(2, rank) == [[0, 1], [0, 1]]
        assert answer.result() == b""
