"""One loss, whatever the number of ranks; and no loss lost by a stop."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.support.training import SMALL, STEPS, events, losses, many_runs, rows, worst_gap

METHODS = {
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "lora": ["tune.method=lora", "optim.lr=1e-2"],
}
CONTRACT = {
    *("step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "tokens_per_s", "mfu"),
    *("step_s", "data_s", "comm_s", "device_util", "host_bytes", "host_limit_bytes"),
    "host_ranks_bytes",
    *("device_bytes", "device_limit_bytes", "samples_seen"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def job(shared, name, *overrides, stop_after=None):
    words = [*SMALL, "train.deterministic=true", f"run.dir={shared / name}"]
    return {"overrides": [*words, *overrides], "stop_after": stop_after}


@pytest.fixture(scope="module")
def references(shared):
    """Uninterrupted runs of one rank, which all others are compared with."""
    jobs = [job(shared, f"one-{m}", *overrides) for m, overrides in METHODS.items()]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {m: losses(shared / f"one-{m}") for m in METHODS}


@pytest.mark.full
def test_losses_do_not_depend_on_the_number_of_ranks(shared, references):
    """3 ranks do not divide the 8 rows of a step. (tests/ranks/test_layouts.py has the layouts.)"""
    layouts = ["full replicate", "full shard", "lora shard"]
    jobs = []
    for layout in layouts:
        method, axis = layout.split()
        jobs.append(job(shared, f"3-{layout}", *METHODS[method], f"parallel.{axis}=3"))
    assert many_runs(3, jobs, shared) == [0] * len(jobs)
    gaps = {
        layout: worst_gap(losses(shared / f"3-{layout}"), references[layout.split()[0]])
        for layout in layouts
    }
    assert max(gaps.values()) < 1e-5, gaps


def test_training_reduces_the_loss(references):
    for method, curve in references.items():
        assert curve[-1] < curve[0] - 0.3, method


@pytest.mark.parametrize(
    ("n", "axis"),
    [pytest.param(*row, marks=pytest.mark.full) for row in ((1, "replicate"), (2, "shard"))],
)
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
    adapter = hashes_of(shared / f"whole-{n}")
    for stop in stops:
        run_dir = shared / f"stopped-{n}-{stop}"
        assert losses(run_dir) == whole, f"stopped after {stop}"
        assert hashes_of(run_dir) == adapter, f"stopped after {stop}"
        assert [e["step"] for e in events(run_dir, "resume")] == [stop]


def test_metrics_carry_every_field_of_the_contract(shared, references):
    lines = (shared / "one-lora" / "metrics.jsonl").read_text().splitlines()
    first = next(row for row in map(json.loads, lines) if "loss" in row)
    assert set(first) >= CONTRACT
    assert rows(shared / "one-lora", "samples_seen")[STEPS] == 8 * STEPS


def hashes_of(run_dir: Path) -> list[str]:
    """Hash the tensors of a run's last checkpoint."""
    last = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    files = sorted(last.rglob("*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
