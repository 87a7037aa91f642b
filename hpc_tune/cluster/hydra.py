"""Hydra, the mpirun of MPICH, Intel MPI and MVAPICH."""

from collections.abc import MutableMapping

from hpc_tune.cluster.protocol import LIBMPI_OF_MPICH, Claim, Environ, Launcher, read_claim
from hpc_tune.cluster.slurm import is_srun_step

# Sites set it by a module; mpi4py is linked without the library that Cray MPICH asks for then, and
# MPI_Init aborts ("GPU_SUPPORT_ENABLED is requested, but GTL library is not linked").
GPU_AWARE_VARIABLE = "MPICH_GPU_SUPPORT_ENABLED"


def disable_gpu_aware_mpi(environ: MutableMapping[str, str]) -> str | None:
    """Let Cray MPICH leave GPUs alone, which only NCCL sends from here; return what is to be said.

    Beside NCCL it can also wait for ever. MPI must not be imported yet.
    """
    if environ.get(GPU_AWARE_VARIABLE, "0") == "0":
        return None
    was, environ[GPU_AWARE_VARIABLE] = environ[GPU_AWARE_VARIABLE], "0"
    return f"{GPU_AWARE_VARIABLE}=0 instead of {was}: MPI sends nothing from GPUs here"


def _claim_of_hydra(environ: Environ) -> Claim | None:
    # Over srun-started proxies the step's variables describe the proxies; srun sets PMI_RANK too.
    if "PMI_RANK" not in environ:
        return None
    if "MPI_LOCALNRANKS" not in environ and is_srun_step(environ):
        return None
    intel = any(key.startswith(("I_MPI_HYDRA", "I_MPI_INFO")) for key in environ)
    return read_claim(
        environ,
        "intelmpi" if intel else "mpich",
        LIBMPI_OF_MPICH,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    )


def _claim_of_mvapich(environ: Environ) -> Claim | None:
    if "MV2_COMM_WORLD_SIZE" not in environ:
        return None
    return read_claim(
        environ,
        "mvapich",
        LIBMPI_OF_MPICH,
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    )


_HYDRA_PROCESSES = ("mpirun", "mpiexec", "hydra")
HYDRA = Launcher(
    _claim_of_hydra, prefixes=("PMI_", "HYDRA_", "MPI_LOCAL"), processes=_HYDRA_PROCESSES
)
MVAPICH = Launcher(_claim_of_mvapich, prefixes=("MV2_",), processes=_HYDRA_PROCESSES)
