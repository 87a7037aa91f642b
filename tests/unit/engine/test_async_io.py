"""A compiler that was killed leaves torch's lock file; nothing waits for it for ever."""

import os
import sys
import threading
import time
from types import SimpleNamespace

from hpc_tune.engine.zero.settings import load_async_io, wait_for_compiler

LIMIT_S = 60.0


def test_the_lock_of_a_killed_compiler_is_removed(tmp_path):
    lock = tmp_path / "lock"
    for path in (lock, tmp_path / "a.o"):
        path.touch()
        os.utime(path, (time.time() - 400,) * 2)
    wait_for_compiler(lock)
    assert not lock.exists()


def test_the_lock_of_each_library_is_removed_before_it_is_loaded(tmp_path, monkeypatch):
    """DeepSpeed's async_io loads pin_memory, which has its own folder and lock."""
    loaded = []

    def builder_of(*names):
        def load(verbose):
            for name in names:
                loaded.append((name, (tmp_path / name / "lock").exists()))

        return lambda: SimpleNamespace(name=names[-1], load=load)

    for name in ("pin_memory", "async_io"):
        (tmp_path / name).mkdir()
        for path in (tmp_path / name / "lock", tmp_path / name / "a.o"):
            path.touch()
            os.utime(path, (time.time() - 400,) * 2)
    builders = {
        "PinMemoryBuilder": builder_of("pin_memory"),
        "AsyncIOBuilder": builder_of("pin_memory", "async_io"),
    }
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", SimpleNamespace(**builders))
    monkeypatch.setattr(
        "torch.utils.cpp_extension._get_build_directory", lambda name, _: str(tmp_path / name)
    )
    load_async_io("a test")
    assert {name for name, _ in loaded} == {"pin_memory", "async_io"}
    assert not any(locked for _, locked in loaded)


def test_a_compiler_at_work_is_waited_for(tmp_path):
    lock, part = tmp_path / "lock", tmp_path / "a.o"
    lock.touch()
    os.utime(lock, (time.time() - 400,) * 2)
    part.touch()

    waiting = threading.Thread(
        target=wait_for_compiler, args=(lock,), kwargs={"poll_interval_s": 0.05}, daemon=True
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
        kwargs={"dead_after_s": 0.4, "poll_interval_s": 0.05},
        daemon=True,
    )
    waiting.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert not lock.exists()
