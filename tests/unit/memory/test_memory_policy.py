"""The governor's decisions, as tables."""

from itertools import count, cycle, islice, product

import pytest

from hpc_tune.memory.policy import (
    Action,
    Level,
    PolicyState,
    decide_action,
    free_bytes_below_level,
    growth_bytes_per_step,
    host_level,
    must_stop_run,
    next_actions_after_oom,
    reserved_bytes,
    sustained_growth_bytes_per_s,
)

GIB = 1 << 30
CALM, TIGHT, HIGH, CRITICAL, WILL_EXCEED = Level
TRIM, SHRINK, PIECES, SPLIT, RECOMPUTE, CUT, OFFLOAD, MOVE, LEAVE = Action
ALL = frozenset({SHRINK, PIECES, SPLIT, RECOMPUTE, CUT, OFFLOAD, MOVE})


@pytest.mark.parametrize(
    ("before", "percent", "level"),
    [
        (CALM, 0, CALM),
        (CALM, 84.9, CALM),
        (CALM, 85, TIGHT),
        (CALM, 91.9, TIGHT),
        (CALM, 92, HIGH),
        (CALM, 96.9, HIGH),
        (CALM, 97, CRITICAL),
        (CALM, 130, CRITICAL),
        # On the way down a level holds for 4% of the limit.
        (TIGHT, 84.9, TIGHT),
        (TIGHT, 81, TIGHT),
        (TIGHT, 80.9, CALM),
        (HIGH, 91, HIGH),
        (HIGH, 88, HIGH),
        (HIGH, 87.9, TIGHT),
        (HIGH, 80, CALM),
        (CRITICAL, 93, CRITICAL),
        (CRITICAL, 92.9, HIGH),
        (CRITICAL, 86, TIGHT),
        (WILL_EXCEED, 93, CRITICAL),
        (WILL_EXCEED, 50, CALM),
    ],
)
def test_a_level_begins_at_a_share_of_the_limit_and_ends_below_it(before, percent, level):
    assert host_level(before, round(percent * 10_000), 1_000_000) == level


@pytest.mark.parametrize(
    ("percent", "growth_percent", "level"),
    [
        (50, 10, CALM),  # below 60% growth is the run's beginning
        (59.9, 30, CALM),
        (60, 30, WILL_EXCEED),
        (70, 0, CALM),
        (70, 1, CALM),  # 29 steps to go
        (70, 1.5, HIGH),  # 19.3
        (70, 2, HIGH),
        (70, 9, HIGH),  # 3.2: after this one, one to agree, one to save
        (70, 10, WILL_EXCEED),  # 2.9
        (70, 15, WILL_EXCEED),
        (90, 0.1, TIGHT),
        (90, 0.5, HIGH),
        (97, 0.5, CRITICAL),
        (97, 1.1, WILL_EXCEED),
        (99.5, 0.001, WILL_EXCEED),  # within the reserve
    ],
)
def test_growth_is_forecast(percent, growth_percent, level):
    limit = 100 * GIB
    used, growth = limit * percent / 100, limit * growth_percent / 100
    assert host_level(CALM, int(used), limit, growth) == level


@pytest.mark.parametrize(
    ("peaks", "growth"),
    [
        ([], 0),
        ([100 * n for n in range(7)], 0),  # too few
        ([100 * n for n in range(8)], 100),
        ([100] * 4 + [900] * 4, 0),  # one jump
        ([100] * 7 + [900], 0),
        ([100, 200, 900, 910, 920, 930, 940, 950, 960, 970], 10),  # what was before is forgotten
        ([100 * n for n in range(8, 0, -1)], 0),
        ([100, 900] * 4, 0),  # long batches and short ones by turns
        ([100, 130, 120, 150, 140, 170, 160, 190], 10),  # one step forth and back, on a slope
    ],
)
def test_growth_is_neither_a_jump_nor_a_swing(peaks, growth):
    assert growth_bytes_per_step(peaks) == growth


