"""Count how evenly routers spread tokens over experts, and train it if losses for that are set.

    a router's logits and choices -> tokens per expert
                                  -> balance loss, and z loss (on the size of the logits)
    its weights  -> _AttachRouterLoss -> experts   backward: the losses' gradient goes to the logits

For a packed row with T tokens (padding excluded), E experts, k choices per token, n_e tokens that
go to expert e, and the probabilities p_te (Megatron-LM's seq_aux_loss, moe_utils.py, times T, so
that rows add up like tokens):

    balance = T * E / (k T^2) * sum_e n_e sum_t p_te       1 per token if perfectly even
    z       = sum_t logsumexp(logits_t)^2                  arXiv:2202.08906, equation 5

Counts cover whole rows, even if ranks share a row, so neither loss depends on micro-batches, ranks
or layouts. The losses' gradient enters the backward pass at the routers' weights, so that no loss
has to travel from stage to stage.

Shapes: B rows, T tokens, N = B x T, E experts, K chosen of them, L routers.
"""

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hpc_tune.batch import Batch
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.micro_batch import batch_context
from hpc_tune.model.shared_rows import SharedRows

ScoreFunction = Literal["softmax", "sigmoid", ""]
_ROUTER_NAME = re.compile(r"(^|\.)(router|gate)$")
_LAYER_INDEX_PATTERN = re.compile(r"\.(\d+)\.")
_SCORE_TOLERANCE = 1e-3  # relative: some families add 1e-6 to the denominator of weights
_NUM_LOSSES = 2


@dataclass(frozen=True)
class Router:
    """A module that chooses experts, by its path; ``layer`` is the number of its decoder block."""

    path: str
    layer: int
    num_experts: int


@dataclass(frozen=True)
class RouterSums:
    """Sums over a step: both losses over all tokens and routers, each router's tokens by expert.

    A loss that is not trained is 0.
    """

    balance: float
    z: float
    counts: Sequence[Sequence[float]]


def find_router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that choose experts, with or without adapters, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if _ROUTER_NAME.search(path.replace(".base_layer", ""))
        and "original_module" not in path
        and isinstance(getattr(module, "top_k", None), int)
        and "base_layer" not in module._modules
    }


def list_routers(model: nn.Module) -> tuple[Router, ...]:
    """Return the routers of a whole model, in the model's order."""
    routers: list[Router] = []
    for path, module in find_router_modules(model).items():
        weight = next(p for p in module.parameters() if p.dim() == 2)
        match = _LAYER_INDEX_PATTERN.search(path)
        layer = int(match[1]) if match else len(routers)
        routers.append(Router(path, layer, weight.shape[0]))
    return tuple(routers)


def find_router_score_function(model: nn.Module, run_model: Any) -> ScoreFunction:
    """Return the function with which a mixture's routers weight experts.

    ``run()`` calls the model once, to look at their outputs. "" if routers differ, or do not return
    (logits, weights, choices). If their function is neither softmax nor sigmoid, softmax if
    transformers has a loss for the family, else "".
    """
    functions: list[ScoreFunction | None] = []

    def hook(_module: nn.Module, _inputs: Any, out: Any) -> None:
        functions.append(_infer_score_function(*out) if _is_router_output(out) else None)

    routers = find_router_modules(model)
    handles = [module.register_forward_hook(hook) for module in routers.values()]
    try:
        with torch.no_grad():
            run_model()
    finally:
        for handle in handles:
            handle.remove()
    if len(functions) != len(routers) or len(set(functions)) != 1 or functions[0] is None:
        return ""
    return functions[0] or _fallback_score_function(model)


def _is_router_output(out: Any) -> bool:
    if not isinstance(out, tuple) or len(out) != 3:
        return False
    if not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in out):
        return False
    logits_NE, weights_NK, expert_ids_NK = out
    return (
        weights_NK.shape == expert_ids_NK.shape
        and len(logits_NE) == len(expert_ids_NK)
        and not expert_ids_NK.is_floating_point()
        and bool((expert_ids_NK >= 0).all() and (expert_ids_NK < logits_NE.shape[1]).all())
    )


def _infer_score_function(
    logits_NE: torch.Tensor, weights_NK: torch.Tensor, expert_ids_NK: torch.Tensor
) -> ScoreFunction:
    """Return which scores the weights are multiples of, by a factor per token (K = 1: one)."""
    fp32_weights_NK = weights_NK.float()
    scores: dict[ScoreFunction, torch.Tensor] = {
        "softmax": logits_NE.float().softmax(-1),
        "sigmoid": logits_NE.float().sigmoid(),
    }
    for name, scores_NE in scores.items():
        factor_NK = fp32_weights_NK / scores_NE.gather(1, expert_ids_NK.long())
        mean = factor_NK.mean() if factor_NK.shape[1] == 1 else factor_NK.mean(1, keepdim=True)
        if ((factor_NK - mean).abs() <= _SCORE_TOLERANCE * mean.abs()).all():
            return name
    return ""


