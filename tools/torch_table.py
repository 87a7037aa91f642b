"""Run the same short runs with several torch versions and compare their losses.

    python tools/torch_table.py .venv-torch-2.9.1 .venv-torch-2.15.0 [--only lora,ZeRO-3]

Each folder is an environment with hpc_tune's dependencies (``make test TORCH=2.9.1`` makes one).
The reference is the Python that runs this. Every method is trained for four steps on one rank, and
in each layout on two ranks. It prints the largest loss difference for each run and torch, and at
the end the messages of refused runs. The exit code is 1 if a run that the reference finishes fails,
or is more than 1e-5 off.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.packages import fast_imports

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, TOLERANCE = 300.0, 1e-5
SHORT_RUN = (
    *("run.threads=1", "run.tensorboard=false", "model.dtype=fp32"),
    *("data.seq_len=128", "batch.global_size=4", "batch.micro_size=2", "optim.lr=1e-3"),
    *("train.max_steps=4", "data.eval_fraction=0"),
)
METHODS = {
    "full": ["tune.method=full"],
    "lora": ["tune.method=lora"],
    "lora in bf16": ["tune.method=lora", "model.dtype=bf16"],
    "qlora": ["tune.method=qlora"],
    "dpo": ["tune.objective=dpo"],
    "experts": ["tune.method=full"],
    "fp8 base": ["tune.method=lora", "tune.base_dtype=fp8"],
    "compile": ["train.compile=true"],
    "float8 emulated": ["train.compile=true", "train.float8=true", "model.dtype=bf16"],
}
# float8 rounding as on GPUs that have it, emulated by torchao on any device.
EMULATION_CODE = """
import functools, sys
from hpc_tune.__main__ import main
from hpc_tune.engine import native
from hpc_tune.model import float8
native.check_float8 = lambda device: None
native.convert_to_torchao_float8 = functools.partial(float8.convert_to_torchao_float8, emulate=True)
sys.exit(main())
"""
LAYOUTS = {
    "1 rank": [],
    "replicate": ["parallel.replicate=2"],
    "shard": ["parallel.shard=2"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
    "expert": ["parallel.shard=2", "parallel.expert=2"],
    "context": ["parallel.shard=2", "parallel.context=2"],
    "ZeRO-2": ["parallel.zero_stage=2"],
    "ZeRO-3": ["parallel.zero_stage=3"],
}
EXPERTS = {
    **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 320},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environments", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--only", help="methods and layouts, by their names in the table")
    asked = parser.parse_args(arguments)
    only = asked.only.split(",") if asked.only else []
    pythons = [Path(sys.executable), *(one / "bin" / "python" for one in asked.environments)]
    names = [_version_of(python) for python in pythons]
    print(f"{'':26}" + "".join(f"{name:>16}" for name in names), flush=True)
    refused, is_good = [], True
    with tempfile.TemporaryDirectory() as folder:
        files = _write_files(Path(folder))
        for method, layout in itertools.product(METHODS, LAYOUTS):
            if layout == "expert" and method != "experts":
                continue
            if only and not {method, layout} & {*only}:
                continue
            runs = [_losses(python, files, method, layout) for python in pythons]
            reference, cells = runs[0], []
            for name, found in zip(names, runs, strict=True):
                if isinstance(found, str):
                    refused.append(f"{method}, {layout}, {name}: {found}")
                    cells.append("refused")
                    is_good &= isinstance(reference, str)
                elif found is reference or isinstance(reference, str):
                    cells.append(f"{found[-1]:.6f}")
                else:
                    gap = max(abs(a - b) for a, b in zip(found, reference, strict=True))
                    cells.append(f"{gap:.1e}")
                    is_good &= gap <= TOLERANCE
            print(f"{f'{method}, {layout}':26}" + "".join(f"{c:>16}" for c in cells), flush=True)
    print("\n".join(refused))
    return 0 if is_good else 1


def _losses(python: Path, files: Path, method: str, layout: str) -> list[float] | str:
    """Return the losses of a run, or the message of its refusal."""
    run_dir = Path(tempfile.mkdtemp(dir=files))
    model = str(files / "experts") if method == "experts" else "builtin:tiny"
    data = str(files / "pairs.jsonl") if method == "dpo" else "builtin:pydocs"
    where = [f"run.dir={run_dir}", f"model.path={model}", f"data.path={data}"]
    program = ["-c", EMULATION_CODE] if method == "float8 emulated" else ["-m", "hpc_tune"]
    device = "auto" if method == "float8 emulated" else "cpu"
    settings = dict(word.split("=", 1) for word in (*SHORT_RUN, *METHODS[method], *LAYOUTS[layout]))
    train = [*program, *where, f"run.device={device}", *map("=".join, settings.items())]
    mpirun = [str(python.parent / "mpirun"), "--oversubscribe", "--bind-to", "none", "-np", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DS_BUILD_OPS": "0"}
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
    launch = [] if layout == "1 rank" else mpirun
    try:
        done = subprocess.run(
            [*launch, str(python), *train],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environ,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S:.0f} s"
    if done.returncode:
        lines = re.findall(r"^error on.*|^hpc_tune: .*", done.stderr + done.stdout, re.MULTILINE)
        return lines[0] if lines else f"exit code {done.returncode}: {done.stderr[-200:]}"
    steps = (json.loads(line) for line in (run_dir / "metrics.jsonl").open(encoding="utf-8"))
    return [step["loss"] for step in steps if "loss" in step]


def _write_files(folder: Path) -> Path:
    """Write a mixture of experts and pairs of answers."""
    with fast_imports():
        from transformers import AutoConfig, AutoModelForCausalLM

    experts = folder / "experts"
    write_tiny_model(experts)
    (experts / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **EXPERTS)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(experts)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number in range(32):
            row = {"prompt": f"What is {number} + 1?", "chosen": str(number + 1), "rejected": "0"}
            file.write(json.dumps(row) + "\n")
    return folder


def _version_of(python: Path) -> str:
    program = "import torch; print(torch.__version__)"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
