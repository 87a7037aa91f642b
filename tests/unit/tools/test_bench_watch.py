"""What tools/bench.py says of other processes: whose CPU time is whose, and when it waits."""

import subprocess
import sys
from collections import namedtuple

import pytest

from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import bench_watch  # noqa: E402 - it lies beside what imports it
from bench_watch import Reading, read_others, share_between, wait_for_quiet  # noqa: E402

SPUN_S = 0.5
SPIN = f"import time\nwhile time.process_time() < {SPUN_S}: pass\n"
# Says that it has come so far, and lives until the test ends.
IDLE = "import sys\nprint(flush=True)\nsys.stdin.read()\n"
ENDED = f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {SPIN!r}])\n"
LIVING = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-S', '-c', {SPIN + IDLE!r}],"
    " stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
)
CORE = namedtuple("CORE", "user nice system idle iowait irq softirq steal guest guest_nice")


@pytest.fixture
def started():
    """Return a function that starts a program and waits until it says that it is idle."""
    left = []

    def start(program):
        command = [sys.executable, "-S", "-c", program + IDLE]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        left.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in left:
        process.communicate()


@pytest.mark.parametrize("program", [SPIN, ENDED, LIVING], ids=["itself", "ended", "living"])
def test_what_a_run_and_its_children_took_is_its_own(started, monkeypatch, program):
    run, beside = started(program), started("")
    # The same for both: only whose time is taken off differs.
    one = CORE(1e6, 1e5, 1e4, 1e9, 1e9, 1e3, 1e2, 1e1, 7.0, 7.0)
    monkeypatch.setattr(bench_watch.psutil, "cpu_times", lambda percpu: [one, one])
    monkeypatch.setattr(bench_watch.os, "sched_getaffinity", lambda pid: {1})
    busy_s = 1e6 + 1e5 + 1e4 + 1e3 + 1e2 + 1e1  # user has the guests' already
    assert busy_s - read_others(run.pid).others_s > 0.9 * SPUN_S
    assert busy_s - read_others(beside.pid).others_s < 0.5 * SPUN_S


def test_a_busy_loop_beside_a_run_is_seen(started):
    run = started("")
    before = read_others(run.pid)
    started(SPIN)
    # Whatever else runs on the machine comes on top.
    assert read_others(run.pid).others_s - before.others_s > 0.6 * SPUN_S


def test_the_share_is_that_of_the_readings_around_an_interval(monkeypatch):
    monkeypatch.setattr(bench_watch.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    readings = [Reading(t, s) for t, s in ((0, 10), (1, 14), (2, 14.4), (3, 14.8), (4, 18.8))]
    assert share_between(readings, 1.5, 2.5) == pytest.approx(0.8 / 2 / 4)
    assert share_between(readings, 1.0, 2.0) == pytest.approx(0.4 / 1 / 4)
    assert share_between(readings, 0.5, 1.0) == pytest.approx(1.0), "all four cores"
    assert share_between(readings, -5, 99) == pytest.approx(8.8 / 4 / 4)
    assert share_between([Reading(0, 5), Reading(1, 4.9)], 0, 1) == 0.0, "hundredths do not add up"
    assert share_between(readings[:1], 0, 1) == 0.0


def wait(limit_s, others, monkeypatch):
    """Wait on one core; ``others``: the share in each window. Return the answer and the windows."""
    monkeypatch.setattr(bench_watch.os, "sched_getaffinity", lambda pid: {0})
    now, taken, passed = 0.0, 0.0, iter(others)

    def pause(seconds):
        nonlocal now, taken
        now, taken = now + seconds, taken + seconds * next(passed)

    return wait_for_quiet(limit_s, lambda: Reading(now, taken), pause), list(passed)


def test_a_run_begins_as_soon_as_the_machine_is_quiet(monkeypatch, capsys):
    assert wait(120.0, [0.9, 0.06, 0.04, 0.5], monkeypatch) == (True, [0.5])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("limit_s", "windows"), [(5.0, 3), (0.0, 1)])
def test_a_machine_that_does_not_become_quiet_is_told(monkeypatch, capsys, limit_s, windows):
    assert wait(limit_s, [0.25] * 9, monkeypatch) == (False, [0.25] * (9 - windows))
    said = f"not quiet after {2 * windows} s: other processes take 25% of the cores"
    assert said in capsys.readouterr().out
