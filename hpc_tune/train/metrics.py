"""What a run reports of each step: metrics.jsonl, the trackers and the progress display."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_tune.log import Progress, log
from hpc_tune.rundir.json_lines import METRICS, JsonLines, drop_after
from hpc_tune.train.trackers import Trackers
from hpc_tune.units import format_bytes, format_count, format_seconds

_REMEMBERED = 1000
_STEPS_TO_ESTIMATE = 3
COMM_SHOWN_SHARE, COMM_WARN_SHARE = (
    0.05,
    0.5,
)  # of a step in messages: in the progress line; worth advice


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Seconds, bytes and tokens over all ranks where not said otherwise.

    ``time`` is when the step was done, in seconds since 1970. ``tokens`` are those of the step's
    documents without padding. ``comm_s``, ``sent_bytes`` and ``expected_bytes``, by kind of
    collective and by the formulas of the layout, are rank 0's. ``most_work_s`` and
    ``least_work_s`` are the time spent neither on messages nor on data, of the slowest and of the
    fastest rank. ``mfu`` counts the scores within documents; it and ``device_util`` are None where
    the device's peak or counters are unknown. Host bytes are the fullest node's; device bytes the
    fullest rank's.
    """

    time: float
    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    loss_tokens: int
    tokens_per_s: float
    mfu: float | None
    step_s: float
    data_s: float
    comm_s: float
    most_work_s: float
    least_work_s: float
    slowest_rank: int
    sent_bytes: dict[str, int]
    expected_bytes: dict[str, int]
    device_util: float | None
    host_bytes: int | None
    host_limit_bytes: int | None
    device_bytes: int | None
    device_limit_bytes: int | None
    samples_seen: int


def _waits(metrics: StepMetrics) -> bool:
    """Whether most of what rank 0 spends in messages is the wait for the slowest rank."""
    return metrics.most_work_s - metrics.least_work_s > COMM_WARN_SHARE * metrics.comm_s


def _spent_on(metrics: StepMetrics) -> str:
    """Return in words what ``comm_s`` is."""
    return f"waiting for rank {metrics.slowest_rank}" if _waits(metrics) else "in messages"


class Metrics:
    """Writes on rank 0 (``run_dir`` given), drops everything elsewhere.

    ``steps_s``: seconds of the newest steps. ``advise``: warn once if messages take most of a step.

    Raises:
        OSError: if a file cannot be made.
    """

    def __init__(
        self,
        run_dir: Path | None,
        total_steps: int,
        start_step: int,
        trackers: Trackers | None = None,
        advise: bool = False,
    ) -> None:
        self._advise = advise and run_dir is not None
        self._total = total_steps if run_dir is not None else 0
        self.steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._progress = Progress("step", total_steps, start_step, enabled=run_dir is not None)
        if run_dir is not None:
            drop_after(run_dir / METRICS, start_step)
        self._lines = JsonLines(run_dir / METRICS if run_dir else None)
        self._trackers = trackers or Trackers()

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        row = asdict(metrics)
        self.steps_s.append(metrics.step_s)
        self._lines.write(**row)
        self._track(metrics.step, row)
        note = f"loss {metrics.loss:.4f}  {format_count(metrics.tokens_per_s)} tokens/s"
        if metrics.comm_s > COMM_SHOWN_SHARE * metrics.step_s:
            note += f"  {metrics.comm_s / metrics.step_s:.0%} {_spent_on(metrics)}"
        if metrics.host_bytes is not None:
            note += f"  host {format_bytes(metrics.host_bytes)}"
        self._progress.update(metrics.step, note)
        if len(self.steps_s) == _STEPS_TO_ESTIMATE and self._total > metrics.step:
            self._log_time(self._total - metrics.step)
        much = metrics.comm_s > COMM_WARN_SHARE * metrics.step_s
        if self._advise and len(self.steps_s) == 2 and much and not _waits(metrics):
            log.warning(
                "%.0f%% of a step goes to messages: parallel=auto measures, and chooses the "
                "fastest layout and number of ranks",
                100 * metrics.comm_s / metrics.step_s,
            )

    def evaluation(self, step: int, eval_loss: float, eval_tokens: int, eval_s: float) -> None:
        """Record one evaluation: the mean loss over the held-out loss tokens."""
        row = {"step": step, "eval_loss": eval_loss, "eval_tokens": eval_tokens, "eval_s": eval_s}
        self._lines.write(**row)
        self._track(step, row)
        self._progress.exclude(eval_s)

    def _log_time(self, steps: int) -> None:
        """Estimate when the run will be done, evaluations and saves not counted."""
        usual_s = statistics.median(self.steps_s)
        left_s = steps * usual_s
        log.info(
            "time    about %s for %d steps of %.3g s, until %s",
            *(format_seconds(left_s), steps, usual_s),
            time.strftime("%a %H:%M", time.localtime(time.time() + left_s)),
        )

    def close(self) -> None:
        """Close the files and the progress bar."""
        self._progress.close()
        self._lines.close()
        self._trackers.close()

    def _track(self, step: int, row: Mapping[str, Any]) -> None:
        scalars = {}
        for name, value in row.items():
            for kind, number in value.items() if isinstance(value, dict) else (("", value),):
                if name not in ("step", "time") and number is not None:
                    scalars[f"{name}/{kind}" if kind else name] = number
        self._trackers.write(step, scalars)
