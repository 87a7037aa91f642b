"""The limit of open files, in processes of their own: a lowered hard limit stays."""

import subprocess
import sys

import pytest

from hpc_tune.world.open_files import needed, shortage

LIMITED = """
import resource, sys
from hpc_tune.world.open_files import raise_limit
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(100, 300), (300, 300)])
def test_the_soft_limit_becomes_the_hard_one(soft, hard):
    argv = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(hard)] * 3


@pytest.mark.parametrize(
    ("limit", "num_ranks", "is_short"),
    [
        (1024, 192, False),
        (1024, 193, True),
        (4096, 512, False),
        (4096, 1024, True),
        (None, 100_000, False),
    ],
)
def test_a_limit_that_stays_too_low_is_told_with_both_numbers(limit, num_ranks, is_short):
    text = shortage(limit, num_ranks)
    assert (text is not None) == is_short
    if text:
        assert f"may open {limit} files, {num_ranks} ranks need about {needed(num_ranks)} " in text
