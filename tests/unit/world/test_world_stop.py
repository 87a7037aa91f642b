import errno
import os
import pty
import signal
import socket
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from hpc_tune.log import log
from hpc_tune.world import stop
from hpc_tune.world.stop import StopFlag

ROOT = Path(__file__).parents[3]


@pytest.fixture
def flag(tmp_path):
    flag = StopFlag(tmp_path, environ={})
    flag.install()
    yield flag
    flag.close()


def test_nothing_asks_to_stop_at_first(flag):
    assert flag.reason() is None
    assert flag.reason(margin_s=1e9) is None
    assert flag.seconds_left() is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_only_sets_the_flag(flag, name):
    os.kill(os.getpid(), getattr(signal, name))
    assert flag.reason() == name


def test_a_second_interrupt_interrupts_at_once(flag):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_end_of_a_run_is_told_and_then_nothing_interrupts_it(capfd):
    flag = StopFlag(environ={}, is_rank_0=True)
    flag.install()
    try:
        flag.announce_ending()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert capfd.readouterr().err == "SIGUSR1: the run is ending already\n"
        flag.ignore_signals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert flag.reason() == "SIGUSR1"
    finally:
        flag.close()


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag = StopFlag(environ={})
    flag.install()
    os.kill(os.getpid(), signal.SIGHUP)
    flag.close()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert flag.reason() is None


TERMINAL = """
import time
from hpc_tune.world.stop import StopFlag
flag = StopFlag(is_rank_0=True, environ={})
flag.install()
print("ready", flush=True)
while flag.reason() is None:
    time.sleep(0.01)
print("one more step", flush=True)
open(OUT, "w").write(flag.reason())
"""


def test_a_run_goes_on_to_its_save_when_its_terminal_is_closed(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        program = TERMINAL.replace("OUT", repr(str(tmp_path / "out")))
        os.execve(sys.executable, [sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)})
    while b"ready" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "out").read_text() == "SIGHUP"


def test_the_signals_are_given_back():
    before = signal.getsignal(signal.SIGUSR1)
    flag = StopFlag(environ={})
    flag.install()
    assert signal.getsignal(signal.SIGUSR1) != before
    flag.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_time_limit_counts_from_the_start_of_the_process():
    age_s = time.time() - stop.process_start_s()
    assert 0 < age_s < time.monotonic() + 1
    flag = StopFlag(time_limit_s=age_s + 100, environ={})
    assert flag.seconds_left() == pytest.approx(100, abs=2)
    assert flag.reason(margin_s=50) is None
    assert flag.reason(margin_s=150) == "time limit"


def test_a_clock_that_is_set_back_or_forth_moves_no_limit(monkeypatch):
    now = time.time
    flag = StopFlag(time_limit_s=1e6, environ={"SLURM_JOB_END_TIME": str(int(now()) + 60)})
    for days in (-1, 1):
        monkeypatch.setattr(time, "time", lambda days=days: now() + 86400 * days)
        assert flag.seconds_left() == pytest.approx(60, abs=20)


def test_an_end_of_the_job_that_is_past_here_is_a_clock_that_is_ahead(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(log, "propagate", True)
    past = datetime.fromtimestamp(int(time.time()) - 4204).isoformat()
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho 'JobId=7 EndTime={past} Deadline=N/A'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    flag = StopFlag(environ={"SLURM_JOB_ID": "7"}, is_rank_0=True)
    assert flag.reason(margin_s=1e6) is None
    assert f"has ended 1h10m ago: the clock of {socket.gethostname()} is ahead" in caplog.text


def test_before_the_first_step_nothing_is_said_of_a_step(capfd):
    flag = StopFlag(is_rank_0=True, environ={})
    flag.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    flag.close()
    assert capfd.readouterr().err == "SIGUSR1: stopping before the first step\n"


def test_the_earlier_of_both_limits_holds():
    end = time.time() + 60
    environ = {"SLURM_JOB_END_TIME": str(int(end))}
    assert StopFlag(time_limit_s=1e6, environ=environ).seconds_left() == pytest.approx(60, abs=2)
    assert StopFlag(time_limit_s=0, environ=environ).reason() == "time limit"


@pytest.mark.parametrize("name", ["SLURM_JOB_END_TIME", "HPC_TUNE_JOB_END"])
def test_an_end_that_is_past_is_an_older_jobs(name, caplog, monkeypatch):
    """A shell in tmux keeps the environment of the job that it was begun in."""
    monkeypatch.setattr(log, "propagate", True)
    environ = {name: str(int(time.time()) - 3600)}
    flag = StopFlag(environ=environ, is_rank_0=True)
    assert flag.seconds_left() is None
    assert flag.reason(margin_s=1e6) is None
    assert f"{name}={environ[name]} is in the past" in caplog.text
    assert StopFlag(environ=environ).seconds_left() is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_stop_file_that_cannot_be_looked_at_for_a_while_ends_nothing(
    tmp_path, monkeypatch, number
):
    def refuse(path, **options):
        raise OSError(number, os.strerror(number), path)

    flag = StopFlag(tmp_path, environ={})
    monkeypatch.setattr(stop, "_FILE_CHECK_EVERY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        assert flag.reason() is None
    (tmp_path / "STOP").touch()
    assert flag.reason() == "STOP file"


def test_slurm_is_asked_for_the_end_once_and_only_if_allowed(tmp_path, monkeypatch):
    end = datetime.fromtimestamp(int(time.time()) + 90)
    script = tmp_path / "scontrol"
    script.write_text(
        f"#!/bin/sh\necho called >> {tmp_path}/calls\n"
        f"echo 'JobId=7 StartTime=2020-01-01T00:00:00 EndTime={end.isoformat()} Deadline=N/A'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    environ = {"SLURM_JOB_ID": "7"}
    assert StopFlag(environ=environ).seconds_left() is None
    flag = StopFlag(environ=environ, is_rank_0=True)
    assert flag.seconds_left() == pytest.approx(90, abs=2)
    flag.reason()
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_stop_file_is_seen_but_looked_for_at_most_once_a_second(flag, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    assert flag.reason() is None
    (tmp_path / "STOP").touch()
    now[0] += 0.5
    assert flag.reason() is None
    now[0] += 0.6
    assert flag.reason() == "STOP file"
