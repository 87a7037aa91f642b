"""A program for ranks: how much host memory a layout takes on all ranks together, by phase.

    python -m tests.support.load_memory MODEL_DIR [FIELD=VALUE ...]

FIELDs are those of ``parallel``. Prints JSON: model_bytes, layout; the growth of anonymous + shared
bytes, summed over the ranks, at the peak of each phase (loading, step, saving) and when all is
loaded; and read_bytes, what was read from the disk until the end of the first step (the page cache
is dropped first).
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hpc_tune.config.load import load_config
from hpc_tune.model.regions import write_regions
from hpc_tune.world.bootstrap import bootstrap, shutdown
from tests.support.peak import Peak

NUM_TOKENS = 128


def drop_from_page_cache(files: Iterable[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_read() -> int:
    """Return the bytes that this process has read from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    directory = Path(sys.argv[1])
    overrides = [f"parallel.{word}" for word in sys.argv[2:]]
    config = load_config(
        None,
        [
            "run.device=cpu",
            "tune.method=lora",
            "tune.rank=4",
            "tune.targets=[q_proj,v_proj]",
            *overrides,
        ],
    )
    comm = bootstrap(config.run)
    import torch

    from hpc_tune.batch import Batch
    from hpc_tune.engine.base import EngineSettings, train_step
    from hpc_tune.engine.native import NativeEngine
    from hpc_tune.engine.zero.engine import ZeroEngine
    from hpc_tune.memory.host import own_bytes
    from hpc_tune.model.build import build
    from hpc_tune.plan.resolve import choose_layout
    from hpc_tune.step.plan import StepPlan
    from hpc_tune.step.size import measure_model_size

    engine_type: type[NativeEngine] | type[ZeroEngine] = NativeEngine
    if config.parallel.zero_stage is not None:
        # Imported first, since the memory of libraries is not the model's.
        import deepspeed.runtime.engine
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - with torch's compiler

        engine_type = ZeroEngine
    files = list(directory.glob("*.safetensors"))
    built = build(directory, torch.bfloat16, config.tune, seed=0)
    size = measure_model_size(built.module)
    layout, _ = choose_layout(config.parallel, comm.world.size, size, 1 << 60)
    parallel = config.parallel
    if parallel.reshard == "auto":
        parallel = parallel.model_copy(update={"reshard": "block"})
    drop_from_page_cache(files)
    comm.barrier("all ranks to have built the model")
    before, read_before = own_bytes(), bytes_read()
    with Peak() as loading:
        plan = StepPlan.for_model(built, layout, parallel)
        engine = engine_type(built, EngineSettings(plan, comm.device, config.optim))
    loaded = own_bytes()
    tokens_BT = torch.arange(NUM_TOKENS).reshape(1, -1)
    batch = Batch(tokens_BT, tokens_BT, tokens_BT, NUM_TOKENS, NUM_TOKENS, 0)
    with Peak() as step:
        train_step(engine, [batch], NUM_TOKENS * layout.data_parallel_size, 1e-3)
    read = bytes_read() - read_before
    comm.barrier("all ranks to have done the step")
    with tempfile.TemporaryDirectory() as folder, Peak() as saving:
        file = Path(folder) / f"{comm.world.rank}.safetensors"
        if regions := engine.regions():
            write_regions(file, regions)
    growth = {
        "loading": loading.bytes - before,
        "loaded": loaded - before,
        "step": step.bytes - before,
        "saving": saving.bytes - before,
    }
    totals = comm.sum([*growth.values(), read])
    if comm.is_rank_0:
        model_bytes = sum(f.stat().st_size for f in files)
        said = {"model_bytes": model_bytes, "layout": str(layout)}
        print(json.dumps(said | dict(zip([*growth, "read_bytes"], totals, strict=True))))
    del engine
    shutdown(comm)


if __name__ == "__main__":
    main()
