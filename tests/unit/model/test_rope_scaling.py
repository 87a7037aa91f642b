"""model.rope_scaling: the model is the one that transformers loads with the same parameters."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.checkpoint.state import RunState, require_same_settings
from hpc_tune.config.load import load_config
from hpc_tune.config.rope import ORIGINAL_LENGTH_KEY, format_rope_scaling
from hpc_tune.config.schema import ModelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.language import advise_rope_scaling, read_config, read_language_config
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.rotary import (
    apply_rope_scaling_to_json,
    length_independent_scaling,
    llama3_frequency_divisors,
    position_limit,
)
from hpc_tune.plan.resolve import explain_too_long_rows
from tests.unit.model.test_model_build import FAMILY

TRAINED = 32  # tokens
YARN = {"rope_type": "yarn", "factor": 4, ORIGINAL_LENGTH_KEY: TRAINED}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, ORIGINAL_LENGTH_KEY: TRAINED},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONGROPE = {
    **{"rope_type": "longrope", "factor": 4.0, ORIGINAL_LENGTH_KEY: TRAINED},
    **{"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 7.0, 15.0]},
}
SCALINGS = {s["rope_type"]: s for s in (YARN, LINEAR, DYNAMIC, LLAMA3, LONGROPE)}
LONG = 100  # tokens of a text, more than the model was trained with


def written(directory, kind, **said):
    torch.manual_seed(0)
    said = {"max_position_embeddings": TRAINED, **said}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**FAMILY, **said}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return directory


def our_logits(directory, scaling, tokens_BT, seq_len=LONG):
    built = build(directory, torch.float32, TuneConfig(method="full"), 0, rope_scaling=scaling)
    built = dataclasses.replace(built, seq_len=seq_len)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    with torch.no_grad():
        return built.module.causal_lm().eval()(tokens_BT).logits


def stock_logits(directory, tokens_BT):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens_BT).logits


def tokens(length=LONG):
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(1))


def with_written(directory, change):
    """Change a config.json as a user of transformers does by hand."""
    file = directory / "config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ["yarn", "linear", "dynamic", "llama3"])
def test_logits_are_those_of_transformers_with_the_same_parameters(tmp_path, kind, name):
    scaling, tokens_BT = SCALINGS[name], tokens()
    directory = written(tmp_path, kind)
    ours = our_logits(directory, scaling, tokens_BT)
    plain = stock_logits(directory, tokens_BT)

    def by_hand(content):
        content["rope_parameters"] = {"rope_theta": 1e4, **scaling}
        if ORIGINAL_LENGTH_KEY in scaling:
            content["max_position_embeddings"] = int(
                scaling[ORIGINAL_LENGTH_KEY] * scaling["factor"]
            )

    with_written(directory, by_hand)
    wanted = stock_logits(directory, tokens_BT)
    assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert (plain - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("length", [20, LONG])
def test_longrope_of_long_rows_is_exported_for_texts_of_all_lengths(tmp_path, length):
    directory, tokens_BT = written(tmp_path, "phi3"), tokens(length)
    ours = our_logits(directory, LONGROPE, tokens_BT, seq_len=LONG)
    config = read_config(directory)
    content = json.loads((directory / "config.json").read_text())
    exported = apply_rope_scaling_to_json(
        config, content, length_independent_scaling(config, LONGROPE, LONG)
    )
    (directory / "config.json").write_text(json.dumps(exported))
    wanted = stock_logits(directory, tokens_BT)
    assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("scaling", [YARN, LINEAR], ids=lambda s: s["rope_type"])
def test_queries_are_scaled_as_before(tmp_path, scaling):
    """Ministral 3 keeps by what queries grow with their positions beside the scaling."""
    beta = {"llama_4_scaling_beta": 0.1}
    own = {"rope_theta": 1e4, **YARN, "factor": 2, **beta}
    directory = written(tmp_path, "ministral3", rope_parameters=own)
    ours = our_logits(directory, scaling, tokens())
    found = read_config(directory, scaling).rope_parameters
    assert found.items() >= {**scaling, **beta, ORIGINAL_LENGTH_KEY: TRAINED}.items()

    def by_hand(content):
        content["rope_parameters"] = {
            "rope_theta": 1e4,
            ORIGINAL_LENGTH_KEY: TRAINED,
            **scaling,
            **beta,
        }

    with_written(directory, by_hand)
    wanted = stock_logits(directory, tokens())
    assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_sections_of_positions_of_images_are_kept(tmp_path):
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = AutoConfig.for_model("qwen3_vl")
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e6, **sections}
    config.save_pretrained(tmp_path)
    found = read_config(tmp_path, YARN).get_text_config().rope_parameters
    assert found == {"rope_theta": 5e6, **YARN, **sections}


def test_sections_are_kept_in_the_form_of_older_transformers(tmp_path):
    sections = {"mrope_section": [2, 1, 1]}
    directory = written(tmp_path, "qwen2")
    content = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **sections}}
    scaled = apply_rope_scaling_to_json(read_config(directory), content, YARN)
    assert scaled["rope_scaling"] == {**YARN, **sections}


@pytest.mark.parametrize("scaling", [YARN, LINEAR, DYNAMIC], ids=lambda s: s["rope_type"])
def test_frequencies_of_a_whole_head_of_which_a_part_turns_are_refused(tmp_path, scaling):
    """Gemma 4's: a scaling would make as many frequencies as turn, and heads are wider."""
    AutoConfig.for_model("gemma4_text", **FAMILY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has proportional rotary positions, which any scaling"):
        read_config(tmp_path, scaling)
    assert advise_rope_scaling(tmp_path, None, 1 << 20) is None


@pytest.mark.parametrize("length", [TRAINED, LONG])
def test_longrope_of_phi3_is_that_of_transformers(tmp_path, length):
    directory, tokens_BT = written(tmp_path, "phi3"), tokens(length)
    ours = our_logits(directory, LONGROPE, tokens_BT, seq_len=length)

    def by_hand(content):
        content |= {ORIGINAL_LENGTH_KEY: TRAINED, "max_position_embeddings": 4 * TRAINED}
        content["rope_parameters"] = {"rope_theta": 1e4, "partial_rotary_factor": 1.0, **LONGROPE}

    with_written(directory, by_hand)
    wanted = stock_logits(directory, tokens_BT)
    assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_a_config_json_of_older_transformers_keeps_its_form(tmp_path):
    """Servers and llama.cpp read rope_scaling and rope_theta there."""
    directory, tokens_BT = written(tmp_path, "qwen2"), tokens()
    ours = our_logits(directory, YARN, tokens_BT)

    def old(content):
        content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]

    with_written(directory, old)
    assert torch.equal(our_logits(directory, YARN, tokens_BT), ours)
    content = json.loads((directory / "config.json").read_text())
    scaled = apply_rope_scaling_to_json(
        read_config(directory), content, {**YARN, "rope_theta": 5e5}
    )
    assert "rope_parameters" not in scaled
    assert scaled["rope_scaling"] == YARN
    assert (scaled["rope_theta"], scaled["max_position_embeddings"]) == (5e5, 4 * TRAINED)
    (directory / "config.json").write_text(json.dumps(scaled))
    assert read_config(directory).rope_parameters["rope_theta"] == 5e5


