"""Saving and resuming as all ranks together: the store's protocol, the engine's tensors, the
manifest's state. Errors are agreed between the steps, never raised on one rank alone."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpc_tune.checkpoint.state import RunState, compare
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, ConfigError, HpcTuneError
from hpc_tune.log import JsonLines, log
from hpc_tune.world.bootstrap import Session
from hpc_tune.world.collective import agree, broadcast_object, gather_objects

T = TypeVar("T")


def together(session: Session, what: str, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank; if it fails on one, raise on all. Collective."""
    result: T | None = None
    error: HpcTuneError | None = None
    try:
        result = work()
    except HpcTuneError as caught:
        error = caught
    agree(session, error, what)
    return result  # type: ignore[return-value]


def on_rank_0(session: Session, what: str, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 and return its result everywhere; raise on all if it fails."""
    mine = session.world.rank == 0
    result = together(session, what, lambda: work() if mine else None)
    return broadcast_object(session, result)  # type: ignore[return-value]


def save(
    session: Session, store: Store, engine: Engine, state: RunState, events: JsonLines
) -> float:
    """Write a checkpoint; return the seconds it took.

    Raises:
        CheckpointError: on every rank, if any rank cannot write. Older checkpoints stay.
    """
    began_s = time.monotonic()
    temporary = on_rank_0(session, "making a checkpoint folder", lambda: store.begin(state.step))
    written = together(session, "writing a checkpoint", lambda: engine.save(temporary))
    files = [f for f in gather_objects(session, written) if f is not None]
    path = on_rank_0(
        session,
        "committing a checkpoint",
        lambda: store.commit(temporary, state.to_json(), files),
    )
    save_s = time.monotonic() - began_s
    num_bytes = sum(f.num_bytes for f in files)
    events.write(
        time=time.time(),
        step=state.step,
        rank=0,
        kind="checkpoint",
        path=str(path),
        bytes=num_bytes,
        save_s=round(save_s, 3),
    )
    return save_s


def find_checkpoint(session: Session, config: RunConfig, store: Store) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start. Collective.

    Raises:
        CheckpointError: if the one that is asked for does not verify. ConfigError: if it is none,
        or a fresh start is asked for where checkpoints are.
    """

    def find() -> Path | None:
        match config.checkpoint.resume:
            case "auto":
                found = store.latest()
                if found is None and store.steps():
                    raise CheckpointError(
                        f"{store.folder}: none of its {len(store.steps())} checkpoints verifies; "
                        "move them away to start afresh"
                    )
                return found
            case "none":
                if store.steps():
                    raise ConfigError(
                        f"checkpoint.resume=none, but {store.folder} holds checkpoints; choose "
                        "another run.dir, or remove them"
                    )
                return None
            case path:
                if not (Path(path) / MANIFEST).is_file():
                    raise ConfigError(
                        f"checkpoint.resume={path}: no checkpoint (no {MANIFEST} in it); give "
                        "auto, none, or a folder such as RUN/checkpoints/step-00000100"
                    )
                verify(Path(path))
                return Path(path)

    return on_rank_0(session, "looking for a checkpoint", find)


def restore(
    session: Session,
    path: Path,
    engine: Engine,
    config: RunConfig,
    identity: str,
    total_steps: int,
) -> RunState:
    """Load ``path`` into the engine and return the rest of its state. Collective.

    Raises:
        CheckpointError: if it is of another run, or its tensors do not fit.
    """

    def load() -> RunState:
        state = RunState.from_json(read_state(path), str(path))
        for warning in compare(state, config, identity, total_steps):
            if session.world.rank == 0:
                log.warning("resume: %s", warning)
        engine.load(path, state.step)
        return state

    return together(session, "loading a checkpoint", load)
