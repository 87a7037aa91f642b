"""The starts of a run: when each ran, on what, how it ended; and those that came to nothing."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_tune.report.read import Record, Run
from hpc_tune.units import format_seconds

START_HEADS = ("start", "began", "after a wait of", "ranks", "layout", "steps", "ran", "ended")


@dataclass(frozen=True)
class Start:
    """One start of a run. ``waited_s``: since the start before it ended. ``left_out``: nodes that
    the starts after it go on without.
    """

    number: int
    begin_s: float
    seconds: float
    waited_s: float
    before_s: float
    ranks: int | None
    layout: str
    first_step: int | None
    last_step: int | None
    ended: str
    left_out: tuple[str, ...] = ()


def list_starts(run: Run) -> list[Start]:
    """Return the starts of a run, the first one first."""
    found, segments = [], run.segments
    steps = _group_by_segment(run, run.steps)
    events = _group_by_segment(run, run.events_of_kind("start"))
    stops = _group_by_segment(run, run.events_of_kind("stop"))
    left_out = _group_by_segment(run, run.events_of_kind("left_out"))
    for place, segment in enumerate(segments):
        event = events[place][-1] if events[place] else {}
        # Not of a start that failed before it wrote its own first event.
        ended = [e for e in stops[place] if e.get("began_s", 0.0) <= segment.begin_s]
        silent = str(run.state) if place + 1 == len(segments) else "killed"
        found.append(
            Start(
                number=place + 1,
                begin_s=segment.begin_s,
                seconds=segment.end_s - segment.begin_s,
                waited_s=segment.begin_s - segments[place - 1].end_s if place else 0.0,
                before_s=segment.before_s,
                ranks=int(event["size"]) if "size" in event else None,
                layout=str(event.get("layout", "")).partition(":")[0],
                first_step=int(steps[place][0]["step"]) if steps[place] else None,
                last_step=int(steps[place][-1]["step"]) if steps[place] else None,
                ended=str(ended[-1].get("reason", "")) if ended else silent,
                left_out=tuple(str(event.get("node")) for event in left_out[place]),
            )
        )
    return found


def _group_by_segment(run: Run, rows: Iterable[Record]) -> list[list[Record]]:
    found: list[list[Record]] = [[] for _ in run.segments]
    for row in rows:
        if (place := run.place_of(row.get("time", -1.0))) >= 0:
            found[place].append(row)
    return found


def start_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the starts as rows of a table."""
    return [
        (
            str(start.number),
            time.strftime("%m-%d %H:%M:%S", time.localtime(start.begin_s)),
            format_seconds(start.waited_s) if start.number > 1 else "",
            "" if start.ranks is None else str(start.ranks),
            start.layout,
            "none" if start.first_step is None else f"{start.first_step} to {start.last_step}",
            format_seconds(start.seconds),
            "; ".join(
                [start.ended, *(f"node {node} is left out from then on" for node in start.left_out)]
            ),
        )
        for start in list_starts(run)
    ]


def list_refused_starts(run: Run) -> list[Record]:
    """Return how the starts ended that ended before they told of themselves: refused ones."""
    segments = run.segments
    return [
        stop
        for stop in run.events_of_kind("stop")
        if (place := run.place_of(stop["time"])) < 0
        or stop.get("began_s", 0.0) > segments[place].begin_s
    ]


def describe_starts(run: Run) -> str:
    """Return how many starts there were and which nodes were lost; nothing of a single good one."""
    all_starts, failed = list_starts(run), list_refused_starts(run)
    lost = [str(event.get("node")) for event in run.events_of_kind("left_out")]
    if len(all_starts) < 2 and not failed and not lost:
        return ""
    parts = [f"{len(all_starts)} start{'s' * (len(all_starts) != 1)}"]
    if len(all_starts) > 1:
        parts[0] += f", the newest after: {all_starts[-2].ended}"
    if lost:
        parts.append(f"left out: node{'s' * (len(lost) > 1)} {', '.join(lost)}")
    if failed:
        parts.append(f"{len(failed)} more ended while starting, see What happened")
    return "; ".join(parts)