def test_it_takes_the_place_of_what_config_json_says(tmp_path):
    directory = written(tmp_path, "llama", rope_parameters={"rope_theta": 2e4, **LINEAR})
    found = read_config(directory, YARN).rope_parameters
    assert found == {"rope_theta": 2e4, **YARN}


def test_layers_with_a_window_keep_their_positions(tmp_path):
    """Gemma 3: only layers that see the whole text are stretched, as its authors did."""
    kinds = ["sliding_attention", "full_attention"]
    directory = written(tmp_path, "gemma3_text", layer_types=kinds, head_dim=8, sliding_window=16)
    before = read_config(directory).rope_parameters
    after = read_config(directory, LINEAR).rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"] == {"rope_theta": 1e6, **LINEAR}


@pytest.mark.parametrize(
    ("kind", "said", "scaling", "message"),
    [
        ("gpt2", {}, YARN, "a gpt2 model has no rotary positions to scale"),
        ("phi3", {}, YARN, "Missing required keys"),
        ("phi3", {}, LINEAR, "transformers rejects this scaling for a phi3 model"),
        ("gptj", {"rotary_dim": 8}, YARN, "gptj model"),
    ],
)
def test_a_family_that_takes_no_such_scaling_is_refused(tmp_path, kind, said, scaling, message):
    directory = written(tmp_path, kind, **said)
    with pytest.raises(ConfigError) as error:
        build(directory, torch.float32, TuneConfig(method="full"), 0, rope_scaling=scaling)
    assert message in str(error.value)
    assert str(error.value).startswith("model.rope_scaling={rope_type: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{rope_type: yarm, factor: 4}", "rope_type=yarm is not known; expected one of linear"),
        ("{factor: 4}", "there is no rope_type"),
        ("{rope_type: linear, factor: 0.5}", "factor is 0.5, expected a number of 1 or more"),
        ("{rope_type: dynamic, factor: true}", "factor is True, expected a number"),
        ("{rope_type: dynamic, factor: .inf}", "factor is inf, expected a number"),
        ("{rope_type: yarn, factor: 4}", "yarn needs original_max_position_embeddings, the tok"),
        ("{rope_type: linear}", "linear needs factor"),
        (
            "{rope_type: llama3, factor: 8, original_max_position_embeddings: 8192}",
            "llama3 needs low_freq_factor; llama3 needs high_freq_factor",
        ),
        ("{rope_type: linear, factor: 2, beta_fast: 1}", "linear has no beta_fast"),
        (
            "{rope_type: yarn, factor: 2, original_max_position_embeddings: 8, beta_fast: 1, "
            "beta_slow: 2}",
            "beta_fast must be above beta_slow",
        ),
        ("yarn", "Input should be a valid dictionary, such as {rope_type: linear, factor: 4}"),
    ],
)
def test_a_wrong_setting_is_one_message(text, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"model.rope_scaling={text}"])
    assert message in str(error.value)
    assert str(error.value).startswith("model.rope_scaling=")
    assert "\n" not in str(error.value)


