"""Two hosts of one core each on a slow network: what messages cost, against none at all.

The yardstick is two processes that train on half of the rows each and never talk.
"""

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
QUIET = ["run.tensorboard=false", "run.threads=1", "data.eval_path=null"]


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


def alone(shared, steps, num_rows, micro_size):
    """Two ranks without any communication, at the same time, on one core each."""
    processes = []
    for core in range(2):
        words = overrides(
            shared,
            f"alone-{num_rows}-{core}",
            steps,
            num_rows // 2,
            f"batch.micro_size={micro_size}",
        )
        argv = ["taskset", "-c", str(core), sys.executable, "-m", "hpc_tune", *words]
        env = rank_environment(1, {})
        processes.append(subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL))
    assert [p.wait(timeout=600) for p in processes] == [0, 0]
    return sum(tokens_per_s(shared / f"alone-{num_rows}-{core}") for core in range(2))


def on_two_hosts(made, shared, name, steps, num_rows, *layout, program=None):
    """One rank per host and core; return tokens per second."""
    if not Path(find_mpirun()).with_name("prterun").exists():
        pytest.skip("written for Open MPI 5")
    words = overrides(shared, name, steps, num_rows, *layout)
    command = [sys.executable, "-m", *(program or ["hpc_tune"]), *words]
    options = f"--prtemca plm_ssh_agent {made.agent} --hostfile {made.hostfile}"
    options += f" --prtemca prte_if_include {made.network} --mca btl_tcp_if_include {made.network}"
    options += " --map-by ppr:1:node -np 2 -x PYTHONPATH"
    pinned = f"exec taskset -c $OMPI_COMM_WORLD_RANK {shlex.join(command)}"
    argv = made.on(0, find_mpirun(), *options.split(), "sh", "-c", shlex.quote(pinned))
    done = run_ranks(argv, rank_environment(2, {"PYTHONPATH": str(ROOT)}), 900)
    assert done.returncode == 0, done.stderr
    return tokens_per_s(shared / name)


def sent_bytes(run_dir):
    return sum(rows(run_dir, "sent_bytes")[2].values())


PIPELINE = ("parallel.pipeline=2", "batch.micro_size=1")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_on_1_gbit_messages_cost_little(smollm2, shared, tmp_path):
    yardstick = alone(shared, 5, 8, 4)
    with hosts(2, tmp_path, rate="1gbit") as made:
        found = {
            name: on_two_hosts(made, shared, f"1gbit {name}".replace(" ", "-"), 5, 8, *layout)
            for name, layout in {
                "replicate": ("parallel.replicate=2", "batch.micro_size=4"),
                "pipeline": PIPELINE,
                "shard, gathered per step": (
                    *("parallel.shard=2", "parallel.reshard=step", "batch.micro_size=4"),
                ),
                "shard, gathered per block": (
                    *("parallel.shard=2", "parallel.reshard=block", "batch.micro_size=4"),
                ),
            }.items()
        }
    print(f"1gbit: {yardstick:.0f} tokens/s without communication")
    for name, speed in found.items():
        sent = sent_bytes(shared / f"1gbit {name}".replace(" ", "-"))
        print(f"  {name}: {speed / yardstick:.1%}, {sent / 1e6:.0f} MB sent per rank and step")
    assert found["replicate"] >= 0.97 * yardstick
    assert found["pipeline"] >= 0.85 * yardstick


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_on_100_mbit_a_split_base_goes_by_pipeline(smollm2, shared, tmp_path):
    yardstick = alone(shared, 3, 32, 4)
    with hosts(2, tmp_path, rate="100mbit") as made:
        found = {
            name: on_two_hosts(made, shared, f"100mbit-{name}", steps, 32, *layout)
            for name, steps, layout in (
                ("replicate", 3, ("parallel.replicate=2", "batch.micro_size=4")),
                ("pipeline", 3, PIPELINE),
                ("fsdp2", 2, ("parallel.shard=2", "parallel.reshard=block", "batch.micro_size=4")),
                ("zero3", 2, ("parallel.zero_stage=3", "batch.micro_size=4")),
            )
        }
    print(f"100mbit: {yardstick:.0f} tokens/s without communication")
    for name, speed in found.items():
        print(f"  {name}: {speed / yardstick:.1%}")
    assert found["replicate"] >= 0.90 * yardstick
    assert found["pipeline"] >= 5 * max(found["fsdp2"], found["zero3"])
