"""A part of tools/gpu_check.py: what the machine is, and what ``hpc_tune doctor`` finds there."""

import importlib.metadata
import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

import torch
from gpu_parts import MACHINE
from gpu_task import Task

PACKAGES = ("triton", "bitsandbytes", "torchao", "accelerate", "pytest", "nvidia-ml-py")


def main() -> None:
    """Report the card at once, then what the doctor finds."""
    task = Task.of_arguments()
    words = ["doctor", "--json", f"run.device={task.device}", f"run.dir={task.work / 'run'}"]
    doctor = subprocess.Popen(
        [sys.executable, "-m", "hpc_tune", *words], stdout=subprocess.PIPE, text=True
    )
    card = _card(task.uses_gpu)
    if task.uses_gpu and not card["card"]:
        task.tell(MACHINE, "failed", "torch finds no CUDA device", **card)
    else:
        task.tell(MACHINE, **card)
    printed, _ = doctor.communicate()
    try:
        told = json.loads(printed)
    except ValueError:
        told = None
    if not told:
        task.tell("doctor", "failed", f"doctor ended with {doctor.returncode} and reported nothing")
        return
    [rank], findings = told["ranks"], told["findings"]
    errors = [one for one in findings if one["level"] == "error"]
    task.tell(
        "doctor",
        "failed" if errors or doctor.returncode else "passed",
        "; ".join(map(str, errors)),
        num_findings=len(findings),
        findings=findings,
        rank={key: value for key, value in rank.items() if key != "topology"},
        topology=rank["topology"],
    )


def _card(uses_gpu: bool) -> dict[str, Any]:
    others = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            others[name] = importlib.metadata.version(name)
    if not uses_gpu or not torch.cuda.is_available():
        return {"card": None, "more_versions": others}
    of = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return {
        "card": of.name,
        "capability": f"{of.major}.{of.minor}",
        "device_bytes": total_bytes,
        "free_bytes": free_bytes,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
        "num_gpus": torch.cuda.device_count(),
        "more_versions": others,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


if __name__ == "__main__":
    main()
