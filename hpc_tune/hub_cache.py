"""The Hugging Face hub's cache: find the revision of a model or dataset; nothing is fetched.

HF_HUB_CACHE, or HF_HOME/hub
    models--OWNER--NAME/, datasets--OWNER--NAME/
        blobs/HASH               the files' contents, once each
        refs/main                the revision that was last fetched by that name
        snapshots/REVISION/...   links into blobs, under the files' names
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.errors import DataError

HubKind = Literal["model", "dataset"]
_SNAPSHOTS, _BLOBS, _REFS, _MAIN = "snapshots", "blobs", "refs", "main"
_HUB_NAME = re.compile(r"([\w-][\w.-]*)/([\w-][\w.-]*?)(?:@([\w-][\w./-]*))?")
_MIN_REVISION_CHARS = 7  # characters of a revision, as git shortens it
CACHE_FOLDER_PREFIXES: dict[HubKind, str] = {"model": "models--", "dataset": "datasets--"}
_REVISION = re.compile(r"[0-9a-f]{40}")
# Parts of a path in the cache that do not describe its content.
CACHE_INTERNAL_NAME = re.compile(rf"{_SNAPSHOTS}|{_BLOBS}|{_REFS}|[0-9a-f]{{40}}|[0-9a-f]{{64}}")


@dataclass(frozen=True)
class Snapshot:
    """The folder of a revision, why it was chosen, and the folders of the other revisions."""

    path: Path
    reason: str
    other_paths: tuple[Path, ...]


def is_repo_cache(folder: Path) -> bool:
    """Return whether a folder is the cache folder of one dataset or model."""
    return (folder / _SNAPSHOTS).is_dir() and (
        (folder / _BLOBS).is_dir() or (folder / _REFS).is_dir()
    )


def find_name_and_revision(path: Path) -> tuple[str, str | None] | None:
    """Return the hub's name of the model whose cache folder contains ``path``, and the revision.

    The revision is None if ``path`` is not a snapshot. Returns None outside of such folders.
    """
    prefix = CACHE_FOLDER_PREFIXES["model"]
    cache_name = next((part for part in reversed(path.parts) if part.startswith(prefix)), None)
    if cache_name is None:
        return None
    revision = path.name if _REVISION.fullmatch(path.name) else None
    return cache_name.removeprefix(prefix).replace("--", "/"), revision


def _find_repo_cache(folder: Path) -> Path | None:
    """Return the cache folder that ``folder`` is, or whose ``snapshots`` it is; else None."""
    if folder.name == _SNAPSHOTS and is_repo_cache(folder.parent):
        return folder.parent
    return folder if is_repo_cache(folder) else None


def list_revisions(folder: Path) -> list[Path]:
    """Return the folders of all revisions in a cache folder."""
    return sorted(path for path in (folder / _SNAPSHOTS).iterdir() if path.is_dir())


def find_snapshot(folder: Path, revision: str = _MAIN) -> Snapshot | None:
    """Return a revision in a cache folder, by its hash, a prefix of it, or a name in ``refs``.

    None if it is not there, or several have the prefix. "main" without refs/main: the only one.
    """
    revisions = list_revisions(folder)
    ref_revision = _read_ref(folder, revision)
    matches = [path for path in revisions if path.name == (ref_revision or revision)]
    reason = f"refs/{revision}" if ref_revision else "as named"
    if not matches and len(revision) >= _MIN_REVISION_CHARS:
        matches = [path for path in revisions if path.name.startswith(revision)]
    if not matches and revision == _MAIN:
        matches, reason = revisions, "the only one"
    if len(matches) != 1:
        return None
    return Snapshot(matches[0], reason, tuple(path for path in revisions if path != matches[0]))


def hub_cache_root(environment: Mapping[str, str]) -> Path:
    """Return the folder that the hub's own tools use as their cache."""
    if cache_path := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache_path).expanduser()
    cache_home = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environment.get("HF_HOME") or cache_home).expanduser() / "hub"


