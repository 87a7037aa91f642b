"""The benchmark tool on real runs; its peers are tried where an environment has them."""

import json
import math
import os
import subprocess
import sys

import pytest

from hpc_tune.model.builtin import write_tiny_model
from tests.support.ranks import HANG_S, ROOT, rank_environment

BENCH = ROOT / "tools" / "bench.py"
sys.path.insert(0, str(BENCH.parent))

import bench  # noqa: E402 - it lies beside what it imports
import bench_shape  # noqa: E402
import bench_train  # noqa: E402
from bench_train import Measurement  # noqa: E402


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


def alpaca(number):
    given = "" if number % 2 else "It was a long way. " * (number % 7)
    return {"instruction": f"Say {number}.", "input": given, "output": f"{number} " * number}


@pytest.mark.full
@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.soak), True])
def test_hpc_tune_and_a_peer_train_on_the_same_tokens(tmp_path, ragged):
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "alpaca.json").write_text(json.dumps([alpaca(number) for number in range(60)]))
    told, shown = run_bench(
        tmp_path,
        *("train", "--model", str(tmp_path / "tiny"), "--dtype", "fp32", "--seq-len", "512"),
        *("--examples", "60", "--rows", "2", "--steps", "4", "--rounds", "1", "--save"),
        *("--quiet-wait", "0"),
        *(["--ragged", "--data", str(tmp_path / "alpaca.json")] if ragged else []),
        *("--peers", "ddp", "--peer-python", sys.executable, "--work", str(tmp_path / "work")),
    )
    mine, peer = told["runs"]["hpc_tune"][0], told["runs"]["ddp"][0]
    for one in (mine, peer):
        assert one["tokens_per_s"] > 0
        assert one["first_s"] > 1
        assert one["host_bytes"] > 100 << 20
        assert one["save_s"] > 0
        assert 0 <= one["others_share"] <= 1
    assert 0 <= mine["data_share"] < 1
    assert 0.5 < mine["grown"] < 2
    assert told["ratios"]["tokens_per_s"] == [mine["tokens_per_s"] / peer["tokens_per_s"]]
    assert "to the best peer of each round, median (least to most):" in shown
    assert os.listdir(tmp_path / "work") == [], "nothing of the runs is left"


