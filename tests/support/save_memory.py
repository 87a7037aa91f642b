"""A program for ranks: what saves of a full fine-tune cost each rank in host memory.

    python -m tests.support.save_memory MODEL_DIR FOLDER NUM_SAVES [key=value ...]

Goes on from the newest checkpoint in FOLDER if there is one.
Then does NUM_SAVES saves while training waits and as many in the background of steps. Prints JSON
of the most of any rank, in bytes of anonymous + shared memory: start, the growth from the built
model to the end of the first step; and for each save what it adds, to what is held between steps
while training waits, to the peak of a step in the background. blocked_s: how long training waited
for each save; step_s: what a step without one takes.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.collective import barrier, max_of, sum_of

POLL_S = 0.005
NUM_TOKENS, NUM_MICRO = 128, 2


def main() -> None:
    directory, folder, num_saves = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    words = ["run.device=cpu", "tune.method=full", "tune.param_dtype=bf16", "optim.lr=1e-5"]
    config = load_config(None, words + sys.argv[4:])
    session = bootstrap(config.run)
    import torch

    from hpc_tune.batch import Batch
    from hpc_tune.checkpoint.state import RunState
    from hpc_tune.checkpoint.store import Store
    from hpc_tune.engine.native import NativeEngine
    from hpc_tune.log import JsonLines
    from hpc_tune.memory.host import own_bytes
    from hpc_tune.model.build import build
    from hpc_tune.plan.account import measure
    from hpc_tune.plan.choose import choose_layout
    from hpc_tune.train.saving import Saver

    def peak_of(work: Callable[[], Any]) -> int:
        """Return the most that this process held while it did ``work``."""
        peak, finished = own_bytes(), threading.Event()

        def watch() -> None:
            nonlocal peak
            while not finished.wait(POLL_S):
                peak = max(peak, own_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        work()
        finished.set()
        watcher.join()
        return max(peak, own_bytes())

    built = build(directory, torch.bfloat16, config.tune, seed=0)
    layout, _ = choose_layout(config.parallel, session.world.size, measure(built.module), 1 << 60)
    tokens_BT = torch.arange(NUM_TOKENS).reshape(1, -1)
    batch = Batch(tokens_BT, tokens_BT, tokens_BT, NUM_TOKENS, NUM_TOKENS, 0)
    store = Store(folder, keep=1)
    newest = store.latest()
    barrier(session, "all ranks to have built the model")
    before = own_bytes()
    engine: Any = None

    def step(before_update: Callable[[], None] = lambda: None) -> None:
        num_tokens = NUM_MICRO * NUM_TOKENS * layout.data_size
        engine.train_step([batch] * NUM_MICRO, num_tokens, 1e-5, before_update)

    def begin() -> None:
        nonlocal engine
        parallel = config.parallel.model_copy(update={"reshard": "block"})
        engine = NativeEngine(built, layout, session.device, config.optim, parallel)
        if newest is not None:
            engine.load(newest, 1)
        step()

    [start] = max_of(session, [peak_of(begin) - before])
    began_s = time.monotonic()
    step_peak = max(peak_of(step) for _ in range(2))
    step_s = (time.monotonic() - began_s) / 2
    added: dict[str, list[float]] = {}
    blocked_s: dict[str, list[float]] = {}
    number = 1
    for background in (False, True):
        settings = config.checkpoint.model_copy(update={"background": background})
        events = folder.with_name(f"events-{background}.jsonl")
        lines = JsonLines(events if session.world.rank == 0 else None)
        saver = Saver(session, store, engine, lines, settings, 600.0, 0, None)

        def save() -> None:
            state = RunState(number, 100, "", {}, {}, 1, {})  # noqa: B023 - called here
            saver.start(state)  # noqa: B023
            while saver.busy:  # noqa: B023
                step(saver.before_update)  # noqa: B023
                saver.advance(sum_of(session, saver.votes())[0])  # noqa: B023

        grown = []
        for _ in range(num_saves):
            number += 1
            usual = step_peak if background else own_bytes()
            grown.append(peak_of(save) - usual)
        name = "background" if background else "waiting"
        added[name] = max_of(session, grown) if grown else []
        barrier(session, "the events of all saves")
        if num_saves:
            written = map(json.loads, events.read_text().splitlines())
            blocked_s[name] = [event["blocked_s"] for event in written]
    if session.world.rank == 0:
        found = {"start": start, "added": added, "blocked_s": blocked_s, "step_s": step_s}
        print(json.dumps(found))
    engine = None  # its groups go before the world does
    shutdown(session)


if __name__ == "__main__":
    main()
