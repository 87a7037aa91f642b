"""The limit of open files, in processes of their own: a lowered hard limit stays."""

import subprocess
import sys

import pytest

from hpc_tune.errors import ConfigError
from hpc_tune.world.processes import (
    MIN_FILES,
    SPARE_FILES,
    file_shortage_warning,
    files_needed,
    require_min_files,
)

LIMITED = """
import resource, sys
from hpc_tune.world.processes import raise_file_limit, read_file_limit
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_file_limit(), read_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "kept_back"),
    [(100, 300, SPARE_FILES), (300, 300, SPARE_FILES), (64, 64, 0), (50, 70, 0)],
)
def test_the_soft_limit_becomes_the_hard_one_but_for_a_spare(soft, hard, kept_back):
    argv = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(hard), str(hard), str(hard - kept_back), str(hard)]


def without_descriptors(program: str) -> str:
    """Run a program that has all files open that it may; return what it prints."""
    full = f"""
import errno, os, resource
from pathlib import Path
from hpc_tune.errors import DiskError
from hpc_tune.memory import host
from hpc_tune.world import processes
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
processes.raise_file_limit()
while True:
    try:
        os.open("/dev/null", os.O_RDONLY)
    except OSError:
        break
{program}
"""
    argv = [sys.executable, "-c", full]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_file_that_can_be_opened_is_not_a_machine_without_memory_or_limits():
    said = without_descriptors("""
try:
    host.find_host_limit()
except OSError as error:
    print(DiskError.from_os_error(error, "reading the memory limits"))
""")
    assert "Too many open files. This process has reached its limit of open files" in said
    assert "ulimit -Hn" in said


def test_a_process_is_not_taken_for_dead_where_no_file_can_be_opened():
    said = without_descriptors("""
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print(processes.is_alive(os.getppid()), processes.is_alive(child))
try:
    print(processes.process_start_after_boot_s(os.getppid()))
except OSError as error:
    print(error.errno == errno.EMFILE)
""")
    assert said.split() == ["True", "False", "True"]


def test_a_process_that_ends_can_write_why_with_the_files_kept_back(tmp_path):
    without_descriptors(f"""
processes.release_spare_files()
Path({str(tmp_path / "outcome.json")!r}).write_text("written")
""")
    assert (tmp_path / "outcome.json").read_text() == "written"


@pytest.mark.parametrize("limit", [MIN_FILES, 1024, None])
def test_a_limit_with_which_a_small_run_works_is_taken(limit):
    require_min_files(limit)


def test_a_limit_with_which_no_run_can_begin_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=f"may open 40 files, expected at least {MIN_FILES}"):
        require_min_files(40)


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
    text = file_shortage_warning(limit, num_ranks)
    assert (text is not None) == is_short
    if text:
        assert (
            f"may open {limit} files, {num_ranks} ranks need about {files_needed(num_ranks)} "
            in text
        )
