"""Training runs for the parts of tools/gpu_check.py: many of them in one process.

    python tools/gpu_jobs.py JOBS.json RESULTS FIRST

JOBS.json is a list of jobs. The process trains each of them, from number FIRST on, as ``python -m
hpc_tune`` would, and appends its exit code to RESULTS. A job that crashes ends the process;
``Launch`` then continues with the next job in another process.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve()
# Trains builtin:tiny for a few seconds.
SMALL_SETTINGS = (
    "data.path=builtin:pydocs:heldout",
    "data.eval_path=null",
    "run.tensorboard=false",
    "run.report=false",
    "optim.warmup_steps=1",
)


@dataclass(frozen=True)
class Job:
    """A run by its settings. ``taken``: actions of the governor that are in effect from its start.
    ``levels``: host memory levels told to its governor, step by step, as in ``faults.Faults``.
    """

    name: str
    settings: tuple[str, ...]
    taken: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()


class Launch:
    """Jobs of one process, one after the other; ``look`` restarts it after a crash."""

    def __init__(self, name: str, jobs: Sequence[Job], folder: Path) -> None:
        """Start the first job. Runs are in ``folder``, below their names."""
        self.jobs, self._folder = list(jobs), folder
        self._file, self._results = folder / f"{name}.json", folder / f"{name}.results"
        self._results.write_text("", encoding="utf-8")
        self._file.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        self.codes: list[int] = []
        self._process = self._start()

    @property
    def is_over(self) -> bool:
        """Whether all jobs have ended."""
        return len(self.codes) == len(self.jobs)

    def look(self) -> None:
        """Read new exit codes; if a job has ended its process, continue after it in a new one."""
        code = self._process.poll()
        new = self._results.read_text(encoding="utf-8").split()[len(self.codes) :]
        self.codes += map(int, new)
        if code is not None and not self.is_over:
            self.codes.append(code or 1)
            with self._results.open("a", encoding="utf-8") as file:
                file.write(f"{code or 1}\n")
            if not self.is_over:
                self._process = self._start()

    def end(self) -> None:
        """Kill the process if jobs are left."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        words = [str(self._file), str(self._results), str(len(self.codes))]
        return subprocess.Popen([sys.executable, str(PROGRAM), *words], cwd=self._folder)


def job_of(fields: Mapping[str, Any]) -> Job:
    """Return the job that JSON ``fields`` describe."""
    words = (tuple(fields[key]) for key in ("settings", "taken", "levels"))
    return Job(fields["name"], *words)


def run_of(folder: Path, name: str) -> Path:
    """Return the run directory of a job."""
    return folder / name.replace(", ", "-").replace(" ", "-")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows that a run wrote about its steps."""
    try:
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [row for row in map(json.loads, text.splitlines()) if "loss" in row]


def losses_of(run_dir: Path) -> list[float]:
    """Return a run's losses by step."""
    return [row["loss"] for row in rows_of(run_dir)]


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind."""
    try:
        text = (run_dir / "events.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [event for event in map(json.loads, text.splitlines()) if event["kind"] == kind]


def outcome_of(run_dir: Path) -> dict[str, Any]:
    """Return outcome.json, or an empty dict if there is none."""
    try:
        found: dict[str, Any] = json.loads((run_dir / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def gap_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two loss curves; infinite if their lengths differ."""
    if len(one) != len(other) or not one:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def train(job: Job, folder: Path) -> int:
    """Do one job; return its exit code."""
    from hpc_tune.config.load import load_config
    from hpc_tune.faults import Faults
    from hpc_tune.rundir.outcome import stopped_outcome, write_outcome
    from hpc_tune.train.run import run

    run_dir, left = run_of(folder, job.name), list(job.levels)
    if job.taken:  # as left by a run that had taken them
        run_dir.mkdir(parents=True, exist_ok=True)
        write_outcome(
            stopped_outcome("to begin with them", None, {"governor": list(job.taken)}), run_dir
        )

    def level(seen: str) -> str:
        return (left.pop(0) if len(left) > 1 else left[0]) if left else seen

    config = load_config(None, [*job.settings, f"run.dir={run_dir}"])
    on_host = bool(job.taken or job.levels)
    return run(config, faults=Faults(level=level, offloads_without_gpu=on_host))


def main() -> None:
    """Do the remaining jobs."""
    file, results, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for fields in json.loads(file.read_text(encoding="utf-8"))[first:]:
        job = job_of(fields)
        print(f"== {job.name}", flush=True)
        code = train(job, file.parent)
        with results.open("a", encoding="utf-8") as out:
            out.write(f"{code}\n")


if __name__ == "__main__":
    main()
