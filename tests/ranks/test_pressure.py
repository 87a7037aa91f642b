"""Under memory pressure a run gives up speed, then leaves: never killed, it learns the same."""

import contextlib
import json
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from hpc_tune.errors import EXIT_RESUMABLE
from hpc_tune.memory.host import HostLimit, HostUsage
from hpc_tune.units import format_bytes
from tests.support.cgroup import memory_group
from tests.support.mixtures import write_mixture
from tests.support.random_model import write_random_model
from tests.support.ranks import HANG_S, find_mpirun, rank_environment, run_ranks, started
from tests.support.training import SMALL, events, losses, many_runs, outcome, rows, worst_gap

MIB = 1 << 20
LAYOUTS = [
    (2, ("shard=2",)),
    (2, ("pipeline=2",)),
    (1, ("single",)),
    (2, ("replicate=2", "tensor=2", "zero_stage=2", "zero_stage=3")),
]
# Two rows per step and rank at the least; each rung has a step to show what it gives.
PRESSED = ["CALM", *["HIGH"] * 14, "CALM"]
SETTINGS = [*SMALL, "train.max_steps=20", "batch.micro_size=4", "tune.method=lora"]
SETTINGS.append("tune.dropout=0.1")


@pytest.mark.full
@pytest.mark.parametrize(("n", "layouts"), LAYOUTS)
def test_a_run_that_is_pushed_down_the_ladder_has_the_same_losses(tmp_path, n, layouts):
    common = [*SETTINGS, "checkpoint.every_steps=5"]
    jobs = []
    for layout in layouts:
        axis = [] if layout == "single" else [f"parallel.{layout}"]
        for name, levels in (("pressed", PRESSED), ("calm", ["CALM"])):
            overrides = [*common, *axis, f"run.dir={tmp_path / layout / name}"]
            jobs.append({"overrides": overrides, "levels": levels})
    codes = many_runs(n, jobs, tmp_path, 600, "tests.support.runs_at_levels")
    assert codes == [0] * len(jobs)
    for layout in layouts:
        pressed = tmp_path / layout / "pressed"
        gap = worst_gap(losses(pressed), losses(tmp_path / layout / "calm"))
        done = [event["action"] for event in events(pressed, "governor") if "action" in event]
        print(f"{layout}: {gap:.1e} after {done}")
        actions = ["trim", "shrink_buffers", "save_in_pieces", *["split_micro_batches"] * 2]
        # ZeRO has an option of its own for that.
        actions += ["recompute"] if "zero" in layout else ["recompute", "move_optimizer"]
        assert done == actions
        assert gap < 1e-5


# With what is there for long rows: pieces are halved down to 1024 tokens of a rank, and inputs of
# blocks moved where a rank has 4096 of a row.
LONG_ROWS = {
    "shard=2": ["recompute", *["more_pieces"] * 2, "offload_activations", "move_optimizer"],
    "shard=2 context=2": ["recompute", "more_pieces", "move_optimizer"],
    "zero_stage=2": ["recompute", *["more_pieces"] * 2, "offload_activations"],
    "zero_stage=3": ["recompute", "offload_activations"],
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LONG_ROWS)
def test_long_rows_are_cut_into_pieces_and_their_inputs_moved(tmp_path, layout):
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320}
    write_random_model(tmp_path / "model", **narrow, **heads)
    words = [*SMALL, f"model.path={tmp_path / 'model'}", "model.dtype=fp32", "data.seq_len=4096"]
    words += ["batch.global_size=2", "batch.micro_size=1", "train.max_steps=18"]
    words += ["tune.method=full", "optim.lr=1e-2", *(f"parallel.{x}" for x in layout.split())]
    jobs = [
        {"overrides": [*words, f"run.dir={tmp_path / name}"], "levels": levels}
        for name, levels in (("pressed", ["CALM", "HIGH"]), ("calm", ["CALM"]))
    ]
    assert many_runs(2, jobs, tmp_path, 600, "tests.support.runs_at_levels") == [0, 0]
    pressed, calm = tmp_path / "pressed", tmp_path / "calm"
    done = [event for event in events(pressed, "governor") if "action" in event]
    cheap = ["trim", "shrink_buffers", "save_in_pieces"]
    assert [event["action"] for event in done] == [*cheap, *LONG_ROWS[layout]]
    in_pieces = any("MLPs are computed in 2 pieces" in event["message"] for event in done)
    assert in_pieces == ("more_pieces" in LONG_ROWS[layout])
    assert worst_gap(losses(pressed), losses(calm)) < 1e-5


