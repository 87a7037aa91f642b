"""torch's flight recorder: the last 2,000 collectives of a rank, for ``torchfrtrace``."""

import json
from pathlib import Path

TRACE_FOLDER = "collectives"


def write_trace(folder: Path, rank: int, on_gpu: bool) -> str | None:
    """Write what this rank's collectives were; return the folder, None if nothing was recorded.

    The recorder is off with TORCH_FR_BUFFER_SIZE=0, torch may be built without it, and 2.9 and
    2.10 record none of gloo's collectives.
    """
    from torch._C import _distributed_c10d

    name = "_dump_nccl_trace" if on_gpu else "_dump_fr_trace"
    dump = getattr(_distributed_c10d, name, None)
    if dump is None:
        return None
    as_json = getattr(_distributed_c10d, f"{name}_json")
    try:
        if not json.loads(as_json()).get("entries"):
            return None
        trace = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
    except (RuntimeError, OSError, ValueError):  # the run ends anyway by an error, which is told
        return None
    return str(folder)
