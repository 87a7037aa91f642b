"""A program for one rank: trains, and lets copies of itself fail at the operations of one save.

    python -m tests.support.crash_points OUT.json WAY EVERY STEP key=value ...

When the save of STEP begins, the process forks a child for each EVERY-th point and for the last
one; the child does the save. WAY is what happens at its point:

    end     the child dies: before an operation on files, after it, or in the middle of a write
    fill    the disk, which should be a small tmpfs, is filled to the last byte before the operation

The parent then looks for the newest checkpoint that verifies, as the next start would, and puts the
folder back as it was. OUT.json gets one object per point: operation, path, kind, what was found,
and what the save said.
"""

import builtins
import functools
import io
import json
import os
import shutil
import sys
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

from hpc_tune.checkpoint.store import Store
from hpc_tune.config.load import load_config
from hpc_tune.errors import HpcTuneError
from hpc_tune.train.run import run
from hpc_tune.train.saver import Saver

OF_OS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "truncate")
KINDS = ("before", "halfway", "after")  # halfway: of a write
EXIT_AT_POINT, EXIT_REFUSED = 99, 98


class Tripwire:
    """Lists this process's operations on files, and calls ``at_point`` at one of them."""

    def __init__(
        self, target: int | None = None, kind: str = "", at_point: Any = lambda: None
    ) -> None:
        self._target, self._kind, self._at_point = target, kind, at_point
        self.done: list[tuple[str, str]] = []

    def _is_at(self, kind: str) -> bool:
        return len(self.done) == self._target and kind == self._kind

    def do(self, name: str, where: Any, work: Any, half: Any = None) -> Any:
        if self._is_at("before"):
            self._at_point()
        if half is not None and self._is_at("halfway"):
            half()
            self._at_point()
        result = work()
        if self._is_at("after"):
            self._at_point()
        self.done.append((name, str(where)))
        return result

    def install(self) -> None:
        for name in OF_OS:
            real = getattr(os, name)
            setattr(os, name, functools.partial(self._of_os, name, real))
        real_open = io.open
        opened = functools.partial(self._open, real_open)
        io.open = builtins.open = opened  # type: ignore[assignment]

    def _of_os(self, name: str, real: Any, *args: Any, **more: Any) -> Any:
        return self.do(name, args[0], lambda: real(*args, **more))

    def _open(self, real: Any, file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+"):
            return real(file, mode, *args, **more)
        stream = self.do("open", file, lambda: real(file, mode, *args, **more))
        return _Stream(stream, self, file)


class _Stream:
    """A file open for writing whose every write is an operation that reaches the file at once."""

    def __init__(self, stream: Any, wire: Tripwire, file: Any) -> None:
        self._stream, self._wire, self._file = stream, wire, file

    def write(self, data: Any) -> int:
        def put(some: Any) -> int:
            written = self._stream.write(some)
            self._stream.flush()
            return written

        half = functools.partial(put, data[: len(data) // 2])
        return self._wire.do("write", self._file, lambda: put(data), half)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def in_a_child(work: Any) -> int:
    """Return the exit code of a fork of this process that does ``work``."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.__stderr__.write(f"{error!r}\n")
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def newest(folder: Path) -> str | None:
    """Return the name of the checkpoint that a fresh start would take."""
    found = Store(folder, keep=1).latest_checkpoint()
    return None if found is None else found.name


def fill(folder: Path) -> Path:
    """Take the last byte of the disk that ``folder`` is on; return the file that has it."""
    filler = folder.with_name("filler")
    with FileIO(filler, "w") as out:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while out.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return filler


def try_points(folder: Path, save: Any, way: str, every: int) -> list[dict[str, Any]]:
    """Save in one child per point; return what was found after each."""
    # Not on the disk that will be full.
    notes = Path(tempfile.mkdtemp())
    backup, note, said = notes / "backup", notes / "operations", notes / "said"
    shutil.copytree(folder, backup)

    def again() -> None:
        folder.with_name("filler").unlink(missing_ok=True)
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)

    def count() -> None:
        wire, real_open = Tripwire(), io.open
        wire.install()
        save()
        with real_open(note, "w") as out:
            json.dump(wire.done, out)

    assert in_a_child(count) == 0
    operations = json.loads(note.read_text())
    again()
    kinds = KINDS if way == "end" else KINDS[:1]
    points = [
        (target, name, where, kind)
        for target, (name, where) in enumerate(operations)
        for kind in (kinds if name == "write" else (k for k in kinds if k != "halfway"))
    ]
    found = []
    for target, name, where, kind in points[::-every][::-1]:

        def child(target: int = target, kind: str = kind) -> None:
            end = functools.partial(os._exit, EXIT_AT_POINT)
            Tripwire(target, kind, end if way == "end" else lambda: fill(folder)).install()
            try:
                save()
            except HpcTuneError as error:
                FileIO(said, "w").write(str(error).encode())
                os._exit(EXIT_REFUSED)

        said.unlink(missing_ok=True)
        code = in_a_child(child)
        assert code in ((EXIT_AT_POINT,) if way == "end" else (0, EXIT_REFUSED)), (name, where)
        left, taken = sorted(p.name for p in folder.iterdir()), newest(folder)
        folder.with_name("filler").unlink(missing_ok=True)
        # The next save, after what was left behind, must give a checkpoint too.
        assert in_a_child(save) == 0, (name, where, kind)
        point = {"kind": kind, "operation": name, "path": where, "left": left, "newest": taken}
        point["error"] = said.read_text() if code == EXIT_REFUSED else None
        found.append({**point, "after_another_save": newest(folder)})
        again()
    shutil.rmtree(notes)
    return found


def main() -> None:
    out, way, every, step = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    overrides = sys.argv[5:]
    real_start = Saver.start

    def start(self: Saver, state: Any) -> None:
        def save() -> None:
            real_start(self, state)
            self.finish()

        if state.step == step:
            out.write_text(json.dumps(try_points(self._store.folder, save, way, every)))
        save()

    Saver.start = start  # type: ignore[method-assign]
    # The governor's thread may hold a lock during a fork; the child would wait for it forever.
    sys.exit(run(load_config(None, [*overrides, "memory.governor=off"])))


if __name__ == "__main__":
    main()
