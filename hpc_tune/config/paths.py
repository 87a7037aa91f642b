"""~ and $VARIABLES in the paths of a configuration, and names of what is in the hub's cache."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_tune.errors import ConfigError
from hpc_tune.hub_cache import HubKind, find_in_cache, find_snapshot, is_cache
from hpc_tune.log import log

# What may begin with ~ or hold $SCRATCH.
_PATH_SETTINGS = (
    "model.path", "tune.init_from", "data.path", "data.eval_path", "data.chat_template",
    "data.cache", "parallel.offload_path", "checkpoint.resume", "run.dir", "run.compile_cache",
    "slurm.env_file", "slurm.venv", "pbs.env_file", "pbs.venv",
)  # fmt: skip
# Where OWNER/NAME, or a model's folder in the hub's cache, stands for a revision's folder.
_HUB_KINDS: dict[str, HubKind] = {
    "model.path": "model", "tune.init_from": "model", "data.path": "dataset",
    "data.eval_path": "dataset",
}  # fmt: skip
_PATH_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def expand_paths(values: dict[Any, Any]) -> Iterator[str]:
    """Expand paths, in place; yield a problem for each variable or revision that is not there."""
    for name in _PATH_SETTINGS:
        part, _, key = name.partition(".")
        if isinstance(fields := values.get(part), dict):
            yield from _expand(name, fields, key)
    given_data = values.get("data")
    data = given_data if isinstance(given_data, dict) else {}
    for setting in ("sources", "eval_sources"):
        given = data.get(setting)
        for at, source in enumerate(given if isinstance(given, list) else []):
            for key in ("path", "chat_template") if isinstance(source, dict) else ():
                yield from _expand(f"data.{setting}.{at}.{key}", source, key)


def _expand(name: str, fields: dict[Any, Any], key: str) -> Iterator[str]:
    """Expand ~, $VARIABLES and names of the hub in ``fields[key]``; ``name``: of the setting."""
    given = fields.get(key)
    paths = given if isinstance(given, list) else [given]
    kind = _HUB_KINDS.get(name, "dataset" if key == "path" else None)
    for at, path in enumerate(paths):
        if not isinstance(path, str):
            continue
        if (encoding := sys.getfilesystemencoding()) == "ascii" and not path.isascii():
            yield (
                f"{name}={path!a}: this shell has file names in {encoding}, which this "
                "is not; export LC_ALL=C.UTF-8 (and unset PYTHONUTF8), or rename it"
            )
            continue
        expanded = os.path.expandvars(os.path.expanduser(path))
        try:
            expanded = cached_path(name, expanded, kind) if kind else expanded
        except ConfigError as error:
            yield str(error)
        if name == "model.path" and os.path.isdir(expanded):
            expanded = os.path.abspath(expanded)  # an export may be made from elsewhere
        paths[at] = expanded
        for left in _PATH_VARIABLE.findall(expanded):
            yield (
                f"{name}={path}: the environment has no {left.strip('${}')}; set it, or name "
                "the folder"
            )
    if isinstance(given, str):
        fields[key] = paths[0]


def cached_path(name: str, path: str, kind: HubKind) -> str:
    """Return the folder in the hub's cache that a path stands for, and say so; or the path itself.

    It is OWNER/NAME, with @REVISION or not, where there is no such file, or a model's folder in
    the cache, of which refs/main is taken. ``name``: of the setting.

    Raises:
        ConfigError: if the cache has it, and not that revision.
    """
    folder = Path(path)
    try:
        if kind == "model" and is_cache(folder) and not (folder / "config.json").exists():
            found = find_snapshot(folder)
        else:
            found = None if folder.exists() else find_in_cache(path, kind)
    except OSError:  # a name that is too long for a file, or a folder that may not be read
        return path
    except ValueError as error:
        raise ConfigError(f"{name}={path}: {error}") from None
    if found is None:
        return path
    others = ", ".join(path.name for path in found.others[:5])
    others = f"; also there: {others}" if others else ""
    log.info(
        "%s=%s: revision %s (%s) of the hub's cache, %s%s",
        *(name, path, found.path.name, found.why, found.path, others),
    )
    return str(found.path)
