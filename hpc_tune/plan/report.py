"""The memory plan of a run: what each phase takes, whether it fits, and what would make it fit.

config, machine -> layout -> traced step (fake tensors) -> phases -> table or JSON
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from hpc_tune.config.constraints import find_compile_obstacle
from hpc_tune.config.init import PlanPreview
from hpc_tune.config.load import load_config
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.log import log
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS, Phase
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.experts import (
    ROUTED_EXPERTS,
    find_stacked_experts,
    is_mixture_of_experts,
    label_parameters_by_part,
)
from hpc_tune.model.kernels import choose_model_kernels
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.weights import index_model_directory
from hpc_tune.plan.hardware import USUAL_DEVICE_BYTES, USUAL_HOST_BYTES, Machine
from hpc_tune.plan.memory_model import (
    MemorySettings,
    ModelBytes,
    PhaseMemory,
    SaveMethod,
    adapt_to_deepspeed_zero,
    limit_tokens_by_host,
    memory_by_phase,
    spare_bytes,
    steady_phase,
    tokens_that_fit,
)
from hpc_tune.plan.resolve import (
    MIN_ROW_PIECE_TOKENS,
    ModelShape,
    ResolvedLayout,
    min_micro_rows,
    open_shape,
    planned_dtype,
    resolve,
    resolve_row_pieces,
    rows_per_rank,
    with_layout,
)
from hpc_tune.plan.trace import (
    TracedStep,
    TraceReport,
    cache_traces,
    trace_few_blocks,
    trace_few_tokens,
    trace_step,
    trace_worst_rank,
)
from hpc_tune.step.layout import Layout, num_process_groups
from hpc_tune.step.plan import uses_fsdp
from hpc_tune.step.size import NUM_MOMENTS, ModelSize, measure_model_size
from hpc_tune.units import format_bytes, format_count, format_quantity

# -- Remedies for a run that does not fit: settings, each planned before it is advised.


_REMEDY_CHECKS_LIMIT_S = 120.0  # for all plans that check remedies
_SHRINK_FACTORS = (1.0, 0.9, 0.8, 0.6, 0.4)  # of the rows or tokens that are estimated to fit


@dataclass(frozen=True)
class Remedy:
    """Something that would help. ``changes``: its settings, empty if it is not a setting.

    ``shrinkable_setting`` names the setting among them whose lower values are more likely to fit.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    shrinkable_setting: str | None = None


def phase_fits(phase: PhaseMemory, machine: Machine) -> bool:
    """Return whether a phase stays within the limits of its device and its node."""
    device = machine.device_bytes
    on_device = device is None or DEVICE_LIMITS.allows(phase.device_bytes, device)
    return on_device and HOST_LIMITS.allows(phase.node_bytes(machine), machine.host_bytes)


def describe_sufficient_remedies(
    remedies: Sequence[Remedy], fits_with: Callable[[Mapping[str, Any]], bool]
) -> list[str]:
    """Describe the remedies that are enough, or else the first few that are enough together."""
    until_s = time.monotonic() + _REMEDY_CHECKS_LIMIT_S
    enough, not_enough, unchecked = [], [], []
    for remedy in remedies:
        if not remedy.changes:
            continue
        if time.monotonic() > until_s:
            unchecked.append(remedy)
            continue
        changes = next((c for c in _milder_changes(remedy) if fits_with(c)), None)
        if changes is None:
            not_enough.append(remedy)
        else:
            enough.append(_describe_changes(remedy, changes))
    other_texts = [remedy.text for remedy in remedies if not remedy.changes]
    other_texts += [f"{remedy.text} (not checked)" for remedy in unchecked]
    if enough or not not_enough:
        return [*enough, *other_texts]
    combined_changes: dict[str, Any] = {}
    for remedy in not_enough:
        combined_changes |= remedy.changes
        if len(combined_changes) > len(not_enough[0].changes) and fits_with(combined_changes):
            return [f"together: {_format_settings(combined_changes)}", *other_texts]
    return [f"not even with {_format_settings(combined_changes)}", *other_texts]


