"""The parity matrix: every layout gives the losses, the norms and the adapter of one process."""

import functools
import itertools
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.utils.cpp_extension import get_default_build_root

from tests.support.training import (
    SMALL,
    STEPS,
    launch_runs,
    losses,
    many_runs,
    outcome,
    rows,
    train,
    worst_gap,
)

pytest.importorskip("deepspeed")

SETTINGS = [
    *SMALL,
    "data.eval_path=builtin:pydocs:heldout",
    "train.eval_rows=7",  # on 2 ranks one ends with an empty micro-batch
    "batch.micro_size=1",
    "train.deterministic=true",
    "optim.weight_decay=0.1",
]
METHODS = {
    "full": ["tune.method=full", "optim.lr=1e-3"],
    "lora": ["tune.method=lora", "optim.lr=2e-3"],
}
CPU = ["zero_stage=3", "offload_optimizer=cpu", "offload_params=cpu"]
NVME = ["zero_stage=3", "offload_optimizer=nvme", "offload_params=nvme"]
LAYOUTS = {
    "ddp": (2, ["replicate=2"]),
    "ddp+cpu": (2, ["replicate=2", "offload_params=cpu"]),
    "fsdp": (2, ["shard=2", "reshard=block"]),
    "fsdp kept a micro-batch": (2, ["shard=2", "reshard=micro"]),
    "fsdp kept a step": (2, ["shard=2", "reshard=step", "blocks_per_unit=2"]),
    "fsdp+cpu": (2, ["shard=2", "offload_params=cpu"]),
    "zero1": (2, ["zero_stage=1"]),
    "zero2": (2, ["zero_stage=2", "recompute=selective"]),
    "zero3": (2, ["zero_stage=3", "recompute=full"]),
    "zero2+cpu": (2, ["zero_stage=2", "offload_optimizer=cpu"]),
    "zero3+cpu": (2, [*CPU, "recompute=selective"]),
    "zero3+nvme": (2, NVME),
    "tensor": (2, ["tensor=2"]),
    "pipeline": (2, ["pipeline=2"]),
    "pipeline interleaved": (2, ["pipeline=2", "stages_per_rank=2"]),
    "context": (2, ["replicate=2", "context=2"]),
    "context x shard": (2, ["shard=2", "context=2", "reshard=block"]),
    "context x zero2": (2, ["zero_stage=2", "context=2"]),
    "context x zero3": (2, ["zero_stage=3", "context=2", "recompute=full"]),
    "context x zero2 of 4": (4, ["zero_stage=2", "context=2"]),
    "context 4 x shard": (4, ["shard=4", "context=4", "recompute=selective"]),
    "context x replicate x shard": (4, ["replicate=2", "shard=2", "context=2"]),
    "context x tensor": (4, ["tensor=2", "shard=2", "context=2"]),
    "context x pipeline": (4, ["pipeline=2", "replicate=2", "context=2"]),
    "hsdp 2x2": (4, ["replicate=2", "shard=2"]),
    "tensor x shard": (4, ["tensor=2", "shard=2"]),
    "pipeline 4": (4, ["pipeline=4"]),
    "pipeline x shard": (4, ["pipeline=2", "shard=2"]),
    "pipeline x tensor x shard": (8, ["pipeline=2", "tensor=2", "shard=2"]),
}
# One of each engine and axis, each with the method that sends or cuts more in it; the others differ
# from them in when they gather or where they store.
SAMPLE = {
    ("ddp", "full"),
    ("ddp+cpu", "full"),
    ("fsdp", "full"),
    ("fsdp", "lora"),
    ("fsdp+cpu", "full"),
    ("zero2", "lora"),
    ("zero3", "full"),
    ("tensor", "lora"),
    ("pipeline interleaved", "lora"),
    ("context x shard", "full"),
}
# As many steps and micro-batches as show it: a warm-up, moments, an accumulation, and on 2 ranks
# a last micro-batch of the evaluation that is empty.
SAMPLE_STEPS = 6
FEWER = [f"train.max_steps={SAMPLE_STEPS}", "batch.micro_size=2", "train.eval_rows=5"]
MARKS = {2: pytest.mark.full, 4: pytest.mark.full, 8: pytest.mark.soak}
MARKED = [
    pytest.param(layout, method, marks=() if (layout, method) in SAMPLE else MARKS[n])
    for layout, (n, _) in LAYOUTS.items()
    for method in METHODS
]
ON_TWO_RANKS = [row for row in MARKED if LAYOUTS[row.values[0]][0] == 2]


