"""The plan that a run makes of itself: what a signal that reaches it ends."""

import signal
import subprocess
from types import SimpleNamespace

import pytest

from hpc_tune.errors import ResumableStop
from hpc_tune.plan.hardware import Machine
from hpc_tune.train.startup import preflight
from hpc_tune.world.comm import ResumePoint
from hpc_tune.world.stop import StopFlag

MACHINE = Machine(1, 1, None, 1 << 34)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose plan is ended by SIGTERM before it says anything."""
    ended = subprocess.CompletedProcess(["plan"], -signal.SIGTERM, stdout="", stderr="")
    monkeypatch.setattr(preflight, "run_plan", lambda *_: ended)
    stop = StopFlag(tmp_path, environ={})
    return SimpleNamespace(dir=tmp_path, stop=stop, resume_point=ResumePoint(0))


def test_a_run_that_is_asked_to_stop_while_it_plans_stops(job):
    (job.dir / "STOP").touch()
    with pytest.raises(ResumableStop) as left:
        preflight._run_plan_command(job, MACHINE, [], 60.0)
    assert str(left.value) == (
        "stopped while planning (STOP file). Rerun the same command to start again"
    )
    assert left.value.reason == "STOP file"


def test_a_plan_that_alone_is_ended_is_told_of_by_the_signal(job, caplog):
    with caplog.at_level("WARNING", logger="hpc_tune"):
        assert preflight._run_plan_command(job, MACHINE, [], 60.0) is None
    assert "not planned, the run continues without: it was ended by SIGTERM" in caplog.text
