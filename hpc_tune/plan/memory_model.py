"""Device and host bytes of a run by phase, before anything is started: sums of what is known.

    shapes, traced step, settings -> load, compile, first step, steady, evaluate, save, merge

What a rank computes with is on its device: a GPU, or on CPUs the host itself. The rest of host
memory is the process with its libraries and what streams through it. Page cache is left out: the
kernel gives it back before it kills.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hpc_tune.checkpoint.export import merge_bytes
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.loader import BYTES_PER_TOKEN, PREFETCH_BYTES
from hpc_tune.engine.compile import WORKER_BYTES, num_workers
from hpc_tune.engine.mesh import Layout
from hpc_tune.model.weights import PIECE_BYTES
from hpc_tune.plan.model_size import ModelSize, activation_bound, static_bytes
from hpc_tune.plan.trace import TraceReport

MIB = 1 << 20
# Anonymous + shared bytes of a rank when torch, transformers and peft are imported and gloo is
# connected, without a model, and of a process that merges (torch 2.13, Python 3.11).
PROCESS_BYTES, MERGING_PROCESS_BYTES = 226 * MIB, 153 * MIB
# What a first step leaves on CPUs when all it computed with is given back: the libraries' own
# buffers, and pages of the heap that single small blocks keep; 35 to 64 MiB for adapters.
STEPPED_BYTES = 48 * MIB
# Python's objects for a model's modules and parameters, adapters included (Llama shapes).
LAYER_BYTES, MODEL_BYTES = 900 * 1024, 20 * MIB
DEEPSPEED_BYTES = 45 * MIB
# What a rank with a GPU has besides; not measured, on the safe side.
GPU_PROCESS_BYTES = 1536 * MIB
GPU_CONTEXT_BYTES = 1536 * MIB  # on the device: context, NCCL's buffers, the libraries' workspaces
GPU_SLACK = 0.03  # of the traced peak: the allocator rounds up and leaves fragments
SURE_SHARE = 0.5  # of what a rank has: a bound below that needs no plan
STATES_SAVED = 3  # of each trained value: itself and two moments
Save = Literal["streamed", "gathered"]


@dataclass(frozen=True)
class Machine:
    """What the run is planned for. ``device_bytes`` of each rank's GPU; None: ranks on CPUs."""

    nodes: int
    ranks_per_node: int
    device_bytes: int | None
    host_bytes: int
    cores_per_rank: int = 8

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Phase:
    """The peak of one phase: bytes of the rank that needs most, on its device and on the host.

    ``first_bytes`` is what the first rank of the first node has on the host besides. A run does
    without an ``optional`` phase where there is no room for it.
    """

    name: str
    device_bytes: int
    rank_bytes: int
    first_bytes: int = 0
    optional: bool = False

    def node_bytes(self, machine: Machine) -> int:
        """Return the host bytes of the fullest node."""
        return machine.ranks_per_node * self.rank_bytes + self.first_bytes


def most_bytes(size: ModelSize, layout: Layout, model: Any, tokens: int, on_device: bool) -> int:
    """Return more than the steps of a rank take, by arithmetic; see ``activation_bound``."""
    process = 0 if on_device else PROCESS_BYTES
    return static_bytes(size, layout) + activation_bound(model, tokens) + process


