import subprocess
import sys

import pytest

from hpc_tune.cluster.launchers import (
    check_torchrun_master,
    environ_without_launcher,
    explain_command_failure,
    find_launch_info,
    find_launcher,
    rank_hint,
    run_hpc_tune_command,
)
from hpc_tune.cluster.protocol import LaunchInfo, RendezvousEndpoint
from hpc_tune.errors import WorldError
from tests.support.launcher_variables import (
    BATCH_SHELL,
    FLUX,
    HYDRA,
    JSRUN,
    OPENMPI,
    PALS,
    PLAIN,
    PMI,
    SRUN,
    TORCHRUN,
)

HEAVY = ("torch", "mpi4py", "numpy", "psutil", "h5py", "transformers")
OPEN_MPI, MPICH = "libmpi.so.40", "libmpi.so.12"
SRUN_INFO = LaunchInfo("slurm", None, 6, 7, 1, 2, 2, 3)
PLAIN_INFO = LaunchInfo("an unknown launcher", None, 3, 4)
SINGLE = LaunchInfo("single", None, 0, 1, 0, 1, 0, 1)
HYDRA_INFO = LaunchInfo("mpich", MPICH, 3, 8, 3, 4)

TABLE = {
    "nothing": ({}, SINGLE),
    "Open MPI": (OPENMPI, LaunchInfo("openmpi", OPEN_MPI, 5, 16, 1, 4)),
    "mpirun in a batch script": (
        BATCH_SHELL | OPENMPI,
        LaunchInfo("openmpi", OPEN_MPI, 5, 16, 1, 4),
    ),
    "mpirun whose daemons srun started": (
        SRUN | OPENMPI,
        LaunchInfo("openmpi", OPEN_MPI, 5, 16, 1, 4),
    ),
    "MPICH Hydra": (HYDRA, HYDRA_INFO),
    "Hydra whose proxies srun started": (SRUN | HYDRA, HYDRA_INFO),
    "Intel MPI": (
        HYDRA | {"I_MPI_HYDRA_BOOTSTRAP": "slurm"},
        LaunchInfo("intelmpi", MPICH, 3, 8, 3, 4),
    ),
    "an Intel module beside MPICH": (HYDRA | {"I_MPI_ROOT": "/opt/intel"}, HYDRA_INFO),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
        LaunchInfo("mvapich", MPICH, 1, 2),
    ),
    "Cray PALS": (PALS | {"PMI_SIZE": "16"}, LaunchInfo("pals", MPICH, 9, 16, 1, 4)),
    "Cray PALS that srun started": (
        SRUN | PALS | {"PALS_RANKID": "6"},
        LaunchInfo("pals", MPICH, 6, 7, 1, 4),
    ),
    "Flux": (FLUX, LaunchInfo("flux", MPICH, 5, 8, 1, None, None, 2)),
    "Flux with its own PMI": (
        FLUX | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"},
        LaunchInfo("flux", MPICH, 5, 8, 1, None, None, 2),
    ),
    "Flux with PMIx": (
        FLUX | {"PMIX_RANK": "5"},
        LaunchInfo("flux", OPEN_MPI, 5, 8, 1, None, None, 2),
    ),
    "mpirun in a task of Flux": (FLUX | OPENMPI, LaunchInfo("openmpi", OPEN_MPI, 5, 16, 1, 4)),
    "jsrun": (JSRUN, LaunchInfo("jsrun", "libmpi_ibm.so.3", 7, 12, 1, 6)),
    "jsrun with Spectrum MPI": (JSRUN | OPENMPI, LaunchInfo("openmpi", OPEN_MPI, 5, 16, 1, 4)),
    "srun": (SRUN, SRUN_INFO),
    "srun of an old Slurm": (
        {k: v for k, v in SRUN.items() if "STEP" not in k} | {"SLURM_STEPID": "0"},
        LaunchInfo("slurm", None, 6, 16, 1, 4, 2, 4),
    ),
    "srun with PMI2": (
        SRUN | PMI | {"PMI_FD": "9"},
        LaunchInfo("srun-pmi2", MPICH, 6, 7, 1, 2, 2, 3),
    ),
    "srun with PMIx": (
        SRUN | {"PMIX_RANK": "6", "PMIX_NAMESPACE": "slurm.pmix.77.0"},
        LaunchInfo("srun-pmix", OPEN_MPI, 6, 7, 1, 2, 2, 3),
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
        LaunchInfo("slurm", None, 0, 1, 0, 1, 0, 1),
    ),
    "plain python in a batch script": (BATCH_SHELL, SINGLE),
    "plain python in the batch step": (BATCH_SHELL | {"SLURM_STEP_ID": "4294967291"}, SINGLE),
    "plain python in an interactive step": (BATCH_SHELL | {"SLURM_STEP_ID": "4294967290"}, SINGLE),
    "torchrun": (TORCHRUN, LaunchInfo("torchrun", None, 3, 4, 1, 2, 1, 2)),
    "torchrun under srun": (SRUN | TORCHRUN, LaunchInfo("torchrun", None, 3, 4, 1, 2, 1, 2)),
    "deepspeed's launcher": (PLAIN | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, PLAIN_INFO),
    "a Kubernetes PyTorchJob": (PLAIN, PLAIN_INFO),
    "a loop over ssh in a batch script": (BATCH_SHELL | PLAIN, PLAIN_INFO),
    "torch's variables under srun": (SRUN | PLAIN, SRUN_INFO),
    "srun whose tasks set torch's variables": (
        SRUN | PLAIN | {"RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "1"},
        SRUN_INFO,
    ),
    "deepspeed's launcher in each task of srun": (SRUN | PLAIN | {"LOCAL_RANK": "1"}, PLAIN_INFO),
    "torch's variables of one process": ({"RANK": "0", "WORLD_SIZE": "1"}, SINGLE),
    "a size of one alone": ({"WORLD_SIZE": "1", "MASTER_PORT": "29500"}, SINGLE),
    "PRRTE's prun": (
        {"PMIX_RANK": "2", "PMIX_NAMESPACE": "prte-1"},
        LaunchInfo("pmix", OPEN_MPI, 2),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_launcher_is_read_from_its_variables(name):
    environ, expected = TABLE[name]
    assert find_launch_info(environ) == expected
    assert rank_hint(environ) == expected.rank


@pytest.mark.parametrize("name", TABLE)
def test_without_the_launchers_variables_a_process_is_no_rank(name, monkeypatch):
    for key, value in TABLE[name][0].items():
        monkeypatch.setenv(key, value)
    assert find_launch_info(environ_without_launcher()) == SINGLE


def test_a_command_of_its_own_gives_back_what_it_prints_and_its_exit_code():
    told, refused = run_hpc_tune_command(["--version"], 60.0), run_hpc_tune_command(["trian"], 60.0)
    assert (told.returncode, told.stdout.split()[0], told.stderr) == (0, "hpc_tune", "")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean train" in refused.stderr


def test_a_command_that_fails_is_told_of_in_words_and_not_by_its_arguments():
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_hpc_tune_command(["doctor"], 0.0)
    assert explain_command_failure(late.value) == "not done within 0 s"
    ended = {3: "it ended with exit code 3", -9: "it was ended by SIGKILL"}
    for code, said in ended.items():
        assert explain_command_failure(subprocess.CalledProcessError(code, ["x"])) == said
    assert explain_command_failure(OSError("no such file")) == "no such file"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "x"}, "RANK='x' in the environment is not a number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
    ],
)
def test_senseless_variables_are_named(changed, says):
    with pytest.raises(WorldError, match=says):
        find_launch_info(TORCHRUN | changed)
    assert rank_hint(TORCHRUN | changed) == 0


