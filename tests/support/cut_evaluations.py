"""many_runs.py with jobs that can be asked to stop in the middle of an evaluation.

    python -m tests.support.cut_evaluations JOBS.json RESULTS FIRST

A job with "cut_after": n is asked to stop at the n-th batch of held-out data, and from then on.
"""

import threading
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter, main


class StopInEvaluation(StopAfter):
    """Requests a stop from the ``batches``-th time on that an evaluation checks for one."""

    def __init__(self, batches: int | None) -> None:
        super().__init__(None)
        self._batches = batches

    def is_requested(self, margin_s: float = 0.0) -> bool:
        # During the start another thread checks too, which does not count.
        if self._batches and threading.current_thread() is threading.main_thread():
            self._batches -= 1
        return self._batches == 0

    def reason(self, margin_s: float = 0.0) -> str | None:
        return "the test's stop" if self._batches == 0 else None


def train(job: dict[str, Any]) -> int:
    """Do one job; return its exit code."""
    config = load_config(None, job["overrides"])
    return run(config, StopInEvaluation(job.get("cut_after")))


if __name__ == "__main__":
    main(train)
