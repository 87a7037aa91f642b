"""The DeepSpeed engine: ZeRO 1, 2 and 3, with weights and optimizer state on CPU or NVMe.

    stage 1, 2   meta model -> allocate -> load_weights -> DeepSpeed shards gradients and optimizer
    stage 3      meta model -> each parameter becomes this rank's partition, filled from the
                 rank's own region of the files -> DeepSpeed gathers weights as they are used

DeepSpeed runs on the process group that already exists. Its arithmetic is made equal to that of
``NativeEngine``: DeepSpeed averages gradients over the ranks, so the loss is multiplied by their
number first.
"""

import functools
import importlib
import logging
import os
import shutil
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from hpc_tune.batch import Batch
from hpc_tune.engine.activation_checkpoint import (
    OffloadedInputs,
    checkpoint_blocks,
    make_recompute_actions,
)
from hpc_tune.engine.adamw import make_stateless_adamw, parameter_groups, set_lr
from hpc_tune.engine.base import (
    EngineSettings,
    StepResult,
    autocast,
    prepare_heap_and_dropout,
    seed_micro_batch,
)
from hpc_tune.engine.compile import compile_blocks, compile_loss
from hpc_tune.engine.context_parallel import (
    make_context_group,
    parallelize_attention,
    shard_batches,
    share_rows,
)
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.row_pieces import PiecewiseMlps
from hpc_tune.engine.zero import settings as zero_settings
from hpc_tune.engine.zero import state as zero_state
from hpc_tune.engine.zero.settings import load_async_io
from hpc_tune.errors import ConfigError
from hpc_tune.model.balance import RouterWatch
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.experts import find_stacked_experts
from hpc_tune.model.grouped_experts import can_group_experts
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.loss import HeadUnit, LossModel
from hpc_tune.model.objective import Objective
from hpc_tune.model.packed_attention import find_indexers
from hpc_tune.model.regions import Region
from hpc_tune.model.weights import TensorIndex
from hpc_tune.step.layout import CollectiveKind, sent_bytes
from hpc_tune.step.size import MOMENT_NAMES, SAVED_COPIES

# -- DeepSpeed's collectives, counted like the native engine's.


_COLLECTIVE_KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


class CountedBackend:
    """The backend of ``deepspeed.comm``, with its collectives counted."""

    def __init__(self, backend: Any, collectives: CountedCollectives) -> None:
        self._backend, self._collectives = backend, collectives

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)
        if name not in _COLLECTIVE_KINDS:
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._collectives.counted(
                _COLLECTIVE_KINDS[name], _ring_sent_bytes(_COLLECTIVE_KINDS[name], (args, kwargs))
            ):
                work = call(*args, **kwargs)
            return work if work is None else _CountedWork(work, self._collectives)

        return counted


