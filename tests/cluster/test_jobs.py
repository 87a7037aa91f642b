"""Jobs that cannot work, jobs in an array, and jobs of ``submit``, on a real Slurm of two nodes."""

import re
import subprocess
import sys

import h5py
import pytest

from hpc_tune.data.content import HASHED, joined, new_hash
from hpc_tune.data.seal import seal
from tests.support.jobs import SETTINGS, Job, clone, starts
from tests.support.ranks import HANG_S, rank_environment
from tests.support.training import outcome, train

pytestmark = pytest.mark.full


def test_a_job_that_cannot_work_is_started_a_few_times_and_not_for_ever(cluster, tmp_path):
    missing = Job(cluster, tmp_path / "missing", "tiny_cpu.sh", "data.path=/nowhere.jsonl")
    damaged = tmp_path / "damaged.h5"
    done = train(["prepare", "--out", str(damaged), *SETTINGS])
    assert done.returncode == 0, done.stderr
    with h5py.File(damaged, "r+") as file:
        file["tokens"][::900] = 60000  # of no word, and all that is told of it is right
        hashes = []
        for name in HASHED:
            hashes.append(new_hash())
            first = 1 if name == "documents/offsets" else 0  # where each document ends
            hashes[-1].update(file[name][first:].tobytes())
        file.attrs["content"] = joined(hashes)
    seal(damaged)
    crashing = Job(cluster, tmp_path / "crashing", "tiny_cpu.sh", f"data.path={damaged}")

    said = missing.wait()
    assert (said["JobState"], said["ExitCode"], said["Restarts"]) == ("FAILED", "2:0", "0")
    assert "there is no data at /nowhere.jsonl" in missing.text
    assert "given up: the start was refused" in missing.text
    assert not (missing.run_dir / "starts.jsonl").exists(), "what was refused leaves nothing"

    said = crashing.wait()
    assert (said["JobState"], said["ExitCode"], said["Restarts"]) == ("FAILED", "1:0", "0")
    assert "IndexError: index out of range" in crashing.text
    assert "2 crashes in a row made no progress beyond step" in crashing.text
    assert 2 <= len(starts(crashing.run_dir)) <= 4
    assert outcome(crashing.run_dir)["status"] == "failed"


def test_each_job_of_an_array_has_its_own_run(cluster, tmp_path, monkeypatch):
    here = clone(tmp_path / "clone")
    monkeypatch.setitem(cluster.environment, "SCRATCH", str(tmp_path))
    words = [*SETTINGS, "model.path=builtin:tiny", "run.device=cpu", "parallel.replicate=1"]
    options = ["--array=0-1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2G"]
    number = cluster.submit(*options, "slurm/sweep.sh", *words, cwd=here)
    for task in (0, 1):
        said = cluster.wait(f"{number}_{task}")
        output = (here / f"hpc_tune-sweep-{number}_{task}.out").read_text()
        assert said["JobState"] == "COMPLETED", output
    sweep = here / "runs" / f"sweep-{number}"
    runs = sorted(sweep.iterdir())
    assert [run.name for run in runs] == ["lr-1e-4", "lr-5e-5"]
    assert {outcome(run)["status"] for run in runs} == {"done"}
    argv = [sys.executable, "-m", "hpc_tune", "inspect", str(runs[0]), "--against", str(runs[1])]
    told = subprocess.run(argv, env=rank_environment(1), capture_output=True, text=True).stdout
    assert f"optim.lr: 0.0001 in {runs[0]}, 5e-05 in {runs[1]}" in told


def test_submit_gives_slurm_a_script_that_runs(cluster, tmp_path):
    part = [
        "slurm.nodes=2",
        "slurm.tasks_per_node=1",
        "slurm.memory=2G",
        f"slurm.venv={sys.prefix}",
    ]
    part += ["slurm.job_name=mine", "slurm.launch=srun --overcommit"]
    words = [*SETTINGS, *part, "run.device=cpu", "run.dir=run with a space"]
    argv = [sys.executable, "-m", "hpc_tune", "submit", *words]
    done = subprocess.run(
        argv, env=cluster.environment, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    number = re.search(r"submitted job (\d+),", done.stdout)[1]
    said = cluster.wait(number)
    assert said["JobState"] == "COMPLETED", (tmp_path / f"mine-{number}.out").read_text()
    assert outcome(tmp_path / "run with a space")["status"] == "done"
