"""A program for one rank: trains, and ends copies of itself at every operation of one save.

    python -m tests.support.crash_points OUT.json STEP key=value ...

When the save of STEP begins, the process forks once per point; the child does the save and dies
at its point: before an operation on files, after it, or in the middle of a write. The parent then
looks for the newest checkpoint that verifies, as the next start would, and puts the folder back as
it was.
OUT.json gets one object per point: operation, path, kind, and what was found.
"""

import builtins
import functools
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hpc_tune.checkpoint.store import Store
from hpc_tune.config.load import load_config
from hpc_tune.train.run import run
from hpc_tune.train.saving import Saver

OF_OS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "truncate")
KINDS = ("before", "halfway", "after")  # halfway: of a write
EXIT_AT_POINT = 99


class Tripwire:
    """Lists the operations on files that this process does, and ends it at one of them."""

    def __init__(self, target: int | None = None, kind: str = "") -> None:
        self._target, self._kind = target, kind
        self.done: list[tuple[str, str]] = []

    def _is_at(self, kind: str) -> bool:
        return len(self.done) == self._target and kind == self._kind

    def do(self, name: str, where: Any, work: Any, half: Any = None) -> Any:
        if self._is_at("before"):
            os._exit(EXIT_AT_POINT)
        if half is not None and self._is_at("halfway"):
            half()
            os._exit(EXIT_AT_POINT)
        result = work()
        if self._is_at("after"):
            os._exit(EXIT_AT_POINT)
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
    found = Store(folder, keep=1).latest()
    return None if found is None else found.name


def try_points(folder: Path, save: Any) -> list[dict[str, Any]]:
    """Save in one child per point; return what was found after each."""
    backup, note = folder.with_name("backup"), folder.with_name("operations")
    shutil.copytree(folder, backup)

    def again() -> None:
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
    found = []
    for target, (name, where) in enumerate(operations):
        for kind in KINDS if name == "write" else ("before", "after"):

            def child(target: int = target, kind: str = kind) -> None:
                Tripwire(target, kind).install()
                save()

            assert in_a_child(child) == EXIT_AT_POINT, (name, where, kind)
            left, taken = sorted(p.name for p in folder.iterdir()), newest(folder)
            # The next save, after what was left behind, must give a checkpoint too.
            assert in_a_child(save) == 0, (name, where, kind)
            point = {"kind": kind, "operation": name, "path": where, "left": left, "newest": taken}
            found.append({**point, "after_another_save": newest(folder)})
            again()
    shutil.rmtree(backup)
    note.unlink()
    return found


def main() -> None:
    out, step, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    real_start = Saver.start

    def start(self: Saver, state: Any) -> None:
        def save() -> None:
            real_start(self, state)
            self.finish()

        if state.step == step:
            out.write_text(json.dumps(try_points(self._store.folder, save)))
        save()

    Saver.start = start  # type: ignore[method-assign]
    sys.exit(run(load_config(None, overrides)))


if __name__ == "__main__":
    main()
