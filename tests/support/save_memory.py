"""A program for ranks: what saves of a full fine-tune cost each rank in host memory.

    python -m tests.support.save_memory MODEL_DIR FOLDER NUM_SAVES [key=value ...]

Resumes from the newest checkpoint in FOLDER if there is one. Then does NUM_SAVES saves while
training waits, and as many in the background of steps. Prints JSON with the largest value of any
rank, in bytes of anonymous + shared memory. start: the growth from the built model to the end of
the first step. added: what each save adds, to what is held between steps (while training waits) or
to the peak of a step (in the background). blocked_s: how long training waited for each save;
step_s: how long a step without a save takes.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.world.bootstrap import bootstrap, shutdown
from tests.support.peak import Peak

NUM_TOKENS, NUM_MICRO = 16, 2


def main() -> None:
    directory, folder, num_saves = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    words = ["run.device=cpu", "tune.method=full", "tune.param_dtype=bf16", "optim.lr=1e-5"]
    config = load_config(None, words + sys.argv[4:])
    comm = bootstrap(config.run)
    import torch

    from hpc_tune.batch import Batch
    from hpc_tune.checkpoint.state import RunState
    from hpc_tune.checkpoint.store import Store
    from hpc_tune.engine.base import EngineSettings
    from hpc_tune.engine.native import NativeEngine
    from hpc_tune.memory.host import own_bytes
    from hpc_tune.model.build import build
    from hpc_tune.model.weights import index_checkpoint
    from hpc_tune.plan.resolve import choose_layout
    from hpc_tune.rundir.json_lines import EventsWriter
    from hpc_tune.step.plan import StepPlan
    from hpc_tune.step.size import measure_model_size
    from hpc_tune.train.exit import ResumePoint
    from hpc_tune.train.saver import Saver, WriteOptions

    built = build(directory, torch.bfloat16, config.tune, seed=0)
    layout, _ = choose_layout(
        config.parallel, comm.world.size, measure_model_size(built.module), 1 << 60
    )
    tokens_BT = torch.arange(NUM_TOKENS).reshape(1, -1)
    batch = Batch(tokens_BT, tokens_BT, tokens_BT, NUM_TOKENS, NUM_TOKENS, 0)
    store = Store(folder, keep=1)
    newest = store.latest_checkpoint()
    comm.barrier("all ranks to have built the model")
    before = own_bytes()
    engine: Any = None

    def step(saver: Saver | None = None) -> None:
        engine.accumulate([batch] * NUM_MICRO, NUM_MICRO * NUM_TOKENS * layout.data_parallel_size)
        if saver is not None:
            saver.wait_until_weights_may_change()
        engine.update(1e-5)

    def begin() -> None:
        nonlocal engine
        parallel = config.parallel.model_copy(update={"reshard": "block"})
        plan = StepPlan.for_model(built, layout, parallel)
        engine = NativeEngine(built, EngineSettings(plan, comm.device, config.optim))
        if newest is not None:
            engine.load(index_checkpoint(newest), 1)
        step()

    def save(saver: Saver, number: int) -> None:
        saver.start(RunState(number, 100, "", {}, {}, 1, {}))
        while saver.is_saving:
            step(saver)
            saver.complete_if_done(comm.sum([saver.status()])[0])

    with Peak() as peak:
        begin()
    [start] = comm.max([peak.bytes - before])
    began_s = time.monotonic()
    with Peak() as peak:
        step()
        step()
    step_peak, step_s = peak.bytes, (time.monotonic() - began_s) / 2
    added: dict[str, list[float]] = {}
    blocked_s: dict[str, list[float]] = {}
    numbers = itertools.count(2)
    for background in (False, True):
        settings = config.checkpoint.model_copy(update={"background": background})
        events = folder.with_name(f"events-{background}.jsonl")
        common = comm, store, engine, EventsWriter(events if comm.is_rank_0 else None)
        saver = Saver(*common, settings, WriteOptions(600.0), ResumePoint(0), None)
        grown = []
        for _ in range(num_saves):
            usual = step_peak if background else own_bytes()
            with Peak() as peak:
                save(saver, next(numbers))
            grown.append(peak.bytes - usual)
        name = "background" if background else "waiting"
        added[name] = comm.max(grown) if grown else []
        comm.barrier("the events of all saves")
        if num_saves:
            written = map(json.loads, events.read_text().splitlines())
            blocked_s[name] = [event["blocked_s"] for event in written]
    if comm.is_rank_0:
        found = {"start": start, "added": added, "blocked_s": blocked_s, "step_s": step_s}
        print(json.dumps(found))
    engine = None  # its groups must go before the world
    shutdown(comm)


if __name__ == "__main__":
    main()