def ledger(
    config: RunConfig,
    trace: TraceReport,
    machine: Machine,
    num_trained_bytes: int,
    largest_tensor_bytes: int,
    largest_unit_bytes: int,
    save: Save = "streamed",
    is_stored_so: bool = True,
) -> list[Phase]:
    """Return the phases in the order in which a run goes through them.

    ``config`` has its layout decided; ``trace`` is of the rank that needs most.
    ``num_trained_bytes`` are those of all trained values in all ranks' shards together;
    ``save="gathered"`` tells what a tool would need that brings them and their optimizer state
    together on one rank. ``largest_unit_bytes`` is the most that shards are gathered to at once, a
    block or the embedding. ``is_stored_so``: the files have the dtype that is computed with.
    """
    on_cpu = machine.device_bytes is None
    process = PROCESS_BYTES + MODEL_BYTES + LAYER_BYTES * trace.num_layers
    process += 0 if on_cpu else GPU_PROCESS_BYTES
    process += 0 if config.parallel.zero_stage is None else DEEPSPEED_BYTES
    frozen = 0 if config.tune.method == "full" else trace.weight_bytes
    parallel = config.parallel
    sharded = (parallel.shard or 1) > 1 or parallel.zero_stage == 3
    sharded = sharded or parallel.offload_params != "none"
    # Whole frozen weights on CPUs are pages of the files, if those have their dtype.
    mapped = frozen if on_cpu and is_stored_so and not sharded else 0
    static, loaded = trace.idle_bytes - mapped, trace.loaded_bytes - mapped
    peak = (trace.heap_peak_bytes if on_cpu else trace.peak_bytes) - mapped
    evaluation = (trace.heap_evaluation_bytes if on_cpu else trace.evaluation_bytes) - mapped
    if parallel.zero_stage == 3:
        peak += largest_unit_bytes  # the next block is gathered ahead
    if on_cpu and sharded:
        # gloo makes a copy of what it gathers.
        peak, evaluation = peak + largest_unit_bytes, evaluation + largest_unit_bytes
    offloaded = 0
    if not on_cpu and parallel.offload_params == "cpu":
        # Sharded values wait on the host, in pinned blocks; gathered ones are activations.
        kept = trace.adapter_bytes * 4 if frozen else 0
        waiting = static - kept
        offloaded = pinned_bytes(waiting, 2 * trace.num_layers)
        static, loaded = kept, kept
        peak, evaluation = peak - waiting, evaluation - waiting
    elif not on_cpu and parallel.offload_optimizer == "cpu":
        offloaded = trace.optimizer_bytes
        static, peak, evaluation = static - offloaded, peak - offloaded, evaluation - offloaded
    left = STEPPED_BYTES if on_cpu else 0
    rows = -(-config.batch.global_size // machine.world_size)
    buffers = min(PREFETCH_BYTES, 2 * rows * config.data.seq_len * BYTES_PER_TOKEN)
    state = STATES_SAVED * num_trained_bytes
    share = state // machine.world_size
    in_background = config.checkpoint.background and save == "streamed"
    staging = min(config.checkpoint.staging_bytes, share) if in_background else 0

    def phase(name: str, on_device: int, on_host: int, first: int = 0) -> Phase:
        if on_cpu:
            return Phase(name, 0, process + on_device + on_host, first)
        device = int(on_device * (1 + GPU_SLACK)) + GPU_CONTEXT_BYTES
        return Phase(name, device, process + offloaded + on_host, first)

    phases = [phase("load", loaded, 2 * PIECE_BYTES)]
    if config.train.compile:
        per_rank = machine.host_bytes // machine.ranks_per_node
        threads = config.run.threads
        threads = machine.cores_per_rank if threads == "auto" else threads
        workers = num_workers(threads, per_rank)
        phases.append(phase("compile", peak, buffers + workers * WORKER_BYTES))
    phases += [
        phase("first step", peak, buffers),
        phase("steady", peak, buffers),
        phase("evaluate", evaluation + left, buffers),
    ]
    if save == "gathered":
        phases.append(phase("save", static, buffers, state))
    else:
        phases.append(phase("save, training waits", static + left, buffers + PIECE_BYTES))
        if in_background:
            # With a slow disk. The governor lets training wait instead.
            copied = phase("save, in the background", peak, buffers + PIECE_BYTES + staging)
            phases.append(replace(copied, optional=config.memory.governor == "on"))
    merge = MERGING_PROCESS_BYTES + merge_bytes(largest_tensor_bytes)
    return [*phases, Phase("merge, in one process", 0, 0, merge)]


def pinned_bytes(num_bytes: int, num_blocks: int) -> int:
    """Return what ``num_blocks`` equal pinned blocks take: each is rounded up to a power of two."""
    block = -(-num_bytes // max(1, num_blocks))
    return 0 if num_bytes <= 0 else num_blocks * (1 << (block - 1).bit_length())
