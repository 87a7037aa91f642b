"""Bytes that a rank sends in a step, against arithmetic and against what the engine counts."""

import json

import pytest
import torch
from transformers import AutoConfig

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.pipeline_parallel import split_into_stages
from hpc_tune.model.build import build
from hpc_tune.model.config_json import resolve_model_directory
from hpc_tune.plan.step_time import Network, tensor_axis_time
from hpc_tune.probe.links import Link, Links
from hpc_tune.step.layout import Layout
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from tests.support.mixtures import write_mixture
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

HIDDEN, WIDE, VOCAB, BLOCKS, R = 64, 96, 256, 10, 16
KV = 2 * 16  # two of the four heads


def write_shape(folder, name="llama3-8b", blocks=BLOCKS, **more):
    """Write the config.json of a small model of the family of ``name``."""
    shape = json.loads((resolve_model_directory(f"shape:{name}") / "config.json").read_text())
    small = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": blocks}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    text = json.dumps({**shape, **small, **heads, **ids, "head_dim": 16, **more})
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


def write_linear(folder):
    """Write the config.json of a small model three of whose four blocks have linear attention."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "vocab_size": VOCAB, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    linear = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **heads, **linear, pad_token_id=0)
    config.save_pretrained(folder)
    return folder


def expected(folder, method, layout, micros, loss_token_fraction=1.0, recomputes=False, **parallel):
    built = build(folder, torch.float32, TuneConfig(method=method), 0, reads_weights=False)
    settings = ParallelConfig(reshard="block", **parallel)
    return expected_bytes(
        StepPlan.for_model(built, layout, settings, loss_token_fraction), micros, recomputes
    )


MICROS = [(32, 20)] * 4
TOKENS = 128
SCALARS = 2 * 7 * 4 // 8 + 2 * 7 * 8 // 8  # the loss in fp32 and the norm in fp64, of 8 ranks


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_shape(tmp_path_factory.mktemp("shape") / "tied", tie_word_embeddings=True)


def test_all_trained_rank_0_of_tensor_2_x_pipeline_4_sums_up_three_of_ten_blocks(tied):
    sent = expected(tied, "full", Layout(1, 1, 2, 4), MICROS)
    # An all-reduce of n bytes over two ranks sends n: 2 x 1/2. In each of the three blocks, two
    # forward and two backward, and one of the embedding.
    activations = (3 * 4 + 1) * TOKENS * HIDDEN * 4
    embedding = VOCAB // 2 * HIDDEN * 4  # the first stage's and the last's half are added up
    assert sent == {"all_reduce": activations + embedding + SCALARS, "send": TOKENS * HIDDEN * 4}
    assert activations == 425_984
    assert embedding == 32_768
    assert SCALARS == 21


def test_with_adapters_their_whole_sides_are_added_up_over_the_tensor_axis(tied):
    sent = expected(tied, "lora", Layout(1, 1, 2, 4), MICROS)
    # The embedding's in place of the first block's last, of which nobody needs the gradient.
    activations = 3 * 4 * TOKENS * HIDDEN * 4
    # A of q, k, v, gate and up, B of o and down
    whole = 3 * R * (5 * HIDDEN + 2 * HIDDEN) * 4
    assert sent == {"all_reduce": activations + whole + SCALARS, "send": TOKENS * HIDDEN * 4}


def test_a_rank_with_the_head_sends_its_gradient_and_three_numbers_per_token_with_loss(tied):
    sent = expected(tied, "full", Layout(1, 1, 2), [(32, 20), (32, 1), (32, 0)])
    scalars = 4 + 8
    # The micro-batch without loss is not computed.
    activations = (BLOCKS * 4 + 1) * 2 * 32 * HIDDEN * 4
    assert sent == {"all_reduce": activations + 21 * (HIDDEN * 4 + 3 * 4) + scalars}


def test_a_stage_of_a_heavy_head_has_fewer_blocks_and_rank_0_more(tied):
    """The head has 53% of a block's values, if all tokens carry loss, and more with many words."""
    assert VOCAB * HIDDEN / (2 * HIDDEN * (HIDDEN + KV) + 3 * HIDDEN * WIDE + 2 * HIDDEN) < 0.54
    sent = expected(tied, "full", Layout(1, 1, 2, 2), MICROS)
    heavy = expected(tied, "full", Layout(1, 1, 2, 2), MICROS, loss_token_fraction=8.0)
    # 5 and 5 blocks; and 7 and 3, with a head of 4.2
    assert heavy["all_reduce"] - sent["all_reduce"] == 2 * 4 * TOKENS * HIDDEN * 4


