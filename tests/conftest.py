"""What all tests share."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Two tests at a time, and whatever else this machine does: a second thread in each would wait for
# its core by spinning. Ranks decide about theirs by themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Under nohup, or in the background of a shell, these are ignored, and so they would be by each
# program that a test starts.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

SHOWN_LINES = 30


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Show of what ranks printed before a failure the end, where the cause is."""
    if call.excinfo is not None and isinstance(
        call.excinfo.value, AssertionError | pytest.fail.Exception
    ):
        error = call.excinfo.value
        lines = str(error).splitlines()
        if len(lines) > SHOWN_LINES:
            left_out = len(lines) - SHOWN_LINES
            text = "\n".join([f"({left_out} lines left out)", *lines[-SHOWN_LINES:]])
            error.args = (text,)
            if isinstance(error, pytest.fail.Exception):
                error.msg = text
    return (yield)
