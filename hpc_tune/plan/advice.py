"""What would make a run fit that does not: settings, each planned before it is advised.

plan -> remedies_for -> check_remedies -> lines
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import MemorySettings, PhaseMemory
from hpc_tune.units import format_bytes

if TYPE_CHECKING:
    from hpc_tune.plan.report import MemoryPlan

_CHECK_LIMIT_S = 120.0  # so long other plans may take
_SHRINK_SHARES = (1.0, 0.9, 0.8, 0.6, 0.4)  # of the rows or tokens that a fitted line says


@dataclass(frozen=True)
class Remedy:
    """Something that would help. ``changes`` are its settings, none where it is not a setting.

    ``least`` and ``shrinks`` are for a number of which less fits more surely: its name and its
    least value.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    shrinks: str | None = None


def fits(phase: PhaseMemory, machine: Machine) -> bool:
    """Tell whether a phase leaves what a run needs of its limits, on a device and on its node."""
    device = machine.device_bytes
    on_device = device is None or DEVICE_LIMITS.allows(phase.device_bytes, device)
    return on_device and HOST_LIMITS.allows(phase.node_bytes(machine), machine.host_bytes)


def check_remedies(
    remedies: Sequence[Remedy], fits_with: Callable[[Mapping[str, Any]], bool]
) -> list[str]:
    """Return the remedies in words: those that are enough, or how many of them together are."""
    until_s = time.monotonic() + _CHECK_LIMIT_S
    enough, not_enough, unchecked = [], [], []
    for remedy in remedies:
        if not remedy.changes:
            continue
        if time.monotonic() > until_s:
            unchecked.append(remedy)
            continue
        found = next((c for c in _milder_changes(remedy) if fits_with(c)), None)
        if found is None:
            not_enough.append(remedy)
        else:
            enough.append(_in_words(remedy, found))
    others = [remedy.text for remedy in remedies if not remedy.changes]
    others += [f"{remedy.text} (not checked)" for remedy in unchecked]
    if enough or not not_enough:
        return [*enough, *others]
    together: dict[str, Any] = {}
    for remedy in not_enough:
        together |= remedy.changes
        if len(together) > len(not_enough[0].changes) and fits_with(together):
            return [f"together: {_format_settings(together)}", *others]
    return [f"not even with {_format_settings(together)}", *others]


def _milder_changes(remedy: Remedy) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a remedy, and then those with less of the number that shrinks."""
    if remedy.shrinks is None:
        yield remedy.changes
        return
    most, tried = remedy.changes[remedy.shrinks], set()
    for share in _SHRINK_SHARES:
        value = max(1, int(most * share))
        if value not in tried:
            tried.add(value)
            yield {**remedy.changes, remedy.shrinks: value}


def _in_words(remedy: Remedy, changes: Mapping[str, Any]) -> str:
    if remedy.shrinks is None:
        return remedy.text
    return remedy.text.replace(
        f"{remedy.shrinks}={remedy.changes[remedy.shrinks]}",
        f"{remedy.shrinks}={changes[remedy.shrinks]}",
    )


def _format_settings(changes: Mapping[str, Any]) -> str:
    shown = {k: "null" if v is None else str(v).lower() for k, v in changes.items()}
    return " ".join(f"{name}={value}" for name, value in shown.items())


def remedies_for(plan: "MemoryPlan", settings: MemorySettings, tune: TuneConfig) -> list[Remedy]:
    """Return what may make the phases fit that do not."""
    machine, parallel = plan.machine, settings.parallel
    bad = {phase.name: phase for phase in plan.phases if not fits(phase, machine)}
    advice: list[Remedy] = []
    if settings.save == "gathered" and "save" in bad:
        needed, had = bad["save"].node_bytes(machine), machine.host_bytes
        advice.append(
            Remedy(
                f"save: gathering {format_bytes(bad['save'].first_bytes)} on one rank takes "
                f"{format_bytes(needed)} of {format_bytes(had)}; hpc_tune streams each rank's own "
                "part (leave --save gathered out)"
            )
        )
    if "load" in bad:
        advice += _smaller_state(parallel, tune, machine)
    elif "steady" in bad:
        if plan.tokens_that_fit >= plan.seq_len:
            rows = plan.tokens_that_fit // plan.seq_len
            name = "batch.micro_size"
            text = f"steady: {name}={rows} instead of {plan.micro_rows}"
            advice.append(Remedy(text, {name: rows}, shrinks=name))
        if parallel.recompute != "full":
            text = "steady: parallel.recompute=full keeps only each block's input"
            advice.append(Remedy(text, {"parallel.recompute": "full"}))
        if 0 < plan.tokens_that_fit < plan.seq_len:
            name, changes = "data.seq_len", {"data.seq_len": plan.tokens_that_fit}
            text = f"steady: {name}={plan.tokens_that_fit} or less"
            if plan.micro_rows > 1:
                changes["batch.micro_size"] = 1
                text += ", with batch.micro_size=1"
            advice.append(Remedy(text, changes, shrinks=name))
        if not advice:
            advice += _smaller_state(parallel, tune, machine)
    if "compile" in bad and "steady" not in bad:
        text = "compile: run.threads=1 compiles in the rank's own process"
        advice.append(Remedy(text, {"run.threads": 1}))
    if "save, in the background" in bad and "steady" not in bad:
        text = "save: with checkpoint.background=false training waits, and nothing is copied"
        advice.append(Remedy(text, {"checkpoint.background": False}))
    if "merge, in one process" in bad:
        advice.append(Remedy("merge: on a node with more memory; it holds one tensor at a time"))
    if (parallel.pipeline or 1) > 1 and "steady" in bad:
        advice.append(Remedy("steady: fewer pipeline stages have fewer micro-batches in flight"))
    return advice


def _smaller_state(
    parallel: ParallelConfig, tune: TuneConfig, machine: Machine
) -> Iterator[Remedy]:
    shard = machine.world_size
    if parallel.zero_stage is None and (parallel.shard or 1) < shard:
        yield Remedy(
            f"weights: parallel.shard={shard} (now {parallel.shard or 1}), with replicate, tensor "
            "and pipeline left out",
            {f"parallel.{axis}": None for axis in ("replicate", "tensor", "pipeline")}
            | {"parallel.shard": shard},
        )
    if parallel.offload_params == "none" and machine.device_bytes is not None:
        text = "weights: parallel.offload_params=cpu"
        yield Remedy(text, {"parallel.offload_params": "cpu"})
    if tune.method == "full":
        yield Remedy("state: tune.param_dtype=bf16 halves it", {"tune.param_dtype": "bf16"})
        if parallel.zero_stage is None:
            text = "state: optim.name=adamw_8bit quantises AdamW's moments"
            changes = {"optim.name": "adamw_8bit", "parallel.offload_params": "none"}
            yield Remedy(text, changes)
        text = "state: tune.method=lora trains under 1% of the values"
        yield Remedy(text, {"tune.method": "lora", "tune.param_dtype": "fp32"})
    elif tune.method in ("lora", "dora") and not tune.base_dtype:
        text = "weights: tune.base_dtype=fp8 keeps the base in float8"
        yield Remedy(text, {"tune.base_dtype": "fp8"})
    if tune.method == "lora":
        text = "weights: tune.method=qlora keeps the base in 4 bits"
        yield Remedy(text, {"tune.method": "qlora", "tune.base_dtype": None})
    yield Remedy("more nodes")
