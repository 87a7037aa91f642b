"""FSDP2 over the decoder blocks of a model, and how long gathered weights stay.

    embedding, block, block, ..., block, head    units, gathered one after the other
    everything else, such as norms               the root, gathered first

The embedding is not needed after the first block begins, nor the head before the last block has
ended: each is a unit of its own, unless they share one weight.

Spread experts are units inside their block's unit, sharded over ranks with the same experts.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from hpc_tune.engine.activation_checkpoint import exclude_from_recompute
from hpc_tune.engine.counted_collectives import CountedCollectives, FsdpAllGather, FsdpReduceScatter
from hpc_tune.engine.expert_parallel import find_expert_stack_modules
from hpc_tune.engine.mesh import Mesh
from hpc_tune.model.build import DTYPES, BuiltModel
from hpc_tune.model.layers import is_vector
from hpc_tune.model.loss import HeadUnit, LossModel
from hpc_tune.step.layout import sent_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.torch_versions import let_fsdp_shard_integers


def shard(
    built: BuiltModel,
    blocks: list[nn.Module],
    mesh: Mesh,
    plan: StepPlan,
    device: torch.device,
    collectives: CountedCollectives,
) -> None:
    """Shard spread experts, blocks by ``blocks_per_unit``, untied embedding and head, and the rest.

    The plan decides what stays whole on every rank. Frozen weights are sharded within each replica
    and never reduced; trained ones are reduced over the shards and then over the replicas (HSDP).
    """
    is_full, parallel = plan.size.is_fully_trained, plan.parallel
    params = built.module.named_parameters()
    ignored_params = {p for n, p in params if plan.is_replicated(p.requires_grad, is_vector(n, p))}
    experts: list[nn.Module] = []
    if plan.shards_experts:
        experts = [part for _, part in find_expert_stack_modules(built.module)]
    elif mesh.layout.expert > 1:  # spread, with nothing left to shard
        ignored_params |= {p for n, p in built.module.named_parameters() if n in built.slices}
    if plan.casts_before_gather and built.module.is_first_stage:
        # Weights are gathered in bf16; activations between blocks are fp32, as without sharding.
        embedding = built.module.causal_lm().get_input_embeddings()
        embedding.register_forward_hook(lambda module, args, out: out.float())
    precision = MixedPrecisionPolicy(
        param_dtype=built.dtype if plan.casts_before_gather else None,
        reduce_dtype=DTYPES[parallel.reduce_dtype] if is_full else None,
        cast_forward_inputs=False,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if parallel.offload_params == "cpu":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    let_fsdp_shard_integers()
    for unit in [*experts, *_fsdp_units(built, blocks, parallel.blocks_per_unit)]:
        for_experts = unit in experts
        weight_mesh = mesh.weight_mesh(includes_replicas=is_full, for_experts=for_experts)
        is_end = unit is built.module or isinstance(unit, HeadUnit)  # of the forward pass
        fully_shard(
            unit,
            mesh=weight_mesh,
            reshard_after_forward=parallel.reshard == "block" and not is_end,
            shard_placement_fn=partial(_placement, weight_mesh.size(-1)) if for_experts else None,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=ignored_params,
        )
        if for_experts:
            _gather_outside_recompute(unit)
        if isinstance(unit, HeadUnit) and isinstance(unit, FSDPModule):
            # It stays gathered for its backward pass, which comes next and then needs no gathering.
            unit.set_unshard_in_backward(False)
            unit.register_forward_pre_hook(_free_gather_buffer)
            ignored_params |= set(unit.parameters())  # sharded: the root must not shard them again
            del unit.head
    replicas = mesh.layout.replicate if is_full else 1
    for module in _sharded_modules(built.module):
        _install_counted_collectives(module, replicas, collectives)


def _fsdp_units(
    built: BuiltModel, blocks: list[nn.Module], blocks_per_unit: int
) -> list[nn.Module | list[nn.Module]]:
    """Return what is gathered together; the last unit is the root, with all the rest."""
    units: list[nn.Module | list[nn.Module]] = [
        blocks[i : i + blocks_per_unit] for i in range(0, len(blocks), blocks_per_unit)
    ]
    if built.tied_name is None and built.module.is_first_stage:
        units.append(built.module.causal_lm().get_input_embeddings())
    if built.tied_name is None and built.module.is_last_stage:
        built.module.head_unit = HeadUnit(built.module.causal_lm().get_output_embeddings())
        units.append(built.module.head_unit)
    return [*units, built.module]


def _gather_outside_recompute(unit: Any) -> None:
    """Hide the gathering of a unit from selective recompute of the block around it."""
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for number, hook in hooks.items():
            hooks[number] = exclude_from_recompute(hook)


def _free_gather_buffer(unit: Any, _args: Any) -> None:
    """Free the buffer that the head was gathered into and copied from, before logits exist.

    FSDP2 keeps it until the next unit has its own or, as here, until the root's forward pass ends.
    """
    context = unit._get_fsdp_state()._comm_ctx
    if (gather_state := context.all_gather_state) is not None:
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            stream.wait_event(gather_state.event)
        context.all_gather_state = None


def _placement(num_ranks: int, parameter: nn.Parameter) -> Shard:
    """Return the dimension that shards a stack: the first that ``num_ranks`` divides, or 0.

    For experts in 4 bits always 0, so that each stays whole: its bytes are quantized together.
    """
    divisible_dims = (dim for dim, size in enumerate(parameter.shape) if size % num_ranks == 0)
    is_packed = not parameter.is_floating_point()
    return Shard(0 if is_packed else next(divisible_dims, 0))


def _sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _install_counted_collectives(
    module: FSDPModule, num_replicas: int, collectives: CountedCollectives
) -> None:
    """Make a unit sum gradients over the ranks instead of averaging, and count its messages.

    The loss is a sum over the global tokens. ``num_replicas``: the copies of what is trained.
    """

    def count_all_reduce(grads: torch.Tensor) -> None:
        collectives.count("all_reduce", sent_bytes("all_reduce", num_replicas, grads.nbytes))

    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(FsdpAllGather(collectives))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(FsdpReduceScatter(collectives))  # type: ignore[arg-type]
    if num_replicas > 1:
        module.set_all_reduce_hook(count_all_reduce)


def prepare_backward(module: LossModel, is_last: bool, keeps_weights_gathered: bool) -> None:
    """Prepare a backward pass.

    With ``keeps_weights_gathered``, gathered weights and whole gradients stay until the step's
    last pass. Otherwise each pass leaves a rank its shard of both; replicas sum theirs in the last
    pass. FSDP2 gathers an untied embedding in backward passes too, which do not need it. If it is
    frozen, the next forward pass finds it gathered, so only the last pass skips that; if trained,
    all do.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or not keeps_weights_gathered)
        module.set_requires_all_reduce(is_last)
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last or not keeps_weights_gathered)
        embedding: nn.Module = module.causal_lm().get_input_embeddings()
        is_trained = any(parameter.requires_grad for parameter in embedding.parameters())
        if isinstance(embedding, FSDPModule):
            embedding.set_unshard_in_backward(not is_last and not is_trained)


def release_gathered_weights(module: nn.Module) -> None:
    """Leave a rank only its shards: passes without a backward pass keep what they gather."""
    for unit in _sharded_modules(module):
        unit.reshard()