def _fallback_score_function(model: Any) -> ScoreFunction:
    """Return softmax for a family with its own weighting if transformers has a loss for it."""
    modules = (sys.modules.get(type(m).__module__) for m in model.modules())
    return "softmax" if any(hasattr(m, "load_balancing_loss_func") for m in modules) else ""


def real_token_mask(batch: Batch, row_sharing: SharedRows | None = None) -> torch.Tensor:
    """Return a mask of a batch's tokens that are not padding, [B, T], without a device sync."""
    num_rows, num_local = batch.tokens_BT.shape
    shape = num_rows, num_local * (row_sharing.part.size if row_sharing else 1)
    is_real_BT = torch.ones(shape, dtype=torch.bool, device=batch.tokens_BT.device)
    for index, padding in enumerate(batch.padding):
        if padding:
            is_real_BT[index, shape[1] - padding :] = False
    return row_sharing.part.shard_to_rank(is_real_BT) if row_sharing else is_real_BT


def count_expert_tokens(
    expert_ids_NK: torch.Tensor, is_real_BT: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return how many real tokens of each row go to each expert, [B, E]."""
    is_chosen_NE = torch.zeros(
        len(expert_ids_NK), num_experts, dtype=torch.bool, device=expert_ids_NK.device
    )
    is_chosen_NE.scatter_(1, expert_ids_NK.long(), True)
    is_chosen_BTE = is_chosen_NE.view(*is_real_BT.shape, num_experts) & is_real_BT.unsqueeze(-1)
    return is_chosen_BTE.sum(1).float()


def _sum_counts_of_shared_rows(
    counts_BE: torch.Tensor, is_real_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's tokens by expert and in total, summed over the ranks that share rows."""
    tokens_B, row_sharing = is_real_BT.sum(1), batch_context.batch.row_sharing
    if row_sharing is None:
        return counts_BE, tokens_B
    sums = row_sharing.sum_over_ranks(torch.cat([counts_BE, tokens_B.unsqueeze(1).float()], 1))
    return sums[:, :-1], sums[:, -1]


def balance_loss(
    logits_NE: torch.Tensor,
    counts_BE: torch.Tensor,
    num_experts_per_token: int,
    is_real_BT: torch.Tensor,
    score_function: ScoreFunction,
    tokens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over rows of ``balance`` (see the top).

    A token's sigmoid scores are scaled to a sum of 1.

    If ranks share rows, ``counts_BE`` and ``tokens_B`` are those of whole rows, and the results of
    these ranks add up to that sum.
    """
    logits_BTE = logits_NE.float().view(*is_real_BT.shape, -1)
    probs_BTE = logits_BTE.sigmoid() if score_function == "sigmoid" else logits_BTE.softmax(-1)
    if score_function == "sigmoid":
        probs_BTE = probs_BTE / (probs_BTE.sum(-1, keepdim=True) + 1e-20)
    sums_BE = probs_BTE.masked_fill(~is_real_BT.unsqueeze(-1), 0.0).sum(1)
    tokens_B = (is_real_BT.sum(1) if tokens_B is None else tokens_B).clamp(min=1)
    factor = logits_NE.shape[1] / num_experts_per_token
    return factor * ((counts_BE * sums_BE).sum(1) / tokens_B).sum()


def z_loss(logits_NE: torch.Tensor, is_real_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of the squared logsumexp of the logits."""
    squares_N = logits_NE.float().logsumexp(-1).square()
    return squares_N.masked_fill(~is_real_BT.flatten(), 0.0).sum()


class RouterWatch:
    """Adds up what the routers of this rank's stages do in a step, and trains their losses.

    ``sums`` is one vector, to be summed over the ranks together with other values, and then read by
    ``interpret_sums``. It is empty if there are no ``routers``: in dense models, and if routers
    cannot be watched.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        score_function: ScoreFunction,
        tune: TuneConfig,
        adds_counts: bool = True,
    ) -> None:
        """Watch ``routers``, those of the whole model. ``adds_counts``: whether this rank adds to
        ``sums``; of the ranks that work on the same tokens, one does.
        """
        self._routers, self._score, self._adds_counts = routers, score_function, adds_counts
        self._balance_coefficient = tune.router_aux_loss or 0.0
        self._z_coefficient = tune.router_z_loss or 0.0
        self._width = _max_num_experts(routers)
        self._is_first_pass, self.scale = False, 0.0
        self.sums = torch.zeros(0)

    def hook_routers(self, stages: Sequence[Any], device: torch.device) -> None:
        """Hook the routers of ``stages``, this rank's parts of the model (``LossModel``s)."""
        self.sums = torch.zeros(num_router_sums(self._routers), dtype=torch.float32, device=device)
        for stage in stages if self._routers else ():
            stage.router_watch = self
            # By path: once an engine has partitioned parameters, their shapes show no experts.
            modules = dict(stage.named_modules())
            for index, router in enumerate(self._routers):
                if router.path in modules:
                    hook = functools.partial(self._handle_router_output, index)
                    modules[router.path].register_forward_hook(hook)

    def begin(self, scale: float) -> None:
        """Begin a step; its backward passes multiply the losses, summed over tokens, by ``scale``.

        ``scale`` is 1 / the step's tokens, adjusted if the engine divides gradients itself.
        """
        self.scale = scale
        self.sums.zero_()

    @contextmanager
    def count_first_pass(self) -> Iterator[None]:
        """Count routers' choices in this context; blocks are recomputed outside of it."""
        self._is_first_pass = True
        try:
            yield
        finally:
            self._is_first_pass = False

    def interpret_sums(self, sums: Sequence[float]) -> RouterSums | None:
        """Interpret ``sums``; return None if no router is watched."""
        if not self._routers:
            return None
        balance, z, *counts = sums
        starts = range(0, len(counts), self._width)
        pairs = zip(self._routers, starts, strict=True)
        loads = [counts[start : start + router.num_experts] for router, start in pairs]
        return RouterSums(balance, z, loads)

    def _handle_router_output(self, index: int, _module: nn.Module, _inputs: Any, out: Any) -> Any:
        is_real_BT = batch_context.batch.is_real_BT
        if is_real_BT is None:
            return None
        logits_NE, weights_NK, expert_ids_NK = out
        counts_BE = count_expert_tokens(expert_ids_NK, is_real_BT, logits_NE.shape[1])
        balance = z = None
        if self._balance_coefficient:
            row_counts_BE, tokens_B = _sum_counts_of_shared_rows(counts_BE, is_real_BT)
            num_experts_per_token = expert_ids_NK.shape[1]
            balance = balance_loss(
                logits_NE, row_counts_BE, num_experts_per_token, is_real_BT, self._score, tokens_B
            )
        if self._z_coefficient:
            z = z_loss(logits_NE, is_real_BT)
        if self._is_first_pass and self._adds_counts:
            self._add_to_sums(index, counts_BE, balance, z)
        loss_terms = [
            c * t
            for c, t in ((self._balance_coefficient, balance), (self._z_coefficient, z))
            if t is not None
        ]
        if not loss_terms or not loss_terms[0].requires_grad:
            return None
        return logits_NE, _AttachRouterLoss.apply(weights_NK, sum(loss_terms), self), expert_ids_NK

    @torch.no_grad()
    def _add_to_sums(
        self,
        index: int,
        counts_BE: torch.Tensor,
        balance: torch.Tensor | None,
        z: torch.Tensor | None,
    ) -> None:
        for position, loss in enumerate((balance, z)):
            if loss is not None:
                self.sums[position] += loss
        start = _NUM_LOSSES + index * self._width
        self.sums[start : start + counts_BE.shape[1]] += counts_BE.sum(0)


class _AttachRouterLoss(torch.autograd.Function):
    """Returns the weights unchanged; its backward pass also gives ``loss`` its gradient."""

    @staticmethod
    def forward(
        ctx: Any, weights_NK: torch.Tensor, loss: torch.Tensor, watch: RouterWatch
    ) -> torch.Tensor:
        ctx.watch, ctx.like = watch, (loss.dtype, loss.device)
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor) -> Any:  # type: ignore[override]
        dtype, device = ctx.like
        return grad_NK, torch.full((), ctx.watch.scale, dtype=dtype, device=device), None


def num_router_sums(routers: Sequence[Router]) -> int:
    """Return how many values ``RouterWatch.sums`` has."""
    return _NUM_LOSSES + _max_num_experts(routers) * len(routers) if routers else 0


def _max_num_experts(routers: Sequence[Router]) -> int:
    return max((router.num_experts for router in routers), default=0)


def summarize_expert_load(
    router_sums: RouterSums | None, num_tokens: int
) -> dict[str, float] | None:
    """Return how unevenly a step's tokens are spread over experts; None if no router is watched.

    ``largest``: the most tokens of an expert, relative to its layer's mean. ``unused``: the
    share of all experts without a token. The losses that are trained are given per token.
    """
    if router_sums is None:
        return None
    counts = router_sums.counts
    max_loads = [max(row) * len(row) / total for row in counts if (total := sum(row))]
    unused_share = sum(count == 0 for row in counts for count in row) / sum(map(len, counts))
    losses = {"aux_loss": router_sums.balance, "z_loss": router_sums.z}
    return {"largest": max(max_loads, default=0.0), "unused": unused_share} | {
        name: loss / max(1, num_tokens) for name, loss in losses.items() if loss
    }
