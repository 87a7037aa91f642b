"""A real Slurm on this machine alone: munge, a controller and node daemons, for one test module.

Memory limits are enforced by cgroups, which takes root and a memory controller of cgroup v1.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
START_S, JOB_S = 30.0, 240.0
MEMORY = Path("/sys/fs/cgroup/memory")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=2,batch_sched_delay=1,requeue_delay=1
KillWait=5
MinJobAge=3600
PropagateResourceLimits=NONE
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=4 RealMemory={memory}
PartitionName=main Nodes=n1 Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
"""


class Slurm:
    """A running cluster of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        """Run one of Slurm's programs and return what it prints."""
        found = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert found.returncode == 0, f"{argv}: {found.stdout}{found.stderr}"
        return found.stdout

    def job(self, script: str, out: Path, *options: str) -> dict[str, str]:
        """Submit a script, wait until it has ended, and return what the controller says of it."""
        file = out.with_suffix(".sh")
        file.write_text("#!/bin/bash\n" + script)
        number = self.run("sbatch", "--parsable", f"--output={out}", *options, str(file)).strip()
        until_s = time.monotonic() + JOB_S
        while time.monotonic() < until_s:
            words = self.run("scontrol", "-o", "show", "job", number).split()
            said = dict(word.split("=", 1) for word in words if "=" in word)
            if said["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return said
            time.sleep(0.3)
        self.run("scancel", "-f", number)
        pytest.fail(f"job {number} has not ended in {JOB_S:.0f} s: {out.read_text()}")


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Bring a cluster up in ``folder``, or skip the test with the reason."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons with memory limits need root")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)} on PATH: make slurm installs Slurm on Debian")
    if not MEMORY.is_dir():
        pytest.skip("no memory controller of cgroup v1")
    cluster = Slurm(folder)
    _configure(folder)
    try:
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)


def _configure(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "spool-n1").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        port, node_port = one.getsockname()[1], other.getsockname()[1]
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    words = {"host": socket.gethostname(), "folder": folder, "port": port}
    text = CONFIG.format(**words, node_port=node_port, memory=memory_mb)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(CGROUPS)


def _start(cluster: Slurm) -> None:
    folder = cluster.folder
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    cluster.run("munged", "--force", *(f"--{name}={folder / file}" for name, file in files.items()))
    cluster.run("slurmctld", "-c")
    cluster.run("slurmd", "-N", "n1", "-c")
    until_s = time.monotonic() + START_S
    while cluster.run("sinfo", "-h", "-N", "-o", "%t").strip() != "idle":
        assert time.monotonic() < until_s, _logs(folder)
        time.sleep(0.2)


def _logs(folder: Path) -> str:
    return "\n".join(f"{f.name}: {f.read_text()[-2000:]}" for f in sorted(folder.glob("*.log")))


def _stop(cluster: Slurm) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "-f", "-u", "root")
        time.sleep(1.0)
    for name in ("slurmd-n1.pid", "slurmctld.pid", "munge.pid"):
        with contextlib.suppress(OSError, ValueError):
            _end(int((cluster.folder / name).read_text()))
    for group in Path("/sys/fs/cgroup").glob("*/slurm*"):
        for folder in sorted(group.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()


def _end(pid: int) -> None:
    """End a daemon; it is not this process's child."""
    os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
