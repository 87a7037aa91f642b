"""Leaving before the first step, and who tells how a run ended."""

import errno
import os
import threading
import time
from types import SimpleNamespace

import pytest

from hpc_tune.errors import (
    EXIT_RESUMABLE,
    CheckpointError,
    ConfigError,
    DataError,
    GoneError,
    InterruptError,
    LostHostError,
    RemoteError,
    ResumableStop,
)
from hpc_tune.rundir import outcome
from hpc_tune.train import exit as train_exit
from hpc_tune.train.exit import StartupWatchdog
from hpc_tune.world import failure, liveness
from hpc_tune.world.comm import ResumePoint
from hpc_tune.world.failure import Failure
from hpc_tune.world.stop import StopFlag


@pytest.fixture
def left(monkeypatch):
    """What the world was ended with, as soon as it was."""
    errors = []
    monkeypatch.setattr("hpc_tune.world.liveness.STOP_GRACE_S", 0.4)
    monkeypatch.setattr(train_exit, "fail_run", lambda comm, error, run_dir: errors.append(error))
    return errors


@pytest.fixture(autouse=True)
def marks(tmp_path_factory, monkeypatch):
    """Keep the marks that ranks leave for others of their host in a folder of the test."""
    monkeypatch.setattr(failure, "_REPORT_MARKER_FOLDER", tmp_path_factory.mktemp("marks"))


def comm_of(rank, doing="training step 8", step=7):
    world = SimpleNamespace(rank=rank, size=4, node=0, hostname="n1", label=f"rank {rank} on n1")
    progress = {"activity": [doing], "resume_point": ResumePoint(step), "watch": None}
    return SimpleNamespace(world=world, is_rank_0=rank == 0, store_rank=0, nonce="1", **progress)


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
    early = StartupWatchdog(comm_of(0), asked(tmp_path), tmp_path, ResumePoint(7))
    wait_until(lambda: left)
    early.close()
    assert [(e.reason, e.step, e.exit_code) for e in left[:1]] == [("STOP file", 7, EXIT_RESUMABLE)]
    unwatched()


def test_one_that_has_begun_to_train_does_not(tmp_path, left, unwatched):
    early = StartupWatchdog(comm_of(0), asked(tmp_path), tmp_path, ResumePoint())
    early.close()
    unwatched()
    assert left == []


def test_a_phase_that_fails_is_not_watched_any_longer(tmp_path, left, unwatched):
    stop = StopFlag(tmp_path, environ={})
    with (
        pytest.raises(ConfigError),
        train_exit.startup_watchdog(comm_of(0), stop, tmp_path, ResumePoint()),
    ):
        raise ConfigError("no such model")
    unwatched()
    assert left == []


def test_an_error_after_a_signal_is_the_signals(tmp_path, left):
    error = ConfigError("the compiler was killed")
    quiet = StartupWatchdog(comm_of(0), StopFlag(None, environ={}), tmp_path, ResumePoint())
    assert quiet.cause_of(error) is error
    quiet.close()
    early = StartupWatchdog(comm_of(0), asked(tmp_path), tmp_path, ResumePoint())
    assert isinstance(early.cause_of(error), ResumableStop)
    early.close()
    assert early.cause_of(error) is error


@pytest.mark.parametrize(("rank", "reason"), [(0, "host b is lost"), (3, "said before")])
def test_of_a_lost_host_rank_0_tells_and_the_others_if_nobody_has(
    tmp_path, monkeypatch, rank, reason
):
    def die(who, code):
        raise SystemExit(code)

    monkeypatch.setattr(liveness, "die", die)
    monkeypatch.setattr(
        train_exit, "claim_failure_report", lambda comm, error: Failure("", str(error))
    )
    comm = comm_of(rank)
    other_side = outcome.Outcome("failed", "said before", None, 1, {"lost_hosts": ["n1"]})
    for before in (None, other_side):
        if before is not None:
            outcome.write_outcome(before, tmp_path, comm.nonce)
        with pytest.raises(SystemExit, match="1"):
            train_exit.fail_run(comm, LostHostError("host b is lost"), tmp_path)
        told = outcome.read_outcome(tmp_path)
        wanted = "host b is lost" if before is None else reason
        assert told["reason"].startswith(wanted)


