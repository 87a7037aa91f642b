import os
import subprocess
import sys

import pytest

from hpc_tune.errors import WorldError
from hpc_tune.world.discover import World, assign_node_indices, discover, make_host_key
from tests.support.launcher_variables import HYDRA, OPENMPI, SRUN, TORCHRUN


def test_a_world_prints_as_one_line():
    world = World(5, 16, 1, 8, 1, 2, "n2", "openmpi")
    assert str(world) == "rank 5/16 node 1/2 local 1/8 via openmpi"


def test_a_world_without_mpi_comes_from_the_variables_alone():
    world, mpi_comm = discover(SRUN)
    assert mpi_comm is None
    assert str(world) == "rank 6/7 node 2/3 local 1/2 via slurm"


def test_missing_variables_are_named():
    environ = {k: v for k, v in TORCHRUN.items() if not k.startswith("GROUP_RANK")}
    with pytest.raises(WorldError, match="torchrun did not set node; found only"):
        discover(environ)


# An mpi4py that looks, as MPI_Init of Cray MPICH does, whether it shall send from GPUs.
CRAY_MPI = """
import os
seen = os.environ.get("MPICH_GPU_SUPPORT_ENABLED")
raise ImportError(f"seen: {seen}")
"""


@pytest.mark.parametrize(("was", "says"), [("1", True), ("0", False), (None, False)])
def test_mpi_is_not_asked_to_send_from_gpus(tmp_path, was, says):
    (tmp_path / "mpi4py.py").write_text(CRAY_MPI)
    program = "from hpc_tune import log; log.configure_logging(0)\n"
    program += "from hpc_tune.world.discover import discover; discover()"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MPICH")}
    environ |= HYDRA | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environ |= {} if was is None else {"MPICH_GPU_SUPPORT_ENABLED": was}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120
    )
    seen = None if was is None else "0"
    assert f"mpi4py cannot be loaded (seen: {seen})" in done.stderr
    assert ("MPICH_GPU_SUPPORT_ENABLED=0 instead of 1: MPI sends" in done.stderr) == says


@pytest.mark.parametrize(
    ("mpi_node_keys", "by_name", "claimed", "nodes"),
    [
        ([0, 0, 2, 2], "aabb", [2, 2, 2, 2], [0, 0, 1, 1]),
        ([0, 1, 0, 1], "abab", [None] * 4, [0, 1, 0, 1]),
        ([0, 0, 2], "aab", [2, 2, 1], [0, 0, 1]),
        # Open MPI 5 over Slurm's PMIx 4
        ([0, 1, 2, 3], "aabb", [2, 2, 2, 2], [0, 0, 1, 1]),
        # every node is called localhost, and MPI knows better
        ([0, 0, 2, 2], "llll", [2, 2, 2, 2], [0, 0, 1, 1]),
    ],
)
def test_nodes_are_numbered_by_their_lowest_rank(mpi_node_keys, by_name, claimed, nodes):
    assert assign_node_indices(mpi_node_keys, by_name, claimed) == nodes


def test_a_node_split_that_fits_nobody_is_shown_from_all_sides():
    with pytest.raises(WorldError, match=r"says \['2'\] ranks per node, MPI sees \[1, 1, 1, 1\]"):
        assign_node_indices([0, 1, 2, 3], "llll", [2, 2, 2, 2])


@pytest.mark.parametrize(
    ("found", "variables", "named"),
    [
        ("libmpi.so.40", OPENMPI, "{lib}/libmpi.so.40"),
        ("libmpi.so.40", HYDRA, "to the path of its libmpi.so.12"),
        ("libmpi.so.12", HYDRA, "{lib}/libmpi.so.12"),
        ("libmpi.so", HYDRA, "to the path of its libmpi.so.12"),
    ],
)
def test_the_library_that_is_named_is_the_launchers_own(
    tmp_path, monkeypatch, found, variables, named
):
    for name in ("bin/mpirun", f"lib/{found}"):
        file = tmp_path / name
        file.parent.mkdir()
        file.touch(mode=0o755)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match="mpi4py cannot be loaded") as error:
        discover(variables | {"PATH": str(tmp_path / "bin")})
    assert f"MPI4PY_LIBMPI{'=' * named.startswith('{')}" in str(error.value)
    assert str(error.value).endswith(named.format(lib=tmp_path / "lib"))


def test_importing_the_world_imports_neither_torch_nor_mpi():
    code = (
        "import sys\n"
        "from hpc_tune.world import bootstrap, comm, discover, failure, stop\n"
        "discover.discover({})\n"
        "print(sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hosts_of_one_name_are_told_apart_by_their_networks():
    program = "from hpc_tune.world.discover import make_host_key; print(make_host_key())"
    argv = [sys.executable, "-c", program]
    here = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert here.strip() == make_host_key()
    there = subprocess.run(["unshare", "--net", *argv], capture_output=True, text=True)
    if there.returncode:
        pytest.skip("network namespaces need root")
    assert there.stdout.split()[0] == here.split()[0]
    assert there.stdout != here
