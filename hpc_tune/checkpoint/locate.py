"""Find the checkpoint that a path means, and list the checkpoints of a run directory."""

import time
from dataclasses import dataclass
from pathlib import Path

from hpc_tune.checkpoint.state import OTHER_WEIGHTS, RunState
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.section import flat
from hpc_tune.errors import CheckpointError, ConfigError, UnreadableError
from hpc_tune.model.builtin import BUILTIN_TINY
from hpc_tune.model.identity import identity_of, sample_of
from hpc_tune.model.weights import index_model_directory
from hpc_tune.rundir import heartbeat, nearby, outcome
from hpc_tune.units import format_bytes

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class Located:
    """A verified checkpoint, its run directory, the configuration it was saved with, its base
    model's directory, and the chat template it was trained with if that is not the base's.
    """

    checkpoint: Path
    run_dir: Path
    config: RunConfig
    base: Path
    template: str | None


def locate(path: Path, moved_base: Path | None = None) -> Located:
    """Return the checkpoint at ``path``, or the newest valid one of the run at ``path``.

    ``moved_base`` is where its base model is now.

    Raises:
        ConfigError: if ``path`` is neither, or ``moved_base`` another model. CheckpointError: if
        nothing there verifies.
    """
    if (path / MANIFEST).is_file():
        checkpoint, run_dir = path, path.absolute().parent.parent
        verify(checkpoint)
    else:
        checkpoint, run_dir = _newest(path), path
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    config = state.run_config(str(checkpoint))
    is_builtin = config.model.path == BUILTIN_TINY
    base = run_dir / "builtin-tiny" if is_builtin else Path(config.model.path)
    if moved_base is not None:
        base = moved_base
        if identity_of(base, index_model_directory(base)) != state.model_identity:
            raise ConfigError(f"{base} is not the model that {checkpoint} was made from")
    return Located(
        checkpoint, run_dir, config, base, template_of(run_dir, config.data.chat_template)
    )


def require_base(located: Located, option: str) -> Path:
    """Return the folder of the base model; ``option`` is the user's way to name another.

    Raises:
        ConfigError: if it does not exist, or has other weights than the one trained with.
    """
    if not located.base.is_dir():
        raise ConfigError(
            f"the base model of {located.run_dir}, {located.base}, does not exist; if it has "
            f"moved, name its folder with {option} DIR"
        )
    state = RunState.from_json(read_state(located.checkpoint), str(located.checkpoint))
    if state.model_sample and state.has_other_weights(
        sample_of(index_model_directory(located.base))
    ):
        raise ConfigError(
            f"{located.base} is not the model that {located.checkpoint} was made from: "
            f"{OTHER_WEIGHTS}; name the folder of that model with {option} DIR"
        )
    return located.base


def template_of(run_dir: Path, chat_template: str | None) -> str | None:
    """Return the chat template of a run whose data.chat_template named one: the copy it kept."""
    if chat_template is None:
        return None
    kept = run_dir / TEMPLATE_FILE
    try:
        return kept.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the run was made with the chat template {chat_template}, and its copy of it, {kept}, "
            f"cannot be read ({error}); put the template there"
        ) from None


def list_checkpoints(path: Path, check_bytes: bool) -> tuple[list[str], bool]:
    """Return one line per checkpoint of a run (or of one checkpoint), and whether all are valid.

    ``check_bytes`` reads every file; without it only manifests are read.
    """
    lines, all_valid = _outcome_lines(path), True
    if lines and not (path / "checkpoints").is_dir():
        return [*lines, "no checkpoint yet"], True
    is_one = (path / MANIFEST).is_file()
    for checkpoint in [path] if is_one else _store_of(path).steps():
        try:
            lines.append(_line(checkpoint, check_bytes))
        except (CheckpointError, UnreadableError) as error:
            all_valid = False
            is_read = isinstance(error, CheckpointError)
            lines.append(f"{checkpoint.name}  {'NOT VALID' if is_read else 'UNREADABLE'}: {error}")
    for aside in [] if is_one else _store_of(path).superseded():
        lines.append(
            f"{aside.name}  put aside: the run went on from an earlier one; remove it if it is not "
            f"needed, or resume from it with checkpoint.resume={aside}"
        )
    return lines, all_valid


def differences(one: Path, other: Path) -> list[str]:
    """Return a line for each setting that two checkpoints, or runs, were saved with differently.

    Raises:
        ConfigError, CheckpointError: as ``locate``.
    """
    first, second = (flat(locate(path).config.model_dump()) for path in (one, other))
    return [
        f"{name}: {first[name]} in {one}, {second[name]} in {other}"
        for name in first
        if first[name] != second[name]
    ]


def _line(checkpoint: Path, check_bytes: bool) -> str:
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    if check_bytes:
        verify(checkpoint)
    num_bytes = sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file())
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.stat().st_mtime))
    layout = " x ".join(f"{axis} {n}" for axis, n in state.layout.items())
    verified = "every byte verified" if check_bytes else "not verified (--verify)"
    return (
        f"{checkpoint.name}  step {state.step} of {state.total_steps}  {format_bytes(num_bytes)}  "
        f"{written}  {layout}  {verified}"
    )


def _outcome_lines(path: Path) -> list[str]:
    ended = outcome.read(path)
    if ended is not None and {"status", "reason"} <= ended.keys():
        return [f"outcome: {ended['status']} ({ended['reason']})"]
    last = heartbeat.read(path)
    if not last:
        return []
    if time.time() - max(beat.time for beat in last) < heartbeat.ALIVE_S:
        return [f"outcome: none yet, the run is {last[0].phase}"]
    return [f"outcome: {heartbeat.last_seen(last)}"]


def _store_of(path: Path) -> Store:
    store = Store(path / "checkpoints", keep=1)
    if not store.folder.is_dir():
        raise ConfigError(
            f"{path}: neither a run directory (with checkpoints/ in it) nor a checkpoint "
            f"(with {MANIFEST} in it){nearby.hint(path)}"
        )
    return store


def _newest(run_dir: Path) -> Path:
    newest = _store_of(run_dir).latest()
    if newest is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint")
    return newest
