"""What a report says of the energy of a run's jobs, by what a scheduler answers."""

import pytest

from hpc_tune.cluster.protocol import JobEnergy
from hpc_tune.report.read import JobsEnergy, find_jobs_energy


def events(*jobs):
    return [
        {"kind": "start", "time": 10.0 * number, "job": job, "scheduler": "Slurm"}
        for number, job in enumerate(jobs)
    ]


@pytest.mark.parametrize(
    ("told", "joules", "words"),
    [
        (
            [JobEnergy("7", 3.6e6), JobEnergy("8", 1.8e6)],
            5.4e6,
            "Slurm counted 1.50 kWh for the nodes of jobs 7, 8, from start to end, including "
            "other jobs there",
        ),
        (
            [JobEnergy("7", 3.6e6, is_sum_of_steps=True), JobEnergy("8", reason="it is not over")],
            3.6e6,
            "Slurm counted 1.00 kWh for the nodes of job 7, from start to end, including other "
            "jobs there; this is the sum of job steps, several of which can count the same node; "
            "not known: job 8 (it is not over)",
        ),
        (
            [JobEnergy(str(n), reason="there is no sacct here") for n in range(6)],
            None,
            "not known: jobs 0, 1, 2, 3 and 2 more (there is no sacct here)",
        ),
    ],
)
def test_what_is_known_is_added_up_and_what_is_not_is_named(told, joules, words):
    asked = []

    def ask(scheduler, starts):
        asked.append((scheduler, starts))
        return told

    found = find_jobs_energy(events("7", "8", "7"), asks_scheduler=True, ask=ask)
    assert found == JobsEnergy(joules, words)
    assert asked == [("Slurm", [("7", 0.0), ("8", 10.0), ("7", 20.0)])]


def test_a_report_that_a_job_writes_asks_nobody():
    found = find_jobs_energy(events("7"), asks_scheduler=False, ask=lambda *_: pytest.fail("asked"))
    assert found.joules is None
    assert found.words.startswith("Slurm was not asked, since a job's energy is known only after")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "start", "time": 1.0},
        {"kind": "stop", "time": 1.0, "job": "7", "scheduler": "Slurm"},
        {"kind": "start", "time": 1.0, "job": "7.head", "scheduler": "PBS"},
        {"kind": "start", "time": 1.0, "job": "7", "scheduler": "another"},
    ],
)
def test_a_run_without_jobs_of_slurm_says_nothing(event):
    assert find_jobs_energy([event], asks_scheduler=True) is None
