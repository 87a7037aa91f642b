"""Weights of rows and messages: one loss in every layout and micro-batch."""

import pytest

from tests.support.training import SMALL, losses, many_runs, rows, worst_gap
from tests.unit.train.test_weighted_loss import weighted_rows

# Rows over ranks, and micro-batches over stages.
SAMPLE = {
    "shard, full": ["parallel.shard=2", "tune.method=full"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
}
OTHERS = {
    "replicate": ["parallel.replicate=2"],
    "tensor": ["parallel.tensor=2"],
    "zero": ["parallel.zero_stage=3"],
}


@pytest.mark.full
@pytest.mark.parametrize("layouts", [SAMPLE, OTHERS], ids=["a sample", "the others"])
def test_layouts_and_micro_batches_change_no_weighted_loss(tmp_path, layouts):
    data = weighted_rows(tmp_path / "rows.jsonl", 60)
    words = [*SMALL, f"data.path={data}", f"data.eval_path={data}", "data.seq_len=256"]
    words += ["batch.global_size=4", "train.max_steps=4", f"data.cache={tmp_path / 'data'}"]
    words += ["optim.lr=1e-3"]

    def job(name, *more):
        return {"overrides": [*words, f"run.dir={tmp_path / name}", *more]}

    alone = {"lora": "tune.method=lora", "full": "tune.method=full"}
    jobs = [job(name, "batch.micro_size=4", method) for name, method in alone.items()]
    assert many_runs(1, jobs, tmp_path) == [0, 0]
    jobs = [job(name, *more) for name, more in layouts.items()]
    assert many_runs(2, jobs, tmp_path, timeout=600.0) == [0] * len(layouts)
    for name in layouts:
        reference = tmp_path / ("full" if "full" in name else "lora")
        assert worst_gap(losses(tmp_path / name), losses(reference)) < 1e-5, name
        for key in ("eval_loss", "loss_tokens", "eval_tokens"):
            found, wanted = (list(rows(at, key).values()) for at in (tmp_path / name, reference))
            assert worst_gap(found, wanted) < 1e-5, (name, key)
