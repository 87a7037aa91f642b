import random
import time

import pytest
import torch

from hpc_tune.batch import Batch
from hpc_tune.data.loader import Prefetcher

STEP, END, STEP_BYTES = 3, 100, 3 * 8


def _build(start):
    if start >= END:
        return None
    time.sleep(random.random() / 2000)
    row = torch.full((1, 1), start)
    return [Batch(row, row, row, 0, 1, start)], min(start + STEP, END)


@pytest.mark.parametrize("seed", range(5))
def test_steps_come_in_order_whatever_is_changed_while_they_are_built(seed):
    choose = random.Random(seed)
    ahead, start = Prefetcher(_build, 4 * STEP_BYTES, STEP_BYTES), 0
    for _ in range(400):
        match choose.choice(["take", "take", "take", "restart", "limit", "sleep"]):
            case "take" if start < END:
                assert [batch.first_row for batch in ahead.take(start)] == [start]
                start = min(start + STEP, END)
            case "restart":
                start = choose.randrange(0, END, STEP)
                ahead.restart(start)
            case "limit":
                limit = choose.choice([0, 1, 2, 8]) * STEP_BYTES
                ahead.set_limit_bytes(limit)
                assert ahead._queued_bytes <= limit
            case "sleep":
                time.sleep(0.001)
    ahead.close()
    assert ahead._queued_bytes == 0


def test_close_ends_the_thread_and_steps_still_come():
    ahead = Prefetcher(_build, 4 * STEP_BYTES, STEP_BYTES)
    ahead.take(0)
    thread = ahead._thread
    assert thread is not None
    assert thread.is_alive()
    ahead.close()
    assert not thread.is_alive()
    assert ahead.take(STEP)[0].first_row == STEP


def test_no_thread_is_started_where_not_even_one_step_fits():
    ahead = Prefetcher(_build, STEP_BYTES - 1, STEP_BYTES)
    assert ahead.take(0)[0].first_row == 0
    assert ahead._thread is None
