"""When the first save of a start is due."""

import time

import pytest

from hpc_tune.train.control import _clock_of_saves


@pytest.mark.parametrize(("every_minutes", "due_s"), [(30.0, 300), (15.0, 300), (2.0, 120)])
def test_the_first_save_is_due_after_five_minutes_at_most(every_minutes, due_s):
    left_s = _clock_of_saves(every_minutes) + 60 * every_minutes - time.monotonic()
    assert left_s == pytest.approx(due_s, abs=5)


def test_without_a_clock_no_save_is_due():
    assert _clock_of_saves(None) == pytest.approx(time.monotonic(), abs=5)