LADDER = ["trim", "shrink_buffers", "save_in_pieces", *["split_micro_batches"] * 2, "recompute"]
LADDER.append("move_optimizer")
MOVED_ONLY = ["move_optimizer"]


def ladder_cases():
    """(ranks, layout, method, actions after which a run is gone on with)."""
    axes = {"replicate": 2, "shard": 2, "expert": 4}
    for axis, n in axes.items():
        for method in ("lora", "full"):
            is_sample = (axis, method) in {("shard", "full"), ("replicate", "lora")}
            actions = MOVED_ONLY if is_sample else LADDER
            marks = () if is_sample else pytest.mark.full
            yield pytest.param(n, axis, method, actions, marks=marks, id=f"{axis} {method}")
    yield pytest.param(2, "shard", "full", LADDER, marks=pytest.mark.full, id="shard full, all")


def ladder_settings(folder, axis, method):
    words = [*SETTINGS, "optim.lr=1e-3", "checkpoint.every_steps=1", "checkpoint.keep=40"]
    words += [f"tune.method={method}", "optim.schedule=constant", "tune.dropout=0"]
    if axis != "expert":
        return [*words, f"parallel.{axis}=2"]
    targets = ["tune.targets=[q_proj,experts]"] if method == "lora" else []
    model = write_mixture("qwen3_moe", folder / "mixture", num_experts=8)
    words += [f"model.path={model}", "model.dtype=fp32", *targets]
    return [*words, "parallel.shard=4", "parallel.expert=2"]


@pytest.mark.full
@pytest.mark.parametrize(("n", "axis", "method", "actions"), [*ladder_cases()])
def test_what_is_saved_after_each_action_is_gone_on_with_elsewhere(
    tmp_path, n, axis, method, actions
):
    """On one rank, whose next loss must be the one that the run itself had."""
    pressed = tmp_path / "pressed"
    words = ladder_settings(tmp_path, axis, method)
    job = {"overrides": [*words, f"run.dir={pressed}"], "levels": PRESSED}
    assert many_runs(n, [job], tmp_path, 600, "tests.support.runs_at_levels") == [0]
    done = [event for event in events(pressed, "governor") if "action" in event]
    assert [event["action"] for event in done] == LADDER
    steps = [event["step"] + 1 for event in done if event["action"] in actions]
    alone = [word for word in words if not word.startswith("parallel.")]
    jobs = [
        {
            "overrides": [
                *(*alone, f"run.dir={tmp_path / str(step)}"),
                f"checkpoint.resume={pressed / 'checkpoints' / f'step-{step:08d}'}",
            ],
            "levels": ["CALM"],
            "stop_after": 1,
        }
        for step in steps
    ]
    codes = many_runs(1, jobs, tmp_path, 600, "tests.support.runs_at_levels")
    assert codes == [EXIT_RESUMABLE] * len(jobs)
    own = rows(pressed, "loss")
    for step in steps:
        [(after, loss)] = rows(tmp_path / str(step), "loss").items()
        assert after == step + 1
        assert abs(loss - own[after]) < 1e-5


