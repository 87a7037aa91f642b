"""Architectures tried before a run: what transformers itself says is what counts."""

import dataclasses
import gc
import importlib.metadata
import json
import re
import shutil
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import DataError
from hpc_tune.model import load, stock_reference
from hpc_tune.model.experts import num_experts, num_experts_per_token
from hpc_tune.model.load import load_weights
from hpc_tune.model.stock_reference import (
    MAX_VOCABULARY,
    TopKGapRecorder,
    list_shrink_factors,
    shrink_config,
    write_small_model,
)
from hpc_tune.packages import fast_imports
from hpc_tune.train.startup import architecture_check
from hpc_tune.train.startup.architecture_check import (
    ArchitectureCheck,
    check_architecture,
    check_architecture_cached,
)
from tests.support.older_transformers import since, skip_without

QLORA = TuneConfig(method="qlora")
GEMMA = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
GEMMA |= {"moe_intermediate_size": 704}
# DeepSeek's 128 heads stay as many in a trial, and its layers as wide as they need.
FEW_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 1024}
FEW_HEADS |= {"intermediate_size": 2048, "moe_intermediate_size": 512}
MINIMAX_M3 = {"num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2}
CAUSAL_DOGE = since("5.18", "lets Doge see later tokens")
SMALL = {"vocab_size": 512, "num_hidden_layers": 2, "pad_token_id": 0}


def config_of(kind, **said):
    skip_without(kind)
    return AutoConfig.for_model(kind, **said)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", {}),
        pytest.param("gemma2", {}, marks=pytest.mark.full),
        ("opt", {}),
        pytest.param("gpt_neox", {}, marks=pytest.mark.full),
        pytest.param(
            *("bloom", {}),
            marks=[since("5.21", "does not tell Bloom where documents begin"), pytest.mark.full],
        ),
        # Scales of the embeddings and the logits: in a pipeline they must come once.
        pytest.param(
            "granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}, marks=pytest.mark.full
        ),
        pytest.param(
            "hyperclovax",
            {"embedding_multiplier": 10.0, "logits_scaling": 0.125},
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_is_trained_right_is_found_right_in_every_way(kind, said):
    found = check_architecture(config_of(kind, **said))
    own_mask = "its attention uses its own masks, which do not cover whole rows"
    assert found == ArchitectureCheck(context=own_mask if kind in ("opt", "bloom") else "")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
        pytest.param("qwen3_5_text", {}, marks=pytest.mark.full),
    ],
)
def test_a_model_that_mixes_the_documents_of_a_row_is_found(kind, said):
    found = check_architecture(config_of(kind, **said))
    assert not found.loss
    assert "in one row" in found.packing or "the one before it" in found.packing


@pytest.mark.parametrize("kind", ["bert", "bart", pytest.param("cpmant", marks=pytest.mark.full)])
def test_a_model_whose_loss_is_not_that_of_transformers_is_found(kind):
    assert "in transformers" in check_architecture(config_of(kind)).loss


@CAUSAL_DOGE
def test_attention_that_needs_its_mask_is_left_to_transformers():
    found = check_architecture(config_of("doge"))
    assert "in transformers" in found.attention
    assert not found.loss
    assert not found.packing


@CAUSAL_DOGE
@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.full)])
def test_adapters_over_attention_that_needs_its_mask_are_tried_with_it(method):
    found = check_architecture(config_of("doge"), TuneConfig(method=method))
    assert "in transformers" in found.attention
    assert (found.loss, found.packing, found.adapters) == ("", "", "")


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in (
                "deepseek_v32",
                "mistral_large4",
                "axk2",
                "glm_moe_dsa",
                "dots3_note",
                "minimax_m3_vl",
            )
        )
    ],
)
def test_tokens_see_the_keys_alone_that_an_indexer_chooses(kind, monkeypatch):
    """transformers makes the mask of them for its own implementations of attention alone."""
    said = {"text_config": MINIMAX_M3} if kind == "minimax_m3_vl" else {}
    found = check_architecture(config_of(kind, **said))
    assert (found.loss, found.attention) == ("", "")
    monkeypatch.setattr("hpc_tune.model.packed_attention._INDEXER", re.compile("^no such part$"))
    assert "in transformers" in check_architecture(config_of(kind, **said)).loss


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param("cohere2_moe", {}, marks=pytest.mark.full),
        pytest.param("glm4v_moe", {}, marks=pytest.mark.full),
        ("mistral4", {}),
        pytest.param("step3p7", {"text_config": {"sliding_window": 512}}, marks=pytest.mark.full),
        pytest.param("glm5_next", {}, marks=pytest.mark.full),
        pytest.param("unlimited_ocr", {}, marks=pytest.mark.full),
        pytest.param("muse_spark", {}, marks=pytest.mark.full),
        pytest.param("dots3_note", {}, marks=pytest.mark.full),
    ],
)
def test_mixtures_of_wide_layers_or_in_several_parts_are_made_small_and_tried(kind, said):
    """With fewer heads, parts within parts, and widths that have to fit to the text's."""
    assert not check_architecture(config_of(kind, **said)).loss


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("ernie4_5_vl_moe", {}, "by ErnieFuseAndSplitTextVisionExperts, which is not supported"),
        pytest.param(
            "inkling2", {}, "by Interleave, which is not supported here", marks=pytest.mark.full
        ),
        ("diffusion_gemma", {}, "is a text diffusion model"),
        ("qwen3_omni_moe", {}, "has parts for other things than text or images"),
        ("openai_privacy_filter", {}, "is not a causal LM"),
    ],
)
def test_mixtures_that_are_not_read_or_make_no_text_are_refused_with_the_reason(kind, said, why):
    assert why in check_architecture(config_of(kind, **said)).loss


