"""What a plan says of long rows: pieces of MLPs, and inputs of blocks on the host."""

import json

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.plan import report
from hpc_tune.plan.hardware import Machine
from hpc_tune.units import format_bytes

GIB, SEQ_LEN = 1 << 30, 1 << 14
INNER, HIDDEN, BLOCKS, BYTES = 2048, 256, 8, 2
SHAPE = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512},
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": BLOCKS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16"},
}
LONG = ["tune.method=lora", "parallel.recompute=full", "model.dtype=bf16", "train.compile=false"]
LONG += [f"data.seq_len={SEQ_LEN}", "batch.micro_size=1", "batch.global_size=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def planned(model, *words, gpu=80 * GIB):
    config = load_config(None, [*LONG, f"model.path={model}", *words])
    return report.make_plan(config, Machine(1, 1, gpu, 1024 * GIB))


@pytest.fixture(scope="module")
def plans(model):
    return {
        "whole": planned(model, "parallel.row_pieces=1"),
        "auto": planned(model),
        "moved": planned(model, "parallel.offload_activations=true"),
    }


def test_pieces_take_less_of_a_device(plans):
    whole, auto = plans["whole"], plans["auto"]
    assert (whole.trace.row_pieces, auto.trace.row_pieces) == (1, SEQ_LEN // 4096)
    # Of an MLP's inner values, as many until something else is the worst moment.
    saved = whole.trace.peak_bytes - auto.trace.peak_bytes
    assert saved > INNER * BYTES * SEQ_LEN // 2
    assert auto.tokens_that_fit > whole.tokens_that_fit
    assert "MLPs in 4 pieces of a row" in "\n".join(report.as_lines(auto, []))
    assert "MLPs" not in "\n".join(report.as_lines(whole, []))


def test_inputs_of_blocks_are_on_the_host_but_for_a_few(plans):
    auto, moved = plans["auto"], plans["moved"]
    inputs = BLOCKS * SEQ_LEN * HIDDEN * BYTES
    assert moved.trace.moved_bytes == inputs
    saved = auto.trace.peak_bytes - moved.trace.peak_bytes
    assert inputs * (BLOCKS - 3) / BLOCKS <= saved <= inputs
    assert moved.steady_phase.rank_bytes - auto.steady_phase.rank_bytes == inputs
    said = f"inputs of blocks on the host ({format_bytes(inputs)} per rank)"
    assert said in "\n".join(report.as_lines(moved, []))


def test_what_helps_long_rows_is_advised_where_all_else_is_recomputed(model):
    small = planned(model, "parallel.row_pieces=1", gpu=int(1.7 * GIB))
    settings = [remedy.changes for remedy in small.remedies]
    assert {"parallel.row_pieces": 4} in settings
    assert {"parallel.offload_activations": True} in settings
