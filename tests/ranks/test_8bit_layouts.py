"""Moments in 8 bits: one loss where shards have whole blocks, and what another layout changes."""

import shutil

import pytest
import torch

from hpc_tune.model.weights import index_checkpoint
from tests.support.training import SMALL, STEPS, losses, many_runs, worst_gap

pytest.importorskip("torchao")

SETTINGS = [
    *SMALL,
    "tune.method=full",
    "optim.name=adamw_8bit",
    "optim.lr=1e-3",
    "optim.weight_decay=0.1",
    "batch.micro_size=1",
    "train.deterministic=true",
]
STOP = 5


def job(folder, name, *more, stop_after=None):
    words = [*SETTINGS, f"run.dir={folder / name}", f"data.cache={folder}", *more]
    return {"overrides": words, "stop_after": stop_after}


def weights(run_dir):
    """The tensors of the last checkpoint, optimizer state included, by name."""
    index, found = index_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:08d}"), {}
    for name, shape in index.shapes.items():
        found[name] = torch.empty(shape)
        index.fill(found[name], name)
    return found


@pytest.mark.full
def test_shards_give_what_one_rank_gives_and_a_resume_goes_on_in_the_same_bits(tmp_path):
    shard, cut = "parallel.shard=2", {"stop_after": STOP}
    jobs = [job(tmp_path, "shard", shard), job(tmp_path, "cut", shard, **cut)]
    assert many_runs(2, jobs, tmp_path) == [0, 75]
    shutil.copytree(tmp_path / "cut", tmp_path / "on one")
    assert many_runs(2, [job(tmp_path, "cut", shard)], tmp_path) == [0]
    assert many_runs(1, [job(tmp_path, n) for n in ("one", "on one")], tmp_path) == [0, 0]
    one, sharded = losses(tmp_path / "one"), losses(tmp_path / "shard")
    assert losses(tmp_path / "cut") == sharded
    again, wanted = weights(tmp_path / "cut"), weights(tmp_path / "shard")
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())
    gaps = {n: worst_gap(losses(tmp_path / n), one) for n in ("shard", "on one")}
    print(f"8 bits: {gaps}")
    assert max(gaps.values()) < 1e-5, gaps


@pytest.mark.full
def test_slices_that_cut_blocks_and_another_adamw_change_losses_a_little(tmp_path):
    cut = {"stop_after": STOP}
    layouts = {name: [f"parallel.{name}=2"] for name in ("replicate", "pipeline", "tensor")}
    jobs = [job(tmp_path, name, *axis) for name, axis in layouts.items()]
    jobs += [job(tmp_path, "cut tensor", "parallel.tensor=2", **cut)]
    assert many_runs(2, jobs, tmp_path) == [0, 0, 0, 75]
    jobs = [
        job(tmp_path, "one"),
        job(tmp_path, "fp32", "optim.name=adamw"),
        job(tmp_path, "from fp32", "optim.name=adamw", **cut),
        job(tmp_path, "to fp32", **cut),
        job(tmp_path, "from fp32"),
        job(tmp_path, "to fp32", "optim.name=adamw"),
        job(tmp_path, "cut tensor"),
    ]
    assert many_runs(1, jobs, tmp_path) == [0, 0, 75, 75, 0, 0, 0]
    one = losses(tmp_path / "one")
    names = [*layouts, "cut tensor", "fp32", "from fp32", "to fp32"]
    gaps = {name: worst_gap(losses(tmp_path / name), one) for name in names}
    print(f"8 bits: {gaps}")
    assert max(gaps["replicate"], gaps["pipeline"]) < 1e-5, gaps
    assert all(1e-6 < gaps[name] < 1e-3 for name in names[2:]), gaps
