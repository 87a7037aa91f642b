"""Whose file it is that this user may not read or write, and who gives the right how."""

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

_REFUSALS = (errno.EACCES, errno.EPERM)


def is_permission_error(number: int | None) -> bool:
    """Whether an error of this number says that this user lacks a right."""
    return number in _REFUSALS


def missing_permission(path: Path, of: Path | None = None) -> str:
    """Return whose ``path`` is and how this user gets the right to it; "" if its mode gives it.

    ``of`` is the folder whose files the right is needed to, ``path`` by default. Of a path that is
    not there, or cannot be looked at, it is said of the next folder above.
    """
    for there in (path, *path.absolute().parents):
        with suppress(OSError):
            status = there.stat()
            break
    else:
        return ""
    wanted = "r" if stat.S_ISREG(status.st_mode) else "rx"
    if _has_access(there, wanted):
        wanted = "w"
        if _has_access(there, wanted):
            return ""
    return _describe_refusal(there, status, wanted, of or there)


def may_write(path: Path) -> bool:
    """Whether this user may write a file, or make and remove files in a folder."""
    return _has_access(path, "rw" if path.is_file() else "rwx")


def may_read(path: Path) -> bool:
    """Whether this user may read a file, or see and open what is in a folder."""
    return _has_access(path, "r" if path.is_file() else "rx")


def _has_access(path: Path, letters: str) -> bool:
    bits = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
    return os.access(path, sum(bits[letter] for letter in letters), effective_ids=True)


def _describe_refusal(there: Path, status: os.stat_result, wanted: str, of: Path) -> str:
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid == os.geteuid():
        return f"its {mode} does not permit it to its owner: chmod u+{wanted} {there}"
    owner, group, me = (
        _user_name(status.st_uid),
        _group_name(status.st_gid),
        _user_name(os.geteuid()),
    )
    is_mine = status.st_gid in {os.getegid(), *os.getgroups()}
    regroup = "" if is_mine else f"chgrp -R to a group that {me} is in too, "
    return (
        f"{there} is a file of {owner} (group {group}, {mode}), and this runs as {me}. For a "
        f"folder that several people use, {owner} runs {regroup}chmod -R g+rwX {of} once, "
        "and umask 002 before each run; or take a folder of your own"
    )


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
