"""A real Slurm on this machine alone: munge, a controller and node daemons, for one test module.

Memory limits are enforced by cgroups, which takes root and a memory controller of cgroup v1.
"""

import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, rank_environment

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
FirstJobId={first_job}
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

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator["LimitedJobs"]:
        """Jobs that ask for so much memory; as ``memory_group`` is used."""
        yield LimitedJobs(self, limit_bytes)

    def job(self, script: str, name: str, *options: str, timeout: float = JOB_S) -> dict[str, str]:
        """Submit a script, wait until it has ended, and return what the controller says of it.

        Its output is in the cluster's folder, as ``name``.out and ``name``.err.
        """
        file = self.folder / f"{name}.sh"
        file.write_text("#!/bin/bash\n" + script)
        files = (f"--output={self.folder}/{name}.out", f"--error={self.folder}/{name}.err")
        number = self.run("sbatch", "--parsable", *files, *options, str(file)).strip()
        until_s = time.monotonic() + timeout
        while time.monotonic() < until_s:
            words = self.run("scontrol", "-o", "show", "job", number).split()
            said = dict(word.split("=", 1) for word in words if "=" in word)
            if said["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return said
            time.sleep(0.3)
        self.run("scancel", "-f", number)
        pytest.fail(f"job {number} has not ended in {timeout:.0f} s: {_logs(self.folder)}")


class LimitedJobs:
    """Jobs of one cluster with --mem; what a test of a cgroup asks of it, they can too."""

    _names = (f"job-{number}" for number in itertools.count())

    def __init__(self, cluster: Slurm, limit_bytes: int) -> None:
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._numbers: list[str] = []

    def run(
        self, argv: Sequence[str], n: int, timeout: float, neighbour: Sequence[str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run the command of ``n`` ranks as a job, beside another one if asked.

        Of the two the kernel kills the command.
        """
        lines = [f"cd {shlex.quote(str(ROOT))}"]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in rank_environment(n).items()
            if name.isidentifier()
        ]
        lines += [f"{shlex.join(neighbour)} & beside=$!"] if neighbour is not None else []
        # Not for mpirun's own daemon: without that it ends with 0.
        first = "" if neighbour is None else "echo 1000 > /proc/self/oom_score_adj; "
        lines.append(f"({first}exec {shlex.join(argv)})")
        lines += ["code=$?", "kill $beside"] if neighbour is not None else ["code=$?"]
        lines.append("printf '\\ncode %d\\n' $code")
        name = next(self._names)
        options = (f"--mem={self._limit_bytes >> 20}M", f"--ntasks={n}")
        job = self._cluster.job("\n".join(lines), name, *options, timeout=timeout)
        self._numbers.append(job["JobId"])
        out = (self._cluster.folder / f"{name}.out").read_text()
        said = [line.split() for line in out.splitlines()]
        [code] = [int(words[1]) for words in said if words[:1] == ["code"]]
        assert code not in (0, 75) or job["JobState"] == "COMPLETED", job
        error = (self._cluster.folder / f"{name}.err").read_text()
        return subprocess.CompletedProcess(list(argv), code, out, error)

    @property
    def kills(self) -> int:
        """How often the kernel has killed in these jobs.

        By its log: a step's group, which counts, is gone when the step has ended.
        """
        log = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
        lines = [line for line in log.splitlines() if "oom-kill:" in line]
        return sum(f"/job_{number}/" in line for line in lines for number in self._numbers)


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
    words = {"host": socket.gethostname(), "folder": folder, "port": port, "node_port": node_port}
    # The kernel's log tells of jobs by number, those of earlier clusters too.
    text = CONFIG.format(**words, memory=memory_mb, first_job=random.randrange(1, 1 << 25))
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
