"""What a base model is called, for those who read an export elsewhere.

a folder of the hub's cache (models--OWNER--NAME/snapshots/REVISION) -> OWNER/NAME, REVISION
any other folder                                                     -> its own name
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CACHE_PREFIX = "models--"
_NAMELESS_FOLDER = re.compile(r"snapshots|blobs|refs|[0-9a-f]{40}|[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class BaseName:
    """``name``: as people name the model; ``place``: what loads it, a path or the hub's name.

    ``revision``: the hub's, where ``place`` is a name of the hub.
    """

    name: str
    place: str
    revision: str | None = None


def find_base_name(base: Path) -> BaseName:
    """Return the name of the base model in the folder ``base``, through links as people know it."""
    path = Path(os.path.abspath(base))
    for parts in (path.parts, path.resolve().parts):
        cached = next((part for part in reversed(parts) if part.startswith(_CACHE_PREFIX)), None)
        if cached is not None:
            name = cached.removeprefix(_CACHE_PREFIX).replace("--", "/")
            known = _REVISION.fullmatch(parts[-1])
            return BaseName(name, name, parts[-1] if known else None)
    named = (part for part in reversed(path.parts) if not _NAMELESS_FOLDER.fullmatch(part))
    return BaseName(next(named), str(path))
