"""Open MPI's mpirun, and PRRTE's prun, which starts the ranks for it."""

import re

from hpc_tune.cluster.protocol import LIBMPI_OF_OPEN_MPI, Claim, Environ, Launcher, read_claim
from hpc_tune.cluster.slurm import is_srun_step

OPENMPI_NAME = "openmpi"
OPENMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
# MPI busy-waits; ranks that share a core must yield it to make progress.
OPENMPI_YIELD_WHEN_IDLE = ("OMPI_MCA_mpi_yield_when_idle", "1")


def _claim_of_openmpi(environ: Environ) -> Claim | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the index of the node.
    return read_claim(
        environ,
        OPENMPI_NAME,
        LIBMPI_OF_OPEN_MPI,
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=OPENMPI_LOCAL_RANK,
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _claim_of_prun(environ: Environ) -> Claim | None:
    """PMIX_RANK is all that prun sets; srun sets it too."""
    if "PMIX_RANK" not in environ or is_srun_step(environ):
        return None
    return read_claim(environ, "pmix", LIBMPI_OF_OPEN_MPI, rank="PMIX_RANK")


def _openmpi_cannot_start(library: str) -> bool:
    """MPICH 5 ends with "unsupported PMI version PMIx"; an older one starts each rank alone."""
    version = re.match(r"MPICH Version:\s*(\d+)", library)
    return version is not None and int(version[1]) >= 5


OPENMPI = Launcher(
    _claim_of_openmpi,
    prefixes=("OMPI_", "PMIX_", "PRTE_"),
    processes=("mpirun", "mpiexec", "prterun", "prted", "orted"),
    library_folder="OMPI_LIBDIR_LOC",
    cannot_start=_openmpi_cannot_start,
)
PRUN = Launcher(_claim_of_prun, prefixes=("PMIX_", "PRTE_"), processes=("prterun", "prted"))
