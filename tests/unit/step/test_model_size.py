from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_tune.model.experts import ROUTED_EXPERTS
from hpc_tune.plan.hardware import peak_flops
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import (
    ModelSize,
    WeightGroup,
    attention_flops,
    flops_per_token,
    max_activation_bytes,
    measure_model_size,
    static_bytes,
    weight_flops_per_token,
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_and_bytes_are_counted_by_dtype_and_tied_ones_once(device):
    with torch.device(device):
        model = nn.Module()
        model.embed = nn.Embedding(10, 4)  # 40, fp32
        model.head = nn.Linear(4, 10, bias=False)
        model.head.weight = model.embed.weight
        model.base = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)  # 20, bf16
    assert measure_model_size(model) == ModelSize(20, 40, 20 * 2, 40 * 4)
    assert measure_model_size(model).num_parameters == 60


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        # 100 fp32 values: weight 4, gradient 4, two moments 8 = 16 bytes each
        (Layout(1, 1), 1600),
        (Layout(8, 1), 1600),
        (Layout(1, 4), 400),
        (Layout(2, 4), 400),
    ],
)
def test_full_fine_tuning_takes_16_bytes_a_value_divided_by_the_shards(layout, num_bytes):
    assert static_bytes(ModelSize(0, 100, 0, 400), layout) == num_bytes


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [(Layout(1, 1), 2000 + 160), (Layout(4, 1), 2000 + 160), (Layout(1, 4), 500 + 160)],
)
def test_a_frozen_base_is_divided_and_adapters_stay_whole(layout, num_bytes):
    assert static_bytes(ModelSize(1000, 10, 2000, 40), layout) == num_bytes


def test_adapters_on_experts_are_spread_with_them():
    routed = WeightGroup("blocks", "whole", True, False, 8, 32, ROUTED_EXPERTS)
    size = ModelSize(1000, 10, 2000, 40, weights=(routed,))
    # Of ten values with adapters 8 are on experts, of which a rank has a half, or a fourth.
    for expert, held in ((1, 10), (2, 6), (4, 4)):
        assert static_bytes(size, Layout(1, 4, expert=expert)) == 500 + 16 * held


def test_shards_of_what_they_do_not_divide_are_as_large_as_the_largest():
    """6 experts over 4 ranks: 2 each, 8 in all; of spread ones another dimension is divided."""
    routed = WeightGroup(
        "blocks", "whole", True, False, 6 * 40, 960, ROUTED_EXPERTS, shape=(6, 8, 5)
    )
    rest = WeightGroup("blocks", "whole", True, False, 80, 320, shape=(8, 10))
    size = ModelSize(0, 320, 0, 1280, weights=(routed, rest))
    copies = 4  # gradients and two moments
    assert static_bytes(size, Layout(1, 4)) == copies * (960 // 6 * 2 + 320 // 4)
    assert static_bytes(size, Layout(1, 8, expert=2)) == copies * (960 // 8 + 320 // 8)
    assert static_bytes(size, Layout(1, 2)) == copies * 1280 // 2


def config(tied):
    return SimpleNamespace(
        tie_word_embeddings=tied, vocab_size=10, hidden_size=4, num_hidden_layers=3
    )


@pytest.mark.parametrize(
    ("size", "tied", "flops"),
    [
        # attention: 6 x 3 layers x hidden 4 x 5 tokens = 360
        (ModelSize(0, 1000, 0, 0), True, 6 * 1000 + 360),
        (ModelSize(0, 1000, 0, 0), False, 6 * (1000 - 40) + 360),
        (ModelSize(1000, 10, 0, 0), True, 4 * 1000 + 6 * 10 + 360),
        (ModelSize(1000, 10, 0, 0), False, 4 * (1000 - 40) + 6 * 10 + 360),
    ],
)
def test_the_flops_of_a_token_are_those_of_the_products(size, tied, flops):
    assert flops_per_token(size, config(tied), 5) == flops
    assert weight_flops_per_token(size, config(tied)) == flops - 360


@pytest.mark.parametrize(("is_trained", "each"), [(True, 6), (False, 4)])
def test_of_the_experts_of_a_layer_those_of_a_token_count(is_trained, each):
    """Of 800 values on four experts a token goes through 200."""
    routed = WeightGroup("blocks", "whole", is_trained, False, 800, 3200, ROUTED_EXPERTS)
    mixture = SimpleNamespace(**vars(config(True)), num_experts=4, num_experts_per_tok=1)
    values = (0, 1000) if is_trained else (1000, 0)
    size = ModelSize(*values, 0, 0, weights=(routed,))
    assert weight_flops_per_token(size, mixture) == each * (200 + 200)


@pytest.mark.parametrize(
    ("said", "lengths", "scores"),
    [
        # The squares of the lengths in each of 3 layers.
        ({}, [5], 3 * 25),
        ({}, [2, 3], 3 * (4 + 9)),
        ({}, [], 0),
        # Of a document of 5 tokens a window of 2 leaves out 3: 25 - 9 = 16, which are twice the
        # 1 + 2 + 2 + 2 + 2 tokens that are looked at, less the half of each that a square lacks.
        ({"sliding_window": 2}, [5], 3 * 16),
        ({"sliding_window": 5}, [5], 3 * 25),
        ({"sliding_window": 9}, [2, 3], 3 * 13),
        (
            {
                "sliding_window": 2,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [5, 1],
            (16 + 1) + (25 + 1) + (16 + 1),
        ),
    ],
)
def test_attention_takes_the_flops_of_the_scores_within_documents(said, lengths, scores):
    model = SimpleNamespace(**vars(config(True)), **said)
    assert attention_flops(model, lengths) == 6 * 4 * scores


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpus_peak_is_found_by_its_name(name, peak):
    assert peak_flops(name) == peak


def test_what_the_experts_of_a_token_keep_is_in_the_bound():
    """Each has rows of 8 hidden values and 4 of 6 inner ones; a layer has 2 for a token."""
    dense = SimpleNamespace(hidden_size=8, num_hidden_layers=3, vocab_size=10)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    mixture = SimpleNamespace(**vars(dense), **experts)
    more = max_activation_bytes(mixture, 5) - max_activation_bytes(dense, 5)
    assert more == 5 * 3 * 2 * 4 * (3 * 8 + 4 * 6)
