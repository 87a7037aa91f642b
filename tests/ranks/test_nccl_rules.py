"""Under NCCL's rules (tests/support/nccl_rules.py) nothing waits for ever, in any layout."""

import json

import pytest

from tests.ranks.test_layouts import LAYOUTS, METHODS, SETTINGS
from tests.support.mixtures import write_mixture
from tests.support.nccl_rules import LIMIT, MODE
from tests.support.ranks import mpirun
from tests.support.training import events, launch_runs, losses, many_runs, worst_gap

PROGRAM = "tests.support.nccl_rules"
MODES = ("lazy", "eager")
FEW_STEPS = ["train.max_steps=3", "optim.warmup_steps=1", "train.eval_rows=3"]
# What needs DeepSpeed's NVMe library is the same as zero3+cpu in its messages.
ON_RANKS = {
    n: [name for name, (num, _) in LAYOUTS.items() if num == n and "nvme" not in name]
    for n in (2, 4, 8)
}
START = """
import torch, torch.distributed as dist
from hpc_tune.config.schema import RunSettings
from hpc_tune.world.bootstrap import bootstrap
from tests.support.mixtures import write_mixture
from tests.support.nccl_rules import install, is_eager
install(is_eager())
comm = bootstrap(RunSettings(device="cpu"))
me, size = comm.world.rank, comm.world.size
word, got = torch.full((4,), float(me)), torch.zeros(4)
"""
END = """
from hpc_tune.world.bootstrap import shutdown
shutdown(comm)
"""
HANG = "is not over after"
NOT_ALL = "have not, after"
PAIR = "group = dist.new_group([0, 1], use_local_synchronization=True)\n"
# By name: ranks, program, and what is said in each mode; None where nothing is wrong.
RULES = {
    "both receive before they send": (
        2,
        "work = dist.irecv(got, 1 - me)\ndist.isend(word, 1 - me)\nwork.wait()",
        {"lazy": HANG, "eager": HANG},
    ),
    "both send before they receive": (
        2,
        "dist.send(word, 1 - me)\ndist.recv(got, 1 - me)",
        {"lazy": HANG, "eager": HANG},
    ),
    "one sends and one receives": (
        2,
        "dist.send(word, 1) if me == 0 else dist.recv(got, 0)\nassert got.sum() == 0",
        {"lazy": None, "eager": None},
    ),
    "both send and receive in one batch": (
        2,
        "ways = [(dist.isend, word), (dist.irecv, got)]\n"
        "works = dist.batch_isend_irecv([dist.P2POp(do, what, 1 - me) for do, what in ways])\n"
        "[work.wait() for work in works]\nassert got.tolist() == [1.0 - me] * 4",
        {"lazy": None, "eager": None},
    ),
    "a batch of some ranks comes first on a group of all": (
        3,
        "group = dist.new_group()\n"
        "if me < 2:\n"
        "    do, what = (dist.isend, word) if me else (dist.irecv, got)\n"
        "    op = dist.P2POp(do, what, 1 - me, group)\n"
        "    [work.wait() for work in dist.batch_isend_irecv([op])]",
        {"lazy": NOT_ALL, "eager": None},
    ),
    "two groups are used first in other orders": (
        2,
        "groups = [dist.new_group(), dist.new_group()]\n"
        "for group in reversed(groups) if me else groups:\n    dist.all_reduce(word, group=group)",
        {"lazy": NOT_ALL, "eager": HANG},
    ),
    "a rank has no part in a group that is made out of all ranks": (
        3,
        PAIR.replace("group", "if me < 2: group", 1),
        {"lazy": None, "eager": NOT_ALL},
    ),
    "a rank stands aside from a group that is made out of all ranks": (
        3,
        "from hpc_tune.engine.mesh import mirror_group_creation\n"
        "for pair in ([0, 1], [1, 2]):\n"
        "    if me in pair:\n"
        "        group = dist.new_group(pair, use_local_synchronization=True)\n"
        "        dist.all_reduce(word, group=group)\n"
        "    else:\n        mirror_group_creation(pair)",
        {"lazy": None, "eager": None},
    ),
    "a group of one rank": (
        2,
        PAIR.replace("0, 1", "me"),
        {"lazy": "a communicator of rank", "eager": "a communicator of rank"},
    ),
    "control traffic on the device's group": (
        2,
        "import dataclasses\ndataclasses.replace(comm, cpu_group=dist.group.WORLD).sum([1])",
        {"lazy": "control traffic over the device's group", "eager": "control traffic"},
    ),
    "an engine's data on the control group": (
        2,
        "from hpc_tune.engine.counted_collectives import CountedCollectives\n"
        "CountedCollectives(comm.device).all_reduce(word, comm.cpu_group)",
        {"lazy": "data over the control group", "eager": "data over the control group"},
    ),
}
# One that hangs within an operation, and one that hangs while a communicator is made.
SAMPLE = ("both send before they receive", "two groups are used first in other orders")


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.full) for x in RULES]
)
def test_a_rule_holds(name, mode):
    num, program, said = RULES[name]
    extra = {MODE: mode, LIMIT: "2"}
    done = mpirun(num, ["-c", START + program + END], timeout=120, env=extra)
    if said[mode] is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert said[mode] in done.stderr, done.stderr


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("rules")


