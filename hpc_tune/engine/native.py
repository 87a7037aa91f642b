"""The PyTorch engine: replicate x shard x tensor x pipeline as one mesh.

    meta model -> stages -> slices -> (recompute, FSDP2) -> allocate -> read own regions -> train

Trained weights are of two kinds. *Replicated* ones (adapters in every layout, all weights if
nothing is sharded) have their gradients in flat buffers. Each buffer is all-reduced once per
optimizer step, overlapped with the last backward pass if that sends no other messages; a frozen
base sends no gradients. *Sharded* ones (full fine-tuning with shard > 1) belong to FSDP2, whose
reduce-scatter runs in each backward pass, or only in the last with reshard=step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn

from hpc_tune.batch import Batch, padding_batch
from hpc_tune.engine.activation_checkpoint import (
    OffloadedInputs,
    checkpoint_blocks,
    make_recompute_actions,
)
from hpc_tune.engine.adamw import OffloadedAdamW, set_lr
from hpc_tune.engine.adamw_8bit import (
    QuantizedMoment,
    fill_moment,
    make_optimizer,
    moment_regions,
    require_single_slices,
    require_torchao,
)
from hpc_tune.engine.base import (
    EngineSettings,
    StepResult,
    autocast,
    prepare_heap_and_dropout,
    seed_micro_batch,
)
from hpc_tune.engine.compile import compile_blocks, compile_loss
from hpc_tune.engine.context_parallel import parallelize_attention, shard_batches, share_rows
from hpc_tune.engine.counted_collectives import CountedCollectives, time_fsdp_waits
from hpc_tune.engine.expert_parallel import add_token_dispatch, distribute_experts
from hpc_tune.engine.fsdp import prepare_backward, release_gathered_weights, shard
from hpc_tune.engine.gradients import (
    Bucket,
    OverlappedAllReduce,
    TrainedWeight,
    list_trained_weights,
    make_buckets,
    sum_squares,
)
from hpc_tune.engine.mesh import Mesh, send_large_messages
from hpc_tune.engine.pipeline_parallel import Pipeline, connect_stages, split_into_stages
from hpc_tune.engine.row_pieces import PiecewiseMlps
from hpc_tune.engine.tensor_parallel import TensorAxis, slice_model
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.balance import RouterWatch
from hpc_tune.model.build import BuiltModel, LocalRegion
from hpc_tune.model.float8 import check_float8, convert_to_torchao_float8
from hpc_tune.model.layers import find_blocks, find_unquantized_layers, use_faster_layers
from hpc_tune.model.load import allocate, init_sharded_magnitudes, load_weights
from hpc_tune.model.lora_linear import AdapterCopies
from hpc_tune.model.objective import Objective
from hpc_tune.model.regions import Region
from hpc_tune.model.weights import TensorIndex
from hpc_tune.step.size import MOMENT_NAMES

# -- Micro-batches on the device, each copied on its own stream while the previous one is computed.
#
# begin, take: pinned memory -> (the copy stream) -> int64 on the device, and an event
# take:        the compute stream waits for the event; the host waits for nothing


class BatchCopies:
    """Copies the micro-batches of one rank, one ahead of their use; on a CPU they stay as they are.

    A micro-batch that is used again, as by another stage of this rank, is copied again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: Iterator[Batch] = iter(())
        self._next_copy: tuple[Batch, Batch, Any] | None = None

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin to copy ``batches``, which will be used in this order."""
        self._waiting = iter(batches)
        self._copy_next()

    def take(self, batch: Batch) -> Batch:
        """Return ``batch`` on the device, for the compute stream."""
        if self._next_copy is None or self._next_copy[0] is not batch:
            return batch.to(self._device)
        _, copy, is_there = self._next_copy
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)
        for tensor in copy.all_tensors:
            tensor.record_stream(stream)  # else its memory could be reused while it is read
        self._copy_next()
        return copy

    def _copy_next(self) -> None:
        self._next_copy = None
        if self._stream is None or (batch := next(self._waiting, None)) is None:
            return
        with torch.cuda.stream(self._stream):
            self._next_copy = batch, batch.to(self._device), self._stream.record_event()


# -- The engine.


class NativeEngine:
    """One model spread over the ranks of the default process group. See ``base.Engine``."""

    saves_in_background = True

    def __init__(
        self,
        built: BuiltModel,
        settings: EngineSettings,
        mesh: Mesh | None = None,
        collectives: CountedCollectives | None = None,
    ) -> None:
        """Lay out, allocate and load ``built``; ``stages`` are this rank's parts. Collective.

        Raises:
            ConfigError: if the settings do not suit the model or the device.
            DataError: if the weights on disk are damaged or of another model.
            RemoteError: on all other ranks, if one fails.
        """
        plan, layout, device = settings.plan, settings.layout, settings.device
        self._plan, self._layout, self._device, self._settings = plan, layout, device, settings
        self._seed, self._autocast = built.seed, built.dtype if plan.casts_weights else None
        self._mesh = mesh or Mesh(layout, device, plan.uses_fsdp)
        trains_tied = built.tune.method == "full" and built.tied_name is not None
        self._tied_group = self._mesh.first_last_stage_group() if trains_tied else None
        edges = {}
        if layout.pipeline > 1:
            edges = connect_stages(layout, plan.parallel.stages_per_rank > 1, device)
        if device.type == "cuda":
            send_large_messages(self._mesh, edges, device)
        self._collectives = collectives or CountedCollectives(device)
        context_group = self._mesh.group("context")
        self._shared_rows = share_rows(context_group, self._collectives, settings, built.dtype)
        self._copies = BatchCopies(device)
        self._step_sums, self._step_terms = torch.zeros(2, dtype=torch.float64), 1.0
        adds_counts = self._mesh.coordinates.tensor == 0
        self._router_watch = RouterWatch(built.routers, built.router_score, built.tune, adds_counts)
        self._adapters, self.inputs = AdapterCopies(), OffloadedInputs(settings)
        self.stages, self._trained_weights, self._buckets, self._adamw = settings.run_and_agree(
            "loading the model",
            lambda: _load_stages_and_optimizer(
                built, settings, self._mesh, self._collectives, self._adapters, self.inputs
            ),
        )
        for stage in self.stages:
            init_sharded_magnitudes(stage)
            parallelize_attention(stage.module, self._shared_rows)
        modules = [stage.module for stage in self.stages]
        self._router_watch.hook_routers(modules, device)
        blocks = [block for module in modules for block in find_blocks(module)]
        self.pieces = PiecewiseMlps(blocks, settings)
        self.memory_actions = self._make_memory_actions(blocks)
        self._sharded_weights = [t for t in self._trained_weights if t.is_sharded]
        self.can_repeat_steps = plan.has_only_replicas
        self._overlapped_all_reduces = [
            OverlappedAllReduce(bucket, bucket.group, self._collectives)
            for bucket in self._buckets
            if plan.has_only_replicas and bucket.group is not None
        ]
        self._offloaded_adamw: OffloadedAdamW | None = None
        self._pipeline = None
        if layout.pipeline > 1:
            wire_dtype = torch.float32 if plan.activation_itemsize == 4 else built.dtype
            pipeline_args = built.config.hidden_size, wire_dtype, self._collectives
            self._pipeline = Pipeline(modules, layout, edges, device, *pipeline_args)

    def accumulate(
        self, batches: Sequence[Batch], global_terms: float, global_tokens: float = 1.0
    ) -> torch.OutOfMemoryError | None:
        """Compute the gradients of a step; see ``base.Engine``."""
        self._zero_grad()
        self._adapters.refresh()
        self._router_watch.begin(1 / global_tokens)
        sums, ran_out = self._make_zero_sums(), None
        try:
            sums = self._forward_backward(batches, global_terms, self._overlapped_all_reduces)
        except torch.OutOfMemoryError as error:
            if not self.can_repeat_steps:
                raise
            ran_out = error.with_traceback(None)  # its frames would keep the pass's tensors
            self._adapters.forget_results()
            self.inputs.wait_for_copies()
        # Other ranks wait for these messages.
        self._reduce_gradients()
        sums = torch.cat([sums, self._router_watch.sums])
        self._collectives.all_reduce(sums, None)
        if ran_out is None:
            self._step_sums = torch.cat([sums.double(), self._clip_gradients().reshape(1)])
            self._step_terms = global_terms
        return ran_out

    def update(self, lr: float) -> StepResult:
        """Update the weights; see ``base.Engine``."""
        set_lr(self._adamw, lr)
        (self._offloaded_adamw or self._adamw).step()
        self._adapters.mark_changed()
        *sums, norm = self._step_sums.tolist()  # the host waits once
        sent_bytes, comm_s = self._collectives.pop_totals()
        sums, router_sums = sums[: self._plan.num_sums], sums[self._plan.num_sums :]
        routers = self._router_watch.interpret_sums(router_sums)
        return StepResult(sums[0] / self._step_terms, norm, comm_s, sent_bytes, sums, routers)

    @torch.no_grad()
    def objective_sums(
        self,
        batches: Iterable[Batch],
        objective: Objective | None = None,
        is_within_step: bool = False,
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield micro-batches with the sums of an objective; see ``base.Engine``."""
        with nullcontext() if is_within_step else self._collectives.counting_paused():
            yield from self._objective_sums(batches, objective)

    def _objective_sums(
        self, batches: Iterable[Batch], objective: Objective | None
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        modules = [stage.module for stage in self.stages]
        training_objective = modules[-1].objective
        self._adapters.refresh()
        for module in modules:
            module.eval()
            module.objective = objective or training_objective
        try:
            remaining = iter(batches)
            while group := list(islice(remaining, 2 * self._layout.pipeline)):
                whole_batches = self._batches_to_run(group, training=False)
                local_batches = shard_batches(whole_batches, self._shared_rows)
                self._copies.begin(local_batches)
                if self._pipeline is not None:
                    objective_sums = self._pipeline.evaluate(local_batches, self._forward)
                else:
                    objective_sums = [self._forward(0, batch, None) for batch in local_batches]
                if self._shared_rows is not None:
                    objective_sums = [self._shared_rows.sum_over_ranks(s) for s in objective_sums]
                coordinates = self._mesh.coordinates
                if objective_sums and coordinates.tensor == coordinates.context == 0:
                    yield from zip(whole_batches, objective_sums, strict=True)
        finally:
            for module in modules:
                release_gathered_weights(module)
                module.train()
                module.objective = training_objective

    def regions(self) -> list[Region]:
        """Return what this rank holds and no lower rank does; see ``base.Engine``."""
        regions: list[Region] = []
        for weight in (t for t in self._trained_weights if t.writes_checkpoint):
            for name, number, region in self._saved_regions(weight):
                if (local := region.values).numel():
                    region_args = name, local.dtype, region.box, region.full_shape
                    key = f"{name}#{number}" if number else ""
                    regions.append(Region(*region_args, local.contiguous, key))
            for name, moment, moment_region in self._quantized_moments(weight):
                regions += moment_regions(name, moment, moment_region)
        return regions

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """Yield the moments of what this rank trains; if in 8 bits, their codes and scales."""
        for state in self._adamw.state.values():
            for moment in (state[name] for name in MOMENT_NAMES):
                yield from moment.tensors if isinstance(moment, QuantizedMoment) else (moment,)

    def load(self, index: TensorIndex, step: int) -> None:
        """Load a checkpoint; see ``base.Engine``.

        Raises:
            CheckpointError: if a tensor is missing or cannot be read, or lacks values that this
                rank needs.
        """
        for weight in self._trained_weights:
            for name, _, region in self._saved_regions(weight):
                index.require([name])
                if region.values.numel():
                    index.fill(region.values, name, region.offset, self._settings.reserve)
            for name, moment, moment_region in self._quantized_moments(weight):
                index.require([name])
                fill_moment(moment, moment_region, index, name, self._settings.reserve)
        self._adapters.mark_changed()
        for state in self._adamw.state.values():
            state["step"].fill_(float(step))

    def run_and_discard(self, batch: Batch) -> None:
        """Run a micro-batch and discard its gradients; see ``base.Engine``."""
        # A single row would get its own graph, and the compiler's memory would count as the row's.
        compiles = self._settings.train.compiles
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        self._adapters.refresh()
        with eager, self._collectives.counting_paused():
            # The first stage of a pipeline keeps the activations of several micro-batches.
            stages = self._plan.layout.pipeline
            self._forward_backward([batch] * (2 * stages if stages > 1 else 1), 1)
        self._zero_grad()

    def _make_memory_actions(self, blocks: Sequence[nn.Module]) -> dict[Action, ActionHandle]:
        settings, parallel = self._settings, self._settings.parallel
        memory_actions = make_recompute_actions(
            blocks, parallel.recompute, self.inputs.saving_context
        )
        memory_actions |= self.pieces.memory_actions() | self.inputs.memory_actions()
        has_device = self._device.type == "cuda" or settings.faults.offloads_without_gpu
        moves = parallel.offload_params != "cpu" and not settings.optim.is_8bit
        if has_device and moves:
            memory_actions[Action.MOVE_OPTIMIZER] = ActionHandle(self._move_optimizer)
        return memory_actions

    def _move_optimizer(self, times: int) -> str:
        if self._offloaded_adamw is not None:
            self._offloaded_adamw.close()
        assert isinstance(self._adamw, torch.optim.AdamW), "moments in 8 bits stay on the device"
        self._offloaded_adamw = OffloadedAdamW(self._adamw) if times else None
        return f"optimizer state is on the {'host' if times else 'device'}"

    def _forward_backward(
        self,
        batches: Sequence[Batch],
        global_terms: float,
        overlapped: Sequence[OverlappedAllReduce] = (),
    ) -> torch.Tensor:
        """Run all micro-batches; return what this rank adds to the objective's sums."""
        total = self._make_zero_sums()
        local_batches = shard_batches(self._batches_to_run(batches), self._shared_rows)
        self._copies.begin(local_batches)

        def backward(
            chunk: int, is_last: bool, out: torch.Tensor, grad_BTD: torch.Tensor | None
        ) -> None:
            nonlocal total
            keeps_weights_gathered = self._settings.parallel.reshard == "step"
            prepare_backward(self.stages[chunk].module, is_last, keeps_weights_gathered)
            if grad_BTD is not None:
                out.backward(grad_BTD.to(out.dtype))
                return
            (out[0] / global_terms).backward()
            if self._mesh.coordinates.tensor == 0:
                total += out.detach()

        if self._pipeline is not None:
            self._pipeline.train(local_batches, self._forward, backward)
            return total
        for batch in local_batches:
            out = self._forward(0, batch, None)
            if batch is local_batches[-1]:
                for all_reduce in overlapped:
                    all_reduce.begin()
            backward(0, batch is local_batches[-1], out, None)
        return total

    def _forward(self, chunk: int, batch: Batch, hidden_BTD: torch.Tensor | None) -> torch.Tensor:
        self._settings.faults.compute(batch.tokens_BT.shape[0])
        stage = chunk * self._layout.pipeline + self._mesh.coordinates.pipeline
        seed_micro_batch(self._seed, batch.first_row, stage)
        with autocast(self._device, self._autocast):
            out: torch.Tensor = self.stages[chunk].module(self._copies.take(batch), hidden_BTD)
        return out

    def _make_zero_sums(self) -> torch.Tensor:
        return torch.zeros(self._plan.num_sums, dtype=torch.float32, device=self._device)

    def _batches_to_run(self, batches: Sequence[Batch], training: bool = True) -> list[Batch]:
        real_micros = [
            b for b in batches if b.num_loss_tokens or not self._plan.skips_empty_micros(training)
        ]
        first_row = batches[0].first_row if batches else 0
        return real_micros + [
            padding_batch(first_row) for _ in range(self._plan.num_padding_micros(len(real_micros)))
        ]

    def _reduce_gradients(self) -> None:
        for all_reduce in self._overlapped_all_reduces:
            all_reduce.finish()
        for bucket in self._buckets:
            if bucket.group is not None and not self._overlapped_all_reduces:
                self._collectives.all_reduce(bucket.grads, bucket.group)
        for weight in self._sharded_weights:
            if weight.has_partial_grad:
                self._collectives.all_reduce(weight.local_grad, self._mesh.tensor)
        if self._tied_group is not None:
            tied_weight = next(
                t for t in self._trained_weights if t.saved_name == t.stage.tied_name
            )
            self._collectives.all_reduce(tied_weight.local_grad, self._tied_group)

    def _saved_regions(self, weight: TrainedWeight) -> Iterator[tuple[str, int, LocalRegion]]:
        """Yield each region of a weight and its moments: name in checkpoints, number, region."""
        state = self._adamw.state[weight.parameter]
        parameter = weight.parameter
        named_tensors = [("", parameter), *((f"{part}.", state[part]) for part in MOMENT_NAMES)]
        for prefix, tensor in named_tensors:
            if not isinstance(tensor, QuantizedMoment):
                regions = weight.stage.regions(weight.name, parameter, tensor)
                for number, region in enumerate(regions):
                    yield f"{prefix}{weight.saved_name}", number, region

    def _quantized_moments(
        self, weight: TrainedWeight
    ) -> Iterator[tuple[str, QuantizedMoment, LocalRegion]]:
        """Yield each moment in 8 bits: its name in checkpoints, itself, this rank's region of it.

        There is a single region: see ``require_single_slices``.
        """
        for part in MOMENT_NAMES:
            moment = self._adamw.state[weight.parameter][part]
            if isinstance(moment, QuantizedMoment):
                [region] = weight.stage.regions(weight.name, weight.parameter)
                yield f"{part}.{weight.saved_name}", moment, region

    def _zero_grad(self) -> None:
        for bucket in self._buckets:
            bucket.grads.zero_()
        for weight in self._sharded_weights:
            weight.parameter.grad = None

    def _clip_gradients(self) -> torch.Tensor:
        """Scale all gradients down to clip_norm; return the global norm before that."""
        is_distributed = self._plan.shards_gradients
        squares = sum_squares(self._buckets, self._sharded_weights, self._device, is_distributed)
        if is_distributed:
            self._collectives.all_reduce(squares, None)
        norm = squares.sqrt()
        if clip_norm := self._settings.optim.clip_norm:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
            for bucket in self._buckets:
                bucket.grads.mul_(scale)
            grads = [t.local_grad for t in self._sharded_weights if t.parameter.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale.to(grads[0].device))
        return norm


def _load_stages_and_optimizer(
    built: BuiltModel,
    settings: EngineSettings,
    mesh: Mesh,
    collectives: CountedCollectives,
    adapters: AdapterCopies,
    inputs: OffloadedInputs,
) -> tuple[list[BuiltModel], list[TrainedWeight], list[Bucket], torch.optim.Optimizer]:
    """Read and allocate what this rank holds. Sends no messages: a rank may fail by itself."""
    if settings.optim.is_8bit:
        require_torchao()
    stages, weights = _load_stages(built, settings, mesh, collectives, adapters, inputs)
    buckets = make_buckets(weights, settings.plan, mesh, settings.device, settings.reserve)
    named_params = [(t.name, t.parameter) for t in weights]
    return stages, weights, buckets, make_optimizer(named_params, settings.optim, settings.reserve)


def _load_stages(
    built: BuiltModel,
    settings: EngineSettings,
    mesh: Mesh,
    collectives: CountedCollectives,
    adapters: AdapterCopies,
    inputs: OffloadedInputs,
) -> tuple[list[BuiltModel], list[TrainedWeight]]:
    """Return this rank's pipeline stages with their weights, and the trained weights of all."""
    layout = settings.layout
    prepare_heap_and_dropout(built, settings.train, layout.shard > 1)
    meta_stages = [built]
    if layout.pipeline > 1:
        meta_stages = split_into_stages(built, settings.plan, mesh.coordinates.pipeline)
    stages, weights = [], []
    for meta_stage in meta_stages:
        stage, partial = _load_stage(meta_stage, settings, mesh, collectives, adapters, inputs)
        stages.append(stage)
        weights += list_trained_weights(stage, mesh, partial)
    return stages, weights


def _load_stage(
    stage: BuiltModel,
    settings: EngineSettings,
    mesh: Mesh,
    collectives: CountedCollectives,
    adapters: AdapterCopies,
    inputs: OffloadedInputs,
) -> tuple[BuiltModel, frozenset[str]]:
    """Slice, wrap, shard, allocate and load a stage, in this order.

    Returns the stage, and the names of the trained parameters whose gradients are partial sums.
    """
    device, parallel, train = settings.device, settings.parallel, settings.train
    blocks = list(find_blocks(stage.module))
    partial: frozenset[str] = frozenset()
    if mesh.tensor is not None:
        stage, partial = slice_model(stage, TensorAxis(mesh.tensor, collectives))
    if (experts_group := mesh.group("expert")) is not None:
        stage = distribute_experts(stage, experts_group.rank(), experts_group.size())
    if settings.optim.is_8bit:
        require_single_slices(stage)
    if train.float8:
        check_float8(device)
        convert_to_torchao_float8(
            blocks, find_unquantized_layers(stage.module.causal_lm(), find_blocks(stage.module))
        )
    # A recomputed graph may not keep results between calls.
    shares = not train.compiles or parallel.recompute == "none"
    use_faster_layers(stage.module, blocks, train.compiles, stage.dtype, device, adapters, shares)
    if experts_group is not None:
        add_token_dispatch(stage.module, experts_group, collectives)
    checkpoint_blocks(blocks, parallel.recompute, inputs.saving_context)
    inputs.reset_at_each_pass(stage.module)
    if train.compiles:
        compile_blocks(blocks)
        compile_loss(stage.module)
    if settings.plan.uses_fsdp:
        shard(stage, blocks, mesh, settings.plan, device, collectives)
        time_fsdp_waits(stage.module, collectives)
    offloads = parallel.offload_params == "cpu"
    allocate(stage.module, device, offloads, settings.reserve)
    load_weights(stage, settings.reserve)
    return stage, partial
