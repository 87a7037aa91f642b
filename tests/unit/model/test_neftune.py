"""Noise on embeddings against transformers' own hook, and however rows are grouped."""

import math

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from hpc_tune.model.dropout import EmbeddingNoise, document_lengths
from hpc_tune.model.micro_batch import MicroBatch, batch_context

ALPHA, WIDTH = 5.0, 48


def positions(*rows):
    """Positions of rows by the lengths of their documents."""
    return torch.tensor([[p for length in row for p in range(length)] for row in rows])


def noise(rows, positions_BT, seed=0, dtype=torch.float32, training=True):
    embedding = nn.Embedding(7, WIDTH, dtype=dtype).train(training)
    nn.init.zeros_(embedding.weight)
    embedding.register_forward_hook(EmbeddingNoise(ALPHA, seed))
    with batch_context.use_batch(MicroBatch(rows, positions_BT=positions_BT)), torch.no_grad():
        return embedding(torch.zeros_like(positions_BT))


def theirs(num_tokens):
    embedding = nn.Embedding(7, WIDTH)
    nn.init.zeros_(embedding.weight)
    embedding.neftune_noise_alpha = ALPHA
    embedding.register_forward_hook(neftune_post_forward_hook)
    with torch.no_grad():
        return embedding(torch.zeros(1, num_tokens, dtype=torch.long))


@pytest.mark.parametrize("num_tokens", [64, 200])
def test_the_noise_of_one_document_is_distributed_as_that_of_transformers(num_tokens):
    """Of n uniform values, mean and quantiles are known to about 1 / sqrt(n) of the bound."""
    torch.manual_seed(0)
    bound, n = ALPHA / math.sqrt(num_tokens * WIDTH), num_tokens * WIDTH
    for values in (noise([3], positions([num_tokens])), theirs(num_tokens)):
        scaled = (values / bound).double().flatten()
        assert scaled.abs().max() <= 1 + 1e-5
        assert scaled.max() > 1 - 20 / n
        assert scaled.min() < -1 + 20 / n
        assert abs(scaled.mean()) < 4 / math.sqrt(3 * n)
        assert scaled.square().mean() == pytest.approx(1 / 3, abs=4 * 0.3 / math.sqrt(n))
        for share in (0.1, 0.25, 0.75):
            assert scaled.quantile(share) == pytest.approx(2 * share - 1, abs=5 / math.sqrt(n))


def test_the_bound_of_each_document_follows_its_own_tokens():
    found = noise([3], positions([16, 4, 100]))[0]
    for part, length in zip(found.split([16, 4, 100]), (16, 4, 100), strict=True):
        largest = part.abs().max() * math.sqrt(length * WIDTH) / ALPHA
        assert 0.95 < largest <= 1 + 1e-5


def test_the_tokens_of_documents_are_counted_from_positions():
    assert document_lengths(positions([3, 1, 2], [6], [1, 5])).tolist() == [
        [3, 3, 3, 1, 2, 2],
        [6] * 6,
        [1, 5, 5, 5, 5, 5],
    ]
    # A row that goes on with a document that another one has begun.
    assert document_lengths(torch.tensor([[2, 3, 0, 1, 2]])).tolist() == [[4, 4, 3, 3, 3]]


def test_a_row_has_one_noise_in_any_company_and_a_shorter_one_its_beginning():
    positions_BT = positions(*[[20, 12]] * 4)
    together = noise(range(3, 15, 3), positions_BT)
    for number, row in enumerate(range(3, 15, 3)):
        assert torch.equal(together[number], noise([row], positions_BT[:1])[0])
    assert torch.equal(noise([3], positions([20, 5]))[0, :20], together[0, :20])


def test_another_row_or_seed_has_another_noise_and_evaluation_none():
    positions_BT = positions([32])
    first = noise([3], positions_BT)
    assert not torch.equal(first, noise([4], positions_BT))
    assert not torch.equal(first, noise([3], positions_BT, seed=1))
    assert not noise([3], positions_BT, training=False).any()


def test_embeddings_keep_their_dtype():
    assert noise([3], positions([32]), dtype=torch.bfloat16).dtype == torch.bfloat16