def words(shared, name, method, axes, *more):
    own = [*SETTINGS, *FEW_STEPS, *METHODS[method], f"run.dir={shared / name}", *more]
    return [*own, *(f"parallel.{axis}" for axis in axes)]


@pytest.fixture(scope="module")
def references(shared):
    jobs = [{"overrides": words(shared, f"one {method}", method, [])} for method in METHODS]
    assert many_runs(1, jobs, shared) == [0] * len(jobs)
    return {method: losses(shared / f"one {method}") for method in METHODS}


def train_in(layouts, num, mode, shared, references, legs, *more):
    """Train ``layouts`` on ``num`` ranks, each leg up to its stop; compare the losses."""
    runs = {
        (layout, method): words(
            shared, f"{layout} {method} {mode}", method, LAYOUTS[layout][1], *more
        )
        for layout in layouts
        for method in METHODS
    }
    for stop in legs:
        jobs = [{"overrides": overrides, "stop_after": stop} for overrides in runs.values()]
        ended = launch_runs(num, jobs, shared, timeout=1100, program=PROGRAM)
        wrong = {
            row: end.output
            for row, end in zip(runs, ended, strict=True)
            if end.code != (75 if stop else 0)
        }
        assert not wrong, wrong
    for layout, method in runs:
        found = losses(shared / f"{layout} {method} {mode}")
        assert worst_gap(found, references[method]) < 1e-5, (layout, method)


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.full)])
def test_each_kind_of_message_reaches_its_rank(shared, references, monkeypatch, mode):
    """The stages' messages, FSDP's, a tensor's; training, evaluation and a save."""
    monkeypatch.setenv(MODE, mode)
    layouts, more = ["pipeline interleaved", "fsdp", "tensor"], "batch.micro_size=2"
    train_in(layouts, 2, mode, shared, references, [None], more)


@pytest.mark.parametrize(
    ("num", "mode"),
    [
        *(pytest.param(num, mode, marks=pytest.mark.full) for num in (2, 4) for mode in MODES),
        *(pytest.param(8, mode, marks=pytest.mark.soak) for mode in MODES),
    ],
)
@pytest.mark.timeout(1200)
def test_every_layout_trains_evaluates_saves_and_resumes(
    tmp_path, references, monkeypatch, num, mode
):
    monkeypatch.setenv(MODE, mode)
    train_in(ON_RANKS[num], num, mode, tmp_path, references, [2, None])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("pipeline interleaved", "lazy"),
        ("pipeline interleaved", "eager"),
        ("fsdp", "lazy"),
        ("fsdp", "eager"),
        ("zero2", "lazy"),
    ],
)
def test_the_governors_actions_wait_for_nobody(shared, references, monkeypatch, layout, mode):
    monkeypatch.setenv(MODE, mode)
    name = f"{layout} pressed {mode}"
    overrides = words(shared, name, "full", LAYOUTS[layout][1], "train.max_steps=12")
    job = {"overrides": [*overrides, "batch.micro_size=2"], "levels": ["HIGH"]}
    [ended] = launch_runs(2, [job], shared, program=PROGRAM)
    assert ended.code == 0, ended.output
    told = events(shared / name, "governor")
    done = [event["action"] for event in told if "action" in event]
    assert {"trim", "split_micro_batches", "recompute"} <= set(done), done


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_auto_measures_and_trains_on_three_ranks(shared, monkeypatch, mode):
    monkeypatch.setenv(MODE, mode)
    name = f"auto {mode}"
    overrides = words(shared, name, "lora", [], "parallel.layout=auto", "data.eval_path=null")
    overrides = [*overrides, "batch.global_size=6", "run.timeout=300"]
    [ended] = launch_runs(3, [{"overrides": overrides}], shared, program=PROGRAM)
    assert ended.code == 0, ended.output
    assert len(losses(shared / name)) == 3


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_the_doctor_measures_the_links_of_three_ranks(tmp_path, mode):
    argv = ["-m", PROGRAM, "doctor", "run.device=cpu", "--json", f"run.dir={tmp_path}"]
    done = mpirun(3, argv, env={MODE: mode})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [pair["ranks"] for pair in told["links"]["pairs"]] == [[0, 1], [0, 2], [1, 2]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "method", "axes"),
    [
        ("lazy", "lora", ["replicate=2", "shard=2", "expert=2"]),
        ("eager", "lora", ["replicate=2", "shard=2", "expert=2"]),
        ("lazy", "lora", ["shard=4", "expert=2"]),
        ("eager", "lora", ["shard=4", "expert=2"]),
        ("lazy", "full", ["shard=4", "expert=2"]),
        ("eager", "full", ["shard=4", "expert=2"]),
    ],
)
def test_tokens_are_sent_to_experts_and_back_on_four_ranks(
    tmp_path, monkeypatch, mode, method, axes
):
    monkeypatch.setenv(MODE, mode)
    model = write_mixture("qwen2_moe", tmp_path / "model")
    overrides = words(tmp_path, "experts", method, axes)
    if method == "lora":
        overrides.append("tune.targets=[all-linear,experts]")
    # Of three rows one rank has none in the end, and computes and sends all the same.
    overrides = [
        *overrides,
        f"model.path={model}",
        "batch.global_size=3",
        "parallel.recompute=full",
    ]
    [ended] = launch_runs(4, [{"overrides": overrides}], tmp_path, program=PROGRAM)
    assert ended.code == 0, ended.output
    assert len(losses(tmp_path / "experts")) == 3


