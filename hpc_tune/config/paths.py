"""~ and $VARIABLES in the paths of a configuration."""

import os
import re
from collections.abc import Iterator
from typing import Any

# What may begin with ~ or hold $SCRATCH.
_PATHS = (
    "model.path", "tune.init_from", "data.path", "data.eval_path", "data.chat_template",
    "data.cache", "parallel.offload_path", "checkpoint.resume", "run.dir", "run.compile_cache",
    "slurm.env_file", "slurm.venv",
)  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def expand_paths(values: dict[Any, Any]) -> Iterator[str]:
    """Expand ~ and $VARIABLES in paths, in place; yield a problem for each that is not set."""
    for name in _PATHS:
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
    """Expand ~ and $VARIABLES in ``fields[key]``; ``name``: of the setting."""
    given = fields.get(key)
    paths = given if isinstance(given, list) else [given]
    for at, path in enumerate(paths):
        if not isinstance(path, str):
            continue
        expanded = os.path.expandvars(os.path.expanduser(path))
        if name == "model.path" and os.path.isdir(expanded):
            expanded = os.path.abspath(expanded)  # an export may be made from elsewhere
        paths[at] = expanded
        for left in _VARIABLE.findall(expanded):
            yield (
                f"{name}={path}: the environment has no {left.strip('${}')}; set it, or name "
                "the folder"
            )
    if isinstance(given, str):
        fields[key] = paths[0]
