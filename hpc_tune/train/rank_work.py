"""ranks.jsonl: how long each rank works on a step."""

from pathlib import Path

from hpc_tune.rundir.json_lines import RANKS, JsonLines, drop_after
from hpc_tune.world.comm import Comm

_MAX_LINES = 200  # of ranks.jsonl, so that that of 100,000 steps on 512 ranks is below a megabyte


class RankWork:
    """Gathers the mean seconds of own work per step of each rank; nothing in a world of one."""

    def __init__(self, comm: Comm, run_dir: Path | None, start_step: int, total_steps: int) -> None:
        """Write into ``run_dir``, given on rank 0 alone, from ``start_step`` on.

        Raises:
            OSError: if the file cannot be made.
        """
        self._comm, self._every = comm, max(1, total_steps // _MAX_LINES)
        self._work_s, self._num_steps = 0.0, 0
        path = run_dir / RANKS if run_dir is not None and comm.world.size > 1 else None
        if path is not None:
            drop_after(path, start_step)
        self._lines = JsonLines(path)

    def add(self, step: int, work_s: float) -> None:
        """Add this rank's seconds of a step; gather them when it is time. Collective."""
        if self._comm.world.size == 1:
            return
        self._work_s, self._num_steps = self._work_s + work_s, self._num_steps + 1
        if step % self._every == 0:
            means_s = self._comm.gather(round(self._work_s / self._num_steps, 4))
            self._lines.write(step=step, work_s=means_s)
            self._work_s, self._num_steps = 0.0, 0

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