@pytest.mark.parametrize(
    ("taken", "trimmed", "level", "available", "action"),
    [
        ((), False, CALM, ALL, None),
        ((), False, TIGHT, ALL, TRIM),
        ((), False, CRITICAL, ALL, TRIM),
        ((), True, TIGHT, ALL, SHRINK),
        ((SHRINK,), True, TIGHT, ALL - {SHRINK}, PIECES),
        ((SHRINK, PIECES), True, TIGHT, {SPLIT, RECOMPUTE, MOVE}, None),
        ((SHRINK, PIECES), True, HIGH, {SPLIT, RECOMPUTE, MOVE}, SPLIT),
        ((SHRINK, PIECES, SPLIT), True, HIGH, {SPLIT, RECOMPUTE, MOVE}, SPLIT),
        ((SHRINK, PIECES, SPLIT), True, HIGH, {RECOMPUTE, MOVE}, RECOMPUTE),
        ((SHRINK, PIECES, SPLIT, RECOMPUTE), True, HIGH, {CUT, OFFLOAD, MOVE}, CUT),
        ((SHRINK, PIECES, SPLIT, RECOMPUTE, CUT), True, HIGH, {OFFLOAD, MOVE}, OFFLOAD),
        ((SHRINK, PIECES, SPLIT, RECOMPUTE), True, HIGH, {MOVE}, MOVE),
        (tuple(ALL), True, TIGHT, (), None),
        (tuple(ALL), True, HIGH, (), None),
        (tuple(ALL), True, CRITICAL, (), LEAVE),
        ((), True, CRITICAL, (), LEAVE),
        ((), True, HIGH, {RECOMPUTE}, RECOMPUTE),
        ((), False, WILL_EXCEED, ALL, LEAVE),
        ((SHRINK,), True, WILL_EXCEED, ALL, LEAVE),
    ],
)
def test_the_ladder_is_climbed_in_order(taken, trimmed, level, available, action):
    after, decision = decide_action(PolicyState(taken, trimmed), level, available)
    assert (decision.action if decision else None) == action
    if action in ALL:
        assert after.taken_actions == (*taken, action)
    else:
        assert after.taken_actions == taken


def climb(levels, ladder=None):
    """Return the ladder and the decisions for a series of levels; SPLIT can be taken twice."""
    ladder, done = ladder or PolicyState(), []
    for level in levels:
        available = {a for a in ALL if ladder.taken_actions.count(a) < (2 if a == SPLIT else 1)}
        ladder, decision = decide_action(ladder, level, available)
        done.append(None if decision is None else (decision.way, decision.action))
    return ladder, done


def test_each_action_has_a_step_to_show_what_it_gives():
    _, done = climb([HIGH] * 18 + [CRITICAL] * 2)
    actions = [TRIM, SHRINK, PIECES, SPLIT, SPLIT, RECOMPUTE, CUT, OFFLOAD, MOVE]
    assert done[:18:2] == [("do", action) for action in actions]
    assert done[1:18:2] == [None] * 9
    assert done[18:] == [("do", LEAVE)] * 2


def test_a_settling_action_is_not_waited_for_when_the_limit_is_near():
    ladder, _ = climb([HIGH])
    assert ladder.is_settling
    assert decide_action(ladder, WILL_EXCEED, ALL)[1].action == LEAVE


def test_what_was_taken_is_undone_after_a_long_calm_the_last_first():
    ladder, _ = climb([HIGH] * 8)
    assert ladder.taken_actions == (SHRINK, PIECES, SPLIT)
    ladder, done = climb([CALM] * 50, ladder)
    assert done == [None] * 49 + [("undo", SPLIT)]
    ladder, done = climb([CALM] * 100, ladder)
    assert done == [None] * 99 + [("undo", PIECES)]
    ladder, done = climb([CALM] * 1000, ladder)
    assert [d for d in done if d] == [("undo", SHRINK)]
    assert ladder.taken_actions == ()


def test_a_moment_of_pressure_begins_the_calm_anew():
    ladder, _ = climb([HIGH] * 4)
    ladder, done = climb([*[CALM] * 49, TIGHT, *[CALM] * 49], ladder)
    assert ("undo", SHRINK) not in done
    assert climb([CALM], ladder)[1] == [("undo", SHRINK)]


def test_a_run_that_swings_changes_ever_more_rarely():
    ladder, changes = PolicyState(), []
    for _ in range(40):  # without the action it is tight, with it calm
        level = CALM if SHRINK in ladder.taken_actions else TIGHT
        for _ in range(200):
            ladder, decision = decide_action(ladder, level, {SHRINK} - set(ladder.taken_actions))
            changes.append(decision is not None and decision.action == SHRINK)
            level = CALM if SHRINK in ladder.taken_actions else TIGHT
    assert sum(changes) <= 2 * 7 + 1
    assert not any(changes[:2])
    assert changes.index(True) == 2


@pytest.mark.parametrize(
    ("taken", "available", "after"),
    [
        ((), ALL, (SHRINK, PIECES, SPLIT)),
        ((SHRINK,), ALL - {SHRINK}, (SHRINK, PIECES, SPLIT)),
        ((SHRINK, PIECES, SPLIT), {SPLIT, MOVE}, (SHRINK, PIECES, SPLIT, SPLIT)),
        ((SHRINK, PIECES, SPLIT), {MOVE}, (SHRINK, PIECES, SPLIT, MOVE)),
        ((SHRINK, PIECES), (), (SHRINK, PIECES)),
        ((), {RECOMPUTE, PIECES}, (PIECES, RECOMPUTE)),
    ],
)
def test_the_start_after_a_forced_end_begins_one_costly_rung_lower(taken, available, after):
    assert next_actions_after_oom(taken, available) == after


