"""Checks hpc_tune on a machine with one GPU, in a few minutes and without a network.

    python tools/gpu_check.py [--minutes 8] [--out gpu-check] [--device cpu] [--only NAME[,NAME]]

Parts run one after the other, the most informative first, even if an earlier one has failed. Each
has its own limit, after which it is killed. Parts whose packages are missing are skipped, by name.
OUT/gpu-check.json has all figures, and is replaced whenever there is a new one; OUT/gpu-check.log
has what was printed. Exit code 0: all that could be tried has passed; 1: something failed, or was
cut off. With --device cpu every part runs at toy size, which tests this tool but measures nothing.
"""

import argparse
import datetime
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent))  # a copy of the repository need not be installed

from gpu_parts import ROOT, Check, Part, run_parts  # noqa: E402

from hpc_tune.probe.software import git_commit, package_versions  # noqa: E402

TRAINING_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "pydantic",
    "omegaconf",
    "yaml",
    "h5py",
)


def _program(name: str, *words: str) -> tuple[str, ...]:
    return (str(TOOLS / f"gpu_{name}.py"), *words)


# By value: if time runs out, the least important parts are cut off.
PARTS = (
    Part(
        "doctor",
        60,
        "what the machine is: card, driver, NCCL, versions, and what doctor finds",
        _program("machine"),
        ("torch", "pydantic", "omegaconf", "yaml", "psutil"),
    ),
    Part(
        "tests",
        90,
        "tests/gpu by pytest",
        _program("tests"),
        (*TRAINING_PACKAGES, "psutil", "pytest"),
    ),
    Part(
        "losses",
        110,
        "losses of a small model against fp32 on the CPU: methods, packing, recompute, compile, "
        "float8, offload",
        _program("losses"),
        TRAINING_PACKAGES,
    ),
    Part(
        "speed",
        130,
        "Llama 3 8B, LoRA at 4,096: tokens/s, MFU, the allocator's peak beside the plan's",
        _program("speed"),
        (*TRAINING_PACKAGES, "peft", "psutil"),
    ),
    Part(
        "trainer",
        60,
        "the same with transformers' Trainer and peft",
        _program("trainer"),
        ("torch", "transformers", "peft", "accelerate"),
    ),
    Part(
        "qlora",
        80,
        "QLoRA of as many blocks of Llama 3 70B as fit into memory and time",
        _program("qlora"),
        (*TRAINING_PACKAGES, "peft", "bitsandbytes", "psutil"),
    ),
    Part(
        "saves",
        75,
        "what a save and moving the optimizer's state cost, and free",
        _program("saves"),
        TRAINING_PACKAGES,
    ),
    Part(
        "ladder",
        80,
        "a run on a device that is too small continues, or stops and can be resumed",
        _program("ladder"),
        (*TRAINING_PACKAGES, "peft"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    asked = _parser().parse_args(arguments)
    if asked.list:
        for part in PARTS:
            print(f"{part.name:<8} {part.limit_s:>4.0f} s  {part.what}")
        print(f"         {sum(part.limit_s for part in PARTS):>4.0f} s  if each takes its limit")
        return 0
    signal.signal(signal.SIGTERM, _end)
    chosen = [part for part in PARTS if not asked.only or part.name in asked.only]
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT) if (ROOT / ".git").exists() else None,
        "platform": platform.platform(),
        "versions": package_versions(),
    }
    check = Check(asked.out, asked.device, asked.minutes, facts)
    return 0 if run_parts(chosen, check) else 1


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through ``finally``, which ends the part's processes."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="for all parts (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=_names, default=(), metavar="NAME[,NAME]", help="parts")
    parser.add_argument("--list", action="store_true", help="print the parts and their limits")
    return parser


def _minutes(word: str) -> float:
    minutes = float(word)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: expected a number of minutes above 0")
    return minutes


def _names(word: str) -> tuple[str, ...]:
    names, known = tuple(word.split(",")), [part.name for part in PARTS]
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: expected some of {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
