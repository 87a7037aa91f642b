"""Files of a clone whose content was never fetched: pointers of git-lfs and of git-annex.

Such a file is a few lines of text under the name of the real one. It would be read as damaged
weights, as rows that are no JSON, or as text to be learned.
"""

import os
import re
from pathlib import Path

_MAX_BYTES = 1024  # by git-lfs's specification
_LFS = re.compile(rb"version https?://[\w.-]+/spec/v\d[^\n]*\n(.*\n)*?oid sha256:", re.ASCII)
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)
_ANNEX = re.compile(rb"[/\\]annex[/\\]objects[/\\]", re.ASCII)


def why_pointer(file: Path) -> str | None:
    """Return why a file is only a pointer to its content, and what to do; None if it is not one.

    A link of git-annex that leads nowhere is one, too. What cannot be read is none.
    """
    try:
        if file.is_symlink() and not file.exists() and _ANNEX.search(os.readlink(file).encode()):
            return _message(file, "a link of git-annex", "git annex get or datalad get")
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return None
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES)
    except OSError:
        return None
    if _LFS.match(content):
        size = _LFS_SIZE.search(content)
        of = f" of {int(size[1]):,} bytes" if size else ""
        return _message(file, f"a pointer of git-lfs to a file{of}", "git lfs pull")
    if _ANNEX.match(content.strip()) and b"\n" not in content.strip():
        return _message(file, "a pointer of git-annex", "git annex get or datalad get")
    return None


def _message(file: Path, what: str, command: str) -> str:
    return (
        f"{file} is {what}, not the file itself: the clone was made without its large files. "
        f"Fetch them there ({command}), or the whole folder: hf download NAME --local-dir DIR"
    )
