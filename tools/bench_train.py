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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_watch import (
    DISTURBED_SHARE,
    RUN_LIMIT_S,
    WARM,
    WatchedRun,
    ceiling_of,
    launch,
    lines_of,
    run_watched,
    share_between,
    steps_of,
    wait_for_quiet,
)

from hpc_tune.data.chunks import list_pydocs_modules, read_pydocs_module
from hpc_tune.data.raw_files import is_json_array, line_number, read_json_array, read_json_lines
from hpc_tune.data.records import WrongRecord
from hpc_tune.errors import DataError

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PEERS = ("ddp", "zero2", "zero3", "fsdp2")
PEER_PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed")
RANK, ALPHA = 16, 32
OUR_NAME = "hpc_tune"


@dataclass(frozen=True)
class Measurement:
    """One run of one contender; None if not reported. ``tokens_per_s`` counts useful tokens.

    ``others_share``: the share of the cores that other processes took until the first step or
    during the counted ones, whichever is more. ``grown``: the peak of a rank's anonymous bytes
    after the first step, divided by the peak within it.
    """

    tokens_per_s: float
    first_s: float
    host_bytes: int
    device_bytes: int | None
    others_share: float
    save_s: float | None = None
    data_share: float | None = None
    rest_share: float | None = None
    grown: float | None = None


Round = Mapping[str, Measurement]  # by contender
# What is compared: how to choose the best peer, and what to call it.
COMPARISONS: dict[str, tuple[Callable[[Iterable[float]], float], str]] = {
    "tokens_per_s": (max, "the tokens per second"),
    "first_s": (min, "the time to the first step"),
    "host_bytes": (min, "the host memory"),
}


