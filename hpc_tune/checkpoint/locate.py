"""Find the checkpoint that a path means, and list the checkpoints of a run directory."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_tune.checkpoint.state import OTHER_WEIGHTS, RunState
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify_checkpoint
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.section import flatten_settings, format_setting
from hpc_tune.data.order import compute_progress, phases_from_json
from hpc_tune.errors import CheckpointError, ConfigError, HpcTuneError, UnreadableError, find_remedy
from hpc_tune.log import log
from hpc_tune.model.builtin import BUILTIN_TINY_MODEL
from hpc_tune.model.weights import fingerprint_weights, hash_architecture, index_model_directory
from hpc_tune.rundir import outcome, owner
from hpc_tune.rundir.json_lines import RESOLVED_CONFIG
from hpc_tune.step.layout import describe_axes
from hpc_tune.units import format_bytes
from hpc_tune.world.liveness import DEAD_HEARTBEAT_S

TEMPLATE_FILE = "chat_template.jinja"
_MAX_ATTEMPTS = 10  # a running run may remove checkpoints while they are being read
T = TypeVar("T")


@dataclass(frozen=True)
class LocatedCheckpoint:
    """A verified checkpoint, its run directory, the configuration it was saved with, its base
    model's directory, the chat template used in training (None: the base's), and its state.
    """

    checkpoint: Path
    run_dir: Path
    config: RunConfig
    base: Path
    template: str | None
    state: RunState


def locate(path: Path, moved_base: Path | None = None) -> LocatedCheckpoint:
    """Return the checkpoint at ``path``, or the newest valid one of the run at ``path``.

    ``moved_base`` is where its base model is now.

    Raises:
        ConfigError: if ``path`` is neither, ``moved_base`` is another model, or the run's copy of
        its chat template cannot be read. CheckpointError: if no checkpoint there is valid.
        UnreadableError: if the file system refuses to read one.
    """
    if (path / MANIFEST).is_file():
        checkpoint, run_dir = path, path.absolute().parent.parent
        verify_checkpoint(checkpoint)
        state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    else:
        run_dir = path
        checkpoint, state = _find_newest_checkpoint(path)
    config = state.run_config(str(checkpoint))
    is_builtin = config.model.path == BUILTIN_TINY_MODEL
    base = run_dir / "builtin-tiny" if is_builtin else Path(config.model.path)
    if moved_base is not None:
        base = moved_base
        if hash_architecture(base, index_model_directory(base)) != state.model_identity:
            raise ConfigError(f"{base} is not the model that {checkpoint} was made from")
    template = read_template(run_dir, config.data.chat_template)
    return LocatedCheckpoint(checkpoint, run_dir, config, base, template, state)


def retry_with_newest_checkpoint(
    run: LocatedCheckpoint, path: Path, work: Callable[[Path], T]
) -> T:
    """Return the result of ``work`` on the checkpoint of ``run``, which was located at ``path``.

    If ``path`` is an active run, which has removed the checkpoint meanwhile, retry with the newest.

    Raises:
        HpcTuneError, OSError: what ``work`` raises, if its checkpoint still exists or ``path`` is a
        checkpoint. CheckpointError: if the run has no valid checkpoint any more.
    """
    checkpoint = run.checkpoint
    for _ in range(_MAX_ATTEMPTS):
        try:
            return work(checkpoint)
        except (HpcTuneError, OSError):
            if checkpoint.is_dir() or not (path / "checkpoints").is_dir():
                raise
        old_path, (checkpoint, _) = checkpoint, _find_newest_checkpoint(path)
        log.info("%s was removed by its run, which still runs: using %s", old_path, checkpoint.name)
    return work(checkpoint)


def require_base(located: LocatedCheckpoint, option: str) -> Path:
    """Return the folder of the base model; ``option`` is the flag with which users name another.

    Raises:
        ConfigError: if it does not exist, or an adapter was trained on other weights.
        DataError: if its weights cannot be read.
    """
    if not located.base.is_dir():
        raise ConfigError(
            f"the base model of {located.run_dir}, {located.base}, does not exist; if it has "
            f"moved, name its folder with {option} DIR"
        )
    state = located.state
    uses_base = state.config["tune"]["method"] != "full"
    if (
        uses_base
        and state.model_sample
        and state.has_other_weights(fingerprint_weights(index_model_directory(located.base)))
    ):
        raise ConfigError(
            f"{located.base} is not the model that {located.checkpoint} was made from: "
            f"{OTHER_WEIGHTS}; name the folder of that model with {option} DIR"
        )
    return located.base


def read_template(run_dir: Path, chat_template: str | None) -> str | None:
    """Return the run's own copy of its chat template; None if data.chat_template was unset.

    Raises:
        ConfigError: if the copy cannot be read.
    """
    if chat_template is None:
        return None
    file = run_dir / TEMPLATE_FILE
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the run used the chat template {chat_template}, but the run's copy of it, {file}, "
            f"cannot be read ({error}{find_remedy(error)}); put the template there"
        ) from None


def describe_checkpoints(path: Path, check_bytes: bool) -> tuple[list[str], bool]:
    """Return lines on the checkpoints of a run (or on one checkpoint), and whether all are valid.

    A run's outcome, the sources of a mixture, and checkpoints put aside have lines too.
    ``check_bytes`` reads every file; without it only manifests are read.

    Raises:
        ConfigError: if ``path`` is neither.
    """
    lines, all_valid = _outcome_lines(path), True
    if lines and not (path / "checkpoints").is_dir():
        return [*lines, "no checkpoint yet"], True
    is_checkpoint = (path / MANIFEST).is_file()
    seen: list[Path] = []
    for _ in range(_MAX_ATTEMPTS):
        new = [
            p
            for p in ([path] if is_checkpoint else _open_store(path).step_folders())
            if p not in seen
        ]
        seen += new
        for checkpoint in new:
            try:
                lines.append(_describe_checkpoint(checkpoint, check_bytes))
            except (CheckpointError, UnreadableError, OSError) as error:
                if is_checkpoint or checkpoint.is_dir():  # else its active run has removed it
                    all_valid = False
                    lines.append(f"{checkpoint.name}  {_damage_label(error)}: {error}")
        if not new:
            break
    lines += _mixture_lines(seen)
    for folder in [] if is_checkpoint else _open_store(path).list_superseded_checkpoints():
        lines.append(
            f"{folder.name}  put aside: the run resumed from an earlier one; remove it if you do "
            f"not need it, or resume from it with checkpoint.resume={folder}"
        )
    return lines, all_valid


def _mixture_lines(checkpoints: Sequence[Path]) -> Iterator[str]:
    """Yield a line per source of a mixture: how much of it was used up to the newest checkpoint."""
    if not checkpoints:
        return
    newest = checkpoints[-1]
    try:
        loader = RunState.from_json(read_state(newest), str(newest)).loader
    except (CheckpointError, UnreadableError, OSError):  # reported already
        return
    if "phases" in loader:
        try:
            for source in compute_progress(phases_from_json(loader["phases"]), loader["rows"]):
                yield f"{newest.name}  source {source}"
        except (ValueError, KeyError, TypeError) as error:
            yield f"{newest.name}  its mixture cannot be read: {error}"


def _damage_label(error: Exception) -> str:
    return "NOT VALID" if isinstance(error, CheckpointError) else "UNREADABLE"


def diff_settings(first_path: Path, second_path: Path) -> list[str]:
    """Return a line for each setting that differs between two checkpoints or runs.

    Raises:
        ConfigError, CheckpointError: as ``locate``.
    """
    first, second = (
        flatten_settings(locate(path).config.model_dump()) for path in (first_path, second_path)
    )
    return [
        f"{name}: {'; '.join(format_setting(first[name]).splitlines())} in {first_path}, "
        f"{'; '.join(format_setting(second[name]).splitlines())} in {second_path}"
        for name in first
        if first[name] != second[name]
    ]


def _describe_checkpoint(checkpoint: Path, check_bytes: bool) -> str:
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    if check_bytes:
        verify_checkpoint(checkpoint)
    num_bytes = sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file())
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.stat().st_mtime))
    verification = "every byte verified" if check_bytes else "not verified (--verify)"
    return (
        f"{checkpoint.name}  step {state.step} of {state.total_steps}  {format_bytes(num_bytes)}  "
        f"{date}  {describe_axes(state.layout, always_shown=state.layout)}  {verification}"
    )


def _outcome_lines(path: Path) -> list[str]:
    final_outcome = outcome.read_outcome(path)
    if final_outcome is not None and {"status", "reason"} <= final_outcome.keys():
        return [f"outcome: {final_outcome['status']} ({final_outcome['reason']})"]
    beats = outcome.read_heartbeats(path)
    if not beats:
        return []
    silent_s = time.time() - max(beat.time for beat in beats)
    if silent_s < DEAD_HEARTBEAT_S and not owner.has_owner_died(path):
        return [
            f"outcome: none yet, the run is {beats[0].phase}{outcome.describe_silence(silent_s)}"
        ]
    return [f"outcome: {outcome.describe_last_heartbeats(beats)}"]


def _open_store(path: Path) -> Store:
    store = Store(path / "checkpoints", keep=1)
    if not store.folder.is_dir():
        if (path / RESOLVED_CONFIG).is_file():
            reason = (outcome.read_outcome(path) or {}).get("reason", "it has not reached a save")
            raise ConfigError(f"{path} has no checkpoint: {reason}")
        raise ConfigError(
            f"{path}: neither a run directory (with checkpoints/ in it) nor a checkpoint "
            f"(with {MANIFEST} in it){owner.similar_runs_hint(path)}"
        )
    return store


def _find_newest_checkpoint(run_dir: Path) -> tuple[Path, RunState]:
    """Return the newest valid checkpoint, even if the active run removes some meanwhile."""
    store = _open_store(run_dir)
    for _ in range(_MAX_ATTEMPTS):
        seen = store.step_folders()
        newest = store.latest_checkpoint()
        if newest is None:
            if store.step_folders() == seen:
                break
            continue
        try:
            return newest, RunState.from_json(read_state(newest), str(newest))
        except CheckpointError:
            if newest.is_dir():
                raise
    raise CheckpointError(f"{run_dir} has no valid checkpoint")
