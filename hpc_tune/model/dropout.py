"""Dropout that does not depend on how rows are spread over ranks and micro-batches.

A mask is a function of (seed, row of the global stream, layer), so a run that resumes with another
number of ranks, micro-batch size or engine drops the same values; a rank that holds a slice of the
features applies its slice of the mask. On a GPU, random numbers depend on the size of the tensor,
so rows must also be padded to the same width there; packed rows mostly are.
"""

import hashlib
import re
from typing import Any

import torch
from torch import nn

from hpc_tune.model.loss import LossModel
from hpc_tune.model.micro_batch import batch_context


class RowDropout(nn.Module):
    """Sets values to 0 with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float, seed: int, layer: str) -> None:
        super().__init__()
        self.p, self._key = p, f"{seed} {layer}"
        self._slice_index, self._num_slices = 0, 1

    def set_feature_slice(self, slice_index: int, num_slices: int) -> None:
        """Treat inputs as slice ``slice_index`` of ``num_slices`` of the features."""
        self._slice_index, self._num_slices = slice_index, num_slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values of ``x``, whose first dimension is rows, or rows times tokens."""
        if not self.training:
            return x
        rows, sharing = batch_context.batch.rows, batch_context.batch.row_sharing
        num_tokens = x.shape[:-1].numel() // len(rows) * (sharing.part.size if sharing else 1)
        mask = x.new_empty(len(rows), num_tokens, x.shape[-1] * self._num_slices)
        for row, row_mask in zip(rows, mask, strict=True):
            row_mask.bernoulli_(1 - self.p, generator=row_generator(self._key, row, x.device))
        # Copies, so that the backward pass keeps this rank's part of the mask instead of all.
        if sharing:
            mask = sharing.part.shard_to_rank(mask).clone()
        mask = mask.reshape(*x.shape[:-1], -1)
        if self._num_slices > 1:
            mask = mask.chunk(self._num_slices, -1)[self._slice_index].contiguous()
        return x * mask.div_(1 - self.p)


def row_generator(key: str, row: int, device: torch.device) -> torch.Generator:
    """Return a random generator for a row of the global stream; ``key``: seed and purpose."""
    digest = hashlib.blake2b(f"{key} {row}".encode(), digest_size=7)
    return torch.Generator(device).manual_seed(int(digest.hexdigest(), 16))


def use_row_dropout(model: nn.Module, seed: int) -> None:
    """Replace every ``nn.Dropout`` of the adapters in ``model``."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleDict) and path.endswith(".lora_dropout"):
            for name, inner in module.items():
                if isinstance(inner, nn.Dropout):
                    module[name] = RowDropout(inner.p, seed, f"{path}.{name}")


def disable_dropout(config: Any) -> dict[str, float]:
    """Set a transformers configuration's own dropout to 0; return what it was, by name.

    Such models draw their masks per micro-batch, so the loss would depend on the number of ranks.
    """
    dropout_rates: dict[str, float] = {}
    for part in (config, getattr(config, "text_config", None)):
        for name, value in list(vars(part).items()) if part is not None else ():
            is_dropout = re.search("dropout|pdrop|layerdrop|drop_rate", name)
            if is_dropout and isinstance(value, float) and value > 0:
                dropout_rates[name] = value
                setattr(part, name, 0.0)
    return dropout_rates


# -- Noise on the embeddings of training (NEFTune, arXiv:2310.05914), whatever the layout.
#
#     e + noise, uniform in ± alpha / sqrt(T x D)
#
# T is the number of tokens of the document (a packed row has several documents), without padding,
# which other tools count if they do not pack. The noise is a function of (seed, row of the global
# stream, position in it), like the masks of ``RowDropout``.
#
# Shapes: B rows, T tokens, D values of an embedding.


class EmbeddingNoise:
    """A forward hook of an embedding; if that is tensor-parallel, its output is whole by then."""

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._key = alpha, f"{seed} neftune"

    def __call__(self, module: nn.Module, _: object, embeddings_BTD: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, with noise in training."""
        batch, sharing = batch_context.batch, batch_context.batch.row_sharing
        if not module.training or batch.positions_BT is None:
            return embeddings_BTD
        num_rows, num_local, width = embeddings_BTD.shape
        shape = num_rows, num_local * (sharing.part.size if sharing else 1), width
        noise_BTD = torch.empty(shape, device=embeddings_BTD.device)
        for row, noise_TD in zip(batch.rows, noise_BTD, strict=True):
            noise_TD.uniform_(-1, 1, generator=row_generator(self._key, row, noise_TD.device))
        if sharing:
            noise_BTD = sharing.part.shard_to_rank(noise_BTD)
            lengths_BT = sharing.part.shard_to_rank(
                batch.whole_row_document_starts.document_lengths_BT()
            )
        else:
            lengths_BT = document_lengths(batch.positions_BT)
        scale_BT = self._alpha / (width * lengths_BT).float().sqrt()
        noise_BTD = noise_BTD * scale_BT.unsqueeze(-1)
        return embeddings_BTD + noise_BTD.to(embeddings_BTD.dtype)


def document_lengths(positions_BT: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens in each token's document, without a device sync."""
    positions_BT = positions_BT.long()
    document_BT = (positions_BT == 0).cumsum(1)
    last_BT = positions_BT.new_zeros(positions_BT.shape[0], positions_BT.shape[1] + 1)
    last_BT.scatter_reduce_(1, document_BT, positions_BT, "amax")
    return last_BT.gather(1, document_BT) + 1


def use_neftune(module: LossModel, alpha: float | None, seed: int) -> None:
    """Let the embedding of a model add noise, unless ``alpha`` is None."""
    if alpha is not None:
        embedding = module.causal_lm().get_input_embeddings()
        embedding.register_forward_hook(EmbeddingNoise(alpha, seed))
