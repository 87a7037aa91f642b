"""What an engine is told of rows: how many of their tokens its rank has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.faults import NO_FAULTS
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import ModelSize
from hpc_tune.train import trainer


@pytest.mark.parametrize(("context", "tokens"), [(1, 1000), (4, 250), (3, 334), (6, 168)])
def test_ranks_that_share_rows_have_a_part_of_each(monkeypatch, context, tokens):
    monkeypatch.setattr(trainer, "NativeEngine", lambda _, settings: settings)
    config = load_config(None, ["data.seq_len=1000", "train.compile=false"])
    job: Any = SimpleNamespace(
        setup_comm=SimpleNamespace(
            device=torch.device("cpu"), run_and_agree=None, begin=lambda _: None
        ),
        monitor=SimpleNamespace(require_free_bytes=None, enter=lambda *_, **__: None),
        faults=NO_FAULTS,
    )
    model: Any = SimpleNamespace(config=config, built=SimpleNamespace(dtype=torch.float32))
    layout = Layout(replicate=12, shard=1, context=context)
    heads = SimpleNamespace(num_attention_heads=12 if context < 6 else 8)  # 6 do not divide 8
    plan = StepPlan(layout, ParallelConfig(), ModelSize(0, 0, 0, 0), heads, 4)
    settings: Any = trainer.load_engine(job, model, plan)
    assert settings.row_tokens == tokens
