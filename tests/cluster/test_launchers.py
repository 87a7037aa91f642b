"""Every launcher, at several numbers of ranks: the same world, and the same losses as one process.

Those that Slurm starts are steps of a real one; the others are started as users do.
"""

import socket
import sys

import pytest

from tests.support.launchers import NAMES, Launcher, launcher
from tests.support.ranks import HANG_S, rank_environment, run_ranks
from tests.support.slurm import slurm
from tests.support.training import losses, outcome, worlds_in, worst_gap

pytestmark = pytest.mark.full

SETTINGS = [
    "train.max_steps=4",
    "data.path=builtin:pydocs:heldout",
    "data.eval_path=null",
    "data.seq_len=64",
    "batch.global_size=8",
    "tune.method=lora",
    "run.device=cpu",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
    "memory.governor=off",
]

soak = pytest.mark.soak


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", limits=False) as cluster:
        yield {"SLURM_CONF": cluster.environment["SLURM_CONF"]}


def train(started_by, n, folder, more=()):
    """Train with ``n`` ranks, without a launcher if None; return the worlds found, by rank."""
    words = [*SETTINGS, f"run.dir={folder / 'run'}", f"data.cache={folder / 'data'}"]
    argv = started_by.command(n, "-m", "tests.support.train_and_print_world", *words)
    environment = rank_environment(n or 1, {**started_by.environment, **dict(more)})
    done = run_ranks(argv, environment, HANG_S)
    assert done.returncode == 0, done.stderr
    assert outcome(folder / "run")["status"] == "done", done.stderr
    return worlds_in(done.stdout)


def expected(rank, n, told):
    place = {"rank": rank, "size": n, "local_rank": rank, "local_size": n}
    where = {"node": 0, "num_nodes": 1, "hostname": socket.gethostname()}
    return {**place, **where, "launcher": told}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The world of plain python, and its losses."""
    folder = tmp_path_factory.mktemp("alone")
    [world] = train(Launcher((sys.executable,), (), "single"), None, folder)
    return world, losses(folder / "run")


def test_plain_python_is_a_world_of_one(alone):
    world, told = alone
    assert world == expected(0, 1, "single")
    assert len(told) == 4


# The rest is for make soak: two ranks of each tell most.
@pytest.mark.parametrize("n", [pytest.param(1, marks=soak), 2, pytest.param(5, marks=soak)])
@pytest.mark.parametrize("name", NAMES)
def test_each_launcher_gives_the_same_world_and_the_same_losses(request, tmp_path, alone, name, n):
    started_by = launcher(name)
    more = request.getfixturevalue("cluster") if name.startswith("srun") else {}
    worlds = train(started_by, n, tmp_path, more)
    # A step of one task is often a shell whose MPI serves one program only: it goes without.
    told = "slurm" if name.startswith("srun") and n == 1 else started_by.told
    assert worlds == [expected(rank, n, told) for rank in range(n)]
    gap = worst_gap(losses(tmp_path / "run"), alone[1])
    print(f"{name}, {n} ranks: {worlds[0]['launcher']}, losses {gap:.1e} from one process's")
    assert gap < 1e-5
