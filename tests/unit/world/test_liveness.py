"""The table of who watches what is that of the code, and what the watchers share."""

import ast
import functools
import re
import sys
import threading
from pathlib import Path

import pytest

from hpc_tune.world import liveness, watch
from hpc_tune.world.liveness import Watcher, make_stall_check
from tests.support.ranks import HANG_S, rank_environment, run_ranks

ROOT = Path(__file__).parents[3] / "hpc_tune"
# Besides the table, a thread may sample again and again: what memory is used.
SAMPLERS = {
    "memory/monitor.py",
    "probe/gpu_state.py",
    "train/startup/micro_size.py",
    "world/liveness.py",
}
ROW = re.compile(
    r"^(?P<name>\w+) in (?P<file>[\w/]+\.py): (?P<event>.+)\n"
    r"    sign    (?P<sign>.+)\n    who     (?P<who>.+)\n"
    r"    after   (?P<after>.+)\n    prints  (?P<prints>.+)$",
    re.MULTILINE,
)
ROWS = [*ROW.finditer(watch.__doc__)]
NAMES = {row["name"] for row in ROWS}


@functools.cache
def definitions():
    """(file, name, source) of all that is defined at the top of a file."""
    found = []
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                source = ast.get_source_segment(text, node)
                found.append((file.relative_to(ROOT).as_posix(), node.name, source))
    return found


def test_each_row_of_the_table_names_what_is_there():
    there = {(file, name) for file, name, _ in definitions()}
    assert len(re.findall("^    sign ", watch.__doc__, re.MULTILINE)) == len(ROWS)
    assert {(row["file"], row["name"]) for row in ROWS} <= there


def test_whatever_watches_or_ends_a_process_after_a_while_is_in_the_table():
    shared = re.compile(r"\b(Watcher|make_stall_check|exit_soon)\(")
    users = {
        name
        for file, name, source in definitions()
        if shared.search(source) and name not in ("Watcher", "make_stall_check", "exit_soon")
    }
    assert users == NAMES - {"time_limit", "HeartbeatFile"}
    assert users >= {"HostWatch", "HangWatch", "StartupWatchdog", "watch_launcher", "RunLock"}


@pytest.mark.parametrize(
    "own", [r"while not [\w.]+\.wait\(", r"Timer\(", r"while True:\n +time\.sl"]
)
def test_nobody_has_a_thread_of_its_own_that_looks_again_and_again(own):
    users = {file for file, _, source in definitions() if re.search(own, source)}
    assert users <= SAMPLERS


# Limits of a row that another file than the row's obeys.
ELSEWHERE = {
    ("StallWatch", "TORCH_TIMEOUT_MARGIN_S"): "world/bootstrap.py",
    ("time_limit", "SHUTDOWN_LIMIT_S"): "world/bootstrap.py",
    ("HeartbeatFile", "HEARTBEAT_EVERY_S"): "memory/monitor.py",
    ("HeartbeatFile", "DEAD_HEARTBEAT_S"): "checkpoint/locate.py",
}


def test_the_limits_of_each_row_are_obeyed_where_it_says():
    named, unused = 0, []
    for row in ROWS:
        for limit in re.findall(r"\b[A-Z_]+_[A-Z_]+\b", row.group()):
            file = ROOT / ELSEWHERE.get((row["name"], limit), row["file"])
            uses = len(re.findall(rf"\b{limit}\b", file.read_text(encoding="utf-8")))
            # In liveness.py a limit is defined, in watch.py it stands in the table.
            own = file.name in ("liveness.py", "watch.py")
            unused += [(row["name"], limit)] if uses < 1 + own else []
            named += 1
    assert named > 15
    assert unused == []
    assert liveness.GIL_TIMEOUT_FACTOR > 1, "or faulthandler would end the process first"


def test_the_examples_of_the_table_are_the_defaults():
    from hpc_tune.config.schema import RunSettings

    shown = " ".join(row["prints"] for row in ROWS)
    found = {float(number) for number in re.findall(r"\b(\d+) s\b", shown)}
    settings = RunSettings()
    assert found == {settings.host_timeout, settings.timeout, liveness.START_LIMIT_S}


def test_each_row_has_an_exit_code_but_the_one_in_which_nothing_ends():
    told = {row["name"] for row in ROWS if "exit code" in row["prints"]}
    assert told == NAMES - {"HeartbeatFile"}


