"""Per-token losses, computed without a whole batch's logits; objective.py sums them.

Shapes: B rows, T tokens, D hidden, N tokens that carry loss, V vocabulary.

Only positions with a label reach the output head, in chunks whose fp32 logits stay under a bound.
With a frozen head, each chunk's logits are overwritten on the way to the gradient of the hidden
states, and none are kept. With a trained head, the backward pass recomputes them chunk by chunk.
torch 2.13's ``linear_cross_entropy`` does that too, but ignores autocast: it would compute in fp32,
reject hidden states and weights of different dtypes, and round losses to 16 bits.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpc_tune.batch import IGNORED_LABEL, Batch, read_document_lengths
from hpc_tune.model.balance import RouterWatch, real_token_mask
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.objective import Objective, TokenSum
from hpc_tune.model.packed_attention import make_documents
from hpc_tune.model.shared_rows import SharedRows, shard_documents
from hpc_tune.model.varlen_attention import DocumentParts, make_document_starts

# For a frozen head: bytes of logits per matmul, and of logits converted to fp32 at once. A CPU's
# matmuls then rarely reread the weights, and the steps after them stay in cache; a GPU needs many
# rows to be busy.
LOGITS_BYTES = {"cuda": (256 << 20, 512 << 20), "cpu": (24 << 20, 2 << 20)}
TRAINED_HEAD_LOGITS_BYTES = 512 << 20
MIN_CHUNK_TOKENS = 128
TokenLoss = Callable[[torch.Tensor, Any, torch.Tensor, Any], torch.Tensor]  # [N]
InPlaceExponentials = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
# transformers separates the documents of a row by positions; these families need a mask for it.
_FAMILIES_NEEDING_MASK = ("biogpt", "falcon", "opt")
# Fields of config.json that change logits. Granite divides by its factor, HyperCLOVA X multiplies.
_LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)


def cross_entropies(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each label in fp32 [N], whatever the dtype of the logits."""
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="none")


def write_exponentials(
    logits_SV: torch.Tensor, labels_S1: torch.Tensor, loss_S1: torch.Tensor, sums_S1: torch.Tensor
) -> None:
    """Replace logits by exp(logit - max), minus the row's sum at the label; write losses and sums.

    Computed in fp32, rounded once.
    """
    exp_SV = logits_SV.float()
    largest_S1 = exp_SV.amax(1, keepdim=True)
    label_S1 = exp_SV.gather(1, labels_S1)
    torch.sum(exp_SV.sub_(largest_S1).exp_(), 1, keepdim=True, out=sums_S1)
    torch.add(sums_S1.log() + largest_S1, label_S1, alpha=-1, out=loss_S1)
    exp_SV.scatter_add_(1, labels_S1, -sums_S1)
    if exp_SV is not logits_SV:
        logits_SV.copy_(exp_SV)


def write_fusible_exponentials(
    logits_SV: torch.Tensor, labels_S1: torch.Tensor, loss_S1: torch.Tensor, sums_S1: torch.Tensor
) -> None:
    """Do the same as ``write_exponentials`` in operations that a compiler fuses into one kernel."""
    fp32_SV = logits_SV.float()
    largest_S1 = fp32_SV.amax(1, keepdim=True)
    exp_SV = (fp32_SV - largest_S1).exp()
    sum_S1 = exp_SV.sum(1, keepdim=True)
    sums_S1.copy_(sum_S1)
    loss_S1.copy_(sum_S1.log() + largest_S1 - logits_SV.gather(1, labels_S1).float())
    is_label_SV = torch.arange(logits_SV.shape[1], device=logits_SV.device) == labels_S1
    logits_SV.copy_(torch.where(is_label_SV, exp_SV - sum_S1, exp_SV))


@dataclass(frozen=True)
class LogitsKernels:
    """The functions that are applied to logits; compiled ones take the same arguments."""

    exponentials: InPlaceExponentials = write_exponentials
    cross_entropies: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropies


EAGER_KERNELS = LogitsKernels()


