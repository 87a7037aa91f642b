"""hpc_tune beside what people would pick instead: same model, same tokens, same machine, one run.

    python tools/bench.py train --model DIR [--data FILE] [--ranks 2] [--dtype fp32] [--ragged]
    python tools/bench.py scale --config FILE [--ranks 1 2 4] [--set key=value ...]
    python tools/bench.py shape --model shape:llama3-8b --device cuda [--set key=value ...]

``train`` alternates between hpc_tune and the Hugging Face Trainer with peft (peers: ddp, zero2,
zero3, fsdp2), which get an environment of their own below --work, and prints medians and ratios:

    useful    tokens of documents per second, without padding, after the first two steps
    limit     the share of what the machine's matrix products would allow: tokens/s x flops per
              token (4 x frozen + 6 x trained + 6 x layers x hidden x length: plan/model_size.py)
              over the flops/s of a large product in the same dtype, measured in the same run
    first     seconds from launch until the first optimizer step is done
    host      peak of anonymous + shared bytes over all ranks, a shared page counted once
    device    peak of a GPU's bytes in use
    save      seconds for which training stood still for one checkpoint
    data      share of the step that is waiting for data (hpc_tune alone tells)
    rest      share of the time that passes between steps: metrics, logging, agreeing on memory

``--ragged``: documents as they are, which peers pad to the longest of a batch and hpc_tune packs;
else rows of --seq-len tokens, all of them full.

``scale`` runs a configuration for a few steps on 1, 2, 4 ... ranks and says how far more ranks pay.

``shape`` trains a model of random weights, for which no file is needed: how fast steps are, what
share of the limit that is, and the allocator's peak beside the one that ``plan`` foretells.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_scale import run_scale
from bench_shape import run_shape
from bench_watch import RUN_LIMIT_S, WARM, ceiling_of, launch, lines_of, steps_of, watched

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PEERS = ("ddp", "zero2", "zero3", "fsdp2")
PEER_PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed")
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Measured:
    """One run of one contender; None where it does not tell. ``tokens_per_s`` are useful ones."""

    tokens_per_s: float
    first_s: float
    host_bytes: int
    device_bytes: int | None
    save_s: float | None
    data_share: float | None = None
    rest_share: float | None = None


def main() -> int:
    """Parse, measure, print, and write what --out names."""
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="hpc_tune beside its peers")
    train.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    train.add_argument("--data", type=Path, help="JSONL; default: builtin:pydocs")
    train.add_argument("--examples", type=_count, default=1000, help="of --data, spread over it")
    train.add_argument("--ragged", action="store_true", help="documents as they are")
    train.add_argument("--ranks", type=_count, default=1)
    train.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    train.add_argument("--seq-len", type=_count, default=256)
    train.add_argument("--rows", type=_count, default=4, help="per rank and step")
    train.add_argument("--steps", type=int, default=8)
    train.add_argument("--rounds", type=_count, default=3)
    train.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    train.add_argument("--peer-python", help="an interpreter that has the peers' packages")
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument("--save", action="store_true", help="one checkpoint in the middle")
    train.add_argument("--work", type=Path, default=ROOT / ".bench")
    train.add_argument("--out", type=Path, help="a JSON file for the figures")
    train.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="settings")
    scale = commands.add_parser("scale", help="how far more ranks pay")
    scale.add_argument("--config", help="default: the embedded one")
    scale.add_argument("--ranks", type=_count, nargs="+", default=[1, 2, 4])
    scale.add_argument("--steps", type=int, default=6)
    scale.add_argument("--out", type=Path)
    scale.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="settings")
    shape = commands.add_parser("shape", help="a model of random weights")
    shape.add_argument("--model", required=True, help="shape:NAME, or a folder with a config.json")
    shape.add_argument("--seq-len", type=_count, default=4096)
    shape.add_argument("--rows", type=_count, default=1, help="per rank and micro-batch")
    shape.add_argument("--ranks", type=_count, default=1)
    shape.add_argument("--steps", type=int, default=8)
    shape.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    shape.add_argument("--out", type=Path)
    shape.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="settings")
    asked = parser.parse_args()
    if asked.steps <= WARM:
        parser.error(
            f"--steps {asked.steps}: the first {WARM} do not count; use at least {WARM + 1}"
        )
    if asked.command == "train":  # before peers are installed, which takes minutes
        if not (asked.model / "config.json").is_file():
            parser.error(f"--model {asked.model}: no config.json there; name a model's directory")
        if asked.data is not None and not asked.data.is_file():
            parser.error(f"--data {asked.data}: no such file; name a JSONL file")
    told = {"train": run_train, "scale": run_scale, "shape": run_shape}[asked.command](asked)
    if asked.out:
        asked.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: expected a whole number from 1 on")
    return number


def run_train(asked: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders in turn, ``rounds`` times; return all figures."""
    work: Path = asked.work
    work.mkdir(parents=True, exist_ok=True)
    if asked.device == "cpu" and "fsdp2" in asked.peers:
        print("fsdp2 is left out: on CPUs the Trainer does not shard, whatever is asked for")
        asked.peers = [peer for peer in asked.peers if peer != "fsdp2"]
    peer_python = asked.peer_python or (_peer_python(work) if asked.peers else "")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        prepared, tokens = _prepare(asked, Path(folder))
        runs: dict[str, list[Measured]] = {}
        ceilings: list[float] = []
        contenders = ["hpc_tune", *asked.peers]
        for number in range(asked.rounds):
            ceilings.append(ceiling_of(asked.dtype, asked.device))
            for name in contenders[:: 1 if number % 2 == 0 else -1]:
                out = Path(folder) / f"{name}-{number}"
                out.mkdir()
                if name == "hpc_tune":
                    found = _run_hpc_tune(asked, prepared, out)
                else:
                    try:
                        found = _run_peer(asked, name, peer_python, tokens, out)
                    except SystemExit as error:  # the others are worth measuring all the same
                        print(f"{error}\n{name} fails and is left out", flush=True)
                        contenders.remove(name)
                        continue
                print(f"round {number + 1}/{asked.rounds} {name}: {_sentence(found)}", flush=True)
                runs.setdefault(name, []).append(found)
                shutil.rmtree(out)
        flops = _flops_per_token(asked)
    ceiling = statistics.median(ceilings)
    limit = ceiling / flops
    print(
        f"\nmatrix products {ceiling / 1e9:.0f} GFLOP/s, {flops / 1e6:.0f} MFLOP per token: ",
        end="",
    )
    print(f"at most {limit:.0f} tokens/s\n")
    for line in table(runs, limit):
        print(line)
    kept = ("ragged", "ranks", "dtype", "seq_len", "rows", "steps", "device", "settings")
    return {
        "model": asked.model.name,
        **{name: getattr(asked, name) for name in kept},
        "ceiling_flops_per_s": ceilings,
        "flops_per_token": flops,
        "runs": {name: [asdict(one) for one in found] for name, found in runs.items()},
    }


