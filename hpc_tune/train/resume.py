"""Finds the checkpoint that a run resumes from, and loads it. All ranks do this together."""

import contextlib
import os
from functools import partial
from pathlib import Path

from hpc_tune.checkpoint.locate import TEMPLATE_FILE
from hpc_tune.checkpoint.state import RunState, check_resume, require_same_settings
from hpc_tune.checkpoint.store import (
    MANIFEST,
    Store,
    find_damage,
    find_newest_valid_checkpoint,
    read_state,
)
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, ConfigError, find_remedy
from hpc_tune.files import write_file
from hpc_tune.log import log
from hpc_tune.memory.policy import Phase
from hpc_tune.model.load import use_whole_model_names
from hpc_tune.model.weights import index_checkpoint
from hpc_tune.rundir.json_lines import RESOLVED_CONFIG, STARTING_CONFIG
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.reference import require_same_init_adapter
from hpc_tune.train.sources import describe_mixture_changes
from hpc_tune.world.comm import Comm


def find_checkpoint(job: Job) -> Path | None:
    """Return the checkpoint to resume from, or None for a fresh start. Collective.

    Raises:
        CheckpointError: if the requested checkpoint is damaged, or all checkpoints of the run are.
        UnreadableError: if the file system refuses to read one that may be the newest. ConfigError:
        if the path is no checkpoint, if settings differ that must not, or if a fresh start is
        requested although there are checkpoints. DataError: see ``require_same_init_adapter``.
    """
    comm, settings = job.setup_comm, job.config.model_dump()
    path = _find_requested_checkpoint(comm, job.config.checkpoint.resume, job.store)
    if path is None:
        job.resume_point.step = 0
        return None

    def check_and_read_step() -> int:
        state = RunState.from_json(read_state(path), str(path))
        require_same_settings(state, settings)
        require_same_init_adapter(state, job.config.tune)
        return state.step

    # Compare before anything that takes time, such as preparing data.
    job.resume_point.step = comm.run_on_rank_0(
        "comparing with the checkpoint's settings", check_and_read_step
    )
    return path


def _find_requested_checkpoint(comm: Comm, resume_setting: str, store: Store) -> Path | None:
    if resume_setting != "auto" and comm.run_on_rank_0(
        "looking for checkpoints", lambda: _was_resume_applied(store, resume_setting)
    ):
        log.info(
            "checkpoint.resume=%s was applied by an earlier start: resuming from the newest "
            "checkpoint",
            resume_setting,
        )
        return _find_newest_valid_checkpoint(comm, store)
    match resume_setting:
        case "auto":
            return _find_newest_valid_checkpoint(comm, store)
        case "none":
            comm.run_on_rank_0("looking for checkpoints", lambda: _require_no_checkpoints(store))
            return None
        case path:
            comm.run_on_rank_0("looking for a checkpoint", lambda: _require_manifest(Path(path)))
            if (damage := _find_damage(comm, Path(path))) is not None:
                raise CheckpointError(damage)
            return Path(path)


def resume(
    job: Job, path: Path | None, model: Model, engine: Engine, data: Data
) -> RunState | None:
    """Load the checkpoint at ``path`` into the engine and the loader. Collective.

    Returns its state; None without a checkpoint.

    Raises:
        ConfigError: if it belongs to a different run. CheckpointError: if its tensors do not fit.
    """
    if path is None:
        return None
    comm, total_steps = job.setup_comm, data.total_steps

    def load() -> RunState:
        state = RunState.from_json(read_state(path), str(path))
        for warning in check_resume(
            state,
            job.config.model_dump(),
            model.built.architecture_hash,
            total_steps,
            model.weights_fingerprint,
        ):
            if comm.is_rank_0:
                log.warning("resume: %s", warning)
        engine.load(use_whole_model_names(index, model.built.names), state.step)
        return state

    # A sharded checkpoint has a file per rank: rank 0 alone reads all their headers.
    job.monitor.enter(Phase.LOAD, "loading a checkpoint", writes_heartbeat=True)
    comm.begin("loading a checkpoint")
    index = comm.run_on_rank_0("looking at a checkpoint's files", lambda: index_checkpoint(path))
    saved_state = comm.run_and_agree("loading a checkpoint", load)
    comm.run_and_agree(
        "restoring the position in the data", lambda: data.loader.restore(saved_state.loader)
    )
    log.info("resumed from %s at step %d of %d", path, saved_state.step, total_steps)
    job.events.write("resume", saved_state.step, path=str(path))
    if data.mixture is not None and (
        changes := describe_mixture_changes(saved_state.loader, data.mixture.phases)
    ):
        log.info("the mixture changes from here on: %s", changes)
        job.events.write("mixture", saved_state.step, changes=changes)
    job.resume_point.step = saved_state.step
    return saved_state


def store_settings(job: Job, data: Data) -> None:
    """Store the settings of the run, once nothing can refuse this start any more. Collective.

    Raises:
        ConfigError: if the file system refuses.
    """
    job.setup_comm.run_on_rank_0(
        "keeping the settings", lambda: _store_settings(job.dir, data.template)
    )
    job.resume_point.initial_files = None


def _store_settings(run_dir: Path, template: str | None) -> None:
    try:
        os.replace(run_dir / STARTING_CONFIG, run_dir / RESOLVED_CONFIG)
        if template is not None:  # exports contain it, and the user's file may be gone by then
            write_file(run_dir / TEMPLATE_FILE, template)
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written: {error.strerror}{find_remedy(error)}"
        ) from None


def _find_newest_valid_checkpoint(comm: Comm, store: Store) -> Path | None:
    paths = comm.run_on_rank_0("looking for checkpoints", store.step_folders)
    newest = find_newest_valid_checkpoint(paths, partial(_find_damage, comm), warn=comm.is_rank_0)
    if newest is None and paths:
        raise CheckpointError(
            f"{store.folder}: none of its {len(paths)} checkpoints verifies; move them away to "
            "start from scratch"
        )
    return newest


def _find_damage(comm: Comm, path: Path) -> str | None:
    """Return what is wrong with a checkpoint; each rank reads its share of the bytes."""
    own_damage = comm.run_and_agree(
        "verifying a checkpoint", lambda: find_damage(path, comm.world.rank, comm.world.size)
    )
    return next((damage for damage in comm.gather(own_damage) if damage), None)


def _was_resume_applied(store: Store, resume_setting: str) -> bool:
    """Return whether the newest checkpoint was saved by a run with this ``checkpoint.resume``.

    If so, this is the same command again, after a stop or in a requeued job. Checkpoints with a
    damaged manifest are skipped.
    """
    for path in reversed(store.step_folders()):
        with contextlib.suppress(CheckpointError):
            state = RunState.from_json(read_state(path), str(path))
            return bool(state.config["checkpoint"]["resume"] == resume_setting)
    return False


def _require_no_checkpoints(store: Store) -> None:
    if store.step_folders():
        raise ConfigError(
            f"checkpoint.resume=none, but {store.folder} holds checkpoints; choose another "
            "run.dir, or remove them"
        )


def _require_manifest(path: Path) -> None:
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            f"checkpoint.resume={path} is no checkpoint (no {MANIFEST} in it); give auto, none, "
            "or a folder such as RUN/checkpoints/step-00000100"
        )
