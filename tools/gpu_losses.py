"""A part of tools/gpu_check.py: losses of builtin:tiny on the GPU compared with the CPU.

    three processes at once:  references on the CPU, eager on the device, compiled on the device
    a run and its references done -> their largest difference, compared with a bound

All runs are compared with fp32 on the CPU; fp32 runs use no TF32. bf16 may be a few times as far
away as the CPU's own bf16. float8 has about two digits.
"""

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_jobs import SMALL_SETTINGS, Job, Launch, gap_of, losses_of, run_of
from gpu_task import Task

FP32_BOUND = 1e-4
FOUR_BITS_BOUND = 1e-3  # CPU and GPU may round ties to different codes
BF16_FACTOR, BF16_MIN_BOUND = 4.0, 1e-3  # times the CPU's own distance, plus this
FLOAT8_BOUND = 0.02  # of the loss
TOYS = 9  # how many of the eager runs, on CPUs
END_S = 4.0  # before the limit, to report what is not done
NEEDS = {"lora": ("peft",), "dora": ("peft",), "qlora": ("peft", "bitsandbytes"), "full": ()}
OFFLOAD = ("parallel.offload_params=cpu",)
MOVE_ACTIONS = ("move_optimizer",)


@dataclass(frozen=True)
class Variant:
    """A run on the device. A covering set: each value meets each method or kind of arithmetic."""

    method: str
    dtype: str
    packed: bool
    recompute: str = "none"
    compiled: bool = False
    float8: bool = False
    offload: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    again: int = 0

    @property
    def name(self) -> str:
        """Its name in the results."""
        words = [f"{self.method} {'float8' if self.float8 else self.dtype}"]
        words.append("packed" if self.packed else "unpacked")
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["compiled"] if self.compiled else []
        words += ["params on cpu"] if self.offload else []
        words += ["optimizer on cpu"] if self.taken else []
        words += [f"deterministic {self.again}"] if self.again else []
        return ", ".join(words)

    def job(self, common: tuple[str, ...], device: str) -> Job:
        """Return its run."""
        switches = {
            "tune.method": self.method,
            "model.dtype": self.dtype,
            "data.packing": str(self.packed).lower(),
            "parallel.recompute": self.recompute,
            "train.compile": str(self.compiled).lower(),
            "train.float8": str(self.float8).lower(),
            "train.deterministic": str(bool(self.again)).lower(),
            "run.device": device,
        }
        settings = [*common, *(f"{key}={value}" for key, value in switches.items()), *self.offload]
        return Job(self.name, tuple(settings), self.taken)


EAGER_VARIANTS = (
    Variant("lora", "bf16", True),
    Variant("lora", "fp32", True),
    Variant("full", "fp32", False, "selective"),
    Variant("qlora", "bf16", True, "full"),
    Variant("full", "bf16", True, "full"),
    Variant("lora", "fp32", False, "selective", taken=MOVE_ACTIONS),
    Variant("dora", "fp32", True),
    Variant("qlora", "fp32", False, "selective"),
    Variant("full", "fp32", True, "full", offload=OFFLOAD),
    Variant("full", "fp32", True, taken=MOVE_ACTIONS),
    Variant("lora", "bf16", False, "full", offload=OFFLOAD),
    Variant("dora", "bf16", False, "full"),
    Variant("full", "bf16", False),
    Variant("qlora", "fp32", True, taken=MOVE_ACTIONS),
    # Last, because the process stays deterministic.
    Variant("lora", "bf16", True, again=1),
    Variant("lora", "bf16", True, again=2),
)
COMPILED_VARIANTS = (
    Variant("lora", "bf16", True, "selective", compiled=True),
    Variant("lora", "bf16", True, compiled=True, float8=True),
    Variant("full", "fp32", False, compiled=True),
    Variant("full", "bf16", False, "full", compiled=True, float8=True),
    Variant("qlora", "bf16", True, compiled=True),
)


def main() -> None:
    """Train all of them, and report each as soon as it can be compared."""
    task = Task.of_arguments()
    # torch reads cuBLAS's variable once, at the first matmul of a process.
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE"}
    groups = {"eager": EAGER_VARIANTS, "compiled": COMPILED_VARIANTS}
    if not task.uses_gpu:  # each kind once; compiling takes longer than all others
        groups["eager"] = (*EAGER_VARIANTS[:TOYS], *EAGER_VARIANTS[-2:])
        groups["compiled"] = (Variant("lora", "fp32", True, compiled=True),)
    groups = {name: tuple(_list_possible(task, some)) for name, some in groups.items()}
    needed = [one for some in groups.values() for one in some]
    references = tuple(dict.fromkeys(one for some in map(references_of, needed) for one in some))
    common = _settings(task)
    runs = Runs(task.work)
    runs.begin("cpu", references, [one.job(common, "cpu") for one in references])
    for name, some in groups.items():
        runs.begin(name, some, [one.job(common, task.device) for one in some])
    waiting = [(name, one) for name, some in groups.items() for one in some]
    while waiting and task.left_s() > END_S:
        runs.look()
        for name, one in [both for both in waiting if runs.is_comparable(*both)]:
            waiting.remove((name, one))
            _tell(task, runs, name, one)
        time.sleep(0.2)
    for name, one in waiting:
        if runs.is_under_way(name, one):
            task.tell(one.name, "failed", "it was still running when time ran out")
        else:
            task.tell(one.name, "skipped", "no time was left")
    runs.end()