def test_sliding_windows_that_do_not_reach_the_layers_are_found(monkeypatch):
    config = config_of("mistral", sliding_window=8)
    assert check_architecture(config) == ArchitectureCheck()
    monkeypatch.setattr("hpc_tune.model.varlen_attention.decode_window", lambda mask: 9)
    found = check_architecture(config)
    assert "in one row" in found.kernel
    assert "in two parts" in found.context
    assert found == ArchitectureCheck(kernel=found.kernel, context=found.context)


@pytest.mark.parametrize(
    ("kind", "said", "name"),
    [
        pytest.param("apertus", {}, "layers.0.mlp.act_fn.alpha_p", marks=pytest.mark.full),
        ("glm4_moe", {"head_dim": 128, "use_qk_norm": True}, "layers.0.self_attn.q_norm.weight"),
        pytest.param(
            "qwen3_vl_moe", {}, "layers.0.self_attn.q_norm.weight", marks=pytest.mark.full
        ),
    ],
)
def test_gradients_that_transformers_plan_leaves_parts_of_a_sum_are_summed(
    kind, said, name, monkeypatch
):
    assert not check_architecture(config_of(kind, **said)).tensor
    monkeypatch.setattr("hpc_tune.step.slices._PARTIAL_GRADIENT_FOLLOWERS", {})
    found = check_architecture(config_of(kind, **said))
    assert not found.loss
    assert f"{name} differs between slices" in found.tensor


@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.full)]
)
def test_linear_attention_is_sliced_though_it_is_computed_whole(kind, monkeypatch):
    """Its last layer is split by outputs: what it reads gets a part of its gradient on a rank."""
    assert not check_architecture(config_of(kind)).tensor
    monkeypatch.setattr("hpc_tune.engine.tensor_parallel.has_gathered_input", lambda *_: False)
    assert "linear_attn" in check_architecture(config_of(kind)).tensor


def test_a_buffer_is_filled_by_the_model_around_its_layers(monkeypatch):
    """And one that nothing fills is named, and not trained with."""
    config = config_of("falcon_h1", num_hidden_layers=2)
    assert not check_architecture(config).loss
    real = load._find_unfilled_buffers
    monkeypatch.setattr(
        load, "_find_unfilled_buffers", lambda model, names: real(model, names) or list(names)
    )
    assert "gives model.layers.0.mamba.mup_vector its values" in check_architecture(config).loss


def test_what_transformers_cannot_train_itself_is_refused_with_its_words():
    found = check_architecture(config_of("aya_vision"))
    assert found.loss.startswith("no small model of this kind could be tried: ValueError: embed_")


@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "gpt_oss", "deepseek_v3", "phimoe"),
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in (
                "qwen2_moe",
                "qwen3_moe",
                "olmoe",
                "granitemoe",
                "ernie4_5_moe",
                "glm4_moe",
            )
        ),
    ],
)
def test_mixtures_of_experts_are_trained_as_transformers_does_and_packed(kind):
    fields = {"glm4_moe": {"head_dim": 128}, "deepseek_v3": FEW_HEADS}.get(kind, {})
    found = check_architecture(config_of(kind, **fields))
    assert (found.loss, found.packing, found.kernel) == ("", "", "")


def test_biases_of_a_routers_choice_that_are_not_loaded_are_found(monkeypatch):
    def loaded(built):
        load_weights(built)
        for name, buffer in built.module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                assert buffer.any()
                buffer.zero_()

    monkeypatch.setattr(architecture_check, "load_weights", loaded)
    assert "loss" in check_architecture(config_of("deepseek_v3", **FEW_HEADS)).loss


