import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_tune.batch import IGNORED_LABEL, Batch, padding_batch
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model import load as load_module
from hpc_tune.model.build import LocalRegion, build, resolve_dtype
from hpc_tune.model.builtin import SPECIAL_TOKENS, TINY_CONFIG, write_tiny_model
from hpc_tune.model.language import read_language_config
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.tensor_sources import reserve_nothing
from hpc_tune.model.tokenizer import load_tokenizer

CPU = torch.device("cpu")
LENGTHS = (7, 12, 1, 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return directory


def loaded(directory, tune=None, dtype=torch.float32, seed=0):
    """Our model with its weights; what nobody fills would be NaN."""
    built = build(directory, dtype, tune or TuneConfig(method="full"), seed)
    allocate(built.module, CPU)
    with torch.no_grad():
        for tensor in (*built.module.parameters(), *built.module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
    load_weights(built)
    built.module.eval()
    return built


def stock(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def documents(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


def row(*docs):
    """One row of these documents, every next token of which carries loss."""
    ignored = torch.tensor([IGNORED_LABEL])
    labels = torch.cat([torch.cat([doc[1:], ignored]) for doc in docs])
    return Batch(
        torch.cat(docs)[None],
        labels[None],
        torch.cat([torch.arange(len(doc)) for doc in docs])[None],
        int((labels != IGNORED_LABEL).sum()),
        sum(map(len, docs)),
        0,
    )


@torch.no_grad()
def stock_loss(model, docs):
    """The reference: each document alone, full logits, plain cross-entropy."""
    return sum(
        nn.functional.cross_entropy(
            model(input_ids=doc[None], use_cache=False).logits[0, :-1].float(),
            doc[1:],
            reduction="sum",
        ).item()
        for doc in docs
        if len(doc) > 1
    )


@torch.no_grad()
def our_loss(module, *rows):
    return sum(module(batch).item() for batch in rows)


# --- builtin:tiny


def test_writing_the_tiny_model_twice_gives_the_same_bytes(tiny, tmp_path):
    write_tiny_model(tmp_path)
    files = sorted(path.name for path in tiny.iterdir())
    assert files == sorted(path.name for path in tmp_path.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name in files:
        assert (tiny / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_the_tiny_model_is_an_ordinary_directory_with_the_weights_as_written(tiny):
    model, written = stock(tiny), load_file(tiny / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == written.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in written.items())
    hidden, wide, kv = 128, 352, 64
    block = 2 * hidden * hidden + 2 * kv * hidden + 3 * wide * hidden + 2 * hidden
    assert sum(p.numel() for p in parameters.values()) == 320 * hidden + 4 * block + hidden
    assert written["model.norm.weight"].eq(1).all()
    assert written["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.02)


@settings(deadline=None)
@given(text=st.text())
def test_the_tiny_tokenizer_gives_any_text_back(tiny_tokenizer, text):
    assume(not any(token in text for token in SPECIAL_TOKENS))
    ids = tiny_tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert max(ids, default=0) < 256
    assert tiny_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny):
    return load_tokenizer(tiny)


def test_the_tiny_chat_template_marks_each_message(tiny_tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = tiny_tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\nyes<|end|>\n"
    asked = tiny_tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    ids = tiny_tokenizer(text)["input_ids"]
    assert ids.count(257) == ids.count(258) == 2
    assert tiny_tokenizer.eos_token_id == 258
    assert max(ids) < TINY_CONFIG["vocab_size"]


def test_a_chat_template_of_the_user_takes_the_place_of_the_models(tiny, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(tiny, str(tmp_path / "t.jinja"))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi!"
    with pytest.raises(DataError, match=r"data\.chat_template=.*No such file"):
        load_tokenizer(tiny, str(tmp_path / "no.jinja"))


# --- the loss is the one of stock transformers and peft


def test_the_loss_is_the_one_of_stock_transformers(tiny):
    docs = documents(320)
    built = loaded(tiny)
    wanted = stock_loss(stock(tiny), docs)
    assert our_loss(built.module, *(row(doc) for doc in docs)) == pytest.approx(wanted, rel=1e-6)
    assert all(p.requires_grad for p in built.module.parameters())


@pytest.mark.parametrize(
    ("method", "rslora"), [("lora", False), ("lora", True), ("dora", False), ("dora", True)]
)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_the_loss_with_adapters_is_the_one_of_stock_peft(tiny, method, rslora, targets):
    tune = TuneConfig(method=method, rank=4, alpha=6.0, rslora=rslora, targets=targets)
    built, docs = loaded(tiny, tune), documents(320)
    base_loss = stock_loss(stock(tiny), docs)
    rows = [row(doc) for doc in docs]
    assert our_loss(built.module, *rows) == pytest.approx(base_loss, rel=1e-6)

    wrapped = get_peft_model(
        stock(tiny),
        LoraConfig(
            r=4,
            lora_alpha=6.0,
            target_modules=targets,
            use_dora=method == "dora",
            use_rslora=rslora,
            task_type="CAUSAL_LM",
        ),
    ).eval()
    ours = {
        name.removeprefix("model."): parameter
        for name, parameter in built.module.named_parameters()
        if parameter.requires_grad
    }
    theirs = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    if method == "dora":
        magnitudes = [name for name in ours if "magnitude" in name]
        assert len(magnitudes) == 4 * (7 if targets == "all-linear" else 2)
        for name in magnitudes:
            assert torch.allclose(ours[name], theirs[name], rtol=1e-6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            theirs[name].copy_(parameter)
    wanted = stock_loss(wrapped, docs)
    assert abs(wanted - base_loss) > 1e-4 * base_loss, "the adapters change nothing"
    assert our_loss(built.module, *rows) == pytest.approx(wanted, rel=1e-6)


def test_documents_packed_into_one_row_have_the_loss_and_gradient_of_rows_of_their_own(tiny):
    docs = documents(320, (7, 12, 1, 1, 30, 5))
    apart, packed = loaded(tiny).module, loaded(tiny).module
    sum(apart(row(doc)) for doc in docs if len(doc) > 1).backward()
    packed(row(*docs)).backward()
    assert our_loss(packed, row(*docs)) == pytest.approx(
        our_loss(apart, *(row(doc) for doc in docs)), rel=1e-6
    )
    for (name, a), (_, b) in zip(apart.named_parameters(), packed.named_parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm(), name


def test_a_label_that_is_ignored_adds_nothing(tiny):
    module, [doc] = loaded(tiny).module, documents(320, (9,))
    whole = row(doc)
    labels_BT = whole.labels_BT.clone()
    labels_BT[0, :5] = IGNORED_LABEL
    tail = Batch(whole.tokens_BT, labels_BT, whole.positions_BT, 3, 9, 0)
    head_BT = whole.labels_BT.clone()
    head_BT[0, 5:] = IGNORED_LABEL
    head = Batch(whole.tokens_BT, head_BT, whole.positions_BT, 5, 9, 0)
    assert our_loss(module, head, tail) == pytest.approx(our_loss(module, whole), rel=1e-6)


def test_an_empty_batch_has_a_loss_and_a_gradient_of_zero(tiny):
    module = loaded(tiny).module
    loss = module(padding_batch(0))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


FAMILY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},  # biases
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 8},  # a scale that no file stores, in the embedding
    "gemma2": {"head_dim": 8, "sliding_window": 4},  # softcapping; no sdpa
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "apertus": {},  # persistent buffers
    "falcon": {"alibi": False, "multi_query": True, "ffn_hidden_size": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_stock_loss_in_rows_and_packed(tmp_path, family):
    """Scaled, capped, biased, tied; what no file stores and what a packed row must keep apart."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**FAMILY, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn(tensor.shape))
    model.save_pretrained(tmp_path)
    docs = documents(128)
    wanted = stock_loss(stock(tmp_path), docs)
    module = loaded(tmp_path).module
    assert our_loss(module, *(row(doc) for doc in docs)) == pytest.approx(wanted, rel=1e-6)
    assert our_loss(module, row(*docs)) == pytest.approx(wanted, rel=1e-5)


# --- the tree


def test_tied_weights_stay_tied_and_are_trained_once(tiny):
    built = loaded(tiny)
    lm = built.module.causal_lm()
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert [n for n in built.saved_names if "embed" in n or "lm_head" in n] == [
        "model.model.embed_tokens.weight"
    ]
    built.module(row(*documents(320))).backward()
    assert lm.lm_head.weight.grad is lm.model.embed_tokens.weight.grad is not None


def test_frozen_weights_have_the_dtype_and_trained_ones_are_fp32(tiny):
    built = loaded(tiny, TuneConfig(method="lora"), torch.bfloat16)
    assert {p.dtype for p in built.module.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in built.module.parameters() if not p.requires_grad} == {torch.bfloat16}
    full = loaded(tiny, TuneConfig(method="full"), torch.bfloat16)
    assert {p.dtype for p in full.module.parameters()} == {torch.float32}


def test_building_takes_no_memory_for_weights(tiny):
    built = build(tiny, torch.float32, TuneConfig(), 0)
    assert {p.device.type for p in built.module.parameters()} == {"meta"}


def test_saved_names_are_those_of_peft_and_of_the_model_directory(tiny):
    names = set(build(tiny, torch.float32, TuneConfig(targets=["q_proj"]), 0).saved_names.values())
    block = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert names == {block.format(i, x) for i in range(4) for x in "AB"}
    full = build(tiny, torch.float32, TuneConfig(method="full"), 0)
    assert set(full.saved_names.values()) == set(load_file(tiny / "model.safetensors"))


def adapters(built):
    return {n: p for n, p in built.module.named_parameters() if p.requires_grad}


def test_first_adapter_values_depend_on_seed_and_name_alone(tiny):
    torch.manual_seed(1)
    first = adapters(loaded(tiny, TuneConfig(rank=4), seed=5))
    torch.manual_seed(2)
    fewer = adapters(loaded(tiny, TuneConfig(rank=4, targets=["v_proj"]), torch.bfloat16, seed=5))
    assert 0 < len(fewer) < len(first)
    assert all(torch.equal(first[name], value) for name, value in fewer.items())
    other = adapters(loaded(tiny, TuneConfig(rank=4), seed=6))
    drawn = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert len({first[name].flatten()[0].item() for name in drawn}) == len(drawn)


def test_first_adapter_values_are_those_of_lora(tiny):
    """A as Kaiming with a=sqrt(5), so uniform in +-1/sqrt(fan_in); B zero: nothing changes yet."""
    for name, value in adapters(loaded(tiny, TuneConfig(rank=64))).items():
        if "lora_B" in name:
            assert not value.any()
            continue
        bound = 1 / math.sqrt(value.shape[1])
        assert value.abs().max() <= bound
        assert value.abs().max() > 0.99 * bound
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_a_part_of_an_adapter_is_the_part_of_the_whole():
    name, shape = "x.lora_A.default.weight", (6, 10)
    whole, part = torch.empty(shape), torch.empty(2, 10)
    built = SimpleNamespace(init_index=None, seed=3)
    load_module._init_adapter(built, name, LocalRegion(whole, (0, 0), shape), reserve_nothing)
    load_module._init_adapter(built, name, LocalRegion(part, (4, 0), shape), reserve_nothing)
    assert torch.equal(part, whole[4:6])


def test_the_identity_is_of_the_base_whatever_is_trained_in_whatever_dtype(tiny, tmp_path):
    one = build(tiny, torch.float32, TuneConfig(), 0)
    other = build(tiny, torch.bfloat16, TuneConfig(method="full"), 9)
    assert one.architecture_hash == other.architecture_hash
    copy = changed(tiny, tmp_path, rope_theta=5.0, rms_norm_eps=1e-3)
    assert build(copy, torch.float32, TuneConfig(), 0).architecture_hash != one.architecture_hash


def test_the_decoder_blocks_are_found_in_order_with_and_without_adapters(tiny):
    for tune in (TuneConfig(), TuneConfig(method="full")):
        built = build(tiny, torch.float32, tune, 0)
        blocks = find_blocks(built.module)
        assert list(blocks) == list(built.module.causal_lm().model.layers)


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_auto_is_fp32_on_a_cpu(name, dtype):
    assert resolve_dtype(name, CPU) == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_auto_is_bf16_on_a_gpu_that_computes_in_it(monkeypatch, capability, dtype):
    """torch says of older ones that bf16 is supported, since it converts for each product."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_dtype("auto", torch.device("cuda", 0)) == dtype


# --- mistakes


def changed(source: Path, target: Path, **config) -> Path:
    """A copy of a model directory with other values in its config.json."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


def test_a_directory_that_is_none_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = rf"models/mine: no such directory in {tmp_path}; nor is .* in the hub's cache.* It must"
    with pytest.raises(DataError, match=here):
        read_language_config(Path("models/mine"))
    with pytest.raises(DataError, match=r"no such directory.*hf download"):
        read_language_config(tmp_path / "meta-llama" / "Llama-3")
    with pytest.raises(DataError, match=r"no config\.json in it"):
        read_language_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "nonsense"}', "[]"])
def test_a_config_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json cannot be used"):
        read_language_config(tmp_path)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    CONFIG_MAPPING["t5"]().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="model_type t5 is not a causal LM"):
        read_language_config(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tiny, tmp_path):
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_directory_whose_name_is_no_text_is_named_and_not_its_tokenizer(tiny, tmp_path):
    directory = tmp_path / "\udcff"
    shutil.copytree(tiny, directory)
    with pytest.raises(ConfigError, match=r"udcff': not valid "):
        load_tokenizer(directory)


def test_weights_that_are_missing_are_counted_and_named(tiny, tmp_path):
    copy = changed(tiny, tmp_path, num_hidden_layers=6)
    with pytest.raises(DataError, match=r"18 of 56 tensors .*model\.layers\.4\.self_attn\.q_proj"):
        build(copy, torch.float32, TuneConfig(), 0)


@pytest.mark.parametrize("intermediate_size", [351, 353])
def test_weights_of_another_shape_are_refused_even_where_they_would_fit(
    tiny, tmp_path, intermediate_size
):
    copy = changed(tiny, tmp_path, intermediate_size=intermediate_size)
    message = (
        rf"gate_proj\.weight has shape \[352, 128\], config\.json asks for \[{intermediate_size}"
    )
    with pytest.raises(DataError, match=message):
        build(copy, torch.float32, TuneConfig(), 0)


def test_an_untied_head_that_is_not_stored_is_missed(tiny, tmp_path):
    copy = changed(tiny, tmp_path, tie_word_embeddings=False)
    with pytest.raises(DataError, match=r"1 of 39 tensors .*lm_head\.weight"):
        build(copy, torch.float32, TuneConfig(), 0)


def test_a_base_model_that_was_stored_without_its_prefix_is_found(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    stored = load_file(tiny / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    docs = documents(320)
    rows = [row(doc) for doc in docs]
    assert our_loss(loaded(tmp_path).module, *rows) == our_loss(loaded(tiny).module, *rows)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["qproj"], "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ([], "down_proj, gate_proj"),
        (["embed_tokens"], "adapters are for linear layers"),
        (["input_layernorm"], r"tune\.targets=\['input_layernorm'\]"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(tiny, targets, said):
    with pytest.raises(ConfigError, match=said):
        build(tiny, torch.float32, TuneConfig(targets=targets), 0)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "v_porj"], "is called v_porj; did you mean v_proj or "),
        (["q_proj", "query"], "is called query. Its linear layers: down_proj, gate_proj, k_proj"),
        (["layers.9.self_attn.q_proj", "q_proj"], r"is called layers\.9\.self_attn\.q_proj"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_beside_ones_that_match(tiny, targets, said):
    """peft passes over it, and trains fewer layers than were asked for."""
    with pytest.raises(ConfigError, match=said):
        build(tiny, torch.float32, TuneConfig(targets=targets), 0)


def test_transposed_layers_get_no_adapters_but_those_of_lora(tmp_path):
    config = CONFIG_MAPPING["gpt2"](**{**FAMILY, **FAMILIES["gpt2"]})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"transposed \(Conv1D\); use tune.method=lora"):
        build(tmp_path, torch.float32, TuneConfig(method="dora"), 0)
    assert build(tmp_path, torch.float32, TuneConfig(), 0).saved_names
