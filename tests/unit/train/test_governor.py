"""The governor and its levers, without ranks: what a start takes over from the last run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.rundir.outcome import PreviousRun
from hpc_tune.train.governor import Governor, make_loader_actions

SPLIT = Action.SPLIT_MICRO_BATCHES


def started(previous, mode="on", without=(), device=None):
    """Return what a governor has taken at its start, and how often each lever was pulled."""
    pulled = {}
    memory_actions = {
        action: ActionHandle(
            lambda times, action=action: pulled.setdefault(action.value, str(times)),
            max_times=2 if action == SPLIT else 1,
        )
        for action in tuple(Action)[:-1]
        if action not in without
    }
    governor = Governor(
        None, SimpleNamespace(mode=mode, device=device), None, memory_actions, previous
    )
    return governor.actions_taken, pulled


def test_a_start_takes_the_actions_of_the_last_run_again():
    before = ("shrink_buffers", "split_micro_batches", "split_micro_batches")
    taken, pulled = started(PreviousRun(before))
    assert taken == list(before)
    assert pulled == {"shrink_buffers": "1", "split_micro_batches": "2"}


@pytest.mark.parametrize(
    ("before", "added"),
    [
        ((), ["shrink_buffers", "save_in_pieces", "split_micro_batches"]),
        (("shrink_buffers", "save_in_pieces"), ["split_micro_batches"]),
        (("split_micro_batches",) * 2, ["shrink_buffers", "save_in_pieces", "recompute"]),
    ],
)
def test_where_memory_ended_the_last_run_one_costly_action_more_is_taken(before, added):
    taken, pulled = started(PreviousRun(before, exhausted_memory="host"))
    assert taken == [*before, *added]
    assert set(pulled) == set(taken)


def test_an_action_that_has_no_lever_any_more_is_left_out():
    before = PreviousRun(("recompute", "save_in_pieces", "of_another_version"))
    assert started(before, without={Action.RECOMPUTE})[0] == ["save_in_pieces"]


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_a_governor_that_only_observes_takes_nothing(mode):
    assert started(PreviousRun(("recompute",), exhausted_memory="host"), mode) == ([], {})


@pytest.mark.parametrize(("micro_size", "rows"), [(1, []), (2, [1]), (6, [3, 1]), (8, [4, 2, 1])])
def test_micro_batches_are_halved_until_they_have_one_row(micro_size, rows):
    loader = SimpleNamespace(micro_size=micro_size, set_micro_size=lambda rows: sizes.append(rows))
    lever, sizes = make_loader_actions(loader, [Path("data.h5")])[SPLIT], []
    assert [lever.apply_times(times) for times in range(1, lever.max_times + 1)] == [
        f"micro-batches of {n} rows" for n in rows
    ]
    assert sizes == rows
    lever.apply_times(0)
    assert sizes[-1] == micro_size


def test_what_saves_keep_is_given_back_before_anything_is_given_up():
    """TRIM comes first."""
    given_back = []
    memory_actions = make_loader_actions(
        SimpleNamespace(micro_size=1), [], lambda: given_back.append(True)
    )
    assert "given back by rank 0" in memory_actions[Action.TRIM].apply_times(0)
    assert given_back == [True]
