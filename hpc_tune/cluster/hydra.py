"""Hydra, the mpirun of MPICH, Intel MPI and MVAPICH."""

from hpc_tune.cluster.protocol import LIBMPI_OF_MPICH, Claim, Environ, Launcher, read_claim
from hpc_tune.cluster.slurm import is_srun_step


def _claim(environ: Environ) -> Claim | None:
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


_PROCESSES = ("mpirun", "mpiexec", "hydra")
HYDRA = Launcher(_claim, prefixes=("PMI_", "HYDRA_", "MPI_LOCAL"), processes=_PROCESSES)
MVAPICH = Launcher(_claim_of_mvapich, prefixes=("MV2_",), processes=_PROCESSES)