MIB = 1 << 20


@pytest.mark.parametrize(
    ("used_mib", "limit_mib", "familiar_mib", "leaves"),
    [
        ([100] * 5, 600, 0, False),
        ([100, 120, 140, 160, 180], 600, 0, False),  # 200 MiB/s
        ([400, 420, 440, 460, 480], 600, 0, False),
        ([410, 430, 450, 470, 492], 600, 0, True),
        ([590] * 5, 600, 0, False),
        ([592] * 5, 600, 0, True),
        ([592] * 5, 600, 592, False),  # it was there before, and nothing happened
        ([500, 520, 540, 560, 580], 600, 570, True),
        ([500, 520, 540, 560, 570], 600, 570, False),
        ([580, 560, 540, 520, 500], 600, 0, False),
        ([300, 300, 300, 500, 500], 600, 0, False),  # one allocation, which is over
        ([300, 300, 400, 500, 580], 600, 0, True),
        ([592], 600, 0, True),
        ([100], 600, 0, False),
        *(([300, 420] * 3, limit, 0, False) for limit in range(500, 541, 10)),
        ([420, 300, 420, 300, 420], 500, 0, False),
        ([360, 420, 300, 360, 420], 500, 0, False),
        # 200 MiB/s, and 20 MiB more in every other sample
        ([380, 380, 420, 420, 460], 600, 0, False),
        ([400, 440, 440, 480, 480], 600, 0, False),
        ([420, 420, 460, 460, 500], 600, 0, True),
        ([420, 460, 460, 500, 500], 600, 0, True),
    ],
)
def test_within_a_step_it_leaves_when_the_limit_is_half_a_second_away(
    used_mib, limit_mib, familiar_mib, leaves
):
    samples = [(n / 10, used * MIB) for n, used in enumerate(used_mib)]
    assert must_stop_run(samples, limit_mib * MIB, familiar_mib * MIB) is leaves


def test_samples_that_come_faster_near_the_limit_do_not_make_one_allocation_a_leak():
    times_s = [0, 0.1, 0.2, 0.3, 0.32, 0.34, 0.36, 0.38, 0.4]
    used_mib = [300, 300, 300, 300, 340, 380, 420, 460, 500]
    samples = [(t, used * MIB) for t, used in zip(times_s, used_mib, strict=True)]
    assert sustained_growth_bytes_per_s(samples) == 0
    assert sustained_growth_bytes_per_s(samples[3:]) == pytest.approx(2000 * MIB)


@pytest.mark.parametrize(
    "cycle_mib",
    [
        (300, 420),
        (300, 360, 420),
        (300, 420, 360),
        (300, 400, 420),
        (300, 320, 420),
        (300, 300, 420, 420),
        (300, 360, 420, 360),
    ],
)
@pytest.mark.parametrize("num_samples", range(3, 9))
def test_what_comes_and_goes_does_not_grow(cycle_mib, num_samples):
    for begins_at in range(len(cycle_mib)):
        used = islice(cycle(cycle_mib), begins_at, begins_at + num_samples)
        samples = [(n / 10, mib * MIB) for n, mib in enumerate(used)]
        assert sustained_growth_bytes_per_s(samples) == 0, samples


@pytest.mark.parametrize("period_s", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_a_leak_on_which_memory_swings_is_seen_before_it_is_too_late(period_s):
    """200 MiB/s and a swing of 20 MiB, sampled as the governor does; a leak alone has 0.5 s."""
    for phase, begins_s in product(range(10), (0.0, 0.03, 0.07)):

        def used_mib(time_s, shift_s=phase / 10 * period_s):
            return 200 + 200 * time_s + 20 * ((time_s + shift_s) % period_s < period_s / 2)

        time_s, samples = begins_s, []
        while not samples or not must_stop_run(samples, 600 * MIB, 0):
            samples.append((time_s, int(used_mib(time_s) * MIB)))
            samples = [(then_s, used) for then_s, used in samples if time_s - then_s <= 0.5]
            seen_s = time_s
            time_s += 0.02 if used_mib(time_s) > 420 else 0.1
        times_s = (seen_s + n / 1000 for n in count())
        reached_s = next(time_s for time_s in times_s if used_mib(time_s) >= 600)
        assert 0.3 < reached_s - seen_s < 0.8


def test_a_reserve_is_a_hundredth_and_at_least_8_mib():
    assert reserved_bytes(100 * GIB) == GIB
    assert reserved_bytes(100 * MIB) == 8 * MIB


@pytest.mark.parametrize(
    ("used", "limit", "room"), [(0, 100, 92), (90, 100, 2), (92, 100, 0), (99, 100, 0)]
)
def test_one_allocation_may_not_make_memory_high(used, limit, room):
    assert free_bytes_below_level(used, limit) == room
