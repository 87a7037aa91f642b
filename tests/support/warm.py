"""Ranks that have already done their imports: launching them takes a moment, not seconds.

    mpirun -> shim (warm_shim.py), one per rank -> server -> a fork of the server, which is the rank

The server imports what every rank imports and does nothing else: no MPI, no thread, no process
group. The launcher starts a shim in place of a rank: the shim passes its arguments, environment,
folder, cores and open files to the server and lives as long as the rank does. It forwards the
signals that it gets. If it dies its rank is killed, and it ends as its rank ends.

A rank does what ``python argv`` would do, from MPI_Init to the last atexit function and
MPI_Finalize; but it does not tear down its modules, which would copy all of the server's memory.
Tests start ranks cold if they depend on what this does not reproduce: the imports and their order,
the command line of a process, its parent and its memory, what a namespace, a cgroup or a limit
gives it, and other MPI libraries.
"""

import array
import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIM = Path(__file__).with_name("warm_shim.py")
ROOT = Path(__file__).resolve().parents[2]
_PLACE = "HPC_TUNE_TEST_WARM"  # in the environment: the server's folder, and the root of its code
# Not mpi4py.MPI, whose import initializes MPI.
_IMPORTED = (
    "mpi4py",
    "hpc_tune.cli",
    "hpc_tune.train.run",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "safetensors.numpy",
    "transformers.integrations.sdpa_attention",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
    "jinja2",
)


def make_place() -> None:
    """Make the folder of one server for this process and all that it starts.

    Whichever of them starts the server, it ends with this process, the only holder of its pipe.
    """
    folder = tempfile.mkdtemp(prefix="warm-")
    os.environ[_PLACE] = f"{folder}{os.pathsep}{ROOT}"
    os.mkfifo(os.path.join(folder, "alive"))
    held = os.open(os.path.join(folder, "alive"), os.O_RDWR)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(os.close, held)


def place() -> str | None:
    """Return the server's folder, if it runs this code; a copy of the repository has its own."""
    folder, _, root = os.environ.get(_PLACE, "").partition(os.pathsep)
    return folder if root == str(ROOT) else None


@functools.cache
def command() -> tuple[str, ...]:
    """Return the words to put before a rank's own (``-m module ...``).

    The first call starts the server.
    """
    if place() is None:
        make_place()
    path = f"{place()}/socket"
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _start(path)
    return sys.executable, "-IS", str(SHIM), path


def rank_behind(pid: int) -> int:
    """Return the pid of the rank behind a shim; for any other process, its own pid.

    Raises:
        OSError: if there is no such process.
    """
    is_shim = str(SHIM) in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name) if is_shim and name.isdigit() else pid


def _start(path: str) -> None:
    """Start the server and wait until it listens."""
    # Threads do not survive a fork, and these two libraries start some when they are imported.
    alone = {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **alone, "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        start_new_session=True,
    )
    atexit.register(server.poll)  # keeps Popen, which would warn of a running process
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of warm ranks did not start"


