"""Runs drawn at random, cut into starts on any layouts: the losses of one start on one process.

And the losses of stock transformers, peft and AdamW. HPC_TUNE_DRAWS=N draws N runs in the soak,
HPC_TUNE_FIRST_DRAW=S begins with another seed; a seed that fails is named, and tried alone by
``HPC_TUNE_DRAWS=1 HPC_TUNE_FIRST_DRAW=SEED``.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_tune.config.load import load_config
from tests.support.random_runs import Draw, Start, draw, draw_mixed, write
from tests.support.stock_run import stock_losses
from tests.support.training import SMALL, Ended, launch_runs, losses, rows

pytest.importorskip("deepspeed")

FIXED = range(12)
NUM_DRAWS = int(os.environ.get("HPC_TUNE_DRAWS", "300"))
FIRST = int(os.environ.get("HPC_TUNE_FIRST_DRAW", "1000"))
TOGETHER = 20  # draws of one batch of launches: their folders are removed after it
TOLERANCE = 1e-4  # relative: AdamW makes much of the rounding of little gradients
OF_NORMS = 2e-3
COMMON = [word for word in SMALL if word.startswith("run.")]
PLAIN = Start(1, (), None)


@dataclass
class Trial:
    """A draw that is being tried, and what was found."""

    one: Draw
    folder: Path
    words: list[str]
    is_over: bool = False
    refusals: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def job(self, name: str, start: Start):
        words = [*COMMON, *self.words, *self.one.overrides, *start.overrides]
        words.append(f"run.dir={self.folder / name}")
        return {"overrides": words, "stop_after": start.stop_after}


def try_out(seeds, folder, drawn=draw):
    """Train the draws of ``seeds`` in every way; return what was found of each."""
    trials = []
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        one = drawn(seed)
        trials.append(Trial(one, place, write(one, place)))
    alone = launch_runs(1, [t.job("alone", PLAIN) for t in trials], folder)
    whole = [t for t, ended in zip(trials, alone, strict=True) if _has_ended(t, PLAIN, ended)]
    for number in range(max((len(t.one.starts) for t in whole), default=0)):
        _next_starts(whole, {t.one.seed: t.one.starts[number : number + 1] for t in whole}, folder)
    # What a refused start has left undone is done by one process.
    _next_starts(whole, {t.one.seed: (PLAIN,) for t in whole}, folder)
    for trial in whole:
        if not trial.faults:
            trial.faults += _differences(trial)
    return trials


def _next_starts(trials, starts, folder):
    """Do one more start of each trial that is not over, all of as many ranks in one launch."""
    due = [(t, *starts[t.one.seed]) for t in trials if not t.is_over and starts[t.one.seed]]
    for num_ranks in sorted({start.num_ranks for _, start in due}):
        of_these = [(t, start) for t, start in due if start.num_ranks == num_ranks]
        jobs = [t.job("run", start) for t, start in of_these]
        for (trial, start), ended in zip(
            of_these, launch_runs(num_ranks, jobs, folder), strict=True
        ):
            trial.is_over = _has_ended(trial, start, ended) or bool(trial.faults)


def _has_ended(trial: Trial, start: Start, ended: Ended) -> bool:
    """Return whether the run is trained to its end; note what was refused and what failed."""
    if ended.code == 2 and "Traceback" not in ended.output:
        said = [line for line in ended.output.splitlines() if line.startswith("error")]
        trial.refusals.append(f"{' '.join(start.overrides)}: {(said or [ended.output[-500:]])[0]}")
    elif ended.code not in (0, 75) or (ended.code == 75 and start.stop_after is None):
        trial.faults.append(f"{start} ended with {ended.code}:\n{ended.output[-3000:]}")
    return ended.code == 0


def _differences(trial: Trial) -> list[str]:
    """Compare the run of several starts with the one alone; a plain one with stock parts too."""
    alone, run = trial.folder / "alone", trial.folder / "run"
    found = []
    for key, tolerance in (("loss", TOLERANCE), ("grad_norm", OF_NORMS), ("eval_loss", TOLERANCE)):
        found += _gaps(f"{key} of the starts", rows(run, key), rows(alone, key), tolerance)
    words = trial.job("alone", PLAIN)["overrides"]
    if "tune.dropout=0.1" not in words and not trial.one.sources:
        model = trial.folder / "model"
        stock = dict(enumerate(stock_losses(load_config(None, words), alone, model), 1))
        for key, at, tolerance in (("loss", 0, TOLERANCE), ("grad_norm", 1, OF_NORMS)):
            expected = {step: both[at] for step, both in stock.items()}
            found += _gaps(f"stock {key}", rows(alone, key), expected, tolerance)
    losses(run)  # each step once
    return found


def _gaps(name, got, expected, tolerance):
    if got.keys() != expected.keys():
        return [f"{name}: steps {list(got)} instead of {list(expected)}"]
    gaps = {s: abs(got[s] - expected[s]) / max(abs(expected[s]), 1e-2) for s in got}
    worst = max(gaps, key=gaps.__getitem__, default=None)
    if worst is None or gaps[worst] <= tolerance:  # a NaN is a gap
        return []
    return [f"{name}: {got[worst]} instead of {expected[worst]} in step {worst}"]


def check(trials):
    """Fail if one went wrong; print the draw and what happened, and what was refused."""
    for trial in trials:
        for said in trial.refusals:
            print(f"seed {trial.one.seed} refused: {said}")
        for fault in trial.faults:
            print(f"{trial.one}\n    {fault}")
    assert [trial.one.seed for trial in trials if trial.faults] == []


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_dozen_draws_give_the_losses_of_one_start_and_of_stock_tools(tmp_path):
    trials = try_out(FIXED, tmp_path)
    check(trials)
    assert sum(not t.refusals for t in trials) >= 6


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_draws_of_sources_preferences_and_experts_give_the_losses_of_one_start(tmp_path):
    trials = try_out(range(6), tmp_path, draw_mixed)
    check(trials)
    assert sum(not t.refusals for t in trials) >= 3


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("drawn", [draw, draw_mixed])
def test_many_draws_give_the_losses_of_one_start_and_of_stock_tools(tmp_path, drawn):
    trials = []
    for first in range(FIRST, FIRST + NUM_DRAWS, TOGETHER):
        folder = tmp_path / str(first)
        folder.mkdir()
        seeds = range(first, min(first + TOGETHER, FIRST + NUM_DRAWS))
        trials += try_out(seeds, folder, drawn)
        print(f"{len(trials)} draws, {sum(bool(t.faults) for t in trials)} wrong", flush=True)
    check(trials)
