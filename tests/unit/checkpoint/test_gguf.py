"""GGUF files, read back by transformers and compared with the merged model."""

import json
import math
import shutil

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hpc_tune.checkpoint.export import export_merged
from hpc_tune.checkpoint.gguf_file import _PRE_TOKENIZER_NAMES, _pre_tokenizer_name, export_gguf
from hpc_tune.errors import ConfigError
from hpc_tune.model.builtin import write_tiny_model
from tests.support.older_transformers import since
from tests.support.training import give_manifest
from tests.unit.checkpoint.test_export import METHODS, close, logits, stock, trained

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
}
LLAMA_3, QWEN = _PRE_TOKENIZER_NAMES
LLAMA_3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
QWEN_READ = since("5.18", "splits words of Qwen's tokenizers otherwise")
KINDS = {
    "llama": SHAPE,
    "mistral": SHAPE | {"sliding_window": None, "head_dim": 8},
    "qwen2": SHAPE | {"tie_word_embeddings": True},
    "qwen3": SHAPE | {"head_dim": 128},
}
TEXT = "It's 12:30 in Größe 7; def f(x):\n    return x ** 2  # ok"


def write_base(folder, kind, dtype=torch.float32, **changes):
    """A random model of a kind, and a BPE tokenizer with a special token and unused embeddings."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind] | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "qwen2":  # for which transformers takes Qwen's rule whatever the file says
        steps = [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, special_tokens=["<|end|>"]
    )
    backend.train_from_iterator([TEXT] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


def exported(tmp_path, method="lora", template=None):
    """Return (the GGUF export, the merged one) of a checkpoint of the model in base/."""
    base, step, tune = tmp_path / "base", tmp_path / "step", METHODS[method]
    trained(base, tune, step)
    merged = export_merged(step, tune, base, tmp_path / "merged", template)
    return export_gguf(step, tune, base, tmp_path / "gguf", template), merged


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=QWEN_READ) if kind in ("qwen2", "qwen3") else kind for kind in KINDS],
)
def test_transformers_reads_the_file_and_computes_what_the_merged_model_does(tmp_path, kind):
    write_base(tmp_path / "base", kind)
    out, merged = exported(tmp_path)
    ours, wanted = logits(loaded(out)), logits(stock(merged))
    assert ours.shape[-1] == 320
    assert close(ours, wanted)
    assert not close(ours, logits(stock(tmp_path / "base"))), "the adapter does nothing"
    read, base = AutoTokenizer.from_pretrained(out, gguf_file="model.gguf"), tmp_path / "base"
    stored = AutoTokenizer.from_pretrained(base)
    assert read(TEXT + "<|end|>")["input_ids"] == stored(TEXT + "<|end|>")["input_ids"]


def test_bf16_matrices_stay_bf16_and_vectors_are_fp32(tmp_path):
    write_base(tmp_path / "base", "llama", torch.bfloat16)
    out, merged = exported(tmp_path, "full")
    assert close(logits(loaded(out)), logits(stock(merged)))
    reader = gguf.GGUFReader(out / "model.gguf")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["output.weight"] == "BF16"
    assert kinds["blk.1.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"


def test_the_file_has_the_tokens_the_template_and_the_end_of_a_turn(tmp_path):
    write_base(tmp_path / "base", "llama")
    out, _ = exported(tmp_path, template="{{ 'mine' }}")
    fields = gguf.GGUFReader(out / "model.gguf").fields
    end = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    assert fields["tokenizer.ggml.eos_token_id"].contents() == end
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.chat_template"].contents() == "{{ 'mine' }}"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert (len(tokens), tokens[-1], tokens[end]) == (320, "[PAD319]", "<|end|>")
    types = fields["tokenizer.ggml.token_type"].contents()
    assert (types[-1], types[end], types[end + 1]) == (5, 3, 1)


def test_the_built_in_model_is_written_too(tmp_path):
    write_tiny_model(tmp_path / "base")
    out, merged = exported(tmp_path)
    assert close(logits(loaded(out)), logits(stock(merged)))
    assert {p.name for p in out.iterdir()} == {"model.gguf", "README.md", "training_config.yaml"}
    assert 'gguf_file="model.gguf"' in (out / "README.md").read_text()
    again = export_gguf(tmp_path / "step", METHODS["lora"], tmp_path / "base", out)
    assert (again / "model.gguf").is_file()


def test_llama_3s_scaling_is_written_as_what_each_frequency_is_divided_by(tmp_path):
    """transformers does not read it back: compared with the rule of Llama 3.1, written out."""
    factor, low, high, trained_on, theta, half = 8.0, 1.0, 4.0, 64, 50000.0, 4
    write_base(tmp_path / "base", "llama", rope_parameters=LLAMA_3_ROPE)
    out, _ = exported(tmp_path)
    tensors = {t.name: t.data for t in gguf.GGUFReader(out / "model.gguf").tensors}
    wanted = []
    for i in range(half):
        turns = trained_on * theta ** (-i / half) / (2 * math.pi)  # over the texts it is trained on
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        wanted.append(1 / ((1 - smooth) / factor + smooth))
    assert wanted[0] == 1.0
    assert wanted[-1] == factor
    assert tensors["rope_freqs.weight"].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2, expected one of llama, mistral, qwen2, qwen3"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "mscale": 2,
                }
            },
            r"scaled \(yarn\) with mscale=2",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"scaled \(dynamic\)"),
        ({"sliding_window": 64}, "only sees 64 tokens"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu, expected silu"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"only part of each head has rotary positions \(0.5\)",
        ),
        (
            {"model_type": "qwen3", "rope_parameters": LLAMA_3_ROPE},
            r"scaled \(llama3\), which llama.cpp's qwen3 cannot do",
        ),
        (
            {"model_type": "qwen2", "head_dim": 16},
            "its 4 heads of 16 values do not add up to hidden_size=32",
        ),
    ],
)
def test_another_shape_is_refused_with_the_reason_and_nothing_is_written(tmp_path, changes, said):
    write_base(tmp_path / "base", "llama")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters")
    file.write_text(json.dumps(config | changes))
    (tmp_path / "step").mkdir()
    give_manifest(tmp_path / "step")
    with pytest.raises(ConfigError, match=said):
        export_gguf(tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path, kind):
    write_base(tmp_path / "base", kind, attention_bias=True)
    with pytest.raises(ConfigError, match=r"it has model.layers.0.self_attn.k_proj.bias, which"):
        exported(tmp_path)
    assert not (tmp_path / "gguf").exists()


BYTES = {"type": "ByteLevel", "use_regex": False}


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ([{"type": "Split", "pattern": {"Regex": LLAMA_3}}, BYTES], "llama-bpe"),
        ([{"type": "Split", "pattern": {"Regex": QWEN}}, BYTES], "qwen2"),
        ([{"type": "Digits", "individual_digits": True}, BYTES], "smollm"),
        ([{"type": "ByteLevel", "use_regex": True}], "gpt-2"),
    ],
)
def test_the_rule_by_which_text_is_cut_has_llama_cpps_name(before, name):
    model = {"type": "BPE", "merges": [["a", "b"]]}
    steps = {"type": "Sequence", "pretokenizers": before}
    assert _pre_tokenizer_name({"model": model, "pre_tokenizer": steps}) == name


@pytest.mark.parametrize(
    ("model", "before", "said"),
    [
        ({"type": "Unigram"}, None, "Unigram"),
        ({"type": "BPE", "merges": [["a", "b"]]}, None, "BPE"),
        ({"type": "BPE", "merges": [["a", "b"]]}, BYTES, "another splitting rule"),
    ],
)
def test_another_tokenizer_is_refused_with_what_to_do(model, before, said):
    with pytest.raises(ConfigError, match=rf"\(.*{said}.*convert_hf_to_gguf.py"):
        _pre_tokenizer_name({"model": model, "pre_tokenizer": before})


def test_a_base_without_tokenizer_json_is_refused(tmp_path):
    write_base(tmp_path / "base", "llama")
    shutil.move(tmp_path / "base" / "tokenizer.json", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"needs the base model's tokenizer.json"):
        exported(tmp_path)
    assert not (tmp_path / "gguf").exists()


def test_without_the_gguf_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_tune.checkpoint.gguf_file.is_importable", lambda name: False)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_tune\[gguf\]'"):
        export_gguf(tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "gguf")
