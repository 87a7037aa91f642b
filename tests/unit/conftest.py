"""What several of the unit tests share."""

import pytest
from hypothesis import settings

# Of one example, in ms. By default 200, which a process takes to start where others have the cores.
settings.register_profile("shared cores", deadline=20_000)
settings.load_profile("shared cores")


@pytest.fixture(autouse=True)
def _restore_log():
    """A command that runs in this process sends the log to a stream that pytest closes."""
    from hpc_tune.log import log

    before = (log.handlers[:], log.propagate, log.level)
    yield
    log.handlers[:], log.propagate = before[0], before[1]
    log.setLevel(before[2])
