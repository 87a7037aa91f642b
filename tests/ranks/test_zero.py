"""DeepSpeed ZeRO gives the losses of one rank, and its checkpoints are like any other's."""

import shutil
import subprocess

import pytest
from safetensors.torch import load_file

from tests.support.training import losses, many_runs, outcome, rows, train, worst_gap

pytest.importorskip("deepspeed")

STEPS = 10
SMALL = [
    "data.seq_len=128",
    "data.eval_path=null",
    "batch.global_size=8",
    f"train.max_steps={STEPS}",
    "run.tensorboard=false",
    "run.threads=1",
    "train.deterministic=true",
    "optim.warmup_steps=2",
    "optim.weight_decay=0.1",
]
# At higher rates the norms of one step show the order in which sums are rounded.
METHODS = {
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "lora": ["tune.method=lora", "optim.lr=2e-3"],
}
EVALUATE = ["data.eval_path=builtin:pydocs:heldout", "train.eval_rows=7"]
CUT = ["batch.micro_size=1"]  # four micro-batches per rank and step
LAYOUTS = {
    "zero1": ["parallel.zero_stage=1", *CUT, *EVALUATE],
    "zero2": ["parallel.zero_stage=2", *CUT],
    "zero3": ["parallel.zero_stage=3", *EVALUATE],
    "zero3 cut": ["parallel.zero_stage=3", *CUT, "parallel.recompute=full"],
    "zero2+cpu": ["parallel.zero_stage=2", "parallel.offload_optimizer=cpu", *CUT],
    "zero3+cpu": [
        "parallel.zero_stage=3",
        "parallel.offload_optimizer=cpu",
        "parallel.offload_params=cpu",
        *CUT,
    ],
}
NVME = ["parallel.zero_stage=3", "parallel.offload_optimizer=nvme", "parallel.offload_params=nvme"]


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
    """Uninterrupted native runs of one rank, which all others are compared with."""
    jobs = [job(shared, f"one-{m}", *overrides, *EVALUATE) for m, overrides in METHODS.items()]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {m: shared / f"one-{m}" for m in METHODS}


def assert_like(run_dir, reference):
    assert worst_gap(losses(run_dir), losses(reference)) < 1e-5, run_dir
    norms, wanted = (list(rows(d, "grad_norm").values()) for d in (run_dir, reference))
    assert norms == pytest.approx(wanted, rel=1e-5), run_dir


def test_losses_and_gradient_norms_are_those_of_one_rank(shared, references):
    """7 held-out rows on 2 ranks: one rank ends with an empty micro-batch."""
    names = [(method, layout) for layout in LAYOUTS for method in METHODS]
    jobs = [job(shared, f"{m} {z}", *METHODS[m], *LAYOUTS[z]) for m, z in names]
    assert many_runs(2, jobs, shared) == [0] * len(jobs)
    for method, layout in names:
        run_dir = shared / f"{method} {layout}"
        assert_like(run_dir, references[method])
        if EVALUATE[0] in LAYOUTS[layout]:
            held_out = rows(references[method], "eval_loss")
            assert rows(run_dir, "eval_loss") == pytest.approx(held_out, abs=1e-5)


def can_compile_async_io():
    compiler = shutil.which("c++")
    if compiler is None:
        return False
    source = b"#include <libaio.h>\n"
    return not subprocess.run([compiler, "-E", "-x", "c++", "-"], input=source).returncode


@pytest.mark.skipif(not can_compile_async_io(), reason="needs c++ and the headers of libaio")
@pytest.mark.timeout(900)  # the first time DeepSpeed compiles its async_io
def test_weights_and_optimizer_state_on_nvme_and_a_resume_from_there(shared, references):
    disk = shared / "disk"
    disk.mkdir()
    jobs = []
    for method, overrides in METHODS.items():
        nvme = [*overrides, *NVME, f"parallel.offload_path={disk}"]
        jobs.append(job(shared, f"{method} nvme", *nvme, stop_after=4))
        jobs.append(job(shared, f"{method} nvme", *nvme))
    codes = many_runs(2, jobs, shared, timeout=800, program="tests.support.many_small_swaps")
    assert codes == [75, 0] * len(METHODS)
    for method in METHODS:
        assert_like(shared / f"{method} nvme", references[method])
    assert not list(disk.glob("*/*")), "what was swapped is removed"


def test_a_checkpoint_goes_from_zero_3_to_native_to_zero_2_and_exports_the_same(shared, references):
    def leg(n, stop_after, *layout):
        jobs = [
            job(shared, f"{method} travels", *overrides, *layout, stop_after=stop_after)
            for method, overrides in METHODS.items()
        ]
        return many_runs(n, jobs, shared)

    assert leg(2, 3, "parallel.zero_stage=3") == [75, 75]
    assert leg(1, 3) == [75, 75]
    assert leg(2, None, "parallel.zero_stage=2") == [0, 0]
    for method in METHODS:
        assert_like(shared / f"{method} travels", references[method])
        assert outcome(shared / f"{method} travels")["status"] == "done"
    mine, wanted = (
        load_file(d / "export" / "adapter" / "adapter_model.safetensors")
        for d in (shared / "lora travels", references["lora"])
    )
    assert mine.keys() == wanted.keys()
    gap = sum((mine[name] - tensor).square().sum() for name, tensor in wanted.items())
    assert gap < 1e-10 * sum(tensor.square().sum() for tensor in wanted.values())


def test_an_unusable_nvme_folder_is_said_once_and_ends_all_ranks(shared, tmp_path):
    overrides = [*SMALL, f"run.dir={tmp_path}", f"data.cache={shared}", *NVME]
    done = train([*overrides, "parallel.offload_path=/nowhere/at/all"], n=2)
    assert done.returncode != 0
    assert "parallel.offload_path=/nowhere/at/all: no such folder" in done.stderr
    assert done.stderr.count("parallel.offload_path") == 1
    assert outcome(tmp_path)["exit_code"] == 2
