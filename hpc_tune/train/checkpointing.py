"""All ranks save together: the store's protocol, the engine's tensors, the manifest's state.
Errors are agreed between the steps, never raised on one rank alone."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Generic, TypeVar

from hpc_tune.checkpoint.staging import Device, bytes_of, bytes_to_copy
from hpc_tune.checkpoint.state import RunState
from hpc_tune.checkpoint.store import Store
from hpc_tune.checkpoint.writer import Writer
from hpc_tune.config.schema import CheckpointConfig
from hpc_tune.engine.adamw import MOMENTS
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, HpcTuneError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import log
from hpc_tune.memory.policy import Action, Lever
from hpc_tune.model.regions import Region, WrittenFile
from hpc_tune.rundir.json_lines import Events
from hpc_tune.train.exit import ResumePoint
from hpc_tune.world.comm import Comm

T = TypeVar("T")
FIRST_SAVE_GUESS_S = 5.0  # until one has been measured
STATE_PREFIXES = tuple(f"{part}." for part in MOMENTS)
_POLL_S = 0.02


@dataclass(frozen=True)
class Writing:
    """How a rank writes: the save fails if the file system takes no byte for ``limit_s``;
    ``admit(bytes, why)`` tells whether there is memory for copies; ``device()`` is what copies
    them if the engine is on one; ``faults`` are for tests.
    """

    limit_s: float
    admit: Callable[[int, str], bool] = lambda num_bytes, why: True
    device: Callable[[], Device] | None = None
    faults: Faults = NO_FAULTS


class Checkpointer:
    """Writes checkpoints, one at a time, while training goes on.

        start      rank 0 makes the folder, every rank's thread begins to write
        writing    at each boundary the ranks count who is done; when all are, rank 0's thread
        committing writes the manifest and renames; the boundary after that knows it

    The ranks agree within the one sum of each step boundary, so threads send no messages, and no
    collective waits for a slow file system. Every method but ``before_update`` and
    ``vote`` is collective.
    """

    def __init__(
        self,
        comm: Comm,
        store: Store,
        engine: Engine,
        events: Events,
        settings: CheckpointConfig,
        writing: Writing,
        resume_point: ResumePoint,
        pack: Callable[[Path, Sequence[str]], list[WrittenFile]] | None,
    ) -> None:
        """Save by ``settings``. ``pack`` makes the adapter folder of a checkpoint from the files
        that hold its weights.
        """
        self._pack, self._resume_point = pack, resume_point
        self._comm, self._store, self._engine, self._events = comm, store, engine, events
        self._settings, self._writing = settings, writing
        self._background = settings.background and engine.saves_in_background
        self._in_pieces = False
        self._writer: Writer | None = None
        self._commit: _Task | None = None
        self._state: RunState | None = None
        self._folder = Path()
        self._files: list[WrittenFile] = []
        self._began_s = self._blocked_s = self._waits_since_s = 0.0
        self._seen, self._seen_at_s = -1, 0.0
        self.last_save_s = FIRST_SAVE_GUESS_S

    @property
    def levers(self) -> dict[Action, Lever]:
        """What the governor may do to saves."""
        return {Action.SAVE_IN_PIECES: Lever(self._save_in_pieces)}

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint, 0 before there is one."""
        return self._resume_point.step or 0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._state is not None

    @property
    def waits(self) -> bool:
        """Whether training waits until a save is done."""
        return self._in_pieces or not self._background

    def start(self, state: RunState) -> None:
        """Begin to save the engine's tensors with ``state``; without background also finish.

        Raises:
            CheckpointError: on every rank, if any rank cannot write and checkpoint.required.
        """
        self._began_s, self._blocked_s = time.monotonic(), 0.0
        with self._blocking():
            try:
                self._folder = self._comm.on_rank_0(
                    "making a checkpoint folder",
                    lambda: self._store.begin(state.step),
                )
            except HpcTuneError as error:
                self._give_up(state.step, error)
                return
            self._state = state
            self._writer = self._begin(self._parts())
            self._seen, self._seen_at_s = -1, self._began_s
        if self.waits:
            self.finish()

    def add_evaluation(self, state: RunState) -> None:
        """Add the held-out loss in ``state`` to the checkpoint of its step, which had none yet.

        A stop may have cut the evaluation that this one makes up for.
        """
        if state.eval_loss is not None:
            changes = {"eval_loss": state.eval_loss, "evals": state.evals}
            self._comm.on_rank_0(
                "adding an evaluation to a checkpoint",
                lambda: self._store.amend(state.step, changes),
            )

    def before_update(self) -> None:
        """Wait until the engine's tensors may change."""
        if self._writer is not None:
            with self._blocking():
                self._writer.release(self._writing.limit_s)

    def vote(self) -> float:
        """Return what this rank adds to the next boundary's sum: 1 if its part is done."""
        task = self._commit or self._writer
        if task is None or task.over:
            return 1.0
        progress, now_s = task.progress, time.monotonic()
        if progress != self._seen:
            self._seen, self._seen_at_s = progress, now_s
        elif now_s - self._seen_at_s > (limit_s := self._writing.limit_s):
            task.give_up(f"no byte was written for {limit_s:.0f} s: the file system hangs")
            return 1.0
        return 0.0

    def advance(self, num_done: float) -> None:
        """Do the next stage of a save if all ranks have finished the one before.

        Raises:
            CheckpointError: on every rank, if any rank could not write and checkpoint.required.
        """
        with self._blocking():
            self._advance(num_done)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is committed. Raises as ``advance``."""
        with self._blocking():
            while self.busy:
                [num_done] = self._comm.sum([self.vote()])
                self._advance(num_done)
                if self.busy:
                    time.sleep(_POLL_S)

    def _save_in_pieces(self, times: int) -> str:
        """Let training wait for coming saves, which then copy nothing."""
        self._in_pieces = times > 0
        return "training waits for saves" if self._in_pieces else "saves run in the background"

    def _begin(self, parts: dict[Path, list[Region]]) -> Writer:
        writing, budget = self._writing, 0
        device = writing.device() if writing.device is not None else None
        if not self.waits:
            total = bytes_of([region for regions in parts.values() for region in regions])
            wanted = self._settings.staging_bytes
            budget = bytes_to_copy(wanted, total, device is not None, writing.admit)
        return Writer(parts, budget, writing.faults, device)

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time that training waits."""
        self._waits_since_s = time.monotonic()
        yield
        self._blocked_s += time.monotonic() - self._waits_since_s

    def _advance(self, num_done: float) -> None:
        if self._state is None or num_done < self._comm.world.size:
            return
        state, is_rank_0 = self._state, self._comm.is_rank_0
        try:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                written = self._comm.together("writing a checkpoint", writer.result)
                self._files = [f for some in self._comm.gather(written) for f in some]
                if is_rank_0:
                    self._commit = _Task(lambda: self._commit_files(state))
                return
            commit, self._commit = self._commit, None
            path = self._comm.on_rank_0(
                "committing a checkpoint",
                lambda: commit.result() if commit else None,
            )
        except HpcTuneError as error:
            self._commit, self._state = None, None
            if is_rank_0:
                self._store.abandon(self._folder)
            self._give_up(state.step, error)
            return
        self._state, self._resume_point.step = None, state.step
        now_s = time.monotonic()
        self.last_save_s = now_s - self._began_s
        blocked_s = self._blocked_s + now_s - self._waits_since_s
        self._events.write(
            "checkpoint",
            state.step,
            path=str(path),
            bytes=sum(f.num_bytes for f in self._files),
            save_s=round(self.last_save_s, 3),
            blocked_s=round(blocked_s, 3),
        )

    def _parts(self) -> dict[Path, list[Region]]:
        """Return what this rank writes, by file: optimizer state apart from adapters."""
        regions, file = self._engine.regions(), f"{self._comm.world.rank:05d}.safetensors"
        parts = {self._folder / f"rank-{file}": regions}
        if self._pack is not None:
            is_state = [r.name.startswith(STATE_PREFIXES) for r in regions]
            parts = {
                self._folder / f"{kind}-{file}": list(compress(regions, which))
                for kind, which in (("rank", is_state), ("weights", [not s for s in is_state]))
            }
        return {path: some for path, some in parts.items() if some}

    def _commit_files(self, state: RunState) -> Path:
        if self._pack is not None:
            weights = [f.name for f in self._files if f.name.startswith("weights-")]
            rest = [f for f in self._files if f.name not in weights]
            self._files = rest + self._pack(self._folder, weights)
        return self._store.commit(self._folder, state.to_json(), self._files)

    def _give_up(self, step: int, error: HpcTuneError) -> None:
        if self._settings.required:
            raise error
        self._events.write("warning", step, message=f"not saved: {error}")
        if self._comm.is_rank_0:
            log.warning("step %d was not saved, training continues: %s", step, error)


class _Task(Generic[T]):
    """Work in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.over = False
        self.progress = 0
        self._result: T | None = None
        self._error: HpcTuneError | None = None
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except HpcTuneError as error:
            self._error = error
        except Exception as error:  # a thread's error must reach the loop
            self._error = CheckpointError(f"a checkpoint cannot be committed: {error!r}")
        finally:
            self.over = True

    def give_up(self, why: str) -> None:
        """Count as failed from now on."""
        self._error, self.over = CheckpointError(why), True

    def result(self) -> T:
        """Return what the work returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
