"""The benchmark tool on real runs; its peers are tried where an environment has them."""

import json
import math
import os
import subprocess
import sys

import pytest

from hpc_tune.model.builtin import write_tiny
from tests.support.ranks import HANG_S, ROOT, rank_environment

BENCH = ROOT / "tools" / "bench.py"
sys.path.insert(0, str(BENCH.parent))

import bench  # noqa: E402 - it lies beside what it imports
import bench_scale  # noqa: E402
import bench_shape  # noqa: E402


def run_bench(tmp_path, *words):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), *words, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=rank_environment(2),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.soak), True])
def test_hpc_tune_and_a_peer_train_on_the_same_tokens(tmp_path, ragged):
    write_tiny(tmp_path / "tiny")
    told, shown = run_bench(
        tmp_path,
        *("train", "--model", str(tmp_path / "tiny"), "--dtype", "fp32", "--seq-len", "512"),
        *("--examples", "60", "--rows", "2", "--steps", "4", "--rounds", "1", "--save"),
        *(["--ragged"] if ragged else []),
        *("--peers", "ddp", "--peer-python", sys.executable, "--work", str(tmp_path / "work")),
    )
    mine, peer = told["runs"]["hpc_tune"][0], told["runs"]["ddp"][0]
    for one in (mine, peer):
        assert one["tokens_per_s"] > 0
        assert one["first_s"] > 1
        assert one["host_bytes"] > 100 << 20
        assert one["save_s"] > 0
    assert 0 <= mine["data_share"] < 1
    assert "to the best peer of each column: " in shown
    assert os.listdir(tmp_path / "work") == [], "nothing of the runs is left"


@pytest.mark.full
def test_a_configuration_on_one_and_two_ranks(tmp_path):
    told, shown = run_bench(
        tmp_path,
        *("scale", "--ranks", "1", "2", "--steps", "4", "--set", "batch.global_size=4"),
    )
    assert set(told["ranks"]) == {"1", "2"}
    assert "speed-up" in shown
    assert "use 1: 2 ranks are " in shown or "up to 2 ranks each added one pays" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "--ranks", "0"], "--ranks: 0: expected a whole number from 1 on"),
        (["train", "--model", "nowhere"], "--model nowhere: no config.json there"),
        (["train", "--model", ".", "--data", "no.jsonl"], "--data no.jsonl: no such file"),
        (["shape", "--model", "shape:nano", "--steps", "2"], "use at least 3"),
    ],
)
def test_wrong_words_are_refused_first(tmp_path, words, said, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("method", "ranks"), [("lora", "2"), ("qlora", "1")])
def test_a_model_without_weights_does_its_steps(tmp_path, method, ranks):
    write_tiny(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    told, shown = run_bench(
        tmp_path,
        *("shape", "--model", str(tmp_path / "tiny"), "--device", "cpu", "--ranks", ranks),
        *("--seq-len", "64", "--rows", "2", "--steps", "4", "--set", f"tune.method={method}"),
    )
    assert told["layout"] == f"replicate {ranks} x shard 1"
    assert told["tokens"] == 2 * 64 * int(ranks)
    assert len(told["seconds"]) == 4
    # Random weights know as much as chance does.
    vocab_size = json.loads((tmp_path / "tiny" / "config.json").read_text())["vocab_size"]
    assert told["loss"] == pytest.approx(math.log(vocab_size), rel=0.1)
    assert "% of what matrix products would allow" in shown
    assert "planned" not in shown, "that is for GPUs"


def test_the_planned_peak_stands_beside_the_allocators():
    found = bench_shape.Found(9000.0, 12000.0, int(4e9), int(60e9), int(57e9))
    lines = [" ".join(line.split()) for line in bench_shape.table(found)]
    assert lines == [
        "tokens/s 9000, 75% of what matrix products would allow",
        "host 4.00 GB",
        "device 60.00 GB at the allocator's peak",
        "planned 57.00 GB, -5.0%",
    ]


def test_the_verdict_names_the_last_number_of_ranks_that_pays():
    *_, verdict = bench_scale.scale_table({1: (100.0, 0.0), 2: (190.0, 0.05), 4: (200.0, 0.6)})
    assert verdict == "use 2: 4 ranks are 1.05 x as fast (messages)"
    *_, verdict = bench_scale.scale_table({1: (100.0, 0.0), 2: (80.0, 0.05)})
    assert verdict == "use 1: 2 ranks are 0.80 x as fast (shared cores, or too few rows per rank)"
    *_, verdict = bench_scale.scale_table({2: (100.0, 0.0), 4: (180.0, 0.05)})
    assert verdict == "up to 4 ranks each added one pays: try more"


def test_ratios_are_to_the_best_peer_of_each_column():
    def measured(tokens_per_s, first_s, host_bytes):
        return bench.Measured(tokens_per_s, first_s, host_bytes, None, None)

    runs = {
        "hpc_tune": [measured(200, 8, 3e9), measured(240, 9, 3e9), measured(100, 10, 3e9)],
        "ddp": [measured(160, 12, 6e9)],
        "zero3": [measured(100, 30, 4e9)],
    }
    lines = list(bench.table(runs, limit=400.0))
    assert lines[1].split()[:5] == ["hpc_tune", "200", "0.50", "9.0s", "3.00"]
    assert " ".join(lines[-2:]) == (
        "to the best peer of each column: 1.25 x the tokens per second,  "
        "0.75 x the time to the first step, 0.75 x the host memory"
    )
