"""What sacct says of the energy of jobs: rows as it prints them, and a program in its place."""

import pytest

from hpc_tune.cluster import slurm
from hpc_tune.cluster.protocol import JobEnergy
from hpc_tune.cluster.schedulers import ask_job_energy, can_report_energy
from hpc_tune.cluster.slurm import parse_energies

BEGAN = 1_700_000_000
NO_ENERGY = "Slurm has counted no energy there (AcctGatherEnergyType)"
UNKNOWN = "sacct knows of no such job at that time"


def row(job, joules, begin=BEGAN, end=BEGAN + 600):
    return f"{job}|{begin}|{end}|{joules}\n"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # The extern step is of all nodes and the whole time, the others are parts of it.
        (
            [row(7, 18000), row("7.batch", 9000), row("7.extern", 18000), row("7.0", 17000)],
            JobEnergy("7", 18000.0),
        ),
        ([row(7, 0), row("7.extern", 18000)], JobEnergy("7", 18000.0)),
        (
            [row(7, 26000), row("7.batch", 9000), row("7.0", 17000)],
            JobEnergy("7", 26000.0, is_sum_of_steps=True),
        ),
        ([row(7, 0), row("7.batch", 0), row("7.extern", 0)], JobEnergy("7", reason=NO_ENERGY)),
        ([row(7, ""), row("7.0", "")], JobEnergy("7", reason=NO_ENERGY)),
        # As 32 and 64 bits have no value.
        ([row(7, 4294967294), row("7.extern", 2**64 - 2)], JobEnergy("7", reason=NO_ENERGY)),
        ([row(7, 500, end="Unknown"), row("7.0", 500)], JobEnergy("7", reason="it is not over")),
        ([row(7, "", begin="Unknown", end="Unknown")], JobEnergy("7", reason=UNKNOWN)),
        # A job of the same number, of another cluster or of before.
        ([row(7, 500, BEGAN - 9000, BEGAN - 5000)], JobEnergy("7", reason=UNKNOWN)),
        ([row(77, 500), row("7+0", 500)], JobEnergy("7", reason=UNKNOWN)),
        (["sacct: error: x\n", "||\n"], JobEnergy("7", reason=UNKNOWN)),
    ],
)
def test_the_energy_of_a_job(rows, expected):
    assert parse_energies("".join(rows), [("7", BEGAN + 100.0)]) == [expected]


def test_a_requeued_job_counts_each_time_that_it_ran_and_only_where_the_run_started():
    rows = [
        *(row(7, 100), row("7.extern", 100)),
        *(row(7, 200, BEGAN + 1000, BEGAN + 1500), row("7.extern", 200, BEGAN + 1000)),
        *(row(7, 400, BEGAN + 2000, BEGAN + 2500), row("7.extern", 400, BEGAN + 2000)),
    ]
    starts = [("7", BEGAN + at_s) for at_s in (50.0, 300.0, 2100.0)]
    found = parse_energies("".join(rows), starts)
    assert [one.joules for one in found] == [100.0, 400.0]


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    """A function that plants a sacct."""

    def plant(script):
        program = tmp_path / "sacct"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return plant


def asked(*jobs):
    return ask_job_energy("Slurm", [(job, BEGAN + 100.0) for job in jobs])


def test_sacct_is_asked_once_for_all_jobs_with_times_in_seconds(sacct, tmp_path):
    (tmp_path / "rows").write_text(row(7, 5) + row("8_3", 6))
    sacct(
        '[ "$*" = "-n -P -D -j 7,8_3 --format=JobID,Start,End,ConsumedEnergyRaw" ] || exit 9\n'
        f'[ "$SLURM_TIME_FORMAT" = %s ] && cat {tmp_path / "rows"}'
    )
    found = asked("7", "8_3", "7", "8; rm -rf /")
    assert found == [
        JobEnergy("7", 5.0, is_sum_of_steps=True),
        JobEnergy("8_3", 6.0, is_sum_of_steps=True),
    ]
    assert asked("not a number") == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'Slurm accounting storage is disabled' >&2; exit 1",
            "sacct says Slurm accounting storage is disabled",
        ),
        ("exit 3", "sacct says exit code 3"),
        ("exec sleep 60", "sacct did not answer in 0 s"),
        (None, "there is no sacct here"),
    ],
)
def test_a_sacct_that_does_not_tell_says_why(sacct, monkeypatch, script, why):
    if script is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        sacct(script)
    if "sleep" in (script or ""):
        monkeypatch.setattr(slurm, "_SACCT_LIMIT_S", 0.3)
    assert asked("7") == [JobEnergy("7", reason=why)]


def test_only_slurm_tells_energy():
    assert [name for name in ("Slurm", "PBS", "", "None") if can_report_energy(name)] == ["Slurm"]
    assert ask_job_energy("PBS", [("7.head", 1.0)]) == []