def _milder_changes(remedy: Remedy) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a remedy, then the same with lower values of the one that shrinks."""
    if remedy.shrinkable_setting is None:
        yield remedy.changes
        return
    max_value, tried_values = remedy.changes[remedy.shrinkable_setting], set()
    for share in _SHRINK_FACTORS:
        value = max(1, int(max_value * share))
        if value not in tried_values:
            tried_values.add(value)
            yield {**remedy.changes, remedy.shrinkable_setting: value}


def _describe_changes(remedy: Remedy, changes: Mapping[str, Any]) -> str:
    if remedy.shrinkable_setting is None:
        return remedy.text
    return remedy.text.replace(
        f"{remedy.shrinkable_setting}={remedy.changes[remedy.shrinkable_setting]}",
        f"{remedy.shrinkable_setting}={changes[remedy.shrinkable_setting]}",
    )


def _format_settings(changes: Mapping[str, Any]) -> str:
    texts = {k: "null" if v is None else str(v).lower() for k, v in changes.items()}
    return " ".join(f"{name}={value}" for name, value in texts.items())


def find_remedies(plan: "MemoryPlan", settings: MemorySettings, tune: TuneConfig) -> list[Remedy]:
    """Return remedies that may help for the phases that do not fit."""
    machine, parallel = plan.machine, settings.parallel
    bad_phases = {phase.name: phase for phase in plan.phases if not phase_fits(phase, machine)}
    advice: list[Remedy] = []
    if (save := bad_phases.get(Phase.SAVE_GATHERED)) is not None:
        usage, limit = save.node_bytes(machine), machine.host_bytes
        advice.append(
            Remedy(
                f"save: gathering {format_bytes(save.first_bytes)} on one rank takes "
                f"{format_bytes(usage)} of {format_bytes(limit)}; hpc_tune streams each rank's own "
                "part (omit --save gathered)"
            )
        )
    if Phase.LOAD in bad_phases:
        advice += _shrink_state_remedies(parallel, tune, machine)
    elif Phase.STEADY in bad_phases:
        if plan.tokens_that_fit >= plan.seq_len:
            rows = plan.tokens_that_fit // plan.seq_len
            name = "batch.micro_size"
            text = f"steady: {name}={rows} instead of {plan.micro_rows}"
            advice.append(Remedy(text, {name: rows}, shrinkable_setting=name))
        if parallel.recompute != "full":
            text = "steady: parallel.recompute=full keeps only each block's input"
            advice.append(Remedy(text, {"parallel.recompute": "full"}))
        else:
            advice += _long_row_remedies(plan, parallel, tune)
        if 0 < plan.tokens_that_fit < plan.seq_len:
            name, changes = "data.seq_len", {"data.seq_len": plan.tokens_that_fit}
            text = f"steady: {name}={plan.tokens_that_fit} or less"
            if plan.micro_rows > 1:
                changes["batch.micro_size"] = 1
                text += ", with batch.micro_size=1"
            advice.append(Remedy(text, changes, shrinkable_setting=name))
        if not advice:
            advice += _shrink_state_remedies(parallel, tune, machine)
    if Phase.COMPILE in bad_phases and Phase.STEADY not in bad_phases:
        text = "compile: run.threads=1 compiles in the rank's own process"
        advice.append(Remedy(text, {"run.threads": 1}))
    if Phase.SAVE_IN_BACKGROUND in bad_phases and Phase.STEADY not in bad_phases:
        text = "save: with checkpoint.background=false training waits, and nothing is copied"
        advice.append(Remedy(text, {"checkpoint.background": False}))
    if Phase.MERGE in bad_phases:
        advice.append(Remedy("merge: on a node with more memory; it holds one tensor at a time"))
    if (parallel.pipeline or 1) > 1 and Phase.STEADY in bad_phases:
        advice.append(Remedy("steady: fewer pipeline stages have fewer micro-batches in flight"))
    return advice


def _long_row_remedies(
    plan: "MemoryPlan", parallel: ParallelConfig, tune: TuneConfig
) -> Iterator[Remedy]:
    num_pieces = plan.seq_len // (MIN_ROW_PIECE_TOKENS * parallel.context)
    can_cut = parallel.zero_stage != 3 and not tune.dropout
    if 0 < plan.trace.row_pieces < num_pieces and can_cut:
        text = f"steady: parallel.row_pieces={num_pieces} keeps one piece of a row in each MLP"
        yield Remedy(text, {"parallel.row_pieces": num_pieces})
    if plan.machine.device_bytes is not None and not parallel.offload_activations:
        text = "steady: parallel.offload_activations=true keeps blocks' inputs on the host"
        yield Remedy(text, {"parallel.offload_activations": True})
    ranks = (parallel.replicate or 1) * (parallel.shard or 1)
    min_context = parallel.context * -(-plan.seq_len // max(1, plan.tokens_that_fit))
    context = next((n for n in range(max(2, min_context), ranks + 1) if ranks % n == 0), 1)
    if context > parallel.context:
        text = f"steady: parallel.context={context} lets {context} ranks share each row"
        yield Remedy(text, {"parallel.context": context})


def _shrink_state_remedies(
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
            text = "state: optim.name=adamw_8bit quantizes AdamW's moments"
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


# -- The plan and its report.


_MAX_FULLY_TRACED_BLOCKS = 12  # up to here a trace of all blocks is no slower than two of a few


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run by phase; ``remedies`` are for what does not fit.

    ``tokens_that_fit`` is about the largest micro-batch that fits, in tokens. ``bound_by``: if
    activations are offloaded, whether the memory of a GPU or of a node limits it.
    """

    model: str
    layout: str
    why: str
    micro_rows: int
    seq_len: int
    machine: Machine
    trace: TraceReport
    phases: list[PhaseMemory]
    tokens_that_fit: int
    remedies: list[Remedy]
    bound_by: Literal["", "GPU", "node"] = ""

    @property
    def fits(self) -> bool:
        """Whether every phase fits, optional ones aside."""
        return all(phase.optional or phase_fits(phase, self.machine) for phase in self.phases)

    @property
    def steady_phase(self) -> PhaseMemory:
        """The phase of steady training steps."""
        return steady_phase(self.phases)

    @property
    def advice(self) -> list[str]:
        """The remedies in words, before ``describe_sufficient_remedies`` has checked them."""
        return [remedy.text for remedy in self.remedies]