def find_cached_snapshot(name: str, kind: HubKind) -> Snapshot | None:
    """Return the snapshot of OWNER/NAME or OWNER/NAME@REVISION; None if NAME is not in the cache.

    Raises:
        ValueError: if the revision is not there, or several begin with it; without a revision, if
            refs/main names no snapshot and there is not exactly one.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        return None
    owner, repo, revision = match.groups()
    folder = hub_cache_root(os.environ) / f"{CACHE_FOLDER_PREFIXES[kind]}{owner}--{repo}"
    if not is_repo_cache(folder):
        return None
    snapshot = find_snapshot(folder, revision or _MAIN)
    if snapshot is None:
        names = ", ".join(f"{owner}/{repo}@{path.name}" for path in list_revisions(folder)[:5])
        ref = f"revision {revision}" if revision else "refs/main"
        raise ValueError(f"{folder} has no {ref}; name one that it has: {names or 'it has none'}")
    return snapshot


def missing_snapshot_hint(name: str, kind: HubKind) -> str:
    """Return a hint that a name is not in the cache either; "" if it is not a name of the hub."""
    if not _HUB_NAME.fullmatch(name):
        return ""
    return f"; nor is a {kind} of that name in the hub's cache, {hub_cache_root(os.environ)}"


def advise_on_snapshots(folder: Path, setting: str) -> str | None:
    """Return a message that lists a model's snapshots, to be named by ``setting`` instead.

    None if ``folder`` is not a cache folder.
    """
    if (cache := _find_repo_cache(folder)) is None:
        return None
    names = " or ".join(f"{setting}={path}" for path in list_revisions(cache))
    main = find_snapshot(cache)
    main_note = f" ({main.reason}: {main.path.name})" if main and main.other_paths else ""
    return (
        f"{setting}={folder}: a folder of the hub's cache, not of a model; name its snapshot: "
        f"{names}{main_note}"
    )


def _read_ref(folder: Path, reference: str) -> str:
    try:
        return (folder / _REFS / reference).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


# -- Datasets in the hub's cache: which revision is read, and the identity of its files.


def choose_snapshot(folder: Path) -> tuple[Path, list[Path]] | None:
    """Return the folder of the revision to read from a cache folder, and those of the others.

    This is the revision that refs/main names, or the only one. ``folder`` may also be the
    ``snapshots`` of a cache folder; None if it is neither.

    Raises:
        DataError: if there is no revision, or several to choose from.
    """
    if (cache := _find_repo_cache(folder)) is None:
        return None
    revisions = list_revisions(cache)
    if not revisions:
        raise DataError(f"{cache} is a folder of the hub's cache without any snapshot in it")
    if (snapshot := find_snapshot(cache)) is None:
        raise DataError(
            f"{cache} is a folder of the hub's cache with {len(revisions)} revisions, and "
            f"refs/main names none of them; name one: {' or '.join(map(str, revisions[:5]))}"
        )
    return snapshot.path, list(snapshot.other_paths)


def canonical_path(file: Path) -> Path:
    """Return the path that identifies a file: two names of one blob count as two files."""
    if file.is_symlink() and file.resolve().parent.name == _BLOBS:
        return file.parent.resolve() / file.name
    return file.resolve()


def refuse_several_revisions(files: Iterable[Path]) -> None:
    """Raise a DataError if files belong to several revisions of one dataset."""
    revisions_by_root: dict[Path, set[str]] = {}
    for file in files:
        parts = file.absolute().parts
        position = len(parts) - 1 - parts[::-1].index(_SNAPSHOTS) if _SNAPSHOTS in parts else 0
        root = Path(*parts[:position])
        if position and len(parts) > position + 2 and is_repo_cache(root):
            revisions_by_root.setdefault(root, set()).add(parts[position + 1])
    for root, revisions in revisions_by_root.items():
        if len(revisions) > 1:
            raise DataError(
                f"data.path names files of {len(revisions)} revisions of {root}, which are the same"
                f" dataset at different times; name one: "
                f"{' or '.join(str(root / _SNAPSHOTS / name) for name in sorted(revisions)[:5])}"
            )
