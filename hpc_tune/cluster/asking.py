"""What a scheduler's programs answer."""

import subprocess

_LIMIT_S = 15.0


def read_output(*command: str) -> str:
    """Return what a program prints, nothing if it is not there or does not answer in 15 s."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_LIMIT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