class Runs:
    """The processes by name, and what they have trained."""

    def __init__(self, work: Path) -> None:
        """Runs are below ``work``, in one folder per process."""
        self._work = work
        self._launches: dict[str, tuple[Sequence[Variant], Launch]] = {}

    def begin(self, name: str, variants: Sequence[Variant], jobs: Sequence[Job]) -> None:
        """Start a process."""
        if variants:
            folder = self._work / name
            folder.mkdir()
            self._launches[name] = variants, Launch(name, jobs, folder)

    def look(self) -> None:
        """Read the exit codes of runs that have ended."""
        for _, launch in self._launches.values():
            launch.look()

    def end(self) -> None:
        """End the processes."""
        for _, launch in self._launches.values():
            launch.end()

    def code(self, name: str, variant: Variant) -> int | None:
        """Return the exit code of a run; None before its end."""
        variants, launch = self._launches[name]
        number = variants.index(variant)
        return launch.codes[number] if number < len(launch.codes) else None

    def is_under_way(self, name: str, variant: Variant) -> bool:
        """Whether a run has begun and not ended."""
        variants, launch = self._launches[name]
        return variants.index(variant) == len(launch.codes)

    def is_comparable(self, name: str, variant: Variant) -> bool:
        """Whether a run and what it is compared with have ended."""
        needed = [(name, variant), *(("cpu", one) for one in references_of(variant))]
        if variant.again == 2:
            needed.append((name, replace(variant, again=1)))
        return all(self.code(*one) is not None for one in needed)

    def losses(self, name: str, variant: Variant) -> list[float]:
        """Return the losses of a run by step."""
        return losses_of(run_of(self._work / name, variant.name))


def references_of(variant: Variant) -> list[Variant]:
    """Return the CPU runs that a run is compared with, fp32 first."""
    dtypes = ["fp32"] if variant.dtype == "fp32" or variant.float8 else ["fp32", "bf16"]
    return [Variant(variant.method, dtype, variant.packed) for dtype in dtypes]


def bound_of(variant: Variant, exact: Sequence[float], own_gap: float) -> float:
    """Return how far a run's losses may be from ``exact``, the CPU's losses in fp32.

    ``own_gap``: how far from them the CPU's losses in the run's dtype are.
    """
    if variant.float8:
        return FLOAT8_BOUND * max(exact, default=0.0)
    if variant.dtype == "bf16":
        return BF16_FACTOR * own_gap + BF16_MIN_BOUND
    return FOUR_BITS_BOUND if variant.method == "qlora" else FP32_BOUND


def _tell(task: Task, runs: Runs, name: str, variant: Variant) -> None:
    codes = [runs.code(name, variant)]
    codes += [runs.code("cpu", one) for one in references_of(variant)]
    if any(codes):
        whose = "it" if codes[0] else "what it is compared with"
        task.tell(variant.name, "failed", f"{whose} ended with {next(filter(None, codes))}")
        return
    losses = runs.losses(name, variant)
    exact, *own = (runs.losses("cpu", one) for one in references_of(variant))
    own_gap = gap_of(own[0], exact) if own else 0.0
    gap, bound = gap_of(losses, exact), bound_of(variant, exact, own_gap)
    passed, reason = gap <= bound, ""
    if variant.again == 2 and losses != runs.losses(name, replace(variant, again=1)):
        passed, reason = False, "the same run gave other bits the second time"
    said = {"gap": gap, "bound": bound, "last_loss": losses[-1] if losses else None}
    task.tell(variant.name, "passed" if passed else "failed", reason, **said)


def _settings(task: Task) -> tuple[str, ...]:
    size = ("data.seq_len=256", "batch.global_size=8", "batch.micro_size=4", "train.max_steps=6")
    if not task.uses_gpu:
        size = (size[0], "batch.global_size=2", "batch.micro_size=1", "train.max_steps=2")
    caches = (f"data.cache={task.work / 'data'}", f"run.compile_cache={task.work / 'compiled'}")
    # Three processes run at once, and threads that wait for a core spin.
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    return (*SMALL_SETTINGS, *size, *caches, f"run.threads={threads}", "optim.lr=1e-3")


def _list_possible(task: Task, variants: Sequence[Variant]) -> Iterator[Variant]:
    """Yield those that can be tried here; report the others as skipped."""
    why_no_float8 = _explain_missing_float8(task) if any(one.float8 for one in variants) else ""
    for one in variants:
        missing = [name for name in NEEDS[one.method] if importlib.util.find_spec(name) is None]
        if missing:
            task.tell(one.name, "skipped", f"needs {', '.join(missing)}")
        elif one.float8 and why_no_float8:
            task.tell(one.name, "skipped", why_no_float8)
        else:
            yield one


def _explain_missing_float8(task: Task) -> str:
    import torch

    from hpc_tune.errors import ConfigError
    from hpc_tune.model.float8 import check_float8

    try:
        check_float8(torch.device(task.device))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
