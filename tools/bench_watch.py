"""What tools/bench.py measures with: a run that is watched to its end, a large product."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench_quiet import Reading, read_others

POLL_S = 1.0
RUN_LIMIT_S = 3600
WARM = 2  # steps whose time does not count


@dataclass
class Watched:
    """What was seen of a run: peaks of host and device bytes, and what others took meanwhile."""

    host_bytes: int = 0
    device_bytes: int | None = None
    readings: list[Reading] = field(default_factory=list)


def launch(ranks: int) -> list[str]:
    """Return what starts ``ranks`` ranks: the mpirun beside this Python, or that of the system."""
    if ranks == 1:
        return []
    beside = Path(sys.executable).with_name("mpirun")
    return [str(beside) if beside.exists() else "mpirun", "-np", str(ranks)]


def watched(
    command: list[str], out: Path, device: str, extra: Mapping[str, str] | None = None
) -> Watched:
    """Run to the end; return what was seen of it.

    Raises:
        SystemExit: with the end of what it printed, if it fails.
    """
    log, seen = out / "log", Watched(readings=[read_others()])
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


def _watch(pid: int, device: str, seen: Watched, finished: threading.Event) -> None:
    while not finished.wait(POLL_S):
        seen.readings.append(read_others())
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            family = [top, *top.children(recursive=True)]
            seen.host_bytes = max(seen.host_bytes, sum(_own_share(one.pid) for one in family))
        if device == "cuda":
            seen.device_bytes = max(seen.device_bytes or 0, _device_bytes())


def _own_share(pid: int) -> int:
    """Return a process's anonymous and shared bytes, its part of those that others have too.

    psutil has no such sum: its figures hold mapped files too.
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
    """Return the flops per second of a large square product with all threads."""
    full = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    command = [sys.executable, "-c", _CEILING, full, device]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's optimizer steps, without those of evaluations."""
    return [row for row in lines_of(run_dir / "metrics.jsonl") if "step_s" in row]
