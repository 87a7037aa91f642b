"""Recomputing all activations under memory pressure, of blocks that are compiled and of others."""

import pytest
import torch
from torch import nn

from hpc_tune.engine.activation_checkpoint import checkpoint_blocks, make_recompute_actions
from hpc_tune.engine.compile import compile_blocks
from hpc_tune.memory.policy import Action
from hpc_tune.packages import parse_release

real_compile = torch.compile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 8)
        self.calls = 0

    def forward(self, hidden_BTD):
        self.calls += not torch.compiler.is_compiling()
        return hidden_BTD + self.outer(torch.relu(self.inner(hidden_BTD)))


def step(blocks):
    """Return the gradients of a step, and how often Python has run the first block."""
    hidden_BTD = torch.ones(2, 4, 8, requires_grad=True)
    before = blocks[0].calls
    out = hidden_BTD
    for block in blocks:
        out = block(out)
    out.square().sum().backward()
    return hidden_BTD.grad, blocks[0].calls - before


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("configured", ["none", "selective"])
def test_blocks_are_recomputed_and_then_again_as_they_were(monkeypatch, configured, compiled):
    if compiled and configured == "selective" and parse_release(torch.__version__) < (2, 10):
        pytest.skip(
            "torch 2.9 compiles no recomputed block that counts its calls, as this one does"
        )
    monkeypatch.setattr(torch, "compile", lambda f: real_compile(f, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    checkpoint_blocks(blocks, configured)
    if compiled:
        compile_blocks(blocks)
    [(action, lever)] = make_recompute_actions(blocks, configured).items()
    assert action is Action.RECOMPUTE
    wanted, usual = step(blocks)
    _, usual = step(blocks)
    assert "full" in lever.apply_times(1)
    found, calls = step(blocks)
    assert torch.equal(found, wanted)
    assert calls == 2, "a pass, and its recomputation"
    assert configured in lever.apply_times(0)
    found, calls = step(blocks)
    assert torch.equal(found, wanted)
    assert calls == usual
    assert usual == (0 if compiled else 1 + (configured != "none"))


def test_what_recomputes_all_already_has_no_lever():
    blocks = [Block()]
    checkpoint_blocks(blocks, "full")
    assert make_recompute_actions(blocks, "full") == {}
