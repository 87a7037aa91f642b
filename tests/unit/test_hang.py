"""What a rank does alone, and when it counts as standing still."""

import os
import subprocess
import sys
import threading

import pytest

from hpc_tune.world.hang import HangWatch


def heard(limit_s, work):
    """What a watch tells of ``work``."""
    told = []
    with HangWatch(limit_s, told.append).over("loading the model"):
        work(told)
    return [str(error) for error in told]


def test_waiting_for_a_file_that_never_answers_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_tune.world.hang._LEAVE_LIMIT_S", 1e6)
    fifo = tmp_path / "model.safetensors"
    os.mkfifo(fifo)

    def read(told):
        writer = threading.Timer(1.5, lambda: fifo.open("wb").close())
        writer.start()
        fifo.read_bytes()

    [said] = heard(0.3, read)
    assert said.startswith("loading the model: nothing was read or computed for 0 s (run.timeout)")


@pytest.mark.parametrize("where", ["here", "in a child"])
def test_work_that_takes_longer_than_the_limit_is_none(where):
    program = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    done = {
        "here": lambda told: exec(program, {}),
        "in a child": lambda told: subprocess.run([sys.executable, "-c", program], check=True),
    }
    assert heard(1.0, done[where]) == []


def test_a_block_that_is_over_is_watched_no_more():
    told = []
    with HangWatch(0.1, told.append).over("loading the model"):
        pass
    threading.Event().wait(0.5)
    assert told == []
