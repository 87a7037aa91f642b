"""The PyTorch engine: replicated weights (DDP arithmetic) and FSDP2.

    meta model -> (recompute, fully_shard) -> allocate -> read own regions -> train

Trained weights are of two kinds. *Replicated* ones (adapters in every layout, all weights where
nothing is sharded) keep their gradients in one flat fp32 buffer, which is all-reduced once per
optimizer step: a frozen base sends nothing. *Sharded* ones (full fine-tuning with shard > 1) are
FSDP2's, whose reduce-scatter runs in the backward pass of the last micro-batch.
"""

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hpc_tune.batch import Batch
from hpc_tune.config.schema import OptimConfig, ParallelConfig
from hpc_tune.engine.base import StepResult
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.optim import make_adamw
from hpc_tune.errors import CheckpointError
from hpc_tune.model.blocks import decoder_blocks
from hpc_tune.model.build import BuiltModel, allocate, load_weights
from hpc_tune.model.weights import (
    WrittenFile,
    index_checkpoint,
    local_region,
    regions_of,
    write_regions,
)

STATE_NAMES = ("exp_avg", "exp_avg_sq")


class NativeEngine:
    """One model over ``layout.size`` ranks of the default process group. See ``base.Engine``."""

    def __init__(
        self,
        built: BuiltModel,
        layout: Layout,
        device: torch.device,
        optim: OptimConfig,
        parallel: ParallelConfig,
    ) -> None:
        """Shard, allocate and load ``built``.

        Raises:
            DataError: if the weights on disk are damaged or of another model.
        """
        self._layout, self._device, self._clip_norm = layout, device, optim.clip_norm
        self._seed, self._module = built.seed, built.module
        full = built.tune.method == "full"
        blocks = decoder_blocks(built.module, built.config.num_hidden_layers)
        if parallel.recompute == "full":
            for block in blocks:
                _recompute(block)
        if layout.shard > 1:
            _shard(built, blocks, full, device)
        self._autocast = full and built.dtype != torch.float32 and layout.shard == 1
        self._dtype = built.dtype
        allocate(built.module, device)
        load_weights(built)
        self._trained = {
            built.saved_names[name]: p
            for name, p in built.module.named_parameters()
            if p.requires_grad
        }
        parameters = list(self._trained.values())
        self._sharded = parameters if full and layout.shard > 1 else []
        self._replicated = [] if self._sharded else parameters
        self._grads = _flat_gradients(self._replicated, device)
        self._adamw = make_adamw(parameters, optim)

    def train_step(self, batches: Sequence[Batch], global_tokens: int, lr: float) -> StepResult:
        """Do one optimizer step; see ``base.Engine``."""
        timer = _Timer(self._device)
        loss = torch.zeros((), dtype=torch.float32, device=self._device)
        self._zero_grad()
        for i, batch in enumerate(batches):
            # Without sharding a micro-batch is this rank's own affair: an empty one is skipped.
            if batch.num_loss_tokens == 0 and self._layout.shard == 1:
                continue
            if isinstance(self._module, FSDPModule):
                self._module.set_requires_gradient_sync(i == len(batches) - 1)
            torch.manual_seed(self._seed * 1_000_003 + batch.first_row)
            with self._precision():
                loss_sum = self._module(batch.to(self._device))
            (loss_sum / global_tokens).backward()
            loss += loss_sum.detach()
        with timer.measure():
            for grads in self._grads:
                dist.all_reduce(grads)
            dist.all_reduce(loss)
        grad_norm = self._clip(timer)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        hidden = self._layout.shard > 1
        return StepResult(
            loss.item() / global_tokens, grad_norm.item(), None if hidden else timer.seconds()
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the loss sum and token count over all ranks; see ``base.Engine``."""
        self._module.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            if batch.num_loss_tokens == 0 and self._layout.shard == 1:
                continue
            with self._precision():
                total[0] += self._module(batch.to(self._device))
            total[1] += batch.num_loss_tokens
        self._module.train()
        dist.all_reduce(total)
        loss_sum, tokens = total.tolist()
        return loss_sum, int(tokens)

    def save(self, directory: Path) -> WrittenFile | None:
        """Write this rank's regions; replicated tensors are written by rank 0 alone."""
        rank = dist.get_rank()
        if not self._sharded and rank:
            return None
        file = directory / f"rank-{rank:05d}.safetensors"
        return write_regions(file, regions_of(dict(self._state_tensors())))

    def load(self, directory: Path, step: int) -> None:
        """Read what any layout saved.

        Raises:
            CheckpointError: if a tensor is missing or has another shape.
        """
        index = index_checkpoint(directory)
        for name, tensor in self._state_tensors():
            if name not in index.pieces:
                raise CheckpointError(f"{directory}: it has no {name}; it is of another model")
            local, offset = local_region(tensor.detach())
            if local.numel():
                index.fill(local, name, offset)
        for state in self._adamw.state.values():
            state["step"].fill_(float(step))

    def run_once(self, batch: Batch) -> None:
        """Do the work of one micro-batch and forget it: for measuring memory before the run."""
        self._module(batch.to(self._device)).backward()
        self._zero_grad()

    def _state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._trained.items():
            yield name, parameter
            for part in STATE_NAMES:
                yield f"{part}.{name}", self._adamw.state[parameter][part]

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast:
            return torch.autocast(self._device.type, self._dtype)
        return nullcontext()

    def _zero_grad(self) -> None:
        for grads in self._grads:
            grads.zero_()
        for parameter in self._sharded:
            parameter.grad = None

    def _clip(self, timer: "_Timer") -> torch.Tensor:
        """Scale all gradients down to clip_norm and return the global norm before that."""
        sharded = [local_region(p.grad)[0] for p in self._sharded if p.grad is not None]
        squares = _sum_of_squares(sharded, self._device)
        if self._sharded:
            with timer.measure():
                dist.all_reduce(squares)
        norm = (squares + _sum_of_squares(self._grads, self._device)).sqrt()
        if self._clip_norm:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([*self._grads, *sharded], scale.float())
        return norm


def _sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum in fp64: torch's fp32 norm of a million values is off by 1e-5 on a CPU."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return total


def _recompute(block: nn.Module) -> None:
    """Keep only the block's input and run it again in the backward pass."""
    forward = block.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


def _shard(built: BuiltModel, blocks: list[nn.Module], full: bool, device: torch.device) -> None:
    """Shard each decoder block and the rest; adapters stay whole on every rank."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    adapters = set() if full else {p for p in built.module.parameters() if p.requires_grad}
    lower = full and built.dtype != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=built.dtype if lower else None, reduce_dtype=torch.float32 if lower else None
    )
    for unit in (*blocks, built.module):
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=adapters)
        assert isinstance(unit, FSDPModule)
        # The loss is a sum over the global tokens: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _flat_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> list[torch.Tensor]:
    """Make every gradient a view into one fp32 buffer (4 bytes per trained value)."""
    if not parameters:
        return []
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=device)
    position = 0
    for parameter in parameters:
        parameter.grad = flat[position : position + parameter.numel()].view_as(parameter)
        position += parameter.numel()
    return [flat]


class _Timer:
    """Sums the time of the pieces it measures; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        if not self._cuda:
            start_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_s
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def seconds(self) -> float:
        """Return the sum; on a GPU the caller has already waited for the work."""
        return self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
