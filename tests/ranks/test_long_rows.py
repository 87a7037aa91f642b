"""MLPs in pieces of a row give the losses of whole rows, in every layout, method and engine."""

import pytest

from tests.support.training import SMALL, launch_runs, losses, many_runs, worst_gap

pytest.importorskip("deepspeed")

METHODS = ("lora", "full", "qlora", "dora")
LAYOUTS = {
    "shard": ("lora", ["parallel.shard=2"]),
    "shard, block": ("full", ["parallel.shard=2", "parallel.reshard=block"]),
    "shard, not recomputed": ("full", ["parallel.shard=2", "parallel.recompute=none"]),
    "shard, selective": ("lora", ["parallel.shard=2", "parallel.recompute=selective"]),
    "tensor": ("full", ["parallel.tensor=2"]),
    "tensor, lora": ("lora", ["parallel.tensor=2"]),
    "pipeline": ("lora", ["parallel.pipeline=2"]),
    "zero 1": ("full", ["parallel.zero_stage=1"]),
    "zero 2": ("lora", ["parallel.zero_stage=2"]),
}


def job(folder, name, method, row_pieces, *overrides):
    words = [*SMALL, "train.max_steps=3", "batch.global_size=4", "optim.lr=2e-3"]
    words += ["parallel.recompute=full", f"parallel.row_pieces={row_pieces}"]
    return {"overrides": [*words, f"tune.method={method}", f"run.dir={folder / name}", *overrides]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("long-rows")


@pytest.fixture(scope="module")
def references(folder):
    """One rank, rows as a whole."""
    jobs = [job(folder, method, method, 1) for method in METHODS]
    assert many_runs(1, jobs, folder) == [0] * len(jobs)
    return {method: losses(folder / method) for method in METHODS}


@pytest.mark.full
def test_pieces_give_the_losses_of_whole_rows(folder, references):
    jobs = [job(folder, f"{m} in pieces", m, 4) for m in METHODS]
    assert many_runs(1, jobs, folder) == [0] * len(jobs)
    for method in METHODS:
        assert worst_gap(losses(folder / f"{method} in pieces"), references[method]) < 1e-5, method


def test_layouts_of_two_ranks_give_the_same_losses_in_pieces(folder, references):
    jobs = [job(folder, name, method, 4, *words) for name, (method, words) in LAYOUTS.items()]
    ended = launch_runs(2, jobs, folder, timeout=900.0)
    assert [run.code for run in ended] == [0] * len(jobs)
    for name, (method, _) in LAYOUTS.items():
        assert worst_gap(losses(folder / name), references[method]) < 1e-5, name
