"""Runs and their figures -> one HTML page that needs no network and no script."""

import base64
import html
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from hpc_tune import __version__
from hpc_tune.report.read import Row, Run, differences
from hpc_tune.units import format_bytes, format_count, format_seconds

# A straggler computes that many times as long as the fastest rank, in that share of the steps.
STRAGGLER, MOST_STEPS = 1.1, 0.8
_SHOWN_EVENTS = 200

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:#f4f5f7;color:#1d2129;font:15px/1.45 system-ui,sans-serif}
main{max-width:1500px;margin:0 auto;padding:20px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 10px}
.card{background:#fff;border:1px solid #dfe2e7;border-radius:8px;padding:14px 16px;
margin:0 0 16px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px 20px}
.facts b{display:block;font-size:19px;overflow-wrap:anywhere}
.facts span{color:#5b6472;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(560px,100%),1fr));gap:16px}
.plots .card{margin:0}.plots{margin-bottom:16px}
figure{margin:0}img{width:100%;height:auto;display:block}
figcaption{font-weight:600;margin-bottom:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid #eceef1;vertical-align:top}
td,th{overflow-wrap:anywhere;min-width:100px}th{color:#5b6472;font-weight:600}
.when{white-space:nowrap}
.state{display:inline-block;border-radius:99px;padding:1px 12px;color:#fff;font-size:14px}
.done{background:#1a7f37}.stopped{background:#9a6700}.failed,.died{background:#b00020}
.running{background:#0b5cad}.unknown{background:#5b6472}
.warn{border-left:5px solid #b00020}pre{overflow-x:auto;font-size:13px;margin:8px 0 0}
summary{cursor:pointer;font-weight:600}footer{color:#5b6472;font-size:13px}
"""


def page(runs: Sequence[Run], figures: Iterable[tuple[str, str, bytes]]) -> str:
    """Return the page; ``figures`` are (file name, caption, SVG)."""
    title = ", ".join(run.name for run in runs)
    parts = [_heading(run) for run in runs] if len(runs) == 1 else [_heading_of_many(runs)]
    parts += [f'<div class="plots">{"".join(_figure(c, svg) for _, c, svg in figures)}</div>']
    if len(runs) > 1:
        rows = [(name, *values) for name, values in differences(runs)]
        heads = ("setting", *(run.name for run in runs))
        parts.append(_card("Settings that differ", _table(heads, rows, "none differs")))
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        parts.append(_card(f"{prefix}What ran", _table(None, what_ran(run), "no start event")))
        if len(runs) == 1:
            parts += [_card("Predicted and measured", text) for text in [_predictions(run)] if text]
        parts.append(_card(f"{prefix}Where the time went", _table(None, where_time_went(run), "")))
        parts.append(_events(run, prefix))
        text = yaml.safe_dump(_tree(run.settings), sort_keys=False, allow_unicode=True)
        parts.append(
            f'<section class="card"><details><summary>{_text(prefix)}Configuration</summary>'
            f"<pre>{_text(text)}</pre></details></section>"
        )
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)} - hpc_tune</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + f"<footer>hpc_tune {__version__}, {when}</footer></main></body></html>\n"
    )


def facts(run: Run) -> dict[str, str]:
    """Return the main figures of a run, by name."""
    steps = run.steps
    total = f" of {run.total_steps}" if run.total_steps else ""
    values = {"optimizer steps": f"{steps[-1]['step'] if steps else 0}{total}"}
    if run.segments:
        last = run.segments[-1]
        values["time running"] = format_seconds(last.before_s + last.end_s - last.begin_s)
    losses = [row["loss"] for row in steps if row.get("loss") is not None]
    if losses:
        values["training loss, first to last"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
    if run.evals:
        first, last_eval = run.evals[0]["eval_loss"], run.evals[-1]["eval_loss"]
        values["held-out loss, first to last"] = f"{first:.4f} → {last_eval:.4f}"
    speeds = _known(steps[1:] or steps, "tokens_per_s")
    if speeds:
        values["tokens per second, median"] = format_count(statistics.median(speeds))
    if mfu := _known(steps[1:] or steps, "mfu"):
        values["MFU, median"] = f"{statistics.median(mfu):.1%}"
    if seconds := sum(_known(steps, "step_s")):
        values["time in messages"] = f"{sum(_known(steps, 'comm_s')) / seconds:.1%}"
    for kind in ("host", "device"):
        if used := _known(steps, f"{kind}_bytes"):
            limits = _known(steps, f"{kind}_limit_bytes")
            of = f" of {format_bytes(limits[-1])}" if limits else ""
            values[f"most {kind} memory"] = f"{format_bytes(max(used))}{of}"
    values["saves, governor's actions"] = (
        f"{len(run.of_kind('checkpoint'))}, {len(run.of_kind('governor'))}"
    )
    return values


def what_ran(run: Run) -> list[tuple[str, str]]:
    """Return what the newest start logged, and the number of starts."""
    start = run.start
    versions, tags = start.get("versions"), run.settings.get("run.tags")
    rows = [
        ("command", shlex.join(map(str, start.get("command", [])))),
        ("model", start.get("model")),
        ("data", start.get("data")),
        ("world", start.get("world")),
        ("layout", start.get("layout")),
        ("batch", start.get("batch")),
        ("memory", start.get("memory")),
        ("tags", ", ".join(map(str, tags if isinstance(tags, list) else []))),
        ("git commit", start.get("commit")),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if versions else ""),
        ("starts", _starts(run)),
        ("slowest rank", straggler(run)),
    ]
    return [(name, str(value)) for name, value in rows if value]


def straggler(run: Run) -> str:
    """Return which rank the others wait for most often, and how much slower it is, or nothing."""
    rows = [row for row in run.steps[1:] if row.get("slowest_rank") is not None]
    if not rows or (run.start.get("size") or 1) == 1:
        return ""
    rank, times = Counter(row["slowest_rank"] for row in rows).most_common(1)[0]
    ratios = [row["most_work_s"] / max(row["least_work_s"], 1e-4) for row in rows]
    ratio = statistics.median(ratios)
    text = (
        f"rank {rank} in {times} of {len(rows)} steps; the slowest computed {ratio:.2f} x as long "
    )
    text += "as the fastest (median)"
    if ratio > STRAGGLER and times > MOST_STEPS * len(rows):
        text += ": check that rank's clocks, its memory and other processes there"
    return text


def where_time_went(run: Run) -> list[tuple[str, str]]:
    """Return the seconds of the whole run by kind, all starts together."""
    if not run.segments:
        return []
    last = run.segments[-1]
    whole_s = last.before_s + last.end_s - last.begin_s
    step_s, data_s, comm_s = (sum(_known(run.steps, k)) for k in ("step_s", "data_s", "comm_s"))
    parts = {
        "compute": step_s - data_s - comm_s,
        "messages, waiting for other ranks included": comm_s,
        "data": data_s,
        "evaluation": sum(_known(run.evals, "eval_s")),
        "waiting for saves": sum(_known(run.of_kind("checkpoint"), "blocked_s")),
    }
    parts["starting, and repeated steps"] = max(0.0, whole_s - sum(parts.values()))
    rows = [
        (name, f"{format_seconds(seconds)} ({seconds / max(whole_s, 1e-9):.1%})")
        for name, seconds in parts.items()
    ]
    return [*rows, ("total", format_seconds(whole_s))]


def _starts(run: Run) -> str:
    starts, resumes = run.of_kind("start"), run.of_kind("resume")
    if len(starts) < 2:
        return ""
    worlds = " → ".join(dict.fromkeys(str(e.get("size", "?")) for e in starts))
    text = f"{len(starts)}, on {worlds} ranks"
    return text + f"; resumed at step {', '.join(str(e.get('step')) for e in resumes)}"


def _predictions(run: Run) -> str:
    rows: list[tuple[str, ...]] = []
    for event in run.of_kind("layout")[-1:]:
        measured, foreseen = event.get("measured_step_s"), event.get("predicted_step_s")
        if measured and foreseen:
            off = f"{measured / foreseen - 1:+.0%}"
            rows.append(("step time", f"{foreseen:.3g} s", f"{measured:.3g} s", off))
    for event in run.of_kind("memory")[-1:]:
        for phase, row in event.get("phases", {}).items():
            had, planned = row.get("rank_bytes"), row.get("planned")
            off = f"{had / planned - 1:+.0%}" if had and planned else ""
            shown = [format_bytes(n) if n else "" for n in (planned, had)]
            rows.append((f"memory: {phase}", *shown, off))
    rows = [row for row in rows if row[1]]
    return _table(("", "predicted", "measured", "off by"), rows, "") if rows else ""


def _heading(run: Run) -> str:
    command = ""
    if run.state in ("stopped", "died", "unknown"):
        command = "Rerun the same command to resume from the newest checkpoint."
    elif run.state == "done":
        command = f"Next: python -m hpc_tune generate --run {shlex.quote(str(run.path))} --prompt …"
    code = run.outcome.get("exit_code")
    with_code = f", exit code {code}" if code is not None else ""
    extra = {
        k: v for k, v in run.outcome.items() if k not in ("status", "reason", "step", "exit_code")
    }
    more = "".join(f"<div>{_text(f'{k}: {_shown(k, v)}')}</div>" for k, v in extra.items())
    warn = " warn" if run.state in ("failed", "died") else ""
    cards = "".join(
        f"<div><span>{_text(name)}</span><b>{_text(value)}</b></div>"
        for name, value in facts(run).items()
    )
    return (
        f'<section class="card{warn}"><h1>{_text(run.name)} '
        f'<span class="state {run.state}">{run.state}</span></h1>'
        f"<div>{_text(run.reason + with_code)}</div>{more}<div>{_text(command)}</div></section>"
        f'<section class="card facts">{cards}</section>'
    )


def _heading_of_many(runs: Sequence[Run]) -> str:
    all_facts = [facts(run) for run in runs]
    names = dict.fromkeys(name for values in all_facts for name in values)
    rows = [("state", *(f"{run.state}: {run.reason}" for run in runs))]
    rows += [(name, *(values.get(name, "") for values in all_facts)) for name in names]
    return _card(f"{len(runs)} runs", _table(("", *(run.name for run in runs)), rows, ""))


def _events(run: Run, prefix: str) -> str:
    kept = [e for e in run.events if e.get("kind") not in ("start", "memory", "layout")]
    rows = [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])),
            "" if event.get("step") is None else str(event["step"]),
            str(event.get("kind", "")),
            event_text(event),
        )
        for event in kept[-_SHOWN_EVENTS:]
    ]
    left = f" (the last {_SHOWN_EVENTS} of {len(kept)})" if len(kept) > _SHOWN_EVENTS else ""
    table = _table(("time", "step", "kind", "what"), rows, "nothing but steps")
    return _card(f"{prefix}What happened{left}", table)


def event_text(event: Row) -> str:
    """Return an event's text."""
    match event.get("kind"):
        case "checkpoint":
            return (
                f"{format_bytes(event.get('bytes') or 0)} in {event.get('save_s')} s, of which "
                f"training waited {event.get('blocked_s')} s"
            )
        case "resume":
            return f"from {event.get('path')}"
        case "stop":
            return str(event.get("reason"))
        case _:
            return str(event.get("message", ""))


def _figure(caption: str, svg: bytes) -> str:
    data = base64.b64encode(svg).decode()
    return (
        f'<section class="card"><figure><figcaption>{_text(caption)}</figcaption>'
        f'<img alt="{_text(caption)}" src="data:image/svg+xml;base64,{data}"></figure></section>'
    )


def _card(title: str, body: str) -> str:
    return (
        f'<section class="card"><h2>{_text(title)}</h2><div class="scroll">{body}</div></section>'
    )


def _table(heads: Sequence[str] | None, rows: Iterable[Sequence[str]], empty: str) -> str:
    first = "<th>{}</th>" if heads is None else '<td class="when">{}</td>'
    body = "".join(
        "<tr>"
        + first.format(_text(row[0]))
        + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    if not body:
        return f"<p>{_text(empty)}</p>"
    head = "".join(f"<th>{_text(name)}</th>" for name in heads or ())
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _tree(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        part, _, key = name.partition(".")
        tree.setdefault(part, {})[key] = value
    return tree


def _known(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def _shown(key: str, value: Any) -> str:
    return format_bytes(value) if key in ("need", "had") and isinstance(value, int) else str(value)


def _text(value: str) -> str:
    return html.escape(value)
