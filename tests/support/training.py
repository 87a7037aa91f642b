"""Starts training runs for the tests and reads what they wrote."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_tune.checkpoint import store
from hpc_tune.config.load import load_config
from tests.support.many_runs import ROW
from tests.support.ranks import HANG_S, mpirun, python, rank_environment, run_ranks

TRAIN = ["-m", "hpc_tune"]
STEPS = 10
# Where tests share prepared data (tests/conftest.py makes the folder).
PREPARED = os.environ.get("HPC_TUNE_TEST_DATA", "null")
# Trains builtin:tiny for a few seconds.
SMALL = [
    "data.seq_len=128",
    "data.eval_path=null",
    "batch.global_size=8",
    f"train.max_steps={STEPS}",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
    "optim.warmup_steps=2",
    f"data.cache={PREPARED}",
]


@dataclass(frozen=True)
class Ended:
    """How one run of a shared launch ended, and what its ranks printed."""

    code: int
    output: str


def launch_runs(
    n: int,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    timeout: float = HANG_S,
    program: str = "tests.support.many_runs",
) -> list[Ended]:
    """Do ``jobs`` (see many_runs.py) on ``n`` ranks of one launch; return how each ended.

    A run that dies ends its launch: the remaining ones continue in another launch.
    """
    file, results = folder / f"jobs-{n}.json", folder / f"results-{n}.jsonl"
    file.write_text(json.dumps(list(jobs)))
    results.write_text("")
    ended: list[Ended] = []
    while len(ended) < len(jobs):
        words = ["-m", program, str(file), str(results), str(len(ended))]
        try:
            done = mpirun(n, words, timeout=timeout)
        except pytest.fail.Exception as hung:
            ended += [Ended(1, f"it hung, or one before it: {hung}")] * (len(jobs) - len(ended))
            return ended
        _, *printed = re.split(rf"^{ROW} \d+$", done.stderr, flags=re.MULTILINE)
        codes = [*map(int, results.read_text().split())][len(ended) :]
        ended += [Ended(*both) for both in zip(codes, printed, strict=False)]
        if len(ended) < len(jobs):
            last = printed[len(codes)] if len(codes) < len(printed) else done.stderr
            ended.append(Ended(done.returncode or 1, last))
            with results.open("a") as out:
                out.write(f"{ended[-1].code}\n")
    return ended


def many_runs(
    n: int,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    timeout: float = HANG_S,
    program: str = "tests.support.many_runs",
) -> list[int]:
    """Return the exit codes of ``jobs`` (see ``launch_runs``); print what failed ones said."""
    ended = launch_runs(n, jobs, folder, timeout, program)
    for number, one in enumerate(ended):
        if one.code not in (0, 75):
            print(f"run {number} of this launch ended with {one.code}:\n{one.output}")
    return [one.code for one in ended]


def train(
    overrides: Sequence[str], n: int | None = None, timeout: float = HANG_S, cold: bool = False
) -> Any:
    """Run ``python -m hpc_tune`` with overrides, alone or on ``n`` ranks of mpirun."""
    if n is not None:
        return mpirun(n, [*TRAIN, *overrides], timeout=timeout, cold=cold)
    return run_ranks([*python(cold), *TRAIN, *overrides], rank_environment(1), timeout)


def rows(run_dir: Path, key: str) -> dict[int, Any]:
    """Return ``key`` by step from metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r[key] for r in map(json.loads, lines) if key in r}


def losses(run_dir: Path) -> list[float]:
    """Return the training losses of a run, by step; each step must be there once."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in found if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), steps
    return [row["loss"] for row in found if "loss" in row]


def worst_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two loss curves of the same length."""
    assert len(one) == len(other)
    assert one
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def give_manifest(checkpoint: Path, *overrides: str, **state: Any) -> None:
    """Turn a folder of tensor files into a checkpoint of a run with ``overrides``."""
    config = load_config(None, overrides).model_dump(mode="json")
    said = {"step": 7, "total_steps": 9, "model_identity": "", "loader": {}, "layout": {}}
    said |= {"micro_size": 1, "config": config} | state
    body = {"format": store.FORMAT, "files": {}, "state": said}
    text = json.dumps(body | {"sha256": store._hash_of(body)})
    (checkpoint / store.MANIFEST).write_text(text)


def worlds_in(stdout: str) -> list[dict[str, Any]]:
    """Return what the ranks of train_and_print_world.py found, by rank."""
    told = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return sorted(told, key=lambda world: world["rank"])


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return outcome.json."""
    return json.loads((run_dir / "outcome.json").read_text())


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
