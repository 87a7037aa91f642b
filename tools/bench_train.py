"""tools/bench.py train: hpc_tune and its peers in turn, round after round."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_data import prepare, read_records
from bench_quiet import share_between, wait_for_quiet
from bench_table import (
    COMPARED,
    OURS,
    Measured,
    Round,
    by_contender,
    disturbed,
    quieter,
    ratios,
    sentence,
    table,
)
from bench_watch import RUN_LIMIT_S, WARM, Watched, ceiling_of, launch, lines_of, steps_of, watched

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PEERS = ("ddp", "zero2", "zero3", "fsdp2")
PEER_PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed")
RANK, ALPHA = 16, 32


def run_train(asked: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders in turn, ``rounds`` times; return all figures."""
    records = read_records(asked.data)
    work: Path = asked.work
    work.mkdir(parents=True, exist_ok=True)
    if asked.device == "cpu" and "fsdp2" in asked.peers:
        print("fsdp2 is left out: on CPUs the Trainer does not shard, whatever is asked for")
        asked.peers = [peer for peer in asked.peers if peer != "fsdp2"]
    peer_python = asked.peer_python or (_peer_python(work) if asked.peers else "")
    rounds: list[Round] = []
    left_out: list[Round] = []
    ceilings: list[float] = []
    with tempfile.TemporaryDirectory(dir=work) as folder:
        prepared, tokens = prepare(asked, records, Path(folder))
        contenders = _Contenders(asked, peer_python, Path(folder), prepared, tokens)
        for number in range(asked.rounds):
            wait_for_quiet(asked.quiet_wait)
            ceilings.append(ceiling_of(asked.dtype, asked.device))
            found = contenders.round(number)
            if asked.quiet_wait and (names := disturbed([found])):
                print(f"other processes took {names[1]}: this round once more", flush=True)
                found, other = quieter(found, contenders.round(number))
                left_out.append(other)
            rounds.append(found)
        flops = _flops_per_token(asked)
    ceiling = statistics.median(ceilings)
    limit = ceiling / flops
    print(
        f"\nmatrix products {ceiling / 1e9:.0f} GFLOP/s, {flops / 1e6:.0f} MFLOP per token: "
        f"at most {limit:.0f} tokens/s\n"
    )
    for line in table(rounds, limit):
        print(line)
    kept = ("ragged", "ranks", "dtype", "seq_len", "rows", "steps", "device", "settings")
    return {
        "model": asked.model.name,
        **{name: getattr(asked, name) for name in kept},
        "ceiling_flops_per_s": ceilings,
        "flops_per_token": flops,
        "runs": _as_json(rounds),
        "ratios": {name: ratios(rounds, name) for name in COMPARED},
        "disturbed": disturbed(rounds),
        "left_out": _as_json(left_out),
    }


def _as_json(rounds: Sequence[Round]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(one) for one in runs] for name, runs in by_contender(rounds).items()}


class _Contenders:
    """hpc_tune and its peers; a peer that fails is left out from then on."""

    def __init__(
        self,
        asked: argparse.Namespace,
        peer_python: str,
        folder: Path,
        prepared: Path,
        tokens: Path,
    ) -> None:
        self._asked, self._python, self._folder = asked, peer_python, folder
        self._prepared, self._tokens = prepared, tokens
        self._names = [OURS, *asked.peers]

    def round(self, number: int) -> Round:
        """Run each contender once: from the first to the last, in the next round back again."""
        found = {}
        for name in self._names[:: 1 if number % 2 == 0 else -1]:
            out = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
            wait_for_quiet(self._asked.quiet_wait)
            if name == OURS:
                run = _run_hpc_tune(self._asked, self._prepared, out)
            else:
                try:
                    run = _run_peer(self._asked, name, self._python, self._tokens, out)
                except SystemExit as error:  # the others are worth measuring all the same
                    print(f"{error}\n{name} fails and is left out", flush=True)
                    self._names.remove(name)
                    continue
            print(f"round {number + 1}/{self._asked.rounds} {name}: {sentence(run)}", flush=True)
            found[name] = run
            shutil.rmtree(out)
        return found