def run_train(args: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders in turn, ``rounds`` times; return all figures."""
    records = read_records(args.data)
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    if args.device == "cpu" and "fsdp2" in args.peers:
        print("fsdp2 is left out: on CPUs the Trainer never shards")
        args.peers = [peer for peer in args.peers if peer != "fsdp2"]
    peer_python = args.peer_python or (_peer_python(work) if args.peers else "")
    rounds: list[Round] = []
    left_out: list[Round] = []
    ceilings: list[float] = []
    with tempfile.TemporaryDirectory(dir=work) as folder:
        prepared, tokens = prepare(args, records, Path(folder))
        contenders = _Contenders(args, peer_python, Path(folder), prepared, tokens)
        for number in range(args.rounds):
            wait_for_quiet(args.quiet_wait)
            ceilings.append(ceiling_of(args.dtype, args.device))
            found = contenders.round(number)
            if args.quiet_wait and (names := find_disturbed_rounds([found])):
                print(f"other processes took {names[1]}: repeating this round", flush=True)
                found, other = choose_quieter_round(found, contenders.round(number))
                left_out.append(other)
            rounds.append(found)
        flops = _flops_per_token(args)
    ceiling = statistics.median(ceilings)
    limit = ceiling / flops
    print(
        f"\nmatmuls {ceiling / 1e9:.0f} GFLOP/s, {flops / 1e6:.0f} MFLOP per token: "
        f"at most {limit:.0f} tokens/s\n"
    )
    for line in table(rounds, limit):
        print(line)
    kept = ("ragged", "ranks", "dtype", "seq_len", "rows", "steps", "device", "settings")
    return {
        "model": args.model.name,
        **{name: getattr(args, name) for name in kept},
        "ceiling_flops_per_s": ceilings,
        "flops_per_token": flops,
        "runs": _convert_rounds(rounds),
        "ratios": {name: ratios(rounds, name) for name in COMPARISONS},
        "disturbed": find_disturbed_rounds(rounds),
        "left_out": _convert_rounds(left_out),
    }


def _convert_rounds(rounds: Sequence[Round]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [asdict(one) for one in runs] for name, runs in group_by_contender(rounds).items()
    }


class _Contenders:
    """hpc_tune and its peers; a peer that fails is left out from then on."""

    def __init__(
        self, args: argparse.Namespace, peer_python: str, folder: Path, prepared: Path, tokens: Path
    ) -> None:
        self._args, self._python, self._folder = args, peer_python, folder
        self._prepared, self._tokens = prepared, tokens
        self._names = [OUR_NAME, *args.peers]

    def round(self, number: int) -> Round:
        """Run each contender once: from first to last, in the next round from last to first."""
        found = {}
        for name in self._names[:: 1 if number % 2 == 0 else -1]:
            out = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
            wait_for_quiet(self._args.quiet_wait)
            if name == OUR_NAME:
                run = _run_hpc_tune(self._args, self._prepared, out)
            else:
                try:
                    run = _run_peer(self._args, name, self._python, self._tokens, out)
                except SystemExit as error:  # the others are still worth measuring
                    print(f"{error}\n{name} failed and is left out", flush=True)
                    self._names.remove(name)
                    continue
            print(f"round {number + 1}/{self._args.rounds} {name}: {sentence(run)}", flush=True)
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


def _run_hpc_tune(args: argparse.Namespace, prepared: Path, out: Path) -> Measurement:
    save_at = args.steps // 2 if args.save else None
    config = {
        "model": {"path": str(args.model.resolve()), "dtype": args.dtype},
        "tune": {"rank": RANK, "alpha": ALPHA},
        "data": {"path": str(prepared), "seq_len": args.seq_len, "packing": args.ragged},
        "batch": {"global_size": args.rows * args.ranks, "micro_size": args.rows},
        "optim": {"lr": 1e-4},
        "train": {"max_steps": args.steps},
        "checkpoint": {"every_steps": save_at} if save_at else {},
        "run": {"dir": str(out / "run"), "device": args.device},
    }
    (out / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # YAML reads JSON
    program = [sys.executable, "-m", "hpc_tune", "--config", str(out / "config.yaml")]
    command = [*launch(args.ranks), *program, *args.settings]
    began, seen = time.time(), run_watched(command, out, args.device)
    steps = steps_of(out / "run")
    counted = steps[WARM:]
    events = lines_of(out / "run" / "events.jsonl")
    saves = [e for e in events if e["kind"] == "checkpoint"]
    step_s = sum(step["step_s"] for step in counted)
    save_s = saves[0]["blocked_s"] if save_at and saves else None
    # A row is written when its step has been done and reported.
    passed_s = steps[-1]["time"] - steps[WARM - 1]["time"] - (save_s or 0.0)
    times = [step["time"] for step in steps]
    return Measurement(
        sum(step["tokens"] for step in counted) / passed_s,
        times[0] - began,
        seen.host_bytes,
        seen.device_bytes,
        _others_share(seen, began, times),
        save_s,
        sum(step["data_s"] for step in counted) / step_s,
        1.0 - step_s / passed_s,
        _find_memory_growth(events),
    )


def _others_share(seen: WatchedRun, began: float, times: Sequence[float]) -> float:
    """Return others' share until the first step was done or in the counted steps, if larger."""
    parts = ((began, times[0]), (times[WARM - 1], times[-1]))
    return max(share_between(seen.readings, *part) for part in parts)


def _find_memory_growth(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return a rank's peak after the first step over the peak within it; None if not reported."""
    told = [event["phases"] for event in events if event["kind"] == "memory"]
    if not told or not {"first step", "steady"} <= set(told[0]):
        return None
    first, steady = (told[0][name]["rank_bytes"] for name in ("first step", "steady"))
    return float(steady / first)


def _run_peer(
    args: argparse.Namespace, mode: str, python: str, tokens: Path, out: Path
) -> Measurement:
    save_at = args.steps // 2 if args.save else None
    settings = {
        "model": str(args.model.resolve()),
        "tokens": str(tokens),
        "mode": mode,
        "dtype": args.dtype,
        "rows": args.rows,
        "steps": args.steps,
        "save_at": save_at,
        "cpu": args.device == "cpu",
    }
    (out / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    program = [python]
    if args.ranks > 1 or mode != "ddp":
        program += ["-m", "torch.distributed.run", "--standalone"]
        program += [f"--nproc-per-node={args.ranks}"]
    command = [*program, str(TOOLS / "bench_peer.py"), str(out / "settings.json"), str(out)]
    # torchrun would give each rank one thread.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.ranks))}
    began, seen = time.time(), run_watched(command, out, args.device, threads)
    ranks = [lines_of(out / f"{rank}.jsonl") for rank in range(args.ranks)]
    first, last = ranks[0][WARM - 1], ranks[0][-1]
    tokens_done = sum(lines[-1]["tokens"] - lines[WARM - 1]["tokens"] for lines in ranks)
    save_s = last["save_s"] - first["save_s"]
    return Measurement(
        tokens_done / (last["time"] - first["time"] - save_s),
        ranks[0][0]["time"] - began,
        seen.host_bytes,
        seen.device_bytes,
        _others_share(seen, began, [line["time"] for line in ranks[0]]),
        save_s if save_at else None,
    )


def _flops_per_token(args: argparse.Namespace) -> float:
    import torch

    from hpc_tune.config.tune import TuneConfig
    from hpc_tune.model.build import build
    from hpc_tune.step.size import flops_per_token, measure_model_size

    built = build(args.model, torch.bfloat16, TuneConfig(rank=RANK), 0, reads_weights=False)
    return flops_per_token(measure_model_size(built.module), built.config, args.seq_len)


# -- the documents that all contenders get: read, spread, tokenized once


def read_records(path: Path | None) -> list[Any]:
    """Return the objects of a JSON array or of JSON lines; builtin:pydocs if ``path`` is None.

    Raises:
        DataError: if the file holds anything else, or nothing.
    """
    if path is None:
        pairs = [
            pair for module in list_pydocs_modules(False) for pair in read_pydocs_module(module)
        ]
        return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    in_array = is_json_array(path)
    rows = read_json_array(path) if in_array else read_json_lines(path, 0, path.stat().st_size)
    records = []
    for position, value in rows:
        if not isinstance(value, dict):
            where = f"element {position}" if in_array else f"line {line_number(path, position)}"
            found = value if isinstance(value, WrongRecord) else f"found {json.dumps(value)[:40]}"
            raise DataError(f"{path}, {where}: {found}; expected one JSON object per row")
        records.append(value)
    if not records:
        raise DataError(f"{path} is empty; expected one JSON object per row")
    return records


def prepare(args: argparse.Namespace, examples: list[Any], folder: Path) -> tuple[Path, Path]:
    """Tokenize ``examples`` once for all contenders; return hpc_tune's file and the peers'."""
    from hpc_tune.batch import IGNORED_LABEL  # they import torch
    from hpc_tune.data.hdf5_format import TokenStore

    # Spread over the whole file, so that an ordered file gives a fair sample.
    examples = examples[:: max(1, len(examples) // args.examples)][: args.examples]
    if not args.ragged:  # one long text is cut into rows; only the last is shorter
        examples = [{"text": "\n\n".join(word for one in examples for word in _words(one))}]
    raw, prepared, tokens = folder / "raw.jsonl", folder / "data.h5", folder / "tokens.json"
    raw.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    command = [sys.executable, "-m", "hpc_tune", "prepare", "--out", str(prepared)]
    words = [
        f"model.path={args.model.resolve()}",
        f"data.path={raw}",
        f"data.seq_len={args.seq_len}",
    ]
    run_watched([*command, *words], folder, "cpu")
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


# -- what is printed of the rounds: medians, spreads, the ratios of each round


def table(rounds: Sequence[Round], limit: float) -> Iterator[str]:
    """Yield the lines of the comparison; ``limit``: tokens per second that the machine allows."""
    header = f"{'':10}{'useful/s':>10}{'spread':>14}{'limit':>8}{'first':>9}{'host':>11}"
    yield (
        header
        + "".join(
            f"{name:>{width}}"
            for name, width in (("grown", 7), ("device", 12), ("save", 8), ("data", 8), ("rest", 8))
        )
        + f"{'others':>8}"
    )
    for name, found in group_by_contender(rounds).items():
        one, speeds = _median(found), [each.tokens_per_s for each in found]
        spread = f"{min(speeds):.0f}-{max(speeds):.0f}"
        yield (
            f"{name:10}{one.tokens_per_s:>10.0f}{spread:>14}{one.tokens_per_s / limit:>8.2f}"
            f"{one.first_s:>8.1f}s{one.host_bytes / 1e9:>8.2f} GB{_or_dash(one.grown, 1, 7)}"
            f"{_or_dash(one.device_bytes, 1e9, 9, ' GB')}"
            f"{_or_dash(one.save_s, 1, 7, 's')}{_or_dash(one.data_share, 0.01, 7, '%')}"
            f"{_or_dash(one.rest_share, 0.01, 7, '%')}"
            f"{max(each.others_share for each in found):>8.0%}"
        )
    told = {name: ratios(rounds, name) for name in COMPARISONS}
    if all(told.values()):
        yield ""
        yield "to the best peer of each round, median (least to most):"
        for name, some in told.items():
            middle = statistics.median(some)
            yield f"  {middle:.2f} ({min(some):.2f} to {max(some):.2f}) x {COMPARISONS[name][1]}"
    for number, names in find_disturbed_rounds(rounds).items():
        yield f"round {number} was disturbed, do not rely on it: other processes took {names}"


def group_by_contender(rounds: Sequence[Round]) -> dict[str, list[Measurement]]:
    """Return the runs of each contender, in the order of the first round."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: [one[name] for one in rounds if name in one] for name in names}


def ratios(rounds: Sequence[Round], name: str) -> list[float]:
    """Return hpc_tune's figure over that of the round's best peer, for each round with a peer."""
    best, found = COMPARISONS[name][0], []
    for one in rounds:
        peers = [getattr(run, name) for who, run in one.items() if who != OUR_NAME]
        if peers and OUR_NAME in one:
            found.append(getattr(one[OUR_NAME], name) / best(peers))
    return found


def find_disturbed_rounds(rounds: Sequence[Round]) -> dict[int, str]:
    """Return the rounds, numbered from 1, in which other processes took much, and how much."""
    found = {}
    for number, one in enumerate(rounds, 1):
        shares = [
            f"{run.others_share:.0%} beside {name}"
            for name, run in one.items()
            if run.others_share > DISTURBED_SHARE
        ]
        if shares:
            found[number] = ", ".join(shares)
    return found


def choose_quieter_round(first: Round, repeat: Round) -> tuple[Round, Round]:
    """Return the round to keep and the one to leave out, regardless of speed."""
    most = [max(run.others_share for run in one.values()) for one in (first, repeat)]
    return (first, repeat) if most[0] <= most[1] else (repeat, first)


def sentence(one: Measurement) -> str:
    """Return the line to print about a run when it has ended."""
    return (
        f"{one.tokens_per_s:.0f} tokens/s, first step after {one.first_s:.1f} s, "
        f"{one.host_bytes / 1e9:.2f} GB, others: {one.others_share:.0%}"
    )


def _median(found: Sequence[Measurement]) -> Measurement:
    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in found if getattr(one, name) is not None]
        return statistics.median(values) if values else None

    return Measurement(*(middle(name) for name in Measurement.__dataclass_fields__))


def _or_dash(value: float | None, unit: float, width: int, ending: str = "") -> str:
    if value is None:
        return "-".rjust(width + len(ending))
    return f"{value / unit:>{width}.2f}{ending}"
