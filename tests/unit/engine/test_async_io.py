"""A compiler that was killed leaves torch's lock file; nothing waits for it for ever."""

import os
import threading
import time

from hpc_tune.engine.zero.settings import wait_for_compiler

LIMIT_S = 60.0


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

    waiting = threading.Thread(
        target=wait_for_compiler, args=(lock,), kwargs={"every_s": 0.05}, daemon=True
    )
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert lock.exists()
    lock.unlink()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()


def test_a_lock_that_nobody_writes_beside_ends_the_wait(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    waiting = threading.Thread(
        target=wait_for_compiler,
        args=(lock,),
        kwargs={"dead_after_s": 0.4, "every_s": 0.05},
        daemon=True,
    )
    waiting.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert not lock.exists()
