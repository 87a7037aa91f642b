"""The loss with weights: against stock transformers, token by token, and cut in other ways."""

import json

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.stock_run import stock_losses
from tests.support.training import losses, rows, worst_gap

WEIGHTS = (None, 0.25, 1, 0, 3.5, None, 0.01)


def weighted_rows(path, num=40):
    """Write chats whose answers have weights of their own, some rows too."""
    lines = []
    for n in range(num):
        turns = []
        for turn in range(1 + n % 3):
            turns.append({"role": "user", "content": f"What is {n} plus {turn}?"})
            answer = {"role": "assistant", "content": f"The sum is {n + turn}." + " Yes." * (n % 4)}
            if (weight := WEIGHTS[(n + 2 * turn) % len(WEIGHTS)]) is not None:
                answer["weight"] = weight
            turns.append(answer)
        lines.append({"messages": turns} | ({"weight": 0.5 + n} if n % 5 == 0 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(run_dir, data, *more):
    return load_config(
        None,
        [
            *(f"run.dir={run_dir}", f"data.path={data}", f"data.eval_path={data}"),
            *("data.seq_len=256", "batch.global_size=4", "train.max_steps=5", "train.seed=3"),
            *("optim.warmup_steps=1", "run.tensorboard=false", "run.report=false", "run.threads=1"),
            *more,
        ],
    )


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.full)])
def test_losses_and_gradient_norms_are_those_of_stock_parts(method, tmp_path, monkeypatch):
    data = weighted_rows(tmp_path / "rows.jsonl")
    words = (f"tune.method={method}", "optim.lr=1e-3", "batch.micro_size=2")
    config = settings(tmp_path / "run", data, *words)
    # Chunks of the head, so that weights have to be cut with them.
    monkeypatch.setattr("hpc_tune.model.loss.TRAINED_HEAD_LOGITS_BYTES", 1)
    assert run(config, StopAfter(None)) == 0
    stock = stock_losses(config, tmp_path / "run", tmp_path / "run" / "builtin-tiny")
    assert worst_gap(losses(tmp_path / "run"), [loss for loss, _ in stock]) < 1e-5
    norms = rows(tmp_path / "run", "grad_norm")
    for step, (_, norm) in enumerate(stock, 1):
        assert norms[step] == pytest.approx(norm, rel=1e-5), step


def test_held_out_loss_and_learned_tokens_by_hand(tmp_path):
    """Of two answers, one with weight 3: (l1 + 3 l2) / (n1 + 3 n2), and a plain count of tokens."""
    turn = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
    found = {}
    for name, weights in {"first": (1, 0), "second": (0, 1), "both": (1, 3)}.items():
        line = {
            "messages": [
                {**turn[n % 2], **({"weight": weights[n // 2]} if n % 2 else {})} for n in range(4)
            ]
        }
        data = tmp_path / f"{name}.jsonl"
        data.write_text(json.dumps(line) + "\n")
        words = ("train.max_steps=1", "optim.lr=1e-9", "batch.global_size=1")
        assert run(settings(tmp_path / name, data, *words), StopAfter(None)) == 0
        run_dir = tmp_path / name
        found[name] = rows(run_dir, "eval_loss")[0], rows(run_dir, "eval_tokens")[0]
        assert rows(run_dir, "loss_tokens")[1] == found[name][1]
    (one, num_one), (two, num_two), (both, num) = found.values()
    assert num == num_one + num_two
    expected = (one * num_one + 3 * two * num_two) / (num_one + 3 * num_two)
    assert both == pytest.approx(expected, rel=1e-6)


def test_a_weight_on_everything_changes_nothing(tmp_path):
    """2 for every row is 1 for every row: the loss is divided by the sum of the weights."""
    curves = []
    for weight in (1, 2):
        data = tmp_path / f"{weight}.jsonl"
        lines = [{"prompt": f"{n}?", "completion": f"{n}!", "weight": weight} for n in range(12)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run_dir = tmp_path / f"run{weight}"
        assert run(settings(run_dir, data, "data.eval_path=null"), StopAfter(None)) == 0
        curves.append(losses(run_dir))
    assert worst_gap(*curves) < 1e-6
    assert torch.isfinite(torch.tensor(curves)).all()