def test_the_signal_that_follows_a_failure_does_not_take_its_place(tmp_path, monkeypatch):
    """A launcher ends the other ranks, and the one that hangs, with SIGTERM."""
    monkeypatch.setattr(liveness, "die", lambda who, code: codes.append(code))
    monkeypatch.setattr(
        train_exit, "claim_failure_report", lambda comm, error: Failure("", str(error))
    )
    comm, codes = comm_of(0), []
    train_exit.fail_run(comm, ConfigError("a disk hangs"), tmp_path)
    train_exit.fail_run(comm, ResumableStop("SIGTERM", 3), tmp_path)
    found = outcome.read_outcome(tmp_path)
    assert [found[name] for name in ("reason", "rank", "host")] == ["a disk hangs", 0, "n1"]
    assert codes == [2, 2]


@pytest.mark.parametrize(
    ("status", "stays"), [("done", False), ("stopped", False), ("failed", True)]
)
def test_a_stop_file_is_removed_by_the_outcome_that_heard_it(tmp_path, status, stays):
    (tmp_path / "STOP").touch()
    outcome.write_outcome(outcome.Outcome(status, "", None, 1), tmp_path)
    assert (tmp_path / "STOP").exists() == stays


def test_a_folder_in_the_place_of_the_stop_file_is_named_and_the_outcome_is_written(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("hpc_tune.log.log.propagate", True)
    (tmp_path / "STOP").mkdir()
    outcome.write_outcome(outcome.stopped_outcome("STOP file", 7), tmp_path)
    assert outcome.read_outcome(tmp_path)["step"] == 7
    assert "STOP is a folder, which asks to stop as a file does: remove it" in caplog.text


def test_an_outcome_counts_as_told_from_the_start_of_the_process_on(tmp_path):
    assert outcome.read_outcome_of_start(tmp_path, None, 0.0) is None
    outcome.write_outcome(outcome.stopped_outcome("SIGUSR1", None), tmp_path)
    told = outcome.read_outcome_of_start(tmp_path, None, time.time() - 5)
    assert told["exit_code"] == EXIT_RESUMABLE
    assert outcome.read_outcome_of_start(tmp_path, None, time.time() + 5) is None
    (tmp_path / "outcome.json").write_text("{")
    assert outcome.read_outcome_of_start(tmp_path, None, 0.0) is None


def test_once_the_ranks_have_met_an_outcome_counts_by_its_start_whatever_the_clocks_say(tmp_path):
    """The file system's clock may be hours behind this host's, and an older outcome be left."""
    outcome.write_outcome(outcome.stopped_outcome("SIGUSR1", None), tmp_path, "of this start")
    os.utime(tmp_path / "outcome.json", (0, 0))
    assert outcome.read_outcome_of_start(tmp_path, "of this start", time.time()) is not None
    assert outcome.read_outcome_of_start(tmp_path, "of another", 0.0) is None


ERRORS = {
    "a wrong path": (ConfigError("there is no data at /nowhere"), 2),
    "a bad row": (DataError("rows.jsonl, line 3: not JSON"), 2),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), 2),
    "a limit of files": (OSError(errno.EFBIG, "File too large", "metrics.jsonl"), 2),
    "a save": (CheckpointError("step-2 cannot be written: No space left on device"), 1),
    "a time limit": (ResumableStop("time limit", 3), 75),
    "memory": (ResumableStop("memory", 3, {"need": 2, "had": 1}), 75),
    "an interrupt": (InterruptError(), 130),
    "anything": (KeyError("no such thing"), 1),
}
ENDS = {
    "a host is gone": GoneError("host n1 (rank 0) is gone", {"lost_hosts": ["n1"]}),
    "no answer": LostHostError("host n1 has not answered in 20 s", {"lost_hosts": ["n1"]}),
    "a connection": RuntimeError("Connection closed by peer [10.0.0.1]:4000"),
    "a signal": ResumableStop("SIGTERM", 3),
    "another rank's error": RemoteError("rank 0 failed in looking for data", 2),
}


