"""A program: single ranks of a fake world do a whole run, and what they do is counted.

    python -m tests.support.fake_world FOLDER SIZE [SIZE ...]

All ranks are assumed to be alike: a sum is the number of ranks times this rank's part, and a gather
returns copies of this rank's. The last rank gets what rank 0 broadcast, in the same order. Prints
JSON: per size, for rank 0 and the last, what happened before the first step ("start"), in a steady
step ("step") and from the last step to the end ("end", with a checkpoint): calls of torch's
collectives by name, bytes of objects that came from other ranks, process groups made, files opened
below FOLDER. Files that the governor writes by the clock (last words) are left out.
"""

import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.faults import FaultPoint, Faults
from hpc_tune.world.discover import World

PER_NODE = 8
STEPS = 4


class Done:
    """A message that has arrived."""

    def wait(self) -> None:
        pass


class Counts:
    """What one rank has done so far, phase by phase."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.phases = str(folder), [Counter()]

    def add(self, what: str, number: int = 1) -> None:
        self.phases[-1][what] += number

    def opened(self, path: Any) -> None:
        by_the_clock = "/memory/" in str(path) or str(path).endswith("/live.json")
        if str(path).startswith(self._folder) and not by_the_clock:
            self.add("opens")

    def at(self, place: FaultPoint, step: int) -> None:
        if place == "step":
            self.phases.append(Counter())

    def told(self) -> dict[str, Counter]:
        # start, steps 1 to 4 (the first does more, the last ends with a save)
        return {"start": self.phases[0], "step": self.phases[2], "end": self.phases[STEPS]}


def main() -> None:
    folder = Path(sys.argv[1])
    counts = Counts(folder)
    sys.addaudithook(lambda event, args: counts.opened(args[0]) if event == "open" else None)
    count_libraries(counts)
    model, data = make_inputs(folder)
    told = {}
    for size in map(int, sys.argv[2:]):
        said: list[Any] = []
        for rank in (0, size - 1):
            counts.phases = [Counter()]
            run_dir = folder / f"run-{size}"
            words = [
                f"model.path={model}",
                f"data.path={data}",
                "data.eval_path=null",
                "data.seq_len=64",
                "tune.method=lora",
                f"batch.global_size={size}",
                "batch.micro_size=1",
                f"train.max_steps={STEPS}",
                f"parallel.replicate={size}",
                f"run.dir={run_dir}",
            ]
            run_as(rank, size, load_config(None, words), said, counts)
            told[f"{rank} of {size}"] = counts.told()
    print(json.dumps(told))


def count_libraries(counts: Counts) -> None:
    """Count the files that libraries open without Python's ``open``."""
    import h5py
    import safetensors

    real_init, real_open = h5py.File.__init__, safetensors.safe_open

    def init(self, name, *more, **options):
        counts.opened(name)
        real_init(self, name, *more, **options)

    def safe_open(name, *more, **options):
        counts.opened(name)
        return real_open(name, *more, **options)

    h5py.File.__init__, safetensors.safe_open = init, safe_open


def make_inputs(folder: Path) -> tuple[Path, Path]:
    from hpc_tune.data.prepare import PrepareSettings, prepare_data
    from hpc_tune.model.builtin import write_tiny_model
    from hpc_tune.model.tokenizer import load_tokenizer

    model, raw, data = folder / "tiny", folder / "raw.jsonl", folder / "data.h5"
    write_tiny_model(model)
    examples = [{"prompt": f"{n}?", "completion": f"{n} and one is {n + 1}"} for n in range(200)]
    raw.write_text("".join(json.dumps(one) + "\n" for one in examples), encoding="utf-8")
    prepare_data(str(raw), data, load_tokenizer(model), PrepareSettings(64))
    return model, data


def run_as(rank: int, size: int, config: Any, said: list[Any], counts: Counts) -> None:
    """Do the run as one rank; ``said`` keeps what rank 0 broadcasts, for the other rank."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpc_tune.checkpoint.writer import SaveReport, SaveReports
    from hpc_tune.model import config_json
    from hpc_tune.train.run import run
    from hpc_tune.world.bootstrap import Peer
    from hpc_tune.world.comm import Comm
    from hpc_tune.world.stop import StopFlag

    heard = iter(said)
    config_json._read_json_cached.cache_clear()  # a rank is a process of its own

    def join(settings, lost):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        place = (rank % PER_NODE, min(PER_NODE, size), rank // PER_NODE, -(-size // PER_NODE))
        return Comm(
            world=World(rank, size, *place, f"n{rank // PER_NODE}", "fake"),
            device=torch.device("cpu"),
            cpu_group=dist.group.WORLD,
            roster=tuple(Peer(r, r // PER_NODE, f"n{r // PER_NODE}", 1) for r in range(size)),
            store=dist.HashStore(),
            nonce="0",
            threads=1,
            sees_local_pids=False,
        )

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        counts.add("all_reduce")
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return Done() if async_op else None

    def broadcast_object_list(box, src, group=None):
        counts.add("broadcast")
        if rank == src:
            said.append(box[0])
        else:
            box[0] = next(heard)
            counts.add("object_bytes", len(pickle.dumps(box[0])))

    def all_gather_object(values, value, group=None):
        counts.add("all_gather")
        counts.add("object_bytes", size * len(pickle.dumps(value)))
        values[:] = [value] * size
        values[rank] = value

    def gather_elementwise(self, values):
        counts.add("numbers")
        return [[float(value)] * size for value in values]

    def counted(owner, name, what):
        made = getattr(owner, name)

        def wrapper(*args, **kwargs):
            counts.add(what)
            return made(*args, **kwargs)

        return owner, name, wrapper

    changes = [
        (dist, "all_reduce", all_reduce),
        (dist, "broadcast_object_list", broadcast_object_list),
        (dist, "all_gather_object", all_gather_object),
        (Comm, "gather_elementwise", gather_elementwise),
        # Each rank has the whole weights, so only the first one writes.
        (SaveReports, "collect", lambda self, own, between: [own] + [SaveReport()] * (size - 1)),
        counted(dist, "barrier", "barrier"),
        counted(dist, "new_group", "groups"),
        counted(dist.distributed_c10d, "_new_group_with_tag", "group_calls"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, changed in changes:
        setattr(owner, name, changed)
    try:
        assert run(config, StopFlag(None), faults=Faults(join=join, at=counts.at)) == 0
        assert next(heard, None) is None or rank == 0, "the ranks took different ways"
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)


if __name__ == "__main__":
    main()
