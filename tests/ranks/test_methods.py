"""What is put around a block or done to its weights changes memory and speed, and no loss."""

import itertools
import json
import shutil

import pytest
import torch

from hpc_tune.model.builtin import write_tiny_model
from tests.support.random_model import write_random_llama
from tests.support.ranks import mpirun, python, rank_environment, run_ranks
from tests.support.training import SMALL, losses, many_runs, worst_gap

RECOMPUTE = ("none", "selective", "full")
ACCUMULATION = (1, 2, 4)
SMALL_BLOCK = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("methods")


METHODS = {
    **{m: [f"tune.method={m}"] for m in ("lora", "qlora", "dora")},
    "float8": ["tune.method=lora", "tune.base_dtype=fp8"],
}


def settings(shared, name, *overrides):
    compiled = f"run.compile_cache={shared / 'compiled'}"
    words = [*SMALL, "train.max_steps=6", "optim.lr=5e-3", compiled]
    return [*words, f"run.dir={shared / name}", *overrides]


def gaps(shared, n, runs, reference):
    """Do runs on ``n`` ranks; return how far each one's losses are from the reference's."""
    jobs = [{"overrides": settings(shared, f"{n} {name}", *o)} for name, o in runs.items()]
    assert many_runs(n, jobs, shared, timeout=1500.0) == [0] * len(jobs)
    return {name: worst_gap(losses(shared / f"{n} {name}"), reference) for name in runs}


@pytest.fixture(scope="module")
def references(shared):
    """One rank, one micro-batch per step, nothing recomputed, nothing compiled."""
    jobs = [
        {"overrides": settings(shared, m, *words, "batch.micro_size=8")}
        for m, words in METHODS.items()
    ]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {m: losses(shared / m) for m in METHODS}


def variant(n, recompute, accumulation, compiled=False):
    rows_per_rank = 8 // n
    return [
        "tune.method=lora",
        f"parallel.shard={n}",
        f"parallel.recompute={recompute}",
        f"batch.micro_size={rows_per_rank // accumulation}",
        f"train.compile={compiled}",
    ]


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
def test_recompute_and_accumulation_change_no_loss(shared, references, n):
    runs = {
        f"{recompute} {accumulation}": variant(n, recompute, accumulation)
        for recompute, accumulation in zip(RECOMPUTE, (4, 2, 4), strict=True)
    }
    found = gaps(shared, n, runs, references["lora"])
    assert max(found.values()) < 1e-5, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [1, 2])
def test_recompute_accumulation_and_compilation_change_no_loss(shared, references, n):
    runs = {
        " ".join(map(str, choice)): variant(n, *choice)
        for choice in itertools.product(RECOMPUTE, ACCUMULATION, (False, True))
    }
    found = gaps(shared, n, runs, references["lora"])
    print(n, found)
    assert max(found.values()) < 1e-5, found


# A base that is cut, one that is whole under DeepSpeed, and magnitudes of shards.
SAMPLE = {
    "qlora sharded": ["parallel.shard=2", "parallel.reshard=block", "parallel.recompute=full"],
    "qlora zero2": ["parallel.zero_stage=2"],
    "dora sharded": ["parallel.shard=2"],
    "float8 sharded": ["parallel.shard=2", "parallel.recompute=selective"],
}
OTHERS = {
    "qlora replicated": ["parallel.replicate=2", "batch.micro_size=4"],
    "qlora pipeline": ["parallel.pipeline=2", "batch.micro_size=2"],
    "dora zero2": ["parallel.zero_stage=2"],
    "float8 zero2": ["parallel.zero_stage=2"],
    "float8 replicated": ["parallel.replicate=2", "batch.micro_size=4"],
    "float8 pipeline": ["parallel.pipeline=2", "batch.micro_size=2"],
    "float8 compiled": ["parallel.shard=2", "train.compile=true"],
}


