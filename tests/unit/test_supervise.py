"""What follows the end of a start, as a table, and the effects around it with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from hpc_tune.rundir import owner
from hpc_tune.rundir.owner import make_owner
from hpc_tune.supervise import StartRecord, classify_ending, decide_next_step

GOOD = StartRecord(0, 10, "stopped", "SIGUSR1", 75, True, "7")


def start(from_step, to_step, status="failed", reason="exited with 1", exit_code=1, asked=False):
    return StartRecord(from_step, to_step, status, reason, exit_code, asked, "7")


CRASH, MEMORY = start(10, 10), start(10, 10, "stopped", "host memory of n1", 75)
TIME = start(10, 10, "stopped", "SIGUSR1", 75, asked=True)
LOST = replace(CRASH, lost_nodes=True)
FEWER = replace(start(10, 10, exit_code=2), missing=1)
# Starts, seconds left, whether the job can be requeued -> what follows.
ROWS = {
    "done": ([start(10, 20, "done", "all steps done", 0)], 5.0, True, "done"),
    "bad config": ([start(0, 0, exit_code=2)], 3600.0, True, "give up"),
    "the time ends": ([GOOD], 60.0, True, "requeue"),
    "asked though there is time: preempted": ([GOOD], 3600.0, True, "requeue"),
    "the time ends and nobody requeues": ([GOOD], 60.0, False, "give up"),
    "no limit": ([MEMORY], None, False, "again"),
    "memory": ([GOOD, MEMORY], 3600.0, True, "again"),
    "memory, seven rungs": ([GOOD, *[MEMORY] * 7], 3600.0, True, "again"),
    "memory, for ever": ([GOOD, *[MEMORY] * 8], 3600.0, True, "give up"),
    "memory, with progress": (
        [*[start(0, 1, "stopped", "host memory", 75)] * 20],
        3600.0,
        True,
        "again",
    ),
    "memory, and too little time": ([GOOD, MEMORY], 60.0, True, "requeue"),
    "one crash": ([CRASH], 3600.0, True, "again"),
    "a crash in the next job too": ([CRASH, start(10, 10)], 3600.0, True, "give up"),
    "a start that was refused is no crash": (
        [start(10, 10, exit_code=2), CRASH],
        3600.0,
        True,
        "again",
    ),
    "crashes with progress between": ([CRASH, start(10, 12), CRASH], 3600.0, True, "again"),
    "a crash after a signal is none": ([CRASH, start(10, 10, asked=True)], 60.0, True, "requeue"),
    "jobs too short to get anywhere": ([GOOD, TIME, TIME], 60.0, True, "requeue"),
    "for ever": ([GOOD, TIME, TIME, TIME], 60.0, True, "give up"),
    "the user wrote STOP": ([start(0, 5, "stopped", "STOP file", 75)], 3600.0, True, "give up"),
    "preempted": ([start(0, 5, "stopped", "preemption", 75, asked=True)], 3600.0, True, "requeue"),
    "its launcher ended the ranks": (
        [start(0, 5, "stopped", "SIGTERM to the ranks alone", 75)],
        3600.0,
        True,
        "again",
    ),
    "nodes were lost twice": ([LOST, LOST], 3600.0, True, "again"),
    "refused on fewer nodes": ([FEWER], 3600.0, True, "requeue"),
    "refused on fewer nodes, and nobody requeues": ([FEWER], 3600.0, False, "give up"),
    "scancel": ([start(0, 5, "stopped", "SIGTERM", 75)], 3600.0, True, "give up"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_follows_an_end(row):
    starts, left_s, can_requeue, expected = ROWS[row]
    assert decide_next_step(starts, left_s, can_requeue)[0] == expected


def test_spare_nodes_are_starts_more_and_too_few_nodes_none():
    assert decide_next_step([CRASH, CRASH], 3600.0, True, num_spare_nodes=1)[0] == "again"
    assert decide_next_step([CRASH] * 3, 3600.0, True, num_spare_nodes=1)[0] == "give up"
    assert decide_next_step([LOST], 3600.0, True, node_shortage="1 of 2") == ("requeue", "1 of 2")
    assert decide_next_step([LOST], 3600.0, False, node_shortage="1 of 2") == ("give up", "1 of 2")


REPORT = {"status": "failed", "reason": "a disk is full", "exit_code": 2, "error": "DiskError"}
REFUSED = ("refused", "the start was refused, see the message above", 2, "")
SILENT = "srun exited with code {}, and there is no outcome.json"


@pytest.mark.parametrize(
    ("told", "code", "accuses", "ending"),
    [
        (REPORT, 1, True, ("failed", "a disk is full", 2, "DiskError")),
        (REPORT, 2, False, ("failed", "a disk is full", 2, "DiskError")),
        (REPORT | {"exit_code": 1}, 2, False, REFUSED),  # another job's
        ({}, 2, False, REFUSED),
        ({}, 1, False, ("failed", SILENT.format(1), 1, "")),
        ({}, -9, False, ("failed", SILENT.format(-9), 1, "")),
        ({}, 75, False, ("stopped", "a signal while it started", 75, "")),
        ({}, 75, True, ("failed", SILENT.format(75), 1, "")),
    ],
)
def test_how_the_ranks_ended_is_what_they_told_or_else_their_launchers_code(
    told, code, accuses, ending
):
    assert classify_ending(told, "srun", code, accuses) == ending


# Stands for srun or mpirun: does what the next line of its script says, whatever it is to start.
LAUNCHER = """
import json, os, pathlib, signal, sys, time
script, run_dir = map(pathlib.Path, sys.argv[1:3])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
first, *rest = script.read_text().splitlines()
script.write_text("\\n".join(rest))
does = json.loads(first)
(run_dir / "started").write_text(str(os.getpid()))
if "refused" in does:
    (run_dir / "started").unlink()
    if does["refused"]:
        (run_dir / "outcome.json").write_text(json.dumps(does["refused"]))
    sys.exit(2)
