"""Runs and their figures -> one HTML page that needs no network and no script."""

import html
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from hpc_tune import __version__
from hpc_tune.report.checkpoints import list_checkpoints
from hpc_tune.report.facts import (
    advise_next,
    changed_settings,
    compare_predictions,
    describe_end,
    describe_result,
    event_text,
    find_adapter,
    known_numbers,
    list_data_facts,
    list_machine_facts,
    list_start_facts,
    main_figures,
    start_command,
    time_by_kind,
)
from hpc_tune.report.numbers import render_json
from hpc_tune.report.read import Run, find_differences
from hpc_tune.report.sources import SOURCE_HEADS, source_rows
from hpc_tune.report.starts import START_HEADS, describe_starts, start_rows
from hpc_tune.rundir import displacement
from hpc_tune.units import format_bytes

_SHOWN_EVENTS, _SHOWN_STARTS = 200, 50

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:#f4f5f7;color:#1d2129;font:15px/1.45 system-ui,sans-serif}
main{max-width:1500px;margin:0 auto;padding:20px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 10px}
.card{background:#fff;border:1px solid #dfe2e7;border-radius:8px;padding:14px 16px;
margin:0 0 16px}details.card>.card{margin:12px 0 0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(185px,1fr));gap:12px 20px}
.facts b{display:block;font-size:17px;overflow-wrap:anywhere}
.facts span{color:#5b6472;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(560px,100%),1fr));gap:16px}
.plots .card{margin:0}.plots{margin-bottom:16px}
figure{margin:0}figure svg{width:100%;height:auto;display:block}
.told th{width:120px;white-space:nowrap}.told td{overflow-wrap:anywhere}
figcaption{font-weight:600;margin-bottom:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid #eceef1;vertical-align:top}
td,th{overflow-wrap:anywhere;min-width:100px}td{white-space:pre-line}th{color:#5b6472;font-weight:600}
.when{white-space:nowrap}
.state{display:inline-block;border-radius:99px;padding:1px 12px;color:#fff;font-size:14px}
.done{background:#1a7f37}.stopped{background:#9a6700}.failed,.died{background:#b00020}
.running{background:#0b5cad}.unknown{background:#5b6472}
.warn{border-left:5px solid #b00020}pre{overflow-x:auto;font-size:13px;margin:8px 0 0}
summary{cursor:pointer;font-weight:600}footer{color:#5b6472;font-size:13px}
"""


def render_page(runs: Sequence[Run], figures: Sequence[tuple[str, str, str]]) -> str:
    """Return the page; ``figures`` are (name, caption, SVG)."""
    title = ", ".join(run.name for run in runs)
    shown = [_figure(caption, svg) for _, caption, svg in figures]
    if len(runs) > 1:
        parts = [*_heading_of_many(runs), _grid(shown)]
        parts += [_render_folded(run) for run in runs]
    else:
        [run] = runs
        has_gap = len(shown) % 2 == 1  # beside the last figure
        beside, below = ([_time_card(run)], []) if has_gap else ([], [_time_card(run)])
        parts = [_heading(run), _grid([*shown, *beside]), *below, *_details(run)]
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)} - hpc_tune</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + f"<footer>hpc_tune {__version__}, {when}. All figures as JSON: the script element "
        'of id "figures" at the end of this file.</footer></main>'
        f'<script type="application/json" id="figures">{render_json(runs)}</script></body></html>\n'
    )


def _grid(cards: Iterable[str]) -> str:
    body = "".join(cards)
    return f'<div class="plots">{body}</div>' if body else ""


def _render_folded(run: Run) -> str:
    """Return the details of one run of several, to be opened."""
    cards = "".join([_time_card(run), *_details(run)])
    name = _text(f"{run.name}: where the time went, starts, data, settings and what happened")
    return f'<details class="card"><summary>{name}</summary>{cards}</details>'


def _details(run: Run) -> Iterator[str]:
    """Yield the cards of one run below the figures."""
    heads = ("", "predicted", "measured", "off by")
    all_starts = start_rows(run)
    left = _remark_left_out(len(all_starts), _SHOWN_STARTS)
    for name, body in (
        (f"Starts{left}", _table(START_HEADS, all_starts[-_SHOWN_STARTS:], "")),
        ("Predicted and measured", _table(heads, compare_predictions(run), "")),
        ("What ran", _table(None, list_start_facts(run), "")),
        ("What the data gave", _table(None, list_data_facts(run), "")),
        ("Sources", _table(SOURCE_HEADS, source_rows(run), "")),
        ("Software and hardware", _table(None, list_machine_facts(run), "")),
        ("Checkpoints", _table(("checkpoint", "size", "now"), list_checkpoints(run.path), "")),
    ):
        if body:
            yield _card(name, body)
    yield _events(run)
    yield _card(
        "Settings that are not at their defaults",
        _table(("setting", "here", "default"), changed_settings(run), "none") + _all_settings(run),
    )


def _time_card(run: Run) -> str:
    return _card("Where the time went", _table(None, time_by_kind(run), "nothing is known"))


def _all_settings(run: Run) -> str:
    text = yaml.safe_dump(_tree(run.settings), sort_keys=False, allow_unicode=True)
    return f"<details><summary>All settings</summary><pre>{_text(text)}</pre></details>"


def _heading(run: Run) -> str:
    """Return the first screen: what came out, how it ended, what to do; then the main figures."""
    told = ("status", "reason", "step", "exit_code", "rank", "host", "start")
    is_over = run.state != "running"
    rows = [
        ("How it ended" if is_over else "Now", describe_end(run)),
        ("What came out" if is_over else "So far", describe_result(run)),
    ]
    if said := describe_starts(run):
        rows.append(("Starts", said))
    rows += [
        (key, _format_setting(key, value)) for key, value in run.outcome.items() if key not in told
    ]
    rows.append(("Next", advise_next(run)))
    if command := start_command(run):
        rows.append(("To repeat it", command))
    chosen = known_numbers(run.comparable_evals, "eval_preferences.chosen_log_prob")
    if warning := displacement.displacement_warning(displacement.longest_streak(chosen)):
        rows.append(("Warning", warning))
    warn = " warn" if run.state in ("failed", "died") else ""
    cards = "".join(
        f"<div><span>{_text(name)}</span><b>{_text(value)}</b></div>"
        for name, value in main_figures(run).items()
    )
    return (
        f'<section class="card{warn}"><h1>{_text(run.name)} '
        f'<span class="state {run.state}">{run.state}</span></h1>'
        f'<div class="told">{_table(None, rows, "")}</div></section>'
        f'<section class="card facts">{cards}</section>'
    )


def _heading_of_many(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what differs between the runs, and then what came out of each."""
    names = ["", *(run.name for run in runs)]
    yield _card(
        f"{len(runs)} runs: settings that differ",
        _table(names, ((name, *values) for name, values in find_differences(runs)), "none differs"),
    )
    all_facts = [main_figures(run) for run in runs]
    fact_names = dict.fromkeys(name for values in all_facts for name in values)
    rows = [("how it ended", *(f"{run.state}: {describe_end(run)}" for run in runs))]
    rows += [(name, *(values.get(name, "") for values in all_facts)) for name in fact_names]
    rows += [("adapter", *map(find_adapter, runs))]
    yield _card("What came out", _table(names, rows, ""))


def _events(run: Run) -> str:
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
    left = _remark_left_out(len(kept), _SHOWN_EVENTS)
    table = _table(("time", "step", "kind", "what"), rows, "nothing but steps")
    return _card(f"What happened{left}", table)


def _remark_left_out(num: int, shown: int) -> str:
    return f" (the last {shown} of {num})" if num > shown else ""


def _figure(caption: str, svg: str) -> str:
    return (
        f'<section class="card"><figure role="img" aria-label="{_text(caption)}">'
        f"<figcaption>{_text(caption)}</figcaption>{svg}</figure></section>"
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
        return f"<p>{_text(empty)}</p>" if empty else ""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads or ())
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _tree(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        part, _, key = name.partition(".")
        tree.setdefault(part, {})[key] = value
    return tree


def _format_setting(key: str, value: Any) -> str:
    return format_bytes(value) if key in ("need", "had") and isinstance(value, int) else str(value)


def _text(value: str) -> str:
    return html.escape(value)
