"""Noise on the embeddings of training (NEFTune, arXiv:2310.05914), whatever the layout.

    e + noise, uniform in ± alpha / sqrt(T x D)

T is the tokens of the document, of which a packed row has several; padding, which other tools count
where they do not pack, is no part of it. The noise is a function of (seed, row of the global
stream, position in it) as the masks of ``RowDropout`` are.

Shapes: B rows, T tokens, D values of an embedding.
"""

import torch
from torch import nn

from hpc_tune.model.dropout import row_generator
from hpc_tune.model.loss import LossModel
from hpc_tune.model.scoped import batch_context


class EmbeddingNoise:
    """A forward hook of an embedding. A tensor-parallel one has whole vectors by then."""

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._key = alpha, f"{seed} neftune"

    def __call__(self, module: nn.Module, _: object, embeddings_BTD: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with noise, in training."""
        batch = batch_context.batch
        if not module.training or batch.positions_BT is None:
            return embeddings_BTD
        noise_BTD = torch.empty_like(embeddings_BTD, dtype=torch.float32)
        for row, noise_TD in zip(batch.rows, noise_BTD, strict=True):
            noise_TD.uniform_(-1, 1, generator=row_generator(self._key, row, noise_TD.device))
        values_BT = embeddings_BTD.shape[-1] * document_lengths(batch.positions_BT)
        noise_BTD *= (self._alpha / values_BT.float().sqrt()).unsqueeze(-1)
        return embeddings_BTD + noise_BTD.to(embeddings_BTD.dtype)


def document_lengths(positions_BT: torch.Tensor) -> torch.Tensor:
    """Return of each token how many its document has; the host need not wait for a device."""
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
