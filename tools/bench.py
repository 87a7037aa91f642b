"""Compare hpc_tune with its alternatives: same model, same tokens, same machine, one run.

    python tools/bench.py train --model DIR [--data FILE] [--ranks 2] [--dtype fp32] [--ragged]
    python tools/bench.py scale --config FILE [--ranks 1 2 4] [--set key=value ...]
    python tools/bench.py shape --model shape:llama3-8b --device cuda [--set key=value ...]

``train`` runs hpc_tune and the Hugging Face Trainer with peft (peers: ddp, zero2, zero3, fsdp2) in
turn, --rounds times; the peers get an environment of their own below --work. The order is reversed
from round to round. It prints medians over the rounds:

    useful    document tokens per second, without padding, after the first two steps; all wall
              time counts, except for saves
    spread    the lowest and the highest of them
    limit     the share of what the machine's matrix multiplications would allow: tokens/s x flops
              per token (4 x frozen + 6 x trained + 6 x layers x hidden x length: step/size.py)
              over the flops/s of a large matmul in the same dtype, measured in the same run
    first     seconds from launch until the first optimizer step is done
    host      peak of anonymous + shared bytes over all ranks, a shared page counted once
    grown     the peak of a rank's anonymous bytes after the first step, divided by the peak
              within it (only hpc_tune reports it)
    device    peak of a GPU's bytes in use
    save      seconds for which training stood still for one checkpoint
    data      share of the step spent waiting for data (only hpc_tune reports it)
    rest      share of the time between steps: metrics, logging, agreeing on memory
    others    the largest share of the cores that other processes took in a run: until its first
              step or during the steps that count

A ratio compares hpc_tune with the best peer of the same round. The median, lowest and highest ratio
are printed. Each run waits until other processes take less than 5% of the cores, for --quiet-wait
seconds at most, and says so if they still take more. A round in which they took more than 10% is
repeated, and the quieter of the two counts; if that one was disturbed too, the table says so.

``--ragged``: documents as they are, which peers pad to the longest of a batch and hpc_tune packs;
otherwise rows of --seq-len tokens, all of them full. --data: any records that hpc_tune reads, as
JSON lines or one JSON array, such as alpaca's instruction, input, output.

``scale`` runs a configuration for a few steps on 1, 2, 4 ... ranks and says how many ranks pay off.

``shape`` trains a model of random weights, which needs no weight files: how fast steps are, what
share of the limit that is, and the allocator's peak beside the peak that ``plan`` predicts.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_shape import run_shape
from bench_train import PEERS, ROOT, run_train
from bench_watch import WARM, launch, run_watched, steps_of

from hpc_tune.errors import DataError

MIN_GAIN_SHARE = 0.5  # more ranks are advised if each added one brings at least half of its share


def main() -> int:
    """Parse, measure, print, and write what --out names."""
    parser = _parser()
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(
            f"--steps {args.steps}: the first {WARM} do not count; use at least {WARM + 1}"
        )
    if args.command == "train":  # before peers are installed, which takes minutes
        if not (args.model / "config.json").is_file():
            parser.error(f"--model {args.model}: no config.json there; name a model's directory")
        if args.data is not None and not args.data.is_file():
            parser.error(f"--data {args.data}: no such file; name a file of JSON")
    try:
        told = {"train": run_train, "scale": run_scale, "shape": run_shape}[args.command](args)
    except DataError as error:
        parser.error(f"--data {error}")
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


def run_scale(args: argparse.Namespace) -> dict[str, Any]:
    """Run a configuration on more and more ranks; print the table and how many pay off."""
    found: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted(set(args.ranks)):
            out = Path(folder) / str(ranks)
            out.mkdir()
            config = ["--config", str(Path(args.config).resolve())] if args.config else []
            words = [f"run.dir={out / 'run'}", f"train.max_steps={args.steps}", *args.settings]
            command = [*launch(ranks), sys.executable, "-m", "hpc_tune", *config, *words]
            run_watched(command, out, "cpu")
            steps = steps_of(out / "run")[WARM:]
            step_s = sum(step["step_s"] for step in steps)
            comm_share = sum(step["comm_s"] for step in steps) / step_s
            found[ranks] = (sum(step["tokens"] for step in steps) / step_s, comm_share)
            print(f"{ranks} ranks: {found[ranks][0]:.0f} tokens/s", flush=True)
    print()
    for line in scale_table(found):
        print(line)
    return {"settings": args.settings, "ranks": {str(n): one for n, one in found.items()}}


def scale_table(found: Mapping[int, tuple[float, float]]) -> Iterator[str]:
    """Yield the lines for (tokens per second, communication share) by number of ranks."""
    few = min(found)
    one = found[few][0] / few
    yield f"{'ranks':>6}{'tokens/s':>12}{'speed-up':>10}{'efficiency':>12}{'messages':>10}"
    for ranks, (tokens_per_s, share) in found.items():
        ratio = tokens_per_s / one
        yield (f"{ranks:>6}{tokens_per_s:>12.0f}{ratio:>9.2f}x{ratio / ranks:>12.0%}{share:>10.0%}")
    best, more = few, few
    for before, ranks in zip(list(found), list(found)[1:], strict=False):
        gain = found[ranks][0] / found[before][0] - 1
        if gain < MIN_GAIN_SHARE * (ranks / before - 1):
            more = ranks
            break
        best = more = ranks
    if more == best:
        yield f"every added rank pays off up to {best}: try more ranks"
        return
    gain = found[more][0] / found[best][0]
    why = "messages" if found[more][1] > 0.2 else "shared cores, or too few rows per rank"
    yield f"use {best}: {more} ranks are {gain:.2f} x as fast ({why})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="hpc_tune beside its peers")
    train.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    train.add_argument("--data", type=Path, help="JSON lines or an array; default: builtin:pydocs")
    train.add_argument("--examples", type=_count, default=1000, help="taken evenly from --data")
    train.add_argument("--ragged", action="store_true", help="documents as they are")
    train.add_argument("--ranks", type=_count, default=1)
    train.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    train.add_argument("--seq-len", type=_count, default=256)
    train.add_argument("--rows", type=_count, default=4, help="per rank and step")
    train.add_argument("--steps", type=int, default=8)
    train.add_argument("--rounds", type=_count, default=3)
    train.add_argument(
        "--quiet-wait",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="to wait for other processes to take little; 0: measure anyway, repeat no round",
    )
    train.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    train.add_argument("--peer-python", help="an interpreter that has the peers' packages")
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument("--save", action="store_true", help="one checkpoint in the middle")
    train.add_argument("--work", type=Path, default=ROOT / ".bench")
    train.add_argument("--out", type=Path, help="a JSON file for the figures")
    train.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="settings")
    scale = commands.add_parser("scale", help="how many ranks pay off")
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
    return parser


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: expected a whole number from 1 on")
    return number


def _seconds(word: str) -> float:
    seconds = float(word)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: expected a number of seconds from 0 on")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