# What a single rank of builtin:tiny takes is less than half of it.
LIMIT = 700 * MIB
HUNGRY = [
    *SMALL,
    "train.max_steps=40",
    "checkpoint.every_steps=4",
    "batch.micro_size=4",
    "data.path=builtin:pydocs:heldout",
]
# Way, bytes; what follows needs a few steps of time.
WAYS = {
    "a leak of 20 MB per step": ("leak", 20 * MIB, []),
    "a leak of 200 MB/s within a step": ("burst", 200 * MIB, ["train.max_steps=16"]),
    "a micro-batch that grows too large": ("batch", 120 * MIB, []),
    "an evaluation of long rows": (
        "eval",
        120 * MIB,
        ["data.eval_path=builtin:pydocs:heldout", "train.eval_rows=12", "train.eval_every_steps=6"],
    ),
}
SHORT = ("a leak of 200 MB/s within a step", "a micro-batch that grows too large")
MAX_RELAUNCHES = 4
REPEATS = 10


def train_in(group, run_dir, way, num_bytes, *overrides, n=1, timeout=HANG_S, neighbor=None):
    words = [*HUNGRY, f"run.dir={run_dir}", *overrides]
    argv = [sys.executable, "-m", "tests.support.memory_hog", way, str(num_bytes), *words]
    if n > 1:
        argv = [find_mpirun(), "-np", str(n), *argv]
    return group.run(argv, n, timeout, neighbor)


def is_killed(found, group):
    assert found.returncode not in (0, 75), "or the test shows nothing"
    assert group.kills > 0, found.stderr


def is_not_killed(found, group, run_dir):
    """Check an end under the governor; return whether it left for want of memory."""
    assert group.kills == 0, found.stderr
    assert found.returncode in (0, 75), found.stderr
    assert "Traceback" not in found.stderr
    told = outcome(run_dir)
    if found.returncode == 75:
        assert told["reason"].startswith("host memory of "), told
        assert {"need", "had", "phase", "rank", "host", "governor"} <= set(told)
        assert events(run_dir, "stop")[-1]["reason"].startswith("host memory of ")
    return found.returncode == 75


def check_way(limited, tmp_path, name, n=1):
    way, num_bytes, overrides = WAYS[name]
    if way in ("batch", "eval"):
        num_bytes = num_bytes * 4 // min(4, -(-8 // n))  # of a micro-batch's rows
    with limited(n * LIMIT) as group:
        off = train_in(
            group, tmp_path / "off", way, num_bytes, *overrides, "memory.governor=off", n=n
        )
        is_killed(off, group)
    with limited(n * LIMIT) as group:
        check_relaunches(group, tmp_path / "on", way, num_bytes, *overrides, n=n)


def check_relaunches(group, run_dir, way, num_bytes, *overrides, n=1):
    """Start until it is done; what can be lived with is, and a leak is gone the second time."""
    for number in range(MAX_RELAUNCHES):
        planted = way if number == 0 or way in ("batch", "eval") else "none"
        found = train_in(group, run_dir, planted, num_bytes, *overrides, n=n)
        if not is_not_killed(found, group, run_dir):
            print(f"{way}, {n} ranks: done at start {number + 1}")
            return
        told = outcome(run_dir)
        assert f"of {format_bytes(n * LIMIT)}" in told["reason"], told
        print(f"{way}, {n} ranks: {told['reason']}; {told['governor']}")
    pytest.fail(f"not done after {MAX_RELAUNCHES} starts: {found.stderr}")


def check_neighbor(limited, tmp_path, kind):
    for governor in ("off", "on"):
        run_dir = tmp_path / governor
        file = Path(f"/dev/shm/{tmp_path.name}") if kind == "tmpfs" else tmp_path / "cached"
        words = [str(run_dir / "metrics.jsonl"), str(480 * MIB), kind, str(file)]
        neighbor = [sys.executable, "-m", "tests.support.noisy_neighbor", *words]
        with limited(LIMIT) as group:
            settings = (f"memory.governor={governor}", "train.max_steps=600")
            try:
                found = train_in(group, run_dir, "none", 0, *settings, neighbor=neighbor)
            finally:
                file.unlink(missing_ok=True)
            if governor == "off":
                is_killed(found, group)
                continue
            assert is_not_killed(found, group, run_dir), "or the test shows nothing"
            print(f"{kind}: {outcome(run_dir)['reason']}")
            steps = f"train.max_steps={outcome(run_dir)['step'] + 10}"
            again = train_in(group, run_dir, "none", 0, steps)
            assert again.returncode == 0, again.stderr
            assert group.kills == 0