class _CountedWork:
    """A collective in flight; waiting for it counts as communication too."""

    def __init__(self, work: Any, collectives: CountedCollectives) -> None:
        self._work, self._collectives = work, collectives

    def wait(self) -> None:
        with self._collectives.counted("", 0):
            self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _ring_sent_bytes(kind: CollectiveKind, arguments: Any) -> int:
    """Return the bytes that this rank sends by the ring algorithms.

    The tensors among the arguments are a whole tensor, or a list of its parts; and this rank's part
    of it, except in all-reduce and reduce.
    """
    sizes = [leaf.nbytes for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    num_ranks = dist.get_world_size()
    full_bytes = max(sizes) if len(sizes) <= 2 else max(sizes) * num_ranks
    return sent_bytes(kind, num_ranks, full_bytes)


# -- The engine.


class ZeroEngine:
    """One model under ZeRO over all ranks of the default group. See ``base.Engine``."""

    def __init__(self, built: BuiltModel, settings: EngineSettings) -> None:
        """Partition, load and hand ``built`` to DeepSpeed. Collective.

        Raises:
            ConfigError: if DeepSpeed, its compiler, the NVMe folder or room in it is missing.
            DataError: if the weights on disk are damaged or of another model.
            RemoteError: on all other ranks, if one fails.
        """
        parallel, device, train = settings.parallel, settings.device, settings.train
        assert parallel.zero_stage is not None, "train/model.py chooses this engine by it"
        self._stage = parallel.zero_stage
        self._settings, self._device, self._size = settings, device, settings.layout.size
        self._seed, self._module = built.seed, built.module
        self._autocast = built.dtype if settings.plan.casts_weights else None
        self._collectives = CountedCollectives(device)
        self._shared_rows = share_rows(
            make_context_group(settings.layout, device), self._collectives, settings, built.dtype
        )
        self._step_sums, self._step_terms = torch.zeros(1), 1.0
        prepare_heap_and_dropout(built, train, self._stage == 3)
        blocks = list(find_blocks(built.module))
        use_faster_layers(built.module, blocks, train.compiles, built.dtype, device)
        inputs = OffloadedInputs(settings)
        inputs.reset_at_each_pass(built.module)
        checkpoint_blocks(blocks, parallel.recompute, inputs.saving_context)
        if train.compiles:
            compile_blocks(blocks)
            compile_loss(built.module)
        self.memory_actions = make_recompute_actions(
            blocks, parallel.recompute, inputs.saving_context
        )
        self.memory_actions |= (
            PiecewiseMlps(blocks, settings).memory_actions() | inputs.memory_actions()
        )
        self._router_watch = RouterWatch(built.routers, built.router_score, built.tune)
        parallelize_attention(built.module, self._shared_rows)
        self._engine = self._connect_and_load(built)
        self._router_watch.hook_routers([built.module], device)
        self._zero_optimizer = self._engine.optimizer
        if parallel.offload_params == "nvme":
            zero_state.prevent_prefetching(self._zero_optimizer)
        if self._stage == 3 and parallel.recompute == "selective":
            zero_state.hide_gathers_from_recompute(self._zero_optimizer)
        named_params = built.module.named_parameters()
        self._trained_params = {built.saved_names[n]: p for n, p in named_params if p.requires_grad}
        self._partitions = zero_state.find_partitions(
            self._zero_optimizer, self._stage, self._trained_params
        )
        self._reader = zero_state.PartitionReader(self._zero_optimizer, self._stage)
        folder = zero_settings.swap_folder(parallel)
        self.saves_in_background, self.can_repeat_steps = folder is None, False
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def accumulate(
        self, batches: Sequence[Batch], global_terms: float, global_tokens: float = 1.0
    ) -> torch.OutOfMemoryError | None:
        """Compute the gradients of a step; see ``base.Engine``."""
        self._reader.release()
        self._router_watch.begin(self._size / global_tokens)  # DeepSpeed divides by the size
        num_sums = self._settings.plan.num_sums
        sums = torch.zeros(num_sums, dtype=torch.float32, device=self._device)
        for i, batch in enumerate(shard_batches(batches, self._shared_rows)):
            # DeepSpeed reduces within the backward pass, so an empty micro-batch runs too.
            self._engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            seed_micro_batch(self._seed, batch.first_row)
            sums += self._backward(batch, self._size / global_terms)
        sums = torch.cat([sums, self._router_watch.sums])
        self._collectives.all_reduce(sums, None)
        self._step_sums, self._step_terms = sums, global_terms
        return None  # DeepSpeed sends within a pass

    def update(self, lr: float) -> StepResult:
        """Update the weights; see ``base.Engine``."""
        set_lr(self._zero_optimizer.optimizer, lr)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        sums = self._step_sums.tolist()  # a GPU has done its work
        sent_bytes, comm_s = self._collectives.pop_totals()
        num_sums = self._settings.plan.num_sums
        sums, routers = sums[:num_sums], self._router_watch.interpret_sums(sums[num_sums:])
        return StepResult(sums[0] / self._step_terms, norm, comm_s, sent_bytes, sums, routers)

    @torch.no_grad()
    def objective_sums(
        self,
        batches: Iterable[Batch],
        objective: Objective | None = None,
        is_within_step: bool = False,
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield micro-batches with the sums of an objective; see ``base.Engine``."""
        self._reader.release()
        self._module.eval()
        training_objective = self._module.objective
        skips_empty = self._settings.plan.skips_empty_micros(is_training=False)
        self._module.objective = objective or training_objective
        try:
            with nullcontext() if is_within_step else self._collectives.counting_paused():
                for batch in batches:
                    if batch.num_loss_tokens or not skips_empty:
                        [local_batch] = shard_batches([batch], self._shared_rows)
                        with autocast(self._device, self._autocast):
                            sums = self._module(local_batch.to(self._device))
                        if self._shared_rows is not None:
                            sums = self._shared_rows.sum_over_ranks(sums)
                        if self._shared_rows is None or self._shared_rows.part.rank == 0:
                            yield batch, sums
        finally:
            self._module.train()
            self._module.objective = training_objective

    def regions(self) -> list[Region]:
        """Return the values that this rank updates; see ``base.Engine``."""
        regions: list[Region] = []
        for buffer in self._partitions:
            for span in buffer.spans:
                for part in ("", *MOMENT_NAMES):
                    read_values = functools.partial(self._reader.read_values, buffer, part)
                    regions += zero_state.span_regions(
                        _checkpoint_tensor_name(part, span.name), span, read_values
                    )
        return regions

    def load(self, index: TensorIndex, step: int) -> None:
        """Load a checkpoint; see ``base.Engine``.

        Raises:
            CheckpointError: if a tensor is missing or cannot be read, or lacks values that this
                rank needs.
        """
        index.require(
            _checkpoint_tensor_name(part, name)
            for name in self._trained_params
            for part in ("", *MOMENT_NAMES)
        )
        reserve = self._settings.reserve
        if self._stage == 3:
            zero_state.release_gathered_parameters(self._zero_optimizer)
        for buffer in self._partitions:
            with zero_state.edit_optimizer_state(
                self._zero_optimizer, self._stage, buffer, reserve
            ) as state:
                for span in buffer.spans:
                    zero_state.fill_span(index, span.name, span, buffer.flat.detach(), reserve)
                    for part in MOMENT_NAMES:
                        stored_name = _checkpoint_tensor_name(part, span.name)
                        zero_state.fill_span(index, stored_name, span, state[part], reserve)
                state["step"].fill_(float(step))
        if self._stage < 3:  # each rank has whole weights and updates its part of them
            for name, parameter in self._trained_params.items():
                index.fill(parameter.detach(), name, reserve=reserve)

    def run_and_discard(self, batch: Batch) -> None:
        """Run a micro-batch and discard its gradients; see ``base.Engine``."""
        self._engine.set_gradient_accumulation_boundary(True)
        with self._collectives.counting_paused():
            self._backward(shard_batches([batch], self._shared_rows)[0], 1.0)
        zero_state.drop_gradients(self._zero_optimizer, self._stage)

    def _backward(self, batch: Batch, scale: float) -> torch.Tensor:
        by_reference = (
            zero_state.saving_weights_by_reference() if self._stage == 3 else nullcontext()
        )
        with autocast(self._device, self._autocast), by_reference:
            sums: torch.Tensor = self._engine(batch.to(self._device))
        self._engine.backward(sums[0] * scale)
        return sums.detach()

    def _connect_and_load(self, built: BuiltModel) -> Any:
        """Return DeepSpeed's engine around the module, with its weights loaded. Collective."""
        settings, device = self._settings, self._device
        config = zero_settings.deepspeed_config(built, settings.optim, settings.parallel, device)
        node_bytes = zero_settings.node_swap_bytes(built, settings.parallel)

        def load() -> torch.optim.AdamW:
            folder = zero_settings.make_swap_folder(settings.parallel, node_bytes)
            _set_up_deepspeed(device, self._collectives, needs_aio=folder is not None)
            return self._load_and_make_optimizer(built, config)

        with zero_settings.setting_local_rank(device):
            optimizer = settings.run_and_agree("loading the model", load)
            if self._stage < 3:
                return _make_deepspeed_engine(built.module, optimizer, config)
            with _removing_new_hooks(built.module.causal_lm().get_output_embeddings()):
                return _make_deepspeed_engine(built.module, optimizer, config)

    def _load_and_make_optimizer(
        self, built: BuiltModel, config: dict[str, Any]
    ) -> torch.optim.AdamW:
        """Give the module its weights and return the optimizer. No collectives."""
        optim, reserve = self._settings.optim, self._settings.reserve
        # Stage 3 replaces the parameters: groups are kept by name.
        names = {p: n for n, p in built.module.named_parameters()}
        trained_params = [(n, p) for p, n in names.items() if p.requires_grad]
        groups = [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in parameter_groups(trained_params, optim)
        ]
        if self._stage == 3:
            from hpc_tune.engine.zero.partition import partition_parameters

            _mark_leaf_modules(built.module)
            built.module.head_unit = _make_head_unit(built.module)
            partition_parameters(built, config, self._device, reserve)
        else:
            allocate(built.module, self._device)
            load_weights(built, reserve)
        offload = config["zero_optimization"].get("offload_optimizer", {}).get("device")
        if offload == "cpu" or (self._device.type == "cpu" and offload is None):
            # DeepSpeed allocates an fp32 copy of this rank's part, and two moments.
            reserve(SAVED_COPIES * 4 * sum(p.numel() for _, p in trained_params) // self._size)
        params_by_name = dict(built.module.named_parameters())
        return make_stateless_adamw(
            [{**g, "params": [params_by_name[n] for n in g["params"]]} for g in groups], optim
        )


def _mark_leaf_modules(module: nn.Module) -> None:
    """Make DeepSpeed treat each module as one layer whose calls of its layers depend on the tokens.

    LongCat's experts call a layer for each expert that has tokens, Qwen4's indexer for each token,
    so ranks make different calls. Each call gathers weights ahead: ranks would wait for each other
    in different collectives.
    """
    from deepspeed.utils import set_z3_leaf_module

    experts = (part for _, part in find_stacked_experts(module) if not can_group_experts(part))
    for part in (*experts, *find_indexers(module)):
        set_z3_leaf_module(part, True)


def _make_head_unit(module: LossModel) -> HeadUnit:
    """Return the unit for which DeepSpeed gathers the head, with the head's parameters as its own.

    A head is called for each chunk of tokens with loss, whose number differs by rank: see
    ``_mark_leaf_modules``. It cannot be such a leaf: a leaf sends its gradients when its own
    backward pass ends, and those of an embedding that is tied to the head come later.
    """
    head = module.causal_lm().get_output_embeddings()
    unit = HeadUnit(head)
    del unit.head
    for number, parameter in enumerate(head.parameters()):
        unit.register_parameter(f"parameter_{number}", parameter)
    return unit


@contextmanager
def _removing_new_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the forward hooks that a module and its parts get within the block."""
    names = "_forward_pre_hooks", "_forward_hooks"
    hook_dicts = [getattr(part, name) for part in module.modules() for name in names]
    snapshots = [dict(hook_dict) for hook_dict in hook_dicts]
    yield
    for hook_dict, snapshot in zip(hook_dicts, snapshots, strict=True):
        hook_dict.clear()
        hook_dict.update(snapshot)


def _checkpoint_tensor_name(state_name: str, weight_name: str) -> str:
    return f"{state_name}.{weight_name}" if state_name else weight_name


def _set_up_deepspeed(
    device: torch.device, collectives: CountedCollectives, needs_aio: bool
) -> None:
    """Make DeepSpeed use ``device`` and the existing process group.

    Raises:
        ConfigError: if it is not installed, or its NVMe library is needed and cannot be built.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed.comm.comm as comm
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.utils import groups
    except ImportError as error:
        raise ConfigError(
            f"parallel.zero_stage needs DeepSpeed, which cannot be imported ({error}): run python "
            "-m pip install deepspeed or, in an environment on top of the site's torch, python3 "
            "tools/install.py --zero"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu" and real_accelerator.get_accelerator().device_name() != "cpu":
        real_accelerator.set_accelerator(CPU_Accelerator())
    # At each use, DeepSpeed calls a function that the newest torch has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its shared-memory all-reduce would be compiled here; gloo works without it. (An import
    # statement would return torch itself, which the package holds under the same name.)
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    comm.cdb = None  # left by an earlier run in this process
    groups._release_process_group_references()
    comm.init_distributed(verbose=False, dist_init_required=False)
    comm.cdb = CountedBackend(comm.cdb, collectives)
    # Otherwise DeepSpeed makes a copy of the group, with a timeout of its own.
    groups._WORLD_GROUP = dist.group.WORLD
    if needs_aio:
        load_async_io(f"rank {dist.get_rank()}")


def _make_deepspeed_engine(
    module: nn.Module, optimizer: torch.optim.AdamW, settings: dict[str, Any]
) -> Any:
    """Return DeepSpeed's engine around a module that has its weights. Collective."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Engine(DeepSpeedEngine):  # type: ignore[misc]
        def _broadcast_model(self) -> None:
            """Send nothing: each rank has read the same files."""

    return Engine(
        args=None,
        model=module,
        optimizer=optimizer,
        config=settings,
        config_class=DeepSpeedConfig(settings),
        dont_change_device=True,
    )
