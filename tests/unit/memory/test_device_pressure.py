"""What a full device looks like, as a table, and what the plan and the governor make of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.errors import MemoryBudgetError
from hpc_tune.memory import monitor
from hpc_tune.memory.device import (
    GpuMemory,
    describe_failed_allocation,
    is_device_oom,
    is_out_of_memory,
)
from hpc_tune.memory.host import HostLimit
from hpc_tune.memory.monitor import MemoryMonitor
from hpc_tune.memory.policy import (
    DEVICE_LIMITS,
    HOST_LIMITS,
    Action,
    ActionHandle,
    Level,
    PolicyState,
    decide_action,
    decide_after_device_oom,
    device_level,
    host_level,
)
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import GPU_SLACK_SHARE, PhaseMemory
from hpc_tune.plan.report import phase_fits
from hpc_tune.rundir import outcome
from hpc_tune.rundir.outcome import PreviousRun
from hpc_tune.train.governor import Governor, memory_outcome_facts
from hpc_tune.train.startup.micro_size import largest_micro_size
from tests.support.full_device import ERROR, GIB, SAMPLE, Device, sample_at

CALM, TIGHT, HIGH, CRITICAL, WILL_EXCEED = Level
TRIM, SHRINK, PIECES, SPLIT, RECOMPUTE, CUT, OFFLOAD, MOVE, LEAVE = Action
ALL = frozenset({SHRINK, PIECES, SPLIT, RECOMPUTE, MOVE})
LIMIT = 1_000_000
NOTHING_BEFORE = PreviousRun()


class Events:
    def __init__(self):
        self.told = []

    def write(self, kind, step, rank=0, **fields):
        self.told.append(fields)

    @property
    def actions(self):
        return [told["action"] for told in self.told if "action" in told]


@pytest.fixture
def governed(monkeypatch):
    """Return how to make a governor of one rank whose host has all the room there is."""
    monkeypatch.setattr(
        monitor, "find_host_limit", lambda configured: HostLimit(100 * GIB, "the test")
    )
    monkeypatch.setattr(monitor.HostUsage, "used_bytes", lambda usage: GIB)

    def make(device, before=NOTHING_BEFORE, mode="on"):
        memory_actions = {action: ActionHandle(lambda times: "done") for action in (TRIM, *ALL)}
        memory_actions[SPLIT] = replace(memory_actions[SPLIT], max_times=2)
        comm, events = SimpleNamespace(gather=lambda value: [value]), Events()
        watching = MemoryMonitor(None, device, mode)
        return Governor(comm, watching, events, memory_actions, before), watching, events

    return make


def drive(governor, watching, num_steps, first=1):
    """Go through steps as the loop does; return why to leave, or None."""
    for step in range(first, first + num_steps):
        governor.observe(watching.take_peaks())
        if need := governor.act_on_levels(governor.status(), step):
            return need
    return None


def retried_in(steps, num_steps=40, share=0.9):
    """Return the samples of steps in some of which the allocator has freed its cache."""
    return [sample_at(share, sum(n <= step for n in steps)) for step in range(num_steps)]


NO_ANSWER = [TRIM.value]  # to a first sign, once
FULL_LADDER = ["trim", *["split_micro_batches"] * 2, "recompute", "move_optimizer"]


@pytest.mark.parametrize(
    ("samples", "actions"),
    [
        # As full as plans may advise, its cache up to the limit.
        ([replace(sample_at(0.97), reserved_bytes=79 * GIB)] * 40, []),
        ([sample_at(0.985)] * 40, []),
        ([sample_at(0.999)] * 40, NO_ANSWER),
        ([sample_at(1.0)] * 40, NO_ANSWER),
        # An evaluation or a save now and then.
        (retried_in([9, 19, 29]), ["trim"] * 3),
        (retried_in([5]), NO_ANSWER),
        # In each step.
        (retried_in(range(1, 40)), FULL_LADDER),
        (retried_in(range(1, 40), share=1.0), FULL_LADDER),
        # Until micro-batches are split.
        (retried_in(range(1, 5)), ["trim", "split_micro_batches"]),
    ],
)
def test_a_full_device_is_left_in_peace_until_its_allocator_struggles(governed, samples, actions):
    governor, watching, events = governed(Device(*samples))
    assert drive(governor, watching, len(samples)) is None
    assert events.actions == actions


@pytest.mark.parametrize("retried", [(), (False,) * 8, (True,) * 8, (True, False) * 4])
@pytest.mark.parametrize("before", Level)
def test_no_share_alone_makes_a_device_more_than_tight_and_none_makes_it_critical(before, retried):
    for used in range(0, 13 * LIMIT // 10, LIMIT // 100):
        level = device_level(before, used, LIMIT, retried)
        assert level <= (HIGH if any(retried) else TIGHT)
        for is_trimmed in (False, True):
            decision = decide_action(PolicyState(is_trimmed=is_trimmed), level, ())[1]
            assert decision is None or decision.action != LEAVE


@pytest.mark.parametrize(
    ("before", "percent", "retried", "level"),
    [
        (CALM, 97, "", CALM),
        (CALM, 98.9, "", CALM),
        (CALM, 99, "", TIGHT),
        (TIGHT, 98.1, "", TIGHT),
        (TIGHT, 97.9, "", CALM),
        (HIGH, 98.5, "", TIGHT),
        (CRITICAL, 50, "", CALM),
        (CALM, 50, "x", TIGHT),
        (CALM, 50, "xx", TIGHT),
        (CALM, 50, "xxx", HIGH),
        (HIGH, 50, "xxx.", TIGHT),
        (TIGHT, 50, "x..x...x", HIGH),
        (HIGH, 50, "x.......", TIGHT),
        (HIGH, 50, "........", CALM),
    ],
)
def test_a_devices_level_follows_the_steps_in_which_its_cache_was_freed(
    before, percent, retried, level
):
    steps = [one == "x" for one in retried]
    assert device_level(before, round(percent * LIMIT / 100), LIMIT, steps) == level


def test_what_one_table_says_of_a_share_agrees():
    for shares in (HOST_LIMITS, DEVICE_LIMITS):
        assert shares.target_share <= shares.max_share
        assert shares.target_share <= shares.level_thresholds[TIGHT]
        assert list(shares.level_thresholds.values()) == sorted(shares.level_thresholds.values())
    assert HOST_LIMITS.max_share <= HOST_LIMITS.level_thresholds[CRITICAL]
    assert (
        DEVICE_LIMITS.max_share
        < DEVICE_LIMITS.level_thresholds[TIGHT] - DEVICE_LIMITS.level_hysteresis + 1e-9
    )
    assert max(DEVICE_LIMITS.level_thresholds) == TIGHT


@pytest.mark.parametrize("percent", range(80, 105))
def test_what_fits_by_the_plan_is_no_reason_to_leave_and_on_a_device_none_to_act(percent):
    machine = Machine(1, 1, LIMIT, 10 * LIMIT)
    used = percent * LIMIT // 100
    if phase_fits(PhaseMemory("steady", used, LIMIT), machine):
        assert device_level(CALM, used, LIMIT, [False] * 8) == CALM
    assert phase_fits(PhaseMemory("steady", used, LIMIT), machine) == (percent <= 97)
    # A host that full is relieved, but the run does not leave.
    if phase_fits(PhaseMemory("steady", 0, 10 * used + 1), machine):
        assert host_level(CALM, 10 * used, 10 * LIMIT) < CRITICAL


@pytest.mark.parametrize(
    ("taken", "available", "action"),
    [
        ((), {SPLIT, RECOMPUTE, MOVE}, SPLIT),
        ((SPLIT,), {SPLIT, RECOMPUTE, MOVE}, SPLIT),
        ((SPLIT, SPLIT), {RECOMPUTE, MOVE}, RECOMPUTE),
        ((SHRINK,), {MOVE}, MOVE),
        ((), (), LEAVE),
    ],
)
def test_a_step_that_ran_out_takes_the_next_rung_at_once_and_for_good(taken, available, action):
    for is_trimmed, is_settling in ((False, False), (True, True)):
        ladder, decision = decide_after_device_oom(
            PolicyState(taken, is_trimmed, is_settling), available
        )
        assert (decision.action, decision.way) == (action, "do")
        assert ladder.taken_actions == (taken if action == LEAVE else (*taken, action))
    if action != LEAVE:
        for _ in range(10_000):
            ladder, undone = decide_action(ladder, CALM, available)
            assert undone is None


def test_what_is_taken_later_is_undone_and_what_an_error_has_taken_is_not():
    ladder, _ = decide_after_device_oom(PolicyState(is_trimmed=True), {SPLIT})
    ladder, _ = decide_action(ladder, HIGH, {RECOMPUTE})
    ladder, decision = decide_action(ladder, HIGH, {RECOMPUTE})
    assert decision.action == RECOMPUTE
    undone = []
    for _ in range(10_000):
        ladder, decision = decide_action(ladder, CALM, ())
        undone += [decision] if decision else []
    assert [(one.action, one.way) for one in undone] == [(RECOMPUTE, "undo")]
    assert ladder.taken_actions == (SPLIT,)


def test_an_error_is_answered_rung_by_rung_and_then_the_run_leaves_with_what_it_needs(governed):
    governor, watching, events = governed(Device(sample_at(0.8)))
    assert drive(governor, watching, 3) is None
    found = []
    for _ in range(5):
        governor.observe_out_of_memory(describe_failed_allocation(torch.OutOfMemoryError(ERROR)))
        found.append(governor.act_on_levels(governor.status(), 3))
    assert found[:4] == [None] * 4
    assert events.actions == FULL_LADDER[1:]
    need = found[4]
    assert (need.need, need.had, need.memory) == (64 * GIB, 80 * GIB, "device")
    assert need.words.startswith(
        "device memory of rank 0 on this host: 64.0 GiB of 80.0 GiB in use"
    )
    assert (
        "failed: CUDA out of memory. Tried to allocate 2.00 GiB. No further memory-saving"
        in need.words
    )
    assert memory_outcome_facts(need, governor.actions_taken)["memory"] == "device"
    governor.observe(watching.take_peaks())
    assert governor.status() == (0.0,) * 8


def test_of_several_ranks_the_one_whose_device_ran_out_is_told_of(governed):
    governor, watching, events = governed(Device(sample_at(0.5)))
    fuller = governed(Device(sample_at(0.99)))[0]
    governor.observe(watching.take_peaks())
    fuller.observe(fuller._monitor.take_peaks())
    governor.observe_out_of_memory(describe_failed_allocation(torch.OutOfMemoryError(ERROR)))
    governor._comm.gather = lambda own: [fuller._local_memory_usage("device"), own]
    governor.act_on_levels(governor.status(), 7)
    assert "device 40.0 GiB of 80.0 GiB, CUDA out of memory. Tried" in events.told[-1]["message"]


@pytest.mark.parametrize(
    ("exhausted_memory", "taken"),
    [
        ("device", ["split_micro_batches"]),
        ("host", ["shrink_buffers", "save_in_pieces"]),
        (None, []),
    ],
)
def test_the_next_start_gives_up_what_frees_the_memory_that_was_short(
    governed, exhausted_memory, taken
):
    governor, *_ = governed(Device(), PreviousRun(exhausted_memory=exhausted_memory))
    assert governor.actions_taken == taken


def test_a_start_on_a_device_keeps_what_the_last_run_had_given_up_of_it(governed):
    before = PreviousRun(("split_micro_batches", "shrink_buffers"))
    governor, watching, events = governed(Device(), before)
    assert drive(governor, watching, 1000) is None
    assert governor.actions_taken == ["split_micro_batches"]
    assert events.actions == ["shrink_buffers"], "undone: the host has room"


def test_of_a_full_host_and_a_device_that_ran_out_the_device_is_told_of(governed):
    governor, watching, _ = governed(Device())
    governor.observe(watching.take_peaks())
    governor.observe_out_of_memory(describe_failed_allocation(torch.OutOfMemoryError(ERROR)))
    governor._levels, governor._memory_actions = (CRITICAL, CRITICAL), {}
    assert governor.act_on_levels(governor.status(), 1).memory == "device"


def test_an_outcome_says_which_memory_was_short(governed, tmp_path):
    governor, watching, _ = governed(Device())
    for memory, need in (
        ("device", watching.device_shortage(SAMPLE)),
        ("host", watching.host_shortage(1)),
    ):
        outcome.write_outcome(
            outcome.stopped_outcome("why", 4, memory_outcome_facts(need, governor.actions_taken)),
            tmp_path,
        )
        assert outcome.read_previous_run(tmp_path).exhausted_memory == memory


@pytest.mark.parametrize(
    ("device", "mode", "answers"),
    [(Device(), "on", True), (Device(), "observe", False), (None, "on", False)],
)
def test_an_error_is_answered_where_there_is_a_device_and_the_governor_is_on(
    governed, device, mode, answers
):
    assert governed(device, mode=mode)[0].handles_device_oom is answers


class Rows:
    """An engine on a device of 80 GiB whose rows take these bytes; None: more than there are."""

    def __init__(self, held, once_bytes, row_bytes):
        self._before = replace(SAMPLE, allocated_bytes=held, others_bytes=GIB)
        self._once_bytes, self._row_bytes, self._peak = once_bytes, row_bytes, held + GIB
        self.tried = []

    def run_and_discard(self, batch):
        rows, length = batch.tokens_BT.shape
        assert length == 64
        self.tried.append(rows)
        needed = 49 * GIB if self._row_bytes is None else self._once_bytes + rows * self._row_bytes
        self._peak = self._before.allocated_bytes + GIB + needed
        if self._row_bytes is None:
            raise torch.OutOfMemoryError(ERROR)

    def sample(self):
        return replace(self._before, used_bytes=self._peak)


def rows_that_fit(row_bytes, once_bytes=0, held=30 * GIB, most=64, others=None):
    """Return the micro-batch size that is found, and the rows that were tried."""
    engine = Rows(held, once_bytes, row_bytes)
    watching = SimpleNamespace(
        device=engine,
        device_shortage=lambda sample: SimpleNamespace(
            words=f"{sample.used_bytes // GIB} GiB in use"
        ),
    )
    comm = SimpleNamespace(
        world=SimpleNamespace(local_size=1), max=lambda values: [max(*values, *(others or values))]
    )
    return largest_micro_size(comm, engine, watching, 64, most), engine.tried


@pytest.mark.parametrize(
    ("once_gib", "row_gib", "rows"),
    [
        (0, 1, 32),
        (0, 4, 8),
        (0, 40, 1),
        (0, 45, 1),
        (0, 0.1, 64),
        (4, 1, 32),
        (4, 4, 8),
        (13, 7, 4),
    ],
)
def test_micro_batches_fill_a_device_as_far_as_a_plan_would(once_gib, row_gib, rows):
    found, _ = rows_that_fit(int(row_gib * GIB), int(once_gib * GIB))
    assert found == rows
    if rows < 64:  # one more doubling would need more than plans fill
        needed = (30 + once_gib + 2 * rows * row_gib) * (1 + GPU_SLACK_SHARE) + 1
        assert needed > DEVICE_LIMITS.target_share * 80


def test_two_rows_are_tried_only_where_every_rank_has_room_for_them():
    assert rows_that_fit(30 * GIB) == (1, [1])
    assert rows_that_fit(4 * GIB) == (8, [1, 2])
    assert rows_that_fit(4 * GIB, others=[-1]) == (1, [1])


def test_two_peaks_that_differ_by_nothing_do_not_make_rows_free():
    assert rows_that_fit(1, 4 * GIB, most=1024) == (64, [1, 2])


def test_a_single_row_that_does_not_fit_ends_the_start_with_what_it_needs_and_advice():
    with pytest.raises(MemoryBudgetError) as ended:
        rows_that_fit(None)
    said = str(ended.value)
    assert said.startswith(
        "batch.micro_size=auto: not even one row of data.seq_len=64 fits: 80 GiB in use; CUDA out "
        "of memory. Tried to allocate 2.00 GiB. Set parallel.recompute=full, a shorter data.seq_len"
    )


def refusing(error):
    """Return what stands for torch's question to the driver's library, and how often it came."""
    asked = []

    def utilization(device):
        asked.append(device)
        if isinstance(error, Exception):
            raise error
        return error

    return utilization, asked


class NVMLError(Exception):
    """As pynvml's: derived from Exception alone. amdsmi's AmdSmiException is too."""


@pytest.mark.parametrize(
    "answer",
    [
        NVMLError("Not Supported"),  # MIG, vGPU
        NVMLError("Insufficient Permissions"),
        ModuleNotFoundError("nvidia-ml-py does not seem to be installed"),
        RuntimeError("cuda driver can't be loaded, is cuda enabled?"),
        "N/A",  # of an AMD GPU
    ],
)
def test_a_driver_that_does_not_tell_utilization_is_asked_once(monkeypatch, caplog, answer):
    utilization, asked = refusing(answer)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    gpu = GpuMemory(torch.device("cuda", 3))
    with caplog.at_level("INFO", "hpc_tune"):
        assert [gpu.utilization() for _ in range(5)] == [None] * 5
    assert asked == [torch.device("cuda", 3)]
    [line] = caplog.messages
    assert line.startswith("metrics have no device_util: ")


def test_a_driver_that_tells_utilization_is_asked_each_time(monkeypatch):
    utilization, asked = refusing(73)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    gpu = GpuMemory(torch.device("cuda", 0))
    assert [gpu.utilization() for _ in range(3)] == [0.73] * 3
    assert len(asked) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="what torch raises without a GPU")
def test_what_torch_itself_raises_without_a_driver_is_no_error():
    assert GpuMemory(torch.device("cuda", 0)).utilization() is None


@pytest.mark.parametrize(
    ("error", "of_device"),
    [
        (torch.OutOfMemoryError(ERROR), True),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), False),
        (MemoryError(), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_an_allocation_that_fails_is_the_devices_or_the_hosts(error, of_device):
    assert is_out_of_memory(error)
    assert is_device_oom(error) is of_device


def test_of_torchs_words_those_remain_that_tell_what_failed():
    assert describe_failed_allocation(torch.OutOfMemoryError(ERROR)) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert describe_failed_allocation(torch.OutOfMemoryError("")) == "OutOfMemoryError"