def table(runs: Mapping[str, Sequence[Measured]], limit: float) -> Iterator[str]:
    """Yield the lines of the comparison: medians, and hpc_tune's ratios to the best peer."""
    header = f"{'':10}{'useful/s':>10}{'limit':>8}{'first':>9}{'host':>11}{'device':>11}"
    yield header + f"{'save':>8}{'data':>8}{'rest':>8}"
    medians = {name: _median(found) for name, found in runs.items()}
    for name, one in medians.items():
        share = one.tokens_per_s / limit
        yield (
            f"{name:10}{one.tokens_per_s:>10.0f}{share:>8.2f}{one.first_s:>8.1f}s"
            f"{one.host_bytes / 1e9:>8.2f} GB{_or_dash(one.device_bytes, 1e9, 8, ' GB')}"
            f"{_or_dash(one.save_s, 1, 7, 's')}{_or_dash(one.data_share, 0.01, 7, '%')}"
            f"{_or_dash(one.rest_share, 0.01, 7, '%')}"
        )
    peers = [one for name, one in medians.items() if name != "hpc_tune"]
    if peers:
        mine = medians["hpc_tune"]
        faster = mine.tokens_per_s / max(p.tokens_per_s for p in peers)
        first = mine.first_s / min(p.first_s for p in peers)
        host = mine.host_bytes / min(p.host_bytes for p in peers)
        yield ""
        yield f"to the best peer of each column: {faster:.2f} x the tokens per second, "
        yield f"{first:.2f} x the time to the first step, {host:.2f} x the host memory"


def _median(found: Sequence[Measured]) -> Measured:
    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in found if getattr(one, name) is not None]
        return statistics.median(values) if values else None

    return Measured(*(middle(name) for name in Measured.__dataclass_fields__))


