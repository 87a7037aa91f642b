"""Exports of a run with model.rope_scaling: others compute with the positions of its training."""

import dataclasses
import re

import pytest
import torch

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.checkpoint.gguf_file import export_gguf
from hpc_tune.config.load import load_config
from hpc_tune.config.rope import ORIGINAL_LENGTH_KEY, format_rope_scaling
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.language import read_config
from hpc_tune.model.load import allocate, load_trained_parameters, load_weights
from tests.support.training import give_manifest
from tests.unit.checkpoint.test_export import METHODS, close, stock, trained
from tests.unit.checkpoint.test_gguf import write_base

TRAINED = 128  # tokens
SEQ_LEN = 2 * TRAINED
POSITIONS = {"yarn": 4 * TRAINED, "linear": TRAINED, "dynamic": SEQ_LEN}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL_LENGTH_KEY: TRAINED}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LORA = METHODS["lora"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    write_base(folder, "llama")
    return folder


def checkpoint(tmp_path, base, scaling):
    step = tmp_path / "step"
    trained(base, LORA, step)
    said = [] if scaling is None else [format_rope_scaling(scaling)]
    row = f"data.seq_len={2 * SEQ_LEN}"  # of a pair, whose texts are shorter
    give_manifest(step, f"model.path={base}", row, *said, scaled_for=SEQ_LEN)
    return step


@torch.no_grad()
def logits(model, length=SEQ_LEN):
    tokens_BT = torch.randint(0, 300, (1, length), generator=torch.Generator().manual_seed(2))
    return model.eval()(input_ids=tokens_BT, use_cache=False).logits


def logits_of_training(step, base, scaling, length):
    built = build(base, torch.float32, LORA, 0, rope_scaling=scaling)
    built = dataclasses.replace(built, seq_len=SEQ_LEN)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    load_trained_parameters(built, step)
    return logits(built.module.causal_lm(), length)


def loaded_as_the_card_says(out, base):
    card = (out / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code = code.replace('"the base model"', repr(str(base)))
    names = {}
    exec(code.replace('"this folder"', repr(str(out))), names)
    return names["model"]


@pytest.mark.parametrize("scaling", [YARN, LINEAR, DYNAMIC], ids=lambda s: s["rope_type"])
def test_a_merged_model_has_them_and_an_adapters_card_says_them(tmp_path, base, scaling, caplog):
    """Those of training, in texts of any length."""
    step = checkpoint(tmp_path, base, scaling)
    plain = export_merged(checkpoint(tmp_path / "plain", base, None), LORA, base, tmp_path / "p")
    merged = export_merged(step, LORA, base, tmp_path / "merged")
    adapter = export_adapter(step, LORA, base, tmp_path / "adapter")
    of_adapter = loaded_as_the_card_says(adapter, base)
    for length in (SEQ_LEN, 32):
        wanted = logits_of_training(step, base, scaling, length)
        assert not close(logits(stock(plain), length), wanted)
        assert close(logits(stock(merged), length), wanted)
        assert close(logits(of_adapter, length), wanted)
    assert read_config(merged).max_position_embeddings == POSITIONS[scaling["rope_type"]]
    assert "| rotary positions | rope_type" in (adapter / "README.md").read_text()
    assert "load the base model with rope_parameters={rope_type: " in caplog.text
    said = load_config(str(adapter / "training_config.yaml")).model.rope_scaling
    assert said == scaling


@pytest.mark.parametrize("scaling", [YARN, LINEAR, DYNAMIC], ids=lambda s: s["rope_type"])
def test_a_gguf_file_has_them_as_llama_cpp_reads_them(tmp_path, base, scaling):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    step = checkpoint(tmp_path, base, scaling)
    out = export_gguf(step, LORA, base, tmp_path / "gguf")
    fields = {k: f.contents() for k, f in gguf.GGUFReader(out / "model.gguf").fields.items()}
    merged = export_merged(step, LORA, base, tmp_path / "merged")
    if scaling == DYNAMIC:
        before, theta = (read_config(one).rope_parameters["rope_theta"] for one in (base, merged))
        dim = read_config(base).head_dim
        assert theta == pytest.approx(before * 5 ** (dim / (dim - 2)))  # 4 x 256 / 128 - 3 = 5
        assert fields["llama.rope.freq_base"] == pytest.approx(theta)
        assert fields["llama.context_length"] == SEQ_LEN
    else:
        assert fields["llama.rope.scaling.type"] == scaling["rope_type"]
        assert fields["llama.rope.scaling.factor"] == 4.0
        assert fields["llama.context_length"] == 4 * TRAINED
    assert fields.get("llama.rope.scaling.original_context_length") == scaling.get(
        ORIGINAL_LENGTH_KEY
    )
    assert close(logits(loaded_as_the_card_says(out, base)), logits(stock(merged)))


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({**YARN, "beta_fast": 16, "mscale": 0.7}, r"yarn\) with beta_fast=16, mscale=0.7;"),
        ({**YARN, "truncate": False}, r"yarn\) with truncate=False;"),
    ],
)
def test_positions_that_llama_cpp_computes_otherwise_are_refused(tmp_path, base, scaling, why):
    pytest.importorskip("gguf", reason="gguf is not installed")
    with pytest.raises(ConfigError, match=why):
        export_gguf(checkpoint(tmp_path, base, scaling), LORA, base, tmp_path / "gguf")
