"""The configurations that come with the repository."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.config_json import resolve_model_directory
from hpc_tune.model.language import read_language_config
from hpc_tune.plan.resolve import check_layout, choose_layout, open_shape
from hpc_tune.step.size import ModelSize, measure_model_size

FOLDER = Path(__file__).parents[3] / "configs"
SHAPED = {
    "llama3_8b_lora": "llama3-8b",
    "llama3_70b_lora": "llama3-70b",
    "llama3_8b_128k_lora": "llama3-8b",
    "llama3_70b_64k_lora": "llama3-70b",
    "qwen2.5_32b_256k_lora": "qwen2.5-32b",
    "llama3_405b_lora": "llama3-405b",
    "qwen3_32b_lora": "qwen3-32b",
    "phi3_mini_lora": "phi3-mini",
    "falcon_7b_lora": "falcon-7b",
    "qwen3_30b_a3b_lora": "qwen3-30b-a3b",
    "gpt_oss_120b_lora": "gpt-oss-120b",
    "deepseek_v3_lora": "deepseek-v3",
}


@pytest.fixture(autouse=True)
def _scratch(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_configuration_is_valid_and_says_how_to_launch_it(file):
    load_config(str(file))
    header = file.read_text().split("\nmodel:")[0].replace("\n#", " ")
    command = re.sub(r"\s+", " ", header)
    assert re.search(rf"mpirun -np \d+ .*python -m hpc_tune --config configs/{file.name}", command)


@pytest.mark.parametrize("name", SHAPED)
def test_the_layout_fits_the_launch_line_and_the_model(name):
    file = FOLDER / f"{name}.yaml"
    config = load_config(str(file))
    found = re.search(r"mpirun -np (\d+)", file.read_text())
    layout, _ = choose_layout(config.parallel, int(found[1]), ModelSize(1, 1, 2, 4), 80 << 30)
    assert layout.size == int(found[1])
    shape = read_language_config(resolve_model_directory(f"shape:{SHAPED[name]}"))
    check_layout(layout, config.parallel, shape)
    stretched = (config.model.rope_scaling or {}).get("factor", 1)
    assert config.data.seq_len <= stretched * shape.max_position_embeddings
    assert config.batch.global_size % layout.data_parallel_size == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPED)
def test_a_configuration_fits_the_machine_of_its_launch_line(name):
    """By the plan command itself: GPUs of 80 GiB, 8 to a node as far as they go, 1 TiB of host."""
    file = FOLDER / f"{name}.yaml"
    ranks = int(re.search(r"mpirun -np (\d+)", file.read_text())[1])
    words = ["plan", "--config", str(file), f"model.path=shape:{SHAPED[name]}", "--json"]
    words += ["--nodes", str(max(1, ranks // 8)), "--gpus-per-node", str(min(8, ranks))]
    words += ["--device-memory", "80GiB", "--host-memory", "1024GiB"]
    done = subprocess.run(
        [sys.executable, "-m", "hpc_tune", *words], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    planned = json.loads(done.stdout)
    assert planned["fits"]
    node_bytes = max(phase["node_bytes"] for phase in planned["phases"])
    for script in (FOLDER.parent / "slurm").glob("*.sh"):
        if f"configs/{file.name}" in script.read_text():
            told, asked = memory_of(script)
            assert told == pytest.approx(node_bytes, abs=1 << 30)
            assert node_bytes < asked < 8 * node_bytes + weight_bytes(name)


def memory_of(script):
    """Return the bytes of a node that a script says its plan takes, and those that it asks for."""
    text = script.read_text()
    told, asked = re.search(r"plan takes (\d+) GiB", text), re.search(r"--mem=(\d+)G\b", text)
    return int(told[1]) << 30, int(asked[1]) << 30


def weight_bytes(name):
    """Return the bytes of a model's files."""
    with open_shape(f"shape:{SHAPED[name]}", torch.bfloat16, TuneConfig(method="lora"), 0) as shape:
        return measure_model_size(shape.build().module).frozen_bytes


@pytest.mark.parametrize("name", ["llama3_8b_lora", "llama3_70b_lora"])
def test_a_script_asks_for_the_pages_of_the_weights_that_a_nodes_ranks_read(name):
    """They count as the job's: a node would read them again and again with less."""
    script = FOLDER.parent / "slurm" / f"{name.removeprefix('llama3_')}.sh"
    assert f"configs/{name}.yaml" in script.read_text()
    told, asked = memory_of(script)
    assert told + weight_bytes(name) < asked
