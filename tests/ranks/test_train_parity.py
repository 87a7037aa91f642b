"""One loss, whatever the number of ranks and the layout; and no loss lost by a stop."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.support.training import events, losses, many_runs, outcome, rows, worst_gap

STEPS = 10
SMALL = [
    "data.seq_len=128",
    "data.eval_path=null",
    "batch.global_size=8",
    f"train.max_steps={STEPS}",
    "run.tensorboard=false",
    "run.threads=1",
    "train.deterministic=true",
    "optim.warmup_steps=2",
]
# Each run prepares builtin:pydocs into its own folder unless they share one.
METHODS = {
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "lora": ["tune.method=lora", "optim.lr=1e-2"],
    "dora": ["tune.method=dora", "optim.lr=1e-2"],
}
CONTRACT = {
    *("step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "tokens_per_s", "mfu"),
    *("step_s", "data_s", "comm_s", "device_util", "host_bytes", "host_limit_bytes"),
    *("device_bytes", "device_limit_bytes", "samples_seen"),
}
EVALUATE = ["data.eval_path=builtin:pydocs:heldout", "train.eval_rows=7"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def job(shared, name, *overrides, stop_after=None):
    return {
        "overrides": [*SMALL, f"run.dir={shared / name}", f"data.cache={shared}", *overrides],
        "stop_after": stop_after,
    }


@pytest.fixture(scope="module")
def references(shared):
    """Uninterrupted runs of one rank, which all others are compared with."""
    jobs = [job(shared, f"one-{m}", *overrides, *EVALUATE) for m, overrides in METHODS.items()]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {m: losses(shared / f"one-{m}") for m in METHODS}


@pytest.mark.parametrize(
    ("n", "layouts"),
    [
        (2, ["full replicate", "full shard", "lora replicate", "lora shard", "dora shard"]),
        (3, ["full replicate", "full shard", "lora shard"]),
    ],
)
def test_losses_do_not_depend_on_the_number_of_ranks_or_the_layout(shared, references, n, layouts):
    jobs = []
    for layout in layouts:
        method, axis = layout.split()
        jobs.append(job(shared, f"{n}-{layout}", *METHODS[method], f"parallel.{axis}={n}"))
    assert many_runs(n, jobs, shared) == [0] * len(jobs)
    gaps = {
        layout: worst_gap(losses(shared / f"{n}-{layout}"), references[layout.split()[0]])
        for layout in layouts
    }
    assert max(gaps.values()) < 1e-5, gaps


def test_recomputing_and_micro_batches_change_no_loss_and_held_out_loss_is_that_of_one_rank(
    shared, references
):
    """7 held-out rows on 2 ranks: one rank ends with an empty micro-batch."""
    lora = [*METHODS["lora"], *EVALUATE]
    jobs = [
        job(shared, "sharded", *lora, "parallel.shard=2", "parallel.recompute=full"),
        job(shared, "cut", *lora, "parallel.replicate=2", "batch.micro_size=1"),
    ]
    assert many_runs(2, jobs, shared) == [0, 0]
    held_out = rows(shared / "one-lora", "eval_loss")
    assert set(held_out) == {0, STEPS}
    for name in ("sharded", "cut"):
        assert worst_gap(losses(shared / name), references["lora"]) < 1e-5, name
        assert rows(shared / name, "eval_loss") == pytest.approx(held_out, abs=1e-5)


def test_training_reduces_the_loss(references):
    for method, curve in references.items():
        assert curve[-1] < curve[0] - 0.3, method


@pytest.mark.parametrize(("n", "axis"), [(1, "replicate"), (2, "shard")])
def test_a_run_stopped_at_every_step_goes_on_with_bitwise_the_same_losses(shared, n, axis):
    layout = [*METHODS["lora"], f"parallel.{axis}={n}", "tune.dropout=0.1"]
    stops = range(1, STEPS) if n == 1 else (1, 4, 7)
    jobs = [job(shared, f"whole-{n}", *layout)]
    for stop in stops:
        jobs.append(job(shared, f"stopped-{n}-{stop}", *layout, stop_after=stop))
        jobs.append(job(shared, f"stopped-{n}-{stop}", *layout))
    codes = many_runs(n, jobs, shared)
    assert codes == [0] + [75, 0] * len(stops)
    whole = losses(shared / f"whole-{n}")
    adapter = hash_of(shared / f"whole-{n}")
    for stop in stops:
        run_dir = shared / f"stopped-{n}-{stop}"
        assert losses(run_dir) == whole, f"stopped after {stop}"
        assert hash_of(run_dir) == adapter, f"stopped after {stop}"
        assert [e["step"] for e in events(run_dir, "resume")] == [stop]


def test_a_run_goes_on_at_another_world_size_and_layout_with_the_same_losses(shared, references):
    def leg(n, axis, stop_after):
        layout = [*METHODS["lora"], f"parallel.{axis}={n}"]
        return many_runs(n, [job(shared, "travelled", *layout, stop_after=stop_after)], shared)

    assert leg(2, "replicate", 3) == [75]
    assert outcome(shared / "travelled")["status"] == "stopped"
    assert leg(3, "shard", 3) == [75]
    assert leg(1, "replicate", None) == [0]
    assert outcome(shared / "travelled")["status"] == "done"
    assert worst_gap(losses(shared / "travelled"), references["lora"]) < 1e-5


def test_full_fine_tuning_goes_on_from_sharded_to_replicated(shared, references):
    sharded = [*METHODS["full"], "parallel.shard=2"]
    assert many_runs(2, [job(shared, "full", *sharded, stop_after=4)], shared) == [75]
    checkpoint = shared / "full" / "checkpoints" / "step-00000004"
    parts = sorted(checkpoint.glob("rank-*.safetensors"))
    assert len(parts) == 2
    sizes = [os.path.getsize(p) for p in parts]
    assert max(sizes) < 1.2 * min(sizes), "each rank writes its own half"
    assert many_runs(1, [job(shared, "full", *METHODS["full"])], shared) == [0]
    assert worst_gap(losses(shared / "full"), references["full"]) < 1e-5


def test_metrics_carry_every_field_of_the_contract(shared, references):
    lines = (shared / "one-lora" / "metrics.jsonl").read_text().splitlines()
    first = next(row for row in map(json.loads, lines) if "loss" in row)
    assert set(first) >= CONTRACT
    assert rows(shared / "one-lora", "samples_seen")[STEPS] == 8 * STEPS


def hash_of(run_dir: Path) -> str:
    """Hash the tensors of a run's last checkpoint."""
    last = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    return hashlib.sha256((last / "rank-00000.safetensors").read_bytes()).hexdigest()
