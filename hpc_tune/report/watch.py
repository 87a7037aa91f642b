"""The watch command: show a run in the terminal while it trains, from its files only.

The run itself is not contacted, so it may be on other nodes; new lines of its files are read.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpc_tune.report.facts import describe_straggler, event_text, goodput, numeric_values
from hpc_tune.report.read import (
    Record,
    Run,
    build_run_from_records,
    find_run_dir,
    open_record_readers,
)
from hpc_tune.units import format_bytes, format_count, format_quantity, format_seconds

_SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH, _MAX_EVENTS, _NUM_RECENT_STEPS = 48, 6, 20
_HIDDEN_EVENTS = ("memory", "start", "layout")  # events without a text
_STATE_COLORS = {"done": "green", "running": "cyan", "stopped": "yellow"}


def watch_run(path: Path, interval_s: float, show_once: bool) -> None:
    """Show the run at ``path`` until it ends, and read it every ``interval_s`` seconds.

    With ``show_once``, or if stdout is not a terminal, show it only once.

    Raises:
        ConfigError: if ``path`` is neither a run directory nor a checkpoint in one.
    """
    path, console = find_run_dir(path), Console()
    lines = open_record_readers(path)

    def read() -> Run:
        return build_run_from_records(path, *(file.read() for file in lines))

    run = read()
    if show_once or not console.is_terminal:
        console.print(_render_run(run))
        return
    with Live(_render_run(run), console=console, auto_refresh=False) as live:
        while run.state == "running":
            time.sleep(interval_s)
            run = read()
            live.update(_render_run(run), refresh=True)


def _render_run(run: Run) -> RenderableType:
    color = _STATE_COLORS.get(run.state, "red")
    title = Text.assemble((run.name, "bold"), "  ", (run.state, f"bold {color}"))
    parts: list[RenderableType] = [Text(run.reason)]
    if run.steps:
        parts += [_render_progress(run), _render_metrics(run)]
    else:
        parts.append(Text("no optimizer step yet"))
    return Panel(
        Group(*parts, *_render_events(run)), title=title, title_align="left", border_style=color
    )


def _render_progress(run: Run) -> RenderableType:
    step = int(run.steps[-1]["step"])
    total = max(run.total_steps or step, step)
    # The median step time; the occasional save or evaluation is not included.
    usual_s = statistics.median(row.get("step_s") or 0.0 for row in run.steps[-_NUM_RECENT_STEPS:])
    eta = f"about {format_seconds((total - step) * usual_s)} left" if step < total else ""
    line = Table.grid(padding=(0, 2))
    line.add_row(f"step {step}/{total}", ProgressBar(total=total, completed=step, width=40), eta)
    return line


def _render_metrics(run: Run) -> RenderableType:
    last, table = run.steps[-1], Table.grid(padding=(0, 2))
    losses = [row["loss"] for row in run.steps if row.get("loss") is not None]
    if losses:
        table.add_row("loss", f"{losses[-1]:.4f}", sparkline(losses))
    if evals := run.comparable_evals:
        held_out = [row["eval_loss"] for row in evals]
        table.add_row("held-out loss", f"{held_out[-1]:.4f}", sparkline(held_out))
        for name in evals[-1].get("eval_losses", {}):
            source_losses = [
                row["eval_losses"][name] for row in evals if name in row.get("eval_losses", {})
            ]
            table.add_row(f"  {name}", f"{source_losses[-1]:.4f}", sparkline(source_losses))
    if held_out := numeric_values(evals, "eval_preferences.accuracy"):
        table.add_row("held-out accuracy", f"{held_out[-1]:.1%}", sparkline(held_out))
    speeds = [row["tokens_per_s"] for row in run.steps[1:] if row.get("tokens_per_s")]
    if speeds:
        table.add_row("tokens/s", format_count(speeds[-1]), sparkline(speeds))
    step_s = last.get("step_s") or 0.0
    shares = {name: (last.get(key) or 0.0) for name, key in _STEP_WAIT_FIELDS.items()}
    text = ", ".join(f"{value / step_s:.0%} {name}" for name, value in shares.items() if step_s)
    table.add_row("step", f"{step_s:.3g} s", text)
    for kind in ("host", "device"):
        if last.get(f"{kind}_bytes"):
            table.add_row(*_render_memory(last, kind))
    for row in _list_status_rows(run):
        table.add_row(*row)
    return table


def _list_status_rows(run: Run) -> Iterator[tuple[str, Text, Text]]:
    """Yield facts that are not curves: layout, starts, newest save, governor, slowest rank."""
    if "layout" in run.start:
        layout, _, reason = str(run.start["layout"]).partition(": ")
        yield "layout", Text(layout), Text(reason)
    if len(run.segments) > 1:
        share = f"goodput {goodput(run):.0%} of all their time"
        yield "starts", Text(str(len(run.segments))), Text(share)
    for event in run.events_of_kind("checkpoint")[-1:]:
        ago = f"{format_seconds(max(0.0, time.time() - event['time']))} ago"
        step = "" if event.get("step") is None else f"step {int(event['step'])}"
        yield "newest save", Text(step), Text(ago if run.state == "running" else "")
    if actions := run.governor_actions:
        count = format_quantity(len(actions), "action")
        yield "governor", Text(count), Text(f"last: {event_text(actions[-1])}")
    if straggler := describe_straggler(run):
        slowest_rank, _, how_often = straggler.partition(" in ")
        yield "slowest rank", Text(slowest_rank), Text(f"in {how_often}")


_STEP_WAIT_FIELDS = {"in messages": "comm_s", "waiting for data": "data_s"}


def _render_memory(row: Record, kind: str) -> list[RenderableType]:
    used, limit = row[f"{kind}_bytes"], row.get(f"{kind}_limit_bytes")
    if not limit:
        return [f"{kind} memory", format_bytes(used)]
    used_share = used / limit
    color = "red" if used_share > 0.9 else "yellow" if used_share > 0.8 else "green"
    bar = ProgressBar(total=limit, completed=used, width=40, complete_style=color,
                      finished_style=color)  # fmt: skip
    line = Table.grid(padding=(0, 2))
    line.add_row(bar, f"{used_share:.0%} of {format_bytes(limit)}")
    return [f"{kind} memory", format_bytes(used), line]


def _render_events(run: Run) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    shown_events = [event for event in run.events if event.get("kind") not in _HIDDEN_EVENTS]
    for event in shown_events[-_MAX_EVENTS:]:
        timestamp = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        step = "" if event.get("step") is None else f"step {event['step']}"
        table.add_row(timestamp, step, str(event.get("kind", "")), Text(event_text(event)))
    return [Text(""), table] if table.row_count else []


def sparkline(values: list[Any]) -> str:
    """Draw values as a line of blocks, each the mean of a part of ``values``."""
    width = -(-len(values) // _SPARKLINE_WIDTH)
    means = [statistics.fmean(values[i : i + width]) for i in range(0, len(values), width)]
    low, high = min(means), max(means)
    steps = (len(_SPARKLINE_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKLINE_BLOCKS[round((mean - low) * steps)] for mean in means)