@dataclass(frozen=True)
class Request:
    """What a shim was asked to run, and where."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    files: list[int]


def receive(connection: socket.socket) -> Request | None:
    """Read a request: its length in 8 bytes with three descriptors, then JSON."""
    data, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    if len(data) < 8 or not ancillary:
        return None
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    num_bytes = int.from_bytes(data, "little")
    with connection.makefile("rb") as stream:
        words = stream.read(num_bytes)
    if len(words) < num_bytes:  # the launcher has killed its shim meanwhile
        for file in files:
            os.close(file)
        return None
    return Request(**json.loads(words), files=list(files))


def serve(path: str) -> Request:
    """Fork a child for each request; in the child, return the request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, "new")
    # Its end means that nobody is left.
    alive = os.open(os.path.join(os.path.dirname(path), "alive"), os.O_RDONLY | os.O_NONBLOCK)
    selector.register(alive, selectors.EVENT_READ, "over")
    ranks: dict[int, tuple[socket.socket, int]] = {}  # by pid: shim and pidfd
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    def forget(pid: int) -> None:
        shim, pidfd = ranks.pop(pid)
        for file in (shim, pidfd):
            with contextlib.suppress(KeyError):
                selector.unregister(file)
        shim.close()
        os.close(pidfd)

    while True:
        for key, _ in selector.select():
            what, pid = key.data if isinstance(key.data, tuple) else (key.data, 0)
            match what:
                case "over":
                    for rank in ranks:
                        os.kill(rank, signal.SIGKILL)
                    os._exit(0)
                case "new":
                    shim, _ = listener.accept()
                    request = receive(shim)
                    if request is None:
                        shim.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        os.close(alive)
                        for file in (listener, shim, *(s for s, _ in ranks.values())):
                            file.close()
                        for _, pidfd in ranks.values():
                            os.close(pidfd)
                        return request
                    for file in request.files:
                        os.close(file)
                    with contextlib.suppress(OSError):  # if its shim is gone, it is killed below
                        shim.sendall(pid.to_bytes(4, "little"))
                    ranks[pid] = shim, os.pidfd_open(pid)
                    selector.register(shim, selectors.EVENT_READ, ("signal", pid))
                    selector.register(ranks[pid][1], selectors.EVENT_READ, ("ended", pid))
                case "signal" if pid in ranks:
                    numbers = b""
                    with contextlib.suppress(ConnectionError):
                        numbers = ranks[pid][0].recv(64)
                    if not numbers:
                        selector.unregister(ranks[pid][0])
                        numbers = bytes([signal.SIGKILL])
                    for number in numbers:
                        os.kill(pid, number)
                case "ended" if pid in ranks:
                    _, status = os.waitpid(pid, 0)
                    with contextlib.suppress(OSError):
                        ranks[pid][0].sendall(status.to_bytes(4, "little"))
                    forget(pid)


def become(request: Request) -> types.CodeType:
    """Make this process what ``python argv`` would be, except for imports; return its program."""
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        fcntl.fcntl(number, fcntl.F_SETFD, 0)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.sched_setaffinity(0, request.cores)
    paths = [p for p in request.environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.orig_argv = [sys.executable, *request.argv]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    match request.argv:
        case ["-c", code, *words]:
            sys.argv, sys.path[0] = ["-c", *words], request.folder
            return compile(code, "<string>", "exec")
        case ["-m", module, *words]:
            sys.argv, sys.path[0] = [module, *words], request.folder
            # Only the import system knows where a module is. It may be imported already here.
            warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
            code = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
            return compile(f"import runpy\n{code}", "<warm>", "exec")
        case [file, *words]:
            sys.argv, sys.path[0] = [file, *words], str(Path(file).resolve().parent)
            main.__dict__["__file__"] = file
            return compile(Path(file).read_bytes(), file, "exec")
    raise AssertionError(f"nothing to run in {request.argv}")


def import_all() -> None:
    """Import what a rank of a training run imports before its first step."""
    from hpc_tune.packages import fast_imports

    with fast_imports():
        for name in _IMPORTED:
            importlib.import_module(name)
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions


def run(program: types.CodeType, namespace: dict[str, Any]) -> int:
    """Run a rank's program; return its exit code. The interpreter reports other errors."""
    try:
        exec(program, namespace)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def leave(codes: list[int]) -> None:
    """End this process as the interpreter would, except for modules; without a code do nothing."""
    if not codes:
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(codes[0])


def main() -> tuple[types.CodeType, dict[str, Any]]:
    """Serve; in each child, return the program and its namespace."""
    path = sys.argv[1]
    import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    program = become(serve(path))
    return program, sys.modules["__main__"].__dict__


if __name__ == "__main__":
    ended: list[int] = []
    atexit.register(leave, ended)  # registered first, called last
    ended.append(run(*main()))
