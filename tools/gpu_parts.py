"""Runs the parts of tools/gpu_check.py, each in a process with a limit; writes one JSON file.

    parts, seconds -> one process after the other -> what each reports -> the JSON, rewritten

The JSON is rewritten whenever a part reports something, so that a check that is cut off at any
moment has saved all that was reported.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_tune.files import write_file

ROOT = Path(__file__).resolve().parent.parent
MARK = "HPC_TUNE_GPU_CHECK"  # in the environment of every process of a part
MACHINE = "machine"  # what a part reports under this name goes to the top of the JSON
POLL_S = 0.2
TAIL = 3000  # characters kept of the last output of a failed part
MIN_S = 5.0  # a part is not started with less time
KILL_LIMIT_S = 10.0  # a process that hangs in the driver cannot be ended
CPU_LIMIT_FACTOR = 3.0  # times the limits: toys need no time, but a test's machine may be slow
Status = Literal["passed", "failed", "cut", "skipped", "running"]


@dataclass(frozen=True)
class Part:
    """What is tried in one process. ``program``: the words after ``python``; ``needs``: the modules
    that it requires; ``limit_s``: it is killed after this many seconds.
    """

    name: str
    limit_s: float
    what: str
    program: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass
class Result:
    """How a part ended. cut: killed at its limit, or not started for lack of time."""

    name: str
    status: Status
    limit_s: float
    seconds: float = 0.0
    reason: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    tail: str = ""


class Check:
    """The folder of one check: its JSON, its log, what was found so far."""

    def __init__(self, folder: Path, device: str, minutes: float, facts: Mapping[str, Any]) -> None:
        """Begin a check in ``folder``, replacing an earlier one; ``facts`` go into the JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.device = folder.resolve(), device
        self.results: list[Result] = []
        self._facts = {**facts, "device": device, "minutes": minutes}
        self._began_s, self._until_s = time.monotonic(), time.monotonic() + 60 * minutes
        self.log = self.folder / "gpu-check.log"
        self.json = self.folder / "gpu-check.json"
        self.log.write_text("", encoding="utf-8")
        self.write()

    def left_s(self) -> float:
        """Return the seconds that are left for all parts."""
        return self._until_s - time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, and put it into the log."""
        print(line, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write(self) -> None:
        """Replace the JSON."""
        for result in self.results:
            for told in result.figures:
                if told["name"] == MACHINE:
                    self._facts |= {k: v for k, v in told.items() if k not in ("name", "status")}
        seconds = round(time.monotonic() - self._began_s, 1)
        tree = {**self._facts, "seconds": seconds, "parts": [asdict(r) for r in self.results]}
        write_file(self.json, json.dumps(tree, indent=1) + "\n")

    @property
    def has_no_gpu(self) -> bool:
        """Whether a part has looked for a GPU and found none."""
        looked = any(told["name"] == MACHINE for r in self.results for told in r.figures)
        return self.device == "cuda" and looked and not self._facts.get("card")

    def total(self) -> str:
        """Return one line that says how the parts ended."""
        names: dict[str, list[str]] = {}
        for one in self.results:
            why = f" ({one.reason})" if one.status in ("skipped", "cut") and one.reason else ""
            names.setdefault(one.status, []).append(one.name + why)
        parts = [f"{len(some)} {status}: {', '.join(some)}" for status, some in names.items()]
        return f"{'; '.join(parts)}. {time.monotonic() - self._began_s:.0f} s, {self.json}"


def run_parts(parts: Sequence[Part], check: Check) -> bool:
    """Run one part after the other; return whether all have passed or were skipped."""
    for part in parts:
        left_s = check.left_s()
        times = CPU_LIMIT_FACTOR if check.device == "cpu" else 1.0
        limit_s = round(min(times * part.limit_s, left_s), 1)
        result = Result(part.name, "running", max(0.0, limit_s))
        check.results.append(result)
        if why := _find_skip_reason(part, check):
            result.status, result.reason = "skipped", why
        elif left_s < MIN_S:
            result.status, result.reason = "cut", "no time was left"
        else:
            check.say(f"start   {part.name}: {part.what} (at most {limit_s:.0f} s)")
            _run(part, result, check)
        check.say(
            f"{result.status:<7} {part.name}, {result.seconds:.1f} s  {result.reason}".rstrip()
        )
        check.write()
    check.say(check.total())
    return all(one.status in ("passed", "skipped") for one in check.results)


def _find_skip_reason(part: Part, check: Check) -> str:
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    return "no GPU was found" if check.has_no_gpu else ""


def _run(part: Part, result: Result, check: Check) -> None:
    """Run a part to its end or its limit, and fill in its result."""
    figures, work = check.folder / f"{part.name}.jsonl", check.folder / "work" / part.name
    figures.write_text("", encoding="utf-8")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    printed_from, began_s = check.log.stat().st_size, time.monotonic()
    mark = uuid.uuid4().hex
    words = [str(figures), str(work), check.device, str(result.limit_s)]

    def look() -> None:
        lines = figures.read_text(encoding="utf-8").splitlines(keepends=True)
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        result.seconds = round(time.monotonic() - began_s, 1)
        for one in told[len(result.figures) :]:
            print(f"          {format_result(one)}", flush=True)
        if len(told) > len(result.figures):
            result.figures = told
            check.write()

    with check.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *part.program, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(mark, check.device),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = _wait(process, began_s + result.limit_s, look)
        finally:
            kill_marked(mark)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_LIMIT_S)
    look()
    result.status, result.reason = _verdict(result, code)
    if result.status in ("failed", "cut"):
        result.tail = check.log.read_bytes()[printed_from:].decode("utf-8", "replace")[-TAIL:]
    shutil.rmtree(check.folder / "work", ignore_errors=True)
    figures.unlink(missing_ok=True)


def _wait(
    process: "subprocess.Popen[bytes]", until_s: float, look: Callable[[], None]
) -> int | None:
    """Return the exit code; None at the limit."""
    while (code := process.poll()) is None and time.monotonic() < until_s:
        look()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return code


def _verdict(result: Result, code: int | None) -> tuple[Status, str]:
    failed = [told["name"] for told in result.figures if told["status"] == "failed"]
    if code is None:
        return "cut", f"not done after {result.limit_s:.0f} s"
    if failed:
        return "failed", ", ".join(failed)
    if code != 0:
        return "failed", f"ended with {code}"
    skipped = [told for told in result.figures if told["status"] == "skipped"]
    if not result.figures:
        return "failed", "it reported nothing"
    if len(skipped) == len(result.figures):
        return "skipped", "; ".join(dict.fromkeys(told.get("reason", "") for told in skipped))
    without = f"without {', '.join(told['name'] for told in skipped)}" if skipped else ""
    return "passed", without


def _environment(mark: str, device: str) -> dict[str, str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(ROOT), *(os.path.abspath(path) for path in given if path)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", MARK: mark}
    own |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    # Use the first of several GPUs: the Trainer would use all.
    one = {"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {}
    return {**one, **os.environ, **own}


def kill_marked(mark: str) -> None:
    """Kill every process of a part, those in sessions of their own included."""
    until_s = time.monotonic() + KILL_LIMIT_S
    # A killed process may have started another one before it died.
    while (pids := _find_marked_pids(mark)) and time.monotonic() < until_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _find_marked_pids(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def format_result(told: Mapping[str, Any]) -> str:
    """Return one line of what a part reported."""
    words = []
    for name, value in told.items():
        if name in ("name", "status", "reason") or isinstance(value, dict | list) or value is None:
            continue
        words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    status = "" if told["status"] == "passed" else f" {told['status']}:"
    reason = f" {told['reason']}" if told.get("reason") else ""
    return f"{told['name']}:{status}{reason} {', '.join(words)}".rstrip()
