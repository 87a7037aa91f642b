"""Under Slurm's --mem as in a cgroup: a job that would have been killed leaves, and finishes."""

import pytest

from tests.ranks.test_pressure import (
    WAYS,
    check_load,
    check_merge,
    check_neighbor,
    check_save,
    check_way,
)
from tests.support.slurm import slurm

REPEATS = 3


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster.limited


@pytest.mark.full
def test_a_job_that_slurm_would_have_killed_leaves_and_then_finishes(tmp_path, limited):
    check_way(limited, tmp_path, "a leak of 200 MB/s within a step")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(WAYS))
def test_it_does_with_ranks_of_mpirun(tmp_path, limited, name):
    for number in range(REPEATS):
        check_way(limited, tmp_path / str(number), name, n=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["memory", "tmpfs", "cached"])
def test_a_neighbor_within_the_job_does_not_get_it_killed(tmp_path, limited, kind):
    for number in range(REPEATS):
        check_neighbor(limited, tmp_path / f"{kind}-{number}", kind)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_saves_loading_and_merging_ask_first(tmp_path, limited, larger, tuned):
    for number in range(REPEATS):
        check_save(limited, tmp_path / f"save-{number}", larger)
        check_load(limited, tmp_path / f"load-{number}", larger)
        check_merge(limited, tmp_path / f"merge-{number}", tuned)