@pytest.mark.parametrize("kind", ["bailing_hybrid", "gemma4_text", "kimi_linear", "qwen3_moe"])
def test_a_token_of_a_small_mixture_has_experts_to_choose_from(kind):
    small = shrink_config(config_of(kind, **GEMMA if kind == "gemma4_text" else {}), 2)
    groups = getattr(small, "n_group", None) or 1
    assert num_experts(small) >= 2 * num_experts_per_token(small) == 16
    assert num_experts(small) % groups == 0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full) for kind in ("longcat_flash", "kimi_linear")],
)
def test_mixtures_with_names_of_their_own_for_numbers_of_experts_are_tried(kind):
    assert not check_architecture(config_of(kind)).loss


@pytest.mark.full
def test_a_model_with_other_numbers_of_blocks_and_layers_is_cut_into_no_stages():
    found = check_architecture(config_of("longcat_flash"))
    assert not found.loss
    assert found.pipeline == "it has 2 decoder blocks where its configuration says 4 layers"


def test_a_small_model_in_which_rounding_decides_a_choice_is_drawn_anew(monkeypatch):
    """Of the first values two experts have one score: transformers' own losses differ."""
    drawn = []

    def written(config, directory, seed=0):
        drawn.append(seed)
        write_small_model(config, directory, seed)

    monkeypatch.setattr("hpc_tune.model.stock_reference.write_small_model", written)
    assert check_architecture(config_of("gemma4_text", **GEMMA)) == ArchitectureCheck()
    assert drawn == [0, 1]


@pytest.mark.parametrize(
    ("scores", "count", "nearest"),
    [
        ([[4.0, 3.0, 1.0]], 1, 0.25),
        ([[4.0, 3.0, 1.0], [2.0, 2.0, 1.0]], 1, 0.0),
        ([[4.0, 3.0, 1.0], [2.0, 2.0, 1.0]], 2, 0.5),
        ([[4.0, 4.0]], 2, float("inf")),  # all are taken
        ([[4.0, float("-inf"), float("-inf")]], 2, float("inf")),  # masked
    ],
)
def test_the_nearest_choice_is_between_the_last_taken_and_the_first_left(scores, count, nearest):
    with TopKGapRecorder() as choices:
        torch.topk(torch.tensor(scores), count, dim=-1)
    assert choices.smallest_gap == nearest


@pytest.mark.parametrize("kind", ["lfm2_moe", pytest.param("jamba", marks=pytest.mark.full)])
def test_mixtures_with_layers_that_have_a_state_are_trained_row_by_row(kind):
    fields = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
    found = check_architecture(config_of(kind, **fields if kind == "lfm2_moe" else {}))
    assert not found.loss
    assert "three documents in one row" in found.packing


@pytest.mark.parametrize("kind", [pytest.param("gemma4", marks=pytest.mark.full), "qwen3_vl"])
def test_a_language_model_is_tried_as_a_part_of_the_whole(kind):
    assert check_architecture(config_of(kind)) == ArchitectureCheck()


def test_a_language_model_that_reads_another_way_within_the_whole_is_found():
    """PaliGemma looks at its prompt in both directions."""
    assert "in transformers" in check_architecture(config_of("paligemma")).loss


def test_models_of_a_trial_in_reference_cycles_are_freed_after_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def check_in_a_circle(*_):
        with fast_imports():  # which freezes what is alive after an import
            model = torch.nn.Identity()
            model.itself = [model]
            made.append(weakref.ref(model))
            monkeypatch.setitem(sys.modules, "a_module", gc)
        return ArchitectureCheck()

    monkeypatch.setattr(architecture_check, "check_architecture", check_in_a_circle)
    check_architecture_cached(config_of("llama"))
    gc.collect()
    (model,) = made
    assert model() is None