@pytest.mark.parametrize("cause", ERRORS)
@pytest.mark.parametrize("end", ENDS)
def test_what_the_end_of_a_rank_looks_like_elsewhere_takes_the_place_of_no_report(
    tmp_path, monkeypatch, capsys, cause, end
):
    codes = []
    monkeypatch.setattr(liveness, "die", lambda who, code: codes.append(code))
    monkeypatch.setattr(
        train_exit, "claim_failure_report", lambda comm, error: Failure("", str(error))
    )
    error, code = ERRORS[cause]
    train_exit.fail_run(comm_of(1), error, tmp_path)
    first = outcome.read_outcome(tmp_path)
    capsys.readouterr()
    train_exit.fail_run(comm_of(2), ENDS[end], tmp_path)
    train_exit.fail_run(comm_of(0), ENDS[end], tmp_path)
    assert outcome.read_outcome(tmp_path) == first
    assert first["exit_code"] == code
    assert codes == [code] * 3
    assert capsys.readouterr().err == "", "it is said once"
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


def test_an_error_after_the_first_report_is_printed_and_written_nowhere(
    tmp_path, monkeypatch, capsys
):
    codes = []
    monkeypatch.setattr(liveness, "die", lambda who, code: codes.append(code))
    monkeypatch.setattr(
        train_exit, "claim_failure_report", lambda comm, error: Failure("", str(error))
    )
    outcome.write_outcome(outcome.done_outcome(60), tmp_path, comm_of(0).nonce)
    train_exit.fail_run(comm_of(1), KeyError("in the shutdown"), tmp_path)
    assert outcome.read_outcome(tmp_path)["status"] == "done"
    assert codes == [0]
    assert "in the shutdown" in capsys.readouterr().err


def test_a_rank_that_was_told_of_a_report_reports_nothing_though_no_file_shows_it(
    tmp_path, monkeypatch
):
    codes = []
    monkeypatch.setattr(liveness, "die", lambda who, code: codes.append(code))
    comm = comm_of(1)
    comm.watch = SimpleNamespace(reported_exit_code=75)
    train_exit.fail_run(comm, GoneError("host n1 (rank 0) is gone"), tmp_path)
    assert codes == [75]
    assert outcome.read_outcome(tmp_path) is None


@pytest.fixture
def failed(monkeypatch, capsys):
    """What a rank prints of an error, and what it leaves in outcome.json."""
    monkeypatch.setattr(liveness, "die", lambda who, code: None)
    monkeypatch.setattr(
        "hpc_tune.world.failure._is_first_to_report", lambda comm, store_is_gone: True
    )

    def fail(error, run_dir, **progress):
        comm = comm_of(1, **progress)
        comm.roster, comm.watch = (), None
        train_exit.fail_run(comm, error, run_dir)
        return capsys.readouterr().err, outcome.read_outcome(run_dir) if run_dir else None

    return fail


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_that_nobody_expected_is_one_line_that_names_its_traceback(tmp_path, failed):
    said, told = failed(raised(KeyError("no such thing")), tmp_path)
    file = tmp_path / "failures" / "rank-1.txt"
    line = "rank 1 on n1 failed while training step 8: KeyError: 'no such thing'. Last checkpoint: "
    assert said == f"error: {line}step 7. Details: {file}\n"
    assert told["reason"] == said.removeprefix("error: ").rstrip()
    assert (told["during"], told["last_checkpoint"], told["rank"]) == ("training step 8", 7, 1)
    assert told["details"] == str(file)
    assert "Traceback" in file.read_text()
    failed(raised(KeyError("another thing")), tmp_path)
    assert file.read_text().count("Traceback") == 2


