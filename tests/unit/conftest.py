"""What several of the unit tests share."""

import pytest


@pytest.fixture(autouse=True)
def _restore_log():
    """A command that runs in this process sends the log to a stream that pytest closes."""
    from hpc_tune.log import log

    before = (log.handlers[:], log.propagate, log.level)
    yield
    log.handlers[:], log.propagate = before[0], before[1]
    log.setLevel(before[2])
