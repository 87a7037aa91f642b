"""ranks.jsonl: how long each rank works on a step."""

from collections.abc import Sequence
from pathlib import Path

from hpc_tune.rundir.json_lines import RANKS, JsonLines, drop_after

_MAX_LINES = 200  # of ranks.jsonl, so that that of 100,000 steps on 512 ranks is below a megabyte


class RankWork:
    """Keeps the mean seconds of own work per step of each rank; nothing in a world of one."""

    def __init__(self, size: int, run_dir: Path | None, start_step: int, total_steps: int) -> None:
        """Write into ``run_dir``, given on rank 0 alone, of ``size`` ranks from ``start_step`` on.

        Raises:
            OSError: if the file cannot be made.
        """
        self._every = max(1, total_steps // _MAX_LINES)
        self._work_s, self._num_steps = [0.0] * size, 0
        path = run_dir / RANKS if run_dir is not None and size > 1 else None
        if path is not None:
            drop_after(path, start_step)
        self._lines, self._writes = JsonLines(path), path is not None

    def add(self, step: int, work_s: Sequence[float]) -> None:
        """Add the seconds of a step, by rank; write them when it is time."""
        if not self._writes:
            return
        self._work_s = [sum(both) for both in zip(self._work_s, work_s, strict=True)]
        self._num_steps += 1
        if step % self._every == 0:
            means_s = [round(own / self._num_steps, 4) for own in self._work_s]
            self._lines.write(step=step, work_s=means_s)
            self._work_s, self._num_steps = [0.0] * len(means_s), 0

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
