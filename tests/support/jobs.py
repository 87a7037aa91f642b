"""Submits the scripts of slurm/ as users do, and follows the jobs and their runs."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import ROOT, find_mpirun, rank_environment
from tests.support.slurm import STILL_THERE, Slurm
from tests.support.training import rows

STEPS = 30
# Trains builtin:tiny for about a second.
SETTINGS = [
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=4",
    "data.path=builtin:pydocs:heldout",
    "data.eval_path=null",
    "data.seq_len=64",
    "batch.global_size=8",
    "tune.method=lora",
    "tune.dropout=0.1",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
    # Both nodes are one machine.
    "memory.governor=off",
]
JOB_S = 240.0


def launch_by(launcher: str) -> str:
    """Return the command that starts four ranks on a machine with fewer cores."""
    if launcher == "srun":
        return "srun --kill-on-bad-exit=1 --overcommit"
    return f"{find_mpirun()} -np 4 --map-by :oversubscribe --bind-to none"


def for_users(cluster: Slurm) -> None:
    """Give the cluster's programs the environment of a user who has installed hpc_tune."""
    cluster.environment |= rank_environment(4)
    cluster.environment["SLURM_CONF"] = str(cluster.folder / "slurm.conf")
    cluster.environment["HPC_TUNE_VENV"] = sys.prefix
    cluster.environment["HPC_TUNE_LAUNCH"] = launch_by("srun")
    # A killed mpirun leaves its session folder; a later one with the same pid would fail on it.
    sessions = cluster.folder / "mpi"
    sessions.mkdir()
    cluster.environment["PRTE_MCA_prte_tmpdir_base"] = str(sessions)


def clone(folder: Path) -> Path:
    """Return a folder to submit from, with all that scripts name by relative paths."""
    folder.mkdir(parents=True)
    for name in ("configs", "slurm", "pbs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl."""
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


class Job:
    """A submitted script, and the run that it keeps going."""

    def __init__(
        self,
        cluster: Slurm,
        folder: Path,
        script: str,
        *words: str,
        launcher: str = "srun",
        options: Sequence[str] = (),
        through: str = "",
    ) -> None:
        """Submit it with settings ``words`` and ``options`` of sbatch.

        ``through`` is a command that the launcher runs Python by, such as a container's.
        """
        self.cluster, self.run_dir, self.output = cluster, folder / "run", folder / "output"
        folder.mkdir(parents=True, exist_ok=True)
        cluster.environment["HPC_TUNE_LAUNCH"] = f"{launch_by(launcher)} {through}".strip()
        words = (*SETTINGS, f"run.dir={self.run_dir}", f"data.cache={folder / 'data'}", *words)
        options = (f"--output={self.output}", f"--chdir={ROOT}", *options)
        self.number = cluster.submit(*options, str(ROOT / "slurm" / script), *words)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done ``step`` steps."""
        wait_for_step(self.cluster, self.number, self.run_dir, self.output, step)

    def signal(self, name: str, *options: str) -> None:
        """Send a signal by scancel: ``-b`` to the batch script alone, ``-f`` to the ranks too."""
        self.cluster.run("scancel", "-s", name, *options, self.number)

    def wait(self) -> dict[str, str]:
        """Wait for the job's end and return what the controller says of it."""
        return self.cluster.wait(self.number, JOB_S)

    @property
    def text(self) -> str:
        """What the job printed in all its starts."""
        return _text(self.output)


def wait_for_step(cluster: Slurm, number: str, run_dir: Path, output: Path, step: int) -> None:
    """Wait until the run of a job, or of one task of an array, has done ``step`` steps."""
    until_s = time.monotonic() + JOB_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            if step in rows(run_dir, "loss"):
                return
        said = cluster.show(number)
        assert said["JobState"] in STILL_THERE, _text(output)
        assert time.monotonic() < until_s, _text(output)
        cluster.hurry(said)
        time.sleep(0.2)


def _text(output: Path) -> str:
    return output.read_text() if output.exists() else "it has printed nothing"


def adapter(run_dir: Path, steps: int = STEPS) -> bytes:
    """Return the bytes of the finished adapter."""
    [file] = sorted((run_dir / "checkpoints").glob(f"step-*{steps}/adapter/*.safetensors"))
    return file.read_bytes()