def test_every_limit_is_used():
    limits = [name for name in vars(liveness) if name.isupper()]
    text = "".join(file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py"))
    assert len(limits) > 30
    assert [name for name in limits if len(re.findall(rf"\b{name}\b", text)) < 2] == []


def test_all_ranks_have_left_within_half_a_minute_of_the_loss_of_a_host():
    from hpc_tune.config.schema import RunSettings

    assert RunSettings().host_timeout + liveness.FAILURE_REPORT_LIMIT_S < 30


def test_who_is_told_of_the_end_of_a_rank_leaves_later_than_those_that_ended_with_it():
    assert (
        liveness.JOINT_END_WINDOW_S
        < liveness.EMPTY_NODE_REPORT_DELAY_S
        < liveness.RANK_END_REPORT_LIMIT_S
    )


def test_a_run_writes_often_enough_to_count_as_alive():
    assert 2 * liveness.HEARTBEAT_EVERY_S < liveness.LATE_HEARTBEAT_S < liveness.DEAD_HEARTBEAT_S
    assert 10 * liveness.LOCK_TOUCH_EVERY_S < liveness.LOCK_STALE_S


def test_a_sign_that_does_not_change_for_the_limit_is_acted_upon_once():
    signs, acted = iter([1, 1, 2, 2, 2, 2]), []
    look = make_stall_check(lambda: next(signs), 30, 10, lambda: acted.append(True))
    assert [look() for _ in range(6)] == [False] * 5 + [True]
    assert acted == [True]


def test_each_look_has_a_thread_which_ends_when_it_has_seen_enough():
    seen, all_seen = [], threading.Event()

    def enough():
        seen.append("enough")
        return True

    def more():
        seen.append("more")
        if seen.count("more") == 3:
            all_seen.set()

    watcher = Watcher("test-watcher", 0.001, enough, more)
    assert not watcher.has_started
    with watcher.watching():
        assert all_seen.wait(60)
    assert seen.count("enough") == 1
    assert watcher.has_started
    assert watcher.is_closed


def test_nothing_is_done_after_it_is_closed_and_closing_waits_for_what_is_done():
    watcher, acting, may_end = Watcher("test-watcher", 1), threading.Event(), threading.Event()
    done = []

    def act():
        acting.set()
        may_end.wait(60)
        done.append("acted")

    threading.Thread(target=watcher.run_unless_closed, args=(act,)).start()
    assert acting.wait(60)
    closing = threading.Thread(target=lambda: (watcher.close(), done.append("closed")))
    closing.start()
    may_end.set()
    closing.join(60)
    assert done == ["acted", "closed"]
    watcher.run_unless_closed(lambda: done.append("late"))
    assert done == ["acted", "closed"]
    assert watcher.wait(0)


@pytest.mark.parametrize(
    ("setting", "num_ranks", "seconds"),
    [("auto", 1, 300.2), ("auto", 256, 351.2), ("auto", 4096, 1119.2), (60.0, 4096, 60.0)],
)
def test_a_start_of_many_ranks_may_take_longer(setting, num_ranks, seconds):
    assert liveness.start_limit_s(setting, num_ranks) == pytest.approx(seconds)


# Prints what is waited for, for how long, and whether torch is imported meanwhile.
STARTING = """
import contextlib, sys
from hpc_tune.config.schema import RunSettings
from hpc_tune.world import bootstrap as start

waits = []

@contextlib.contextmanager
def noted(what, seconds, hint, who):
    before = "torch" in sys.modules
    yield
    imports = "torch" in sys.modules and not before
    waits.append((what, seconds, imports, "run.start_timeout" in hint))

start.time_limit = noted
start.bootstrap(RunSettings(device="cpu", start_timeout=77.0, timeout=100.0))
print(waits)
"""


def test_a_start_counts_no_time_in_which_torch_is_imported():
    done = run_ranks([sys.executable, "-c", STARTING], rank_environment(1), HANG_S)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == [
        ("all ranks to start", 77.0, False, True),
        ("all ranks to import torch", 100.0, True, False),
        ("all ranks to meet", 77.0, False, True),
        ("the devices of all ranks to connect", 77.0, False, True),
        ("all ranks to describe themselves", 77.0, False, True),
    ]
