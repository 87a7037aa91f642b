"""What computes a decoder block on which device, as a table."""

from types import SimpleNamespace

import pytest
import torch

from hpc_tune.model import layers, varlen_attention
from hpc_tune.model.kernels import (
    Kernels,
    choose_kernels,
    choose_model_kernels,
    explain_expert_loop,
    layer_windows,
)
from hpc_tune.model.layers import use_faster_layers
from hpc_tune.model.loss import LossModel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
COMPILE = "train.compile=true"
# The numbers that a config.json holds, as far as the rule reads them.
# DeepSeek-V3: queries and keys of 192 values, 64 of which have a position.
LATENT = {"head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LLAMA = {
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
    **{"hidden_size": 4096, "num_hidden_layers": 32},
}


@pytest.mark.parametrize(
    ("device", "compiled", "windows", "why", "no_window", "chosen"),
    [
        # device, compiled, has windows, why masked, why no window: attention, window, norm, SwiGLU
        ("cpu", False, False, "", "", ("tiles", None, "own", "own", "")),
        ("cpu", False, True, "", "", ("tiles", "mask", "own", "own", "")),
        ("cpu", False, False, "opt", "", ("mask", None, "own", "own", "opt")),
        ("cpu", True, True, "", "", ("mask", "mask", "transformers", "transformers", COMPILE)),
        ("cpu", True, False, "opt", "", ("mask", None, "transformers", "transformers", "opt")),
        ("cuda", False, False, "", "", ("varlen", None, "F.rms_norm", "own", "")),
        ("cuda", False, True, "", "", ("varlen", "varlen", "F.rms_norm", "own", "")),
        ("cuda", False, True, "", "wrong", ("varlen", "mask", "F.rms_norm", "own", "wrong")),
        ("cuda", False, False, "", "wrong", ("varlen", None, "F.rms_norm", "own", "")),
        ("cuda", False, True, "old", "", ("mask", "mask", "F.rms_norm", "own", "old")),
        ("cuda", True, False, "", "", ("varlen", None, "transformers", "transformers", "")),
        ("cuda", True, True, "", "", ("varlen", "varlen", "transformers", "transformers", "")),
        ("cuda", True, False, "old", "", ("mask", None, "transformers", "transformers", "old")),
    ],
)
def test_what_is_used_on_which_device(device, compiled, windows, why, no_window, chosen):
    attention, window, norm, swiglu, mask_reason = chosen
    wanted = Kernels(attention, window, norm, swiglu, "own", mask_reason)
    assert choose_kernels(device, compiled, windows, why, no_window) == wanted


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (
            choose_kernels("cuda", False, True),
            "attention varlen (torch.nn.attention.varlen); norms F.rms_norm, SwiGLU own, LoRA own",
        ),
        (
            choose_kernels("cpu", False, True),
            "attention document by document (hpc_tune's tiles), sliding windows with a mask of "
            "tokens x tokens; norms own, SwiGLU own, LoRA own",
        ),
        (
            choose_kernels("cpu", True, False),
            "attention with a mask of tokens x tokens for each packed row: train.compile=true; "
            "norms transformers, SwiGLU transformers, LoRA own",
        ),
    ],
)
def test_a_run_says_it_in_one_line(kernels, words):
    assert str(kernels) == words


