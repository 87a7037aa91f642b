"""Chosen answers that become less likely are told of, once for each time that they fall."""

import math

import pytest

from hpc_tune.checkpoint.state import Evals
from hpc_tune.rundir.facts import (
    MIN_LOG_PROB_FALLS,
    extend_falling_streak,
    likelihood_displacement_warning,
    longest_falling_streak,
)


def streak_of(values):
    streak = ()
    for value in values:
        streak = extend_falling_streak(streak, value)
    return streak


@pytest.mark.parametrize(
    ("values", "streak"),
    [
        ([], ()),
        ([-2.0], (-2.0,)),
        ([-2.0, -2.1, -2.2], (-2.0, -2.1, -2.2)),
        ([-2.0, -2.1, -2.1], (-2.1,)),
        ([-2.0, -2.1, -1.9, -2.0], (-1.9, -2.0)),
        ([-2.0, math.nan, -2.1], (-2.1,)),
        ([-2.0, -math.inf], ()),
    ],
)
def test_a_streak_is_what_falls_without_a_break(values, streak):
    assert streak_of(values) == streak


def test_a_warning_needs_three_falls_and_has_the_figures():
    assert MIN_LOG_PROB_FALLS == 3
    assert likelihood_displacement_warning((-2.0, -2.1, -2.2)) is None
    said = likelihood_displacement_warning((-2.0, -2.1, -2.2, -2.5))
    assert "in 3 evaluations in a row, from -2.000 to -2.500 per token" in said
    assert "tune.sft_weight=1" in said


def test_the_longest_streak_of_a_run_is_found_wherever_it_is():
    assert longest_falling_streak([-1.0, -1.1, -1.2, -1.0, -1.1]) == (-1.0, -1.1, -1.2)
    assert longest_falling_streak([-1.0, -1.1, -1.0, -1.2]) == (-1.0, -1.2)
    assert longest_falling_streak([]) == ()


def test_a_run_that_resumes_goes_on_counting():
    evals = Evals()
    for number, chosen in enumerate([-2.0, -2.1, -2.2, -2.3]):
        evals = Evals.from_json(vars(evals)).with_eval(number, 1.0, chosen)
    assert likelihood_displacement_warning(evals.chosen) is not None
    assert Evals().with_eval(1, 1.0).chosen == ()  # of answers without preferences
