"""The commit protocol of checkpoints. It handles files and hashes, not tensors.

Writing step 100, in this order:

    1  checkpoints/step-00000100.tmp/            made by rank 0, after it removed any leftover
    2  rank-*.safetensors, weights-*.safetensors written and synced by the ranks
    3  adapter/                                  by rank 0 from weights-*, which are removed; synced
    4  manifest.json                             step, state, size and SHA-256 of each file; synced
    5  fsync of the .tmp folder
    6  rename to step-00000100, fsync of checkpoints/
    7  later checkpoints, from an abandoned branch of the run: renamed to step-N.superseded
    8  older checkpoints that are not kept: renamed to .tmp, then removed

A full fine-tune has no weights-* and no adapter/: its ranks write all they hold into rank-*.

A checkpoint is valid if its name is step-N, its manifest's own hash is right, and every file in
it has the size and hash of the manifest. So a reader ignores a .tmp folder (an interrupted save or
removal), and names the damaged file of a checkpoint that was damaged later. A file that the file
system refuses to read does not count as damaged: no older checkpoint is used instead. The only
operation that makes a checkpoint appear is the rename of step 6, which is atomic within one folder
on local disks, NFS and Lustre; no locks are used.
"""

import errno
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from hpc_tune.errors import (
    CheckpointError,
    HpcTuneError,
    NoRightError,
    UnreadableError,
    find_remedy,
)
from hpc_tune.files import is_permission_error, sync_file, sync_folder, write_file
from hpc_tune.log import log
from hpc_tune.model.regions import WrittenFile

MANIFEST = "manifest.json"
FORMAT = 1
_STEP_NAME_PATTERN = re.compile(r"step-(\d{8,})")
_SUPERSEDED_SUFFIX = ".superseded"
_HASH_CHUNK_BYTES = 1 << 20
_RETRY_WAITS_S = (0.5, 2.0, 5.0)  # a file server that fails over answers again
_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
T = TypeVar("T")


