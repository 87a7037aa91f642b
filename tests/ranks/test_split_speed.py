"""A base that is split over ranks of one node: speed and memory against a replicated one."""

import statistics
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.random_model import SHAPE_1B, write_random_model
from tests.support.ranks import find_mpirun, rank_environment, started
from tests.support.training import rows

POLL_S = 0.2
LAYOUTS = {
    "replicate": ["parallel.replicate=2"],
    "pipeline": ["parallel.pipeline=2"],
    "shard, gathered per block": ["parallel.shard=2", "parallel.reshard=block"],
    "shard, gathered per step": ["parallel.shard=2", "parallel.reshard=step"],
}


def private_bytes(pid: int) -> int:
    """Anonymous + shared bytes of all ranks below a process."""
    total = 0
    for child in psutil.Process(pid).children(recursive=True):
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            if "python" in fields["Name"]:
                total += sum(int(fields[k].split()[0]) << 10 for k in ("RssAnon", "RssShmem"))
        except (OSError, KeyError, psutil.Error):
            continue
    return total


def train(run_dir: Path, words: list[str]) -> tuple[float, int]:
    """Train on 2 ranks; return tokens per second and the peak of all ranks' private bytes."""
    peak = 0
    command = [find_mpirun(), "-np", "2", sys.executable, "-m", "hpc_tune", *words]
    with started(command, rank_environment(2)) as job:
        finished = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not finished.wait(POLL_S):
                peak = max(peak, private_bytes(job.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, stderr = job.communicate(timeout=900)
        finished.set()
        watcher.join()
    assert job.returncode == 0, stderr
    speeds = list(rows(run_dir, "tokens_per_s").values())[1:]
    return statistics.median(speeds), peak


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_split_1b_model_is_nearly_as_fast_as_a_replicated_one(tmp_path):
    """bf16, rows of 128 tokens, micro-batches of one row, 8 of them per rank and step."""
    model = tmp_path / "1b"
    model_bytes = write_random_model(model, **SHAPE_1B)
    found = {}
    for name, layout in LAYOUTS.items():
        run_dir = tmp_path / name.replace(", ", "-").replace(" ", "-")
        words = [
            *(f"model.path={model}", "model.dtype=bf16", "tune.method=lora", "tune.rank=8"),
            *("data.path=builtin:pydocs", f"data.cache={tmp_path}", "data.seq_len=128"),
            *("data.eval_path=null", "batch.global_size=16", "batch.micro_size=1"),
            *(
                "train.max_steps=3",
                f"run.dir={run_dir}",
                "run.tensorboard=false",
                "run.report=false",
                *layout,
            ),
        ]
        found[name] = train(run_dir, words)
        speed, peak = found[name]
        print(f"{name}: {speed:.1f} tokens/s, {peak / model_bytes:.2f} x the model's bytes private")
    assert found["pipeline"][0] >= 30 / 44.7 * found["replicate"][0]
    assert found["pipeline"][1] < 1.5 * model_bytes
