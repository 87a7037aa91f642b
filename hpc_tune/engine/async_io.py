"""DeepSpeed's library for NVMe: compiled at its first use, behind a lock file of torch's.

torch's extension loader waits for that file without a timeout, and a compiler that is killed (a
cancelled job, a node that fails) leaves it behind: every later run would wait for ever.
"""

import time
from pathlib import Path

from hpc_tune.errors import ConfigError, first_line
from hpc_tune.log import log
from hpc_tune.world.failure import time_limit

LIMIT_S = 1200.0  # a slow node compiles it in ten minutes
DEAD_AFTER_S = 300.0  # a compiler at work writes a file in one or two minutes


def load_async_io(who: str) -> None:
    """Load DeepSpeed's async_io, compiling it if need be; ends the world after 20 minutes.

    ``who`` is named in messages.

    Raises:
        ConfigError: if it cannot be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = AsyncIOBuilder()
    folder = Path(_get_build_directory(builder.name, False))
    log.info(
        "loading DeepSpeed's async_io; at its first use it is compiled for minutes, %s", folder
    )
    hint = f"if no other job compiles it, remove {folder}"
    try:
        with time_limit("DeepSpeed's async_io", LIMIT_S, hint, who):
            wait_for_compiler(folder / "lock")
            builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(
            "offload to nvme: DeepSpeed's async_io cannot be built "
            f"({first_line(error)}); it needs a C++ compiler, ninja and the headers "
            "of libaio (Debian: libaio-dev, Red Hat: libaio-devel), else use cpu"
        ) from None


def wait_for_compiler(lock: Path, dead_after_s: float = DEAD_AFTER_S, every_s: float = 0.5) -> None:
    """Return once ``lock`` is gone; remove it if its compiler was killed.

    It counts as killed when nothing in its folder was written for ``dead_after_s``. Several ranks
    may remove the lock: DeepSpeed checks its compiler before it makes the next one.
    """
    while lock.exists():
        if _idle_s(lock.parent) > dead_after_s:
            log.warning("a killed compiler left %s: it is removed", lock)
            lock.unlink(missing_ok=True)
            return
        time.sleep(every_s)


def _idle_s(folder: Path) -> float:
    """Return the seconds since a file in ``folder`` was written."""
    written = 0.0
    for path in folder.iterdir():
        try:
            written = max(written, path.stat().st_mtime)
        except FileNotFoundError:  # the compiler's own, gone meanwhile
            continue
    return time.time() - written