def make_plan(
    config: RunConfig, machine: Machine, save: SaveMethod = "streamed", needs_mask: bool = False
) -> MemoryPlan:
    """Plan a run on a machine that need not exist; no weights are read. ``needs_mask``: its GPUs
    have no attention kernel for packed documents, see ``kernels.py``.

    Raises:
        ConfigError: if the layout does not fit world or model, or there is no such model.
        DataError: if it is no causal LM, or its files are damaged.
    """
    model, tune, train, batch = config.model, config.tune, config.train, config.batch
    micro_rows, uses_gpu = min_micro_rows(batch), machine.device_bytes is not None
    dtype, seq_len = planned_dtype(model.dtype, uses_gpu), config.data.seq_len
    with open_shape(model.path, dtype, tune, train.seed, model.rope_scaling) as shape:
        built_model = shape.build()
        size = measure_model_size(built_model.module, config.optim.is_8bit)
        has_experts = is_mixture_of_experts(built_model.module)
        if uses_gpu and not find_compile_obstacle(config.parallel, tune, train, has_experts):
            train = train.model_copy(update={"compile": True})
        parallel = resolve_row_pieces(config.parallel, tune, train, seq_len, built_model.module)
        resolved = resolve(parallel, size, built_model.config, machine)
        own_rows = rows_per_rank(batch, resolved.layout)
        trains_tied = size.is_fully_trained and built_model.tied_name is not None
        settings = MemorySettings(
            resolved.parallel,
            config.checkpoint,
            own_rows * seq_len,
            _threads_per_rank(config.run.threads, machine) if train.compiles else None,
            config.memory.governor == "on",
            *(save, tune.form, tune.has_reference, _num_process_groups(resolved, trains_tied)),
        )
        fields = (*_native_layout(resolved), config.optim, batch.global_size, micro_rows, seq_len)
        step = TracedStep(shape, *fields)
        step = _with_kernels(step, built_model, train.compiles, uses_gpu, needs_mask)
        is_deep = size.blocks(built_model.config) > _MAX_FULLY_TRACED_BLOCKS
        trace = partial(trace_few_tokens, cache_traces(trace_few_blocks if is_deep else trace_step))
        report = adapt_to_deepspeed_zero(trace_worst_rank(trace, step), resolved)
        model_bytes = _model_bytes(shape, built_model, size, resolved.layout, config.optim.is_8bit)
        phases = memory_by_phase(report, machine, model_bytes, settings)

        def spare_bytes_at(rows: int, length: int, loader_row_len: int) -> int:
            trial_step = replace(step, micro_rows=rows, seq_len=length, rank=report.rank)
            new_settings = replace(settings, step_tokens=own_rows * loader_row_len)
            trial = adapt_to_deepspeed_zero(trace(trial_step), resolved)
            return spare_bytes(memory_by_phase(trial, machine, model_bytes, new_settings), machine)

        tokens = tokens_that_fit(spare_bytes_at, spare_bytes(phases, machine), micro_rows, seq_len)
        offload = report.moved_bytes, micro_rows * seq_len
        tokens, bound_by = limit_tokens_by_host(tokens, phases, machine, *offload)
    plan = MemoryPlan(
        f"{model.path}: {format_count(size.num_parameters)} parameters, "
        f"{format_count(size.num_trained)} trained ({tune.method})",
        _layout_text(resolved),
        resolved.reason,
        micro_rows,
        seq_len,
        machine,
        *(report, phases, tokens, [], bound_by),
    )
    return replace(plan, remedies=find_remedies(plan, settings, tune))


