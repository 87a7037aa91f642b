"""Measuring for tools/bench.py: runs watched to their end, a large matmul, other processes.

    CPU seconds of the cores that this process may use - those of its own and of its descendants
    = CPU seconds of others; divided by the cores' wall seconds that is their share

The hypervisor counts among the others (steal). A parent's figures include its ended children.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POLL_S = 1.0
RUN_LIMIT_S = 3600
WARM = 2  # steps whose time does not count
# Others' share below which a run begins; above which it is repeated.
QUIET, DISTURBED_SHARE = 0.05, 0.10
WINDOW_S = 2.0  # less gives a coarse share: the kernel counts in hundredths of a second


@dataclass(frozen=True)
class Reading:
    """The CPU seconds that others have used since boot, at ``time`` (seconds since 1970)."""

    time: float
    others_s: float


def read_others(pid: int | None = None) -> Reading:
    """Read both now; others are all but ``pid`` (default: this process) and its descendants."""
    cores, now = psutil.cpu_times(percpu=True), time.time()
    mine = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)]
    busy_s = sum(c.user + c.nice + c.system + c.irq + c.softirq + c.steal for c in mine)
    top = psutil.Process(pid)
    # Parents are read last: their figures include a child that ends in between.
    for one in (*reversed(top.children(recursive=True)), top):
        with contextlib.suppress(psutil.NoSuchProcess):
            own = one.cpu_times()
            busy_s -= own.user + own.system + own.children_user + own.children_system
    return Reading(now, busy_s)


@dataclass
class WatchedRun:
    """What was seen of a run: peaks of host and device bytes, and readings of other processes."""

    host_bytes: int = 0
    device_bytes: int | None = None
    readings: list[Reading] = field(default_factory=list)


def launch(ranks: int) -> list[str]:
    """Return the command that starts ``ranks`` ranks: mpirun beside this Python or on PATH."""
    if ranks == 1:
        return []
    beside = Path(sys.executable).with_name("mpirun")
    return [str(beside) if beside.exists() else "mpirun", "-np", str(ranks)]


def run_watched(
    command: list[str], out: Path, device: str, extra: Mapping[str, str] | None = None
) -> WatchedRun:
    """Run ``command`` to its end; return what was seen of it.

    Raises:
        SystemExit: with the end of its output, if it fails.
    """
    log, seen = out / "log", WatchedRun(readings=[read_others()])
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(extra or {})},
            cwd=out,
            start_new_session=True,
        )
        finished = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, device, seen, finished))
        watcher.start()
        try:
            code = process.wait(RUN_LIMIT_S)
        finally:
            finished.set()
            watcher.join()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{' '.join(command)}\nended with {code}:\n{text[-4000:]}")
    seen.readings.append(read_others())
    return seen


def _watch(pid: int, device: str, seen: WatchedRun, finished: threading.Event) -> None:
    while not finished.wait(POLL_S):
        seen.readings.append(read_others())
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            family = [top, *top.children(recursive=True)]
            seen.host_bytes = max(seen.host_bytes, sum(_own_share(one.pid) for one in family))
        if device == "cuda":
            seen.device_bytes = max(seen.device_bytes or 0, _device_bytes())


def _own_share(pid: int) -> int:
    """Return a process's anonymous and shared bytes, and only its share of what others share.

    psutil has no such sum: its figures include mapped files.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    parts = [line.split() for line in lines[1:]]
    return 1024 * sum(int(p[1]) for p in parts if p[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _device_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return 0
    told = done.stdout.split()
    return (1 << 20) * max((int(one) for one in told), default=0)


_CEILING = """
import sys, time, torch
dtype, device = getattr(torch, sys.argv[1]), sys.argv[2]
size = 2048 if device == "cpu" else 8192
a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
seconds = []
for _ in range(8):
    began_s = time.perf_counter()
    a @ b.t()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began_s)
print(2 * size**3 / min(seconds))
"""


def ceiling_of(dtype: str, device: str) -> float:
    """Return the flops per second of a large square matmul with all threads."""
    full = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    command = [sys.executable, "-c", _CEILING, full, device]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's optimizer steps, without rows of evaluations."""
    return [row for row in lines_of(run_dir / "metrics.jsonl") if "step_s" in row]


def share_between(readings: Sequence[Reading], begin: float, end: float) -> float:
    """Return others' share of the cores from the last reading before ``begin`` to the first after
    ``end``.
    """
    first = [one for one in readings if one.time <= begin][-1:] or readings[:1]
    last = [one for one in readings if one.time >= end][:1] or readings[-1:]
    passed_s = last[0].time - first[0].time
    if passed_s <= 0:
        return 0.0
    taken = (last[0].others_s - first[0].others_s) / passed_s / len(os.sched_getaffinity(0))
    return min(1.0, max(0.0, taken))


def wait_for_quiet(
    limit_s: float,
    look: Callable[[], Reading] = read_others,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until others take little, at most ``limit_s`` seconds; return whether they do.

    Says so if they do not.
    """
    readings = [look()]
    while True:
        pause(WINDOW_S)
        readings.append(look())
        share = share_between(readings[-2:], readings[-2].time, readings[-1].time)
        waited_s = readings[-1].time - readings[0].time
        if share < QUIET:
            return True
        if waited_s >= limit_s:
            print(
                f"not quiet after {waited_s:.0f} s: other processes take {share:.0%} of the cores,"
                f" expected less than {QUIET:.0%}; measuring anyway",
                flush=True,
            )
            return False
