"""Error classes, by who must act, and the exit codes of the command line."""

import errno
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_tune.files import OPEN_FILE_LIMIT_ERRNOS, describe_missing_permission, is_permission_error

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
EXIT_INTERRUPTED = 130  # as shells report Ctrl-C


class HpcTuneError(Exception):
    """An expected kind of error, whose message tells the user what to do."""

    exit_code = EXIT_FAILED


class ConfigError(HpcTuneError):
    """The configuration or the command line is wrong; the user fixes it."""

    exit_code = EXIT_USER_ERROR


def require_utf8(argument: str) -> str:
    """Return a word of the command line, if it can be encoded as UTF-8.

    Raises:
        ConfigError: if not: Python decodes bytes that are not valid in the locale to surrogates.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{argument!a}: not valid {sys.getfilesystemencoding()}, the encoding of text in this "
            "shell; export LC_ALL=C.UTF-8 (and unset PYTHONUTF8), or write it into a file"
        ) from None
    return argument


class DataError(HpcTuneError):
    """The training data or the model directory is wrong; the user fixes it."""

    exit_code = EXIT_USER_ERROR


class WorldError(HpcTuneError):
    """The ranks do not form the world that the launcher promised.

    ``facts``, such as the ranks that are gone, go into outcome.json.
    """

    def __init__(self, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


class GoneError(WorldError):
    """Ranks have ended without reporting an error; the same command resumes."""


class LostHostError(GoneError):
    """A host is down or cut off; the same command resumes on other hosts."""


class StalledError(WorldError):
    """The ranks hung; the same command resumes."""


class CheckpointError(HpcTuneError):
    """A checkpoint cannot be written or cannot be used."""


class UnreadableError(HpcTuneError):
    """The file system refuses to read a checkpoint, which may be intact."""


class NoRightError(UnreadableError):
    """This user may not read a file of a checkpoint; the file's owner can grant permission."""

    exit_code = EXIT_USER_ERROR


class DiskError(HpcTuneError):
    """A file system is full, denies permission, or this process may open no more files."""

    exit_code = EXIT_USER_ERROR

    @classmethod
    def from_os_error(cls, error: OSError, activity: str) -> "DiskError | None":
        """Return a DiskError for ``error``, None if it is of another kind; ``activity`` met it."""
        if is_permission_error(error.errno) and error.filename is not None:
            return cls(f"{error.filename}: {error.strerror}{find_remedy(error)}")
        if error.errno in OPEN_FILE_LIMIT_ERRNOS:
            return cls(f"{error.filename or activity}: {error.strerror}{find_remedy(error)}")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            return None
        problem = f"{error.filename} cannot be written" if error.filename else activity
        advice = find_remedy(error) or ". Make room, or choose a run.dir on another file system"
        return cls(f"{problem}: {error.strerror}{advice}")


class MemoryBudgetError(HpcTuneError):
    """The work does not fit into the memory of the host or device; the user changes one of them."""

    exit_code = EXIT_USER_ERROR


class ResumableStop(HpcTuneError):
    """The run stops immediately and on purpose; rerunning it resumes from the last checkpoint.

    ``facts`` go into outcome.json. ``words`` explain the stop in more detail than ``reason``.
    ``can_rerun``: the same command would not stop at the same place.
    """

    exit_code = EXIT_RESUMABLE

    def __init__(
        self,
        reason: str,
        step: int | None,
        facts: Mapping[str, Any] | None = None,
        explanation: str | None = None,
        can_rerun: bool = True,
    ) -> None:
        rerun = f"Rerun the same command to {f'resume from step {step}' if step else 'start again'}"
        super().__init__(f"{explanation or reason}. {rerun if can_rerun else 'Give more time'}")
        self.reason, self.step, self.facts = reason, step, dict(facts or {})


class InterruptError(HpcTuneError):
    """A second Ctrl-C: the run stops where it is, without a save."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self) -> None:
        super().__init__(
            "interrupted a second time (Ctrl-C): stopped without a save. Rerun the same command to "
            "resume from the last checkpoint"
        )


class RemoteError(HpcTuneError):
    """Another rank failed and has already printed why; this rank exits silently."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def find_remedy(error: BaseException, path: Path | None = None) -> str:
    """Return what to do about a limit or a missing permission that an open or a write met.

    The text follows the error's own message; "" for other errors. ``path`` is what was opened, for
    errors that do not name it. Libraries in Rust give the error number only in their message.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
    if number == errno.EFBIG:
        return ". This job's files may not be larger: raise the limit (ulimit -f) or the quota"
    if number in OPEN_FILE_LIMIT_ERRNOS:
        return (
            ". This process has reached its limit of open files: raise the limit before the "
            "launcher (ulimit -Hn 4096), or LimitNOFILE of the scheduler's daemon on the nodes"
        )
    if number == errno.EDQUOT:
        return ". The quota there is used up: make room, or choose another file system"
    failed_path = getattr(error, "filename", None) or path
    if (
        is_permission_error(number)
        and failed_path is not None
        and (words := describe_missing_permission(Path(failed_path)))
    ):
        return f": {words}"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
