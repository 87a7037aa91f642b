"""Families of models whose rows ranks share: losses and norms of one rank, by every method."""

import itertools
import json
import random

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.errors import ConfigError
from tests.support import nccl_rules
from tests.support.random_runs import Draw, write
from tests.support.training import SMALL, launch_runs, many_runs, rows

# Neither 2 nor 4 divides it: the last part of a row is padded. Where 4 ranks share a row that do
# not divide the 6 heads, they gather keys.
ROW_TOKENS = 187
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.1,  # so that what attention does is seen in the loss
}
WINDOW = {"sliding_window": 24}
CAPS = {"attn_logit_softcapping": 0.2, "final_logit_softcapping": 0.5}  # small models reach these
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SINKS = {"num_local_experts": 4, "num_attention_heads": 6, "num_key_value_heads": 1}
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 6},
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
FAMILIES = {
    "llama": {"hidden_size": 96, "num_attention_heads": 6},
    "qwen2": {},  # biases
    "gemma2": {**WINDOW, **CAPS, "query_pre_attn_scalar": 16},  # a window in every second layer
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 16},
    "gpt_oss": {**WINDOW, **EXPERTS, **SINKS},
    "mistral": {**WINDOW, "num_attention_heads": 6},
    "phi3": {"sliding_window": 40},  # one matrix for queries, keys and values
    "deepseek_v3": {**EXPERTS, **LATENT},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "cohere2": {**WINDOW, "logit_scale": 0.5},
}
MIXTURES = ("gpt_oss", "deepseek_v3", "qwen3_moe")
METHODS = {
    "lora": ["tune.method=lora", "optim.lr=2e-3"],
    "qlora": ["tune.method=qlora", "optim.lr=2e-3"],
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "dpo": ["tune.method=lora", "tune.objective=dpo", "tune.dropout=0", "optim.lr=2e-3"],
}
# By axis and ranks that share a row: ranks and the other axes.
LAYOUTS = {
    ("replicate", 2): (4, ["replicate=4"]),
    ("replicate", 4): (4, ["replicate=4"]),
    ("shard", 2): (4, ["replicate=2", "shard=2", "reshard=block"]),
    ("shard", 4): (4, ["shard=4"]),
    ("tensor", 2): (4, ["tensor=2", "shard=2"]),
    ("tensor", 4): (8, ["tensor=2", "shard=4"]),
    ("pipeline", 2): (4, ["pipeline=2", "shard=2"]),
    ("pipeline", 4): (8, ["pipeline=2", "replicate=4"]),
    ("expert", 2): (4, ["shard=4", "expert=2"]),
    ("expert", 4): (4, ["shard=4", "expert=4"]),
}
# Method and ranks that share a row; "-" is refused.
TABLE = """
             replicate  shard    tensor  pipeline  expert
llama        lora-4     full-2   dpo-2   qlora-2   -
qwen2        qlora-2    lora-4   full-2  dpo-2     -
gemma2       full-4     dpo-4    lora-2  -         -
gemma2       -          qlora-2  -       -         -
gemma3_text  dpo-2      qlora-4  full-2  lora-2    -
gpt_oss      dpo-2      qlora-4  -       -         full-4
gpt_oss      -          -        -       -         lora-2
mistral      qlora-4    lora-2   dpo-4   full-2    -
phi3         full-2     dpo-4    lora-2  qlora-4   -
deepseek_v3  dpo-4      full-2   lora-2  qlora-2   dpo-2
qwen3_moe    lora-4     dpo-2    full-2  lora-2    qlora-4
cohere2      full-2     qlora-4  lora-4  dpo-2     -
"""
AXES, *_LINES = (line.split() for line in TABLE.strip().splitlines())
CASES = [
    (family, axis, method, int(context))
    for family, *cells in _LINES
    for axis, cell in zip(AXES, cells, strict=True)
    for method, context in ([] if cell == "-" else [cell.split("-")])
]
SAMPLE = [("llama", "replicate", "lora", 4), ("gpt_oss", "expert", "lora", 2)]
# Without the rows that are shared they are refused as well.
REFUSED = {
    ("gpt_oss", "tensor"): "no plan for splitting a gpt_oss model's matrices",
    ("gpt_oss", "pipeline"): "are not all of one kind",
    ("gemma2", "pipeline"): "are not all of one kind",
    ("llama", "expert"): "the experts of a llama model cannot be split over ranks",
}


