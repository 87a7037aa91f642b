"""Flux's ``flux run``, and IBM's jsrun.

Flux sets these for each task, whatever PMI the job has; its batch scripts and shells have none of
them (https://flux-framework.readthedocs.io/projects/flux-core/, flux-environment(7)).
"""

from hpc_tune.cluster.protocol import (
    LIBMPI_OF_MPICH,
    LIBMPI_OF_OPEN_MPI,
    Claim,
    Environ,
    Launcher,
    read_claim,
)


def _claim_of_flux(environ: Environ) -> Claim | None:
    if "FLUX_TASK_RANK" not in environ:
        return None
    # Flux's own PMI is that of MPICH and Cray MPICH; -o pmi=pmix is for Open MPI.
    libmpi = LIBMPI_OF_OPEN_MPI if "PMIX_RANK" in environ else LIBMPI_OF_MPICH
    names = {"rank": "FLUX_TASK_RANK", "size": "FLUX_JOB_SIZE", "num_nodes": "FLUX_JOB_NNODES"}
    return read_claim(environ, "flux", libmpi, **names, local_rank="FLUX_TASK_LOCAL_ID")


def _claim_of_jsrun(environ: Environ) -> Claim | None:
    if "JSM_NAMESPACE_RANK" not in environ:
        return None
    names = ("rank", "size", "local_rank", "local_size")
    return read_claim(
        environ,
        "jsrun",
        "libmpi_ibm.so.3",
        **{name: f"JSM_NAMESPACE_{name.upper()}" for name in names},
    )


FLUX = Launcher(
    _claim_of_flux,
    prefixes=("FLUX_",),
    processes=("flux-shell", "flux-broker"),
    advice="With Open MPI start by flux run -o pmi=pmix.",
)
JSRUN = Launcher(_claim_of_jsrun, prefixes=("JSM_",), processes=("jsrun", "jsmd"))
