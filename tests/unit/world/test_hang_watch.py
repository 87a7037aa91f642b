"""What a rank does alone, and when it counts as standing still."""

import os
import subprocess
import sys
import threading

import pytest

from hpc_tune.world.liveness import HangWatch


def heard(limit_s, work):
    """What a watch tells of ``work``."""
    told = []
    with HangWatch(limit_s, told.append).watching("loading the model"):
        work(told)
    return [str(error) for error in told]


def test_waiting_for_a_file_that_never_answers_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_tune.world.liveness.exit_soon", lambda: None)
    fifo = tmp_path / "model.safetensors"
    os.mkfifo(fifo)

    def read(told):
        writer = threading.Timer(1.5, lambda: fifo.open("wb").close())
        writer.start()
        fifo.read_bytes()

    [said] = heard(0.3, read)
    assert said.startswith("loading the model: nothing was read or computed for 0 s (run.timeout)")


@pytest.mark.parametrize("where", ["here", "in a child"])
def test_work_that_takes_longer_than_the_limit_is_none(where, monkeypatch):
    # A machine that stands still for two seconds is no hang, but would end this process.
    monkeypatch.setattr("hpc_tune.world.liveness.GIL_TIMEOUT_FACTOR", 60)
    monkeypatch.setattr("hpc_tune.world.liveness.exit_soon", lambda: None)
    program = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    done = {
        "here": lambda told: exec(program, {}),
        "in a child": lambda told: subprocess.run([sys.executable, "-c", program], check=True),
    }
    assert heard(1.0, done[where]) == []


def test_a_block_that_is_over_is_watched_no_more():
    told = []
    with HangWatch(0.1, told.append).watching("loading the model"):
        pass
    threading.Event().wait(0.5)
    assert told == []


LOCKED = """
import sys
import h5py
from hpc_tune.world.liveness import HangWatch

with HangWatch(0.5, print).watching("opening the data"):
    h5py.File(sys.argv[1], "r")
"""


def test_a_library_that_hangs_with_the_interpreters_lock_ends_the_process_with_the_place(tmp_path):
    """Its threads, and with them the watch itself, stand still."""
    os.mkfifo(tmp_path / "data.h5")
    argv = [sys.executable, "-c", LOCKED, str(tmp_path / "data.h5")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "h5py/_hl/files.py" in done.stderr


def test_nothing_is_wound_up_when_the_block_is_over():
    program = "from hpc_tune.world.liveness import HangWatch\nimport time\n"
    program += (
        "for _ in range(50):\n    with HangWatch(0.1, print).watching('x'): time.sleep(0.01)\n"
    )
    program += "time.sleep(0.5)\nprint('alive')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "alive\n", done.stderr