def test_a_trial_is_remembered_for_a_configuration_and_this_software(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of("llama")
    assert check_architecture_cached(config) == ArchitectureCheck()
    (file,) = tmp_path.rglob("llama-*.json")
    marked = dataclasses.asdict(ArchitectureCheck(packing="as it was remembered"))
    file.write_text(json.dumps(marked))
    assert check_architecture_cached(config).packing == "as it was remembered"
    assert check_architecture_cached(config_of("llama", rope_theta=5e5)) == ArchitectureCheck()
    assert len(list(tmp_path.rglob("llama-*.json"))) == 2
    monkeypatch.setattr(architecture_check, "software_versions", lambda: "transformers 99")
    assert check_architecture_cached(config) == ArchitectureCheck()
    file.write_text("{")  # a node that went down while it wrote
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check_architecture_cached(config) == ArchitectureCheck()


@pytest.mark.parametrize("package", ["peft", "bitsandbytes"])
def test_a_trial_with_another_package_of_adapters_does_not_count(monkeypatch, package):
    names = [architecture_check.trial_cache_file(config_of("llama"), QLORA).name]
    installed = importlib.metadata.version

    def version(name):
        return "99" if name == package else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    names.append(architecture_check.trial_cache_file(config_of("llama"), QLORA).name)
    assert len(set(names)) == 2


@pytest.mark.parametrize("changed", ["step/slices.py", "data/packed_rows.py", "batch.py"])
def test_a_trial_by_other_code_does_not_count(tmp_path, monkeypatch, changed):
    package = tmp_path / "hpc_tune"
    shutil.copytree(Path(architecture_check.__file__).parents[2], package)
    monkeypatch.setattr(
        architecture_check, "__file__", str(package / "train/startup/architecture_check.py")
    )
    names = []
    for _ in range(2):
        architecture_check._hash_package.cache_clear()
        names.append(
            architecture_check.trial_cache_file(
                config_of("llama"), architecture_check.FULL_TUNING
            ).name
        )
        with (package / changed).open("a") as file:
            file.write("\n")
    monkeypatch.undo()
    architecture_check._hash_package.cache_clear()
    assert len(set(names)) == 2


def test_a_trial_that_ended_by_an_exception_is_made_again(tmp_path, monkeypatch):
    """For want of memory, or of a library, which may be there at the next start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as unlucky:
        unlucky.setattr(architecture_check._Trial, "check_packing", fail)
        assert (
            "fails with RuntimeError: out of luck"
            in check_architecture_cached(config_of("llama")).packing
        )
    assert not list(tmp_path.rglob("*.json"))
    assert check_architecture_cached(config_of("llama")) == ArchitectureCheck()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        pytest.param(
            stock_reference,
            "_save_model",
            OSError("No space left on device"),
            marks=pytest.mark.full,
        ),
        (architecture_check, "load_weights", DataError("model.safetensors: Input/output error")),
    ],
)
def test_a_trial_without_a_small_model_is_made_again(tmp_path, monkeypatch, owner, name, error):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*_):
        raise error

    with monkeypatch.context() as unlucky:
        unlucky.setattr(owner, name, fail)
        assert str(error) in check_architecture_cached(config_of("llama")).loss
    assert not list(tmp_path.rglob("*.json"))
    assert check_architecture_cached(config_of("llama")) == ArchitectureCheck()


def test_where_nothing_can_be_remembered_the_trial_is_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert check_architecture_cached(config_of("llama")) == ArchitectureCheck()
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.chdir(tmp_path)
    assert check_architecture_cached(config_of("llama")) == ArchitectureCheck()
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "bamba"])
def test_a_small_model_has_the_heads_and_kinds_of_layers_of_the_large_one(kind):
    config = config_of(kind)
    small = shrink_config(config, list_shrink_factors(config)[0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 40e6
    assert small.num_attention_heads == config.num_attention_heads
    assert small.vocab_size == MAX_VOCABULARY
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        assert kinds is None or set(getattr(small, name)) == set(kinds)


@pytest.mark.full
def test_a_model_that_looks_at_its_weights_itself_cannot_have_them_in_four_bits():
    pytest.importorskip("bitsandbytes")
    assert (
        "fails with RuntimeError" in check_architecture(config_of("gemma3n_text"), QLORA).adapters
    )
    assert not check_architecture(config_of("llama"), QLORA).adapters


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        ("jamba", "all-linear", "model.layers.*.mamba.dt_proj"),
        pytest.param(
            "jamba", ["in_proj", "dt_proj"], "model.layers.*.mamba.dt_proj", marks=pytest.mark.full
        ),
        pytest.param("jamba", ["in_proj", "x_proj"], "", marks=pytest.mark.full),
        ("llama", "all-linear", ""),
    ],
)
def test_adapters_that_get_no_gradient_are_named(kind, targets, said):
    found = check_architecture(config_of(kind), TuneConfig(targets=targets))
    assert not found.loss + found.adapters
    assert found.untrained == said


@pytest.mark.full
def test_code_that_takes_packed_bytes_for_weights_is_found(monkeypatch):
    """GLM-5's indexer casts to the dtype of a weight, which of such codes is that of bytes."""
    pytest.importorskip("bitsandbytes")
    config = config_of("glm5_next")
    assert not check_architecture(config, QLORA).adapters
    assert not check_architecture(config, TuneConfig(base_dtype="fp8")).adapters
    monkeypatch.setattr("hpc_tune.model.layers.find_indexers", lambda _: [])
    for tune in (QLORA, TuneConfig(base_dtype="fp8")):
        assert "with packed weights the loss is" in check_architecture(config, tune).adapters


@pytest.mark.parametrize(
    "tune", [QLORA, pytest.param(TuneConfig(base_dtype="fp8"), marks=pytest.mark.full)]
)
def test_layers_with_a_state_use_all_adapters_over_a_packed_base(tune):
    pytest.importorskip("bitsandbytes")
    found = check_architecture(config_of("jamba"), tune)
    assert (found.loss, found.adapters, found.untrained) == ("", "", "")
