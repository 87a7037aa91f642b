"""Device and host bytes of a run by phase, predicted before anything is started.

    shapes, traced step, settings -> load, compile, first step, steady, evaluate, save, merge

A rank's tensors are on its device: a GPU, or on CPUs the host itself. The rest of host memory is
the process with its libraries and the data that streams through it. Page cache is left out: the
kernel reclaims it before it kills a process.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpc_tune.checkpoint.export import estimate_merge_bytes
from hpc_tune.config.data import DataForm
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import STAGING_BYTES, CheckpointConfig
from hpc_tune.data.loader import BYTES_PER_TOKEN_OF_FORM, prefetch_limit_bytes
from hpc_tune.engine.compile import num_compile_workers
from hpc_tune.engine.zero.settings import BUCKET_VALUES
from hpc_tune.memory.host import (
    BLOCK_OBJECTS_BYTES,
    COMPILE_WORKER_BYTES,
    DEEPSPEED_BYTES,
    FIRST_STEP_BYTES,
    FIRST_STEP_RETAINED_BYTES,
    GPU_RUNTIME_BYTES,
    MERGE_PROCESS_BASE_BYTES,
    MODEL_OBJECTS_BYTES,
    RANK_BASE_BYTES,
)
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS, MIN_PLANNED_MEMORY_SHARE, Phase
from hpc_tune.model.tensor_sources import PIECE_BYTES
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.resolve import ResolvedLayout
from hpc_tune.plan.trace import TraceReport
from hpc_tune.step.layout import Layout, num_process_groups
from hpc_tune.step.plan import uses_fsdp
from hpc_tune.step.size import SAVED_COPIES, ModelSize, max_activation_bytes, static_bytes
from hpc_tune.world.pinned import next_power_of_two, pinned_blocks_bytes

# On a device: the context and library workspaces. A conservative guess, not measured.
GPU_CONTEXT_BYTES = 1536 << 20
# NCCL's buffers per group, and those of NVLS once per rank where a node's eight GPUs may use it
# (Hopper and later, https://github.com/NVIDIA/nccl/issues/864, 1410). Taken from logs of others.
NCCL_GROUP_BYTES, NVLS_BYTES = 600 << 20, 2304 << 20
_MIN_NVLS_RANKS, _MIN_NVLS_DEVICE_BYTES = 8, 79 << 30
GPU_SLACK_SHARE = 0.03  # of the traced peak: the allocator rounds up and leaves fragments
SaveMethod = Literal["streamed", "gathered"]


@dataclass(frozen=True)
class PhaseMemory:
    """The peak of one phase: bytes of the rank that needs most, on its device and on the host.

    ``first_bytes``: additional host bytes on the first node. If there is no room, a run skips an
    ``optional`` phase, and can do without ``spare_bytes`` of ``rank_bytes``.
    """

    name: Phase
    device_bytes: int
    rank_bytes: int
    first_bytes: int = 0
    optional: bool = False
    spare_bytes: int = 0

    def node_bytes(self, machine: Machine) -> int:
        """Return the host bytes of the fullest node."""
        return machine.ranks_per_node * self.rank_bytes + self.first_bytes


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of a model, in bytes, that a trace of one rank does not show.

    ``trained``: all trained values, unsharded. ``largest_tensor``: as it is stored.
    ``largest_gathered_unit``: the most that is gathered at once: a block, its experts or a tensor.
    ``is_fully_trained``: all weights are trained. ``mapped_share``: share of the frozen values that
    the files hold in the form that is computed with, so that they can be mapped.
    ``other_saved_bytes``: what a checkpoint holds besides ``trained`` and two moments of the same
    size. ``largest_trained``: the largest tensor that is saved.
    """

    trained: int
    largest_tensor: int
    largest_gathered_unit: int
    is_fully_trained: bool = False
    mapped_share: float = 1.0
    other_saved_bytes: int = 0
    largest_trained: int = PIECE_BYTES


