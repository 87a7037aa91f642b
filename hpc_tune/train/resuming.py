"""Which checkpoint a run goes on from, and how it is taken up again. All ranks do it together."""

import contextlib
from pathlib import Path

from hpc_tune.checkpoint.state import RunState, compare, require_settings
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, ConfigError
from hpc_tune.log import log
from hpc_tune.model.weights import index_checkpoint
from hpc_tune.train.saving import on_rank_0, together
from hpc_tune.world.bootstrap import Session
from hpc_tune.world.collective import gather_objects


def find_checkpoint(session: Session, config: RunConfig, store: Store) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start. Collective.

    Raises:
        CheckpointError: if the one that is asked for does not verify. ConfigError: if it is none,
        or of a run with settings that must be the same, or a fresh start is asked for where
        checkpoints are.
    """
    path = _asked_for(session, config, store)
    if path is not None:
        # Before anything takes time, such as preparing data for another length of rows.
        on_rank_0(
            session,
            "comparing with the checkpoint's settings",
            lambda: require_settings(RunState.from_json(read_state(path), str(path)), config),
        )
    return path


def _asked_for(session: Session, config: RunConfig, store: Store) -> Path | None:
    wanted = config.checkpoint.resume
    if wanted != "auto" and on_rank_0(
        session, "looking for checkpoints", lambda: _was_followed(store, wanted)
    ):
        if session.world.rank == 0:
            log.info("checkpoint.resume=%s was followed by an earlier start: going on", wanted)
        return _newest_valid(session, store)
    match wanted:
        case "auto":
            return _newest_valid(session, store)
        case "none":
            on_rank_0(session, "looking for checkpoints", lambda: _require_none(store))
            return None
        case path:
            on_rank_0(session, "looking for a checkpoint", lambda: _require_manifest(Path(path)))
            refused = _refusal(session, Path(path))
            if refused is not None:
                raise CheckpointError(refused)
            return Path(path)


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
        engine.load(index, state.step)
        return state

    # A sharded checkpoint has a file per rank: their headers are read once, not by each rank.
    index = on_rank_0(session, "looking at a checkpoint's files", lambda: index_checkpoint(path))
    return together(session, "loading a checkpoint", load)


def _newest_valid(session: Session, store: Store) -> Path | None:
    steps = on_rank_0(session, "looking for checkpoints", store.steps)
    for path in reversed(steps):
        refused = _refusal(session, path)
        if refused is None:
            return path
        if session.world.rank == 0:
            log.warning("refused a checkpoint: %s; trying the one before", refused)
    if steps:
        raise CheckpointError(
            f"{store.folder}: none of its {len(steps)} checkpoints verifies; move them away to "
            "start afresh"
        )
    return None


def _refusal(session: Session, path: Path) -> str | None:
    """Return what is wrong with a checkpoint; each rank reads its share of the bytes."""
    found = None
    try:
        with session.watched("verifying a checkpoint"):
            verify(path, session.world.rank, session.world.size)
    except CheckpointError as error:
        found = str(error)
    return next((refused for refused in gather_objects(session, found) if refused), None)


def _was_followed(store: Store, wanted: str) -> bool:
    """Tell whether the newest checkpoint was saved by a run with this ``checkpoint.resume``.

    Then this is the same command again, after a stop or in a job that was queued again.
    """
    for newest in store.steps()[-1:]:
        with contextlib.suppress(CheckpointError):
            state = RunState.from_json(read_state(newest), str(newest))
            return bool(state.config["checkpoint"]["resume"] == wanted)
    return False


def _require_none(store: Store) -> None:
    if store.steps():
        raise ConfigError(
            f"checkpoint.resume=none, but {store.folder} holds checkpoints; choose another "
            "run.dir, or remove them"
        )


def _require_manifest(path: Path) -> None:
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            f"checkpoint.resume={path}: no checkpoint (no {MANIFEST} in it); give auto, none, or a "
            "folder such as RUN/checkpoints/step-00000100"
        )