@pytest.mark.parametrize(
    "runs", [SAMPLE, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["a sample", "the others"]
)
def test_packed_bases_and_learned_magnitudes_give_the_same_losses_in_every_layout(
    shared, references, runs
):
    jobs = []
    for name, overrides in runs.items():
        words = METHODS[name.split()[0]]
        jobs.append({"overrides": settings(shared, name, *words, *overrides)})
    assert many_runs(2, jobs, shared) == [0] * len(jobs)
    found = {n: worst_gap(losses(shared / n), references[n.split()[0]]) for n in runs}
    assert max(found.values()) < 1e-5, found
    assert worst_gap(references["lora"], references["qlora"]) > 1e-3, "nothing was rounded"
    assert 1e-4 < abs(references["lora"][0] - references["float8"][0]) < 1e-2


@pytest.mark.full
def test_an_adapter_to_begin_with_is_the_same_in_every_layout(shared, references):
    start = f"tune.init_from={shared / 'lora' / 'export' / 'adapter'}"
    runs = {"replicate": "replicate=2", "shard": "shard=2", "zero 3": "zero_stage=3"}
    jobs = [
        {"overrides": settings(shared, f"from {n}", "tune.method=lora", start, f"parallel.{axis}")}
        for n, axis in runs.items()
    ]
    assert many_runs(2, jobs, shared) == [0] * len(jobs)
    curves = [losses(shared / f"from {name}") for name in runs]
    assert max(worst_gap(curve, curves[0]) for curve in curves) < 1e-5
    assert curves[0][0] < 0.9 * references["lora"][0]


def compile_cost(overrides, n=1):
    """Return what compiling cost each rank of a run."""
    program = ["-m", "tests.support.compile_cost", *overrides]
    if n == 1:
        done = run_ranks([*python(), *program], rank_environment(1), 600.0)
    else:
        done = mpirun(n, program, timeout=600.0)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
def test_compiled_losses_are_those_of_eager_and_ragged_lengths_and_a_second_start_compile_nothing(
    shared, references
):
    """One document per row: lengths differ from step to step. Two graphs of a block, forward and
    backward, and one of the loss, which another run here may have compiled before.
    """
    ragged = ["tune.method=lora", "data.packing=false", "data.seq_len=512", "batch.micro_size=8"]
    ragged += ["train.max_steps=4"]
    first = ["checkpoint.resume=none", *ragged]
    [cold] = compile_cost(settings(shared, "cold", *first))
    assert (cold["graphs"], cold["compiled"] + cold["reused"]) == (2, 3), cold
    assert cold["compiled"] >= 2, cold
    sharded = [*first, "parallel.shard=2", "batch.micro_size=4"]
    two = compile_cost(settings(shared, "again", *sharded), 2)
    assert [(c["graphs"], c["compiled"], c["reused"]) for c in two] == [(2, 0, 3)] * 2, two
    found = gaps(shared, 1, {"eager": ragged}, losses(shared / "cold"))
    found["two ranks"] = worst_gap(losses(shared / "again"), losses(shared / "cold"))
    assert max(found.values()) < 1e-5, found


def model_of(folder, layers):
    """Write a small Llama of so many blocks, with the tokenizer of builtin:tiny."""
    directory = folder / f"model-{layers}"
    if not directory.exists():
        write_random_llama(directory, 1, torch.float32, num_hidden_layers=layers, **SMALL_BLOCK)
        write_tiny_model(folder / "tiny")
        for file in (folder / "tiny").glob("tokenizer*"):
            shutil.copy(file, directory)
    return directory


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_32_blocks_compile_in_1_3_times_the_time_of_4(shared, tmp_path):
    costs = {}
    for start, layers in itertools.product(("first", "second"), (4, 32)):
        model = model_of(tmp_path, layers)
        costs[start, layers] = compile_cost(
            settings(
                tmp_path,
                f"{start}-{layers}",
                f"model.path={model}",
                "tune.method=full",
                f"run.compile_cache={tmp_path / str(layers)}",
                "batch.micro_size=8",
            )
        )[0]
    print(costs)
    assert costs["first", 32]["seconds"] < 1.3 * costs["first", 4]["seconds"]
    for layers in (4, 32):
        assert costs["second", layers]["compiled"] == 0
        assert costs["second", layers]["seconds"] < costs["first", layers]["seconds"]
