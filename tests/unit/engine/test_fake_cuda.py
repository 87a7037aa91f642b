"""Real steps on a CUDA device that is not there: where the host would wait, what lies where.

A rank of each layout runs two steps, an evaluation, the copies of a save and MOVE_OPTIMIZER, with
fake tensors on the device "cuda" and torch's fake process group (``fake_cuda_steps.py``, an
interpreter of its own). FakeTensorMode itself refuses tensors of two devices in one operation and
results whose shapes depend on values. What it cannot carry, and is a stand-in: streams and events
(their order is followed), pinned memory (it is remembered what was pinned), the generator's state,
the compute capability (9.0), and the comparison of the variable-length kernel with masked
attention. Experts that are spread get their numbers of tokens without a value being read; on a
device the host waits for these in each such layer. Not run at all: DeepSpeed's ZeRO, torch.compile,
float8 and 4-bit weights, whose libraries want real memory, and the thread of a checkpoint's writer,
which has no fake tensors.
"""

import functools
import json
from pathlib import Path

import pytest

from tests.support.fake_cuda_marks import needs_fake_cuda
from tests.support.fake_cuda_steps import LAYOUTS, PREFERENCES, cases, more_cases
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

ROOT = Path(__file__).parents[3]
CASES, MORE = [*cases()], [*more_cases()]
NAMED = [pytest.param(case, id=" ".join(case)) for case in CASES]
NAMED += [pytest.param(case, id=" ".join(case), marks=pytest.mark.full) for case in MORE]
OFFLOADED = ("offload_params=cpu", "full", "none", "bf16")
pytestmark = needs_fake_cuda


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory):
    """Return a function that runs the sample or the other cases once: what was noted, by case."""

    @functools.cache
    def run(*more):
        folder = tmp_path_factory.mktemp("fake-cuda")
        words = [*python(cold=True), "-m", "tests.support.fake_cuda_steps", str(folder), *more]
        done = run_ranks(words, rank_environment(1), HANG_S, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {tuple(row["case"]): row for row in rows}

    return run


@pytest.fixture
def noted(run_cases, request):
    """What was noted, of a test's case among others."""
    case = request.node.callspec.params["case"] if hasattr(request.node, "callspec") else None
    return run_cases("more") if case in MORE else run_cases()


def test_every_layout_is_among_the_cases(noted):
    assert list(noted) == CASES
    assert {case[0] for case in CASES} == LAYOUTS.keys()
    assert {case[1] for case in CASES} == {"lora", "full"}
    assert {case[2] for case in CASES} == {"none", "selective", "full"}


@pytest.mark.parametrize("case", NAMED)
def test_the_host_waits_for_the_device_once_at_the_end_of_a_step(noted, case):
    phases = {phase: row for phase, row in noted[case].items() if "step" in phase}
    assert len(phases) == 2
    for phase, row in phases.items():
        if case == OFFLOADED:
            continue
        # kto's KL is a number before the step's losses are: the ranks add it up.
        kl = ["a tensor is copied to the host in train/reference.py sum_kl_terms"]
        kl = kl if "kto" in case[0] else []
        assert row["waits"] == [*kl, "values are read in engine/native.py update"], phase
        assert row["num_waits"] == 1 + len(kl), phase


def test_where_weights_are_updated_on_the_host_fsdp_and_the_clipping_wait_too(noted):
    """Gradients that are added up there, and the factor that they are scaled by."""
    for phase in ("step", "another step"):
        ours = [place for place in noted[OFFLOADED][phase]["waits"] if "engine/" in place]
        assert ours == [
            # FSDP2's own, both in counted_collectives.py
            "a tensor is copied to the host in engine/counted_collectives.py timed_post_backward",
            "a tensor is copied to the host in engine/native.py _clip_gradients",
            "an event is waited for in engine/counted_collectives.py timed_finalize",
            "values are read in engine/native.py update",
        ]


@pytest.mark.parametrize("case", NAMED)
def test_an_evaluation_waits_once_at_its_end(noted, case):
    row = noted[case]["evaluation"]
    assert row["waits"] == ["values are read in engine/base.py evaluate"]
    assert row["num_waits"] == 1


@pytest.mark.parametrize("case", NAMED)
def test_batches_are_copied_as_int32_by_a_stream_that_the_compute_waits_for(noted, case):
    for phase in (phase for phase in noted[case] if "step" in phase or phase == "evaluation"):
        row = noted[case][phase]
        assert "torch.int32" in row["copies"]
        # Of preferences the numbers of the answers' tokens, a few bytes.
        assert ("torch.int64" in row["copies"]) == (case[0].split(",")[0] in PREFERENCES)
        assert row["races"] == []
        assert row["unrecorded"] == []
        # Both stages of a rank use a batch: it is copied again.
        assert bool(row["late"]) == ("interleaved" in case[0])


@pytest.mark.parametrize("case", NAMED)
def test_optimizer_state_lies_where_the_lever_says(noted, case):
    if case[0] == "offload_params=cpu":
        assert "moments" not in noted[case], "its state is on the host anyway"
        return
    if "8 bits" in case[0]:
        assert "moments" not in noted[case], "its state is small, and stays"
        return
    before, moved, after = noted[case]["moments"]
    shards = "shard" in LAYOUTS[case[0]] and case[1] == "full"
    # Norms stay whole on every rank.
    assert before == after == ["DTensor on cuda"] * shards + ["Tensor on cuda"]
    assert moved == ["Tensor on cpu pinned"]


@pytest.mark.parametrize("case", NAMED)
def test_a_save_copies_each_tensor_from_where_it_lies(noted, case):
    home = "cpu" if case == OFFLOADED else "cuda"
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    saved = noted[case]["save"]
    assert saved in ({}, {kind: [home] for kind in kinds}), "{}: another rank writes them"
    if (moved := noted[case].get("save while moved")) is not None:
        assert moved == (saved and {"weights": ["cuda"], "exp_avg": ["cpu"], "exp_avg_sq": ["cpu"]})


@pytest.mark.parametrize("case", NAMED)
def test_what_a_step_times_begins_where_the_computing_stream_waits(noted, case):
    kinds = noted[case]["timed"]
    assert {kind.partition(" to ")[0] for kind in kinds} <= {"compute"}
    is_gathered = LAYOUTS[case[0]].get("shard", 1) > 1
    assert ("compute to beside" in kinds) == is_gathered


@pytest.mark.parametrize("case", NAMED)
def test_every_wait_of_the_computing_stream_for_fsdps_messages_is_timed(noted, case):
    """Gathers before each unit, and sums of gradients before those of the next unit begin."""
    assert noted[case]["untimed"] == []


@pytest.mark.parametrize("case", NAMED)
def test_every_group_has_sent_large_messages_before_anything_is_measured(noted, case):
    """And a plan knows how many there are."""
    [sizes] = noted[case]["first"]
    assert len(sizes) == noted[case]["groups"]
    assert all(size > 1 for size in sizes)
    axes = LAYOUTS[case[0]]
    ranks = axes.get("replicate", 1) * axes.get("shard", 1) * axes.get("tensor", 1)
    assert bool(sizes) == (ranks * axes.get("pipeline", 1) > 1)