def test_blocks_that_run_again_do_their_first_sum_again(tied):
    once = expected(tied, "full", Layout(1, 1, 2), MICROS)
    again = expected(tied, "full", Layout(1, 1, 2), MICROS, recompute="full")
    assert expected(tied, "full", Layout(1, 1, 2), MICROS, recomputes=True) == again
    assert again["all_reduce"] - once["all_reduce"] == BLOCKS * TOKENS * HIDDEN * 4


def test_what_blocks_sum_up_takes_the_seconds_of_its_bytes(tied):
    """The predicted seconds and the predicted bytes of a step are of the same messages."""
    layout, bytes_per_s = Layout(1, 1, 2), 1e6
    whole = expected(tied, "full", layout, MICROS)["all_reduce"]
    built = build(tied, torch.float32, TuneConfig(method="full"), 0, reads_weights=False)
    links = Links((Link((0, 1), (0, 0), 0.0, bytes_per_s),), ())
    network = Network.from_links(links, (0, 0))
    plan = StepPlan.for_model(built, layout, ParallelConfig(reshard="block"))
    found = tensor_axis_time(plan, (0, 1), network, (TOKENS, 80))
    scalars = 4 + 8
    assert bytes_per_s * found.transfer_s == pytest.approx(whole - scalars)


def test_an_interleaved_pipeline_fills_up_with_rows_of_one_token(tied):
    sent = expected(tied, "full", Layout(1, 1, 1, 4), [(32, 20)] * 6, stages_per_rank=2)
    assert sent["send"] == 3 * (6 * 32 + 2) * HIDDEN * 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape") / "mixture"
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return write_shape(folder, "qwen3-30b-a3b", blocks=2, **sizes)


def write_odd(folder):
    """Write the config.json of a mixture of 6 experts and 250 words, which 4 shards do not divide.

    Its embedding is the head too.
    """
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"vocab_size": 250, "tie_word_embeddings": True}
    return write_shape(folder, "qwen3-30b-a3b", blocks=2, **sizes)


def test_shards_of_rows_that_they_do_not_divide_are_sent_with_padding(tmp_path):
    """4 ranks hold 2 of 6 experts each, two of which are empty, and 63 of 250 words."""
    sent = expected(write_odd(tmp_path / "odd"), "lora", Layout(1, 4), [(32, 20)])
    expert, word = 3 * HIDDEN * 32, HIDDEN
    attention = 2 * HIDDEN * (HIDDEN + KV) + 2 * 16  # with the norms of a head's queries and keys
    router, norms = 8 * HIDDEN, 2 * HIDDEN  # a router has a row for each expert
    block = 8 * expert + router + attention + norms
    ends = 252 * word + HIDDEN  # the embedding is gathered once, with the last norm
    assert sent["all_gather"] == 3 * 4 * (2 * 2 * block + ends) // 4


EXPERTS_BYTES = 2 * 8 * 3 * HIDDEN * 32 * 4  # gate, up and down of 8 experts in two blocks


def test_experts_are_gathered_by_the_ranks_that_have_the_same_alone(mixture):
    """Of weights over 4 ranks each sends 3 / 4, of those of half the experts over 2 ranks 1 / 2."""
    whole, halves, spread = (
        expected(mixture, "full", Layout(1, 4, expert=expert), MICROS) for expert in (1, 2, 4)
    )
    in_all, in_halves = 3 * EXPERTS_BYTES // 4, EXPERTS_BYTES // 2 // 2
    for kind, times in (("all_gather", 2 * len(MICROS)), ("reduce_scatter", len(MICROS))):
        assert whole[kind] - halves[kind] == times * (in_all - in_halves), kind
        assert halves[kind] - spread[kind] == times * in_halves, kind
    # In each of two layers a token's hidden values go to two experts and back, and so do their
    # gradients; of rows that routers spread evenly a half stays, or a fourth.
    rows_bytes = 2 * 2 * TOKENS * HIDDEN * 4
    counts_bytes = 2 * len(MICROS) * 8 * 8  # of the rows for each expert
    assert "all_to_all" not in whole
    assert halves["all_to_all"] == (4 * rows_bytes + counts_bytes) // 2
    assert spread["all_to_all"] == (4 * rows_bytes + counts_bytes) * 3 // 4