@pytest.mark.parametrize("lacking", PLAIN)
def test_of_an_unknown_launcher_each_variable_that_is_missing_is_named(lacking):
    environ = {key: value for key, value in PLAIN.items() if key != lacking}
    with pytest.raises(WorldError, match=f"but not {lacking}: .* mpirun, srun or torchrun"):
        find_launch_info(environ)


def test_a_rank_without_a_size_is_not_a_run_of_its_own():
    with pytest.raises(WorldError, match="RANK=0, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT:"):
        find_launch_info({"RANK": "0"})


def test_a_port_that_is_none_is_named():
    with pytest.raises(WorldError, match="MASTER_PORT='http' is not a port number"):
        find_launch_info(PLAIN | {"MASTER_PORT": "http"})


@pytest.mark.parametrize(
    ("changed", "addresses"),
    [
        ({"SLURM_STEP_NUM_NODES": "1"}, ["127.0.0.1"]),
        ({}, ["n1"]),
        ({"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}, ["n1", "10.0.0.9"]),
        ({"SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}, ["10.0.0.9"]),
    ],
)
def test_ranks_of_srun_without_mpi_meet_on_the_first_node(changed, addresses):
    meeting = rendezvous_endpoint(SRUN | {"SLURM_STEP_NODELIST": "n[1-3]"} | changed)
    assert [a for a in meeting.addresses if a != "::1"] == addresses  # not all hosts have IPv6


def test_ranks_of_srun_that_know_no_node_say_so():
    with pytest.raises(WorldError, match="SLURM_STEP_NODELIST is empty"):
        rendezvous_endpoint(SRUN)


@pytest.mark.parametrize("name", ["JOB_ID", "STEP_ID", "RESTART_COUNT", "CLUSTER_NAME"])
def test_another_start_of_srun_meets_elsewhere(name):
    step = SRUN | {"SLURM_STEP_NODELIST": "n[1-3]"}
    assert (
        rendezvous_endpoint(step).token != rendezvous_endpoint(step | {f"SLURM_{name}": "8"}).token
    )


def test_ranks_with_torchs_variables_meet_at_the_port_that_these_name():
    assert rendezvous_endpoint(PLAIN) == RendezvousEndpoint(["n1"], "4 ranks at 29500", [29500])


@pytest.mark.parametrize(
    ("library", "cannot"),
    [
        ("MPICH Version:      5.0.0\nMPICH Release date:", True),
        ("MPICH Version:      4.3.2\n", False),
        ("Open MPI v5.0.8, package: Open MPI", False),
    ],
)
def test_open_mpi_starts_no_mpich_of_5(library, cannot):
    assert find_launcher(OPENMPI)[0].cannot_run_mpi(library) == cannot
    assert not find_launcher(HYDRA)[0].cannot_run_mpi(library)


def rendezvous_endpoint(environ):
    launcher, info = find_launcher(environ)
    return launcher.rendezvous_endpoint(environ, info)


def test_a_loopback_master_is_refused_where_there_are_nodes():
    with pytest.raises(WorldError, match="MASTER_ADDR=localhost is .*, each node's own"):
        check_torchrun_master({"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"})
    with pytest.raises(WorldError, match="cannot be resolved"):
        check_torchrun_master({"MASTER_ADDR": "x" * 70, "GROUP_WORLD_SIZE": "2"})
    check_torchrun_master({"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "1"})
    check_torchrun_master({"MASTER_ADDR": "192.0.2.1", "GROUP_WORLD_SIZE": "2"})
    check_torchrun_master({})


def test_a_rank_asks_its_launcher_without_importing_anything_heavy():
    code = (
        "import sys\n"
        "from hpc_tune.cluster.launchers import rank_hint\n"
        "rank_hint({})\n"
        f"print(sorted({{*{HEAVY!r}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