@pytest.mark.full
def test_a_configuration_on_one_and_two_ranks(tmp_path):
    told, shown = run_bench(
        tmp_path, *("scale", "--ranks", "1", "2", "--steps", "4", "--set", "batch.global_size=4")
    )
    assert set(told["ranks"]) == {"1", "2"}
    assert "speed-up" in shown
    assert "use 1: 2 ranks are " in shown or "every added rank pays off up to 2" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "--ranks", "0"], "--ranks: 0: expected a whole number from 1 on"),
        (["train", "--model", "nowhere"], "--model nowhere: no config.json there"),
        (["train", "--model", ".", "--data", "no.jsonl"], "--data no.jsonl: no such file"),
        (
            ["train", "--model", ".", "--data", "rows.jsonl"],
            "--data rows.jsonl, line 2: found 3; expected one JSON object per row",
        ),
        (["train", "--model", ".", "--data", "empty.json"], "--data empty.json is empty"),
        (["train", "--model", ".", "--quiet-wait", "-1"], "expected a number of seconds from 0 on"),
        (["shape", "--model", "shape:nano", "--steps", "2"], "use at least 3"),
    ],
)
def test_wrong_words_are_refused_first(tmp_path, words, said, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps(alpaca(1)) + "\n3\n")
    (tmp_path / "empty.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("method", "ranks"), [("lora", "2"), ("qlora", "1")])
def test_a_model_without_weights_does_its_steps(tmp_path, method, ranks):
    write_tiny_model(tmp_path / "tiny")
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
    assert "% of what matmuls would allow" in shown
    assert "planned" not in shown, "that is for GPUs"


def test_the_planned_peak_stands_beside_the_allocators():
    found = bench_shape.ShapeSpeed(9000.0, 12000.0, int(4e9), int(60e9), int(57e9))
    lines = [" ".join(line.split()) for line in bench_shape.table(found)]
    assert lines == [
        "tokens/s 9000, 75% of what matmuls would allow",
        "host 4.00 GB",
        "device 60.00 GB at the allocator's peak",
        "planned 57.00 GB, -5.0%",
    ]


def test_the_verdict_names_the_last_number_of_ranks_that_pays():
    *_, verdict = bench.scale_table({1: (100.0, 0.0), 2: (190.0, 0.05), 4: (200.0, 0.6)})
    assert verdict == "use 2: 4 ranks are 1.05 x as fast (messages)"
    *_, verdict = bench.scale_table({1: (100.0, 0.0), 2: (80.0, 0.05)})
    assert verdict == "use 1: 2 ranks are 0.80 x as fast (shared cores, or too few rows per rank)"
    *_, verdict = bench.scale_table({2: (100.0, 0.0), 4: (180.0, 0.05)})
    assert verdict == "every added rank pays off up to 4: try more ranks"


def measured(tokens_per_s, first_s=8.0, host_bytes=3e9, others=0.0, grown=None):
    return Measurement(tokens_per_s, first_s, host_bytes, None, others, grown=grown)


def test_ratios_are_to_the_best_peer_of_each_round():
    rounds = [
        {"hpc_tune": measured(200, 8, 3e9, grown=1.04), "ddp": measured(160, 12, 6e9)},
        # The whole machine was slower; the ratio of the medians would be 200 / 150.
        {"ddp": measured(80, 24, 6e9, 0.02), "hpc_tune": measured(120, 16, 3e9, 0.01, 1.06)},
        {"hpc_tune": measured(240, 9, 3e9, grown=1.0), "ddp": measured(150, 9, 4e9)},
    ]
    rounds[2]["zero3"] = measured(100, 6, 5e9)
    header, mine, ddp, _, *rest = bench_train.table(rounds, limit=400.0)
    columns = "useful/s spread limit first host grown device save data rest others"
    assert header.split() == columns.split()
    assert " ".join(mine.split()) == "hpc_tune 200 120-240 0.50 9.0s 3.00 GB 1.04 - - - - 1%"
    assert " ".join(ddp.split()) == "ddp 150 80-160 0.38 12.0s 6.00 GB - - - - - 2%"
    assert len({len(line) for line in (header, mine, ddp)}) == 1
    assert rest == [
        "",
        "to the best peer of each round, median (least to most):",
        "  1.50 (1.25 to 1.60) x the tokens per second",
        "  0.67 (0.67 to 1.50) x the time to the first step",
        "  0.50 (0.50 to 0.75) x the host memory",
    ]


def run_rounds(tmp_path, monkeypatch, shares, *words):
    """Run ``train`` with runs that tell the next of ``shares``; return who ran, what it told."""
    (tmp_path / "config.json").write_text("{}")
    left, who = list(shares), []

    def run(name):
        who.append(name)
        return measured(100.0 + len(who), others=left.pop(0))

    monkeypatch.setattr(bench_train, "read_records", lambda *_: [])
    monkeypatch.setattr(bench_train, "prepare", lambda *_: (None, None))
    monkeypatch.setattr(bench_train, "ceiling_of", lambda *_: 1e9)
    monkeypatch.setattr(bench_train, "_flops_per_token", lambda *_: 1e6)
    monkeypatch.setattr(bench_train, "wait_for_quiet", lambda *_: True)
    monkeypatch.setattr(bench_train, "_run_hpc_tune", lambda *_: run("hpc_tune"))
    monkeypatch.setattr(bench_train, "_run_peer", lambda asked, name, *_: run(name))
    out = tmp_path / "out.json"
    words = [*words, "--peers", "ddp", "--peer-python", "none", "--work", str(tmp_path / "work")]
    words = ["bench.py", "train", "--model", str(tmp_path), "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", words)
    assert bench.main() == 0
    assert left == []
    return who, json.loads(out.read_text())


def test_a_disturbed_round_is_run_once_more(tmp_path, monkeypatch, capsys):
    who, told = run_rounds(tmp_path, monkeypatch, [0, 0.3, 0, 0.02, 0, 0], "--rounds", "2")
    assert who == ["hpc_tune", "ddp", "hpc_tune", "ddp", "ddp", "hpc_tune"]
    assert [one["others_share"] for one in told["runs"]["ddp"]] == [0.02, 0]
    assert [one["others_share"] for one in told["left_out"]["ddp"]] == [0.3]
    assert told["ratios"]["tokens_per_s"] == [103 / 104, 106 / 105]
    assert told["disturbed"] == {}
    shown = capsys.readouterr().out
    assert "other processes took 30% beside ddp: repeating this round" in shown
    assert "disturbed" not in shown


def test_a_round_that_is_disturbed_twice_is_named(tmp_path, monkeypatch, capsys):
    _, told = run_rounds(tmp_path, monkeypatch, [0, 0, 0.12, 0, 0, 0.5], "--rounds", "2")
    assert told["disturbed"] == {"2": "12% beside ddp"}
    assert [one["others_share"] for one in told["left_out"]["hpc_tune"]] == [0.5]
    said = "round 2 was disturbed, do not rely on it: other processes took 12% beside ddp"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_without_a_wait_a_disturbed_round_is_named_and_not_repeated(tmp_path, monkeypatch):
    words = ("--rounds", "1", "--quiet-wait", "0")
    who, told = run_rounds(tmp_path, monkeypatch, [0.2, 0.4], *words)
    assert who == ["hpc_tune", "ddp"]
    assert told["disturbed"] == {"1": "20% beside hpc_tune, 40% beside ddp"}
    assert told["left_out"] == {}
