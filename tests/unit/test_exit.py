"""Leaving before the first step, and who tells how a run ended."""

import threading
import time
from types import SimpleNamespace

import pytest

from hpc_tune.errors import (
    EXIT_RESUMABLE,
    ConfigError,
    InterruptError,
    LeavingError,
    LostHostError,
)
from hpc_tune.rundir import outcome
from hpc_tune.train import exit as train_exit
from hpc_tune.train.exit import ResumePoint, StartupWatchdog
from hpc_tune.world.stop import StopFlag


@pytest.fixture
def left(monkeypatch):
    """What the world was ended with, as soon as it was."""
    errors = []
    monkeypatch.setattr(train_exit, "_GRACE_S", 0.4)
    monkeypatch.setattr(train_exit, "fail", lambda comm, error, run_dir: errors.append(error))
    return errors


def asked(tmp_path):
    (tmp_path / "STOP").touch()
    return StopFlag(tmp_path, environ={})


def wait_until(what, limit_s=120.0):
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def watchdogs():
    return {t for t in threading.enumerate() if t.name == "startup-watchdog"}


@pytest.fixture
def unwatched():
    """Wait until the watchdogs that began in this test have ended."""
    before = watchdogs()
    return lambda: wait_until(lambda: watchdogs() <= before)


def test_a_rank_that_is_asked_leaves_after_a_while(tmp_path, left, unwatched):
    early = StartupWatchdog(None, asked(tmp_path), tmp_path, ResumePoint(7))
    wait_until(lambda: left)
    early.close()
    assert [(e.reason, e.step, e.exit_code) for e in left[:1]] == [("STOP file", 7, EXIT_RESUMABLE)]
    unwatched()


def test_one_that_has_begun_to_train_does_not(tmp_path, left, unwatched):
    early = StartupWatchdog(None, asked(tmp_path), tmp_path, ResumePoint())
    early.close()
    unwatched()
    assert left == []


def test_a_phase_that_fails_is_not_watched_any_longer(tmp_path, left, unwatched):
    stop = StopFlag(tmp_path, environ={})
    with (
        pytest.raises(ConfigError),
        train_exit.startup_watchdog(None, stop, tmp_path, ResumePoint()),
    ):
        raise ConfigError("no such model")
    unwatched()
    assert left == []


def test_an_error_after_a_signal_is_the_signals(tmp_path, left):
    error = ConfigError("the compiler was killed")
    quiet = StartupWatchdog(None, StopFlag(None, environ={}), tmp_path, ResumePoint())
    assert quiet.cause_of(error) is error
    quiet.close()
    early = StartupWatchdog(None, asked(tmp_path), tmp_path, ResumePoint())
    assert isinstance(early.cause_of(error), LeavingError)
    early.close()
    assert early.cause_of(error) is error


@pytest.mark.parametrize(("rank", "reason"), [(0, "host b is lost"), (3, "said before")])
def test_of_a_lost_host_rank_0_tells_and_the_others_if_nobody_has(
    tmp_path, monkeypatch, rank, reason
):
    def die(comm, code):
        raise SystemExit(code)

    monkeypatch.setattr(train_exit, "die", die)
    monkeypatch.setattr(train_exit, "report_failure", lambda comm, error: str(error))
    comm = SimpleNamespace(
        world=SimpleNamespace(rank=rank, hostname="n1"), is_rank_0=rank == 0, nonce="1"
    )
    for before in (None, outcome.Outcome("failed", "said before", None, 1)):
        if before is not None:
            outcome.write(before, tmp_path)
        with pytest.raises(SystemExit, match="1"):
            train_exit.fail(comm, LostHostError("host b is lost"), tmp_path)
        told = outcome.read(tmp_path)
        assert told["reason"] == ("host b is lost" if before is None else reason)


def test_the_signal_that_follows_a_failure_does_not_take_its_place(tmp_path, monkeypatch):
    """A launcher ends the other ranks, and the one that hangs, with SIGTERM."""
    monkeypatch.setattr(train_exit, "die", lambda comm, code: codes.append(code))
    monkeypatch.setattr(train_exit, "report_failure", lambda comm, error: str(error))
    world, codes = SimpleNamespace(rank=0, hostname="n1"), []
    comm = SimpleNamespace(world=world, is_rank_0=True, nonce="1")
    train_exit.fail(comm, ConfigError("a disk hangs"), tmp_path)
    train_exit.fail(comm, LeavingError("SIGTERM", 3), tmp_path)
    found = outcome.read(tmp_path)
    assert [found[name] for name in ("reason", "rank", "host")] == ["a disk hangs", 0, "n1"]
    assert codes == [2, 2]


@pytest.mark.parametrize(
    ("status", "stays"), [("done", False), ("stopped", False), ("failed", True)]
)
def test_a_stop_file_is_removed_by_the_outcome_that_heard_it(tmp_path, status, stays):
    (tmp_path / "STOP").touch()
    outcome.write(outcome.Outcome(status, "", None, 1), tmp_path)
    assert (tmp_path / "STOP").exists() == stays


def test_an_outcome_counts_as_told_from_the_start_of_the_process_on(tmp_path):
    assert outcome.written_since(tmp_path, 0.0) is None
    outcome.write(outcome.stopped("SIGUSR1", None), tmp_path)
    assert outcome.written_since(tmp_path, time.time() - 5) == EXIT_RESUMABLE
    assert outcome.written_since(tmp_path, time.time() + 5) is None
    (tmp_path / "outcome.json").write_text("{")
    assert outcome.written_since(tmp_path, 0.0) is None


def test_a_second_interrupt_ends_a_run_without_a_traceback(left, tmp_path, monkeypatch):
    with train_exit.failing(None, tmp_path), train_exit.translating(lambda error: ConfigError("x")):
        raise KeyboardInterrupt
    assert [(type(e), e.exit_code) for e in left] == [(InterruptError, 130)]
    monkeypatch.undo()
    monkeypatch.setattr(train_exit, "die", lambda comm, code: None)
    train_exit.fail(None, left[0], tmp_path)
    ended = outcome.read(tmp_path)
    assert (ended["status"], ended["reason"], ended["exit_code"]) == (
        "stopped",
        "SIGINT, twice",
        130,
    )


def test_a_package_that_cannot_be_used_is_the_users_to_mend(left, tmp_path):
    with train_exit.failing(None, tmp_path):
        raise ImportError("cannot import name 'x' from 'old'", name="old", path="/site/old/a.py")
    assert [type(e) for e in left] == [ConfigError]
    assert "old in /site cannot be used: cannot import name 'x' from 'old'" in str(left[0])