@pytest.mark.parametrize("where", ["no run directory", "a folder that cannot be written"])
def test_a_traceback_that_no_file_takes_is_printed(tmp_path, failed, where):
    (tmp_path / "failures").write_text("in the way")
    run_dir = None if where == "no run directory" else tmp_path
    said, _ = failed(raised(KeyError("no such thing")), run_dir)
    line, *rest = said.splitlines()
    assert line.endswith("KeyError: 'no such thing'. Last checkpoint: step 7.")
    assert rest[0] == "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (60, "Last checkpoint: step 60. Rerun the same command, on other hosts too, to resume"),
        (0, "Nothing is saved yet. Rerun the same command, on other hosts too, to start again."),
        (None, "training step 8. Rerun the same command, on other hosts too."),
    ],
)
def test_a_lost_host_is_told_with_the_last_checkpoint_and_what_to_do(tmp_path, failed, step, said):
    facts = {"lost_hosts": ["n2"], "lost_ranks": [2, 3]}
    lost = GoneError("host n2 (ranks 2, 3) is gone while training step 8", facts)
    printed, told = failed(lost, tmp_path, step=step)
    assert said in printed
    assert printed == f"error on rank 1 on n1: {told['reason']}\n"
    assert (told["lost_hosts"], told["lost_ranks"]) == (["n2"], [2, 3])
    assert not (tmp_path / "failures").exists()


def test_an_error_of_the_user_is_told_as_it_is(tmp_path, failed):
    said, told = failed(ConfigError("optim.lr=x: give a number"), tmp_path)
    assert said == "error on rank 1 on n1: optim.lr=x: give a number\n"
    assert told["reason"] == "optim.lr=x: give a number"


def test_a_limit_that_ends_before_a_step_asks_for_more_time(tmp_path):
    stop = StopFlag(None, time_limit_s=0.0, environ={})
    early = StartupWatchdog(comm_of(0, "loading the model"), stop, tmp_path, ResumePoint())
    said = str(early._make_error("time limit"))
    early.close()
    assert said.startswith("the limit of 0s ended while loading the model, before a step was done")
    assert said.endswith(". Give more time")


def test_a_run_whose_disk_is_full_still_has_room_for_its_outcome(tmp_path, monkeypatch):
    outcome.reserve_outcome_space(tmp_path)
    written = outcome.write_file

    def write_file(path, text):
        if (tmp_path / outcome.RESERVE_FILE).exists():
            raise OSError(28, "No space left on device")
        written(path, text)

    monkeypatch.setattr(outcome, "write_file", write_file)
    outcome.write_outcome(outcome.Outcome("failed", "the disk is full", None, 2), tmp_path)
    assert outcome.read_outcome(tmp_path)["reason"] == "the disk is full"
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


def test_the_last_outcome_stays_where_there_is_no_room_for_another(tmp_path):
    outcome.write_outcome(outcome.Outcome("failed", "the first", None, 1), tmp_path)
    (tmp_path / outcome.RESERVE_FILE).mkdir()  # takes no bytes, as a full disk
    with pytest.raises(OSError, match="directory"):
        outcome.reserve_outcome_space(tmp_path)
    assert outcome.read_outcome(tmp_path)["reason"] == "the first"


def test_a_second_interrupt_ends_a_run_without_a_traceback(left, tmp_path, monkeypatch):
    with (
        train_exit.ending_world_on_error(None, tmp_path),
        train_exit.raising_cause(lambda error: ConfigError("x")),
    ):
        raise KeyboardInterrupt
    assert [(type(e), e.exit_code) for e in left] == [(InterruptError, 130)]
    monkeypatch.undo()
    monkeypatch.setattr(liveness, "die", lambda who, code: None)
    train_exit.fail_run(None, left[0], tmp_path)
    ended = outcome.read_outcome(tmp_path)
    assert (ended["status"], ended["reason"], ended["exit_code"]) == (
        "stopped",
        "SIGINT, twice",
        130,
    )


def test_a_package_that_cannot_be_used_is_the_users_to_mend(left, tmp_path):
    with train_exit.ending_world_on_error(None, tmp_path):
        raise ImportError("cannot import name 'x' from 'old'", name="old", path="/site/old/a.py")
    assert [type(e) for e in left] == [ConfigError]
    assert "old in /site cannot be used: cannot import name 'x' from 'old'" in str(left[0])
