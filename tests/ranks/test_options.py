"""Options of training give the same losses in every layout, engine and size of micro-batch."""

import itertools

import pytest

from tests.support.training import SMALL, losses, many_runs, worst_gap

pytest.importorskip("deepspeed")

OPTIONS = {
    "plain": [],
    "lora b": ["optim.lora_b_ratio=4"],
    "neftune": ["tune.neftune_alpha=50"],
    "neftune unpacked": ["tune.neftune_alpha=50", "data.packing=false"],
    "rslora": ["tune.rslora=true"],
}
LAYOUTS = {
    "replicate": ["parallel.replicate=2"],
    "shard": ["parallel.shard=2", "batch.micro_size=2"],
    "tensor": ["parallel.tensor=2", "batch.micro_size=4"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=2"],
    "zero 2": ["parallel.zero_stage=2"],
    "zero 3": ["parallel.zero_stage=3", "batch.micro_size=2"],
}
SAMPLE = [("neftune", "tensor"), ("lora b", "pipeline"), ("neftune unpacked", "zero 3")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


def job(shared, name, *overrides):
    where = f"run.dir={shared / name}"
    words = [*SMALL, "train.max_steps=6", "tune.method=lora", "optim.lr=2e-3"]
    return {"overrides": [*words, where, *overrides]}


@pytest.fixture(scope="module")
def references(shared):
    """One rank, one micro-batch a step."""
    jobs = [job(shared, name, "batch.micro_size=8", *o) for name, o in OPTIONS.items()]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {name: losses(shared / name) for name in OPTIONS}


def gaps_of(shared, references, names):
    """Train each option in its layout on two ranks and return the worst gaps to one rank."""
    runs = [job(shared, f"{o} {axes}", *OPTIONS[o], *LAYOUTS[axes]) for o, axes in names]
    assert many_runs(2, runs, shared, timeout=900.0) == [0] * len(runs)
    return {
        (option, layout): worst_gap(losses(shared / f"{option} {layout}"), references[option])
        for option, layout in names
    }


@pytest.mark.full
def test_options_give_the_same_losses_in_a_layout(shared, references):
    found = gaps_of(shared, references, SAMPLE)
    assert max(found.values()) < 1e-5, found


@pytest.mark.full
def test_options_give_the_same_losses_in_every_layout(shared, references):
    every = itertools.product(OPTIONS, LAYOUTS)
    others = [names for names in every if names[0] != "plain" and names not in SAMPLE]
    found = gaps_of(shared, references, others)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("option", [name for name, o in OPTIONS.items() if len(o) == 1])
def test_an_option_changes_the_losses(references, option):
    assert worst_gap(references[option], references["plain"]) > 1e-4
