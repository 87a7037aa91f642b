"""Expert parallelism: the experts of a layer are spread over ranks, and tokens are sent to them.

    distribute_experts  stacks -> this rank's experts of each, unsharded, on the meta device
    add_token_dispatch  an experts' module sends tokens to the ranks of their experts, and back

Each rank has tokens of its own. If experts were sharded, each rank would gather all of them for its
tokens; here experts stay in place and tokens move: a token's hidden values, once for each of its
experts, there and back, and likewise their gradients (GShard, arXiv:2006.16668). If the group is
the whole shard axis, the gradients of experts are complete on their rank, which has seen all tokens
of the axis. If it is smaller, several groups hold the same experts; ``fsdp.py`` shards these over
the groups, and gradients are summed over the groups.

Shapes: N tokens of this rank, K experts of a token, S = N K rows that are sent, H hidden features,
E experts of G ranks.
"""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hpc_tune.engine.activation_checkpoint import exclude_from_recompute
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import BuiltModel, Slice
from hpc_tune.model.experts import find_stacked_experts
from hpc_tune.model.micro_batch import batch_context
from hpc_tune.step.slices import ExpertStack, find_expert_stacks


def distribute_experts(built: BuiltModel, rank: int, num_ranks: int) -> BuiltModel:
    """Keep only the experts of rank ``rank`` of ``num_ranks`` in each stack, and in its adapters.

    Raises:
        ConfigError: if there are no experts, they cannot be spread, or tokens cannot be sent there.
    """
    slices: dict[nn.Parameter, Slice] = {}
    for path, layer in find_expert_stack_modules(built.module):
        for stack in find_expert_stacks(layer):
            num_experts = stack.parameter.shape[0]
            if num_experts % num_ranks or not hasattr(stack.owner, "has_gate"):
                reason = (
                    f"{num_experts} experts cannot be distributed over {num_ranks} ranks"
                    if num_experts % num_ranks
                    else f"{type(stack.owner).__name__} does not tell which tokens it takes"
                )
                raise ConfigError(
                    f"parallel.expert={num_ranks}: {path}: {reason}; use parallel.shard"
                )
            _shard_stack(stack, rank, num_ranks, slices)
        while hasattr(layer, "base_layer"):
            layer.num_experts //= num_ranks
            layer = layer.base_layer
    if not slices and built.module.is_first_stage and built.module.is_last_stage:
        raise ConfigError(
            f"parallel.expert={num_ranks}: a {built.config.model_type} model has no experts; "
            "leave it out"
        )
    named_params = built.module.named_parameters()
    return replace(built, slices={name: slices[p] for name, p in named_params if p in slices})


def add_token_dispatch(
    module: nn.Module, group: dist.ProcessGroup, collectives: CountedCollectives
) -> None:
    """Make each experts' module compute what all ranks of ``group`` route to this rank's experts.

    To be called once the module's own forward is final. Each pass of the module is collective.
    """
    for _, layer in find_expert_stack_modules(module):
        owner = find_expert_stacks(layer)[0].owner
        local_forward: Callable[..., torch.Tensor] = layer.forward
        exchange = _TokenExchange(group, collectives, owner.num_experts)
        layer.forward = types.MethodType(_with_dispatch(local_forward, exchange), layer)