@pytest.mark.parametrize(
    ("config", "dtype", "why"),
    [
        ({}, torch.bfloat16, ""),
        ({}, torch.float16, ""),
        ({"head_dim": 256}, torch.bfloat16, ""),
        ({}, torch.float64, "the kernel takes bfloat16 and float16, not float64"),
        ({"head_dim": 264}, torch.bfloat16, "up to 256 values, in multiples of 8, not 264"),
        ({"head_dim": 100}, torch.bfloat16, "up to 256 values, in multiples of 8, not 100"),
        (LATENT, torch.bfloat16, ""),
        (
            LATENT | {"qk_nope_head_dim": 256},
            torch.bfloat16,
            "up to 256 values, in multiples of 8, not 320",
        ),
        ({"num_attention_heads": [32, 16]}, torch.bfloat16, "differ in their heads"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_rule_by_which_a_run_and_its_plan_leave_the_mask_out(config, dtype, compiled, why):
    found = choose_model_kernels(SimpleNamespace(**{**LLAMA, **config}), dtype, compiled)
    assert why in found.mask_reason
    assert bool(why) == bool(found.mask_reason)
    assert found.attention == ("mask" if why else "varlen")


def test_a_gpu_is_asked_for_its_capability_and_tried(monkeypatch):
    tried = []

    def wrong(*of, window=None):
        tried.append((*of, window))
        return answers.pop(0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(varlen_attention, "varlen_kernel_fault", wrong)
    llama = SimpleNamespace(**LLAMA, sliding_window=512)
    old = choose_model_kernels(llama, torch.bfloat16, False, GPU)
    assert old.mask_reason == "torch has no such kernel for a GPU of compute capability 7.5"
    assert not tried
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    answers = ["wrong", "", "windows are wrong"]
    assert choose_model_kernels(llama, torch.bfloat16, False, GPU).mask_reason == "wrong"
    assert tried == [(GPU, torch.bfloat16, 128, 4, None)]
    found = choose_model_kernels(llama, torch.bfloat16, False, GPU)
    assert (found.attention, found.window) == ("varlen", "mask")
    assert found.mask_reason == "windows are wrong"
    assert tried[1:] == [(GPU, torch.bfloat16, 128, 4, None), (GPU, torch.bfloat16, 128, 4, 70)]
    assert choose_model_kernels(llama, torch.bfloat16, False, CPU) == choose_kernels(
        "cpu", False, True
    )
    assert len(tried) == 3


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({}, [None, None]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 512}, [512, 512]),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 2}, [None, None]),
        (
            {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]},
            [None, 512],
        ),
        ({"layer_types": ["sliding_attention", "full_attention"]}, [None, None]),
    ],
)
def test_layers_with_a_sliding_window_are_told_by_the_config(said, windows):
    assert layer_windows(SimpleNamespace(num_hidden_layers=2, **said)) == windows


@pytest.mark.parametrize(
    ("capability", "dtype", "found"),
    [
        ((9, 0), torch.bfloat16, ""),
        ((10, 3), torch.bfloat16, ""),
        ((8, 0), torch.bfloat16, "bfloat16 on compute capability 8.0"),
        ((9, 0), torch.float32, "float32 on compute capability 9.0"),
    ],
)
def test_it_is_said_where_a_gpu_multiplies_expert_by_expert(monkeypatch, capability, dtype, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert explain_expert_loop(dtype, CPU) == ""
    why = explain_expert_loop(dtype, GPU)
    assert why.endswith(found)
    said = str(Kernels("varlen", None, "F.rms_norm", "own", expert_loop_reason=why))
    assert ("experts in a loop: torch has grouped matmuls" in said) == bool(found)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize(
    "kernels",
    [
        choose_kernels(*of)
        for of in [
            ("cpu", False, True),
            ("cpu", True, False),
            ("cuda", False, True),
            ("cuda", True, False),
            ("cuda", False, True, "old"),
            ("cuda", False, True, "", "wrong"),
        ]
    ],
)
def test_an_engine_does_what_is_chosen(kernels, within, monkeypatch):
    done, asked = [], []
    monkeypatch.setattr(layers, "choose_model_kernels", lambda *of: asked.append(of) or kernels)
    for name in ("use_lora_linear", "use_faster_swiglu", "use_faster_rms_norm"):
        monkeypatch.setattr(
            layers, name, lambda *given, name=name, **options: done.append((name, options))
        )
    module = LossModel(torch.nn.Identity(), SimpleNamespace(model_type="llama"), within)
    use_faster_layers(module, [], False, torch.bfloat16, GPU)
    assert bool(asked[0][-1]) == (not within)
    assert module.uses_document_attention == (kernels.attention != "mask")
    assert module.has_varlen_kernel == (kernels.attention == "varlen")
    assert module.kernel_has_windows == (kernels.window == "varlen")
    wanted = [("use_lora_linear", {})]
    if kernels.swiglu == "own":
        wanted.append(("use_faster_swiglu", {}))
    if kernels.norm != "transformers":
        wanted.append(("use_faster_rms_norm", {"uses_torch": kernels.norm == "F.rms_norm"}))
    assert done == wanted
