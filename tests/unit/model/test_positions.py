"""Positions and dropout that would depend on what is beside a text in its micro-batch."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.schema import RunConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import ReadOptions
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.rotary import has_length_dependent_scaling
from hpc_tune.train.model import Model, with_scaled_positions
from tests.support.data import byte_tokenizer, write_jsonl
from tests.unit.model.test_model_build import FAMILY, documents, our_loss, row, stock_loss
from tests.unit.train.test_data_inputs import ALONE

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 3.0, 7.0, 15.0],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def written(directory, kind, **said):
    torch.manual_seed(0)
    if kind == "phi3":  # else its own 4,096 take the place of what rope_parameters say
        said["original_max_position_embeddings"] = LONGROPE["original_max_position_embeddings"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**FAMILY, **said}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return directory


def ours(directory, seq_len):
    built = build(directory, torch.float32, TuneConfig(method="full"), 0)
    built = dataclasses.replace(built, seq_len=seq_len)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return built.module


@pytest.mark.parametrize(
    ("rope", "longest", "lengths"),
    [(LONGROPE, 16, (9, 16, 5)), (LONGROPE, 48, (20, 48, 30)), (DYNAMIC, 64, (20, 64, 30))],
)
def test_each_text_has_the_loss_that_transformers_has_for_that_length(
    tmp_path, rope, longest, lengths
):
    """Up to 16 tokens the short factors, behind it the long ones; each text by itself."""
    kind = "phi3" if rope is LONGROPE else "llama"
    directory = written(tmp_path, kind, rope_parameters=dict(rope))
    docs = documents(128, lengths)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wanted = stock_loss(stock, docs)
    module = ours(directory, longest)
    assert our_loss(module, *(row(doc) for doc in docs)) == pytest.approx(wanted, rel=1e-5)


def test_positions_are_scaled_for_the_longest_text_of_pairs_not_for_both_together(tmp_path, caplog):
    """A row of 32 tokens holds two texts of 16, which have the short factors."""
    said = {"max_position_embeddings": 16, "rope_parameters": dict(LONGROPE)}
    directory = written(tmp_path / "model", "phi3", **said)
    rows = [{"prompt": "0123456", "chosen": "yes, yes", "rejected": "no"}]
    source, out = write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "p.h5"
    prepare_data(
        str(source),
        out,
        byte_tokenizer(None),
        PrepareSettings(32, reading=ReadOptions(form="pairs")),
    )
    store = TokenStore.open(out)
    assert (store.longest_side_tokens(), int(store.length_values[-1])) == (16, 26)
    factors = {}
    for objective in ("sft", "dpo"):
        tune = {"objective": objective, "method": "full"}
        config = RunConfig.model_validate({"model": {"path": str(directory)}, "tune": tune})
        built = build(directory, torch.float32, config.tune, 0)
        built = dataclasses.replace(built, seq_len=32)
        model = with_scaled_positions(Model(built, None, config), [store], ALONE)
        factors[objective] = frequencies(model.built)
    expected = [1e4 ** (-i / 4) / LONGROPE["short_factor"][i] for i in range(4)]
    assert factors["dpo"].tolist() == pytest.approx(expected)
    expected = [1e4 ** (-i / 4) / LONGROPE["long_factor"][i] for i in range(4)]
    assert factors["sft"].tolist() == pytest.approx(expected)
    assert "longer than the model's" not in caplog.text
    crowded = dataclasses.replace(
        built, config=AutoConfig.for_model("llama", max_position_embeddings=15)
    )
    with_scaled_positions(Model(crowded, None, config), [store], ALONE)
    assert "texts of up to 16 tokens, the longest answer with its prompt, are longer" in caplog.text


def frequencies(built):
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    (found,) = {
        rotary
        for rotary in built.module.modules()
        if getattr(rotary, "rope_type", None) is not None
    }
    return found.inv_freq.clone()


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_a_texts_loss_does_not_know_what_is_beside_it(tmp_path, rope):
    said = {"max_position_embeddings": 16} if rope is DYNAMIC else {}
    kind = "phi3" if rope is LONGROPE else "llama"
    directory = written(tmp_path, kind, rope_parameters=dict(rope), **said)
    docs = documents(128, (12, 40, 30))
    module = ours(directory, 48)
    assert has_length_dependent_scaling(module.config)
    together = our_loss(module, *(row(doc) for doc in docs))
    alone = sum(our_loss(module, row(doc)) for doc in docs)
    again = sum(our_loss(module, row(doc)) for doc in reversed(docs))
    assert together == pytest.approx(alone, rel=1e-6)
    assert again == pytest.approx(alone, rel=1e-7)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.1}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.2}),
    ],
)
def test_the_base_models_own_dropout_is_off_and_told(tmp_path, kind, said):
    directory = written(tmp_path, kind, **said)
    built = build(directory, torch.float32, TuneConfig(method="full"), 0)
    assert {0.1} <= set(built.dropout.values())
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    docs = documents(128, (9, 16))
    assert built.module.training
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert our_loss(built.module, *map(row, docs)) == pytest.approx(
        stock_loss(stock, docs), rel=1e-6
    )
