"""Losses of routers and tokens of experts: the same numbers in every layout and micro-batch."""

import json

import pytest

from tests.support.mixtures import spread_experts, write_mixture
from tests.support.training import SMALL, events, losses, many_runs, rows, worst_gap

STEPS = 3
LAYOUTS = {
    "shard, full": ["parallel.shard=2", "parallel.recompute=full"],
    "pipeline, lora": ["parallel.pipeline=2", "batch.micro_size=1"],
    "zero, lora": ["parallel.zero_stage=3"],
    "tensor, full": ["parallel.tensor=2"],
}
MORE_LAYOUTS = {
    "replicate, full": ["parallel.replicate=4", "batch.micro_size=1"],
    "hsdp, full": ["parallel.shard=2", "parallel.replicate=2", "parallel.recompute=selective"],
    "stages, full": ["parallel.pipeline=2", "parallel.replicate=2", "parallel.recompute=full"],
    "tensor, lora": ["parallel.tensor=2", "parallel.shard=2", "parallel.recompute=full"],
    "expert, full": ["parallel.replicate=2", "parallel.shard=2", "parallel.expert=2"],
    "zero 2, full": ["parallel.zero_stage=2", "batch.micro_size=1"],
    "zero 3, full": ["parallel.zero_stage=3", "parallel.recompute=selective"],
    "more ranks than rows, lora": ["parallel.replicate=4", "batch.global_size=3"],
}
LEARNS = ["tune.router_aux_loss=0.3", "tune.router_z_loss=0.05"]


def compare(tmp_path, n, layouts, families, learns):
    """Run each layout on ``n`` ranks and on one; check all that they report of a step."""
    jobs, alone = [], {}
    for family in families:
        directory = write_mixture(family, tmp_path / family)
        spread_experts(directory)
        for name, more in layouts.items():
            words = [*SMALL, f"model.path={directory}", "data.path=builtin:pydocs:heldout"]
            words += ["batch.global_size=6", f"train.max_steps={STEPS}", "optim.lr=1e-3", *learns]
            words += [f"data.cache={tmp_path / 'data'}", f"tune.method={name.split()[-1]}"]
            folder = tmp_path / f"{family} {name}"
            jobs.append({"overrides": [*words, *more, f"run.dir={folder}"]})
            rest = [word for word in more if word.startswith("batch.global")]
            single = tmp_path / f"{family} alone {' '.join([name.split()[-1], *rest])}"
            words += ["batch.micro_size=6", *rest, f"run.dir={single}"]
            alone[folder] = single, {"overrides": words}
    singles = {single: job for single, job in alone.values()}
    assert many_runs(1, list(singles.values()), tmp_path) == [0] * len(singles)
    assert many_runs(n, jobs, tmp_path, timeout=600.0) == [0] * len(jobs)
    for folder, (single, _) in alone.items():
        assert worst_gap(losses(folder), losses(single)) < 1e-5, folder
        for step, norm in rows(single, "grad_norm").items():
            assert rows(folder, "grad_norm")[step] == pytest.approx(norm, rel=1e-5), folder
        for step, wanted in rows(single, "experts").items():
            assert rows(folder, "experts")[step] == pytest.approx(wanted, rel=1e-5), folder
            assert wanted.keys() == {"largest", "unused"} | (
                {"aux_loss", "z_loss"} if learns else set()
            )
        tables = [json.loads((at / "experts.jsonl").read_text()) for at in (folder, single)]
        assert tables[0] == tables[1]
        sent, expected = (rows(folder, name) for name in ("sent_bytes", "expected_bytes"))
        # ZeRO's sum of the loss is in no formula, experts are sent what routers choose, and stages
        # are predicted as if all blocks were alike: DeepSeek-V3's first has no experts.
        words = folder.name.replace("deepseek_v3 stages", "unlike")
        if not any(word in words for word in ("zero", "expert", "unlike")):
            assert sent == expected
    return alone


@pytest.mark.full
def test_layouts_and_micro_batches_change_neither_losses_nor_counts(tmp_path):
    alone = compare(tmp_path, 2, LAYOUTS, ["qwen3_moe"], LEARNS)
    folder, _ = next(iter(alone.values()))
    assert sum(row["aux_loss"] > 1 for row in rows(folder, "experts").values()) == STEPS
    assert not [event for event in events(folder, "warning") if "starve" in event["message"]]


@pytest.mark.full
@pytest.mark.parametrize("learns", [LEARNS, []], ids=["learned", "counted"])
def test_four_ranks_and_other_families_too(tmp_path, learns):
    families = ["mixtral", "deepseek_v3"] if learns else ["qwen3_moe"]
    compare(tmp_path, 4, MORE_LAYOUTS, families, learns)