def check_save(limited, tmp_path, larger):
    settings = [f"model.path={larger}", "tune.method=full", "checkpoint.staging_bytes=600MiB"]
    # Copies are 330 MiB of what is held meanwhile; the step that they meet takes 950 MiB.
    settings += ["train.max_steps=7", "model.dtype=fp32", "batch.micro_size=1"]
    with limited(1120 * MIB) as group:
        off = [*settings, "memory.governor=off"]
        is_killed(train_in(group, tmp_path / "off", "slow-disk", 0, *off), group)
    with limited(1120 * MIB) as group:
        on = train_in(group, tmp_path / "on", "slow-disk", 0, *settings)
        assert on.returncode == 0, on.stderr
        assert group.kills == 0


def check_load(limited, tmp_path, larger):
    settings = [f"model.path={larger}", "tune.method=full", "train.max_steps=6", "model.dtype=fp32"]
    with limited(500 * MIB) as group:
        off = [*settings, "memory.governor=off"]
        is_killed(train_in(group, tmp_path / "off", "none", 0, *off), group)
    run_dir = tmp_path / "on"
    with limited(500 * MIB) as group:
        found = train_in(group, run_dir, "none", 0, *settings)
        assert is_not_killed(found, group, run_dir)
        assert outcome(run_dir)["phase"] == "loading the model"
        assert "ask for more memory" in outcome(run_dir)["reason"]
    with limited(1300 * MIB) as group:
        found = train_in(group, run_dir, "none", 0, *settings)
        assert found.returncode == 0, found.stderr
        assert group.kills == 0


MERGE_STOCK = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
model.merge_and_unload().save_pretrained(out)
"""


def check_merge(limited, tmp_path, tuned):
    adapter = next((tuned / "run" / "checkpoints").glob("step-*/adapter"))
    model, stock = str(tuned / "model"), str(tmp_path / "stock")
    export = [sys.executable, "-m", "hpc_tune", "export", str(tuned / "run"), "--to", "merged"]
    with limited(420 * MIB) as group:
        argv = [sys.executable, "-c", MERGE_STOCK, model, str(adapter), stock]
        is_killed(group.run(argv, 1, 120.0), group)
    with limited(420 * MIB) as group:
        found = group.run([*export, "--out", str(tmp_path / "merged")], 1, 120.0)
        assert found.returncode == 0, found.stderr
        assert group.kills == 0
    with limited(200 * MIB) as group:
        refused = group.run([*export, "--out", str(tmp_path / "none")], 1, 120.0)
        assert refused.returncode == 2, refused.stderr
        assert "merging holds one tensor at a time" in refused.stderr
        assert group.kills == 0


@pytest.mark.parametrize("name", [SHORT[0], pytest.param(SHORT[1], marks=pytest.mark.full)])
def test_where_the_kernel_would_have_killed_the_run_leaves_and_then_finishes(tmp_path, name):
    check_way(memory_group, tmp_path, name)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", list(WAYS))
def test_it_does_again_and_again(tmp_path, name, n):
    for number in range(REPEATS):
        check_way(memory_group, tmp_path / str(number), name, n)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["memory", "tmpfs", "cached"])
def test_a_neighbor_that_eats_the_limit_does_not_get_the_run_killed(tmp_path, kind):
    for number in range(REPEATS):
        check_neighbor(memory_group, tmp_path / f"{kind}-{number}", kind)
        check_neighbor(far_below, tmp_path / f"{kind}-{number}-below", kind)


@contextlib.contextmanager
def far_below(limit_bytes):
    """Run in a group two below the one with the limit, as Slurm's tasks do."""
    with memory_group(limit_bytes) as group, group.below("step", "task") as task:
        yield task


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_save_in_the_background_asks_before_it_copies(tmp_path, larger):
    for number in range(REPEATS):
        check_save(memory_group, tmp_path / str(number), larger)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_model_that_does_not_fit_is_left_while_it_is_loaded(tmp_path, larger):
    for number in range(REPEATS):
        check_load(memory_group, tmp_path / str(number), larger)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_merging_holds_one_tensor_where_the_whole_model_does_not_fit(tmp_path, tuned):
    for number in range(REPEATS):
        check_merge(memory_group, tmp_path / str(number), tuned)


