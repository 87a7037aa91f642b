"""All figures of a report as one JSON value, for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_tune.report.facts import goodput, running_s, sent_bytes
from hpc_tune.report.plots import curve_points
from hpc_tune.report.read import Run
from hpc_tune.report.starts import list_starts
from hpc_tune.rundir.energy import sum_energy

_CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "data_s", "comm_s"),
    *("host_bytes", "host_ranks_bytes", "device_bytes", "most_work_s", "least_work_s"),
)
_DIGITS, _POINTS = 5, 150
_HELD_OUT_PREFIX = "eval_preferences."
_MEASURES = frozenset(
    _HELD_OUT_PREFIX + name
    for name in ("accuracy", "margin", "chosen_log_prob", "rejected_log_prob")
)


def render_json(runs: Sequence[Run]) -> str:
    """Return JSON that may stand in a page: it holds no ``<``."""
    text = json.dumps({"runs": [_numbers(run) for run in runs]}, default=str)
    without_nan = json.loads(text, parse_constant=str)
    text = json.dumps(without_nan, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _numbers(run: Run) -> dict[str, Any]:
    curves = {name: curve_points(run.steps, "step", name, most=_POINTS) for name in _CURVES}
    return {
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "outcome": run.outcome,
        "steps": int(run.steps[-1]["step"]) if run.steps else 0,
        "total_steps": run.total_steps,
        "running_s": round(running_s(run), 3),
        "goodput": round(goodput(run), 4),
        "energy": asdict(energy) if (energy := sum_energy(run.events)) else None,
        "energy_of_jobs": asdict(run.jobs_energy) if run.jobs_energy else None,
        "starts": [asdict(start) for start in list_starts(run)],
        "evaluations": [[row["step"], row["eval_loss"]] for row in run.evals],
        "evaluations_by_source": [
            {"step": row["step"], **row["eval_losses"]} for row in run.evals if "eval_losses" in row
        ],
        "preferences": [
            {name.removeprefix(_HELD_OUT_PREFIX): v for name, v in row.items() if name in _MEASURES}
            | {"step": row["step"]}
            for row in run.evals
            if _MEASURES & row.keys()
        ],
        "curves": {
            name: {
                "step": list(map(round, steps)),
                name: [_round_digits(value) for value in values],
            }
            for name, (steps, values) in curves.items()
            if steps
        },
        "memory_by_phase": next(
            (event["phases"] for event in reversed(run.events_of_kind("memory"))), None
        ),
        "sent_bytes_per_step": {
            kind: {"predicted": round(foreseen), "measured": round(measured)}
            for kind, (foreseen, measured) in sent_bytes(run).items()
        },
        "data": run.start.get("counts"),
        "settings": run.settings,
    }


def _round_digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