def _threads_per_rank(request: int | Literal["auto"], machine: Machine) -> int:
    return machine.cores_per_rank if request == "auto" else request


def _with_kernels(
    step: TracedStep, built_model: BuiltModel, is_compiled: bool, uses_gpu: bool, needs_mask: bool
) -> TracedStep:
    device, dtype = None if uses_gpu else torch.device("cpu"), step.shape.dtype
    attention = choose_model_kernels(built_model.config, dtype, is_compiled, device).attention
    has_varlen_kernel = attention == "varlen" and not needs_mask
    return replace(
        step,
        targets_gpu=uses_gpu,
        has_varlen_kernel=has_varlen_kernel,
        has_tiled_attention=attention == "tiles",
    )


def plan_to_lines(plan: MemoryPlan, advice: Sequence[str]) -> list[str]:
    """Return the plan as a table for a person."""
    machine, device = plan.machine, plan.machine.device_bytes
    ranks = f"GPUs of {format_bytes(device)}" if device is not None else "ranks on CPUs"
    lines = [
        f"model   {plan.model}",
        f"world   {format_quantity(machine.nodes, 'node')} x "
        f"{machine.ranks_per_node} {ranks}, {format_bytes(machine.host_bytes)} of host memory each",
        f"layout  {plan.layout}: {plan.why}",
        f"batch   micro-batches of {plan.micro_rows} x {plan.seq_len} tokens"
        f"{plan.trace.long_rows_note}",
        "",
        f"{'phase':<26}{'device/rank':>13}{'host/rank':>13}{'host/node':>13}{'left':>13}",
    ]
    for phase in plan.phases:
        on_device = "-" if device is None else format_bytes(phase.device_bytes)
        room, owner = machine.host_bytes - phase.node_bytes(machine), "node"
        if device is not None and phase.device_bytes and device - phase.device_bytes < room:
            room, owner = device - phase.device_bytes, "GPU"
        mark = "" if phase_fits(phase, machine) else "  DOES NOT FIT"
        mark += ": training waits instead" if mark and phase.optional else ""
        lines.append(
            f"{phase.name:<26}{on_device:>13}{format_bytes(phase.rank_bytes):>13}"
            f"{format_bytes(phase.node_bytes(machine)):>13}{format_bytes(room):>13} {owner}{mark}"
        )
    lines.append("")
    rows = plan.tokens_that_fit // plan.seq_len
    if (tokens := plan.tokens_that_fit) > 0:
        limit_text = f", by the memory of a {plan.bound_by}" if plan.bound_by else ""
        lines.append(
            f"room    about {tokens} tokens per micro-batch{limit_text}: batch.micro_size={rows}"
            if rows
            else f"room    data.seq_len up to about {tokens}{limit_text} in micro-batches of one"
        )
    lines.append(f"verdict {'fits' if plan.fits else 'does not fit'}")
    return lines + [f"  - {line}" for line in advice]