NO_ASYNC_IO = "DeepSpeed's NVMe library is not compiled: make nvme"


def has_async_io():
    return any(Path(get_default_build_root()).glob("**/async_io/async_io.so"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def job(shared, name, method, axes=(), *more, stop_after=None):
    words = [*SETTINGS, f"run.dir={shared / name}", *METHODS[method]]
    words += [f"parallel.{axis}" for axis in axes]
    if "offload_optimizer=nvme" in axes:
        (shared / "disk").mkdir(exist_ok=True)
        words.append(f"parallel.offload_path={shared / 'disk'}")
    return {"overrides": [*words, *more], "stop_after": stop_after}


def named(layout, method, dtype="fp32"):
    return f"{layout} {method} {dtype}"


@pytest.fixture(scope="module")
def references(shared):
    """Return a function that gives the runs of one process, by method, of so many steps."""

    @functools.cache
    def of(steps):
        fewer = [*FEWER, "batch.micro_size=1"] if steps == SAMPLE_STEPS else []
        runs = {m: named(f"one of {steps} steps", m) for m in METHODS}
        jobs = [job(shared, name, m, (), *fewer) for m, name in runs.items()]
        assert many_runs(1, jobs, shared) == [0] * len(jobs)
        return {m: shared / name for m, name in runs.items()}

    return of


def steps_of(layout, method, dtype="fp32"):
    """Return how many steps the runs of a layout have."""
    return SAMPLE_STEPS if (layout, method) in SAMPLE and dtype == "fp32" else STEPS


def together(layout, method):
    """Return what the runs that one launch does have in common."""
    num_ranks, axes = LAYOUTS[layout]
    return num_ranks, (layout, method) in SAMPLE, axes == NVME


@pytest.fixture(scope="module")
def launched(shared):
    """Return a function that does a run and those that go together with it, once.

    It returns how each ended by layout and method; the run directories are ``named`` so.
    """
    ended = {}

    def launch(*wanted, dtype="fp32"):
        key = together(*wanted), dtype
        if key not in ended:
            more = [
                f"model.dtype={dtype}",
                *(FEWER if steps_of(*wanted, dtype) == SAMPLE_STEPS else []),
            ]
            runs = {
                (layout, method): job(shared, named(layout, method, dtype), method, axes, *more)
                for layout, (_, axes) in LAYOUTS.items()
                for method in METHODS
                if together(layout, method) == together(*wanted)
            }
            program = "tests.support.many_small_swaps"
            jobs = list(runs.values())
            num_ranks = LAYOUTS[wanted[0]][0]
            done = launch_runs(num_ranks, jobs, shared, timeout=850, program=program)
            ended[key] = dict(zip(runs, done, strict=True))
        return ended[key]

    return launch


@pytest.mark.parametrize(("layout", "method"), MARKED)
@pytest.mark.timeout(900)  # the first of a number of ranks waits for all of them
def test_a_layout_gives_what_one_process_gives(shared, references, launched, layout, method):
    if LAYOUTS[layout][1] == NVME and not has_async_io():
        pytest.skip(NO_ASYNC_IO)
    ended = launched(layout, method)[layout, method]
    assert ended.code == 0, ended.output
    assert not re.findall(r"\w+Warning: .*", ended.output), "packages warn a user, of what we do"
    one = references(steps_of(layout, method))[method]
    run = shared / named(layout, method)
    gaps = {
        key: worst_gap(list(rows(run, key).values()), list(rows(one, key).values()))
        for key in ("loss", "eval_loss", "grad_norm")
    }
    print(f"\nparity {layout} {method}: {gaps}")
    assert max(gaps.values()) < 1e-5, gaps
    if method == "lora":
        assert_same_adapter(run, one)
    assert not list((shared / "disk").glob("*/*")), "what was swapped is removed"


def assert_same_adapter(run, one):
    mine, wanted = (
        load_file(d / "export" / "adapter" / "adapter_model.safetensors") for d in (run, one)
    )
    assert mine.keys() == wanted.keys()
    gap = sum((mine[name] - tensor).square().sum() for name, tensor in wanted.items())
    relative = math.sqrt(gap / sum(tensor.square().sum() for tensor in wanted.values()))
    print(f"adapter: {relative:.1e}")
    assert relative < 1e-4


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_bf16_every_layout_is_as_near_to_fp32_as_one_process(shared, references, launched):
    """What one process shows is its worst of six seeds."""
    dtypes = ("fp32", "bf16")
    ones = {
        (seed, method): [shared / named(f"one with seed {seed}", method, d) for d in dtypes]
        for seed in range(6)
        for method in METHODS
    }
    jobs = [
        job(shared, run.name, method, (), f"model.dtype={dtype}", f"train.seed={seed}")
        for (seed, method), runs in ones.items()
        for dtype, run in zip(dtypes, runs, strict=True)
    ]
    assert many_runs(1, jobs, shared, timeout=500) == [0] * len(jobs)
    layouts = [name for name, (_, axes) in LAYOUTS.items() if axes != NVME or has_async_io()]
    runs = itertools.product(layouts, METHODS)
    codes = {run: launched(*run, dtype="bf16")[run].code for run in runs}
    assert set(codes.values()) == {0}, codes
    spread, gaps = dict.fromkeys(METHODS, 0.0), {}
    for (_, method), (exact, one) in ones.items():
        spread[method] = max(spread[method], worst_gap(losses(one), losses(exact)))
    for layout, method in codes:
        run = shared / named(layout, method, "bf16")
        gaps[layout, method] = worst_gap(losses(run), losses(references(STEPS)[method]))
    print(f"\nbf16, from fp32: one process up to {spread}, layouts {gaps}")
    assert all(gap < spread[method] for (_, method), gap in gaps.items())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_recompute_accumulation_and_compilation_change_nothing_in_any_layout(
    shared, references, layout, compiled
):
    """Losses and gradient norms of each method x recompute x 1, 2, 4 micro-batches.

    Compiled, a row has each kind of recompute and each number of micro-batches once.
    """
    n, axes = LAYOUTS[layout]
    if axes == NVME and not has_async_io():
        pytest.skip(NO_ASYNC_IO)
    if compiled and ("tensor=2" in axes or "zero_stage=3" in axes):
        pytest.skip("refused with train.compile")
    if compiled and any(axis.startswith("context") for axis in axes):
        pytest.skip("refused with train.compile")
    axes = [axis for axis in axes if not axis.startswith("recompute")]
    rows_per_rank = 8 // data_ranks(n, axes)
    kinds, numbers = ("none", "selective", "full"), (1, 2, 4)
    ways = zip(kinds, numbers, strict=True) if compiled else itertools.product(kinds, numbers)
    runs = {}
    for (recompute, accumulation), method in itertools.product(ways, METHODS):
        if accumulation > rows_per_rank:
            continue
        run = f"{layout} {method} {recompute} {accumulation} {'compiled' if compiled else 'eager'}"
        more = [f"parallel.recompute={recompute}", "data.eval_path=null"]
        more += [f"batch.micro_size={rows_per_rank // accumulation}"]
        if compiled:
            more += ["train.compile=true", f"run.compile_cache={shared / 'compiled'}"]
        runs[run] = (job(shared, run, method, axes, *more), references(STEPS)[method])
    jobs = [job for job, _ in runs.values()]
    program = "tests.support.many_small_swaps"
    assert many_runs(n, jobs, shared, timeout=3000, program=program) == [0] * len(jobs)
    gaps = {}
    for run, (_, one) in runs.items():
        both = (list(rows(shared / run, key).values()) for key in ("loss", "grad_norm"))
        wanted = (list(rows(one, key).values()) for key in ("loss", "grad_norm"))
        gaps[run] = max(map(worst_gap, both, wanted))
    worst = max(gaps, key=gaps.__getitem__)
    print(f"\n{layout}: {len(gaps)} runs, the worst: {worst}: {gaps[worst]:.1e}")
    assert gaps[worst] < 1e-5


def data_ranks(n, axes):
    """Return over how many ranks the rows are spread."""
    sizes = dict(axis.split("=") for axis in axes)
    return n // math.prod(int(sizes.get(axis, 1)) for axis in ("tensor", "pipeline", "context"))


DEEPSPEEDS_SCALARS = 32  # bytes: the loss, the norm and more of the kind
STEP = 3


@pytest.mark.parametrize(("layout", "method"), ON_TWO_RANKS)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_bytes_sent_by_kind_are_those_of_the_formulas(shared, launched, dtype, layout, method):
    if LAYOUTS[layout][1] == NVME and not has_async_io():
        pytest.skip(NO_ASYNC_IO)
    ended = launched(layout, method, dtype=dtype)[layout, method]
    assert ended.code == 0, ended.output
    run = shared / named(layout, method, dtype)
    sent, expected = (rows(run, key) for key in ("sent_bytes", "expected_bytes"))
    print(f"\nbytes {layout} {method} {dtype}: sent {sent[STEP]}, expected {expected[STEP]}")
    assert len(sent) == steps_of(layout, method, dtype)
    if "zero" not in layout:
        assert sent == expected
        return
    for kind in sent[STEP] | expected[STEP]:
        # The tied embedding is 5% of the model, and ZeRO-3 gathers it for the head again.
        bound = {"rel": 0.06} if kind == "all_gather" else {"abs": DEEPSPEEDS_SCALARS}
        assert sent[STEP].get(kind, 0) == pytest.approx(expected[STEP].get(kind, 0), **bound), kind


FEW_LEGS = [(2, ["shard=2"]), (2, ["zero_stage=2"]), (2, ["pipeline=2"])]
ALL_LEGS = [
    (4, ["shard=4", "context=2"]),
    (2, ["zero_stage=3", "offload_optimizer=cpu"]),
    (2, ["tensor=2"]),
    (1, []),
    (2, ["pipeline=2", "stages_per_rank=2"]),
]


@pytest.mark.parametrize(
    "legs", [FEW_LEGS, pytest.param(ALL_LEGS, marks=pytest.mark.full)], ids=["few", "all"]
)
def test_a_run_travels_through_layouts_and_engines(shared, references, legs):
    """Two steps in each layout, and the rest in the last one."""
    run = f"travelled {len(legs)}"
    steps, fewer = (SAMPLE_STEPS, FEWER) if legs == FEW_LEGS else (STEPS, [])
    for number, (n, axes) in enumerate(legs):
        stop = None if number == len(legs) - 1 else 2
        jobs = [job(shared, f"{run} {m}", m, axes, *fewer, stop_after=stop) for m in METHODS]
        assert many_runs(n, jobs, shared) == [0 if stop is None else 75] * len(jobs)
        if number == 0:
            folder = shared / f"{run} full" / "checkpoints" / "step-00000002"
            sizes = [part.stat().st_size for part in folder.glob("rank-*.safetensors")]
            assert len(sizes) == n
            assert max(sizes) < 1.2 * min(sizes), "each rank writes its own share"
    for method in METHODS:
        travelled = shared / f"{run} {method}"
        assert worst_gap(losses(travelled), losses(references(steps)[method])) < 1e-5, method
    assert_same_adapter(shared / f"{run} lora", references(steps)["lora"])


@pytest.mark.soak
@pytest.mark.skipif(not has_async_io(), reason=NO_ASYNC_IO)
def test_a_run_goes_from_native_to_nvme_to_zero_2(shared, references):
    legs = [(2, ["shard=2"], 3), (2, NVME, 3), (2, ["zero_stage=2"], None)]
    for n, axes, stop in legs:
        jobs = [job(shared, f"by nvme {m}", m, axes, stop_after=stop) for m in METHODS]
        program = "tests.support.many_small_swaps"
        codes = many_runs(n, jobs, shared, program=program)
        assert codes == [0 if stop is None else 75] * len(jobs)
    for method in METHODS:
        run = shared / f"by nvme {method}"
        assert worst_gap(losses(run), losses(references(STEPS)[method])) < 1e-5, method


def test_an_unusable_nvme_folder_is_said_once_and_ends_all_ranks(shared, tmp_path):
    nvme = [*(f"parallel.{axis}" for axis in NVME), "parallel.offload_path=/nowhere/at/all"]
    done = train([*SETTINGS, f"run.dir={tmp_path}", *nvme], n=2)
    assert done.returncode != 0
    assert "parallel.offload_path=/nowhere/at/all: no such folder" in done.stderr
    assert done.stderr.count("parallel.offload_path") == 1
    assert outcome(tmp_path)["exit_code"] == 2


@pytest.mark.full
def test_a_rank_without_rows_takes_part_where_offloaded_weights_have_copies(shared):
    """Nothing is sharded, but FSDP adds gradients up: its ranks wait for each other's passes."""
    axes, one_row = ["replicate=2", "offload_params=cpu"], ["batch.global_size=1", *FEWER]
    ends = {}
    for n, layout in ((1, []), (2, axes)):
        runs = [
            job(shared, f"one row on {n} {method}", method, layout, *one_row) for method in METHODS
        ]
        ends[n] = many_runs(n, runs, shared, timeout=120)
    assert ends == {1: [0, 0], 2: [0, 0]}
    for method in METHODS:
        one, two = (losses(shared / f"one row on {n} {method}") for n in (1, 2))
        assert worst_gap(two, one) < 1e-5, method
