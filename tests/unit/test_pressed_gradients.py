"""The gradient is the same before and after the rungs that change how it is computed."""

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.engine.native import NativeEngine
from hpc_tune.memory.governor import Governor
from hpc_tune.memory.policy import Level
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events

STEPS = 18
# Nothing is learned, so that each step's gradient is that of its rows alone.
SETTINGS = [*SMALL, f"train.max_steps={STEPS}", "batch.micro_size=4", "optim.lr=1e-12"]


def gradients_of(run_dir, monkeypatch, level, *overrides):
    """Run it under memory pressure of a level; return each step's gradient in fp64."""
    found, real = [], NativeEngine._clip

    def clip(self):
        found.append(torch.cat([t.local_grad.flatten().double() for t in self._trained]))
        return real(self)

    with monkeypatch.context() as changed:
        changed.setattr(NativeEngine, "_clip", clip)
        changed.setattr(Governor, "levels", lambda self, sample: (level, Level.CALM))
        config = load_config(None, [*SETTINGS, f"run.dir={run_dir}", *overrides])
        assert run(config, StopAfter(None)) == 0
    return found


@pytest.mark.parametrize("method", ["lora", "full"])
def test_split_micro_batches_and_recompute_leave_the_gradient_as_it_is(
    tmp_path, monkeypatch, method
):
    settings = (f"tune.method={method}", f"data.cache={tmp_path / 'data'}")
    settings += ("tune.dropout=0.1",) if method == "lora" else ()
    calm = gradients_of(tmp_path / "calm", monkeypatch, Level.CALM, *settings)
    pressed = gradients_of(tmp_path / "pressed", monkeypatch, Level.HIGH, *settings)
    told = events(tmp_path / "pressed", "governor")
    done = {e["action"]: e["step"] for e in told if "action" in e}
    assert {"split_micro_batches", "recompute"} <= set(done)
    assert done["recompute"] < STEPS - 1
    gaps = [float((a - b).norm() / a.norm()) for a, b in zip(calm, pressed, strict=True)]
    print(f"{method}: largest gap {max(gaps):.1e}, after {done}")
    assert gaps[0] == 0
    assert max(gaps) < 1e-6
