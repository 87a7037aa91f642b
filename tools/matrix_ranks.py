"""A program for ranks: a few steps of each row of the matrix, by the engines themselves.

    mpirun -np N python tools/matrix_ranks.py ROWS.json RESULTS FIRST

ROWS.json is a list of {"directory", "method", "layout", "packing", "attention"}; rank 0 appends a
line to RESULTS for each row from number FIRST on: {"losses": [...]} or {"error": text}. Each row
makes process groups, for which gloo keeps a thread per peer, and the heap becomes fragmented: so a
launch ends after ROWS_PER_LAUNCH rows, or when one of its ranks has MAX_BYTES.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from matrix_page import LAYOUTS

from hpc_tune.batch import Batch, padding_batch
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.base import Engine, EngineSettings, train_step
from hpc_tune.engine.native import NativeEngine
from hpc_tune.engine.zero.engine import ZeroEngine
from hpc_tune.errors import HpcTuneError
from hpc_tune.model.build import build
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.comm import Comm

ROWS_PER_LAUNCH = 60
MAX_BYTES = 1.5 * 2**30
RANKS = {layout: 2 for layout in LAYOUTS} | {"one": 1, "expert4": 4}
LENGTHS, STEPS, SEED = (24, 40, 17, 30), 3, 5
LR = {"full": 1e-3, "lora": 5e-3, "dora": 5e-3, "qlora": 5e-3, "experts": 5e-3}
EXPERTS = {"jetmoe": "input_linear, output_linear"}  # whose names differ from experts


def documents() -> list[torch.Tensor]:
    """Return the documents of each step, as tensors of T tokens."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 256, (length,), generator=generator) for length in LENGTHS]


def settings(row: dict[str, Any]) -> RunConfig:
    """Return a row's configuration."""
    layout = row["layout"]
    method = "lora" if row["method"] == "experts" else row["method"]
    words = [f"tune.method={method}", "tune.rank=8", "tune.alpha=16", "data.eval_path=null"]
    words += [f"model.path={row['directory']}", "data.path=unused.jsonl", f"train.seed={SEED}"]
    words += [f"optim.lr={LR[row['method']]}", "parallel.reshard=micro"]
    if row["method"] == "experts":
        experts = EXPERTS.get(Path(row["directory"]).name, "experts")
        words += [f"tune.targets=[all-linear, {experts}]", "tune.expert_rank=8"]
    if layout == "zero3":
        words += ["parallel.engine=deepspeed", "parallel.zero_stage=3", "parallel.reshard=auto"]
    elif "expert" in layout:
        words += [f"parallel.shard={RANKS[layout]}", "parallel.expert=2"]
    elif layout != "one":
        words += [f"parallel.{layout}=2"]
    return load_config(None, words)


def layout_of(row: dict[str, Any], size: int) -> Layout:
    """Return the layout of a row on ``size`` ranks: all of them along its axis."""
    name = row["layout"]
    return Layout(
        1 if name != "one" else size,
        size if name in ("shard", "zero3", "expert", "expert4") else 1,
        size if name == "tensor" else 1,
        size if name == "pipeline" else 1,
        2 if "expert" in name else 1,
    )


def batches(row: dict[str, Any], layout: Layout, data_rank: int) -> list[Batch]:
    """Return this rank's micro-batches: two rows of two documents, or four of one."""
    given = [(tokens.numpy(), np.ones(len(tokens), bool)) for tokens in documents()]
    rows = [given[:2], given[2:]] if row["packing"] else [[one] for one in given]
    mine = rows[data_rank :: layout.data_parallel_size]
    made = [make_batch([one], sum(LENGTHS), number) for number, one in enumerate(mine)]
    return made or [padding_batch(0)]


def losses_of(row: dict[str, Any], comm: Comm) -> list[float]:
    """Train a row; return the loss of each step."""
    config, name = settings(row), row["layout"]
    layout = layout_of(row, comm.world.size)
    built = build(Path(row["directory"]), torch.float32, config.tune, SEED)
    built.module.uses_document_attention &= row["attention"]
    plan = StepPlan.for_model(built, layout, config.parallel)
    given = EngineSettings(plan, comm.device, config.optim, config.train)
    make: Any = ZeroEngine if name == "zero3" else NativeEngine
    engine: Engine | None = None
    error: HpcTuneError | None = None
    try:
        engine = make(built, given)
    except HpcTuneError as caught:
        error = caught
    comm.agree_on_error(error, "making the engine")
    assert engine is not None
    mine = batches(row, layout, layout.coordinates(comm.world.rank).data)
    tokens = sum(length - 1 for length in LENGTHS)
    return [train_step(engine, mine, tokens, LR[row["method"]]).loss for _ in range(STEPS)]


def main() -> None:
    """Do it all; see above."""
    rows = json.loads(Path(sys.argv[1]).read_text())
    results = Path(sys.argv[2])
    first = int(sys.argv[3])
    comm = bootstrap(load_config(None, ["run.dir=unused"]).run)
    # fast_imports would freeze a row's engine, which would then never be freed.
    freeze, gc.freeze = gc.freeze, lambda: None
    for row in rows[first : first + ROWS_PER_LAUNCH]:
        told: dict[str, Any] = {}
        try:
            told["losses"] = losses_of(row, comm)
        except HpcTuneError as error:
            told["error"] = str(error)
        if comm.is_rank_0:
            with results.open("a") as out:
                out.write(json.dumps(told) + "\n")
        gc.collect()  # engines have reference cycles
        freeze()
        if comm.max([float(psutil.Process().memory_info().rss)])[0] > MAX_BYTES:
            break
    shutdown(comm)


if __name__ == "__main__":
    main()
