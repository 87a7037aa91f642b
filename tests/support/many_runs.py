"""A program for the ranks of one launch: does several training runs one after another.

    python -m tests.support.many_runs JOBS.json

JOBS.json is a list of {"overrides": [...], "stop_after": steps or null}. Each rank trains each of
them as ``python -m hpc_tune`` would; one launch instead of many saves the seconds of importing.
"""

import json
import sys
from pathlib import Path

from hpc_tune.config.load import load_config
from hpc_tune.train.run import run
from hpc_tune.world.stop import StopFlag


class StopAfter(StopFlag):
    """Asks to leave after ``steps`` steps of this start, and hears nothing else."""

    def __init__(self, steps: int | None) -> None:
        super().__init__(environ={})
        self._left = steps

    def is_asked(self, margin_s: float = 0.0) -> bool:
        return False

    def reason(self, margin_s: float = 0.0) -> str | None:
        if self._left is None:
            return None
        self._left -= 1
        return "the test's stop" if self._left < 0 else None


def main() -> None:
    codes = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        config = load_config(job.get("config"), job["overrides"])
        codes.append(run(config, StopAfter(job.get("stop_after"))))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