# What is counted: the bytes of each kind of collective by group, as NCCL's would be.
LARGE = """
from hpc_tune.engine.mesh import send_large_messages
from hpc_tune.engine.mesh import Mesh
from hpc_tune.engine.pipeline_parallel import connect_stages
from hpc_tune.step.layout import Layout
from tests.support import nccl_rules

most, collective = {}, nccl_rules.RuledGroup.collective

def counting(group, name, *args, **kwargs):
    flat = lambda part: [part] if torch.is_tensor(part) else [t for p in part for t in flat(p)] \\
        if isinstance(part, (list, tuple)) else []
    kinds = most.setdefault(tuple(group._ranks), {})
    kinds[name] = max(kinds.get(name, 0), max(t.nbytes for t in flat(args)))
    return collective(group, name, *args, **kwargs)

made, new_group = set(), dist.new_group
def noting(ranks=None, **options):
    made.add(tuple(ranks))
    return new_group(ranks, **options)

dist.new_group = noting
nccl_rules.RuledGroup.collective = counting
layout = Layout(%s)
mesh = Mesh(layout, comm.device, layout.shard > 1)
assert all(len(ranks) > 1 for ranks in made), made
groups = {tuple(range(size)), *made}
edges = connect_stages(layout, False, comm.device) if layout.pipeline > 1 else {}
words, message = [], nccl_rules.RuledGroup._message
nccl_rules.RuledGroup._message = lambda group, kind, tensors, *more: words.append(
    (kind, tensors[0].nbytes)
) or message(group, kind, tensors, *more)
most.clear()
send_large_messages(mesh, edges, comm.device, 1 << 24)
assert sorted(words) == [(kind, 1 << 24) for kind in ("recv", "send")][: len(edges)], words
assert most.keys() == groups, (most, groups)
for ranks, kinds in most.items():
    assert len(kinds) >= 3, kinds  # all-reduce, all-gather, reduce-scatter
    assert all(num > 0.7 * (1 << 24) for num in kinds.values()), kinds
"""


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("4, 1", marks=pytest.mark.full),
        pytest.param("2, 2", marks=pytest.mark.full),
        "1, 4, expert=2",
        pytest.param("1, 4, context=2", marks=pytest.mark.full),
        "2, 1, 1, 2",
        pytest.param("2, 1, 2", marks=pytest.mark.full),
    ],
)
def test_every_group_sends_large_messages_and_none_is_of_one_rank(layout, mode):
    extra = {MODE: mode, LIMIT: "60"}
    done = mpirun(4, ["-c", START + LARGE % layout + END], timeout=240, env=extra)
    assert done.returncode == 0, done.stderr
