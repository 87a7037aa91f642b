"""The DeepSpeed engine: ZeRO 1, 2 and 3, with weights and optimizer state on CPU or NVMe.

    stage 1, 2   meta model -> allocate -> load_weights -> DeepSpeed shards gradients and optimizer
    stage 3      meta model -> each parameter becomes this rank's partition, filled from the
                 rank's own region of the files -> DeepSpeed gathers weights as they are used

DeepSpeed runs on the process group that is already there. Only this file and async_io.py import it.
The arithmetic is that of ``NativeEngine``: DeepSpeed averages gradients over the ranks, so the
loss is scaled by their number first.
"""

import functools
import importlib
import logging
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_tune.batch import Batch
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import OptimConfig, TrainConfig
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks, recompute_levers
from hpc_tune.engine.async_io import load_async_io
from hpc_tune.engine.base import StepResult
from hpc_tune.engine.compile import compile_blocks
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.native import NOTHING_WRAPPED, STATE_NAMES
from hpc_tune.engine.optim import adamw_of, weight_decay_groups
from hpc_tune.engine.zero import settings as zero_settings
from hpc_tune.engine.zero import state as zero_state
from hpc_tune.engine.zero.comm import CountedBackend
from hpc_tune.errors import CheckpointError, ConfigError, HpcTuneError
from hpc_tune.memory.host import return_freed_blocks
from hpc_tune.model.blocks import block_list, use_own_layers
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.dropout import use_row_dropout
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.regions import Region
from hpc_tune.model.room import ask
from hpc_tune.model.weights import TensorIndex


