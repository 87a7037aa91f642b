"""Which rank the others wait for: what it works itself beside the median rank. One meaning for all
that tells of it: the profile, the report's figures and words, and watch.
"""

import statistics
from collections.abc import Sequence

STRAGGLER_FACTOR = 1.1  # x the median rank's work
STRAGGLER_ADVICE = "look at its clocks, its memory and what else runs there"
_LEAST_S = 1e-4  # as finely as work is recorded


def relative_to_median(work_s: Sequence[float]) -> list[float]:
    """Return how many times as long as the median rank each rank works."""
    usual_s = max(statistics.median(work_s), _LEAST_S)
    return [own_s / usual_s for own_s in work_s]
