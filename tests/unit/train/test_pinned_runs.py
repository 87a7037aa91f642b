"""A run whose batches are pinned and copied, as for a GPU, learns what it learns without."""

import json

import pytest
import torch

from hpc_tune.batch import Batch
from hpc_tune.config.load import load_config
from hpc_tune.data.loader import Loader
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, losses, rows

MATRIX = ["sft", "dpo", "ipo", "simpo", "orpo", "kto"]


def rows_of(objective):
    for n in range(24):
        pair = {"chosen": "yes " * (n % 7 + 1), "rejected": "no " * (n % 4 + 1)}
        answer = {"completion": f"is {n} " * (n % 5 + 1)}
        of = {"kto": {**answer, "label": n % 3 == 0}, "sft": {**answer, "weight": 0.5 + n % 2}}
        yield {"prompt": f"what {n}", **of.get(objective, pair)}


def as_for_a_gpu(monkeypatch):
    """Pin what the loader gives, and copy it, as int64 again, before each pass."""
    built = Loader.next_step
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(Loader, "next_step", lambda self: [b.pinned() for b in built(self)])
    monkeypatch.setattr(
        Batch, "to", lambda self, device: self._map_tensors(torch.Tensor.long, torch.clone)
    )


@pytest.mark.full
@pytest.mark.parametrize("objective", MATRIX)
def test_pinned_batches_of_every_objective_have_the_losses_of_others(
    tmp_path, monkeypatch, objective
):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(objective)))
    words = [*SMALL, f"data.path={data}", f"tune.objective={objective}", "data.seq_len=256"]
    words += [f"data.cache={tmp_path / 'data'}", "train.max_steps=5", "optim.lr=1e-2"]
    words += ["data.eval_fraction=0.2", "train.eval_every_steps=2", "batch.micro_size=2"]
    found = {}
    for name in ("plain", "pinned"):
        run_dir = tmp_path / name
        assert run(load_config(None, [*words, f"run.dir={run_dir}"]), StopAfter(None)) == 0
        found[name] = losses(run_dir), rows(run_dir, "eval_loss")
        as_for_a_gpu(monkeypatch)
    assert found["plain"] == found["pinned"]
    assert len(set(found["plain"][0])) == 5, "and it does learn"
