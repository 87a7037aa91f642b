import itertools
import json

import pytest

from hpc_tune import cli
from hpc_tune.config.init import (
    DEFAULT_ANSWERS,
    METHODS,
    PlanPreview,
    collect_answers,
    write_config,
)
from hpc_tune.config.load import load_config
from hpc_tune.errors import ConfigError
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks


@pytest.mark.parametrize(
    ("method", "machine"), list(itertools.product(METHODS, ("cpu", "1x1", "1x8", "4x8")))
)
def test_what_it_writes_is_a_configuration_with_the_answers_in_it(tmp_path, method, machine):
    given = DEFAULT_ANSWERS | {"method": method, "machine": machine, "data": "my data/*.jsonl"}
    next_commands = write_config(tmp_path / "mine.yaml", given, 8 << 30)
    config = load_config([str(tmp_path / "mine.yaml")], [])
    assert (config.tune.method, config.data.path) == (method, "my data/*.jsonl")
    assert config.slurm.nodes == (4 if machine == "4x8" else 1)
    assert ("submit" if machine == "4x8" else "train") in next_commands[-1]
    assert ("mpirun -np 8" in next_commands[-1]) == (machine == "1x8")


def test_rows_are_no_longer_than_the_model_allows(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    write_config(
        tmp_path / "mine.yaml", DEFAULT_ANSWERS | {"model": str(tmp_path), "machine": "1x1"}, 1
    )
    assert load_config([str(tmp_path / "mine.yaml")], []).data.seq_len == 2048


def test_on_cpus_a_step_is_small_and_the_plan_is_of_this_machine(tmp_path):
    said = write_config(
        tmp_path / "mine.yaml", DEFAULT_ANSWERS | {"model": str(tmp_path)}, 24 << 30
    )
    config = load_config([str(tmp_path / "mine.yaml")], [])
    assert config.batch.global_size * config.data.seq_len == 8 * 1024
    assert any(line.endswith("--cpu --gpus-per-node 1 --host-memory 24576MiB") for line in said)


def test_what_is_missing_is_asked_for_and_enter_takes_the_default():
    asked = []

    def ask(question):
        asked.append(question)
        return "full" if question.startswith("Method") else ""

    given = collect_answers({"model": "m", "data": None, "machine": None, "method": None}, ask)
    assert given == {"model": "m", "data": "builtin:pydocs", "machine": "cpu", "method": "full"}
    assert len(asked) == 3


def test_without_a_terminal_the_missing_arguments_are_named():
    with pytest.raises(ConfigError, match="--data builtin:pydocs --method lora"):
        collect_answers({"model": "m", "data": None, "machine": "cpu", "method": None}, None)


@pytest.mark.parametrize("machine", ["", "8", "0x8", "2x", "gpu", "2x8x80"])
def test_a_machine_that_cannot_be_read_is_refused(tmp_path, machine):
    with pytest.raises(ConfigError, match="expected cpu, or NODESxGPUS"):
        write_config(tmp_path / "mine.yaml", DEFAULT_ANSWERS | {"machine": machine}, 8 << 30)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_config(tmp_path / "mine.yaml", DEFAULT_ANSWERS, 8 << 30)
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["file/mine.yaml", "none/mine.yaml", f"{'x' * 300}.yaml"])
def test_a_file_that_cannot_be_written_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot be written: "):
        write_config(tmp_path / name, DEFAULT_ANSWERS, 8 << 30)


@pytest.mark.full
def test_plan_accepts_what_init_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--model", "shape:phi3-mini", "--data", "d.jsonl"]
    assert cli.main(["init", *model, "--machine", "1x8", "--method", "lora"]) == 0
    plan = next(line for line in capsys.readouterr().out.splitlines() if " plan " in line)
    assert cli.main(plan.split()[3:]) == 0
    assert "verdict fits" in capsys.readouterr().out


def test_a_plan_sets_the_memory_of_a_node_and_what_is_recomputed(tmp_path):
    given = DEFAULT_ANSWERS | {"machine": "2x8"}
    found = PlanPreview(
        "full", host_gib_per_node=61, device_bytes=70 << 30, device_limit_bytes=80 << 30, fits=True
    )
    write_config(tmp_path / "mine.yaml", given, 8 << 30, lambda file, nodes, gpus: found)
    config = load_config([str(tmp_path / "mine.yaml")], [])
    assert (config.slurm.memory, config.parallel.recompute) == ("61G", "full")
    assert "a GPU needs 70" in (tmp_path / "mine.yaml").read_text()


def test_a_host_of_pbs_alone_gets_the_section_of_pbs(tmp_path, monkeypatch):
    (tmp_path / "qsub").write_text("")
    (tmp_path / "qsub").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--model", "builtin:tiny", "--data", "builtin:pydocs", "--method", "lora"]
    out = tmp_path / "mine.yaml"
    assert cli.main(["init", *words, "--machine", "2x8", "--out", str(out)]) == 0
    config = load_config([str(out)], [])
    assert (config.pbs.nodes, config.pbs.gpus_per_node, config.slurm.is_given) == (2, 8, False)
    assert config.pbs.memory_bytes is not None


@pytest.mark.full
def test_sizes_of_a_new_run_are_those_of_its_plan(tmp_path):
    out = tmp_path / "mine.yaml"
    words = ["--model", "shape:llama3-70b", "--data", "builtin:pydocs", "--method", "lora"]
    words += ["--machine", "2x8", "--out", str(out)]
    command = [*python(cold=True), "-m", "hpc_tune"]
    made = run_ranks([*command, "init", *words], rank_environment(1), HANG_S)
    assert made.returncode == 0, made.stderr
    memory = load_config([str(out)], []).slurm.memory
    planned = run_ranks(
        [*command, "plan", "--json", "--config", str(out)], rank_environment(1), HANG_S
    )
    assert planned.returncode == 0, planned.stdout
    phases = json.loads(planned.stdout)["phases"]
    need = max(phase["node_bytes"] for phase in phases if not phase["optional"])
    assert need < int(memory.removesuffix("G")) << 30 < 1.2 * need + (1 << 30)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("prepared.h5", "prepared.h5"),
        ("[a.jsonl, 2.jsonl]", ["a.jsonl", "2.jsonl"]),
        ("my data/**/*.jsonl", "my data/**/*.jsonl"),
        ("[odd", "[odd"),
    ],
)
def test_data_of_each_form_is_what_a_run_reads_and_holds_out_where_it_can(tmp_path, data, expected):
    out = tmp_path / "mine.yaml"
    write_config(out, DEFAULT_ANSWERS | {"data": data}, 8 << 30)
    config = load_config([str(out)], []).data
    assert config.path == expected
    assert config.eval_path is None
    assert config.eval_fraction == (0.0 if data == "prepared.h5" else 0.02)