def find_expert_stack_modules(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules with stacks of experts, including the adapters around them."""
    roots = dict.fromkeys(
        path.replace(".base_layer", "") for path, _ in find_stacked_experts(module)
    )
    return [(path, module.get_submodule(path)) for path in roots]


def _shard_stack(
    stack: ExpertStack, rank: int, num_ranks: int, slices: dict[nn.Parameter, Slice]
) -> None:
    """Cut a stack, its bias (a row for each expert), and its adapters."""
    num_experts, owner = stack.parameter.shape[0], stack.owner
    experts_per_rank = num_experts // num_ranks

    def cut(part: Any, name: str, dim: int, parts: int = 1, rows: int = 1) -> None:
        full_param = getattr(part, name)
        shape = list(full_param.shape)
        shape[dim] //= num_ranks
        with _disable_current_modes():  # a trace allocates it later, like all others
            values = torch.empty(shape, dtype=full_param.dtype, device=full_param.device)
            shard = nn.Parameter(values, full_param.requires_grad)
        slices[shard] = Slice(dim, rank * experts_per_rank * rows, tuple(full_param.shape), parts)
        setattr(part, name, shard)

    cut(owner, stack.name, 0)
    if getattr(owner, bias := f"{stack.name}_bias", None) is not None:
        cut(owner, bias, 0)
    for a, b in stack.adapters:
        rank_of_adapter = a.weight.shape[0] // num_experts
        cut(a, "weight", 0, rows=rank_of_adapter)  # expert after expert
        cut(b, "weight", 1, parts=rank_of_adapter)  # all experts' first column, their second, ...
    owner.num_experts = experts_per_rank


class _TokenExchange:
    """Sends rows to the ranks of their experts, and back."""

    def __init__(
        self, group: dist.ProcessGroup, collectives: CountedCollectives, experts_per_rank: int
    ) -> None:
        self.group, self.collectives, self.experts_per_rank = group, collectives, experts_per_rank

    @exclude_from_recompute
    def exchange_counts(self, ids_S: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return how many rows come from each rank for each own expert [G, E / G], and sums.

        The host reads the sums: rows sent to each rank, and rows received from it. A layer that is
        recomputed reuses those of its first pass: no message, and the host does not wait.
        """
        send_counts = torch.zeros(
            self.group.size() * self.experts_per_rank, dtype=torch.int64, device=ids_S.device
        )
        send_counts.scatter_add_(0, ids_S, torch.ones_like(ids_S))
        recompute_cache = batch_context.batch.recompute_cache
        if recompute_cache is None:
            return self._exchange_row_counts(send_counts, len(ids_S))
        if self not in recompute_cache:
            recompute_cache[self] = send_counts, self._exchange_row_counts(send_counts, len(ids_S))
        first_counts, rows = recompute_cache[self]
        if first_counts is not send_counts and not isinstance(send_counts, FakeTensor):
            _assert_same_counts(first_counts, send_counts)
        return cast("tuple[torch.Tensor, list[int], list[int]]", rows)

    def _exchange_row_counts(
        self, send_counts: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Exchange counts and read them; a trace has no values, so it spreads rows evenly."""
        ranks = self.group.size()
        receive_counts = torch.empty_like(send_counts)
        self.collectives.all_to_all(receive_counts, send_counts, None, None, self.group)
        counts = torch.stack([send_counts, receive_counts]).view(2, ranks, self.experts_per_rank)
        if isinstance(send_counts, FakeTensor):
            quotient, remainder = divmod(num_rows, ranks)
            even_counts = [quotient + (number < remainder) for number in range(ranks)]
            return counts[1], even_counts, even_counts
        send, receive = counts.sum(2).tolist()
        return counts[1], send, receive

    def __call__(
        self, x: torch.Tensor, num_sent: list[int], num_received: list[int]
    ) -> torch.Tensor:
        """Send rows of ``x`` and return the rows received; their gradient goes the other way."""
        out: torch.Tensor = _AllToAll.apply(x, num_sent, num_received, self)
        return out


def _assert_same_counts(first: torch.Tensor, second: torch.Tensor) -> None:
    """Make the device fail if counts differ, so that the host does not wait for it."""
    message = "a recomputed router chose other experts than in its first pass"
    torch._assert_async((first == second).all(), message)


class _AllToAll(torch.autograd.Function):
    """Sends rows to their ranks; backward, sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        num_sent: list[int],
        num_received: list[int],
        exchange: _TokenExchange,
    ) -> torch.Tensor:
        ctx.rows, ctx.exchange = (num_sent, num_received), exchange
        return _all_to_all(x, num_sent, num_received, exchange)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        send, receive = ctx.rows
        return _all_to_all(grad, receive, send, ctx.exchange), None, None, None


def _all_to_all(
    x: torch.Tensor, num_sent: list[int], num_received: list[int], exchange: _TokenExchange
) -> torch.Tensor:
    out = x.new_empty(sum(num_received), *x.shape[1:])
    exchange.collectives.all_to_all(out, x.contiguous(), num_received, num_sent, exchange.group)
    return out


def _with_dispatch(
    local_forward: Callable[..., torch.Tensor], exchange: _TokenExchange
) -> Callable[..., Any]:
    def forward(
        _: Any, hidden_NH: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, num_chosen = expert_ids_NK.shape
        ids_S, order_S = torch.sort(expert_ids_NK.reshape(-1).long(), stable=True)
        # Before the host waits for the counts, do all that does not need them.
        send_SH = hidden_NH[order_S // num_chosen]
        inverse_S = torch.empty_like(order_S)
        inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        counts, send, receive = exchange.exchange_counts(ids_S)
        received_H = exchange(send_SH, send, receive)
        del send_SH
        own_ids = torch.arange(exchange.experts_per_rank, device=counts.device).repeat(len(counts))
        own_ids = torch.repeat_interleave(own_ids, counts.flatten(), output_size=sum(receive))
        if not sum(receive):  # matmuls need a row, and weights need a gradient
            received_H = torch.cat([received_H, received_H.new_zeros(1, received_H.shape[1])])
            own_ids = own_ids.new_zeros(1)
        unit_weights = weights_NK.new_ones(len(own_ids), 1)
        out_H = local_forward(received_H, own_ids.unsqueeze(1), unit_weights)[: sum(receive)]
        returned_SH = exchange(out_H, receive, send)
        each_NKH = returned_SH[inverse_S].view(num_tokens, num_chosen, -1)
        summed_NH = (each_NKH * weights_NK.unsqueeze(-1)).sum(1)
        return summed_NH.to(hidden_NH.dtype)

    return forward