def plan_to_json(plan: MemoryPlan, advice: Sequence[str]) -> str:
    """Return the plan as JSON for a program."""
    tree: dict[str, Any] = {**asdict(replace(plan, remedies=[])), "advice": advice}
    del tree["remedies"]
    for node, p in zip(tree["phases"], plan.phases, strict=True):
        node |= {"node_bytes": p.node_bytes(plan.machine), "fits": phase_fits(p, plan.machine)}
    return json.dumps({**tree, "fits": plan.fits}, indent=1)


def plan_from_json(text: str) -> MemoryPlan:
    """Return the plan that ``plan_to_json`` has written; its remedies have only the advice's text.

    Raises:
        ValueError: if the text is not a plan.
    """
    tree = json.loads(text)
    if not isinstance(tree, dict) or not tree.keys() >= {"trace", "machine", "phases", "advice"}:
        raise ValueError("it is no plan")
    trace, machine = tree["trace"], Machine(**tree["machine"])
    trace["shards"] = {int(size): num for size, num in trace["shards"].items()}
    trace["parts"] = {part: tuple(peaks) for part, peaks in trace["parts"].items()}
    phases = [
        PhaseMemory(Phase(p.pop("name")), **{n: p[n] for n in p.keys() - {"node_bytes", "fits"}})
        for p in tree["phases"]
    ]
    remedies = [Remedy(text) for text in tree.pop("advice")]
    del tree["fits"]
    parsed_fields = {"machine": machine, "trace": TraceReport(**trace), "phases": phases}
    return MemoryPlan(**tree | parsed_fields, remedies=remedies)


def _num_process_groups(resolved: ResolvedLayout, trains_tied_embedding: bool) -> int:
    is_fsdp = uses_fsdp(resolved.layout.shard, resolved.parallel)
    return num_process_groups(resolved.layout, is_fsdp, trains_tied_embedding=trains_tied_embedding)


def _native_layout(resolved: ResolvedLayout) -> tuple[Layout, ParallelConfig]:
    """Return the native layout whose step is traced in place of ZeRO's, which cannot be traced."""
    parallel = resolved.parallel
    if parallel.zero_stage is None:
        return resolved.layout, parallel
    native = {"zero_stage": None, "engine": "native", "reshard": "block"}
    native |= {"offload_optimizer": "none", "offload_params": "none"}
    return resolved.layout, with_layout(parallel.model_copy(update=native), resolved.layout)


def _model_bytes(
    shape: ModelShape, built_model: BuiltModel, size: ModelSize, layout: Layout, is_8bit: bool
) -> ModelBytes:
    stored_dtypes, largest, mapped_share = _inspect_stored_weights(shape.directory, built_model)
    trained_params = [p for p in built_model.module.parameters() if p.requires_grad]
    # Moments in 8 bits are saved in fp32, whatever the weights are.
    more_in_fp32 = NUM_MOMENTS * (4 * size.num_trained - size.trained_bytes)
    return ModelBytes(
        size.trained_bytes,
        largest,
        _max_gathered_values(built_model, layout) * shape.dtype.itemsize,
        size.is_fully_trained,
        mapped_share=mapped_share if stored_dtypes == {shape.dtype} else 0.0,
        other_saved_bytes=more_in_fp32 if is_8bit else 0,
        largest_trained=max((p.nbytes for p in trained_params), default=0),
    )