def _peer_python(work: Path) -> str:
    """Make the peers' environment once; return its interpreter."""
    python = work / "peers" / "bin" / "python"
    done = work / "peers" / "made"
    if not done.exists():
        print(f"installing {', '.join(PEER_PACKAGES)} into {work / 'peers'}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(work / "peers")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        pinned = ["--constraint", str(ROOT / "constraints.txt")]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        for some in (["torch"], list(PEER_PACKAGES), ["setuptools"]):
            subprocess.run([*pip, *pinned, *some], check=True, env=environment, timeout=RUN_LIMIT_S)
        done.touch()
    return str(python)


def _run_hpc_tune(asked: argparse.Namespace, prepared: Path, out: Path) -> Measured:
    save_at = asked.steps // 2 if asked.save else None
    config = {
        "model": {"path": str(asked.model.resolve()), "dtype": asked.dtype},
        "tune": {"rank": RANK, "alpha": ALPHA},
        "data": {"path": str(prepared), "seq_len": asked.seq_len, "packing": asked.ragged},
        "batch": {"global_size": asked.rows * asked.ranks, "micro_size": asked.rows},
        "optim": {"lr": 1e-4},
        "train": {"max_steps": asked.steps},
        "checkpoint": {"every_steps": save_at} if save_at else {},
        "run": {"dir": str(out / "run"), "device": asked.device},
    }
    (out / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # YAML reads JSON
    program = [sys.executable, "-m", "hpc_tune", "--config", str(out / "config.yaml")]
    command = [*launch(asked.ranks), *program, *asked.settings]
    began, seen = time.time(), watched(command, out, asked.device)
    steps = steps_of(out / "run")
    counted = steps[WARM:]
    events = lines_of(out / "run" / "events.jsonl")
    saves = [e for e in events if e["kind"] == "checkpoint"]
    step_s = sum(step["step_s"] for step in counted)
    save_s = saves[0]["blocked_s"] if save_at and saves else None
    # A row is written when its step is done and told.
    passed_s = steps[-1]["time"] - steps[WARM - 1]["time"] - (save_s or 0.0)
    times = [step["time"] for step in steps]
    return Measured(
        sum(step["tokens"] for step in counted) / passed_s,
        times[0] - began,
        seen.host_bytes,
        seen.device_bytes,
        _others_share(seen, began, times),
        save_s,
        sum(step["data_s"] for step in counted) / step_s,
        1.0 - step_s / passed_s,
        _grown(events),
    )


def _others_share(seen: Watched, began: float, times: Sequence[float]) -> float:
    """Return others' share until the first step was done or in the counted ones, the larger one."""
    parts = ((began, times[0]), (times[WARM - 1], times[-1]))
    return max(share_between(seen.readings, *part) for part in parts)


def _grown(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return a rank's peak after the first step over that within it; None if it is not told."""
    told = [event["phases"] for event in events if event["kind"] == "memory"]
    if not told or not {"first step", "steady"} <= set(told[0]):
        return None
    first, steady = (told[0][name]["rank_bytes"] for name in ("first step", "steady"))
    return float(steady / first)


def _run_peer(
    asked: argparse.Namespace, mode: str, python: str, tokens: Path, out: Path
) -> Measured:
    save_at = asked.steps // 2 if asked.save else None
    settings = {
        "model": str(asked.model.resolve()),
        "tokens": str(tokens),
        "mode": mode,
        "dtype": asked.dtype,
        "rows": asked.rows,
        "steps": asked.steps,
        "save_at": save_at,
        "cpu": asked.device == "cpu",
    }
    (out / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    program = [python]
    if asked.ranks > 1 or mode != "ddp":
        program += ["-m", "torch.distributed.run", "--standalone"]
        program += [f"--nproc-per-node={asked.ranks}"]
    command = [*program, str(TOOLS / "bench_peer.py"), str(out / "settings.json"), str(out)]
    # torchrun would give each rank one thread.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // asked.ranks))}
    began, seen = time.time(), watched(command, out, asked.device, threads)
    ranks = [lines_of(out / f"{rank}.jsonl") for rank in range(asked.ranks)]
    first, last = ranks[0][WARM - 1], ranks[0][-1]
    tokens_done = sum(lines[-1]["tokens"] - lines[WARM - 1]["tokens"] for lines in ranks)
    save_s = last["save_s"] - first["save_s"]
    return Measured(
        tokens_done / (last["time"] - first["time"] - save_s),
        ranks[0][0]["time"] - began,
        seen.host_bytes,
        seen.device_bytes,
        _others_share(seen, began, [line["time"] for line in ranks[0]]),
        save_s if save_at else None,
    )


def _flops_per_token(asked: argparse.Namespace) -> float:
    import torch

    from hpc_tune.config.tune import TuneConfig
    from hpc_tune.model.build import build
    from hpc_tune.step.size import flops_per_token, measure

    built = build(asked.model, torch.bfloat16, TuneConfig(rank=RANK), 0, weights=False)
    return flops_per_token(measure(built.module), built.config, asked.seq_len)
