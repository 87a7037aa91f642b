"""The parity matrix of the native engine: every layout gives the losses of one process."""

import pytest
import torch
from safetensors.torch import load_file

from hpc_tune.config.schema import TuneConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny
from hpc_tune.plan.account import measure
from hpc_tune.plan.cost import activation_bytes, gathered_bytes, reduced_bytes
from tests.support.training import losses, many_runs, rows, worst_gap

STEPS = 10
SMALL = [
    "data.seq_len=128",
    "data.eval_path=builtin:pydocs:heldout",
    "train.eval_rows=7",
    "batch.global_size=8",
    "batch.micro_size=1",
    f"train.max_steps={STEPS}",
    "run.tensorboard=false",
    "run.threads=1",
    "train.deterministic=true",
    "optim.warmup_steps=2",
]
METHODS = {
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "lora": ["tune.method=lora", "optim.lr=1e-2"],
}
LAYOUTS = {
    "tensor 2": (2, ["tensor=2"]),
    "pipeline 2": (2, ["pipeline=2"]),
    "pipeline 2 interleaved": (2, ["pipeline=2", "stages_per_rank=2"]),
    "shard 2 offloaded": (2, ["shard=2", "offload_params=cpu"]),
    "shard 2 kept a step": (2, ["shard=2", "reshard=step", "blocks_per_unit=2"]),
    "hsdp 2x2": (4, ["replicate=2", "shard=2"]),
    "tensor 2 x shard 2": (4, ["tensor=2", "shard=2"]),
    "pipeline 2 x shard 2": (4, ["pipeline=2", "shard=2"]),
    "pipeline 2 x tensor 2 x shard 2": (8, ["pipeline=2", "tensor=2", "shard=2"]),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def job(shared, name, *overrides, stop_after=None):
    return {
        "overrides": [*SMALL, f"run.dir={shared / name}", f"data.cache={shared}", *overrides],
        "stop_after": stop_after,
    }


@pytest.fixture(scope="module")
def references(shared):
    jobs = [job(shared, f"one-{method}", *METHODS[method]) for method in METHODS]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {m: shared / f"one-{m}" for m in METHODS}


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_losses_and_gradient_norms_of_every_layout_are_those_of_one_process(
    shared, references, num_ranks
):
    jobs, names = [], []
    for layout, (n, axes) in LAYOUTS.items():
        for method in METHODS if n == num_ranks else ():
            names.append((f"{layout} {method}", method))
            axis = [f"parallel.{a}" for a in axes]
            jobs.append(job(shared, names[-1][0], *METHODS[method], *axis))
    assert many_runs(num_ranks, jobs, shared) == [0] * len(jobs)
    gaps = {}
    for name, method in names:
        one, run = references[method], shared / name
        norms, own_norms = (list(rows(d, "grad_norm").values()) for d in (one, run))
        held_out, own_held_out = (list(rows(d, "eval_loss").values()) for d in (one, run))
        gaps[name] = (
            worst_gap(losses(run), losses(one)),
            worst_gap(own_norms, norms),
            worst_gap(own_held_out, held_out),
        )
    print(gaps)
    for name, (loss_gap, norm_gap, held_out_gap) in gaps.items():
        assert max(loss_gap, held_out_gap) < 1e-5, gaps
        # Split matrices add up in another order in every layer, which the norm of an adapter's
        # small gradients shows more than the loss.
        assert norm_gap < (1e-4 if "tensor" in name else 1e-5), gaps


TRAFFIC = {
    "replicate": ["replicate=2"],
    "step": ["shard=2", "reshard=step"],
    "micro": ["shard=2", "reshard=micro"],
    "block": ["shard=2", "reshard=block"],
    "tensor": ["tensor=2"],
    "pipeline": ["pipeline=2"],
}
SCALARS = 16  # the loss and the norm


def test_bytes_sent_by_kind_are_those_of_the_formulas(shared, tmp_path):
    few = ["train.max_steps=3", "data.eval_path=null"]
    jobs = [
        job(shared, f"traffic {name} {m}", *METHODS[m], *few, *[f"parallel.{a}" for a in axes])
        for name, axes in TRAFFIC.items()
        for m in METHODS
    ]
    assert many_runs(2, jobs, shared) == [0] * len(jobs)
    write_tiny(tmp_path / "tiny")
    for method in METHODS:
        full = method == "full"
        built = build(tmp_path / "tiny", torch.float32, TuneConfig(method=method), 0)
        size, config = measure(built.module), built.config

        def sent(name, kind, method=method):
            return rows(shared / f"traffic {name} {method}", "sent_bytes")[3].get(kind, 0)

        whole = reduced_bytes(size, Layout(2, 1), full)["all_reduce"]
        assert sent("replicate", "all_reduce") == pytest.approx(whole, abs=SCALARS)
        assert sent("replicate", "all_gather") == 0
        layout = Layout(1, 2)
        for reshard in ("step", "micro", "block"):
            gathered = gathered_bytes(size, layout, full, reshard, num_micro=4)
            # The root's weights (the tied embedding, 40,960 of 779,392 values) stay over a block's
            # forward and backward pass.
            assert sent(reshard, "all_gather") == pytest.approx(gathered, rel=0.03)
            for kind, expected in reduced_bytes(size, layout, full).items():
                assert sent(reshard, kind) == pytest.approx(expected, abs=SCALARS)
        # 8 rows of 128 tokens; the head's gradient and three numbers per token with loss.
        assert rows(shared / f"traffic tensor {method}", "tokens")[3] == 1024
        loss_tokens = rows(shared / f"traffic tensor {method}", "loss_tokens")[3]
        head = loss_tokens * 4 * (config.hidden_size + 3)
        tensor = activation_bytes(config, Layout(1, 1, 2), full, 1024, 4)["all_reduce"] + head
        rowwise = ("o_proj", "down_proj")
        partial = sum(
            4 * p.numel()
            for name, p in built.module.named_parameters()
            if ("lora_B" if name.split(".")[-4] in rowwise else "lora_A") in name
        )
        assert sent("tensor", "all_reduce") == pytest.approx(tensor + partial, abs=SCALARS)
        pipeline = activation_bytes(config, Layout(1, 1, 1, 2), full, 1024, 4)["send"]
        assert sent("pipeline", "send") == pipeline
        # Of a pipeline only the tied embedding's gradient is added up, with full fine-tuning.
        tied = 4 * config.vocab_size * config.hidden_size if full else 0
        assert sent("pipeline", "all_reduce") == pytest.approx(tied, abs=SCALARS)


def test_a_run_travels_through_all_layouts_with_the_same_losses_and_adapter(shared, references):
    """fsdp 4 -> tensor 2 -> single -> pipeline 2 -> hsdp 2x2."""
    legs = [
        (4, ["shard=4"]),
        (2, ["tensor=2"]),
        (1, []),
        (2, ["pipeline=2", "stages_per_rank=2"]),
        (4, ["replicate=2", "shard=2"]),
    ]
    for number, (n, axes) in enumerate(legs):
        stop = None if number == len(legs) - 1 else 2
        layout = [f"parallel.{axis}" for axis in axes]
        jobs = [
            job(shared, f"travelled {m}", *METHODS[m], *layout, stop_after=stop) for m in METHODS
        ]
        assert many_runs(n, jobs, shared) == [0 if stop is None else 75] * len(jobs)
    for method in METHODS:
        travelled, one = shared / f"travelled {method}", references[method]
        assert worst_gap(losses(travelled), losses(one)) < 1e-5, method
    first, second = (
        load_file(run_dir / "export" / "adapter" / "adapter_model.safetensors")
        for run_dir in (shared / "travelled lora", references["lora"])
    )
    assert first.keys() == second.keys()
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-4
