"""``python -m hpc_tune``, and the console script: what all commands have in common.

signals -> streams that print any text -> cli.main -> one line for errors of the whole process: a
closed terminal or pipe, Ctrl-C, packages that are missing or of a wrong version
"""

import contextlib
import os
import sys

_RESUMABLE_COMMANDS = ("train", "supervise")  # train is the default


def main():  # type: ignore[no-untyped-def]  # a Python that is too old parses this file too
    """Run the command line and return its exit code."""
    if sys.version_info < (3, 11):
        sys.stderr.write(
            "hpc_tune: this is Python %d.%d at %s; expected 3.11 or newer: load the site's module, "
            "or name another python\n" % (sys.version_info[:2] + (sys.executable,))
        )
        return 2
    from hpc_tune.startup_signals import exit_on_signals

    word = sys.argv[1] if len(sys.argv) > 1 else "train"
    if word in _RESUMABLE_COMMANDS or word.startswith("-") or "=" in word:
        exit_on_signals()
    from hpc_tune.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR

    for stream in (sys.stdout, sys.stderr):
        _escape_unencodable(stream)
    try:
        from hpc_tune.cli import main as run

        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and _is_stdout_broken():
            return _report_broken_stdout(error)
        from hpc_tune.packages import explain_import_failure

        reason = explain_import_failure(error)
        if reason is not None:
            sys.stderr.write("hpc_tune: %s\n" % reason)
            return EXIT_USER_ERROR
        if isinstance(error, OSError) and error.filename is not None:
            from hpc_tune.errors import find_remedy

            message = "%s%s" % (error.strerror, find_remedy(error))
            sys.stderr.write("hpc_tune: %s: %s\n" % (error.filename, message))
            return EXIT_USER_ERROR if isinstance(error, PermissionError) else EXIT_FAILED
        raise
    return code


def _escape_unencodable(stream):  # type: ignore[no-untyped-def]
    """Make a stream escape characters that its encoding lacks; a closed stream is None."""
    with contextlib.suppress(AttributeError, OSError):
        stream.reconfigure(errors="backslashreplace")


def _is_stdout_broken():  # type: ignore[no-untyped-def]
    """Return whether stdout is broken, by trying to write one more line."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _report_broken_stdout(error):  # type: ignore[no-untyped-def]
    """Report it once, unless the reader closed the pipe, as in `| head`; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + 13  # as shells report SIGPIPE
    sys.stderr.write("hpc_tune: cannot write to stdout: %s\n" % error.strerror)
    return 1


if __name__ == "__main__":
    sys.exit(main())
