"""Options of training give the same losses in every layout, engine and size of micro-batch."""

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


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


def job(shared, name, *overrides):
    where = [f"data.cache={shared}", f"run.dir={shared / name}"]
    return {"overrides": [*SMALL, "tune.method=lora", "optim.lr=2e-3", *where, *overrides]}


@pytest.fixture(scope="module")
def references(shared):
    """One rank, one micro-batch a step."""
    jobs = [job(shared, name, "batch.micro_size=8", *o) for name, o in OPTIONS.items()]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {name: losses(shared / name) for name in OPTIONS}


def test_options_give_the_same_losses_in_every_layout(shared, references):
    runs = {
        (option, layout): job(shared, f"{option} {layout}", *OPTIONS[option], *LAYOUTS[layout])
        for option in OPTIONS
        if option != "plain"
        for layout in LAYOUTS
    }
    assert many_runs(2, list(runs.values()), shared, timeout=900.0) == [0] * len(runs)
    found = {
        names: worst_gap(losses(shared / " ".join(names)), references[names[0]]) for names in runs
    }
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("option", [name for name, o in OPTIONS.items() if len(o) == 1])
def test_an_option_changes_the_losses(references, option):
    assert worst_gap(references[option], references["plain"]) > 1e-4
