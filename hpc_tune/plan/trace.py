"""Trace one training step on a world that does not exist, to count the bytes it takes.

    shape -> meta model -> the real engine over a fake process group, all tensors fake
          -> one train_step -> what was alive at the worst moment

No weight is read and no number is computed: a 70B model on 16 ranks needs two cores and under 1 GB.
Tensors pretend to be on a CPU, because FSDP2 needs the streams of an existing device. Attention and
loss thus use their CPU kernels, whose saved tensors have the sizes of the fused GPU kernels'. Bytes
are those requested; what glibc's heap takes for them on a rank without a GPU is a second estimate.

The fake process group is the process's default group, so a trace needs its own interpreter.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from hpc_tune.batch import Batch
from hpc_tune.config.load import load_config
from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.activation_checkpoint import disable_dispatch_modes
from hpc_tune.engine.base import EngineSettings, evaluate, train_step
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.mesh import Mesh
from hpc_tune.engine.native import NativeEngine
from hpc_tune.errors import ConfigError, HpcTuneError
from hpc_tune.log import configure_logging, print_line
from hpc_tune.memory.host import MAX_CACHED_BLOCK_BYTES, MIN_RETURNED_BLOCK_BYTES
from hpc_tune.model import grouped_matmul, tiled_attention
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.config_json import resolve_model_directory
from hpc_tune.model.experts import loop_over_fp32_experts
from hpc_tune.model.kernels import choose_model_kernels
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.loss import LOGITS_BYTES, LossModel
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.resolve import (
    ModelShape,
    min_micro_rows,
    planned_dtype,
    resolve,
    resolve_row_pieces,
)
from hpc_tune.plan.traced_memory import TracedMemory, replace_attribute, simulate_attention_scratch
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import measure_model_size
from hpc_tune.units import format_bytes

DEVICE = torch.device("cpu")
# Rows are rarely full: a memory block that grows with them may exceed malloc's limit in a full
# micro-batch only, and stay below it in most.
HEAP_BLOCK_MARGIN = 1.125
TYPICAL_DOCUMENT_TOKENS = 128  # about the length of instruction data (Alpaca's rows: 107)
ASSUMED_DEVICE_BYTES = 80 << 30  # assumed per rank to choose a layout
# A mesh looks up its rank in a tensor; DTensor gets the shapes of its results from whole tensors.
_REAL_MODE_METHODS = (
    (DeviceMesh, "__init__"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    # Which tokens a tile has does not depend on their values.
    (tiled_attention, "_make_tiling"),
    (tiled_attention, "_causal_bias"),
)


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """Bytes on one rank in one training step.

    ``activation_bytes`` is the peak without weights, adapters, gradients and optimizer state: saved
    and recomputed activations, gathered weights, logits, temporary values. ``peak_bytes`` is the
    sum of these five. Totals too are ``evaluation_bytes``, the peak of an evaluation,
    ``loaded_bytes``, before the first step, and ``idle_bytes``, between two steps. The two
    ``heap_`` figures are those peaks with glibc's heap. ``num_micro`` micro-batches were traced, in
    ``trace_s`` seconds. ``kernel_bytes``: oneDNN's kernels, which stay. ``shards``: number of
    sharded weights by their bytes on the rank. ``parts``: peak and heap peak of each part of the
    step (see ``_track_parts``). ``moved_bytes``: host buffers for block inputs. ``row_pieces``: in
    how many pieces of a row MLPs are computed; 0 if no MLP can be cut.
    """

    layout: str
    world_size: int
    rank: int
    num_layers: int
    num_micro: int
    reshard: str
    weight_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    evaluation_bytes: int
    loaded_bytes: int
    idle_bytes: int
    heap_peak_bytes: int
    heap_evaluation_bytes: int
    trace_s: float
    kernel_bytes: int = 0
    shards: dict[int, int] = dataclasses.field(default_factory=dict)
    parts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    moved_bytes: int = 0
    row_pieces: int = 1

    @property
    def long_rows_note(self) -> str:
        """Description of what is done for long rows, starting with a comma; "" for nothing."""
        pieces = f", MLPs in {self.row_pieces} pieces of a row" if self.row_pieces > 1 else ""
        size = f"{format_bytes(self.moved_bytes)} per rank"
        return pieces + (f", inputs of blocks on the host ({size})" if self.moved_bytes else "")


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What is traced: a step of one rank of a run whose layout is decided.

    Each micro-batch has ``micro_rows`` rows of ``seq_len`` tokens; a step of all ranks has
    ``global_rows``. Every token has a loss, and attention has the mask of packed rows: the most
    memory that a batch can need. ``targets_gpu``: logits at once, padding and copies are those of a
    GPU, else of a CPU. ``has_varlen_kernel``: attention needs no mask for packed documents, here of
    ``TYPICAL_DOCUMENT_TOKENS`` tokens. ``has_tiled_attention``: the same for a CPU's tiled
    attention, with one document per row.
    """

    shape: ModelShape
    layout: Layout
    parallel: ParallelConfig
    optim: OptimConfig
    global_rows: int
    micro_rows: int
    seq_len: int
    rank: int = 0
    targets_gpu: bool = True
    has_varlen_kernel: bool = False
    has_tiled_attention: bool = False

    @property
    def is_fully_trained(self) -> bool:
        """Whether all weights are trained."""
        return self.shape.tune.method == "full"

    @property
    def num_micro(self) -> int:
        """How many micro-batches must be traced to see a step's peak, at most as many as it has.

        The first of P stages has P in flight, about 2 P in an interleaved schedule. One more sees
        what the first left: the unsharded gradients of full fine-tuning.
        """
        pipeline = self.layout.pipeline
        num_needed = 2 if self.is_fully_trained else 1
        if pipeline > 1:
            num_needed = 2 * pipeline if self.parallel.stages_per_rank > 1 else pipeline + 1
        rows = self.layout.rows_per_rank(self.global_rows)
        return min(num_needed, -(-rows // self.micro_rows))


TraceFunction = Callable[[TracedStep], TraceReport]


def trace_step(step: TracedStep) -> TraceReport:
    """Trace forward, backward and optimizer of one step, and an evaluation.

    Raises:
        DataError: if config.json is not that of a causal LM. ConfigError: if the tune settings or
            the scaling of positions do not fit the model.
    """
    began_s = time.perf_counter()
    built_model, layout = step.shape.build(), step.layout
    block_bytes = MIN_RETURNED_BLOCK_BYTES if layout.shard > 1 else MAX_CACHED_BLOCK_BYTES
    memory = TracedMemory(int(HEAP_BLOCK_MARGIN * block_bytes), trims=layout.shard > 1)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    plan = StepPlan.for_model(built_model, layout, step.parallel)
    world, experts = _fake_world(step.rank, layout.size), loop_over_fp32_experts()
    with world, experts, fake, memory.watch(), _device_allocation_context(step):
        engine = make_fake_engine(
            built_model, EngineSettings(plan, DEVICE, step.optim), step.targets_gpu
        )
        engine.inputs.is_dry_run = True
        engine.inputs.is_on = step.targets_gpu and step.parallel.offload_activations
        for stage in engine.stages:
            stage.module.uses_document_attention &= step.has_tiled_attention
            stage.module.has_varlen_kernel = step.has_varlen_kernel
            stage.module.kernel_has_windows = True
            stage.module.logits_bytes = LOGITS_BYTES["cuda" if step.targets_gpu else "cpu"]
        batches = [_make_traced_batch(step) for _ in range(step.num_micro)]
        tokens = sum(batch.num_tokens for batch in batches) * layout.data_parallel_size
        loaded_bytes = memory.live_bytes
        memory.begin_phase()
        if layout.pipeline == 1:
            _track_parts(memory, engine.stages[0].module)
        train_step(engine, batches, tokens, step.optim.peak_lr)
        kinds = _bytes_by_kind(engine, step.is_fully_trained)
        peak_bytes, idle_bytes = memory.peak_bytes, memory.live_bytes
        heap_peak_bytes, parts = memory.heap_peak_bytes, memory.peaks
        kernel_bytes = memory.kernel_bytes
        memory.begin_phase(is_trimmed=True)
        evaluate(engine, batches, plan, DEVICE)
    return TraceReport(
        str(layout),
        layout.size,
        step.rank,
        plan.size.blocks(built_model.config),
        step.num_micro,
        step.parallel.reshard,
        *kinds,
        activation_bytes=peak_bytes - sum(kinds),
        peak_bytes=peak_bytes,
        evaluation_bytes=memory.peak_bytes,
        loaded_bytes=loaded_bytes,
        idle_bytes=idle_bytes,
        heap_peak_bytes=heap_peak_bytes,
        heap_evaluation_bytes=memory.heap_peak_bytes,
        trace_s=time.perf_counter() - began_s,
        kernel_bytes=kernel_bytes,
        shards=_count_shards_by_bytes(engine),
        parts=parts,
        moved_bytes=engine.inputs.buffer_bytes,
        row_pieces=engine.pieces.num_pieces if engine.pieces.has_mlps else 0,
    )


def _device_allocation_context(step: TracedStep) -> contextlib.ExitStack:
    """Return a context in which operations allocate as much as on the step's device."""
    contexts = contextlib.ExitStack()
    if step.has_varlen_kernel:
        contexts.enter_context(simulate_attention_scratch())
    if not step.targets_gpu:
        padding = replace_attribute(
            grouped_matmul, "num_padding_rows_in_trace", grouped_matmul.estimate_padding_rows
        )
        contexts.enter_context(padding)
    return contexts


def _track_parts(memory: TracedMemory, module: LossModel) -> None:
    """Mark three parts of a step: up to the middle block, from there forward and back, the rest.

    The peak of a deep model is in the second part, where the activations of all blocks are kept.
    That of a shallow model may be in another part, and is then the same at any depth: in the first
    block's forward or backward pass, with the embedding gathered.
    """
    blocks = list(find_blocks(module))

    def begin_upper_half(block: Any, args: Any, out: Any) -> None:
        memory.begin_part("upper half")
        hidden_BTD = out[0] if isinstance(out, tuple) else out
        if hidden_BTD.requires_grad:
            hidden_BTD.register_hook(lambda grad: memory.begin_part("backward"))

    module.register_forward_pre_hook(lambda *_: memory.begin_part("forward"))
    blocks[len(blocks) // 2].register_forward_hook(begin_upper_half)


def _make_traced_batch(step: TracedStep) -> Batch:
    rows, seq_len = step.micro_rows, step.seq_len
    document = seq_len if step.has_tiled_attention else TYPICAL_DOCUMENT_TOKENS
    tokens_BT, labels_BT, positions_BT = (
        torch.zeros(rows, seq_len, dtype=torch.int64) for _ in range(3)
    )
    row = [document] * (seq_len // document) + [seq_len % document] * (seq_len % document > 0)
    counts = rows * seq_len, rows * seq_len, 0
    return Batch(tokens_BT, labels_BT, positions_BT, *counts, document_lengths=[row] * rows)


def _bytes_by_kind(engine: NativeEngine, is_fully_trained: bool) -> tuple[int, int, int, int]:
    """Return the bytes of weights, adapters, gradients and optimizer state on this rank."""
    params = [p for stage in engine.stages for p in stage.module.parameters()]
    trained_params = [p for p in params if p.requires_grad]
    return (
        _storage_bytes(p for p in params if is_fully_trained or not p.requires_grad),
        0 if is_fully_trained else _storage_bytes(trained_params),
        _storage_bytes(p.grad for p in trained_params if p.grad is not None),
        _storage_bytes(engine.optimizer_state()),
    )


def _count_shards_by_bytes(engine: NativeEngine) -> dict[int, int]:
    """Return the number of sharded weights by their size in bytes on this rank."""
    params = (p for stage in engine.stages for p in stage.module.parameters())
    return dict(Counter(p.to_local().nbytes for p in params if isinstance(p, DTensor)))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank, each counted once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[id(storage)] = storage
    return sum(storage.nbytes() for storage in storages.values())


@contextlib.contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Give the process a default group whose collectives return at once and move nothing."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 - teaches fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with contextlib.ExitStack() as changes:
            for owner, name in _REAL_MODE_METHODS:
                changes.enter_context(
                    replace_attribute(owner, name, disable_dispatch_modes(getattr(owner, name)))
                )
            yield
    finally:
        dist.destroy_process_group()


def make_fake_engine(
    built_model: BuiltModel, settings: EngineSettings, targets_gpu: bool = True
) -> NativeEngine:
    """Return an engine of a fake world, in fake mode. On CPUs, messages are sent as with gloo."""
    collectives = _FakeCollectives(DEVICE, mimics_gloo=not targets_gpu)
    return NativeEngine(built_model, settings, make_fake_mesh(settings), collectives)


def make_fake_mesh(settings: EngineSettings) -> Mesh:
    """Return the groups of a fake world. Made outside fake mode: a mesh reads tensor values."""
    layout, device, uses_fsdp = settings.layout, settings.device, settings.plan.uses_fsdp
    mesh: Mesh = disable_dispatch_modes(Mesh)(layout, device, uses_fsdp)
    return mesh


class _FakeCollectives(CountedCollectives):
    def __init__(self, device: torch.device, mimics_gloo: bool) -> None:
        super().__init__(device)
        self._mimics_gloo = mimics_gloo

    def begin_send(self, tensor: torch.Tensor, target: int, group: Any) -> Any:
        self.count("send", tensor.nbytes)
        return _SentMessage()

    def all_gather_uncounted(self, out: torch.Tensor, part: torch.Tensor, *options: Any) -> Any:
        """Gather; as gloo does, hold a copy of the whole result until done."""
        copy = torch.empty_like(out) if self._mimics_gloo else None
        result = super().all_gather_uncounted(out, part, *options)
        del copy
        return result


class _SentMessage:
    """A message that has arrived; messages of the fake group never do."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def make_traced_step(config: RunConfig, world_size: int) -> TracedStep:
    """Return the step to trace for a configuration; ranks have ``ASSUMED_DEVICE_BYTES``."""
    if config.parallel.zero_stage is not None:
        raise ConfigError(
            "parallel.zero_stage cannot be traced: DeepSpeed works with real memory only; trace "
            "parallel.shard, which holds as much per rank as stage 3"
        )
    dtype = planned_dtype(config.model.dtype, uses_gpu=True)
    settings, directory = config.model, resolve_model_directory(config.model.path)
    shape = ModelShape(directory, dtype, config.tune, config.train.seed, settings.rope_scaling)
    model, machine = shape.build(), Machine(world_size, 1, ASSUMED_DEVICE_BYTES, 0)
    sections = (config.parallel, config.tune, config.train)
    parallel = resolve_row_pieces(*sections, config.data.seq_len, model.module)
    resolved = resolve(
        parallel, measure_model_size(model.module, config.optim.is_8bit), model.config, machine
    )
    size = (config.batch.global_size, min_micro_rows(config.batch), config.data.seq_len)
    kernels = choose_model_kernels(model.config, dtype, config.train.compiles)
    return TracedStep(
        *(shape, resolved.layout, resolved.parallel, config.optim),
        *size,
        has_varlen_kernel=kernels.attention == "varlen",
    )


# -- Traces that take seconds: of few blocks and few tokens, extrapolated linearly.
#
# trace_step -> trace_few_blocks (deep models) -> trace_few_tokens (long rows on CPUs)
# -> trace_worst_rank
#
# python -m hpc_tune.plan.trace CONFIG --world 16 model.path=shape:llama3-70b


_SAMPLE_BLOCK_COUNTS = (8, 12)
_SAMPLE_STAGE_BLOCK_COUNTS = (2, 4)
# A CPU's attention is traced tile by tile.
_MAX_TRACED_TOKENS, _SAMPLE_TOKENS = 1 << 14, 2048


def trace_few_blocks(step: TracedStep) -> TraceReport:
    """Trace two smaller depths and extrapolate each figure to the depth of the model.

    Stages are assumed to be equally deep.
    """
    stages = step.layout.pipeline * step.parallel.stages_per_rank
    low, high = (
        stages * n for n in (_SAMPLE_STAGE_BLOCK_COUNTS if stages > 1 else _SAMPLE_BLOCK_COUNTS)
    )
    began_s, num_blocks = time.perf_counter(), step.shape.num_blocks
    with tempfile.TemporaryDirectory() as folder:
        shapes = (step.shape.with_blocks(blocks, Path(folder)) for blocks in (low, high))
        low_report, high_report = (
            trace_step(dataclasses.replace(step, shape=shape)) for shape in shapes
        )
    report = _extrapolate(low_report, high_report, ratio=(num_blocks - low) / (high - low))
    trace_s = time.perf_counter() - began_s
    return dataclasses.replace(report, num_layers=num_blocks, trace_s=trace_s)


def cache_traces(trace: TraceFunction) -> TraceFunction:
    """Return ``trace`` with a cache by size, for the steps of one run and layout."""
    reports: dict[tuple[int, ...], TraceReport] = {}

    def trace_cached(step: TracedStep) -> TraceReport:
        size = step.micro_rows, step.seq_len, step.num_micro, step.rank
        if size not in reports:
            reports[size] = trace(step)
        return reports[size]

    return trace_cached


def trace_few_tokens(trace: TraceFunction, step: TracedStep) -> TraceReport:
    """Trace a step; with tiles and many tokens, extrapolate from a short row and one twice as long.

    What a step keeps is linear in its tokens; the scores of a tile do not depend on them.
    """
    rows, length = step.micro_rows, step.seq_len
    if not step.has_tiled_attention or rows * length <= _MAX_TRACED_TOKENS:
        return trace(step)
    global_rows = step.num_micro * step.layout.data_parallel_size
    one_row = dataclasses.replace(step, micro_rows=1, global_rows=global_rows)
    short_len = min(length, _SAMPLE_TOKENS)
    low_report = trace(dataclasses.replace(one_row, seq_len=short_len))
    high_report = trace(dataclasses.replace(one_row, seq_len=2 * short_len))
    report = _extrapolate(low_report, high_report, ratio=(rows * length - short_len) / short_len)
    return dataclasses.replace(report, trace_s=low_report.trace_s + high_report.trace_s)


def _extrapolate(low_report: TraceReport, high_report: TraceReport, ratio: float) -> TraceReport:
    """Extrapolate to the report ``ratio`` times as far from ``low_report`` as ``high_report`` is.

    Each part of a step is extrapolated linearly by itself, since the peaks of some grow and others
    do not.
    """

    def extrapolate_value(low_value: int, high_value: int) -> int:
        return round(low_value + ratio * (high_value - low_value))

    figures: dict[str, Any] = {
        name: extrapolate_value(getattr(low_report, name), getattr(high_report, name))
        for name in dataclasses.asdict(low_report)
        if name.endswith("_bytes")
    }
    parts = {
        part: (
            extrapolate_value(peak, high_report.parts[part][0]),
            extrapolate_value(heap_peak, high_report.parts[part][1]),
        )
        for part, (peak, heap_peak) in low_report.parts.items()
    }
    sizes = sorted({*low_report.shards, *high_report.shards})
    shards = {
        size: extrapolate_value(low_report.shards.get(size, 0), high_report.shards.get(size, 0))
        for size in sizes
    }
    peak_bytes, figures["heap_peak_bytes"] = map(max, zip(*parts.values(), strict=True))
    kinds = ("weight", "adapter", "gradient", "optimizer")
    figures["activation_bytes"] = peak_bytes - sum(figures[f"{kind}_bytes"] for kind in kinds)
    other_fields = {"peak_bytes": peak_bytes, "parts": parts, "shards": shards}
    return dataclasses.replace(low_report, **figures | other_fields)


def trace_worst_rank(trace: TraceFunction, step: TracedStep) -> TraceReport:
    """Trace each rank that may need most with ``trace``; return the report with the largest peak.

    Stages differ along the pipeline, the outermost axis of the ranks: the first has the embedding
    and the most micro-batches in flight, the last has the head, and the second stands for all
    stages in between.
    """
    num_stages = step.layout.pipeline
    width = step.layout.size // num_stages
    stages = sorted({0, min(1, num_stages - 1), num_stages - 1})
    reports = [trace(dataclasses.replace(step, rank=stage * width)) for stage in stages]
    return max(reports, key=lambda report: report.peak_bytes)


def main() -> int:
    """Trace a configuration file and print the report as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hpc_tune.plan.trace")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--rank", type=int, help="default: the one that needs most")
    parser.add_argument("--quick", action="store_true", help="trace few blocks and extrapolate")
    arguments = parser.parse_intermixed_args()
    configure_logging(rank=0)
    trace = trace_few_blocks if arguments.quick else trace_step
    try:
        config = load_config(arguments.config, arguments.overrides)
        step = make_traced_step(config, arguments.world)
        if arguments.rank is None:
            report = trace_worst_rank(trace, step)
        else:
            report = trace(dataclasses.replace(step, rank=arguments.rank))
    except HpcTuneError as error:
        print_line(str(error))
        return error.exit_code
    print(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