@dataclass(frozen=True)
class MemorySettings:
    """The settings that decide memory besides the traced step.

    ``parallel`` has its layout decided. ``step_tokens``: tokens of one step that wait in a rank's
    loader, in the form ``form``. ``compile_threads``: None without torch.compile. ``has_governor``:
    memory.governor is on. ``save="gathered"`` models a tool that gathers all trained values and
    their optimizer state on one rank. ``has_reference``: the log-probabilities of all answers are
    computed first, and 8 bytes per pair are kept. ``num_process_groups``: process groups of several
    ranks that communicate (``step/layout.py``).
    """

    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    step_tokens: int
    compile_threads: int | None = None
    has_governor: bool = True
    save: SaveMethod = "streamed"
    form: DataForm = "answers"
    has_reference: bool = False
    num_process_groups: int = 0

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the weights."""
        parallel = self.parallel
        return parallel.zero_stage == 3 or uses_fsdp(parallel.shard or 1, parallel)


def gpu_overhead_bytes(machine: Machine, num_process_groups: int) -> int:
    """Return the bytes on a rank's device besides tensors: the context and NCCL's buffers."""
    device_bytes = machine.device_bytes or 0
    has_nvls = machine.ranks_per_node >= _MIN_NVLS_RANKS and device_bytes >= _MIN_NVLS_DEVICE_BYTES
    nvls = NVLS_BYTES if has_nvls and num_process_groups else 0
    return GPU_CONTEXT_BYTES + num_process_groups * NCCL_GROUP_BYTES + nvls


def process_bytes_on_device(machine: Machine) -> int:
    """Return the least that a rank's process itself takes of the memory of its tensors."""
    return 0 if machine.device_bytes else RANK_BASE_BYTES


def max_step_bytes(
    size: ModelSize, layout: Layout, model: Any, tokens: int, machine: Machine
) -> int:
    """Return an upper bound of a rank's memory in a step (see ``max_activation_bytes``)."""
    tensors = static_bytes(size, layout) + max_activation_bytes(model, tokens)
    if machine.device_bytes is None:
        return tensors + process_bytes_on_device(machine)
    groups = num_process_groups(layout, uses_fsdp=layout.shard > 1)
    return int(tensors * (1 + GPU_SLACK_SHARE)) + gpu_overhead_bytes(machine, groups)


def fits_without_plan(max_bytes: int, machine: Machine) -> bool:
    """Return whether a rank that takes at most ``max_bytes`` surely fits and needs no plan."""
    return max_bytes < MIN_PLANNED_MEMORY_SHARE * machine.bytes_per_rank


def memory_by_phase(
    trace: TraceReport, machine: Machine, model: ModelBytes, settings: MemorySettings
) -> list[PhaseMemory]:
    """Return the phases in the order in which a run goes through them.

    ``trace``: the trace of the rank that needs most.
    """
    uses_cpu, checkpoint = machine.device_bytes is None, settings.checkpoint
    process = RANK_BASE_BYTES + MODEL_OBJECTS_BYTES + BLOCK_OBJECTS_BYTES * trace.num_layers
    process += 0 if uses_cpu else GPU_RUNTIME_BYTES
    process += 0 if settings.parallel.zero_stage is None else DEEPSPEED_BYTES
    step = _step_bytes(trace, uses_cpu, model, settings)
    leftover, retained = (FIRST_STEP_BYTES, FIRST_STEP_RETAINED_BYTES) if uses_cpu else (0, 0)
    kernels = trace.kernel_bytes if uses_cpu else 0
    piece = min(PIECE_BYTES, model.largest_trained)
    step_bytes = settings.step_tokens * BYTES_PER_TOKEN_OF_FORM[settings.form]
    buffers = min(prefetch_limit_bytes(step_bytes), 2 * step_bytes)
    state = SAVED_COPIES * model.trained + model.other_saved_bytes

    def phase(name: Phase, on_device: int, on_host: int, first: int = 0) -> PhaseMemory:
        if uses_cpu:
            return PhaseMemory(name, 0, process + on_device + on_host, first)
        device = int(on_device * (1 + GPU_SLACK_SHARE)) + gpu_overhead_bytes(
            machine, settings.num_process_groups
        )
        host = process + step.offloaded + trace.moved_bytes + on_host
        return PhaseMemory(name, device, host, first)

    phases = [phase(Phase.LOAD, step.loaded, 2 * min(PIECE_BYTES, model.largest_tensor))]
    if settings.has_reference:
        phases.append(phase(Phase.REFERENCE, step.evaluation + retained, 0))
    if settings.compile_threads is not None:
        workers = num_compile_workers(settings.compile_threads, machine.host_bytes_per_rank)
        on_host = buffers + workers * COMPILE_WORKER_BYTES
        compile_phase = phase(Phase.COMPILE, step.peak + leftover, on_host)
        phases.append(replace(compile_phase, spare_bytes=(workers - 1) * COMPILE_WORKER_BYTES))
    phases += [
        phase(Phase.FIRST_STEP, step.peak + leftover, buffers),
        phase(Phase.STEADY, step.peak + leftover, buffers),
        phase(Phase.EVALUATE, step.evaluation + retained, buffers),
    ]
    if settings.save == "gathered":
        phases.append(phase(Phase.SAVE_GATHERED, step.idle, buffers, state))
    else:
        idle = step.idle + retained + kernels
        phases.append(phase(Phase.SAVE_WAITING, idle, buffers + piece))
        if checkpoint.background:
            # The copies stay longest with a slow disk. The governor makes training wait instead.
            copy_bytes, first = _staging_bytes(state, machine, model, settings)
            on_host = buffers + piece + copy_bytes
            save_phase = phase(Phase.SAVE_IN_BACKGROUND, step.peak + leftover, on_host, first)
            phases.append(replace(save_phase, optional=settings.has_governor))
    merge = MERGE_PROCESS_BASE_BYTES + estimate_merge_bytes(model.largest_tensor)
    return [*phases, PhaseMemory(Phase.MERGE, 0, 0, merge)]


