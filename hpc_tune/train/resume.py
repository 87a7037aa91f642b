"""Which checkpoint a run goes on from, and how it is taken up again. All ranks do it together."""

import contextlib
from pathlib import Path

from hpc_tune.checkpoint.state import RunState, check_resume, require_settings
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, ConfigError
from hpc_tune.log import log
from hpc_tune.model.room import asking
from hpc_tune.model.weights import index_checkpoint
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.world.comm import Comm


def find_checkpoint(job: Job) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start. Collective.

    Raises:
        CheckpointError: if the one that is asked for does not verify. ConfigError: if it is none,
        or of a run with settings that must be the same, or a fresh start is asked for where
        checkpoints are.
    """
    comm, settings = job.comm, job.config.model_dump()
    path = _requested(comm, job.config.checkpoint.resume, job.store)
    if path is not None:
        # Before anything takes time, such as preparing data for another length of rows.
        comm.on_rank_0(
            "comparing with the checkpoint's settings",
            lambda: require_settings(RunState.from_json(read_state(path), str(path)), settings),
        )
    return path


def _requested(comm: Comm, wanted: str, store: Store) -> Path | None:
    if wanted != "auto" and comm.on_rank_0(
        "looking for checkpoints", lambda: _was_followed(store, wanted)
    ):
        if comm.is_rank_0:
            log.info("checkpoint.resume=%s was followed by an earlier start: going on", wanted)
        return _newest_valid(comm, store)
    match wanted:
        case "auto":
            return _newest_valid(comm, store)
        case "none":
            comm.on_rank_0("looking for checkpoints", lambda: _require_none(store))
            return None
        case path:
            comm.on_rank_0("looking for a checkpoint", lambda: _require_manifest(Path(path)))
            refused = _refusal(comm, Path(path))
            if refused is not None:
                raise CheckpointError(refused)
            return Path(path)


def resume(
    job: Job, path: Path | None, model: Model, engine: Engine, data: Data
) -> RunState | None:
    """Load the checkpoint at ``path`` into the engine and find its place in the data. Collective.

    Returns the rest of its state; None where there is none to resume from.

    Raises:
        CheckpointError: if it is of another run, or its tensors do not fit.
    """

    if path is None:
        return None
    comm, total_steps = job.comm, data.total_steps

    def load() -> RunState:
        state = RunState.from_json(read_state(path), str(path))
        for warning in check_resume(
            state, job.config.model_dump(), model.built.identity, total_steps
        ):
            if comm.is_rank_0:
                log.warning("resume: %s", warning)
        engine.load(index, state.step)
        return state

    # A sharded checkpoint has a file per rank: their headers are read once, not by each rank.
    job.monitor.enter("load", "loading a checkpoint", tell=True)
    with asking(job.monitor.ensure):
        index = comm.on_rank_0("looking at a checkpoint's files", lambda: index_checkpoint(path))
        saved = comm.together("loading a checkpoint", load)
    comm.together("finding the place in the data", lambda: data.loader.restore(saved.loader))
    log.info("resumed from %s at step %d of %d", path, saved.step, total_steps)
    job.events.write("resume", saved.step, path=str(path))
    job.resume_point.step = saved.step
    return saved


def _newest_valid(comm: Comm, store: Store) -> Path | None:
    steps = comm.on_rank_0("looking for checkpoints", store.steps)
    for path in reversed(steps):
        refused = _refusal(comm, path)
        if refused is None:
            return path
        if comm.is_rank_0:
            log.warning("refused a checkpoint: %s; trying the one before", refused)
    if steps:
        raise CheckpointError(
            f"{store.folder}: none of its {len(steps)} checkpoints verifies; move them away to "
            "start afresh"
        )
    return None


def _refusal(comm: Comm, path: Path) -> str | None:
    """Return what is wrong with a checkpoint; each rank reads its share of the bytes."""
    found = None
    try:
        with comm.watched("verifying a checkpoint"):
            verify(path, comm.world.rank, comm.world.size)
    except CheckpointError as error:
        found = str(error)
    return next((refused for refused in comm.gather(found) if refused), None)


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
