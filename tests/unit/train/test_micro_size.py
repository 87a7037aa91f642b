"""The rows of micro-batches of a run that goes on: those it had, or as many as fit by now."""

import contextlib
from types import SimpleNamespace

import pytest

from hpc_tune.checkpoint.state import RunState
from hpc_tune.config.load import load_config
from hpc_tune.step.layout import Layout
from hpc_tune.train.startup import micro_size

MEASURED, SAVED = 2, 16
LAYOUT = Layout(1, 2)


def rows_of(monkeypatch, saved=(), now=(), layout=LAYOUT):
    """Return the rows that a run with the settings ``now`` has, which resumes one with others."""
    monkeypatch.setattr(micro_size, "largest_micro_size", lambda *_: MEASURED)
    config = load_config(None, now)
    before = load_config(None, saved).model_dump()
    state = RunState(10, 40, "", {}, layout.saved_axes, SAVED, before)
    limit = SimpleNamespace(enter=lambda _: None, watching=contextlib.nullcontext)
    job = SimpleNamespace(
        config=config, make_stall_watch=lambda: limit, setup_comm=None, monitor=None, step_comm=None
    )
    plan = SimpleNamespace(layout=LAYOUT)
    return micro_size.decide_micro_size(job, SimpleNamespace(config=config), plan, None, state)


def test_a_run_that_goes_on_as_it_was_keeps_its_rows(monkeypatch):
    assert rows_of(monkeypatch) == SAVED
    free = ["run.name=other", "checkpoint.keep=7", "optim.lr=1e-3"]
    assert rows_of(monkeypatch, now=free) == SAVED
    assert rows_of(monkeypatch, layout=Layout(2, 1)) == MEASURED


@pytest.mark.parametrize(
    "setting",
    [
        "parallel.recompute=full",
        "parallel.offload_params=cpu",
        "model.dtype=bf16",
        "train.compile=true",
        "batch.micro_size=16",
    ],
)
def test_rows_are_measured_anew_where_one_takes_another_amount(monkeypatch, setting):
    assert rows_of(monkeypatch, saved=[setting]) == MEASURED
