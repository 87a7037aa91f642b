"""The MLP of a decoder block, computed in pieces of a row; a pass keeps one piece at most.

    forward     for each piece: out[piece] = mlp(x[piece]); only x is kept
    backward    for each piece: mlp(x[piece]) again, and its gradients: those of x side by side,
                those of weights summed in fp32 and given to autograd once

An MLP works on each token separately, so its results and the gradients of its input are the same
bits, as far as a matmul's are for fewer rows; the gradients of weights are sums of one matmul for
each piece (the tiled MLP of ALST, arXiv:2506.13996). Nested checkpoints would bound memory as well,
but autograd would sum the pieces' gradients in the dtype of matmuls, and a recomputed block would
run all pieces but the last once more. Here the recomputation stops before the MLP (see
``_KeepInput``), unless a later part of the block keeps the MLP's result, as a norm does.

Routed experts are not cut: their tokens are counted over a whole micro-batch. Shared experts, which
take all tokens, are cut.

Shapes: x is [..., T, D], and cut along its T tokens.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hpc_tune.engine.activation_checkpoint import exclude_from_recompute
from hpc_tune.engine.base import EngineSettings
from hpc_tune.log import log
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.dropout import RowDropout
from hpc_tune.model.layers import find_blocks

Forward = Callable[[torch.Tensor], torch.Tensor]
MIN_PIECE_TOKENS = 1024  # of pieces that the governor makes: smaller matmuls take longer per token
_MLP_CLASS = re.compile(r"MLP|FeedForward|FFN|Mlp")
_NORM_CLASS = re.compile(r"(RMS|Layer)Norm$")
_EXPERTS_PATH = re.compile(r"(^|\.)experts(\.|$)")


class PiecewiseMlps:
    """An engine's MLPs, computed in pieces of the rows; their number may change between steps.

    ``has_mlps``: whether there are any that can be cut.
    """

    def __init__(self, blocks: Iterable[nn.Module], settings: EngineSettings) -> None:
        """Replace the ``forward`` of each MLP in ``blocks``; with one piece it does as before."""
        row_pieces = settings.parallel.row_pieces
        self.num_pieces = 1 if row_pieces == "auto" else row_pieces
        self._row_tokens = settings.row_tokens
        can_cut = not settings.train.compiles and settings.parallel.zero_stage != 3
        mlps = [mlp for block in blocks for mlp in find_mlps(block)] if can_cut else []
        for mlp in mlps:
            _move_output_sum_to_mlp(mlp)
            mlp.forward = self._split_forward(mlp, mlp.forward)
        self.has_mlps = bool(mlps)
        if self.num_pieces > 1 and not mlps:
            log.warning(
                "parallel.row_pieces=%d has no effect: this model has no MLP that can be cut",
                self.num_pieces,
            )
            self.num_pieces = 1

    def memory_actions(self) -> dict[Action, ActionHandle]:
        """Return the action that doubles the pieces, unless rows are short or of unknown length."""
        initial_pieces = self.num_pieces

        def double(times: int) -> str:
            self.num_pieces = initial_pieces << times
            return f"MLPs are computed in {self.num_pieces} pieces of a row"

        max_doublings = (self._row_tokens // (MIN_PIECE_TOKENS * initial_pieces)).bit_length() - 1
        if max_doublings < 1 or not self.has_mlps:
            return {}
        return {Action.USE_MORE_PIECES: ActionHandle(double, max_doublings)}

    def _split_forward(self, mlp: nn.Module, forward: Forward) -> Callable[..., torch.Tensor]:
        forward_piece = _with_cast_cleanup(mlp, forward)

        def forward_in_pieces(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            piece_tokens = -(-x.shape[-2] // self.num_pieces) if x.dim() > 1 else 0
            if args or kwargs or x.dim() < 2 or piece_tokens in (0, x.shape[-2]):
                return forward(x, *args, **kwargs)
            if not torch.is_grad_enabled():
                return _run_pieces(forward_piece, x, piece_tokens)
            weights = [p for p in mlp.parameters() if p.requires_grad]
            kept = _KeepInput.apply(x) if x.requires_grad else x
            out: torch.Tensor = _ForwardInPieces.apply(forward_piece, piece_tokens, kept, *weights)
            return out

        return forward_in_pieces


def has_mlps(model: nn.Module) -> bool:
    """Whether a model has an MLP that can be cut."""
    return any(True for block in find_blocks(model) for _ in find_mlps(block))


def find_mlps(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a block that consist of linear layers and work on each token separately.

    They are recognized by their class name, by their parts (linear layers and norms, no dropout),
    and by a ``forward`` with a single required argument. Routed experts are left out.
    """
    for path, module in block.named_modules():
        if (
            path
            and _MLP_CLASS.search(type(module).__name__)
            and not _EXPERTS_PATH.search(path)
            and _takes_one_tensor(module)
            and _consists_of_linears(module)
            and not any(isinstance(m, (RowDropout, nn.Dropout)) and m.p for m in module.modules())
        ):
            yield module


