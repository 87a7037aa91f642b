import subprocess
import sys

import pytest

from hpc_tune.errors import WorldError
from hpc_tune.world.discover import Claim, World, claim_of, discover, rank_hint
from hpc_tune.world.nodes import nodes_of

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "5",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "4(x4)",
}
SRUN = BATCH_SHELL | {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
}
SRUN_CLAIM = Claim("slurm", False, 6, 7, 1, 2, 2, 3)
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8"}
HYDRA = PMI | {"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
PLAIN_CLAIM = Claim("an unknown launcher", False, 3, 4)
PALS = {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "2"}
SINGLE = Claim("single", False, 0, 1, 0, 1, 0, 1)
HYDRA_CLAIM = Claim("mpich", True, 3, 8, 3, 4)

TABLE = {
    "nothing": ({}, SINGLE),
    "Open MPI": (OPENMPI, Claim("openmpi", True, 5, 16, 1, 4)),
    "mpirun in a batch script": (
        BATCH_SHELL | OPENMPI,
        Claim("openmpi", True, 5, 16, 1, 4),
    ),
    "mpirun whose daemons srun started": (SRUN | OPENMPI, Claim("openmpi", True, 5, 16, 1, 4)),
    "MPICH Hydra": (HYDRA, HYDRA_CLAIM),
    "Hydra whose proxies srun started": (SRUN | HYDRA, HYDRA_CLAIM),
    "Intel MPI": (HYDRA | {"I_MPI_HYDRA_BOOTSTRAP": "slurm"}, Claim("intelmpi", True, 3, 8, 3, 4)),
    "an Intel module beside MPICH": (HYDRA | {"I_MPI_ROOT": "/opt/intel"}, HYDRA_CLAIM),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
        Claim("mvapich", True, 1, 2),
    ),
    "Cray PALS": (PALS | {"PMI_SIZE": "16"}, Claim("pals", True, 9, 16, 1, 4)),
    "Cray PALS that srun started": (
        SRUN | PALS | {"PALS_RANKID": "6"},
        Claim("pals", True, 6, 7, 1, 4),
    ),
    "srun": (SRUN, SRUN_CLAIM),
    "srun of an old Slurm": (
        {k: v for k, v in SRUN.items() if "STEP" not in k} | {"SLURM_STEPID": "0"},
        Claim("slurm", False, 6, 16, 1, 4, 2, 4),
    ),
    "srun with PMI2": (
        SRUN | PMI | {"PMI_FD": "9"},
        Claim("srun-pmi2", True, 6, 7, 1, 2, 2, 3),
    ),
    "srun with PMIx": (
        SRUN | {"PMIX_RANK": "6", "PMIX_NAMESPACE": "slurm.pmix.77.0"},
        Claim("srun-pmix", True, 6, 7, 1, 2, 2, 3),
    ),
    "a shell of srun --pty with PMIx": (
        SRUN
        | {
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "PMIX_RANK": "0",
            "PMIX_NAMESPACE": "slurm.pmix.77.0",
        },
        Claim("slurm", False, 0, 1, 0, 1, 0, 1),
    ),
    "plain python in a batch script": (BATCH_SHELL, SINGLE),
    "plain python in the batch step": (BATCH_SHELL | {"SLURM_STEP_ID": "4294967291"}, SINGLE),
    "plain python in an interactive step": (BATCH_SHELL | {"SLURM_STEP_ID": "4294967290"}, SINGLE),
    "torchrun": (TORCHRUN, Claim("torchrun", False, 3, 4, 1, 2, 1, 2)),
    "torchrun under srun": (SRUN | TORCHRUN, Claim("torchrun", False, 3, 4, 1, 2, 1, 2)),
    "deepspeed's launcher": (PLAIN | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, PLAIN_CLAIM),
    "a Kubernetes PyTorchJob": (PLAIN, PLAIN_CLAIM),
    "a loop over ssh in a batch script": (BATCH_SHELL | PLAIN, PLAIN_CLAIM),
    "torch's variables under srun": (SRUN | PLAIN, SRUN_CLAIM),
    "srun whose tasks set torch's variables": (
        SRUN | PLAIN | {"RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "1"},
        SRUN_CLAIM,
    ),
    "deepspeed's launcher in each task of srun": (SRUN | PLAIN | {"LOCAL_RANK": "1"}, PLAIN_CLAIM),
    "torch's variables of one process": ({"RANK": "0", "WORLD_SIZE": "1"}, SINGLE),
    "a size of one alone": ({"WORLD_SIZE": "1", "MASTER_PORT": "29500"}, SINGLE),
    "PRRTE's prun": ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "prte-1"}, Claim("pmix", True, 2)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_launcher_is_read_from_its_variables(name):
    environ, expected = TABLE[name]
    assert claim_of(environ) == expected
    assert rank_hint(environ) == expected.rank


def test_a_world_prints_as_one_line():
    world = World(5, 16, 1, 8, 1, 2, "n2", "openmpi")
    assert str(world) == "rank 5/16 node 1/2 local 1/8 via openmpi"


def test_a_world_without_mpi_comes_from_the_variables_alone():
    world, mpi_comm = discover(SRUN)
    assert mpi_comm is None
    assert str(world) == "rank 6/7 node 2/3 local 1/2 via slurm"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "x"}, "RANK='x' in the environment is not a number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
    ],
)
def test_senseless_variables_are_named(changed, says):
    with pytest.raises(WorldError, match=says):
        claim_of(TORCHRUN | changed)
    assert rank_hint(TORCHRUN | changed) == 0


def test_missing_variables_are_named():
    environ = {k: v for k, v in TORCHRUN.items() if not k.startswith("GROUP_RANK")}
    with pytest.raises(WorldError, match="torchrun did not say node; found only"):
        discover(environ)


@pytest.mark.parametrize("lacking", PLAIN)
def test_of_an_unknown_launcher_each_variable_that_is_missing_is_named(lacking):
    environ = {key: value for key, value in PLAIN.items() if key != lacking}
    with pytest.raises(WorldError, match=f"but not {lacking}: .* mpirun, srun or torchrun"):
        claim_of(environ)


def test_a_rank_without_a_size_is_not_a_run_of_its_own():
    with pytest.raises(WorldError, match="RANK=0, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT:"):
        claim_of({"RANK": "0"})


def test_a_port_that_is_none_is_named():
    with pytest.raises(WorldError, match="MASTER_PORT='http' is not the number of a port"):
        claim_of(PLAIN | {"MASTER_PORT": "http"})


@pytest.mark.parametrize(
    ("by_mpi", "by_name", "claimed", "nodes"),
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
def test_nodes_are_numbered_by_their_lowest_rank(by_mpi, by_name, claimed, nodes):
    assert nodes_of(by_mpi, by_name, claimed) == nodes


def test_a_node_split_that_fits_nobody_is_shown_from_all_sides():
    with pytest.raises(WorldError, match=r"says \['2'\] ranks per node, MPI sees \[1, 1, 1, 1\]"):
        nodes_of([0, 1, 2, 3], "llll", [2, 2, 2, 2])


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
        "discover.rank_hint(); discover.discover({})\n"
        "print(sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
