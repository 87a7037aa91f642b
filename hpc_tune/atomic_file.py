"""Files that are there as a whole or not at all, whoever reads them and whenever a process dies."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_FSYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


@contextmanager
def replace_atomically(path: Path, durable: bool = False) -> Iterator[Path]:
    """Give the path of a temporary file beside ``path`` that takes its place at the block's end.

    If the block fails, what was at ``path`` before is untouched. ``durable``: what is there
    survives a crash of the machine, too.

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
    """Write a file as a whole; text becomes UTF-8, and what cannot is written by its number, as in
    names of files that are of other bytes. Raises as ``replace_atomically`` does.
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
    """Make the entries of a folder durable, where its file system can be asked for it.

    Raises:
        OSError: if it can be, and fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRORS:
            raise
    finally:
        os.close(descriptor)
