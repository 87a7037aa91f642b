"""A compiler that was killed leaves torch's lock file; nothing waits for it for ever."""

import os
import threading
import time

from hpc_tune.engine.async_io import wait_for_compiler


def test_the_lock_of_a_killed_compiler_is_removed(tmp_path):
    lock = tmp_path / "lock"
    for path in (lock, tmp_path / "a.o"):
        path.touch()
        os.utime(path, (time.time() - 400,) * 2)
    wait_for_compiler(lock)
    assert not lock.exists()


def test_a_compiler_at_work_is_waited_for(tmp_path):
    lock, part = tmp_path / "lock", tmp_path / "a.o"
    lock.touch()
    os.utime(lock, (time.time() - 400,) * 2)
    part.touch()

    def finish():
        time.sleep(0.5)
        assert lock.exists()
        lock.unlink()

    compiler = threading.Thread(target=finish)
    compiler.start()
    begun = time.monotonic()
    wait_for_compiler(lock, every_s=0.05)
    assert time.monotonic() - begun >= 0.45
    compiler.join()


def test_a_lock_that_nobody_writes_beside_ends_the_wait(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    begun = time.monotonic()
    wait_for_compiler(lock, dead_after_s=0.4, every_s=0.05)
    assert 0.3 < time.monotonic() - begun < 5
    assert not lock.exists()
