"""What is seen of other processes, which are real ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpc_tune.world.processes import is_alive, list_ancestors, process_start_after_boot_s

ROOT = Path(__file__).parents[3]


def ticks_of(pid):
    """The start of a process as the kernel writes it (field 22 of proc(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_stopped_process_is_alive_and_a_zombie_or_one_that_is_gone_is_not():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert is_alive(child.pid)
        assert process_start_after_boot_s(child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.pid_exists(child.pid), "nobody has waited for it"
        assert not is_alive(child.pid)
        assert process_start_after_boot_s(child.pid) is None
    assert not is_alive(child.pid)
    assert process_start_after_boot_s(child.pid) is None


def test_the_start_of_a_process_is_that_of_the_kernel_to_the_tick():
    for pid in (os.getpid(), os.getppid(), 1):
        assert process_start_after_boot_s(pid) * os.sysconf("SC_CLK_TCK") == pytest.approx(
            ticks_of(pid), abs=1e-3
        )


def test_the_start_of_a_process_stays_the_same_when_the_clock_is_set(tmp_path, monkeypatch):
    before_s = process_start_after_boot_s(os.getpid())
    stat = Path("/proc/stat").read_text()
    lines = [f"btime {line.split()[1]}1" if "btime" in line else line for line in stat.splitlines()]
    (tmp_path / "stat").write_text("\n".join(lines))
    (tmp_path / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert psutil.boot_time() > 9 * boot_s
    assert process_start_after_boot_s(os.getpid()) == pytest.approx(before_s, abs=1e-3)


def test_the_parents_of_a_process_come_in_order():
    program = "from hpc_tune.world.processes import list_ancestors as found; "
    program += "print(*(p for p, _ in found()))"
    shell = f"{sys.executable} -c '{program}'; echo $$"
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    [*above, own] = map(int, done.stdout.split())
    assert above == [own, os.getpid(), *(pid for pid, _ in list_ancestors())]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("hidepid", "seen"), [(0, True), (1, False), (2, False)])
def test_what_another_user_hides_counts_as_gone(hidepid, seen):
    program = "import os; from hpc_tune.world.processes import *\n"
    program += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    program += "parents = [p for p, _ in list_ancestors()]\n"
    program += "print(is_alive(1), process_start_after_boot_s(1) is not None, parents == [1])"
    # In a process namespace of its own, of which the shell is the first process.
    mount = f"mount -t proc -o hidepid={hidepid} proc /proc"
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c"]
    command += [f'{mount} && "$0" -c "$1"; exit $?', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split() == [str(seen)] * 3, done.stderr
