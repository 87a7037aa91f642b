"""A program for ranks: load a model and print what that cost all ranks together in host memory.

    python -m tests.support.load_memory MODEL_DIR replicate|shard|zero1|zero2|zero3

Prints JSON: model_bytes, and the growth of anonymous + shared bytes summed over the ranks, at its
peak while loading and when loading is done.
"""

import json
import sys
import threading
from pathlib import Path

from hpc_tune.config.schema import OptimConfig, ParallelConfig, RunSettings, TuneConfig
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.collective import barrier, sum_of

POLL_S = 0.005


def main() -> None:
    session = bootstrap(RunSettings(device="cpu"))
    import torch

    from hpc_tune.engine.mesh import Layout
    from hpc_tune.engine.native import NativeEngine
    from hpc_tune.engine.zero import ZeroEngine
    from hpc_tune.memory.host import own_bytes
    from hpc_tune.model.build import build

    size, axis = session.world.size, sys.argv[2]
    layout = Layout(size, 1) if axis == "replicate" else Layout(1, size)
    parallel = ParallelConfig(reshard="block")
    engine_type: type[NativeEngine] | type[ZeroEngine] = NativeEngine
    if axis.startswith("zero"):
        import deepspeed.runtime.engine  # noqa: F401 - what libraries take is not the model's

        parallel = ParallelConfig(zero_stage=int(axis[-1]))
        engine_type = ZeroEngine
    tune = TuneConfig(rank=4, targets=["q_proj", "v_proj"])
    built = build(Path(sys.argv[1]), torch.bfloat16, tune, seed=0)
    barrier(session, "all ranks to have built the model")
    before = peak = own_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(POLL_S):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = engine_type(built, layout, session.device, OptimConfig(), parallel)
    after = own_bytes()
    finished.set()
    watcher.join()
    loaded, highest = sum_of(session, [after - before, max(peak, after) - before])
    if session.world.rank == 0:
        model_bytes = sum(f.stat().st_size for f in Path(sys.argv[1]).glob("*.safetensors"))
        print(json.dumps({"model_bytes": model_bytes, "loaded": loaded, "peak": highest}))
    del engine
    shutdown(session)


if __name__ == "__main__":
    main()