(run_dir / "outcome.json").unlink(missing_ok=True)
time.sleep(does.get("works_s", 0))
while does.get("until_asked") and not asked:
    time.sleep(0.01)
(run_dir / "checkpoints" / f"step-{does['step']:08d}").mkdir(parents=True, exist_ok=True)
if "status" in does:
    told = {"status": does["status"], "reason": does["reason"], "exit_code": does["code"]}
    (run_dir / "outcome.json").write_text(json.dumps(told))
time.sleep(does.get("lingers_s", 0))
sys.exit(does.get("lies", does["code"]))
"""
SUPERVISE = """
import sys
from hpc_tune import log, supervise
log.configure_logging(0)
supervise._LINGER_S, supervise._OUTCOME_WAIT_S, supervise._STOP_REQUEST_MARGIN_S = 1.0, 0.5, 28.0
launch, run_dir, requeue = sys.argv[1].split("|"), supervise.Path(sys.argv[2]), sys.argv[3].split()
with_report = len(sys.argv) > 4
sys.exit(supervise.Supervisor(launch, ["a=b"], run_dir, requeue, with_report).run())
"""


class Job:
    """A supervised run whose launcher follows a script."""

    def __init__(self, folder, *script, report=False, **environment):
        self.run_dir = folder / "run"
        self.run_dir.mkdir(exist_ok=True)
        (folder / "script").write_text("\n".join(map(json.dumps, script)))
        (folder / "launcher.py").write_text(LAUNCHER)
        launch = [sys.executable, folder / "launcher.py", folder / "script", self.run_dir]
        words = ["|".join(map(str, launch)), str(self.run_dir), f"touch {folder / 'requeued'}"]
        self.requeued = folder / "requeued"
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | environment
        argv = [sys.executable, "-c", SUPERVISE, *words, *(["report"] if report else [])]
        self.process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)

    def end(self, limit_s=120.0):
        _, self.stderr = self.process.communicate(timeout=limit_s)
        return self.process.returncode

    def starts(self):
        lines = (self.run_dir / "starts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def wait_for(path, limit_s=120.0):
    until_s = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def says(status, reason, code, step, **more):
    return {"status": status, "reason": reason, "code": code, "step": step, **more}


def test_a_run_that_is_given_up_has_its_report(tmp_path):
    job = Job(tmp_path, says("failed", "KeyError: 'x'", 2, 3), report=True)
    (job.run_dir / "config.resolved.yaml").write_text("run: {name: mine}")
    assert job.end(60) == 2, job.stderr
    assert "KeyError: &#x27;x&#x27;, exit code 2" in (job.run_dir / "report.html").read_text()
    assert "report.html" in job.stderr


@pytest.mark.parametrize("meanwhile", [{}, {"status": "done", "reason": "", "exit_code": 0}])
def test_a_start_that_another_job_refuses_changes_nothing_in_its_run(tmp_path, meanwhile):
    """Not even where that job ends at the same time: its outcome is not this one's."""
    job = Job(tmp_path, {"refused": meanwhile}, report=True)
    owner = make_owner("abc", job.run_dir, {"SLURM_JOB_ID": "10"})
    (job.run_dir / "live.json").write_text(json.dumps(asdict(owner)))
    (job.run_dir / "config.resolved.yaml").write_text("run: {name: mine}")
    before = {path.name for path in job.run_dir.iterdir()}
    assert job.end() == 2, job.stderr
    assert {path.name for path in job.run_dir.iterdir()} - before <= {"outcome.json"}
    said = f"given up: run.dir={job.run_dir} is in use by job 10 on host {owner.host}, pid "
    assert said in job.stderr
    assert job.stderr.rstrip().endswith("Nothing was changed")


