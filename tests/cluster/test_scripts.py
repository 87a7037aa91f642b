"""The scripts of slurm/ as users submit them, on a real Slurm of two nodes: nobody watches them."""

import contextlib
import sys
import time

import pytest

from tests.support.ranks import ROOT, find_mpirun, rank_environment
from tests.support.slurm import STILL_THERE, slurm
from tests.support.training import events, outcome, rows

STEPS = 30
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
    "run.threads=1",
    # Both nodes are one machine.
    "memory.governor=off",
]
LAUNCHERS = {
    "srun": "srun --kill-on-bad-exit=1 --overcommit",
    "mpirun": f"{find_mpirun()} -np 4 --map-by :oversubscribe --bind-to none",
}
JOB_S = 300.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with slurm(folder, num_nodes=2, limits=False) as cluster:
        cluster.environment |= rank_environment(4)
        cluster.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        cluster.environment["HPC_TUNE_VENV"] = sys.prefix
        yield cluster


class Job:
    """A submitted script, and the run that it keeps going."""

    def __init__(self, cluster, folder, script, *words, launcher="srun", options=()):
        self.cluster, self.run_dir, self.output = cluster, folder / "run", folder / "output"
        folder.mkdir(parents=True, exist_ok=True)
        cluster.environment["HPC_TUNE_LAUNCH"] = LAUNCHERS[launcher]
        words = (*SETTINGS, f"run.dir={self.run_dir}", f"data.cache={folder / 'data'}", *words)
        options = (f"--output={self.output}", f"--chdir={ROOT}", *options)
        self.number = cluster.submit(*options, str(ROOT / "slurm" / script), *words)

    def wait_for_step(self, step, limit_s=JOB_S):
        until_s = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                if step in rows(self.run_dir, "loss"):
                    return
            said = self.cluster.show(self.number)
            assert said["JobState"] in STILL_THERE, self.output.read_text()
            assert time.monotonic() < until_s, self.output.read_text()
            self.cluster.hurry(said)
            time.sleep(0.2)

    def signal(self, *options):
        self.cluster.run("scancel", "-s", "USR1", *options, self.number)

    def wait(self):
        return self.cluster.wait(self.number, JOB_S)


def adapter(run_dir):
    """Return the bytes of the finished adapter."""
    [file] = sorted((run_dir / "checkpoints").glob(f"step-*{STEPS}/adapter/*.safetensors"))
    return file.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The adapter of a run that nothing happened to."""
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), "tiny_cpu.sh")
    assert job.wait()["JobState"] == "COMPLETED", job.output.read_text()
    assert outcome(job.run_dir)["status"] == "done"
    assert "2 nodes" in job.output.read_text() or "node 0/2" in job.output.read_text()
    return adapter(job.run_dir)


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_job_that_is_requeued_and_asked_to_leave_ends_with_the_same_bits(
    cluster, tmp_path, undisturbed, launcher
):
    job = Job(cluster, tmp_path, "tiny_cpu.sh", launcher=launcher)
    job.wait_for_step(6)
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for_step(12)
    job.signal("-b")  # as its time limit does: to the batch script alone
    job.wait_for_step(20)
    job.signal("-f")  # scancel --signal --full: to the ranks as well
    said = job.wait()
    text = job.output.read_text()
    assert said["JobState"] == "COMPLETED", text
    assert outcome(job.run_dir)["status"] == "done"
    assert len(events(job.run_dir, "resume")) == 3
    assert int(said["Restarts"]) == 3
    assert "Traceback" not in text
    assert adapter(job.run_dir) == undisturbed