class Store:
    """The ``checkpoints`` folder of a run. Only rank 0 calls the methods that write."""

    def __init__(
        self, folder: Path, keep: int, keep_every: int | None = None, keep_best: bool = False
    ) -> None:
        """Keep the newest ``keep``, multiples of ``keep_every``, and the best by held-out loss."""
        self.folder, self._keep = folder, keep
        self._keep_every, self._keep_best = keep_every, keep_best

    def step_folders(self) -> list[Path]:
        """Return the committed checkpoints, oldest first, without looking inside."""
        if not self.folder.is_dir():
            return []
        matches = [
            (m, p) for p in self.folder.iterdir() if (m := _STEP_NAME_PATTERN.fullmatch(p.name))
        ]
        return [p for _, p in sorted(matches, key=lambda pair: int(pair[0][1]))]

    def list_superseded_checkpoints(self) -> list[Path]:
        """Return the checkpoints from abandoned branches of the run, kept for the user."""
        return sorted(self.folder.glob(f"step-*{_SUPERSEDED_SUFFIX}"))

    def latest_checkpoint(self) -> Path | None:
        """Return the newest valid checkpoint.

        Raises:
            UnreadableError: if the file system refuses to read one that may be the newest.
        """
        return find_newest_valid_checkpoint(self.step_folders(), find_damage)

    def begin(self, step: int) -> Path:
        """Make and return the folder to write step ``step`` into.

        Raises:
            CheckpointError: if the file system refuses.
        """
        temporary = self.folder / f"step-{step:08d}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)  # fails if the run directory was moved
            temporary.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{temporary} cannot be made: {error}{find_remedy(error)}"
            ) from None
        return temporary

    def commit(
        self,
        temporary: Path,
        state: dict[str, Any],
        files: Iterable[WrittenFile],
        raise_if_obsolete: Callable[[], None] = lambda: None,
    ) -> Path:
        """Make a written folder a checkpoint, remove older ones, and return its path.

        ``raise_if_obsolete`` is called before each irreversible change; it may raise.

        Raises:
            CheckpointError: if the file system refuses; older checkpoints are then untouched.
        """
        body = {
            "format": FORMAT,
            "files": {f.name: {"bytes": f.num_bytes, "sha256": f.sha256} for f in files},
            "state": state,
        }
        final_path = temporary.with_suffix("")
        try:
            _write_manifest(temporary, body)
            raise_if_obsolete()
            if final_path.exists():  # it was damaged, or the run resumed from an earlier step
                _supersede(final_path)
            temporary.rename(final_path)
            sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{final_path} cannot be committed: {error}{find_remedy(error)}"
            ) from None
        self.prune(final_path, raise_if_obsolete)
        return final_path

    def abandon(self, temporary: Path) -> None:
        """Remove the files of an unfinished checkpoint."""
        shutil.rmtree(temporary, ignore_errors=True)

    def prune(self, newest: Path, raise_if_obsolete: Callable[[], None] = lambda: None) -> None:
        """Keep ``newest`` and, by the keep settings, earlier checkpoints; put later ones aside.

        Later checkpoints are from steps that the run repeats, because they were damaged or the run
        resumed from an older one. Folders that end in .tmp were interrupted; they are removed.
        If the file system refuses, a warning is logged.
        """
        step_folders = self.step_folders()
        end = step_folders.index(newest) + 1
        old_folders = step_folders[: max(0, end - self._keep)]
        try:
            for path in step_folders[end:]:
                raise_if_obsolete()
                _supersede(path)
            kept_folders = self._best_checkpoints(step_folders[:end]) | {
                p for p in old_folders if self._is_multiple_of_keep_every(p)
            }
            for leftover in self.folder.glob("step-*.tmp"):
                raise_if_obsolete()
                shutil.rmtree(leftover)
            for path in (p for p in old_folders if p not in kept_folders):
                raise_if_obsolete()
                _remove_checkpoint(path)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", error)
        except UnreadableError as error:  # the unreadable one may be the best
            log.warning("no old checkpoint is removed: %s", error)

    def change_state(self, step: int, changes: dict[str, Any]) -> None:
        """Change the state of the checkpoint of ``step``, if there is one, by ``changes``."""
        path = self.folder / f"step-{step:08d}"
        if not path.is_dir():
            return
        try:
            body = _read_manifest(path)
            body["state"] |= changes
            _write_manifest(path, body)
        except (OSError, HpcTuneError) as error:
            log.warning("%s stays without its held-out loss: %s", path, error)

    def _is_multiple_of_keep_every(self, path: Path) -> bool:
        step = int(path.name.removeprefix("step-"))
        return self._keep_every is not None and step % self._keep_every == 0

    def _best_checkpoints(self, step_folders: list[Path]) -> set[Path]:
        """Return the checkpoint with the lowest held-out loss, the newest if several are equal.

        If the held-out data changed during the run, return one checkpoint for each version of it,
        since their losses cannot be compared. Empty if the best is not kept.

        Raises:
            UnreadableError: if the file system refuses to read a manifest.
        """
        best: dict[str, tuple[float, Path]] = {}
        for path in step_folders if self._keep_best else ():
            try:
                state = read_state(path)
            except CheckpointError:
                continue
            loss, held_out = state.get("eval_loss"), str(state.get("held_out"))
            if not isinstance(loss, float) or not math.isfinite(loss):
                continue
            if held_out not in best or loss <= best[held_out][0]:
                best[held_out] = loss, path
        return {path for _, path in best.values()}


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's manifest.

    Raises:
        CheckpointError: if the manifest is missing or damaged, or has another format.
        UnreadableError: if the file system refuses to read it.
    """
    return _read_manifest(path)["state"]


def verify_checkpoint(path: Path, shard_index: int = 0, num_shards: int = 1) -> None:
    """Read every byte of a checkpoint, or of one of ``num_shards`` shares of its files.

    Raises:
        CheckpointError: names the first file that is missing, cut off or damaged.
        UnreadableError: if the file system refuses to read one, after several attempts.
    """
    for name, entry in islice(_read_manifest(path)["files"].items(), shard_index, None, num_shards):
        _verify_file(path / name, entry)


def _verify_file(file: Path, entry: dict[str, Any]) -> None:
    size = _retry_read(file, lambda: file.stat().st_size)
    if size != entry["bytes"]:
        raise CheckpointError(f"{file} has {size} bytes, expected {entry['bytes']}")
    if _retry_read(file, lambda: _hash_file(file)) != entry["sha256"]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's")


def _retry_read(file: Path, operation: Callable[[], T]) -> T:
    """Return the result of ``operation``, which reads a file of a checkpoint, with retries.

    Raises:
        CheckpointError: if it is missing or no file. NoRightError: if this user may not read it.
        UnreadableError: if the file system refuses every attempt.
    """
    for wait_s in (*_RETRY_WAITS_S, None):
        try:
            return operation()
        except OSError as error:
            if error.errno in _DAMAGE_ERRNOS:
                raise CheckpointError(f"{file} cannot be read: {error}") from None
            if is_permission_error(error.errno) and (remedy := find_remedy(error, file)):
                message = f"{file} cannot be read: {error.strerror}{remedy}"
                raise NoRightError(message) from None
            if wait_s is None:
                raise UnreadableError(
                    f"{file} cannot be read: {error.strerror}, {len(_RETRY_WAITS_S) + 1} "
                    f"times in {sum(_RETRY_WAITS_S):.0f} s. Its checkpoint may be intact, so "
                    "no older one is used: check the file system and start again, or move the "
                    "folder of that checkpoint away"
                ) from None
        time.sleep(wait_s)
    raise AssertionError("not reached")


def find_damage(path: Path, shard_index: int = 0, num_shards: int = 1) -> str | None:
    """Return what ``verify_checkpoint`` finds wrong with a checkpoint, None if it is valid.

    Raises:
        UnreadableError: if the file system refuses to read it.
    """
    try:
        verify_checkpoint(path, shard_index, num_shards)
    except CheckpointError as error:
        return str(error)
    return None


def find_newest_valid_checkpoint(
    paths: Sequence[Path], explain_damage: Callable[[Path], str | None], warn: bool = True
) -> Path | None:
    """Return the last of ``paths`` that has no damage; warn of damaged ones after it.

    There is no warning of paths that no longer exist: an active run removes old checkpoints.
    """
    for path in reversed(paths):
        if (reason := explain_damage(path)) is None:
            return path
        if warn and path.is_dir():
            log.warning("skipping a checkpoint: %s; trying the previous one", reason)
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    content = _retry_read(file, lambda: _read_if_present(file))
    if content is None:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(content)
        body = {key: manifest[key] for key in ("format", "files", "state")}
        is_intact = manifest["sha256"] == _hash_of(body)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from None
    if not is_intact:
        raise CheckpointError(f"{file} is damaged: its SHA-256 does not fit its content")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {body['format']}, this version of hpc_tune reads {FORMAT}"
        )
    files, state = body["files"], body["state"]
    if not isinstance(state, dict) or not isinstance(files, dict):
        raise CheckpointError(f"{file}: files and state must be mappings")
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise CheckpointError(f"{file} names {name!r}, which is not in the checkpoint")
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise CheckpointError(f"{file} has no size and hash for {name}")
    return body


def _read_if_present(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _hash_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_HASH_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_manifest(folder: Path, body: dict[str, Any]) -> None:
    text = json.dumps({**body, "sha256": _hash_of(body)}, indent=1, sort_keys=True)
    write_file(folder / MANIFEST, text, durable=True)


def sync_and_hash(file: Path) -> WrittenFile:
    """Sync a small file that a library has written, and return its size and hash."""
    sync_file(file)
    return WrittenFile(file.name, file.stat().st_size, _hash_file(file))


def _remove_checkpoint(path: Path) -> None:
    """Rename a checkpoint first, so that an interrupted removal leaves only a .tmp."""
    tmp_path = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(tmp_path, ignore_errors=True)
    path.rename(tmp_path)
    shutil.rmtree(tmp_path)


def _supersede(path: Path) -> None:
    """Put aside a checkpoint from an abandoned branch: no run resumes from it automatically.

    Raises:
        OSError: if the file system refuses.
    """
    for number in count(1):
        suffix = f".{number}" if number > 1 else ""
        new_path = path.with_name(f"{path.name}{suffix}{_SUPERSEDED_SUFFIX}")
        if not new_path.exists():
            break
    path.rename(new_path)
    log.warning(
        "the run has resumed from a checkpoint before %s, which is kept as %s: remove it if you "
        "do not need it, or resume from it with checkpoint.resume",
        path.name,
        new_path,
    )
