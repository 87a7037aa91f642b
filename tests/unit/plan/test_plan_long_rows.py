"""What a plan says of long rows: pieces of MLPs, and inputs of blocks on the host."""

import json

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.memory.policy import Phase
from hpc_tune.plan import report
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import PhaseMemory, limit_tokens_by_host
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


def planned(model, *words, gpu=80 * GIB, host=1024 * GIB, ranks=1):
    config = load_config(None, [*LONG, f"model.path={model}", *words])
    return report.make_plan(config, Machine(1, ranks, gpu, host))


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
    assert "MLPs in 4 pieces of a row" in "\n".join(report.plan_to_lines(auto, []))
    assert "MLPs" not in "\n".join(report.plan_to_lines(whole, []))


@pytest.mark.full
def test_a_model_without_mlps_that_can_be_cut_has_no_pieces(tmp_path):
    """Mixtral's are routed experts."""
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **experts, "num_local_experts": 4}))
    plan = planned(tmp_path, gpu=int(1.7 * GIB))
    assert plan.trace.row_pieces == 0
    assert "MLPs" not in "\n".join(report.plan_to_lines(plan, []))
    changes = [remedy.changes for remedy in plan.remedies]
    assert {"parallel.offload_activations": True} in changes
    assert not any("parallel.row_pieces" in (change or ()) for change in changes)


def test_inputs_of_blocks_are_on_the_host_but_for_a_few(plans):
    auto, moved = plans["auto"], plans["moved"]
    inputs = BLOCKS * SEQ_LEN * HIDDEN * BYTES
    assert moved.trace.moved_bytes == inputs
    saved = auto.trace.peak_bytes - moved.trace.peak_bytes
    assert inputs * (BLOCKS - 3) / BLOCKS <= saved <= inputs
    assert moved.steady_phase.rank_bytes - auto.steady_phase.rank_bytes == inputs
    said = f"inputs of blocks on the host ({format_bytes(inputs)} per rank)"
    assert said in "\n".join(report.plan_to_lines(moved, []))


def test_the_memory_of_a_node_ends_rows_whose_inputs_are_there(model):
    words = [f"parallel.{name}" for name in ("offload_activations=true", "context=4", "shard=4")]
    host = 64 * GIB
    small = planned(model, *words, host=host, ranks=4)
    room_bytes = int(0.85 * host) - small.steady_phase.node_bytes(small.machine)
    # Each token has one input per block, on one of the ranks that share its row.
    longer = room_bytes // (BLOCKS * HIDDEN * BYTES)
    assert small.tokens_that_fit == pytest.approx(SEQ_LEN + longer, abs=4)
    assert small.bound_by == "node"
    assert ", by the memory of a node: " in "\n".join(report.plan_to_lines(small, []))
    assert report.plan_from_json(report.plan_to_json(small, [])).bound_by == "node"


@pytest.mark.parametrize(("host", "tokens"), [(200, 500), (240, 670), (100, 70), (60, 0)])
def test_a_node_holds_as_many_inputs_as_its_memory_has_room_for(host, tokens):
    # Two ranks of 85 bytes, of which 50 are the inputs of 500 tokens; 85% may be filled.
    steady = PhaseMemory(Phase.STEADY, 10, 85)
    machine = Machine(1, 2, 1000, host)
    assert limit_tokens_by_host(10_000, [steady], machine, 50, 500) == (tokens, "node")
    assert limit_tokens_by_host(tokens, [steady], machine, 50, 500) == (tokens, "GPU")
    assert limit_tokens_by_host(10_000, [steady], machine, 0, 500) == (10_000, "")


@pytest.mark.full
def test_what_helps_long_rows_is_advised_where_all_else_is_recomputed(model):
    small = planned(model, "parallel.row_pieces=1", gpu=int(1.7 * GIB))
    settings = [remedy.changes for remedy in small.remedies]
    assert {"parallel.row_pieces": 4} in settings
    assert {"parallel.offload_activations": True} in settings