@pytest.mark.soak
def test_what_a_group_far_below_takes_is_seen_within_a_second(tmp_path):
    metrics = tmp_path / "metrics"
    metrics.write_text("1\n2\n3\n")
    taken = [sys.executable, "-m", "tests.support.noisy_neighbor", str(metrics), str(300 * MIB)]
    with memory_group(LIMIT) as group, group.below("step", "task") as task:
        limit = HostLimit(LIMIT, "the test", group.folder)
        with closing(HostUsage(limit)) as usage, started(task.inside(taken), rank_environment(1)):
            before, until_s = group.charged_bytes, time.monotonic() + HANG_S
            behind = []
            while group.charged_bytes < before + 300 * MIB:
                assert time.monotonic() < until_s
                behind.append(group.charged_bytes - usage.used_bytes())
                time.sleep(0.1)
    print(f"at most {format_bytes(max(behind))} behind")
    assert max(behind) < 100_000_000


SPIKES = """
import time
for _ in range(25):
    taken = bytearray(b"x" * 240_000_000)
    time.sleep(0.07)
    del taken
    time.sleep(0.13)
"""


@pytest.mark.soak
def test_what_a_rank_takes_and_frees_is_not_counted_twice(tmp_path):
    with memory_group(LIMIT) as group, group.below("step", "task") as task:
        limit = HostLimit(LIMIT, "the test", group.folder)
        with started(task.inside([sys.executable, "-c", SPIKES]), rank_environment(1)) as rank:
            until_s = time.monotonic() + 30
            while group.charged_bytes < 200 * MIB:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            errors = []
            with closing(HostUsage(limit, pids=[rank.pid])) as usage:
                while rank.poll() is None:
                    errors.append(usage.used_bytes() - group.charged_bytes)
                    time.sleep(0.05)
    # The two are not read at once.
    middle, most = sorted(errors)[len(errors) // 2], sum(error > 100 * MIB for error in errors)
    print(f"median {middle / MIB:.0f} MiB, {most} of {len(errors)} more than 100 MiB too high")
    assert abs(middle) < 10 * MIB
    assert most < len(errors) / 20


@pytest.mark.full
def test_a_run_that_was_killed_is_told_of_by_the_next_start_and_by_inspect(tmp_path):
    with memory_group(LIMIT) as group:
        run_dir = tmp_path / "run"
        killed = train_in(group, run_dir, "burst", 400 * MIB, "memory.governor=observe")
        assert killed.returncode == -signal.SIGKILL
        [word] = (run_dir / "memory").iterdir()
        said = json.loads(word.read_text())
        word.write_text(json.dumps({**said, "time": said["time"] - 60}))
        inspect = [sys.executable, "-m", "hpc_tune", "inspect", str(run_dir)]
        inspected = run_ranks(inspect, rank_environment(1), 60.0)
        assert "the kernel killed 1 of that group's processes" in inspected.stdout, inspected
        done = train_in(group, run_dir, "none", 0)
        assert done.returncode == 0, done.stderr
        assert "it was killed: no outcome.json. Last seen on" in done.stderr
        assert not list((run_dir / "memory").iterdir())
