"""Saves beside training: when they are there, what they cost, and what follows a failed one."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_tune.checkpoint.store import Store, verify_checkpoint
from hpc_tune.checkpoint.writer import PinnedBlockPool, SaveReport, SaveReports
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import CheckpointConfig
from hpc_tune.errors import CheckpointError
from hpc_tune.faults import Faults
from hpc_tune.memory.policy import Action
from hpc_tune.model.regions import WrittenFile
from hpc_tune.model.tensor_sources import PIECE_BYTES
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.train.exit import ResumePoint
from hpc_tune.train.run import run
from hpc_tune.train.saver import Saver, WriteOptions
from hpc_tune.world.discover import World
from tests.support.many_runs import StopAfter
from tests.support.regions import regions_of
from tests.support.training import SMALL, events, outcome
from tests.unit.checkpoint.test_checkpoint_state import state
from tests.unit.train.test_data_inputs import ALONE

SETTINGS = [*SMALL, "data.path=builtin:pydocs:heldout", "tune.method=lora", "train.max_steps=4"]
STEP_S = 1.0


def trained(run_dir: Path, faults: Faults, *words: str, stop_after: int | None = None) -> int:
    config = load_config(None, [*SETTINGS, f"run.dir={run_dir}", *words])
    return run(config, StopAfter(stop_after), faults=faults)


def steps_in(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in Store(run_dir / "checkpoints", keep=1).step_folders()]


def wait_until(is_so: Callable[[], bool], limit_s: float = 20.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.01)
    return is_so()


def test_a_save_is_there_as_soon_as_it_is_written_and_takes_no_longer_for_a_long_step(tmp_path):
    seen = []

    def at(place, step):
        if (place, step) == ("step", 3):
            seen.append(wait_until(lambda: steps_in(tmp_path) == [2]))
            for path in Store(tmp_path / "checkpoints", keep=1).step_folders():
                verify_checkpoint(path)
            time.sleep(STEP_S)

    assert trained(tmp_path, Faults(at=at), "checkpoint.every_steps=2") == 0
    assert seen == [True]
    told = events(tmp_path, "checkpoint")
    assert [event["step"] for event in told] == [2, 4]
    assert told[0]["save_s"] < STEP_S


def fails_first() -> Callable[..., None]:
    left = [OSError("planted")]

    def write(number, copies):
        if left:
            raise left.pop()

    return write


@pytest.mark.parametrize(
    ("stop_after", "code", "step"), [(2, 75, 2), (None, 0, 4)], ids=["a stop", "the end"]
)
def test_a_save_that_failed_is_tried_again_at(tmp_path, stop_after, code, step):
    words = ["checkpoint.required=false", f"checkpoint.every_steps={step}"]
    faults = Faults(write=fails_first())
    assert trained(tmp_path, faults, *words, stop_after=stop_after) == code
    [warning] = events(tmp_path, "warning")
    assert "planted" in warning["message"]
    assert steps_in(tmp_path) == [step]
    assert outcome(tmp_path)["step"] == step


class Engine:
    """Holds tensors that are saved."""

    saves_in_background = True

    def __init__(self):
        self.tensors = {"w": torch.zeros(10)}

    def regions(self):
        return regions_of(self.tensors)


def saver_of(folder: Path, owns=lambda: True, limit_s: float = 0.3, **writing) -> Saver:
    folder.mkdir(exist_ok=True)
    settings = CheckpointConfig(required=False)
    common = (
        ALONE,
        Store(folder / "checkpoints", keep=2),
        Engine(),
        EventsWriter(folder / "events.jsonl"),
    )
    options = WriteOptions(limit_s, owns_folder=owns, **writing)
    return Saver(*common, settings, options, ResumePoint(), None)


class CopyingDevice:
    """Copies at once, to blocks that are kept."""

    def __init__(self, kept: PinnedBlockPool, seen: list[int]) -> None:
        self._block_pool, self._blocks = kept, []
        seen.append(kept.num_bytes)

    def stream(self):
        return nullcontext()

    def block(self):
        self._blocks.append(self._block_pool.take())
        return self._blocks[-1]

    def copy(self, values, destination):
        destination.copy_(values)

    def wait(self):
        pass

    def close(self):
        self._block_pool.return_blocks(self._blocks)


def test_a_save_has_the_blocks_of_the_last_one_until_they_are_given_back(tmp_path, monkeypatch):
    empty, made, kept, asked = torch.empty, [], [], []
    room = [PIECE_BYTES]

    def on_host(*args, pin_memory=False, **more):
        made.extend([True] * pin_memory)
        return empty(*args, **more)

    def admit(num_bytes):
        asked.append(num_bytes)
        return num_bytes <= room[0]

    monkeypatch.setattr(torch, "empty", on_host)
    device = partial(CopyingDevice, seen=kept)
    saver = saver_of(tmp_path / "run", limit_s=60.0, device=device, can_allocate=admit)
    lever = saver.memory_actions[Action.SAVE_IN_PIECES].apply_times

    def save(step):
        made.clear()
        asked.clear()
        saver.start(state(step=step))
        saver.finish()
        return len(made), kept[-1] // PIECE_BYTES, [size // PIECE_BYTES for size in asked]

    assert save(1) == (1, 0, [1])
    assert save(2) == (0, 1, [0]), "no more memory is asked for"
    saver.release_staging_blocks()
    assert save(3) == (1, 0, [1])
    lever(1)
    assert save(4) == (0, 0, []), "training waits, and nothing is copied"
    lever(0)
    room[0] = 0
    assert save(5) == (0, 0, [1, 1])


def test_a_commit_that_was_given_up_and_wakes_up_late_removes_nothing(tmp_path, monkeypatch):
    hung, real, threads = threading.Event(), Path.rename, []

    def rename(path, target):
        done = real(path, target)
        if path.name == "step-00000002.tmp":
            threads.append(threading.current_thread())
            assert hung.wait(60.0)
        return done

    monkeypatch.setattr(Path, "rename", rename)
    saver = saver_of(tmp_path)
    saver.start(state(step=2))
    saver.finish()
    assert saver.committed_step == 0
    [warning] = events(tmp_path, "warning")
    assert "the file system hangs" in warning["message"]
    saver.start(state(step=4))
    saver.finish()
    assert saver.committed_step == 4
    hung.set()
    threads[0].join()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_save_is_not_committed_into_a_folder_that_another_job_has_taken(tmp_path):
    saver = saver_of(tmp_path, owns=lambda: False)
    saver.start(state(step=2))
    saver.finish()
    assert steps_in(tmp_path) == []
    assert "another job has taken" in events(tmp_path, "warning")[0]["message"]


def comm_of(rank: int, size: int, store: object):
    return replace(ALONE, world=World(rank, size, rank, size, 0, 1, "n0", "single"), store=store)


def test_rank_0_hears_of_all_ranks_and_the_store_forgets_it():
    store, files = dist.HashStore(), (WrittenFile("a", 3, "00"), WrittenFile("b", 4, "11"))
    before, polls = store.num_keys(), []
    sent = {1: SaveReport(files), 2: SaveReport(error="no space"), 3: SaveReport()}
    for rank in (3, 1):
        SaveReports(comm_of(rank, 4, store), "x").send(sent[rank])

    def between():
        polls.append(len(polls))
        if len(polls) == 3:
            SaveReports(comm_of(2, 4, store), "x").send(sent[2])

    own = SaveReport(files[:1])
    assert SaveReports(comm_of(0, 4, store), "x").collect(own, between) == [own, *sent.values()]
    assert len(polls) == 3
    assert store.num_keys() == before


def test_a_store_that_is_gone_is_named():
    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    store = SimpleNamespace(set=gone, add=gone)
    with pytest.raises(CheckpointError, match="rank 1 could not tell rank 0.*reset by peer"):
        SaveReports(comm_of(1, 2, store), "x").send(SaveReport())
    with pytest.raises(CheckpointError, match="rank 0 cannot learn.*reset by peer"):
        SaveReports(comm_of(0, 2, store), "x").collect(SaveReport(), lambda: None)