class ZeroEngine:
    """One model under ZeRO over all ranks of the default group. See ``base.Engine``."""

    def __init__(
        self,
        built: BuiltModel,
        layout: Layout,
        device: torch.device,
        optim: OptimConfig,
        parallel: ParallelConfig,
        train: TrainConfig = NOTHING_WRAPPED,
    ) -> None:
        """Partition, load and hand ``built`` to DeepSpeed. Collective.

        Raises:
            ConfigError: if DeepSpeed, its compiler or the NVMe folder is missing. DataError: if the
            weights on disk are damaged or of another model. Each on all ranks.
        """
        assert parallel.zero_stage is not None
        self._stage, self._device, self._size = parallel.zero_stage, device, layout.size
        self._seed, self._module, self._dtype = built.seed, built.module, built.dtype
        full = built.tune.method == "full"
        self._autocast = full and built.dtype != torch.float32
        self._collectives = CountedCollectives(device)
        if self._stage == 3:
            return_freed_blocks()
        if not train.compile:
            use_row_dropout(built.module, built.seed)
        blocks = list(block_list(built.module))
        use_own_layers(built.module, blocks, train.compile)
        checkpoint_blocks(blocks, parallel.recompute)
        if train.compile:
            compile_blocks(blocks)
        self.levers = recompute_levers(blocks, parallel.recompute, train.compile)
        settings = zero_settings.settings(built, optim, parallel, device)
        node_bytes = zero_settings.node_swap_bytes(built, parallel)
        folder, optimizer, error = None, None, None
        with zero_settings.local_rank(device):
            try:
                if "nvme" in (parallel.offload_params, parallel.offload_optimizer):
                    folder = zero_settings.make_swap_folder(parallel, node_bytes)
                _connect(device, self._collectives, needs_aio=folder is not None)
                optimizer = self._load(built, optim, settings)
            except HpcTuneError as caught:
                error = caught
            zero_settings.agree(error)
            assert optimizer is not None
            self._engine = _start(built.module, optimizer, settings)
        self._zero = self._engine.optimizer
        if parallel.offload_params == "nvme":
            # DeepSpeed 0.19 reads ahead until no buffer is left for the weight that is needed: for
            # the passes of an evaluation that is over, or for a tied weight twice.
            coordinator = self._zero.parameter_offload.get_param_coordinator()
            coordinator._PartitionedParameterCoordinator__prefetch_nvme = False
        if self._stage == 3 and parallel.recompute == "selective":
            zero_state.gather_unseen(self._zero.parameter_offload.get_param_coordinator())
        named = built.module.named_parameters()
        self._trained = {built.saved_names[n]: p for n, p in named if p.requires_grad}
        self._partitions = zero_state.partitions(self._zero, self._stage, self._trained)
        self._resident = zero_state.Resident(self._zero, self._stage)
        self.saves_in_background = folder is None
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def train_step(
        self,
        batches: Sequence[Batch],
        global_tokens: int,
        lr: float,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Do one optimizer step; see ``base.Engine``."""
        self._resident.release()
        self._collectives.take()  # an evaluation's is not this step's
        loss = torch.zeros((), dtype=torch.float32, device=self._device)
        for i, batch in enumerate(batches):
            # DeepSpeed reduces within the backward pass, so an empty micro-batch runs too.
            self._engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            torch.manual_seed(self._seed * 1_000_003 + batch.first_row)
            loss += self._backward(batch, self._size / global_tokens)
        self._collectives.all_reduce(loss, None)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = lr
        before_update()
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        assert norm is not None
        loss_value = loss.item()  # a GPU has done its work
        sent_bytes, comm_s = self._collectives.take()
        return StepResult(loss_value / global_tokens, float(norm), comm_s, sent_bytes)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the loss sum and token count over all ranks; see ``base.Engine``."""
        self._resident.release()
        self._module.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            if batch.num_loss_tokens == 0 and self._stage < 3:
                continue
            with self._precision():
                total[0] += self._module(batch.to(self._device))
            total[1] += batch.num_loss_tokens
        self._module.train()
        dist.all_reduce(total)
        loss_sum, tokens = total.tolist()
        return loss_sum, int(tokens)

    def regions(self) -> list[Region]:
        """Return the values that this rank updates; see ``base.Engine``."""
        regions: list[Region] = []
        for partition in self._partitions:
            for span in partition.spans:
                for part in ("", *STATE_NAMES):
                    values = functools.partial(self._resident.values, partition, part)
                    regions += zero_state.regions(_named(part, span.name), span, values)
        return regions

    def load(self, index: TensorIndex, step: int) -> None:
        """Read what any layout saved.

        Raises:
            CheckpointError: if a tensor is missing or has another shape.
        """
        for name in self._trained:
            for part in ("", *STATE_NAMES):
                if _named(part, name) not in index.pieces:
                    raise CheckpointError(
                        f"{index.files[0].parent}: it has no {_named(part, name)}; it is of "
                        "another model"
                    )
        if self._stage == 3:
            self._zero._partition_all_parameters()
        for partition in self._partitions:
            with zero_state.changed(self._zero, self._stage, partition) as state:
                for span in partition.spans:
                    zero_state.fill(index, span.name, span, partition.flat.detach())
                    for part in STATE_NAMES:
                        zero_state.fill(index, _named(part, span.name), span, state[part])
                state["step"].fill_(float(step))
        if self._stage < 3:  # each rank works with whole weights, of which it updates its part
            for name, parameter in self._trained.items():
                index.fill(parameter.detach(), name)

    def run_once(self, batch: Batch) -> None:
        """Do the work of one micro-batch and forget it: for measuring memory before the run."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._backward(batch, 1.0)
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        offloaded = zero.offload_optimizer if self._stage == 3 else zero.cpu_offload
        if offloaded:
            zero.reset_cpu_buffers()
        if self._stage < 3:
            zero._release_preflattened_grad_buffers()
            zero.micro_step_id = -1
            for number in list(zero.averaged_gradients):
                zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
        elif not offloaded:
            zero.averaged_gradients = {}

    def _backward(self, batch: Batch, scale: float) -> torch.Tensor:
        remember = zero_state.weights_by_name() if self._stage == 3 else nullcontext()
        with self._precision(), remember:
            loss_sum = self._engine(batch.to(self._device))
        self._engine.backward(loss_sum * scale)
        return loss_sum.detach()

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast:
            return torch.autocast(self._device.type, self._dtype)
        return nullcontext()

    def _load(
        self, built: BuiltModel, optim: OptimConfig, settings: dict[str, Any]
    ) -> torch.optim.AdamW:
        """Give the module its weights and return the optimizer. No collectives."""
        trained = [p for p in built.module.parameters() if p.requires_grad]
        num = sum(p.numel() for p in trained)
        names = {p: n for n, p in built.module.named_parameters()}
        found = weight_decay_groups(trained, optim)
        groups = [{**g, "params": [names[p] for p in g["params"]]} for g in found]
        if self._stage == 3:
            _partition(built, settings, self._device)
        else:
            allocate(built.module, self._device)
            load_weights(built)
        offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device")
        if offload == "cpu" or (self._device.type == "cpu" and offload is None):
            # DeepSpeed makes an fp32 copy of this rank's part, and two moments.
            ask(3 * 4 * num // self._size)
        now = dict(built.module.named_parameters())
        return adamw_of([{**g, "params": [now[n] for n in g["params"]]} for g in groups], optim)


def _named(part: str, name: str) -> str:
    """Return what a tensor, or a part of its optimizer state, is called in a checkpoint."""
    return f"{part}.{name}" if part else name


def _connect(device: torch.device, collectives: CountedCollectives, needs_aio: bool) -> None:
    """Make DeepSpeed use ``device`` and the process group that is there.

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
            f"parallel.zero_stage needs DeepSpeed, which cannot be imported ({error}): "
            "pip install --force-reinstall --no-deps deepspeed"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu" and real_accelerator.get_accelerator().device_name() != "cpu":
        real_accelerator.set_accelerator(CPU_Accelerator())
    # DeepSpeed calls a function that the newest torch renames, at each use.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its shared-memory all-reduce would be compiled here; gloo does without. (An import statement
    # would find torch itself, which the package has under the same name.)
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    comm.cdb = None  # of an earlier run in this process
    groups._release_process_group_references()
    comm.init_distributed(verbose=False, dist_init_required=False)
    comm.cdb = CountedBackend(comm.cdb, collectives)
    # Else it makes a copy of the group, with a timeout of its own.
    groups._WORLD_GROUP = dist.group.WORLD
    if needs_aio:
        load_async_io(f"rank {dist.get_rank()}")


def _start(module: nn.Module, optimizer: torch.optim.AdamW, settings: dict[str, Any]) -> Any:
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


def _partition(built: BuiltModel, settings: dict[str, Any], device: torch.device) -> None:
    """Make each parameter this rank's part of it, one at a time; the module is never whole.

    What ``zero.Init`` does would allocate every parameter whole and send it from rank 0.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
        AsyncPartitionedParameterSwapper,
    )
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.runtime.zero.partition_parameters import (
        Init,
        PartitionedParamStatus,
        ZeroParamStatus,
        free_param,
        register_external_parameter,
    )

    dtype = next(built.module.parameters()).dtype
    zero = settings["zero_optimization"]
    offload = zero.get("offload_param", {}).get("device")
    swapper: Any = None
    if offload == "nvme":
        # Init would make one of a dtype of its own on a CPU, whatever it is told.
        swapper = AsyncPartitionedParameterSwapper(DeepSpeedConfig(settings), dtype)
    maker = Init(config_dict_or_path=settings, dtype=dtype, param_swapper=swapper)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in built.module.modules():
        for attribute, tensor in owner._parameters.items():
            if tensor is not None:
                owners.setdefault(tensor, []).append((owner, attribute))
    for name, meta in list(built.module.named_parameters()):
        # One value in memory, expanded: it only has to have the shape.
        one = torch.empty(1, dtype=meta.dtype, device=device).expand(meta.shape)
        parameter: Any = nn.Parameter(one, requires_grad=meta.requires_grad)
        maker._convert_to_deepspeed_param(parameter)
        held = -(-meta.numel() // maker.dp_world_size)
        # The swapper has buffers of one dtype, and what stays gathered must not be swapped.
        swapped = (
            swapper is not None
            and meta.dtype == dtype
            and meta.numel() > zero["stage3_param_persistence_threshold"]
            and swapper.swappable_tensor(numel=held)
        )
        if swapped:
            flat: Any = torch.empty(0, dtype=meta.dtype)
            flat.data = swapper.get_buffer(parameter, held).data
        else:
            flat = torch.empty(held, dtype=meta.dtype, device="cpu" if offload else device)
            flat = flat.pin_memory() if maker.pin_memory else flat
        flat.ds_numel = held
        flat.status = PartitionedParamStatus.AVAILABLE
        flat.final_location = OffloadDeviceEnum.nvme if swapped else None
        parameter.ds_tensor = flat
        parameter.ds_numel_aligned = held * maker.dp_world_size
        zero_state.fill_parameter(built, name, flat, tuple(meta.shape), held * maker.rank)
        free_param(parameter)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if swapped:
            swapper.swap_out_and_release([parameter])
        for owner, attribute in owners[meta]:
            owner._parameters[attribute] = parameter
    for block in block_list(built.module):
        for parameter in block.parameters():
            # Else it is gathered when its own layer is called, in a message of its own.
            register_external_parameter(block, parameter)
    for owner in built.module.modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[attribute] = torch.empty_like(buffer, device=device)
    load_weights(built, parameters=False)
