"""File helpers: permissions, reading files that may be damaged, atomic writes, and pointer files of
git-lfs and git-annex whose content was never fetched.
"""

import errno
import grp
import json
import os
import pwd
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM)
OPEN_FILE_LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)


def is_permission_error(error_number: int | None) -> bool:
    """Whether this error number means that this user lacks permission."""
    return error_number in _PERMISSION_ERRNOS


def describe_missing_permission(path: Path, folder: Path | None = None) -> str:
    """Describe who owns ``path`` and how this user can get access; "" if its mode grants it.

    ``folder`` is the one whose files need the permission, ``path`` by default. If ``path`` does not
    exist or is not accessible, the nearest parent folder is described instead.
    """
    for blocked_path in (path, *path.absolute().parents):
        with suppress(OSError):
            status = blocked_path.stat()
            break
    else:
        return ""
    letters = "r" if stat.S_ISREG(status.st_mode) else "rx"
    if _has_access(blocked_path, letters):
        letters = "w"
        if _has_access(blocked_path, letters):
            return ""
    return _describe_refusal(blocked_path, status, letters, folder or blocked_path)


def may_write(path: Path) -> bool:
    """Whether this user may write a file, or create and remove files in a folder."""
    return _has_access(path, "rw" if path.is_file() else "rwx")


def may_read(path: Path) -> bool:
    """Whether this user may read a file, or list and open the files in a folder."""
    return _has_access(path, "r" if path.is_file() else "rx")


def _has_access(path: Path, permissions: str) -> bool:
    bits = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
    return os.access(path, sum(bits[letter] for letter in permissions), effective_ids=True)


def _describe_refusal(
    blocked_path: Path, status: os.stat_result, permissions: str, root: Path
) -> str:
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid == os.geteuid():
        return f"its {mode} denies this to its owner: chmod u+{permissions} {blocked_path}"
    owner = _user_name(status.st_uid)
    group = _group_name(status.st_gid)
    me = _user_name(os.geteuid())
    is_mine = status.st_gid in {os.getegid(), *os.getgroups()}
    regroup = "" if is_mine else f"chgrp -R to a group that includes {me}, "
    return (
        f"{blocked_path} is a file of {owner} (group {group}, {mode}), and this runs as {me}. For "
        f"a folder that several people use, {owner} runs {regroup}chmod -R g+rwX {root} once, "
        "and umask 002 before each run; or use a folder of your own"
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# -- Files that count as empty if they cannot be read.


def raise_if_too_many_open_files(error: BaseException) -> None:
    """Raise ``error`` again if it means that this process may open no more files.

    Call it where a file that cannot be opened counts as empty: such an error says nothing about the
    file.
    """
    if isinstance(error, OSError) and error.errno in OPEN_FILE_LIMIT_ERRNOS:
        raise error


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is none or it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise_if_too_many_open_files(error)
        return {}
    return content if isinstance(content, dict) else {}


# -- Atomic writes: a file exists whole or not at all, for all readers and whenever a process dies.


_NO_FSYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


@contextmanager
def replace_atomically(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file next to ``path``, which it replaces at the block's end.

    If the block fails, ``path`` is untouched. ``durable``: the file then also survives a crash of
    the machine.

    Raises:
        OSError: if the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            sync_file(temporary)
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file atomically. Raises as ``replace_atomically`` does.

    Text is encoded as UTF-8; surrogates, as in file names that are not UTF-8, are escaped.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with replace_atomically(path, durable) as temporary:
        temporary.write_bytes(data)


def sync_file(path: Path) -> None:
    """Make a file's content durable.

    Raises:
        OSError: if the file system refuses.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable, if its file system supports this.

    Raises:
        OSError: if it is supported and fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRORS:
            raise
    finally:
        os.close(descriptor)


# -- Files of a clone whose content was never fetched: pointers of git-lfs and of git-annex.
#
# Such a file is a few lines of text under the name of the real one. It would be read as damaged
# weights, as rows that are not JSON, or as training text.


_MAX_POINTER_BYTES = 1024  # by git-lfs's specification
_LFS_POINTER = re.compile(
    rb"version https?://[\w.-]+/spec/v\d[^\n]*\n(.*\n)*?oid sha256:", re.ASCII
)
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)
_ANNEX_PATH = re.compile(rb"[/\\]annex[/\\]objects[/\\]", re.ASCII)


def explain_pointer_file(file: Path) -> str | None:
    """Return why a file is only a pointer to its content, and what to do; None if it is not one.

    A dangling link of git-annex counts as a pointer; a file that cannot be read does not.
    """
    try:
        is_dangling = file.is_symlink() and not file.exists()
        if is_dangling and _ANNEX_PATH.search(os.fsencode(os.readlink(file))):
            return _pointer_message(file, "a link of git-annex", "git annex get or datalad get")
        if not file.is_file() or file.stat().st_size > _MAX_POINTER_BYTES:
            return None
        with file.open("rb") as stream:
            content = stream.read(_MAX_POINTER_BYTES)
    except OSError:
        return None
    if _LFS_POINTER.match(content):
        size = _LFS_SIZE.search(content)
        size_note = f" of {int(size[1]):,} bytes" if size else ""
        return _pointer_message(file, f"a pointer of git-lfs to a file{size_note}", "git lfs pull")
    if _ANNEX_PATH.match(content.strip()) and b"\n" not in content.strip():
        return _pointer_message(file, "a pointer of git-annex", "git annex get or datalad get")
    return None


def _pointer_message(file: Path, kind: str, command: str) -> str:
    return (
        f"{file} is {kind}, not the file itself: the clone was made without its large files. "
        f"Fetch them there ({command}), or the whole folder: hf download NAME --local-dir DIR"
    )