def test_a_start_that_is_refused_for_its_settings_leaves_no_trace(tmp_path):
    job = Job(tmp_path, {"refused": {}}, report=True)
    assert job.end() == 2, job.stderr
    assert list(job.run_dir.iterdir()) == []
    assert "no report" not in job.stderr
    assert "given up: the start was refused, see the message above" in job.stderr


def test_it_starts_again_until_all_is_done(tmp_path):
    memory = says("stopped", "host memory of n1", 75, 4)
    job = Job(tmp_path, memory, {"code": 1, "step": 6}, says("done", "all steps done", 0, 9))
    assert job.end() == 0, job.stderr
    assert [start["to_step"] for start in job.starts()] == [4, 6, 9]
    assert not job.requeued.exists()


def test_a_signal_is_passed_on_and_the_job_requeued(tmp_path):
    job = Job(tmp_path, says("stopped", "SIGUSR1", 75, 4, until_asked=True))
    wait_for(job.run_dir / "started")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75, job.stderr
    assert job.requeued.exists()
    done = Job(tmp_path, says("done", "all steps done", 0, 9))
    assert done.end() == 0, done.stderr
    assert [start["from_step"] for start in done.starts()] == [0, 4]


def test_ranks_are_asked_to_leave_where_no_scheduler_signals(tmp_path):
    leaves = says("stopped", "SIGUSR1", 75, 4, until_asked=True)
    job = Job(tmp_path, leaves, HPC_TUNE_JOB_END=str(int(time.time()) + 30))
    assert job.end() == 75, job.stderr
    assert "asking its ranks to stop" in job.stderr
    assert "its ranks have exited" not in job.stderr
    assert [start["asked"] for start in job.starts()] == [True]
    assert job.requeued.exists()


def test_ranks_whose_supervisor_is_killed_save_and_leave(tmp_path):
    job = Job(tmp_path, says("stopped", "SIGUSR1", 75, 4, until_asked=True))
    wait_for(job.run_dir / "started")
    job.process.kill()
    job.process.wait()
    wait_for(job.run_dir / "outcome.json")
    job.process.stderr.close()


