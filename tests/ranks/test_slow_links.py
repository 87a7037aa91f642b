"""Two hosts of one core each on a slow network: what messages cost, against none at all.

The yardstick is two processes that train on half of the rows each and never talk.
"""

import functools
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import hosts
from tests.support.ranks import find_mpirun, rank_environment, run_ranks
from tests.support.training import rows

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
LORA = ["tune.method=lora", "tune.rank=16", "model.dtype=fp32", "data.seq_len=256"]
QUIET = ["run.tensorboard=false", "run.report=false", "run.threads=1", "data.eval_path=null"]


@pytest.fixture(scope="module")
def smollm2():
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "tools" / "fetch_smollm2.py", MODEL], check=True)
    return MODEL


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("slow")


def overrides(shared, name, steps, num_rows, *layout):
    return [
        *(f"model.path={MODEL}", f"run.dir={shared / name}", f"data.cache={shared}"),
        *(f"train.max_steps={steps}", f"batch.global_size={num_rows}", *LORA, *QUIET, *layout),
    ]


def tokens_per_s(run_dir: Path) -> float:
    """The median over the steps after the first, which warms up."""
    return statistics.median(list(rows(run_dir, "tokens_per_s").values())[1:])


def alone(*commands):
    """Run one command per core, at the same time, without any communication."""
    processes = [
        subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, "-m", *words],
            env=rank_environment(1, {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for core, words in enumerate(commands)
    ]
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [out for out, _ in said]


def ours_alone(shared, steps, num_rows, micro_size):
    """Return tokens per second of two trainings at once, each on half of the rows."""
    number = len(list(shared.glob("alone-*")))
    names = [f"alone-{number + core}" for core in range(2)]
    micro = f"batch.micro_size={micro_size}"
    alone(*(("hpc_tune", *overrides(shared, name, steps, num_rows // 2, micro)) for name in names))
    return sum(tokens_per_s(shared / name) for name in names)


def on_two_hosts(made, *words):
    """Run a program with one rank per host and core; return what it said."""
    if not Path(find_mpirun()).with_name("prterun").exists():
        pytest.skip("written for Open MPI 5")
    environment = {
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": made.names[0],  # for the stock tools
        "MASTER_PORT": "29400",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    options = f"--prtemca plm_ssh_agent {made.agent} --hostfile {made.hostfile}"
    options += f" --prtemca prte_if_include {made.network} --mca btl_tcp_if_include {made.network}"
    options += " --map-by ppr:1:node -np 2 " + " ".join(f"-x {name}" for name in environment)
    command = shlex.join([sys.executable, "-m", *words])
    pinned = f"exec taskset -c $OMPI_COMM_WORLD_RANK {command}"
    argv = made.on(0, find_mpirun(), *options.split(), "sh", "-c", shlex.quote(pinned))
    done = run_ranks(argv, rank_environment(2, environment), 900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ours(made, shared, name, steps, num_rows, *layout):
    """Return our tokens per second on two hosts."""
    on_two_hosts(made, "hpc_tune", *overrides(shared, name, steps, num_rows, *layout))
    return tokens_per_s(shared / name)


def stock_words(mode, num_rows, steps):
    numbers = f"{num_rows // 2} 4 256 {steps} fp32"
    return ("tests.support.stock_loop", mode, str(MODEL), *numbers.split())


def stock_alone(num_rows, steps):
    said = alone(*[stock_words("alone", num_rows, steps)] * 2)
    return sum(float(text.split()[-1]) for text in said)


def stock(made, mode, num_rows, steps):
    """Return the tokens per second of stock tools on two hosts."""
    return float(on_two_hosts(made, *stock_words(mode, num_rows, steps)).split()[-1])


def sent_bytes(run_dir):
    return sum(rows(run_dir, "sent_bytes")[2].values())


MICRO = "batch.micro_size=4"
PIPELINE = ("parallel.pipeline=2", "batch.micro_size=1")


def measured(title, yardstick, runs):
    """Return tokens per second of each run, said at once: a later one may take minutes."""
    print(f"\n{title}: {yardstick:.1f} tokens/s without communication")
    found = {}
    for name, run in runs.items():
        found[name] = run()
        print(f"  {name}: {found[name]:.1f} tokens/s, {found[name] / yardstick:.1%}", flush=True)
    return found


def beside(title, yardstick, runs):
    """Return what share of the yardstick each run reaches, and the last yardstick.

    The machine's own speed wanders by some per cent: a run is held against the mean of the
    yardsticks before and after it.
    """
    print(f"\n{title}")
    shares, before = {}, yardstick()
    for name, run in runs.items():
        speed, after = run(), yardstick()
        shares[name] = 2 * speed / (before + after)
        print(f"  {name}: {speed:.1f} tokens/s, {shares[name]:.1%} of {before:.1f} and {after:.1f}")
        before = after
    return shares, before


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_on_1_gbit_messages_cost_little(smollm2, shared, tmp_path):
    layouts = {
        "replicate": ("parallel.replicate=2", MICRO),
        "pipeline": PIPELINE,
        "pipeline, 3 stages per rank": (*PIPELINE, "parallel.stages_per_rank=3"),
    }
    for_comparison = {
        "shard, gathered per step": ("parallel.shard=2", "parallel.reshard=step", MICRO),
        "shard, gathered per block": ("parallel.shard=2", "parallel.reshard=block", MICRO),
        "zero3": ("parallel.zero_stage=3", MICRO),
    }
    stock_yardstick = stock_alone(8, 6)
    with hosts(2, tmp_path, rate="1gbit") as made:

        def run(name, layout):
            run_name = f"1gbit-{name}".replace(", ", "-").replace(" ", "-")
            speed = ours(made, shared, run_name, 8, 8, *layout)
            print(f"  {sent_bytes(shared / run_name) / 1e6:.0f} MB sent per rank and step")
            return speed

        runs = {name: functools.partial(run, name, layout) for name, layout in layouts.items()}
        found, last = beside("1 Gbit/s", lambda: ours_alone(shared, 8, 8, 4), runs)
        runs = {n: functools.partial(run, n, layout) for n, layout in for_comparison.items()}
        measured("1 Gbit/s, weights that travel", last, runs)
        modes = ("ddp", "fsdp2", "zero3")
        runs = {mode: functools.partial(stock, made, mode, 8, 6) for mode in modes}
        measured("1 Gbit/s, stock tools", stock_yardstick, runs)
    assert found["replicate"] >= 0.97
    assert max(found["pipeline"], found["pipeline, 3 stages per rank"]) >= 0.85


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_on_100_mbit_a_split_base_goes_by_pipeline(smollm2, shared, tmp_path):
    stock_yardstick = stock_alone(32, 3)
    layouts = {"replicate": ("parallel.replicate=2", MICRO), "pipeline": PIPELINE}
    with hosts(2, tmp_path, rate="100mbit") as made:
        runs = {
            name: functools.partial(ours, made, shared, f"100mbit-{name}", 4, 32, *layout)
            for name, layout in layouts.items()
        }
        found, last = beside("100 Mbit/s", lambda: ours_alone(shared, 4, 32, 4), runs)
        modes = ("fsdp2", "zero3")
        runs = {mode: functools.partial(stock, made, mode, 32, 2) for mode in modes}
        stock_found = measured("100 Mbit/s, stock tools", stock_yardstick, runs)
    assert found["replicate"] >= 0.90
    assert found["pipeline"] * last >= 5 * max(stock_found.values())
