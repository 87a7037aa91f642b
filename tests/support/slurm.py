"""A real Slurm on this machine alone: munge, a controller and node daemons, for one test module.

Memory limits are enforced by cgroups, which needs root and a memory controller of cgroup v1.
Each node is a daemon of its own on this machine; Debian's build allows several.
"""

import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import ROOT, rank_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
START_S, JOB_S = 30.0, 240.0
STILL_THERE = (
    "PENDING",
    "RUNNING",
    "SIGNALING",
    "COMPLETING",
    "CONFIGURING",
    "REQUEUED",
    "SUSPENDED",
)
MEMORY = Path("/sys/fs/cgroup/memory")
BY_CGROUP = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup"""
BY_PARENT = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux"""
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
{tracking}
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
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
CGROUPS = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
"""


NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
    "RealMemory={memory} Gres=gpu:8"
)


class Slurm:
    """A running cluster."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *argv: str, timeout: float = 30.0, cwd: Path | None = None) -> str:
        """Run one of Slurm's programs and return what it prints."""
        found = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=cwd
        )
        assert found.returncode == 0, f"{argv}: {found.stdout}{found.stderr}"
        return found.stdout

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator["LimitedJobs"]:
        """Yield jobs that ask for this much memory; used like ``memory_group``."""
        yield LimitedJobs(self, limit_bytes)

    def job(self, script: str, name: str, *options: str, timeout: float = JOB_S) -> dict[str, str]:
        """Submit a script, wait until it has ended, and return what the controller says of it.

        Its output is in the cluster's folder, as ``name``.out and ``name``.err.
        """
        file = self.folder / f"{name}.sh"
        file.write_text("#!/bin/bash\n" + script)
        files = (f"--output={self.folder}/{name}.out", f"--error={self.folder}/{name}.err")
        return self.wait(self.submit(*files, *options, str(file)), timeout)

    def submit(self, *words: str, cwd: Path | None = None) -> str:
        """Submit a job and return its number."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd).strip()

    def show(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, timeout: float = JOB_S) -> dict[str, str]:
        """Wait until a job has ended for good; skip the two minutes' delay of a requeue."""
        until_s = time.monotonic() + timeout
        while (said := self.show(number))["JobState"] in STILL_THERE:
            if time.monotonic() > until_s:
                self.run("scancel", "-f", number)
                pytest.fail(f"job {number} has not ended in {timeout:.0f} s: {_logs(self.folder)}")
            self.hurry(said)
            time.sleep(0.3)
        return said

    def kill(self, node: str) -> None:
        """Kill a node's daemon and all that it has started, as if the machine had died.

        One thing differs: connections are reset.
        """
        pids = [int((self.folder / f"slurmd-{node}.pid").read_text())]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    above = process.parent()
                    is_step = above is not None and above.name().startswith("slurmstepd")
                    pids += [process.pid, *([above.pid] if is_step else [])]
        for pid in dict.fromkeys(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def mend(self) -> None:
        """Start the daemons that were killed, and make all nodes usable again."""
        for node in self.nodes:
            pid = int((self.folder / f"slurmd-{node}.pid").read_text())
            if not psutil.pid_exists(pid):
                self.run("slurmd", "-N", node, "-c")
        time.sleep(1.0)
        for node in self.nodes:
            with contextlib.suppress(AssertionError):  # it is up already
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        until_s = time.monotonic() + START_S
        while set(self.run("sinfo", "-h", "-N", "-o", "%t").split()) - {"idle", "mix", "alloc"}:
            assert time.monotonic() < until_s, self.run("sinfo", "-N", "-l")
            time.sleep(0.2)

    def hurry(self, said: Mapping[str, str]) -> None:
        """Let a requeued job begin, which would otherwise wait for two minutes.

        A node refuses a job that it has ended within the same second.
        """
        if said["JobState"] == "PENDING" and said["Reason"] == "BeginTime":
            time.sleep(2.0)
            self.run("scontrol", "update", f"JobId={said['JobId']}", "StartTime=now")


class LimitedJobs:
    """Jobs of one cluster with --mem, with the same methods as ``cgroup.Group``."""

    _names = (f"job-{number}" for number in itertools.count())

    def __init__(self, cluster: Slurm, limit_bytes: int) -> None:
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._numbers: list[str] = []

    def run(
        self, argv: Sequence[str], n: int, timeout: float, neighbor: Sequence[str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of ``n`` ranks as a job, beside ``neighbor`` if given.

        The kernel kills the command and spares the neighbor.
        """
        lines = [f"cd {shlex.quote(str(ROOT))}"]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in rank_environment(n).items()
            if name.isidentifier()
        ]
        lines += [f"{shlex.join(neighbor)} & beside=$!"] if neighbor is not None else []
        # Without a neighbor, not for mpirun: it would end with 0 if its own daemon were killed.
        first = "" if neighbor is None else "echo 1000 > /proc/self/oom_score_adj; "
        lines.append(f"({first}exec {shlex.join(argv)})")
        lines += ["code=$?", "kill $beside"] if neighbor is not None else ["code=$?"]
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
        """How often the kernel has killed a process of these jobs.

        Read from its log: a step's cgroup, which counts, is gone when the step has ended.
        """
        log = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
        lines = [line for line in log.splitlines() if "oom-kill:" in line]
        return sum(f"/job_{number}/" in line for line in lines for number in self._numbers)


@contextlib.contextmanager
def slurm(folder: Path, num_nodes: int = 1, limits: bool = True) -> Iterator[Slurm]:
    """Bring a cluster up in ``folder``, or skip the test with the reason.

    ``limits``: whether jobs' memory is limited; if not, a node reports a terabyte.
    """
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)} on PATH: make slurm installs Slurm on Debian")
    if limits and not MEMORY.is_dir():
        pytest.skip("no memory controller of cgroup v1")
    cluster = Slurm(folder, num_nodes)
    _configure(cluster, limits)
    try:
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)


def _configure(cluster: Slurm, limits: bool) -> None:
    folder, host = cluster.folder, socket.gethostname()
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    port, *node_ports = _free_ports(1 + len(cluster.nodes))
    memory_mb = 1 << 20
    if limits:
        memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    nodes = []
    for name, node_port in zip(cluster.nodes, node_ports, strict=True):
        (folder / f"spool-{name}").mkdir()
        nodes.append(NODE.format(name=name, host=host, port=node_port, memory=memory_mb))
    text = CONFIG.format(
        host=host,
        folder=folder,
        port=port,
        tracking=BY_CGROUP if limits else BY_PARENT,
        nodes="\n".join(nodes),
        # The kernel's log names jobs by number, those of earlier clusters too.
        first_job=random.randrange(1, 1 << 25),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(CGROUPS)
    for number in range(8):  # copies of /dev/null: jobs that ask for GPUs can be submitted
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in free]


def _start(cluster: Slurm) -> None:
    folder = cluster.folder
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    cluster.run("munged", "--force", *(f"--{name}={folder / file}" for name, file in files.items()))
    cluster.run("slurmctld", "-c")
    for name in cluster.nodes:
        cluster.run("slurmd", "-N", name, "-c")
    until_s = time.monotonic() + START_S
    while set(cluster.run("sinfo", "-h", "-N", "-o", "%t").split()) != {"idle"}:
        assert time.monotonic() < until_s, _logs(folder)
        time.sleep(0.2)


def _logs(folder: Path) -> str:
    return "\n".join(f"{f.name}: {f.read_text()[-2000:]}" for f in sorted(folder.glob("*.log")))


def _stop(cluster: Slurm) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "-f", "-u", "root")
        time.sleep(1.0)
    daemons = []
    for name in (*(f"slurmd-{name}" for name in cluster.nodes), "slurmctld", "munge"):
        with contextlib.suppress(OSError, ValueError):
            daemons.append(int((cluster.folder / f"{name}.pid").read_text()))
    _end(daemons)
    for group in Path("/sys/fs/cgroup").glob("*/slurm*"):
        for folder in sorted(group.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()


def _end(pids: Sequence[int]) -> None:
    """End daemons, which are not children of this process."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
