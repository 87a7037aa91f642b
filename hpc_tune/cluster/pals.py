"""PALS, the launcher of HPE Cray systems."""

from hpc_tune.cluster.protocol import LIBMPI_OF_MPICH, Claim, Environ, Launcher, read_claim
from hpc_tune.cluster.slurm import STEP_SIZE, is_srun_step


def _claim_of_pals(environ: Environ) -> Claim | None:
    if "PALS_RANKID" not in environ:
        return None
    # srun --mpi=cray_shasta sets the rank but not the size.
    of_srun = "PMI_SIZE" not in environ and is_srun_step(environ)
    return read_claim(
        environ,
        "pals",
        LIBMPI_OF_MPICH,
        rank="PALS_RANKID",
        size=STEP_SIZE if of_srun else "PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    )


PALS = Launcher(_claim_of_pals, prefixes=("PALS_",), processes=("pals",))
