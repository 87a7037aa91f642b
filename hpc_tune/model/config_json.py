"""config.json of a model directory as it is written: read once, however many ask."""

import functools
import json
from pathlib import Path
from typing import Any


def config_json(directory: Path) -> Any:
    """Return the content of a directory's config.json; not to be changed.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    file = directory / "config.json"
    return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(file: Path, changed_ns: int) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
