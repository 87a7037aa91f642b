import math
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from hpc_tune.train.control import StepStatus
from hpc_tune.train.metrics import RankUsage, UsageByRank, _find_extremes


def of_ranks(*said):
    return UsageByRank(*zip(*map(astuple, said), strict=True))


def step(**known):
    return SimpleNamespace(**{"host_bytes": 0, "host_ranks_bytes": 0, "device_bytes": 0} | known)


@pytest.mark.parametrize("world", [[0.5], [1.25, 0.5], [0.5, 86400.0, 0.25], [-0.001, 0.0]])
def test_the_slowest_rank_is_named_with_its_time_and_the_fastest_ones(world):
    """Times to a tenth of a millisecond."""
    found = _find_extremes(step(), of_ranks(*(RankUsage(work_s=own) for own in world)))
    assert found["most_work_s"] == pytest.approx(max(0.0, *world, 0.0), abs=1e-4)
    assert found["least_work_s"] == pytest.approx(max(0.0, min(world)), abs=1e-4)
    if max(world) > 0:
        assert found["slowest_rank"] == world.index(max(world))


def test_of_equally_slow_ranks_the_last_is_named():
    found = _find_extremes(
        step(), of_ranks(*(RankUsage(work_s=own) for own in (0.30001, 0.3, 0.2)))
    )
    assert found["slowest_rank"] == 1


def test_the_fullest_node_and_device_need_not_be_the_same_rank():
    said = [RankUsage(2.0**53, 1.0, 6.0), RankUsage(2.0, 5.0, 3.0), RankUsage(1.0, 2.0, 4.0)]
    found = _find_extremes(step(device_bytes=None), of_ranks(*said))
    assert (found["host_bytes"], found["host_ranks_bytes"]) == (2**53, 5)
    assert "device_bytes" not in found


def test_what_ranks_say_at_a_boundary_adds_up_in_any_order():
    """The terms of weighted tokens are no whole numbers."""
    loss_terms = [0.1, 1e16, 0.3, -1e16, 0.7]

    def heard(order):
        own = [StepStatus(loss_terms[rank], *(0.0,) * 7, (1.0,), (2.0,)) for rank in order]
        beside = [RankUsage(work_s=float(rank)) for rank in order]
        rows = []
        for status, more in zip(own, beside, strict=True):
            comm = SimpleNamespace(
                gather_elementwise=lambda row: rows.append(row) or [[v] for v in row]
            )
            status.exchange(comm, more)
        everyone = SimpleNamespace(gather_elementwise=lambda _: list(zip(*rows, strict=True)))
        status, said = own[0].exchange(everyone, beside[0])
        assert list(said.work_s) == order
        return status

    status = heard([0, 1, 2, 3, 4])
    assert status.loss_terms == math.fsum(loss_terms)
    assert (status.levels, status.loss_tokens_by_source) == ((5.0,), (10.0,))
    assert heard([3, 0, 4, 2, 1]) == status
