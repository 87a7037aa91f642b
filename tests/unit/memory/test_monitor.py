"""The governor's thread, its memory limit and its last words."""

import json
import resource
import statistics
import threading
import time

import numpy as np
import pytest
import torch

from hpc_tune.errors import ResumableStop
from hpc_tune.memory import monitor
from hpc_tune.memory.device import is_out_of_memory
from hpc_tune.memory.host import HostLimit, HostUsage, PrivateMemoryLimit, trim_heap
from hpc_tune.memory.monitor import MemoryMonitor
from hpc_tune.memory.policy import Level
from hpc_tune.rundir import outcome

MIB = 1 << 20


class Host:
    """What the governor is told of a host's memory."""

    def __init__(self, patch, limit=1000 * MIB, used=100 * MIB):
        self.limit, self.used, self.asked = limit, used, 0
        patch.setattr(monitor, "find_host_limit", lambda configured: HostLimit(limit, "the test"))
        patch.setattr(monitor.HostUsage, "used_bytes", lambda usage: self._answer())

    def _answer(self):
        self.asked += 1
        return self.used

    def wait_for_samples(self, number=2):
        """Wait until what is used now was sampled; one sample may have begun before."""
        until = self.asked + number
        wait_for(lambda: self.asked >= until)


@pytest.fixture(autouse=True)
def _no_free_heap():
    """Return what earlier tests of this process left in its heap: what is taken here is new."""
    trim_heap()


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


def wait_for(what, limit_s=120.0):
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_it_keeps_the_worst_of_the_interval_between_two_questions(host):
    watching = MemoryMonitor(None, mode="observe")
    watching.start()
    host.used = 700 * MIB
    host.wait_for_samples()
    host.used = 200 * MIB
    assert watching.take_peaks().host_bytes == 700 * MIB
    host.wait_for_samples()
    assert watching.take_peaks().host_bytes == 200 * MIB
    watching.close()


@pytest.mark.parametrize(("mode", "leaves"), [("on", True), ("observe", False), ("off", False)])
def test_it_leaves_once_when_the_limit_is_near_and_only_if_it_is_on(host, mode, leaves):
    needs = []
    watching = MemoryMonitor(None, mode=mode, host="n1")
    watching.start(needs.append)
    watching.enter("load", "loading the model", writes_heartbeat=True)
    host.used = 995 * MIB
    if leaves:
        wait_for(lambda: needs)
    host.wait_for_samples(0 if mode == "off" else 5)
    watching.close()
    assert len(needs) == leaves
    if leaves:
        assert (needs[0].need, needs[0].had) == (995 * MIB, 1000 * MIB)
        assert needs[0].words.startswith(
            "host memory of n1: 995 MiB of 1000 MiB (the test) in use while loading the model, "
        )


def test_what_a_whole_step_has_used_before_is_no_reason_to_leave(host):
    needs = []
    watching = MemoryMonitor(None, mode="on")
    host.used = 993 * MIB
    watching.update_levels(watching.take_peaks())
    watching.start(needs.append)
    host.wait_for_samples(5)
    assert needs == []
    host.used = 994 * MIB
    wait_for(lambda: needs)
    watching.close()


@pytest.mark.full  # of a rate, which a busy machine changes
@pytest.mark.parametrize(
    ("expected", "peak", "leaves"),
    [(0, 840, True), (770, 840, False), (990, 840, False), (990, 940, True)],
)
def test_growth_that_was_planned_is_no_reason_to_leave(host, expected, peak, leaves):
    needs = []
    watching = MemoryMonitor(None, mode="on")
    watching.expect_usage(expected * MIB)
    watching.start(needs.append)
    for used in range(100, peak + 1, 10):  # 500 MiB/s
        host.used = used * MIB
        time.sleep(0.02)
    watching.close()
    assert len(needs) == leaves


def test_a_leak_of_20_mib_per_step_is_seen_before_it_is_too_late(host):
    watching, levels = MemoryMonitor(None, mode="on"), []
    for step in range(60):
        host.used = (100 + 20 * step) * MIB
        level, device = watching.update_levels(watching.take_peaks())
        levels.append(level)
        assert device == Level.CALM
        if level == Level.WILL_EXCEED:
            break
    left = (1000 - 10) * MIB - host.used
    assert 2 * 20 * MIB <= left < 3 * 20 * MIB
    assert Level.HIGH in levels


