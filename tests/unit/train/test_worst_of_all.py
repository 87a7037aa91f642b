from types import SimpleNamespace

import pytest

from hpc_tune.train.metrics import _worst_of_all


@pytest.mark.parametrize("world", [[0.5], [1.25, 0.5], [0.5, 86400.0, 0.25], [-0.001, 0.0]])
def test_the_slowest_rank_is_named_with_its_time_and_the_fastest_ones(world):
    """One element-wise maximum over the ranks says all of it; times to a tenth of a millisecond."""
    last = (1 << 20) - 1  # the number of the last of so many ranks
    ranks = [last - n for n in range(len(world))]
    given = []
    for rank, work_s in zip(ranks, world, strict=True):
        comm = SimpleNamespace(
            world=SimpleNamespace(rank=rank), max=lambda values: given.append(values) or values
        )
        _worst_of_all(comm, None, work_s)
    most = [max(float(v) for v in column) for column in zip(*given, strict=True)]
    comm.max = lambda values: most
    found = _worst_of_all(comm, None, world[-1])
    assert found.most_work_s == pytest.approx(max(0.0, *world, 0.0), abs=1e-4)
    assert found.least_work_s == pytest.approx(max(0.0, min(world)), abs=1e-4)
    if max(world) > 0:
        assert found.slowest_rank == ranks[world.index(max(world))]
