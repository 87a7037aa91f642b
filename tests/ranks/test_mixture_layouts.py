"""Mixtures of experts: one loss in every layout, with adapters on experts and all trained."""

import itertools

import pytest

from tests.support.mixtures import write_mixture
from tests.support.training import SMALL, many_runs, rows, worst_gap

ON_TWO = {"shard": ["parallel.shard=2"], "tensor": ["parallel.tensor=2"]}
ON_TWO_TOO = {
    "expert": ["parallel.shard=2", "parallel.expert=2"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
    "zero 3": ["parallel.zero_stage=3"],
    "recomputed": ["parallel.shard=2", "parallel.expert=2", "parallel.recompute=full"],
}
SHARDED_EXPERTS = ["parallel.shard=4", "parallel.expert=2"]
ON_FOUR = {
    "replicas": ["parallel.replicate=2", "parallel.shard=2", "parallel.expert=2"],
    "stages": ["parallel.pipeline=2", "parallel.shard=2", "parallel.expert=2"],
    "sharded experts": [*SHARDED_EXPERTS, "parallel.reshard=block"],
    "recomputed and kept": [
        *SHARDED_EXPERTS,
        "parallel.reshard=micro",
        "parallel.blocks_per_unit=2",
        "parallel.recompute=full",
    ],
    "kept a step": [*SHARDED_EXPERTS, "parallel.reshard=step"],
}
ON_EIGHT = {
    "replicas of sharded experts": [*SHARDED_EXPERTS, "parallel.replicate=2"],
    "stages of sharded experts": [*SHARDED_EXPERTS, "parallel.pipeline=2"],
}
EXPERTS = ["tune.targets=[all-linear,experts]", "tune.rank=4"]


def words_of(tmp_path, family, **said):
    model = write_mixture(family, tmp_path / family, **said)
    words = [*SMALL, f"model.path={model}", "data.path=builtin:pydocs:heldout"]
    words += ["batch.global_size=4", "train.max_steps=4", f"data.cache={tmp_path / 'data'}"]
    return [*words, "optim.lr=1e-3"]


def jobs_of(tmp_path, words, layouts):
    return [{"overrides": [*words, f"run.dir={tmp_path / k}", *v]} for k, v in layouts.items()]


def assert_alike(tmp_path, names):
    """Compare losses and norms of each step with those of one process."""
    for name, key in itertools.product(names, ("loss", "grad_norm")):
        found, wanted = (list(rows(tmp_path / run, key).values()) for run in (name, "alone"))
        assert worst_gap(found, wanted) < 1e-5, (name, key)


def test_layouts_change_no_loss_and_experts_stop_and_go_on_elsewhere(tmp_path):
    words = [*words_of(tmp_path, "qwen2_moe"), *EXPERTS]
    assert many_runs(1, jobs_of(tmp_path, words, {"alone": ["batch.micro_size=4"]}), tmp_path) == [
        0
    ]
    resumed = [*words, f"run.dir={tmp_path / 'resumed'}"]
    jobs = [{"overrides": [*resumed, *ON_FOUR["sharded experts"]], "stop_after": 2}]
    assert many_runs(4, jobs, tmp_path) == [75]
    jobs = [*jobs_of(tmp_path, words, ON_TWO), {"overrides": [*resumed, "parallel.tensor=2"]}]
    assert many_runs(2, jobs, tmp_path, timeout=600.0) == [0] * len(jobs)
    assert_alike(tmp_path, (*ON_TWO, "resumed"))
    sent, expected = (rows(tmp_path / "tensor", f"{k}_bytes") for k in ("sent", "expected"))
    assert sent == expected
    sent, expected = (rows(tmp_path / "resumed", f"{k}_bytes")[2] for k in ("sent", "expected"))
    assert sent["all_reduce"] == expected["all_reduce"]
    assert 0 < sent["all_to_all"] < 2 * expected["all_to_all"]  # as routers choose


@pytest.mark.full
def test_recomputed_experts_in_bf16_have_the_losses_of_those_that_are_kept(tmp_path):
    # Their weights are cast when they are gathered, which a recomputation need not do again.
    words = [*words_of(tmp_path, "qwen2_moe"), "tune.method=full", "model.dtype=bf16"]
    layouts = {
        level: [*ON_TWO_TOO["expert"], f"parallel.recompute={level}"]
        for level in ("none", "selective", "full")
    }
    assert many_runs(2, jobs_of(tmp_path, words, layouts), tmp_path) == [0, 0, 0]
    for key in ("loss", "grad_norm"):
        kept, *recomputed = (rows(tmp_path / level, key) for level in layouts)
        assert recomputed == [kept, kept]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("trained", ["experts", "full"])
def test_families_have_one_loss_in_more_layouts(tmp_path, family, trained):
    words = words_of(tmp_path, family)
    words += EXPERTS if trained == "experts" else ["tune.method=full"]
    assert many_runs(1, jobs_of(tmp_path, words, {"alone": ["batch.micro_size=4"]}), tmp_path) == [
        0
    ]
    refused = {"gpt_oss": ("tensor", "pipeline", "stages")}.get(family, ())  # no plan; by number
    on_two = {k: v for k, v in (ON_TWO | ON_TWO_TOO).items() if k not in refused}
    on_four = {k: v for k, v in ON_FOUR.items() if k not in refused}
    assert set(many_runs(2, jobs_of(tmp_path, words, on_two), tmp_path, timeout=900.0)) == {0}
    assert set(many_runs(4, jobs_of(tmp_path, words, on_four), tmp_path, timeout=900.0)) == {0}
    assert_alike(tmp_path, (*on_two, *on_four))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packed", ["tune.method=qlora", "tune.base_dtype=fp8"])
def test_packed_experts_have_one_loss_wherever_they_are_spread(tmp_path, packed):
    if packed == "tune.method=qlora":
        pytest.importorskip("bitsandbytes")
    words = [*words_of(tmp_path, "mixtral", num_local_experts=8), *EXPERTS, packed]
    assert many_runs(1, jobs_of(tmp_path, words, {"alone": ["batch.micro_size=4"]}), tmp_path) == [
        0
    ]
    on_two = {k: (ON_TWO | ON_TWO_TOO)[k] for k in ("shard", "expert", "pipeline", "recomputed")}
    assert set(many_runs(2, jobs_of(tmp_path, words, on_two), tmp_path, timeout=900.0)) == {0}
    assert set(many_runs(4, jobs_of(tmp_path, words, ON_FOUR), tmp_path, timeout=900.0)) == {0}
    assert_alike(tmp_path, (*on_two, *ON_FOUR))
    for name in ("expert", *ON_FOUR):
        sent, expected = (rows(tmp_path / name, f"{k}_bytes")[2] for k in ("sent", "expected"))
        assert sent["all_gather"] == expected["all_gather"], name


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trained", ["experts", "full"])
def test_sharded_experts_stop_and_go_on_in_other_layouts_and_back(tmp_path, trained):
    words = words_of(tmp_path, "qwen2_moe")
    words += EXPERTS if trained == "experts" else ["tune.method=full"]
    words += ["batch.global_size=6", "batch.micro_size=1"]  # some ranks have one row less
    assert many_runs(1, jobs_of(tmp_path, words, {"alone": []}), tmp_path) == [0]

    def leg(ranks, layout, stop):
        job = {"overrides": [*words, f"run.dir={tmp_path / 'run'}", *layout], "stop_after": stop}
        assert many_runs(ranks, [job], tmp_path) == [75 if stop else 0]

    leg(4, ON_FOUR["sharded experts"], 1)
    leg(2, ON_TWO["shard"], 1)
    leg(4, ON_FOUR["kept a step"], 1)
    leg(1, [], None)
    assert_alike(tmp_path, ["run"])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trained", ["experts", "full"])
def test_replicas_and_stages_of_sharded_experts_on_eight_ranks(tmp_path, trained):
    words = words_of(tmp_path, "qwen2_moe")
    words += EXPERTS if trained == "experts" else ["tune.method=full"]
    words += ["batch.global_size=8"]
    assert many_runs(1, jobs_of(tmp_path, words, {"alone": ["batch.micro_size=8"]}), tmp_path) == [
        0
    ]
    assert set(many_runs(8, jobs_of(tmp_path, words, ON_EIGHT), tmp_path, timeout=900.0)) == {0}
    assert_alike(tmp_path, ON_EIGHT)