def _max_gathered_values(built_model: BuiltModel, layout: Layout) -> int:
    """Return the most values gathered at once: a block, its distributed experts, or a tensor."""
    module, kinds = built_model.module, label_parameters_by_part(built_model.module)
    experts = {p for p, kind in kinds.items() if kind == ROUTED_EXPERTS and layout.expert > 1}
    sizes = [[p.numel() for p in b.parameters() if p not in experts] for b in find_blocks(module)]
    sizes += [[p.numel()] for p in module.parameters() if p not in experts]
    expert_sizes = [
        [p.numel() for p in b.parameters() if p in experts] for b in find_blocks(module)
    ]
    rank_values = max(map(sum, expert_sizes)) // layout.expert if layout.expert_shard > 1 else 0
    return max(*map(sum, sizes), rank_values)


def _inspect_stored_weights(
    directory: Path, built_model: BuiltModel
) -> tuple[set[torch.dtype], int, float]:
    """Return the dtypes of a model's files, the bytes of their largest tensor, and a share.

    The share: that of the frozen values whose tensors have the same shape in the files as in the
    model, unlike experts that are stored one by one. Without files, all tensors but stacks of
    experts are assumed to be stored so, in the config's dtype or else in the model's.
    """
    frozen_params = [p for p in built_model.module.parameters() if not p.requires_grad]
    num_frozen = max(1, sum(p.numel() for p in frozen_params))
    if any(directory.glob("*.safetensors")):
        index = index_model_directory(directory)
        shapes = {tuple(index.shapes[name]) for name in index.stored_names}
        num_alike = sum(p.numel() for p in frozen_params if tuple(p.shape) in shapes)
        largest = max(map(index.tensor_bytes, index.stored_names))
        return set(index.dtypes.values()), largest, num_alike / num_frozen
    dtype = getattr(built_model.config, "dtype", None)
    stored_dtype = dtype if isinstance(dtype, torch.dtype) else built_model.dtype
    largest = stored_dtype.itemsize * max(p.numel() for p in built_model.module.parameters())
    num_stacked = sum(
        p.numel()
        for _, part in find_stacked_experts(built_model.module)
        for p in part.parameters(False)
    )
    return {stored_dtype}, largest, max(0.0, 1 - num_stacked / num_frozen)


def _layout_text(resolved: ResolvedLayout) -> str:
    stage, layout = resolved.parallel.zero_stage, resolved.layout
    return str(layout) if stage is None else f"ZeRO {stage} over {layout.size} ranks"


# -- The sizes of a new configuration, from a plan of its run.


def preview_plan(file: Path, num_nodes: int, gpus_per_node: int) -> PlanPreview | None:
    """Return what the run of a configuration ``file`` needs on GPUs; None if it cannot be planned.

    It recomputes activations selectively if that fits a usual GPU, else fully.
    """
    config = load_config([str(file)], [])
    machine = Machine(num_nodes, gpus_per_node, USUAL_DEVICE_BYTES, USUAL_HOST_BYTES)
    log.info("planning the memory of %d x %d GPUs", num_nodes, gpus_per_node)
    for recompute in ("selective", "full"):
        try:
            plan = make_plan(config.with_changes({"parallel.recompute": recompute}), machine)
        except (ConfigError, DataError) as error:
            log.warning("memory is not planned: %s", error)
            return None
        phases = [p for p in plan.phases if not p.optional]
        device_bytes = max(p.device_bytes for p in phases)
        fits = DEVICE_LIMITS.allows(device_bytes, USUAL_DEVICE_BYTES)
        if fits:
            break
    node_bytes = max(p.node_bytes(machine) - gpus_per_node * p.spare_bytes for p in phases)
    host_gib_per_node = -(-int(node_bytes / HOST_LIMITS.max_share) >> 30)
    return PlanPreview(recompute, host_gib_per_node, device_bytes, USUAL_DEVICE_BYTES, fits)