def test_the_key_of_older_files_is_taken():
    said = "{type: linear, factor: 2}"
    config = load_config(None, [f"model.rope_scaling={said}"])
    assert config.model.rope_scaling == {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [(None, 32), (YARN, 128), (LINEAR, 128), (DYNAMIC, 64), (LLAMA3, 256), (LONGROPE, 128)],
)
def test_the_longest_text_follows_from_the_scaling(tmp_path, scaling, limit):
    directory = written(tmp_path, "llama")
    config = read_config(directory, scaling)
    assert position_limit(config, scaling) == limit


@pytest.mark.parametrize(
    ("own", "scaling", "limit"),
    [
        (None, LLAMA3, 512),  # the base has more positions than 8 x 32
        (LLAMA3, None, 512),
        (LLAMA3, LLAMA3, 512),  # as of Llama 3.1, which has 131072 for 8 x 8192
        ({**LLAMA3, "factor": 32.0}, {**LLAMA3, "factor": 32}, 512),  # of Llama 3.2: 32 x 8192
        (LLAMA3, {**LLAMA3, "factor": 32.0}, 512),
        (LLAMA3, YARN, 128),
        (YARN, YARN, 512),
        (YARN, {**YARN, "factor": 2}, 64),
    ],
)
def test_a_base_keeps_its_positions_with_its_own_scaling(tmp_path, own, scaling, limit):
    said = {} if own is None else {"rope_parameters": {"rope_theta": 5e5, **own}}
    directory = written(tmp_path, "llama", max_position_embeddings=512, **said)
    assert position_limit(read_config(directory, scaling), scaling) == limit


def test_another_scaling_is_another_run(tmp_path):
    """A run that resumes must not go on with other positions; without any they are as before."""
    now = load_config(None, [format_rope_scaling(YARN)]).model_dump(mode="json")
    before = load_config(None).model_dump(mode="json")
    del before["model"]["rope_scaling"]  # as versions without it have saved
    state = {"step": 1, "total_steps": 9, "model_identity": "", "loader": {}, "layout": {}}
    saved = RunState.from_json({**state, "micro_size": 1, "config": before}, "here")
    require_same_settings(saved, load_config(None).model_dump(mode="json"))
    with pytest.raises(ConfigError, match="model.rope_scaling: None in the checkpoint, {'rope_ty"):
        require_same_settings(saved, now)


@pytest.mark.parametrize(
    "scaling", [None, {**YARN, ORIGINAL_LENGTH_KEY: 2048, "factor": 1.5}, LINEAR]
)
def test_a_plan_says_which_scaling_rows_of_that_length_need(scaling):
    model = ModelConfig(rope_scaling=scaling)
    said = [*explain_too_long_rows(model, 8192)]
    assert bool(said) == (scaling != LINEAR)
    if scaling is None:
        assert said == [
            "texts of up to data.seq_len=8192 tokens are longer than the model's 2048 positions, "
            "and it was never trained on later ones: use texts of 2048 or less (data.seq_len cuts "
            "them), or model.rope_scaling={rope_type: yarn, factor: 4, "
            "original_max_position_embeddings: 2048}"
        ]


@pytest.mark.parametrize(
    ("kind", "said", "longest", "advised"),
    [
        ("llama", None, 100, {**YARN, "factor": 4}),
        ("llama", YARN, 129, {**YARN, "factor": 5}),
        ("llama", LINEAR, 200, {**LINEAR, "factor": 7}),
        ("llama", LLAMA3, 300, {**YARN, "factor": 10}),
        ("phi3", None, 100, None),
        ("gpt2", None, 100, None),
    ],
)
def test_what_is_advised_takes_rows_of_that_length(tmp_path, kind, said, longest, advised):
    directory = written(tmp_path, kind)
    text = advise_rope_scaling(directory, said, longest)
    if advised is None:
        assert text is None
        return
    config = load_config(None, [text])
    assert config.model.rope_scaling == advised
    assert position_limit(read_language_config(directory), advised) or advised
    assert position_limit(read_config(directory, advised), advised) >= longest


def test_llama3_divisors_go_from_one_to_the_factor():
    """The rotary frequencies of llama.cpp's files: short waves are kept, long ones divided."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = AutoConfig.for_model("llama", rope_parameters=scaling)
    divisors = llama3_frequency_divisors(config)
    assert len(divisors) == config.head_dim // 2
    assert divisors[0] == pytest.approx(1.0)
    assert divisors[-1] == pytest.approx(8.0)
    assert (divisors.diff() >= -1e-5).all()
