"""Full fine-tuning with moments in 8 bits, beside the same with torchao's own optimizer."""

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.engine import native
from hpc_tune.engine.adamw_8bit import make_optimizer
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, losses, worst_gap

optim = pytest.importorskip("torchao.optim")


def torchaos(named, settings, reserve):
    """Ours, which takes the steps of torchao's AdamW8bit of the same groups."""
    ours = make_optimizer(named, settings, reserve)
    groups = [{k: g[k] for k in ("params", "weight_decay")} for g in ours.param_groups]
    betas = settings.beta1, settings.beta2
    theirs = optim.AdamW8bit(groups, lr=settings.peak_lr, betas=betas, eps=settings.eps)

    def step():
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            other["lr"].fill_(mine["lr"])
        theirs.step()

    ours.step = step
    return ours


@pytest.mark.full  # torchao's own step takes seconds, if it is not compiled
def test_losses_of_full_fine_tuning_are_those_of_torchaos_adamw8bit(tmp_path, monkeypatch):
    words = [*SMALL, "tune.method=full", "optim.lr=1e-3", "optim.weight_decay=0.1"]
    words += [f"data.cache={tmp_path}", "train.deterministic=true"]

    def trained(name, *more):
        config = load_config(None, [*words, f"run.dir={tmp_path / name}", *more])
        assert run(config, StopAfter(None)) == 0
        return losses(tmp_path / name)

    plain, ours = trained("fp32"), trained("8 bits", "optim.name=adamw_8bit")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(native, "make_optimizer", torchaos)
    theirs = trained("torchao", "optim.name=adamw_8bit")
    gaps = worst_gap(ours, theirs), worst_gap(ours, plain)
    print(f"from torchao's: {gaps[0]:.1e}, from fp32's: {gaps[1]:.1e}")
    assert gaps[0] == 0
    assert 1e-6 < gaps[1] < 1e-3
