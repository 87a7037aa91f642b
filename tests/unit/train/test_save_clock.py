"""When a save is due by the clock, and how far apart saves are with every_minutes=auto."""

import json
import math

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.errors import ConfigError
from hpc_tune.rundir.facts import StartHistory, is_failure, read_start_history
from hpc_tune.train import saver
from hpc_tune.train.run import run
from hpc_tune.train.saver import SaveClock, best_save_interval_s, choose_save_interval
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events

HOUR_S, DAY_S = 3600.0, 86400.0
FAILED = {"status": "failed", "exit_code": 1, "asked": False, "lost_nodes": False, "error": ""}


@pytest.mark.parametrize(("every_minutes", "due_s"), [(30.0, 300), (15.0, 300), (2.0, 120)])
def test_the_first_save_is_due_after_five_minutes_at_most(tmp_path, every_minutes, due_s):
    clock = SaveClock(every_minutes, tmp_path, 1)
    assert clock.time_until_due_s == pytest.approx(due_s, abs=5)
    clock.record_save_start()
    assert clock.time_until_due_s == pytest.approx(60 * every_minutes, abs=5)


def test_without_a_clock_no_save_is_due(tmp_path):
    assert SaveClock(None, tmp_path, 1).time_until_due_s == math.inf


@pytest.mark.parametrize(
    ("wait_s", "mtbf_s", "interval_s"),
    [
        (50.0, 1e4, 1000.0),  # sqrt(2 x 50 x 10,000)
        (2.0, 1e6, 2000.0),
        (8.0, DAY_S, 1175.755),  # sqrt(1,382,400)
        (0.0, DAY_S, 300.0),
        (1.0, HOUR_S, 300.0),  # 84.9
        (60.0, 30 * DAY_S, 7200.0),  # 17,636
    ],
)
def test_the_interval_by_young_and_daly_within_limits(wait_s, mtbf_s, interval_s):
    assert best_save_interval_s(wait_s, mtbf_s) == pytest.approx(interval_s, rel=1e-5)


def test_before_a_failure_one_in_264_days_of_a_node_is_assumed():
    interval_s, why = choose_save_interval(StartHistory(0, DAY_S, (9.0, 1.0, 1.0)), 64)
    assert interval_s == pytest.approx(math.sqrt(2 * 1.0 * 264 * DAY_S / 64))
    assert why == (
        "every 14m04s: sqrt(2 x 1 s that training waits for a save x 99h00m between failures) "
        "(no failure so far, assumed one in 264 node-days, 64 nodes)"
    )


def test_failures_of_this_run_count_instead_as_soon_as_there_are_any():
    interval_s, why = choose_save_interval(StartHistory(2, 20 * HOUR_S, (18.0,)), 64)
    assert interval_s == pytest.approx(math.sqrt(2 * 18 * 10 * HOUR_S))
    assert why.endswith("x 10h00m between failures) (2 failures in 20h00m of this run)")


@pytest.mark.parametrize(
    ("history", "minutes", "text"),
    [
        (StartHistory(), 30, "every 30m00s until a save has been measured"),
        (
            StartHistory(1, HOUR_S, (0.1,)),
            5,
            "between failures), at least 5m00s (1 failure in 1h00m",
        ),
        (
            StartHistory(0, HOUR_S, (5.0,)),
            120,
            "between failures), at most 2h00m (no failure so far",
        ),
    ],
)
def test_limits_and_what_is_not_measured_yet_are_said(history, minutes, text):
    interval_s, why = choose_save_interval(history, 1)
    assert interval_s == 60 * minutes
    assert text in why


def test_auto_follows_what_each_save_costs(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "NODE_DAYS_PER_FAILURE", 1.0)
    clock = SaveClock("auto", tmp_path, 1)
    assert clock.time_until_due_s == pytest.approx(300, abs=5)
    clock.record_save_start()
    assert clock.time_until_due_s == pytest.approx(1800, abs=5)
    clock.record_wait(8.0)
    assert clock.time_until_due_s == pytest.approx(1175.755, abs=5)
    clock.record_wait(32.0)  # the median is 20
    assert clock.time_until_due_s == pytest.approx(math.sqrt(2 * 20 * DAY_S), abs=5)


@pytest.mark.parametrize(
    ("start", "counts"),
    [
        (FAILED, True),
        (FAILED | {"error": "LostHostError"}, True),
        (FAILED | {"error": "StalledError"}, True),
        (FAILED | {"error": "RuntimeError", "lost_nodes": True}, True),
        (FAILED | {"error": "HpcTuneError"}, False),  # a loss that is not finite
        (FAILED | {"error": "CheckpointError"}, False),
        (FAILED | {"exit_code": 2}, False),
        (FAILED | {"asked": True}, False),
        ({**FAILED, "status": "stopped", "exit_code": 75}, False),
        ({**FAILED, "status": "done", "exit_code": 0}, False),
        ({}, False),
    ],
)
def test_failures_are_what_nodes_do_and_no_stops_or_mistakes(start, counts):
    assert is_failure(start) == counts


def at(time, kind, **fields):
    return {"time": time, "kind": kind} | fields


PAST = (
    at(1000, "start"),
    at(1300, "checkpoint", blocked_s=0.5),
    at(1900, "checkpoint", blocked_s=0.7),  # and then it was killed
    at(5000, "warning", began_s=4990),
    at(5010, "start"),
    at(5110, "stop", reason="SIGUSR1"),
    at(9000, "stop", reason="refused", began_s=8990),
    at(10_000, "start"),  # this one
    at(10_001, "resume"),
)


def write(run_dir, name, rows):
    (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + "[]\n{")


def test_the_past_of_a_run_is_read_from_its_events(tmp_path):
    assert read_start_history(tmp_path) == StartHistory()
    write(tmp_path, "events.jsonl", PAST)
    assert read_start_history(tmp_path) == StartHistory(1, 900 + 100, (0.5, 0.7))


def test_where_supervise_counts_its_lines_do(tmp_path):
    write(tmp_path, "events.jsonl", PAST)
    lost = FAILED | {"error": "LostHostError"}
    write(tmp_path, "starts.jsonl", [lost, lost, lost | {"asked": True}])
    assert read_start_history(tmp_path).num_failures == 2


def test_a_run_with_auto_says_how_far_apart_its_saves_are(tmp_path, monkeypatch, capfd):
    """The first save is due at once; the boundary after it learns what it cost, and the next save
    is due at the one after that.
    """
    monkeypatch.setattr(saver, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(saver, "FIRST_SAVE_DUE_S", 0.0)
    monkeypatch.setattr(saver, "NODE_DAYS_PER_FAILURE", 0.0)
    words = [*SMALL, "data.path=builtin:pydocs:heldout", f"run.dir={tmp_path}"]
    words += ["train.max_steps=4", "checkpoint.every_minutes=auto", "checkpoint.background=false"]
    assert run(load_config(None, words), StopAfter(None)) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("saves ")]
    assert said[0] == "saves   every 30m00s until a save has been measured"
    assert said[1].startswith("saves   every 0s: sqrt(2 x ")
    assert len(said) == 2
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [1, 3, 4]


def test_another_word_than_auto_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint\.every_minutes"):
        load_config(None, ["checkpoint.every_minutes=often"])