def test_replicas_of_sharded_experts_add_up_their_own_part_alone(mixture):
    """An all-reduce of n bytes over two ranks sends n; of the experts n is a fourth of them."""
    plain, halves = (
        expected(mixture, "full", Layout(2, 4, expert=expert), MICROS) for expert in (1, 2)
    )
    assert plain["all_reduce"] == halves["all_reduce"]


ENGINE = """
import json, sys
import torch
from hpc_tune.batch import Batch
from hpc_tune.config.load import load_config
from hpc_tune.engine.base import EngineSettings, train_step
from hpc_tune.plan import trace
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.messages import expected_bytes
from hpc_tune.plan.traced_memory import TracedMemory

def batch(rows, length, loss_tokens):
    zeros = [torch.zeros(rows, length, dtype=torch.int64) for _ in range(3)]
    return Batch(*zeros, loss_tokens, rows * length, 0)

SHARE = 0.5
for folder, ranks, rank, settings in json.loads(sys.argv[1]):
    words = ["data.eval_path=null", f"model.path={folder}", *settings]
    config = load_config(None, words)
    step = trace.make_traced_step(config, ranks)
    built, layout = step.shape.build(), step.layout
    fake = trace.FakeTensorMode(allow_non_fake_inputs=True)
    with trace._fake_world(rank, ranks), fake, TracedMemory(0).watch():
        plan = StepPlan.for_model(built, layout, step.parallel, SHARE)
        settings = EngineSettings(plan, trace.DEVICE, config.optim, config.train)
        engine = trace.make_fake_engine(built, settings)
        for stage in engine.stages:
            stage.module.uses_document_attention = False
        batches = [batch(2, 16, 20), batch(2, 8, 5), batch(1, 16, 0), batch(2, 16, 32)]
        sent = [train_step(engine, batches, 57, 1e-3).sent_bytes for _ in range(2)]
    micros = [(one.tokens_BT.numel(), one.num_loss_tokens) for one in batches]
    pp_rank = layout.coordinates(rank).pipeline
    print(json.dumps([*sent, expected_bytes(plan, micros, pp_rank=pp_rank)]))
"""
FULL, LORA = "tune.method=full", "tune.method=lora"
FP32, BF16 = "model.dtype=fp32", "model.dtype=bf16"
IN_FP32 = "tune.param_dtype=fp32"
BLOCK = "parallel.reshard=block"
EXPERTS = "tune.targets=[all-linear,experts]"
CASES = [
    ("tied", [FULL, FP32, "parallel.tensor=2", "parallel.pipeline=4"]),
    ("tied", [FULL, BF16, IN_FP32, "parallel.tensor=2", "parallel.shard=2", BLOCK]),
    ("phi", [LORA, FP32, "parallel.tensor=2", "parallel.recompute=selective"]),
    ("linear", [FULL, FP32, "parallel.tensor=2"]),
    ("mixture", [LORA, FP32, "parallel.shard=4", "parallel.expert=2", BLOCK, EXPERTS]),
    ("mixture", [FULL, BF16, IN_FP32, "parallel.tensor=2"]),
    ("mixture", [LORA, FP32, "parallel.shard=2", "parallel.expert=2", "parallel.recompute=full"]),
    ("llama", [FULL, BF16, IN_FP32, "parallel.shard=2", BLOCK]),
    ("llama", [LORA, FP32, "parallel.pipeline=2", "parallel.shard=2", BLOCK]),
    ("odd", [FULL, FP32, "parallel.shard=4", BLOCK]),
    ("odd", [LORA, FP32, "parallel.shard=4", BLOCK]),
]
MORE_CASES = [
    *(
        ("mixture", [method, BF16, IN_FP32, *(f"parallel.{axis}" for axis in axes)])
        for method in (FULL, LORA)
        for axes in (
            ["shard=4", "expert=4", "reshard=block"],
            ["replicate=2", "shard=4", "expert=2", "reshard=block", "recompute=full"],
            ["shard=8", "expert=2", "reshard=micro", "blocks_per_unit=2"],
            ["shard=4", "expert=2", "reshard=step", "recompute=selective"],
            ["pipeline=2", "shard=4", "expert=2", "reshard=block"],
        )
    ),
    *(
        ("odd", [method, BF16, IN_FP32, *(f"parallel.{axis}" for axis in axes)])
        for method in (FULL, LORA)
        for axes in (
            ["replicate=2", "shard=4", "reshard=block"],
            ["shard=8", "expert=2", "reshard=micro"],
            ["pipeline=2", "shard=4", "expert=2", "reshard=step"],
            ["pipeline=2", "shard=4", "reshard=block"],
        )
    ),
    ("tied", [FULL, FP32, "parallel.shard=2", "parallel.reduce_dtype=bf16", BLOCK]),
    ("mixture", [FULL, BF16, IN_FP32, "parallel.tensor=2", "parallel.recompute=full"]),
    ("mixture", [LORA, BF16, EXPERTS, "parallel.tensor=2", "parallel.recompute=full"]),
    ("mixture", [LORA, FP32, "parallel.tensor=2", "parallel.shard=2", BLOCK]),
    ("qwen", [FULL, FP32, "parallel.tensor=2", "parallel.recompute=full"]),
    ("linear", [LORA, BF16, "parallel.tensor=2", "parallel.recompute=full"]),
    ("qwen", [FULL, FP32, "parallel.tensor=2", "parallel.shard=2", BLOCK]),
    *(
        ("llama", [method, BF16, IN_FP32, *(f"parallel.{axis}" for axis in axes)])
        for method in (FULL, LORA)
        for axes in (
            ["replicate=4"],
            ["replicate=2", "shard=2", "reshard=block"],
            ["shard=2", "reshard=micro", "recompute=full"],
            ["shard=2", "reshard=step"],
            ["replicate=2", "shard=1", "offload_params=cpu"],
            ["tensor=2", "replicate=2"],
            ["pipeline=2", "tensor=2", "shard=2", "reshard=block", "recompute=selective"],
            ["pipeline=4", "replicate=2"],
            ["pipeline=2", "stages_per_rank=2"],
        )
    ),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, marks=pytest.mark.full),
        pytest.param(MORE_CASES, marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
    ids=["few", "many"],
)
def test_the_engine_counts_what_the_formulas_say(tmp_path, mixture, cases):
    """Of layouts that take more ranks than a test can start: the real engine in a fake world."""
    folders = {
        "tied": write_shape(tmp_path / "tied", tie_word_embeddings=True),
        "llama": write_shape(tmp_path / "llama", blocks=5, tie_word_embeddings=False),
        "qwen": write_shape(tmp_path / "qwen", "qwen3-32b", blocks=5),
        "phi": write_shape(tmp_path / "phi", "phi3-mini", blocks=2),
        "linear": write_linear(tmp_path / "linear"),
        "mixture": mixture,
        "odd": write_odd(tmp_path / "odd"),
    }
    axes = ("replicate", "shard", "tensor", "pipeline")
    jobs = []
    for shape, settings in cases:
        sizes = dict(word.removeprefix("parallel.").split("=") for word in settings)
        ranks = torch.Size(int(sizes.get(axis, 1)) for axis in axes).numel()
        stages = int(sizes.get("pipeline", 1))
        firsts = range(0, ranks, ranks // stages)  # of each place on the pipeline axis
        jobs += [(str(folders[shape]), ranks, rank, settings) for rank in firsts]
    argv = [*python(), "-c", ENGINE, json.dumps(jobs)]
    done = run_ranks(argv, rank_environment(1), 3 * HANG_S)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(told) == len(jobs)
    for job, (first, second, formula) in zip(jobs, told, strict=True):
        assert first == second == formula, job


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_holds_its_own_blocks_where_blocks_differ(tmp_path, stages):
    """Of five blocks of DeepSeek-V3 the first has no experts."""
    base = write_mixture("deepseek_v3", tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 5}
    (base / "config.json").write_text(json.dumps(config))
    plans = []
    for place in range(stages):
        built = build(base, torch.float32, TuneConfig(method="full"), 0, reads_weights=False)
        plan = StepPlan.for_model(built, Layout(1, 1, pipeline=stages), ParallelConfig())
        own = sum(p.numel() for p in split_into_stages(built, plan, place)[0].module.parameters())
        assert sum(weights.num_values for weights in plan.weights_of_rank(place)) == own
        plans.append((plan.num_mixture_blocks(place), len(plan.blocks_of_rank(place))))
    assert sum(mixtures for mixtures, _ in plans) == 4
    assert sum(blocks for _, blocks in plans) == 5
