"""torch's flight recorder: the last 2,000 collectives of a rank, for ``torchfrtrace``."""

import pickle
from pathlib import Path

FOLDER = "collectives"


def keep_trace(folder: Path, rank: int, on_gpu: bool) -> str | None:
    """Write what this rank's collectives were; return the folder, None if nothing was recorded.

    The recorder is off with TORCH_FR_BUFFER_SIZE=0, torch may be built without it, and 2.9 records
    none of gloo's collectives.
    """
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace" if on_gpu else "_dump_fr_trace", None)
    if dump is None:
        return None
    try:
        trace = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        if not pickle.loads(trace).get("entries"):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
    except (RuntimeError, OSError):  # the run ends with an error anyway, whose words matter more
        return None
    return str(folder)
