"""Which launcher has started this process."""

import os

from hpc_tune.cluster import flux, hydra, openmpi, pals, plain, slurm, torchrun
from hpc_tune.cluster.protocol import Claim, Environ, Launcher
from hpc_tune.errors import WorldError

# The first that claims the process is its launcher, so the innermost stands first: torchrun runs
# under srun, mpirun under sbatch or over daemons that srun has started.
LAUNCHERS = (
    torchrun.TORCHRUN,
    openmpi.OPENMPI,
    hydra.MVAPICH,
    pals.PALS,
    flux.JSRUN,
    flux.FLUX,
    hydra.HYDRA,
    slurm.SRUN,
    openmpi.PRUN,
    plain.PLAIN,
    plain.SINGLE,
)
VARIABLE_PREFIXES = tuple(prefix for launcher in LAUNCHERS for prefix in launcher.prefixes)
PROCESS_NAMES = tuple(name for launcher in LAUNCHERS for name in launcher.processes)


def find_launcher(environ: Environ) -> tuple[Launcher, Claim]:
    """Return the launcher of this process and what its variables claim (pure).

    Raises:
        WorldError: if they are invalid.
    """
    claims = ((launcher, launcher.claim(environ)) for launcher in LAUNCHERS)
    return next((launcher, claim) for launcher, claim in claims if claim is not None)


def find_claim(environ: Environ) -> Claim:
    """Return what the launcher's variables claim (pure)."""
    return find_launcher(environ)[1]


def rank_hint(environ: Environ = os.environ) -> int:
    """Return this process's rank by the launcher's variables alone, 0 if they are invalid."""
    try:
        return find_claim(environ).rank or 0
    except WorldError:
        return 0


def size_hint(environ: Environ = os.environ) -> int:
    """Return the number of ranks by the launcher's variables alone, 1 if they do not say."""
    try:
        return find_claim(environ).size or 1
    except WorldError:
        return 1


def environ_without_launcher() -> dict[str, str]:
    """Return the environment without the launchers' variables, for a process that is no rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(VARIABLE_PREFIXES)}