def _staging_bytes(
    state_bytes: int, machine: Machine, model: ModelBytes, settings: MemorySettings
) -> tuple[int, int]:
    """Return the bytes copied for a save: on each rank, and in addition on the first node.

    Each shard is written by the first rank that holds it, and all replicated values by one rank. A
    GPU's copies stay until the next save, so this phase takes no less than any that follows it.
    """
    parallel, staging_bytes = settings.parallel, settings.checkpoint.staging_bytes
    is_distributed = parallel.zero_stage is not None or (
        model.is_fully_trained and settings.is_sharded
    )
    num_writers = machine.world_size // (parallel.replicate or 1) if is_distributed else 1
    copy_bytes, on_gpu = state_bytes // max(1, num_writers), machine.device_bytes is not None
    if on_gpu:  # copied in whole blocks
        copy_bytes = -(-copy_bytes // PIECE_BYTES) * PIECE_BYTES
    if staging_bytes != "auto" or not on_gpu:
        copy_bytes = min(STAGING_BYTES if staging_bytes == "auto" else staging_bytes, copy_bytes)
    return (
        (copy_bytes, 0) if num_writers >= machine.ranks_per_node else (0, num_writers * copy_bytes)
    )


@dataclass(frozen=True)
class _StepBytes:
    """A rank's bytes on its device: after loading, between steps, and peaks of step and evaluation.

    ``offloaded``: what a rank with a GPU keeps on the host instead.
    """

    loaded: int
    idle: int
    peak: int
    evaluation: int
    offloaded: int = 0


def _step_bytes(
    trace: TraceReport, uses_cpu: bool, model: ModelBytes, settings: MemorySettings
) -> _StepBytes:
    parallel, is_sharded = settings.parallel, settings.is_sharded
    frozen_bytes = 0 if model.is_fully_trained else trace.weight_bytes
    # On CPUs, unsharded frozen weights are mapped pages of the files, if stored in the same form.
    mapped_bytes = int(frozen_bytes * model.mapped_share) if uses_cpu and not is_sharded else 0
    idle, loaded = trace.idle_bytes - mapped_bytes, trace.loaded_bytes - mapped_bytes
    peak = (trace.heap_peak_bytes if uses_cpu else trace.peak_bytes) - mapped_bytes
    evaluation = (
        trace.heap_evaluation_bytes if uses_cpu else trace.evaluation_bytes
    ) - mapped_bytes
    if parallel.zero_stage == 3:
        peak += model.largest_gathered_unit  # the next block is prefetched
    if not uses_cpu and parallel.offload_params == "cpu":
        # Shards stay on the host; gathered weights count as activations.
        gpu_bytes = trace.adapter_bytes * 4 if frozen_bytes else 0
        shard_bytes = idle - gpu_bytes
        host_bytes = shard_bytes + _extra_pinned_bytes(trace.shards, model.is_fully_trained)
        return _StepBytes(
            gpu_bytes, gpu_bytes, peak - shard_bytes, evaluation - shard_bytes, host_bytes
        )
    if not uses_cpu and parallel.offload_optimizer == "cpu":
        offloaded = trace.optimizer_bytes
        device_bytes = (idle - offloaded, peak - offloaded, evaluation - offloaded)
        return _StepBytes(
            loaded,
            *device_bytes,
            offloaded + _deepspeed_extra_pinned_bytes(trace, parallel.zero_stage),
        )
    return _StepBytes(loaded, idle, peak, evaluation)


def _deepspeed_extra_pinned_bytes(trace: TraceReport, stage: int | None) -> int:
    """Return the bytes of DeepSpeed's pinned memory beyond the offloaded optimizer state.

    Stages 1 and 2 pin this rank's fp32 copy of the weights and an additional gradient of the same
    size; stage 3 pins its gradients, which are counted already. Each is one flat block, rounded up
    to a power of two.
    """
    if stage == 3:
        return next_power_of_two(trace.gradient_bytes) - trace.gradient_bytes
    copy = trace.optimizer_bytes // SAVED_COPIES
    return 2 * next_power_of_two(copy) - copy


def _extra_pinned_bytes(shards: Mapping[int, int], is_fully_trained: bool) -> int:
    """Return the bytes that pinned blocks take beyond this rank's weight shards and gradients.

    ``shards``: how many weights have each size in bytes. Weights share blocks, but FSDP2 asks for a
    block for each gradient (``foreach_reduce`` copies them asynchronously). Moments are not pinned:
    they are updated on the host.
    """
    sizes = [size for size, num in shards.items() for _ in range(num)]
    padding_bytes = pinned_blocks_bytes(sizes) - sum(sizes)
    return padding_bytes + (
        sum(map(next_power_of_two, sizes)) - sum(sizes) if is_fully_trained else 0
    )


def adapt_to_deepspeed_zero(report: TraceReport, resolved: ResolvedLayout) -> TraceReport:
    """Derive the bytes of ZeRO, if used, from the native layout that was traced in its place.

    Stages 1 and 2 keep this rank's share of fp32 copies and moments next to the whole weights; the
    moments are allocated in the first step. Loading copies the weights into flat buffers. In a step
    there are gradients, all (stage 1) or this rank's share (stage 2), and two buckets of them.
    Stage 3 also has fp32 copies, keeps its buckets, and with an offloaded optimizer fp32 gradients.
    """
    stage, num_ranks = resolved.parallel.zero_stage, resolved.layout.size
    trained_bytes = report.gradient_bytes
    if stage is None:
        return report
    if stage == 3:
        added_bytes = 2 * min(BUCKET_VALUES * 4, trained_bytes * num_ranks)
        added_bytes += trained_bytes if resolved.parallel.offload_optimizer == "cpu" else 0
        return _add_bytes(
            report, added_bytes, trained_bytes + added_bytes, trained_bytes + added_bytes
        )
    idle = (
        report.idle_bytes
        - trained_bytes
        - report.optimizer_bytes
        + SAVED_COPIES * trained_bytes // num_ranks
    )
    step_bytes = trained_bytes if stage == 1 else trained_bytes // num_ranks
    step_bytes += 2 * min(BUCKET_VALUES * 4, trained_bytes)
    loaded = idle - SAVED_COPIES * trained_bytes // num_ranks + trained_bytes
    added_bytes = idle - report.idle_bytes
    adapted_report = _add_bytes(
        report, loaded - report.loaded_bytes, added_bytes, added_bytes + step_bytes
    )
    return replace(adapted_report, optimizer_bytes=SAVED_COPIES * trained_bytes // num_ranks)


def _add_bytes(
    report: TraceReport, added_loaded_bytes: int, added_idle_bytes: int, added_step_bytes: int
) -> TraceReport:
    """Return the report with bytes added: loaded, idle (as optimizer state), and in a step."""
    return replace(
        report,
        optimizer_bytes=report.optimizer_bytes + added_idle_bytes,
        loaded_bytes=report.loaded_bytes + added_loaded_bytes,
        idle_bytes=report.idle_bytes + added_idle_bytes,
        evaluation_bytes=report.evaluation_bytes + added_idle_bytes,
        heap_evaluation_bytes=report.heap_evaluation_bytes + added_idle_bytes,
        peak_bytes=report.peak_bytes + added_step_bytes,
        heap_peak_bytes=report.heap_peak_bytes + added_step_bytes,
    )


# -- How many tokens a micro-batch may have, by the memory that a plan leaves free.


def steady_phase(phases: Sequence[PhaseMemory]) -> PhaseMemory:
    """Return the phase of steady training steps."""
    return next(phase for phase in phases if phase.name == Phase.STEADY)


def spare_bytes(phases: Sequence[PhaseMemory], machine: Machine) -> int:
    """Return the bytes that a rank's peak may grow by; negative if it must shrink."""
    steady = steady_phase(phases)
    if machine.device_bytes is not None:
        return int(
            (DEVICE_LIMITS.target_share * machine.device_bytes - steady.device_bytes)
            / (1 + GPU_SLACK_SHARE)
        )
    return _spare_host_bytes(steady, machine)


def limit_tokens_by_host(
    max_tokens: int, phases: Sequence[PhaseMemory], machine: Machine, moved_bytes: int, tokens: int
) -> tuple[int, Literal["", "GPU", "node"]]:
    """Limit ``max_tokens`` to those whose offloaded block inputs fit a node; name what limits.

    ``moved_bytes``: offloaded bytes of ``tokens`` on each rank. If 0, no limit is named.
    """
    if not moved_bytes:
        return max_tokens, ""
    steady = steady_phase(phases)
    on_host = max(0, tokens + tokens * _spare_host_bytes(steady, machine) // moved_bytes)
    return (on_host, "node") if on_host < max_tokens else (max_tokens, "GPU")


def tokens_that_fit(
    spare_bytes_at: Callable[[int, int, int], int], free_bytes: int, rows: int, seq_len: int
) -> int:
    """Return about how many tokens a micro-batch may have.

    ``free_bytes``: bytes left free (negative: missing) by ``rows`` rows of ``seq_len`` tokens.
    ``spare_bytes_at(rows, length, loader_row_len)`` traces another micro-batch, while rows of
    ``loader_row_len`` tokens wait in the loader. Masks grow with the square of the length, so one
    more row takes at most twice what the second half of a row takes.
    """
    if free_bytes >= 0:
        half_len = max(1, seq_len // 2)
        second_half_bytes = spare_bytes_at(rows, half_len, seq_len) - free_bytes
        per_token = second_half_bytes / max(1, rows * (seq_len - half_len))
        return rows * seq_len + int(free_bytes / per_token if per_token > 0 else 0)
    left_at_one_row = spare_bytes_at(1, seq_len, seq_len) if rows > 1 else free_bytes
    if left_at_one_row >= 0:
        return seq_len * (1 + left_at_one_row * (rows - 1) // (left_at_one_row - free_bytes))
    return _find_longest_row_len(
        lambda length: spare_bytes_at(1, length, length), {seq_len: left_at_one_row}
    )


def _find_longest_row_len(
    spare_bytes_at: Callable[[int], int], spare_bytes_by_len: dict[int, int]
) -> int:
    """Return a length that fits, while 1.1 times that length does not.

    If more tokens always take more memory, 1.05 times the length does not fit either.
    ``spare_bytes_by_len``: one length and the bytes that it leaves, which are negative. Returns 0
    if not even a 64th of that length fits: then it is not the tokens that need so much. Long rows
    take long to trace, so the search interpolates linearly, and bisects when this approaches from
    one side only. The heap's size is partly chance: beyond a length that does not fit, a longer one
    may.
    """
    maximum = longer = max(spare_bytes_by_len)
    shorter = longer // 64
    if shorter == 0 or spare_bytes_at(shorter) < 0:
        return 0
    spare_bytes_by_len[shorter] = spare_bytes_at(shorter)
    fit: list[bool] = []
    while longer > max(1.05 * shorter, shorter + 1):
        share = spare_bytes_by_len[shorter] / (
            spare_bytes_by_len[shorter] - spare_bytes_by_len[longer]
        )
        estimate = (shorter + share * (longer - shorter)) * (0.98 if fit[-1:] == [False] else 1.02)
        if fit[-2:] in ([True, True], [False, False]):
            estimate, fit = math.sqrt(shorter * longer), []
        length = min(max(int(estimate), shorter + 1), longer - 1)
        spare_bytes_by_len[length] = spare_bytes_at(length)
        fit.append(spare_bytes_by_len[length] >= 0)
        shorter, longer = (length, longer) if fit[-1] else (shorter, length)
    while longer < (candidate := shorter * 11 // 10) < maximum and spare_bytes_at(candidate) >= 0:
        shorter = candidate
    return shorter


def _spare_host_bytes(steady: PhaseMemory, machine: Machine) -> int:
    free_bytes = int(HOST_LIMITS.target_share * machine.host_bytes) - steady.node_bytes(machine)
    return free_bytes // machine.ranks_per_node
