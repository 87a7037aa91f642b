"""A part of tools/gpu_check.py: a run on a device that is too small for it.

    a run with all of the device -> its peak -> the same run limited to a share of that peak by the
    allocator -> it continues, or stops with exit code 75 and is started again

    python tools/gpu_ladder.py --start SPEC.json     one start, in a process of its own

It passes if the run finishes with the same losses, and every start ends in one of these two ways.
On CPUs, whose allocator has no limit, the governor is told that memory is short.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_jobs import (
    SMALL_SETTINGS,
    Job,
    events_of,
    gap_of,
    job_of,
    losses_of,
    outcome_of,
    rows_of,
    run_of,
    train,
)
from gpu_task import Task

EXIT_DONE, EXIT_RESUMABLE = 0, 75
MAX_STARTS = 5
START_S = 20.0  # about what one takes
SHARE, SMALL_SHARE = 0.6, 0.1  # of the peak
BOUND = 0.02  # bf16, other micro-batches
FREE_RUN, LIMITED_RUN, HOPELESS_RUN = "all of the device", "60% of the peak", "a tenth of the peak"
# On CPUs: enough steps for every rung.
LEVELS = ("CALM", *["HIGH"] * 14, "CALM")


@dataclass(frozen=True)
class Start:
    """One start. ``limited`` gets ``share`` of the device; 0: a share of the peak that ``free`` had
    in the same process.
    """

    folder: str
    device: str
    free: dict[str, Any] | None
    limited: dict[str, Any]
    share: float = 0.0


def main() -> None:
    """Start the run until it is done; report each start."""
    if sys.argv[1] == "--start":
        start(Start(**json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))))
        return
    task = Task.of_arguments()
    common = _settings(task)
    free, limited = (
        Job(FREE_RUN, common),
        Job(LIMITED_RUN, common, levels=() if task.uses_gpu else LEVELS),
    )
    codes, reasons = [], []
    for number in range(MAX_STARTS):
        if number and task.left_s() < START_S:
            reasons.append("no time was left for another start")
            break
        codes.append(_run_starts(task, None if number else free, limited))
        reasons.append(str(outcome_of(run_of(task.work, LIMITED_RUN)).get("reason", "no outcome")))
        if codes[-1] != EXIT_RESUMABLE:
            break
    _tell(task, codes, reasons)
    if task.uses_gpu and task.left_s() > START_S and _facts(task):
        code = _run_starts(task, None, Job(HOPELESS_RUN, common), SMALL_SHARE / SHARE)
        reason = str(outcome_of(run_of(task.work, HOPELESS_RUN)).get("reason", "no outcome"))
        ended_well = code == EXIT_DONE or (code == EXIT_RESUMABLE and "device memory" in reason)
        rungs = _rungs(task.work, HOPELESS_RUN)
        task.tell(
            HOPELESS_RUN, "passed" if ended_well else "failed", reason, code=code, rungs=rungs
        )


def _settings(task: Task) -> tuple[str, ...]:
    size = ["data.seq_len=2048", "batch.global_size=64", "batch.micro_size=64"]
    if not task.uses_gpu:
        size = ["data.seq_len=64", "batch.global_size=4", "batch.micro_size=4", "run.threads=1"]
    steps = ("train.max_steps=18", "checkpoint.every_steps=2", "tune.method=lora")
    return (
        *SMALL_SETTINGS,
        *size,
        *steps,
        f"run.device={task.device}",
        f"data.cache={task.work / 'data'}",
    )


def _run_starts(task: Task, free: Job | None, limited: Job, times: float = 1.0) -> int:
    """Start a process with the runs; return its exit code. ``times`` scales the usual share."""
    share = 0.0 if free else times * _facts(task).get("share", 1.0)
    jobs = asdict(free) if free else None, asdict(limited)
    spec = task.work / "start.json"
    text = json.dumps(asdict(Start(str(task.work), task.device, *jobs, share)))
    spec.write_text(text, encoding="utf-8")
    program = [sys.executable, str(Path(__file__).resolve()), "--start", str(spec)]
    return subprocess.run(program, cwd=task.work).returncode


def _facts(task: Task) -> dict[str, Any]:
    """Return what the first start has written about the device."""
    try:
        found = json.loads((task.work / "device.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return dict(found)


def _rungs(work: Path, name: str) -> list[str]:
    events = events_of(run_of(work, name), "governor")
    return [f"step {one['step']}: {one['action']}" for one in events if "action" in one]


def _tell(task: Task, codes: list[int], reasons: list[str]) -> None:
    free, limited = run_of(task.work, FREE_RUN), run_of(task.work, LIMITED_RUN)
    rungs, gap = _rungs(task.work, LIMITED_RUN), gap_of(losses_of(free), losses_of(limited))
    wrong = ""
    if any(code not in (EXIT_DONE, EXIT_RESUMABLE) for code in codes) or not losses_of(free):
        wrong = "a start ended neither done nor resumable"
    elif codes[-1] != EXIT_DONE:
        wrong = f"it was not done after {len(codes)} starts"
    elif len(codes) == 1 and not rungs:
        wrong = "it never met the limit"
    elif gap > BOUND:
        wrong = f"the losses differ by {gap:.3g} from those with all of the device"
    found = {"starts": codes, "reasons": reasons, "rungs": rungs, "gap": gap, "bound": BOUND}
    found |= _facts(task) | {"governor": outcome_of(limited).get("governor")}
    words = f"{', '.join(rungs) or 'no rung'} in {len(codes)} starts"
    task.tell(LIMITED_RUN, "failed" if wrong else "passed", wrong or words, **found)


def start(asked: Start) -> None:
    """Do the free run if there is one, then the limited run; exit with the code of the last."""
    folder, share = Path(asked.folder), asked.share
    if asked.free is not None:
        code = train(job_of(asked.free), folder)
        if code != EXIT_DONE:
            sys.exit(code)
        if asked.device == "cuda":
            share = _share_of_peak(folder)
    if asked.device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)
    sys.exit(train(job_of(asked.limited), folder))


def _share_of_peak(folder: Path) -> float:
    """Return SHARE of the free run's peak as a share of the device, and save it to a file."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    unused, total = torch.cuda.mem_get_info()
    others = total - unused - torch.cuda.memory_reserved()
    peak = max(row["device_bytes"] for row in rows_of(run_of(folder, FREE_RUN))) - others
    share = SHARE * peak / total
    facts = {"device_bytes": total, "peak_bytes": peak, "others_bytes": others, "share": share}
    (folder / "device.json").write_text(json.dumps(facts), encoding="utf-8")
    return share


if __name__ == "__main__":
    main()