def _move_output_sum_to_mlp(mlp: nn.Module) -> None:
    """Make a sliced MLP sum its whole output over ranks once, not its last layer's for each piece.

    What the MLP does after its last layer, such as scaling, is then done before the sum.
    """
    for layer in list(mlp.modules()):
        if (output_sum := layer.__dict__.pop("output_sum", None)) is not None:
            handle, sum_output = output_sum
            handle.remove()
            mlp.register_forward_hook(sum_output)


def _with_cast_cleanup(mlp: nn.Module, forward: Forward) -> Forward:
    """Return ``forward`` for one piece that leaves no cast of ``share_input_casts`` in memory."""
    forget: Callable[[], None] | None = getattr(mlp, "forget_casts", None)
    if forget is None:
        return forward

    def forward_piece(x: torch.Tensor) -> torch.Tensor:
        try:
            return forward(x)
        finally:
            forget()

    return forward_piece


def _takes_one_tensor(module: nn.Module) -> bool:
    arguments = [*inspect.signature(type(module).forward).parameters.values()][1:]
    return sum(argument.default is argument.empty for argument in arguments) == 1


def _consists_of_linears(module: nn.Module) -> bool:
    """Whether all weights belong to matrices, with or without adapters, or to norms."""
    matrix_parts: set[nn.Module] = set()
    num_matrices = 0
    for part in module.modules():
        is_matrix = isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
        if part in matrix_parts:
            continue
        if is_matrix or hasattr(part, "base_layer"):
            matrix_parts |= set(part.modules())
            num_matrices += 1
        elif not _NORM_CLASS.search(type(part).__name__) and (part._parameters or part._buffers):
            return False
    return num_matrices > 1


@exclude_from_recompute
def _run_pieces(forward: Forward, x: torch.Tensor, piece_tokens: int) -> torch.Tensor:
    out = None
    for start in range(0, x.shape[-2], piece_tokens):
        part = forward(x.narrow(-2, start, min(piece_tokens, x.shape[-2] - start)))
        if out is None:
            out = part.new_empty((*x.shape[:-1], part.shape[-1]))
        out.narrow(-2, start, part.shape[-2]).copy_(part)
        del part
    assert out is not None, "x has no tokens"
    return out


class _KeepInput(torch.autograd.Function):
    """Identity that saves its input for the MLP after it.

    A function's own tensors are saved when its forward has ended. This input is saved earlier, so a
    block that is recomputed has all that it needs and stops without computing its MLP.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad


class _ForwardInPieces(torch.autograd.Function):
    """``forward(x)`` in pieces of ``piece_tokens`` tokens; ``weights`` are its trained weights.

    Weights are not saved: FSDP2 gathers them into the same parameters for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, piece_tokens: int, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.forward_piece, ctx.piece_tokens, ctx.weights = forward, piece_tokens, weights
        ctx.keeper = x.grad_fn
        if ctx.keeper is None:
            ctx.save_for_backward(x)
        device_type = x.device.type
        ctx.autocast = {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "enabled": torch.is_autocast_enabled(device_type),
        }
        return _run_pieces(forward, x, piece_tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = (ctx if ctx.keeper is None else ctx.keeper).saved_tensors
        grad_x = torch.empty_like(x) if ctx.keeper is not None else None
        sums: list[torch.Tensor | None] = [None] * len(ctx.weights)
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            for start in range(0, x.shape[-2], ctx.piece_tokens):
                bounds = -2, start, min(ctx.piece_tokens, x.shape[-2] - start)
                piece = x.detach().narrow(*bounds).requires_grad_(grad_x is not None)
                inputs = [*([piece] if grad_x is not None else []), *ctx.weights]
                grads = list(
                    torch.autograd.grad(
                        ctx.forward_piece(piece), inputs, grad.narrow(*bounds), allow_unused=True
                    )
                )
                if grad_x is not None:
                    grad_x.narrow(*bounds).copy_(grads.pop(0))
                _add_in_fp32(sums, grads)
                del grads
        grad_weights = (
            total if total is None else total.to(weight.dtype)
            for total, weight in zip(sums, ctx.weights, strict=True)
        )
        return None, None, grad_x, *grad_weights


@torch.no_grad()
def _add_in_fp32(sums: list[torch.Tensor | None], grads: Iterable[torch.Tensor | None]) -> None:
    for number, grad in enumerate(grads):
        if grad is not None:
            total = sums[number]
            sums[number] = grad.float() if total is None else total.add_(grad)