def test_how_a_start_ended_that_took_its_supervisor_with_it_is_told_and_kept(tmp_path):
    job = Job(tmp_path, says("failed", "host n1 (rank 0) is gone", 1, 4, until_asked=True))
    wait_for(job.run_dir / "started")
    job.process.kill()
    job.process.wait()
    wait_for(job.run_dir / "outcome.json")
    job.process.stderr.close()
    job = Job(tmp_path, says("done", "all steps done", 0, 9))
    assert job.end() == 0
    assert "the previous start ended at step 4: host n1 (rank 0) is gone" in job.stderr
    first, second = job.starts()
    assert (first["from_step"], first["to_step"], first["lost_nodes"]) == (0, 4, True)
    assert first["reason"] == "host n1 (rank 0) is gone"
    assert (second["from_step"], second["to_step"], second["status"]) == (4, 9, "done")
    assert not (job.run_dir / "start.json").exists()


def test_a_start_that_is_killed_as_a_whole_is_told_of_by_what_it_did_last(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    owner.write_start_file(run_dir, from_step=0, job="7", nodes=["n1"], left_out={}, missing=0)
    job = Job(tmp_path, says("done", "all steps done", 0, 9))
    assert job.end() == 0
    assert (
        "the previous start ended at step 0: its job was killed, or lost its first node"
        in job.stderr
    )
    assert [start["status"] for start in job.starts()] == ["failed", "done"]


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = Job(tmp_path, says("done", "all steps done", 0, 4, lingers_s=1))
    signal.signal(signal.SIGHUP, before)
    wait_for(job.run_dir / "started")
    job.process.send_signal(signal.SIGHUP)
    assert job.end() == 0, job.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_scancel_ctrl_c_and_a_closed_terminal_end_it_without_a_requeue(tmp_path, number):
    job = Job(tmp_path, says("stopped", "SIGUSR1", 75, 4, until_asked=True))
    wait_for(job.run_dir / "started")
    job.process.send_signal(number)
    assert job.end() == 75, job.stderr
    assert not job.requeued.exists()
    assert f"step 4 is saved; it was ended from outside ({number.name})" in job.stderr
    assert "give up" not in job.stderr


def test_what_crashes_at_once_is_given_up_over_jobs_too(tmp_path):
    crash = {"code": 3, "step": 0}
    job = Job(tmp_path, crash, crash, crash)
    assert job.end() == 3, job.stderr
    assert len(job.starts()) == 2
    again = Job(tmp_path, crash, crash)
    assert again.end() == 3, again.stderr
    assert len(again.starts()) == 3
    assert not again.requeued.exists()


def test_ranks_that_their_launcher_ended_start_again(tmp_path):
    ended = says("stopped", "SIGTERM", 75, 4, lies=0)
    job = Job(tmp_path, ended, says("done", "all steps done", 0, 9))
    assert job.end() == 0, job.stderr
    assert [start["reason"] for start in job.starts()] == [
        "SIGTERM to the ranks alone",
        "all steps done",
    ]


@pytest.mark.parametrize("code", [75, pytest.param(138, marks=pytest.mark.full)])
def test_ranks_that_a_signal_ends_while_they_import_have_not_crashed(tmp_path, code):
    job = Job(tmp_path, *[{"code": code, "step": 0}] * 3, says("done", "all steps done", 0, 9))
    assert job.end() == 0, job.stderr
    starts = job.starts()
    assert [start["status"] for start in starts] == ["stopped"] * 3 + ["done"]
    assert starts[0]["reason"] == "a signal while it started"


def test_a_job_that_slurm_preempts_is_requeued(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho JobId=7 PreemptTime=2026-01-01T00:00:00 EndTime=Unknown\n")
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    preempted = says("stopped", "SIGTERM", 75, 4)
    job = Job(tmp_path, preempted, SLURM_JOB_ID="7", PATH=path)
    assert job.end() == 75, job.stderr
    assert job.requeued.exists()
    job.requeued.unlink()
    scontrol.write_text("#!/bin/sh\necho JobId=7 PreemptTime=None EndTime=Unknown\n")
    again = Job(tmp_path, preempted, says("done", "", 0, 9), SLURM_JOB_ID="7", PATH=path)
    assert again.end() == 0, again.stderr
    assert not again.requeued.exists()


def test_an_outcome_that_shows_late_counts(tmp_path):
    run_dir, told, launcher = (tmp_path / name for name in ("run", "told", "launcher"))
    run_dir.mkdir()
    told.write_text('{"status": "done", "reason": "all steps done", "exit_code": 0}')
    launcher.write_text(f"#!/bin/sh\n(sleep 0.3; cp {told} {run_dir}/outcome.json) &\n")
    launcher.chmod(0o755)
    argv = [sys.executable, "-c", SUPERVISE, str(launcher), str(run_dir), ""]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len((run_dir / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("told", "lacks"),
    [
        ('{"status": "do', "status, reason, exit_code"),
        ("[]", "status, reason, exit_code"),
        ('{"reason": "why", "exit_code": 0}', "status"),
        ('{"status": "paused", "reason": "why", "exit_code": 0}', "status"),
        ('{"status": "done", "exit_code": 0}', "reason"),
        ('{"status": "done", "reason": "why", "exit_code": "none"}', "exit_code"),
    ],
)
def test_an_outcome_that_does_not_tell_how_the_run_ended_counts_as_missing(tmp_path, told, lacks):
    run_dir, launcher = tmp_path / "run", tmp_path / "launcher"
    run_dir.mkdir()
    (tmp_path / "told").write_text(told)
    launcher.write_text(f"#!/bin/sh\ncp {tmp_path}/told {run_dir}/outcome.json\nexit 3\n")
    launcher.chmod(0o755)
    argv = [sys.executable, "-c", SUPERVISE, str(launcher), str(run_dir), ""]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert f"outcome.json counts as missing, since it has no valid {lacks}: " in done.stderr
    assert "exited with code 3, and there is no outcome.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_lines_of_starts_that_are_cut_short_or_of_another_version_end_no_job(tmp_path):
    job = Job(tmp_path, says("failed", "KeyError", 1, 0), says("done", "all steps done", 0, 9))
    crash = asdict(start(4, 4))
    lines = [crash | {"to_step": None}, crash | {"asked": "?"}, [crash], crash]
    text = "\n".join(map(json.dumps, lines))[:-9]
    (job.run_dir / "starts.jsonl").write_text(f"{text}\n")
    (job.run_dir / "start.json").write_text('{"from_step": [], "job": 7}')
    assert job.end() == 0, job.stderr
    assert "Traceback" not in job.stderr


def test_a_launcher_that_lies_or_does_not_end_is_not_believed(tmp_path):
    lies = says("stopped", "host memory of n1", 75, 2, lies=0)
    job = Job(tmp_path, lies, says("done", "all steps done", 0, 9, lingers_s=600))
    assert job.end() == 0, job.stderr
    assert [start["status"] for start in job.starts()] == ["stopped", "done"]
    assert "its ranks have exited" in job.stderr


@pytest.mark.full
def test_a_run_that_has_told_nothing_yet_is_not_taken_for_one_that_lingers(tmp_path):
    memory = says("stopped", "host memory of n1", 75, 4)
    job = Job(tmp_path, memory, says("done", "all steps done", 0, 9, works_s=3))
    assert job.end() == 0, job.stderr
    assert "its ranks have exited" not in job.stderr
    assert [start["status"] for start in job.starts()] == ["stopped", "done"]