def test_after_something_was_done_growth_is_counted_anew(host):
    watching = MemoryMonitor(None, mode="on")
    for step in range(10):
        host.used = (700 + 20 * step) * MIB
        level, _ = watching.update_levels(watching.take_peaks())
    assert level == Level.HIGH
    watching.reset_growth()
    host.used = 750 * MIB
    assert watching.update_levels(watching.take_peaks())[0] == Level.CALM


@pytest.mark.parametrize(
    ("mode", "used_mib", "asked_mib", "admitted"),
    [
        ("on", 100, 200, True),
        ("on", 100, 206, False),  # 820 MiB of room over four ranks
        ("on", 950, 1, False),
        ("observe", 950, 500, True),
        ("off", 950, 500, True),
    ],
)
def test_it_admits_what_leaves_room_for_every_rank_of_the_node(
    host, mode, used_mib, asked_mib, admitted
):
    host.used = used_mib * MIB
    watching = MemoryMonitor(None, mode=mode, pids=[1, 2, 3, 4])
    assert watching.can_allocate(asked_mib * MIB) is admitted


@pytest.mark.parametrize(
    ("mode", "used_mib", "taken_mib", "leaves"),
    [
        ("on", 500, 100, False),  # of 1000, on each of 4 ranks
        ("on", 500, 125, True),
        ("observe", 500, 125, False),
        ("off", 500, 125, False),
    ],
)
def test_what_is_taken_faster_than_is_sampled_is_asked_for(host, mode, used_mib, taken_mib, leaves):
    needs = []
    host.used = used_mib * MIB
    watching = MemoryMonitor(None, mode=mode, pids=[1, 2, 3, 4])
    watching._stop_run = needs.append
    watching.require_free_bytes(taken_mib * MIB)
    assert len(needs) == leaves
    if leaves:
        assert "125 MiB more on each rank would not fit" in needs[0].words


def test_it_knows_this_ranks_peak_in_each_phase(host):
    watching = MemoryMonitor(None, mode="observe")
    watching.start()
    watching.enter("load", "loading")
    held = torch.ones(200 * MIB, dtype=torch.uint8)
    host.wait_for_samples()
    del held
    watching.enter("steady", "training step 1")
    host.wait_for_samples()
    watching.take_peaks()
    peaks = watching.peaks
    assert 150 * MIB < peaks["load"] - peaks["steady"] < 250 * MIB
    watching.close()


def test_switched_off_it_does_nothing(host):
    before = set(threading.enumerate())
    watching = MemoryMonitor(None, mode="off")
    watching.start()
    assert watching.take_peaks() is None
    begun = set(threading.enumerate()) - before
    assert "memory monitor" not in {thread.name for thread in begun}
    watching.close()


def test_its_heartbeat_is_there_while_it_runs_and_gone_after(host, tmp_path):
    file = outcome.heartbeat_path(tmp_path, 3)
    file.parent.mkdir()
    beat = outcome.HeartbeatFile(file, "n1", HostLimit(1000 * MIB, "the machine"))
    watching = MemoryMonitor(None, mode="observe", heartbeat=beat)
    watching.start()
    watching.enter("load", "loading the model", writes_heartbeat=True)
    wait_for(lambda: [w.phase for w in outcome.read_heartbeats(tmp_path)] == ["loading the model"])
    [word] = outcome.read_heartbeats(tmp_path)
    assert (word.host, word.used, word.limit) == ("n1", 100 * MIB, 1000 * MIB)
    watching.close()
    assert outcome.read_heartbeats(tmp_path) == []


def leave_words(run_dir, **changed):
    file = outcome.heartbeat_path(run_dir, 0)
    file.parent.mkdir(exist_ok=True)
    said = {
        "time": 1.0,
        "phase": "training step 7",
        "host": "n1",
        "used": 500,
        "limit": 1000,
        "limit_source": "/cg/memory.max",
        "cgroup": None,
        "oom_kills": 4,
    }
    file.write_text(json.dumps(said | changed))


def test_a_run_without_an_outcome_was_killed(tmp_path):
    assert outcome.read_previous_run(tmp_path).death is None
    leave_words(tmp_path)
    last = outcome.read_previous_run(tmp_path)
    assert last.exhausted_memory is None
    assert "Last seen on n1 at 1970-01-01" in last.death
    assert "while training step 7: 500 B of 1000 B host memory in use (50% of" in last.death
    assert "probably" not in last.death


def test_near_the_limit_it_was_probably_memory(tmp_path):
    leave_words(tmp_path, used=900)
    last = outcome.read_previous_run(tmp_path)
    assert last.exhausted_memory == "host"
    assert last.death.endswith("; probably by the kernel, for memory")


