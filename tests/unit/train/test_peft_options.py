"""What peft's options do: the same losses as with stock peft, and exports that it loads."""

import json
import math
import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, CohereConfig

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.checkpoint.locate import locate
from hpc_tune.config.load import load_config
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.load import allocate, load_trained_parameters, load_weights, use_init_adapter
from hpc_tune.train.model import _refuse_split_tied_embedding
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.stock_run import stock_losses
from tests.support.training import PREPARED, losses, rows, worst_gap
from tests.support.untied import write_untied

IDS_BT = torch.arange(40, 80).reshape(2, 20)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_untied(tmp_path_factory.mktemp("untied"))


def settings(run_dir, model_dir, *more):
    return load_config(
        None,
        [
            *(f"run.dir={run_dir}", f"model.path={model_dir}", "data.eval_path=null"),
            *("data.path=builtin:pydocs:heldout", "data.seq_len=128", "batch.global_size=4"),
            *("batch.micro_size=2", "train.max_steps=5", "train.seed=3", "optim.lr=1e-3"),
            *("optim.warmup_steps=1", "optim.weight_decay=0.1", "tune.rank=4"),
            *("run.tensorboard=false", "run.report=false", "run.threads=1"),
            f"data.cache={PREPARED}",
            *more,
        ],
    )


def require_stock_losses(config, run_dir, model_dir):
    stock = stock_losses(config, run_dir, model_dir)
    assert worst_gap(losses(run_dir), [loss for loss, _ in stock]) < 1e-5
    norms = rows(run_dir, "grad_norm")
    for step, (_, norm) in enumerate(stock, 1):
        assert norms[step] == pytest.approx(norm, rel=1e-5), step


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT, use_cache=False).logits