class LossModel(nn.Module):
    """A causal LM whose forward takes a ``Batch`` and returns the fp32 sums of its objective.

    It is the root that engines shard, compile and run; ``model`` is the transformers model, or the
    peft model around one. ``uses_document_attention``: attention may run document by document. On a
    GPU, ``has_varlen_kernel``: it uses a kernel for documents; ``kernel_has_windows``: also in
    layers with a sliding window. ``row_sharing``: how ranks share rows, if they do: batches then
    hold only this rank's tokens.
    """

    def __init__(
        self, model: nn.Module, config: Any, uses_document_attention: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.uses_document_attention, self.has_varlen_kernel = uses_document_attention, False
        self.kernel_has_windows = True
        self.is_first_stage = self.is_last_stage = True
        self.token_loss: TokenLoss = compute_chunk_losses
        self.logits_kernels = EAGER_KERNELS
        self.objective: Objective = TokenSum()
        self.router_watch: RouterWatch | None = None
        self.row_sharing: SharedRows | None = None
        # A plan sets this to the value for the device that it plans for.
        self.logits_bytes: tuple[int, int] | None = None
        self.head_unit: HeadUnit | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether the family separates documents only by a mask, not by positions."""
        is_listed = self.config.model_type in _FAMILIES_NEEDING_MASK
        return is_listed and not getattr(self.config, "alibi", False)

    def causal_lm(self) -> Any:
        """Return the transformers model, with or without adapters inside its layers."""
        inner: Any = self.model
        return inner.base_model.model if hasattr(inner, "peft_config") else inner

    def forward(self, batch: Batch, hidden_BTD: torch.Tensor | None = None) -> torch.Tensor:
        """Return the objective's sums over the batch; the first one is the loss.

        A later pipeline stage starts from the previous stage's ``hidden_BTD``. Every stage but the
        last returns its hidden states instead.
        """
        lm = self.causal_lm()
        micro_batch = replace(
            self._make_micro_batch(batch), positions_BT=batch.positions_BT, recompute_cache={}
        )
        count_first_pass: AbstractContextManager[None] = nullcontext()
        if self.router_watch is not None and self.training:
            micro_batch = replace(micro_batch, is_real_BT=real_token_mask(batch, self.row_sharing))
            count_first_pass = self.router_watch.count_first_pass()
        with batch_context.use_batch(micro_batch), count_first_pass:
            out_BTD: torch.Tensor = find_decoder(lm)(
                input_ids=batch.tokens_BT if self.is_first_stage else None,
                inputs_embeds=None if self.is_first_stage else hidden_BTD,
                position_ids=batch.positions_BT,
                attention_mask=self._document_mask(batch.positions_BT),
                use_cache=False,
            ).last_hidden_state
        if not self.is_last_stage:
            return out_BTD
        labels_K = batch.labels_BT.flatten()
        loss_positions_N = torch.nonzero_static(
            labels_K != IGNORED_LABEL, size=batch.num_loss_tokens
        ).squeeze(1)
        compute_losses = functools.partial(
            token_losses,
            head=lm.get_output_embeddings(),
            labels_N=labels_K[loss_positions_N],
            config=self.config,
            token_loss=self.token_loss,
            logits_bytes=self.logits_bytes,
            kernels=self.logits_kernels,
        )
        hidden_ND = out_BTD.flatten(0, 1)[loss_positions_N]
        unit = self.head_unit
        losses_N = compute_losses(hidden_ND) if unit is None else unit(hidden_ND, compute_losses)
        if self.row_sharing is None:
            return self.objective.sums(losses_N, batch)
        sums = self.objective.sums(losses_N, batch, self.row_sharing.sum_over_ranks)
        # All ranks that share an answer compute the same sums for it; only one counts them.
        is_counted = batch.pairs is None or self.row_sharing.part.rank == 0
        return sums if is_counted else sums - sums.detach()

    def _make_micro_batch(self, batch: Batch) -> MicroBatch:
        lengths, positions_BT = batch.document_lengths, batch.positions_BT
        if self.row_sharing is not None:
            starts = make_document_starts(lengths, positions_BT.device, self.kernel_has_windows)
            micro_batch = MicroBatch(
                batch.rows, row_sharing=self.row_sharing, whole_row_document_starts=starts
            )
            if self.row_sharing.part.is_head_tail:
                micro_batch = replace(
                    micro_batch,
                    document_parts_by_rank=self._split_documents_by_rank(batch, self.row_sharing),
                )
            if self.has_varlen_kernel:
                return replace(micro_batch, starts=starts)
            if self.uses_document_attention and positions_BT.device.type == "cpu":
                return replace(micro_batch, documents=make_documents(lengths))
            return micro_batch
        if self.has_varlen_kernel and lengths:  # reading positions would wait for the device
            starts = make_document_starts(lengths, positions_BT.device, self.kernel_has_windows)
            return MicroBatch(batch.rows, starts=starts)
        if self.uses_document_attention and positions_BT.device.type == "cpu":
            return MicroBatch(
                batch.rows, make_documents(lengths or read_document_lengths(positions_BT))
            )
        return MicroBatch(batch.rows)

    def _split_documents_by_rank(
        self, batch: Batch, row_sharing: SharedRows
    ) -> dict[int, DocumentParts]:
        parts_by_rank = {}
        for rank in row_sharing.ranks:
            parts = shard_documents(batch.document_lengths, replace(row_sharing.part, rank=rank))
            if self.has_varlen_kernel:
                parts_by_rank[rank] = DocumentParts.from_parts(parts, batch.positions_BT.device)
            else:
                parts_by_rank[rank] = DocumentParts(parts)
        return parts_by_rank

    def _document_mask(self, positions_BT: torch.Tensor) -> torch.Tensor | None:
        """Return a B1TT mask, true where a token may attend, for families that need one."""
        if not self.needs_mask:
            return None
        document_BT = (positions_BT == 0).cumsum(1)
        same_BTT = document_BT.unsqueeze(2) == document_BT.unsqueeze(1)
        return same_BTT.tril().unsqueeze(1)


class HeadUnit(nn.Module):
    """``token_losses`` as a module that holds the head, so that engines gather the head's weights.

    Losses use these weights both by calling the head and directly. An engine that knows the weights
    may delete ``head``, because it is also a part of the model.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, hidden_ND: torch.Tensor, compute_losses: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``compute_losses(hidden_ND)``; its other arguments must be bound already.

        FSDP2 searches a unit's arguments for tensors, even the fields of a config, and transformers
        raises an error when a field that differs by layer is read.
        """
        return compute_losses(hidden_ND)


def find_decoder(lm: Any) -> Any:
    """Return a causal LM's decoder, without its head."""
    decoder = lm.get_decoder()
    # transformers does not find Llama 4's decoder, alone or within the whole model.
    return decoder.model if decoder is lm or hasattr(decoder, "lm_head") else decoder


def compute_chunk_losses(
    hidden_ND: torch.Tensor,
    head: Any,
    labels_N: torch.Tensor,
    config: Any,
    kernels: LogitsKernels = EAGER_KERNELS,
) -> torch.Tensor:
    """Return the cross-entropies of a few tokens from their logits, fp32 [N]."""
    logits_NV = head(hidden_ND)
    if _has_logit_scale(config):
        logits_NV = scale_logits(logits_NV.float(), config)
    return kernels.cross_entropies(logits_NV, labels_N)


def token_losses(
    hidden_ND: torch.Tensor,
    head: Any,
    labels_N: torch.Tensor,
    config: Any,
    token_loss: TokenLoss = compute_chunk_losses,
    logits_bytes: tuple[int, int] | None = None,
    kernels: LogitsKernels = EAGER_KERNELS,
) -> torch.Tensor:
    """Return the cross-entropy of each of ``labels_N`` under ``head(hidden_ND)``, fp32 [N].

    ``token_loss`` computes it for as many tokens as may have their logits in memory at once.
    ``logits_bytes`` bounds a frozen head's logits: per matmul, and in fp32. The default is the
    fastest for each device type.
    """
    is_plain = token_loss is compute_chunk_losses and _is_plain_head(head, config)
    num_tokens, bytes_per_token = hidden_ND.shape[0], 4 * config.vocab_size
    if is_plain and not any(parameter.requires_grad for parameter in head.parameters()):
        product_bytes, fp32_bytes = logits_bytes or LOGITS_BYTES[hidden_ND.device.type]
        chunk = max(
            MIN_CHUNK_TOKENS, product_bytes // (config.vocab_size * head.weight.dtype.itemsize)
        )
        losses_N: torch.Tensor = _FrozenHeadLoss.apply(
            hidden_ND,
            head.weight,
            head.bias,
            labels_N,
            chunk,
            max(1, fp32_bytes // bytes_per_token),
            kernels.exponentials,
        )
        return losses_N
    if token_loss is compute_chunk_losses:
        token_loss = functools.partial(compute_chunk_losses, kernels=kernels)
    chunk = max(MIN_CHUNK_TOKENS, TRAINED_HEAD_LOGITS_BYTES // bytes_per_token)
    if num_tokens <= chunk:
        return token_loss(hidden_ND, head, labels_N, config)
    parts = (slice(start, start + chunk) for start in range(0, num_tokens, chunk))
    return torch.cat(
        [
            checkpoint(token_loss, hidden_ND[p], head, labels_N[p], config, use_reentrant=False)
            for p in parts
        ]
    )


class _FrozenHeadLoss(torch.autograd.Function):
    """Losses of N tokens; the forward pass also computes the gradients of their hidden states.

    The logits of C tokens are exponentiated in place, S tokens at a time in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        chunk_tokens: int,
        num_fp32_tokens: int,
        exponentials: InPlaceExponentials,
    ) -> torch.Tensor:
        losses_N = hidden_ND.new_empty(len(labels_N), dtype=torch.float32)
        loss_N1 = losses_N.unsqueeze(1)
        sums_N1 = torch.empty_like(loss_N1)
        grad_ND = torch.empty_like(hidden_ND, dtype=torch.float32)
        num_tokens = hidden_ND.shape[0]
        # Full size even for few tokens: blocks of many sizes would fragment the heap.
        buffer_CV = hidden_ND.new_empty(chunk_tokens, weight_VD.shape[0])
        for start in range(0, num_tokens, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_CV = buffer_CV[: len(labels_N[part])]
            torch.mm(hidden_ND[part], weight_VD.t(), out=logits_CV)
            if bias_V is not None:
                logits_CV += bias_V
            for logits_SV, labels_S, loss_S1, sums_S1 in zip(
                *(
                    t.split(num_fp32_tokens)
                    for t in (logits_CV, labels_N[part], loss_N1[part], sums_N1[part])
                ),
                strict=True,
            ):
                exponentials(logits_SV, labels_S.unsqueeze(1), loss_S1, sums_S1)
            if ctx.needs_input_grad[0]:
                # (softmax - one-hot) W; the softmax's sum divides the C x D result, not C x V.
                grad_ND[part] = (logits_CV @ weight_VD) / sums_N1[part]
        ctx.save_for_backward(grad_ND)
        ctx.dtype = hidden_ND.dtype
        return losses_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> Any:  # type: ignore[override]
        (grad_ND,) = ctx.saved_tensors
        return (grad_ND * grad_N.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None, None


def scale_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Scale and cap logits after the head, as some families do (Cohere, Granite, Gemma 2)."""
    for name in _LOGIT_FACTORS:
        if factor := getattr(config, name, None):
            divides = (
                name == "logits_scaling" and config.model_type not in _LOGITS_SCALING_MULTIPLIES
            )
            logits = logits / factor if divides else logits * factor
    for name in _LOGIT_CAPS:
        if cap := getattr(config, name, None):
            logits = torch.tanh(logits / cap) * cap
    return logits


def _is_plain_head(head: Any, config: Any) -> bool:
    """Whether ``head`` is a plain matrix, not sliced, without trained rows, its logits unscaled."""
    return (
        type(head) is nn.Linear
        and not hasattr(head, "rows_of")
        and head.weight.shape == (config.vocab_size, head.in_features)
        and not _has_logit_scale(config)
    )


def _has_logit_scale(config: Any) -> bool:
    return any(getattr(config, name, None) for name in (*_LOGIT_FACTORS, *_LOGIT_CAPS))
