"""Adapters on the output head of an untied model: in slices, in stages, or refused."""

import threading
import zlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.pipeline_parallel import split_into_stages
from hpc_tune.engine.tensor_parallel import slice_model
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.slices import find_tensor_roles
from hpc_tune.train.startup.architecture_check import (
    ThreadAxis,
    _make_batch,
    _random_documents,
    find_differing_gradient,
    merge_gradients,
)

TARGETS = (["lm_head"], ["q_proj", "lm_head"], ["down_proj", "lm_head"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258}
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def built_for(base, targets):
    return build(base, torch.float32, TuneConfig(rank=4, targets=targets), 0)


def loaded(built):
    """Load a model; B gets random values, which depend on its name alone."""
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    for name, parameter in built.module.named_parameters():
        if "lora_B" in name:
            (region,) = built.regions(name, parameter)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.randn(region.full_shape, generator=generator)
            box = zip(region.offset, region.values.shape, strict=True)
            region.values.copy_(0.1 * full[tuple(slice(o, o + n) for o, n in box)])
    return built


@pytest.mark.parametrize("targets", TARGETS)
def test_two_slices_have_the_loss_and_the_gradients_of_the_whole(base, targets):
    batch = _make_batch([[tokens_T] for tokens_T in _random_documents()])
    whole = loaded(built_for(base, targets)).module
    wanted = whole(batch)
    wanted.backward()
    built = [built_for(base, targets) for _ in range(2)]
    shared, barrier = [None, None], threading.Barrier(2, timeout=60)
    models, losses = [None, None], [0.0, 0.0]

    def work(rank):
        try:
            sliced, partial = slice_model(built[rank], ThreadAxis(rank, shared, barrier))
            sliced.module.uses_document_attention = False  # its state is shared by all threads
            loss = loaded(sliced).module(batch)
            loss.backward()
            models[rank], losses[rank] = (sliced, partial), loss.item()
        except Exception:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    with batch_context.use_batch(MicroBatch(batch.rows, positions_BT=batch.positions_BT)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert losses == pytest.approx([wanted.item()] * 2, rel=1e-5)
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in gradients)
    joined = merge_gradients(models)
    assert not find_differing_gradient(models)
    assert joined.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(joined[name], gradient, rtol=1e-3, atol=1e-5), name


def test_a_plan_counts_the_heads_adapters_as_they_are_sliced(base):
    module = built_for(base, ["lm_head"]).module
    roles = {
        n: find_tensor_roles(module).get(p) for n, p in module.named_parameters() if "lm_head" in n
    }
    assert {name.rpartition("lm_head.")[2]: role for name, role in roles.items()} == {
        "base_layer.weight": "slice",
        "lora_A.default.weight": "partial",
        "lora_B.default.weight": "slice",
    }


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_dropout_before_a_heads_adapter_is_refused(base, method):
    tune = TuneConfig(method=method, rank=4, targets=["q_proj", "lm_head"], dropout=0.1)
    with pytest.raises(ConfigError, match=r"tune.dropout=0.1 .*set tune.dropout=0, or leave"):
        build(base, torch.float32, tune, 0)


@pytest.mark.parametrize(
    ("targets", "stages_per_rank", "empty"),
    [
        (["lm_head"], 1, "stage 1 of 2"),
        (["layers.0.self_attn.q_proj"], 1, "stage 2 of 2"),
        (["layers.0.self_attn.q_proj", "lm_head"], 2, "stage 2 of 4"),
    ],
)
def test_targets_that_leave_a_stage_without_anything_to_train_are_refused(
    base, targets, stages_per_rank, empty
):
    built = built_for(base, targets)
    for rank in range(2):
        with pytest.raises(ConfigError, match=rf"{empty} \(decoder blocks .*parallel.shard"):
            split_into_stages(built, in_two(built, stages_per_rank), rank)


def in_two(built, stages_per_rank):
    parallel = ParallelConfig(stages_per_rank=stages_per_rank)
    return StepPlan.for_model(built, Layout(1, 1, pipeline=2), parallel)


def test_a_head_is_enough_for_the_last_stage(base):
    built = built_for(base, ["layers.0.self_attn.q_proj", "layers.1.mlp.up_proj", "lm_head"])
    for rank in range(2):
        (stage,) = split_into_stages(built, in_two(built, 1), rank)
        assert any(p.requires_grad for p in stage.module.parameters())
