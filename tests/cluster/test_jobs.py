"""Jobs that cannot work, jobs in an array, and jobs of ``submit``, on a real Slurm of two nodes."""

import re
import subprocess
import sys

import h5py
import pytest

from hpc_tune.data.hdf5_format import append_checksum
from hpc_tune.data.writer import HASHED_DATASETS, combine_hashes, make_hash
from tests.support.jobs import SETTINGS, STEPS, Job, clone, starts, wait_for_step
from tests.support.ranks import HANG_S
from tests.support.training import losses, outcome, train

pytestmark = pytest.mark.full


def test_a_job_that_cannot_work_is_started_a_few_times_and_not_for_ever(cluster, tmp_path):
    missing = Job(cluster, tmp_path / "missing", "tiny_cpu.sh", "data.path=/nowhere.jsonl")
    damaged = tmp_path / "damaged.h5"
    done = train(["prepare", "--out", str(damaged), *SETTINGS])
    assert done.returncode == 0, done.stderr
    with h5py.File(damaged, "r+") as file:
        file["tokens"][::900] = 60000  # of no word, and all that is told of it is right
        hashes = []
        for name in HASHED_DATASETS:
            hashes.append(make_hash())
            first = 1 if name == "documents/offsets" else 0  # where each document ends
            hashes[-1].update(file[name][first:].tobytes())
        file.attrs["content"] = combine_hashes(hashes, has_labels=False)
    append_checksum(damaged)
    crashing = Job(cluster, tmp_path / "crashing", "tiny_cpu.sh", f"data.path={damaged}")

    said = missing.wait()
    assert (said["JobState"], said["ExitCode"], said["Restarts"]) == ("FAILED", "2:0", "0")
    assert "there is no data at /nowhere.jsonl" in missing.text
    assert "give up: restarting would not help: there is no data at" in missing.text
    [refused] = starts(missing.run_dir)
    assert (refused["exit_code"], refused["left_out"]) == (2, {})

    said = crashing.wait()
    assert (said["JobState"], said["ExitCode"], said["Restarts"]) == ("FAILED", "1:0", "0")
    assert "IndexError: index out of range" in crashing.text
    assert "2 crashes in a row made no progress beyond step" in crashing.text
    assert 2 <= len(starts(crashing.run_dir)) <= 4
    assert outcome(crashing.run_dir)["status"] == "failed"


def test_each_job_of_an_array_has_its_own_run_and_comes_back_alone(cluster, tmp_path, monkeypatch):
    here = clone(tmp_path / "clone")
    monkeypatch.setitem(cluster.environment, "SCRATCH", str(tmp_path))
    monkeypatch.setitem(cluster.environment, "HPC_TUNE_SWEEP", "tune.rank")
    monkeypatch.setitem(cluster.environment, "HPC_TUNE_VALUES", "2 4 8")
    words = [*SETTINGS, "model.path=builtin:tiny", "run.device=cpu", "parallel.replicate=1"]
    options = ["--array=0-1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2G"]
    number = cluster.submit(*options, "slurm/sweep.sh", *words, cwd=here)
    sweep = here / "runs" / f"sweep-{number}"
    first, second = f"{number}_0", f"{number}_1"
    outputs = [here / f"hpc_tune-sweep-{task}.out" for task in (first, second)]
    wait_for_step(cluster, first, sweep / "rank-2", outputs[0], 6)
    cluster.run("scancel", "-s", "USR1", "-b", first)  # as its time limit does
    wait_for_step(cluster, first, sweep / "rank-2", outputs[0], 12)
    cluster.run("scontrol", "requeue", first)  # Slurm kills it
    for task, output, restarts in zip((first, second), outputs, ("2", "0"), strict=True):
        said = cluster.wait(task)
        assert (said["JobState"], said["Restarts"]) == ("COMPLETED", restarts), output.read_text()
        assert "2 tasks for 3 values of tune.rank" in output.read_text()
    runs = sorted(sweep.iterdir())
    assert [run.name for run in runs] == ["rank-2", "rank-4"]
    assert {outcome(run)["status"] for run in runs} == {"done"}
    assert [len(losses(run)) for run in runs] == [STEPS, STEPS]
    page = tmp_path / "sweep.html"
    done = train(["report", *map(str, runs), "--out", str(page)])
    assert done.returncode == 0, done.stderr
    assert re.search(r"tune\.rank\D+2\D+4\D", page.read_text())


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