def test_the_kernels_counter_is_proof(tmp_path):
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.events").write_text("oom_kill 6\n")
    leave_words(tmp_path, cgroup=str(group))
    last = outcome.read_previous_run(tmp_path)
    assert last.exhausted_memory == "host"
    assert "the kernel killed 2 of that group's processes for memory" in last.death


def test_words_that_cannot_be_read_are_none(tmp_path):
    leave_words(tmp_path)
    outcome.heartbeat_path(tmp_path, 1).write_text("{")
    outcome.heartbeat_path(tmp_path, 2).write_text('{"time": 1}')
    assert len(outcome.read_heartbeats(tmp_path)) == 1
    outcome.clear_heartbeats(tmp_path)
    assert outcome.read_previous_run(tmp_path).death is None


def test_a_run_that_left_for_memory_says_so_to_the_next(tmp_path):
    error = ResumableStop("why", 4, {"need": 2, "had": 1, "governor": ["shrink_buffers"]})
    outcome.write_outcome(outcome.stopped_outcome(error.reason, error.step, error.facts), tmp_path)
    told = json.loads((tmp_path / "outcome.json").read_text())
    assert told == {
        "status": "stopped",
        "reason": "why",
        "step": 4,
        "exit_code": 75,
        "need": 2,
        "had": 1,
        "governor": ["shrink_buffers"],
    }
    last = outcome.read_previous_run(tmp_path)
    assert (last.actions, last.exhausted_memory, last.death) == (("shrink_buffers",), "host", None)
    outcome.write_outcome(
        outcome.stopped_outcome("SIGUSR1", 4, {"governor": ["shrink_buffers"]}), tmp_path
    )
    assert outcome.read_previous_run(tmp_path).exhausted_memory is None


@pytest.mark.parametrize("governor", [None, 3, "shrink_buffers", {"shrink_buffers": 1}])
def test_actions_of_another_type_in_an_outcome_are_none(tmp_path, governor):
    told = {"status": "stopped", "reason": "why", "exit_code": 75, "governor": governor}
    (tmp_path / "outcome.json").write_text(json.dumps(told))
    assert outcome.read_previous_run(tmp_path).actions == ()


def test_beyond_the_private_limit_an_allocation_fails_instead_of_killing():
    def limit():
        return resource.getrlimit(resource.RLIMIT_DATA)

    before, bound, usage = limit(), PrivateMemoryLimit(), HostUsage(HostLimit(1, "the machine"))
    mapped = usage.private_bytes()[1]
    bound.set(mapped, 64 * MIB)
    try:
        assert limit() == (mapped + 64 * MIB, before[1])
        torch.ones(16 * MIB, dtype=torch.uint8)  # what fits does not fail
        with pytest.raises(RuntimeError) as from_torch:
            torch.ones(256 * MIB, dtype=torch.uint8)
        with pytest.raises(MemoryError) as from_numpy:
            np.ones(256 * MIB, dtype=np.uint8)
    finally:
        bound.lift()
    assert limit() == before
    assert is_out_of_memory(from_torch.value)
    assert is_out_of_memory(from_numpy.value)
    torch.ones(256 * MIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_an_allocation_that_fails_looks_like(error, memory):
    assert is_out_of_memory(error) is memory


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["observe", "on"])
def test_watching_costs_less_than_half_a_percent_of_a_core(mode):
    watching = MemoryMonitor(None, mode=mode)
    watching.limit_private_memory()
    watching.start(lambda need: None)
    clock = time.pthread_getcpuclockid(watching._thread.ident)
    shares = []
    for _ in range(3):
        before_s = time.clock_gettime(clock)
        time.sleep(3.0)
        shares.append((time.clock_gettime(clock) - before_s) / 3.0)
    watching.close()
    assert min(shares) < 0.005, shares


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_watching_does_not_slow_a_step():
    """Steps of some 50 ms on all cores, with a governor and without by turns."""
    weight = torch.randn(1500, 1500)
    took_s = {True: [], False: []}
    for turn in range(40):
        watched = turn % 2 == 0
        watching = MemoryMonitor(None, mode="on" if watched else "off")
        watching.limit_private_memory()
        watching.start(lambda need: None)
        for _ in range(20):
            began_s = time.perf_counter()
            for _ in range(6):
                weight @ weight
            took_s[watched].append(time.perf_counter() - began_s)
        watching.close()
    ratio = statistics.median(took_s[True]) / statistics.median(took_s[False])
    print(f"a step takes {ratio:.4f} x as long with the governor")
    assert ratio < 1.01
