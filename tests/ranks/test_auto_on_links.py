"""parallel=auto on hosts with real links: what it chooses, against every layout there is."""

import json
import shlex
import subprocess
import sys

import pytest
import torch

from tests.support.hosts import hosts
from tests.support.mixtures import write_large_mixture
from tests.support.random_model import SHAPE_SMALL, write_random_model
from tests.support.ranks import find_mpirun, rank_environment, run_ranks
from tests.support.training import SMALL, events, losses, rows, train, worst_gap

# 0.1B values in fp32, 400 MB: a step of 512 tokens computes for about as long as 1 Gbit/s needs to
# gather them.
STEP = [
    *("model.dtype=fp32", "tune.method=lora", "tune.rank=8", "data.seq_len=64"),
    *("batch.global_size=8", "batch.micro_size=1"),
    *("run.threads=1", "run.device=cpu", "memory.governor=off"),
]
QUIET = [
    "data.path=builtin:pydocs",
    "data.eval_path=null",
    "run.tensorboard=false",
    "run.report=false",
]
SPLIT = "memory.host_limit=550MB"  # of which a process takes 226 MiB, and the base 387


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    write_random_model(folder, dtype=torch.float32, **SHAPE_SMALL)
    return folder


def mpirun_on(made, *words, num=None):
    """Run a Python module on all hosts, a rank each; return what it did."""
    num = num or len(made.names)
    if not find_mpirun().endswith("mpirun"):
        pytest.skip("written for Open MPI 5")
    options = f"--prtemca plm_ssh_agent {made.agent} --hostfile {made.hostfile}"
    options += f" --prtemca prte_if_include {made.network} --mca btl_tcp_if_include {made.network}"
    options += f" --map-by ppr:1:node -np {num} -x PYTHONPATH"
    command = shlex.join([sys.executable, "-m", *words])
    argv = made.on(0, find_mpirun(), *options.split(), command)
    done = run_ranks(argv, rank_environment(num), 900)
    assert done.returncode == 0, done.stderr
    return done


def slow_down(made, first, second, rate):
    """Bound what two hosts send each other; all their other links stay as they are."""
    for me, other in ((first, second), (second, first)):
        address = made.network.replace(".0/24", f".{other + 1}/32")
        for words in (
            "qdisc replace dev eth0 root handle 1: htb default 10",
            "class add dev eth0 parent 1: classid 1:10 htb rate 40gbit burst 4mb",
            f"class add dev eth0 parent 1: classid 1:20 htb rate {rate} burst 128kb",
            "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst "
            f"{address} flowid 1:20",
        ):
            argv = ["tc", "-n", made.names[me], *words.split()]
            subprocess.run(argv, check=True, capture_output=True)