def num_ranks(case):
    _, axis, _, context = case
    return LAYOUTS[axis, context][0]


MARKED = [
    pytest.param(
        *case, marks=() if case in SAMPLE else pytest.mark.full, id=" ".join(map(str, case))
    )
    for case in CASES
]


def test_each_pair_of_family_axis_method_and_ranks_that_share_a_row_is_in_the_table():
    dense = set(FAMILIES) - set(MIXTURES)
    refused = {*REFUSED, *((family, "expert") for family in dense), ("tensor", "qlora")}
    values = FAMILIES, AXES, METHODS, (2, 4)
    for one, other in itertools.combinations(range(len(values)), 2):
        missing = {*itertools.product(values[one], values[other])} - refused
        missing -= {(case[one], case[other]) for case in CASES}
        assert not missing
    assert not {case[:2] for case in CASES} & refused
    assert set(SAMPLE) < set(CASES)


def write_rows(folder):
    """Write ragged prompts with an answer, and with two; some fill a row of their own."""
    rng = random.Random(57)

    def text(least, most):
        return "".join(rng.choice("abcdefgh.?") for _ in range(rng.randint(least, most)))

    answers, pairs = [], []
    for number in range(24):
        fills = number % 8 == 3
        prompt, one, other = text(1, 12), text(1, 20), text(1, 20) + "!"
        if fills and (len(one) + len(other)) % 2 == 0:
            one += "."  # of an odd number of tokens the prompts are cut alike
        rest = text(ROW_TOKENS, ROW_TOKENS) if fills else ""
        answers.append({"prompt": prompt, "completion": one + other + rest})
        pairs.append({"prompt": prompt + rest, "chosen": one, "rejected": other})
    for name, found in (("answers", answers), ("pairs", pairs)):
        lines = (json.dumps(row) + "\n" for row in found)
        (folder / f"{name}.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("families")
    write_rows(made)
    return made


def model_of(folder, family):
    """Return the folder of a small model of a family."""
    if not (folder / family).exists():
        (folder / family).mkdir()
        write(Draw(57, family, SIZES | FAMILIES[family], (), (), (), ()), folder / family)
    return folder / family / "model"


def job(folder, family, method, name, *axes, stop_after=None):
    data = "pairs.jsonl" if method == "dpo" else "answers.jsonl"
    words = [*SMALL, f"model.path={model_of(folder, family)}", f"data.path={folder / data}"]
    words += [f"data.cache={folder / 'data'}", f"data.seq_len={ROW_TOKENS}"]
    words += ["batch.global_size=4", "train.max_steps=3", f"run.dir={folder / name}"]
    words += [*METHODS[method], *(f"parallel.{axis}" for axis in axes)]
    if family in MIXTURES and method != "full":
        words.append("tune.targets=[all-linear,experts]")
    return {"overrides": words, "stop_after": stop_after}


@pytest.fixture(scope="module")
def alone(folder):
    """Return a function that trains families by methods on one rank, each once."""
    done = set()

    def train(wanted):
        new = [both for both in dict.fromkeys(wanted) if both not in done]
        done.update(new)
        jobs = [job(folder, *both, " ".join(both)) for both in new]
        assert many_runs(1, jobs, folder) == [0] * len(jobs)
        for store in (folder / "data").glob("*.h5"):
            assert TokenStore.open(store).length_values.max() == ROW_TOKENS

    return train


@pytest.fixture(scope="module")
def launched(folder, alone):
    """Return a function that gives how a case ended; those of as many ranks run together."""
    ended = {}

    def launch(case):
        if case not in ended:
            together = [
                c
                for c in CASES
                if num_ranks(c) == num_ranks(case) and (c in SAMPLE) == (case in SAMPLE)
            ]
            alone((family, method) for family, _, method, _ in together)
            jobs = []
            for family, axis, method, context in together:
                axes = *LAYOUTS[axis, context][1], f"context={context}"
                jobs.append(job(folder, family, method, f"{family} {axis} {method}", *axes))
            done = launch_runs(num_ranks(case), jobs, folder)
            ended.update(zip(together, done, strict=True))
        return ended[case]

    return launch


def assert_alike(run, one):
    for key in ("loss", "grad_norm"):
        found, wanted = (list(rows(each, key).values()) for each in (run, one))
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
        print(f"{run.name}: {key} {gap:.1e}")
        assert found == pytest.approx(wanted, rel=1e-5), key


@pytest.mark.parametrize(("family", "axis", "method", "context"), MARKED)
@pytest.mark.timeout(900)  # the first of a number of ranks waits for all of them
def test_ranks_that_share_rows_learn_what_one_rank_does(
    folder, launched, family, axis, method, context
):
    ended = launched((family, axis, method, context))
    assert ended.code == 0, ended.output
    run = folder / f"{family} {axis} {method}"
    assert_alike(run, folder / f"{family} {method}")
    if family not in MIXTURES:
        sent, predicted = (rows(run, key) for key in ("sent_bytes", "expected_bytes"))
        kinds = ["all_to_all"] if "all_to_all" in sent[1] else ["all_gather", "reduce_scatter"]
        for kind in kinds:
            assert [n[kind] for n in sent.values()] == [n[kind] for n in predicted.values()], kind


@pytest.mark.full
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.timeout(1200)
def test_families_that_share_rows_keep_nccls_rules(folder, alone, monkeypatch, mode):
    """See tests/support/nccl_rules.py."""
    monkeypatch.setenv(nccl_rules.MODE, mode)
    cases = [case for case in CASES if num_ranks(case) == 4]
    alone((family, method) for family, _, method, _ in cases)
    jobs = []
    for family, axis, method, context in cases:
        axes = *LAYOUTS[axis, context][1], f"context={context}"
        jobs.append(job(folder, family, method, f"{family} {axis} {method} {mode}", *axes))
    ended = launch_runs(4, jobs, folder, 1100, nccl_rules.__name__)
    assert not [done.output for done in ended if done.code]
    for family, axis, method, _ in cases:
        run = folder / f"{family} {axis} {method} {mode}"
        assert_alike(run, folder / f"{family} {method}")


@pytest.mark.full
@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "lora"), ("qwen3_moe", "full")])
def test_a_run_is_gone_on_with_where_other_numbers_of_ranks_share_a_row(
    folder, alone, family, method
):
    alone([(family, method)])
    name = f"{family} resumed"
    for n, axes, stop in (
        (4, ["shard=4", "expert=2", "context=4"], 1),
        (4, ["replicate=2", "shard=2", "context=2"], 1),
        (1, [], None),
    ):
        jobs = [job(folder, family, method, name, *axes, stop_after=stop)]
        assert many_runs(n, jobs, folder) == [75 if stop else 0]
    assert_alike(folder / name, folder / f"{family} {method}")


def test_four_bits_in_parts_of_matrices_are_refused(folder):
    words = job(folder, "llama", "qlora", "refused", "tensor=2", "shard=2", "context=2")
    with pytest.raises(ConfigError, match="qlora with parallel.tensor > 1"):
        load_config(None, words["overrides"])


@pytest.mark.full
def test_what_a_family_does_not_take_is_refused_by_name(folder):
    jobs = []
    for family, axis in REFUSED:
        axes = *LAYOUTS[axis, 2][1], "context=2"
        jobs.append(job(folder, family, "lora", f"{family} {axis} refused", *axes))
    for why, ended in zip(REFUSED.values(), launch_runs(4, jobs, folder), strict=True):
        assert ended.code == 2
        assert why in ended.output