def _or_dash(value: float | None, unit: float, width: int, ending: str) -> str:
    if value is None:
        return "-".rjust(width + len(ending))
    return f"{value / unit:>{width}.2f}{ending}"


def _sentence(one: Measured) -> str:
    return (
        f"{one.tokens_per_s:.0f} tokens/s, first step after {one.first_s:.1f} s, "
        f"{one.host_bytes / 1e9:.2f} GB"
    )


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


def _prepare(asked: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Tokenise the documents once for all; return hpc_tune's file and the peers'."""
    from hpc_tune.batch import IGNORED_LABEL
    from hpc_tune.data.hdf5_format import TokenStore
    from hpc_tune.data.pydocs import list_modules, read_module

    if asked.data is None:
        pairs = [pair for module in list_modules(False) for pair in read_module(module)]
        examples: list[dict[str, Any]] = [{"prompt": p, "completion": c} for p, c in pairs]
    else:
        lines = asked.data.read_text(encoding="utf-8").splitlines()
        examples = [json.loads(line) for line in lines]
    # Spread over the whole, so that a file that is ordered gives a fair part of itself.
    examples = examples[:: max(1, len(examples) // asked.examples)][: asked.examples]
    if not asked.ragged:  # one long text is cut into rows, of which the last alone is shorter
        examples = [{"text": "\n\n".join(word for one in examples for word in _words(one))}]
    raw, prepared, tokens = folder / "raw.jsonl", folder / "data.h5", folder / "tokens.json"
    raw.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    command = [sys.executable, "-m", "hpc_tune", "prepare", "--out", str(prepared)]
    words = [
        f"model.path={asked.model.resolve()}",
        f"data.path={raw}",
        f"data.seq_len={asked.seq_len}",
    ]
    watched([*command, *words], folder, "cpu")
    store = TokenStore.open(prepared)
    documents = []
    for number in range(store.num_documents):
        ids, learned = store.document(number)
        kept = list(zip(ids.tolist(), learned.tolist(), strict=True))
        labels = [token if is_learned else IGNORED_LABEL for token, is_learned in kept]
        documents.append((ids.tolist(), labels))
    tokens.write_text(json.dumps(documents), encoding="utf-8")
    return prepared, tokens


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words(inner)


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
    began, peak = time.time(), watched(command, out, asked.device)
    steps = steps_of(out / "run")
    counted = steps[WARM:]
    saves = [e for e in lines_of(out / "run" / "events.jsonl") if e["kind"] == "checkpoint"]
    step_s = sum(step["step_s"] for step in counted)
    save_s = saves[0]["blocked_s"] if save_at and saves else None
    # A row is written when its step is done and told.
    passed_s = steps[-1]["time"] - steps[WARM - 1]["time"] - (save_s or 0.0)
    return Measured(
        sum(step["tokens"] for step in counted) / step_s,
        steps[0]["time"] - began,
        *peak,
        save_s,
        sum(step["data_s"] for step in counted) / step_s,
        1.0 - step_s / passed_s,
    )


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
        program += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={asked.ranks}",
        ]
    command = [*program, str(TOOLS / "bench_peer.py"), str(out / "settings.json"), str(out)]
    # torchrun would give each rank one thread.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // asked.ranks))}
    began, peak = time.time(), watched(command, out, asked.device, threads)
    ranks = [lines_of(out / f"{rank}.jsonl") for rank in range(asked.ranks)]
    first, last = ranks[0][WARM - 1], ranks[0][-1]
    tokens_done = sum(lines[-1]["tokens"] - lines[WARM - 1]["tokens"] for lines in ranks)
    save_s = last["save_s"] - first["save_s"]
    return Measured(
        tokens_done / (last["time"] - first["time"] - save_s),
        ranks[0][0]["time"] - began,
        *peak,
        save_s if save_at else None,
    )


def _flops_per_token(asked: argparse.Namespace) -> float:
    import torch

    from hpc_tune.config.schema import TuneConfig
    from hpc_tune.model.build import build
    from hpc_tune.plan.model_size import flops_per_token, measure

    built = build(asked.model, torch.bfloat16, TuneConfig(rank=RANK), 0, weights=False)
    return flops_per_token(measure(built.module), built.config, asked.seq_len)


if __name__ == "__main__":
    sys.exit(main())
