"""The gradient is the same before and after the rungs that change how it is computed."""

import pytest
import torch
from safetensors.torch import load_file

from hpc_tune.config.load import load_config
from hpc_tune.faults import Faults
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events

STEPS = 13  # one is waited for after each rung
SETTINGS = [
    *SMALL,
    "data.path=builtin:pydocs:heldout",
    "batch.global_size=4",
    f"train.max_steps={STEPS}",
    "batch.micro_size=4",
    # Nothing is learned, so that each step's gradient is that of its rows alone.
    "optim.lr=1e-12",
    # The first moment, which a checkpoint holds, is the gradient then.
    "optim.beta1=0",
    "optim.clip_norm=0",
    "checkpoint.every_steps=1",
    f"checkpoint.keep={STEPS}",
]


def gradients_of(run_dir, level, *overrides):
    """Run it under memory pressure of a level; return each step's gradient in fp64."""
    config = load_config(None, [*SETTINGS, f"run.dir={run_dir}", *overrides])
    assert run(config, StopAfter(None), faults=Faults(level=lambda seen: level)) == 0
    found = []
    for step in range(1, STEPS + 1):
        saved = {}
        for file in (run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"):
            saved |= load_file(file)
        moments = [saved[name] for name in sorted(saved) if name.startswith("exp_avg.")]
        found.append(torch.cat([moment.flatten().double() for moment in moments]))
    return found


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.full)])
def test_split_micro_batches_and_recompute_leave_the_gradient_as_it_is(tmp_path, method):
    settings = (f"tune.method={method}",)
    settings += ("tune.dropout=0.1",) if method == "lora" else ()
    calm = gradients_of(tmp_path / "calm", "CALM", *settings)
    pressed = gradients_of(tmp_path / "pressed", "HIGH", *settings)
    told = events(tmp_path / "pressed", "governor")
    done = {e["action"]: e["step"] for e in told if "action" in e}
    assert {"split_micro_batches", "recompute"} <= set(done)
    assert done["recompute"] < STEPS - 1
    gaps = [float((a - b).norm() / a.norm()) for a, b in zip(calm, pressed, strict=True)]
    print(f"{method}: largest gap {max(gaps):.1e}, after {done}")
    assert gaps[0] == 0
    assert max(gaps) < 1e-6