def require_equal_exports(config, run_dir, model_dir, folder):
    """Own logits are those of stock peft with the adapter, and of the merged model."""
    trained = locate(run_dir, None)
    built = build(model_dir, torch.float32, config.tune, seed=0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    load_trained_parameters(built, trained.checkpoint)
    own = logits_of(built.module.causal_lm())
    out = export_adapter(trained.checkpoint, config.tune, model_dir, folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain = logits_of(base)
    stock = logits_of(PeftModel.from_pretrained(base, out))
    assert (own - plain).abs().max() > 1e-3
    assert (own - stock).abs().max() < 1e-5
    export_merged(trained.checkpoint, config.tune, model_dir, folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    assert (own - logits_of(merged)).abs().max() < 1e-4
    return json.loads((out / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("method", "modules"),
    [
        ("lora", ["embed_tokens", "lm_head"]),
        pytest.param("dora", ["lm_head", "norm", "input_layernorm"], marks=pytest.mark.full),
    ],
)
def test_modules_to_save_are_trained_and_exported_as_by_peft(method, modules, model_dir, tmp_path):
    words = f"tune.method={method}", f"tune.modules_to_save={json.dumps(modules)}"
    config = settings(tmp_path / "run", model_dir, *words)
    assert run(config, StopAfter(None)) == 0
    require_stock_losses(config, tmp_path / "run", model_dir)
    saved = require_equal_exports(config, tmp_path / "run", model_dir, tmp_path)
    assert saved["modules_to_save"] == modules
    again = settings(tmp_path / "again", model_dir, *words, f"tune.init_from={tmp_path}/adapter")
    assert run(again, StopAfter(None)) == 0
    assert losses(tmp_path / "again")[0] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune.modules_to_save=[lmhead]"], "did you mean lm_head"),
        (["tune.modules_to_save=[mlp]"], "embeddings, the output head and norms"),
        (
            ["tune.modules_to_save=[lm_head]", "tune.targets=[lm_head]"],
            "has an adapter by tune.targets; keep one",
        ),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(words, said, model_dir):
    config = settings("unused", model_dir, *words)
    with pytest.raises(ConfigError, match=said):
        build(model_dir, torch.float32, config.tune, seed=0)


def test_norms_with_a_row_for_each_head_are_norms(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True}
    CohereConfig(**sizes, **heads).save_pretrained(tmp_path)
    tune = settings("unused", tmp_path, "tune.modules_to_save=[q_norm]").tune
    module = build(tmp_path, torch.float32, tune, seed=0, reads_weights=False).module
    trained = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    assert [shape for name, shape in trained.items() if "q_norm" in name] == [(4, 8)]


def test_the_parts_of_a_tied_embedding_are_refused(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    for name in ("embed_tokens", "lm_head"):
        config = settings("unused", tmp_path, f"tune.modules_to_save=[{name}]")
        with pytest.raises(ConfigError, match="head of this model is its embedding"):
            build(tmp_path / "tiny", torch.float32, config.tune, seed=0)
    tune = settings("unused", tmp_path, "tune.modules_to_save=[norm]").tune
    assert build(tmp_path / "tiny", torch.float32, tune, seed=0).tied_name


def test_in_bf16_they_are_kept_in_fp32_and_computed_in_bf16(model_dir):
    tune = settings("unused", model_dir, "tune.modules_to_save=[embed_tokens,lm_head,norm]").tune
    built = build(model_dir, torch.bfloat16, tune, seed=0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    lm = built.module.causal_lm()
    assert lm.lm_head.weight.dtype == torch.float32
    assert lm.get_input_embeddings()(IDS_BT).dtype == torch.bfloat16
    stock = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    own, wanted = logits_of(lm), logits_of(stock)
    assert own.dtype == torch.bfloat16
    assert (own - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert math.isfinite(own.float().sum())


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rows_of_added_tokens_are_trained_and_exported_as_by_peft(is_tied, model_dir, tmp_path):
    base = write_tiny_model(tmp_path / "tiny") or tmp_path / "tiny" if is_tied else model_dir
    words = ["tune.trainable_tokens=['<|end|>', 40, 99]"]
    config = settings(tmp_path / "run", base, *words)
    assert run(config, StopAfter(None)) == 0
    require_stock_losses(config, tmp_path / "run", base)
    saved = require_equal_exports(config, tmp_path / "run", base, tmp_path)
    assert saved["trainable_token_indices"] == [40, 99, 258]
    again = settings(tmp_path / "again", base, *words, f"tune.init_from={tmp_path}/adapter")
    assert run(again, StopAfter(None)) == 0
    assert losses(tmp_path / "again")[0] < losses(tmp_path / "run")[0]
    other = settings(tmp_path / "other", base, "tune.trainable_tokens=[40, 98, 258]").tune
    with pytest.raises(ConfigError, match=r"trainable_token_indices is \[40, 99, 258\] there"):
        use_init_adapter(build(base, torch.float32, other, seed=0), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune.trainable_tokens=['<|none|>']"], "'<|none|>' is no token of"),
        (["tune.trainable_tokens=[100000]"], "100000 is no token of this model"),
        (["tune.trainable_tokens=['<|end|>', 258]"], "names the token 258 twice"),
        (
            ["tune.trainable_tokens=[5]", "tune.modules_to_save=[embed_tokens]"],
            "tune.modules_to_save names the embedding",
        ),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused(words, said, model_dir):
    config = settings("unused", model_dir, *words)
    with pytest.raises(ConfigError, match=re.escape(said)):
        build(model_dir, torch.float32, config.tune, seed=0)


def test_a_tied_model_with_trained_rows_is_not_split_where_its_head_lacks_them(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    tune = settings("unused", tmp_path, "tune.trainable_tokens=[5]").tune
    built = build(tmp_path / "tiny", torch.float32, tune, seed=0)
    for parallel in (ParallelConfig(tensor=2), ParallelConfig(pipeline=2)):
        with pytest.raises(ConfigError, match="its embedding, and reads the trained rows as well"):
            _refuse_split_tied_embedding(built, parallel)
    with pytest.raises(ConfigError, match=r"with parallel\.zero_stage=3"):
        _refuse_split_tied_embedding(built, ParallelConfig(zero_stage=3))
    for allowed in (ParallelConfig(shard=2), ParallelConfig(zero_stage=2)):
        _refuse_split_tied_embedding(built, allowed)


PATTERNS = (
    "tune.rank_pattern={q_proj: 2, 'layers.0.mlp.*': 8}",
    "tune.alpha_pattern={'mlp.*_proj': 5.5, 'model.layers.1.self_attn.q_proj': 64}",
)


@pytest.mark.parametrize(
    "more", [["tune.rslora=true"], pytest.param(["tune.method=dora"], marks=pytest.mark.full)]
)
def test_ranks_and_alphas_by_pattern_are_trained_and_exported_as_by_peft(more, model_dir, tmp_path):
    config = settings(tmp_path / "run", model_dir, *PATTERNS, *more)
    assert run(config, StopAfter(None)) == 0
    require_stock_losses(config, tmp_path / "run", model_dir)
    saved = require_equal_exports(config, tmp_path / "run", model_dir, tmp_path)
    assert saved["rank_pattern"] == {"layers.0.mlp.*": 8, "q_proj": 2}
    assert list(saved["alpha_pattern"].values()) == [5.5, 64]
    built = build(model_dir, torch.float32, config.tune, seed=0)
    layers = built.module.causal_lm().model.layers
    adapted = layers[0].mlp.up_proj, layers[0].self_attn.q_proj, layers[1].mlp.up_proj
    assert [layer.lora_A["default"].weight.shape[0] for layer in adapted] == [8, 2, 4]
    for path, layer in built.module.causal_lm().named_modules():
        if hasattr(layer, "lora_A"):
            assert layer.scaling["default"] == pytest.approx(config.tune.adapter_scale(path)), path
    again = settings(
        tmp_path / "again", model_dir, *PATTERNS, *more, f"tune.init_from={tmp_path}/adapter"
    )
    assert run(again, StopAfter(None)) == 0
    assert losses(tmp_path / "again")[0] < losses(tmp_path / "run")[0]
    plain = settings("unused", model_dir, *PATTERNS[1:], *more).tune
    other = build(model_dir, torch.float32, plain, seed=0)
    with pytest.raises(ConfigError, match=r"rank_pattern is .* there, and tune\.rank_pattern says"):
        use_init_adapter(other, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tune.rank_pattern={k_prog: 2}", "tune.rank_pattern: k_prog matches no layer"),
        ("tune.alpha_pattern={q_proj: 3.0, '.*': 2.0}", "q_proj and .* both match model.layers.0"),
    ],
)
def test_a_pattern_of_no_layer_is_refused_by_name(word, said, model_dir):
    with pytest.raises(ConfigError, match=said):
        build(model_dir, torch.float32, settings("unused", model_dir, word).tune, seed=0)


def test_what_is_no_pattern_is_refused(model_dir):
    for key in ("(q", "(?i)q_proj"):
        with pytest.raises(ConfigError, match=re.escape(f"{key} is not a regular expression")):
            settings("unused", model_dir, f"tune.rank_pattern={{'{key}': 2}}")
    with pytest.raises(ConfigError, match="q_proj has the value 0, expected more than 0"):
        settings("unused", model_dir, "tune.rank_pattern={q_proj: 0}")
    with pytest.raises(ConfigError, match="tune.rank_pattern has no effect with tune.method=full"):
        settings("unused", model_dir, "tune.rank_pattern={q_proj: 2}", "tune.method=full")
