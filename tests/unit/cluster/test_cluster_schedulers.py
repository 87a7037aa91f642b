import os
import time
from datetime import datetime

import pytest

from hpc_tune.cluster import schedulers
from hpc_tune.cluster.protocol import Scheduler
from hpc_tune.cluster.schedulers import (
    BatchJob,
    find_job,
    find_job_end_s,
    granted_cpus,
    memory_limits,
)

END = datetime(2031, 5, 6, 7, 8, 9)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A function that plants a scontrol which answers with a text."""

    def answers(text, job="7"):
        program = tmp_path / "scontrol"
        script = f'#!/bin/sh\n[ "$*" = "show job {job}" ] || exit 9\necho "{text}"\n'
        program.write_bytes(os.fsencode(script))
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return answers


def requeue_command(environ):
    job = find_job(environ)
    return list(job.scheduler.requeue_command(job.id))


def preempted(environ):
    job = find_job(environ)
    return job.scheduler.is_preempted(job.id)


@pytest.mark.parametrize(
    ("environ", "job_id", "count"),
    [
        ({"SLURM_JOB_ID": "7"}, "7", "0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7", "2"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3", "0"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0", "0"),
        ({"PBS_JOBID": "7.head"}, "7.head", "0"),
        ({"PBS_JOBID": "7.head", "SLURM_JOB_ID": ""}, "7.head", "0"),
        ({"PBS_JOBID": "7.head", "SLURM_RESTART_COUNT": "2"}, "7.head", "0"),
    ],
)
def test_a_job_is_known_by_its_schedulers_variables(environ, job_id, count):
    job = find_job(environ)
    assert (job.id, job.restart_count) == (job_id, count)


def test_outside_of_a_job_there_is_none():
    assert find_job({"SLURM_RESTART_COUNT": "2"}) is None
    assert find_job_end_s({}, asks_scheduler=True) is None
    assert granted_cpus({}) is None
    assert list(memory_limits({})) == []


def test_only_slurms_own_command_requeues(scontrol):
    scontrol("")
    assert requeue_command({"SLURM_JOB_ID": "7"}) == ["scontrol", "requeue", "7"]
    assert requeue_command({"PBS_JOBID": "7.head"}) == []


def test_where_there_is_no_scontrol_nothing_requeues(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert requeue_command({"SLURM_JOB_ID": "7"}) == []
    assert not preempted({"SLURM_JOB_ID": "7"})
    assert find_job_end_s({"SLURM_JOB_ID": "7"}, asks_scheduler=True) is None


@pytest.mark.parametrize(
    ("shown", "end_s"),
    [
        (f"JobId=7 StartTime=2020-01-01T00:00:00 EndTime={END.isoformat()}", END.timestamp()),
        (f"Comment=\udcf6\udcff EndTime={END.isoformat()}", END.timestamp()),  # no UTF-8
        ("JobId=7 EndTime=Unknown", None),
        ("", None),
    ],
)
def test_slurm_tells_the_end_of_a_job_that_has_one(scontrol, shown, end_s):
    scontrol(shown)
    assert find_job_end_s({"SLURM_JOB_ID": "7"}, asks_scheduler=True) == end_s
    assert find_job_end_s({"SLURM_JOB_ID": "7"}, asks_scheduler=False) is None
    assert find_job_end_s({"SLURM_JOB_ID": "x"}, asks_scheduler=True) is None
    assert find_job_end_s({"PBS_JOBID": "7"}, asks_scheduler=True) is None


@pytest.mark.parametrize(
    ("shown", "is_preempted"),
    [("PreemptTime=2026-01-01T00:00:00", True), ("PreemptTime=None", False), ("", False)],
)
def test_slurm_tells_whether_it_takes_the_nodes_away(scontrol, shown, is_preempted):
    scontrol(f"JobId=7 {shown} EndTime=Unknown")
    assert preempted({"SLURM_JOB_ID": "7"}) == is_preempted
    assert not preempted({"PBS_JOBID": "7"})


def test_of_an_array_this_task_alone_is_asked_about_and_requeued(scontrol):
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    scontrol(f"JobId=7 EndTime={END.isoformat()} PreemptTime={END.isoformat()}", job="7_3")
    assert find_job_end_s(task, asks_scheduler=True) == END.timestamp()
    assert preempted(task)
    assert requeue_command(task) == ["scontrol", "requeue", "7_3"]


@pytest.mark.parametrize("form", ["relative", "%a %H:%M"])
def test_times_are_read_whatever_the_users_own_format_of_them(scontrol, monkeypatch, form):
    monkeypatch.setenv("SLURM_TIME_FORMAT", form)
    scontrol(f"EndTime=$([ $SLURM_TIME_FORMAT = standard ] && echo {END.isoformat()})")
    assert find_job_end_s({"SLURM_JOB_ID": "7"}, asks_scheduler=True) == END.timestamp()


def test_the_scripts_word_on_the_end_comes_first():
    soon, later = (str(int(time.time()) + seconds) for seconds in (60, 600))
    environ = {"HPC_TUNE_JOB_END": soon, "SLURM_JOB_END_TIME": later}
    assert find_job_end_s(environ, asks_scheduler=False) == float(soon)
    assert find_job_end_s(environ | {"HPC_TUNE_JOB_END": ""}, asks_scheduler=False) == float(later)


def test_a_scheduler_is_one_row(monkeypatch):
    site = Scheduler(
        "SITE_JOB",
        end="SITE_END",
        memory_limits=lambda environ: [(1 << 30, "SITE_MEMORY")],
        requeue_command=lambda job_id: ["requeue", job_id],
    )
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, site))
    environ = {"SITE_JOB": "a/1", "SITE_END": str(int(time.time()) + 60)}
    assert find_job(environ) == BatchJob(site, "a/1", "0")
    assert requeue_command(environ) == ["requeue", "a/1"]
    assert not preempted(environ)
    assert find_job_end_s(environ, asks_scheduler=True) == float(environ["SITE_END"])
    assert list(memory_limits(environ)) == [(1 << 30, "SITE_MEMORY")]