LINKS = {"fast": None, "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "one slow pair": None}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("base", ["fits", "must be split"])
@pytest.mark.parametrize("links", LINKS)
def test_the_choice_is_as_fast_as_the_best_layout(tmp_path, model, links, base):
    print(f"\n{links}, base {base}")
    settings = [f"model.path={model}", *STEP, *([SPLIT] if base != "fits" else [])]
    compare_all(tmp_path, links, settings)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("links", ["10 Gbit/s", "1 Gbit/s"])
def test_the_choice_for_a_mixture_is_as_fast_as_the_best_layout(tmp_path, links):
    """62M values, of which 54M are in experts: gathered, or tokens are sent to them."""
    print(f"\n{links}, a mixture")
    widths = {"hidden_size": 384, "intermediate_size": 768, "head_dim": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    numbers = {"num_hidden_layers": 8, "num_local_experts": 8}
    model = write_large_mixture("mixtral", tmp_path / "model", **widths, **heads, **numbers)
    others = [f"parallel.{axis}=1" for axis in ("replicate", "tensor", "pipeline")]
    settings = [f"model.path={model}", *STEP, "memory.host_limit=540MB", *others]
    assert "expert" in compare_all(tmp_path, links, settings)["layout"]


def compare_all(tmp_path, links, settings):
    """Measure all layouts of four hosts; return what was chosen, which must be the fastest."""
    with hosts(4, tmp_path, LINKS[links]) as made:
        if links == "one slow pair":
            slow_down(made, 0, 1, "100mbit")
        done = mpirun_on(made, "tests.support.every_layout", *settings)
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    (tmp_path / "told.json").write_text(json.dumps(told))  # to look into a prediction afterwards
    print(f"measuring took {told['measuring_s']:.0f} s")
    for row in told["rows"]:
        off = row["predicted_s"] / row["measured_s"] - 1
        print(
            f"  {row['layout']:<48} ranks {row['ranks']} predicted {row['predicted_s']:.2f} s, "
            f"measured {row['measured_s']:.2f} s ({off:+.0%}), waiting {row['comm_s']:.2f} s"
            f"{'  <- chosen' if row['chosen'] else ''}"
        )
    best = min(row["measured_s"] for row in told["rows"])
    [chosen] = [row for row in told["rows"] if row["chosen"]]
    assert chosen["measured_s"] <= 1.1 * best
    far = [r for r in told["rows"] if abs(r["predicted_s"] / r["measured_s"] - 1) > 0.25]
    assert far == []
    return chosen


@pytest.mark.full
def test_auto_says_what_it_chose_and_how_far_off_it_was_and_the_losses_are_those_of_one(tmp_path):
    words = [*SMALL, "tune.method=lora"]
    done = train([*words, "parallel=auto", f"run.dir={tmp_path / 'auto'}"], n=2)
    assert done.returncode == 0, done.stderr
    [layout] = events(tmp_path / "auto", "layout")
    assert f"{layout['layout']}: the shortest step by prediction" in done.stderr
    assert "<- this one" in done.stderr
    assert "the prediction was" in done.stderr
    assert layout["measured_step_s"] > 0
    done = train([*words, f"run.dir={tmp_path / 'one'}"])
    assert done.returncode == 0, done.stderr
    assert worst_gap(losses(tmp_path / "auto"), losses(tmp_path / "one")) < 1e-5


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_goes_around_a_slow_link_and_says_why_and_how_far_off_it_was(tmp_path, model):
    axes = ["parallel=auto", "parallel.pipeline=3", "train.max_steps=4"]
    words = [f"model.path={model}", *STEP, *QUIET, *axes]
    with hosts(3, tmp_path) as made:
        slow_down(made, 0, 1, "5mbit")
        done = mpirun_on(made, "hpc_tune", *words, f"run.dir={tmp_path / 'auto'}")
    [layout] = events(tmp_path / "auto", "layout")
    assert layout["layout"] == "replicate 1 x shard 1 x pipeline 3"
    # Neighbours in the pipeline talk; the first and the second host must not be.
    assert layout["ranks"] in ([0, 2, 1], [1, 2, 0])
    assert "<- this one" in done.stderr
    assert "the prediction was" in done.stderr
    assert layout["measured_step_s"] == pytest.approx(
        sorted(list(rows(tmp_path / "auto", "step_s").values())[1:])[1], rel=1e-6
    )
    alone = [sys.executable, "-m", "hpc_tune", *words[: -len(axes)], "train.max_steps=4"]
    run_ranks([*alone, f"run.dir={tmp_path / 'one'}"], rank_environment(1), 200)
    assert worst_gap(losses(tmp_path / "auto"), losses(tmp_path / "one")) < 1e-5


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_tool_that_gathers_over_slow_links_is_slower_than_one_rank_and_auto_is_not(
    tmp_path, model
):
    """Stories 1 and 2: more ranks, less speed. A naive layout, one rank, and auto."""
    words = [f"model.path={model}", *STEP, *QUIET, "batch.micro_size=4", "train.max_steps=2"]
    speeds = {}
    with hosts(2, tmp_path, "100mbit") as made:
        for name, axes, num in (
            ("one rank", [], 1),
            ("naive", ["parallel.shard=2", "parallel.reshard=block"], 2),
            ("auto", ["parallel=auto"], 2),
        ):
            done = mpirun_on(made, "hpc_tune", *words, *axes, f"run.dir={tmp_path / name}", num=num)
            speeds[name] = rows(tmp_path / name, "tokens_per_s")[2]
            print(f"{name}: {speeds[name]:.0f} tokens/s", flush=True)
    print(done.stderr[done.stderr.index("auto    layout") :].split("world ")[0])
    assert speeds["naive"] < speeds["one rank"] < speeds["auto"]
