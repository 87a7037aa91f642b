"""Write runs and their figures as one HTML page that needs no network and no script."""

import hashlib
import html
import io
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from hpc_tune import __version__
from hpc_tune.errors import ConfigError
from hpc_tune.files import write_file
from hpc_tune.report.facts import (
    START_TABLE_HEADERS,
    Start,
    changed_settings,
    compare_predictions,
    describe_end,
    describe_result,
    describe_starts,
    event_text,
    find_adapter,
    goodput,
    list_data_facts,
    list_machine_facts,
    list_start_facts,
    list_starts,
    mean_sent_bytes,
    numeric_values,
    rerun_command,
    running_s,
    start_rows,
    suggest_next_action,
    summary_metrics,
    time_breakdown,
)
from hpc_tune.report.figures import curve_points, draw_figures
from hpc_tune.report.read import Record, Run, find_jobs_energy, find_setting_differences, read_run
from hpc_tune.rundir import facts
from hpc_tune.rundir.facts import RunEnergy, sum_energy
from hpc_tune.units import format_bytes

# -- The checkpoints of a run on disk, compared with their manifests.
#
# This reads only JSON and bytes, because ``checkpoint/store.py`` would import torch.


MAX_HASHED_BYTES = 256 << 20  # takes about a second


def verify_checkpoints(
    run_dir: Path, max_total_bytes: int = MAX_HASHED_BYTES
) -> list[tuple[str, str, str]]:
    """Return (name, size, what was verified) of each checkpoint, the oldest first.

    Checkpoints are hashed up to ``max_total_bytes`` in all; for the others only sizes are compared.
    """
    rows, remaining_bytes = [], max_total_bytes
    for folder in sorted((run_dir / "checkpoints").glob("step-*[0-9]")):
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            files = {str(name): (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
            total = sum(num_bytes for num_bytes, _ in files.values())
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
            rows.append((folder.name, "", f"DAMAGED: manifest.json cannot be used ({exc!r})"))
            continue
        is_hashed = total <= remaining_bytes
        remaining_bytes -= total if is_hashed else 0
        damage = [
            name for name, (num, sha) in files.items()
            if not _is_intact(folder / name.lstrip("/"), num, sha if is_hashed else None)
        ]  # fmt: skip
        result = "every byte verified" if is_hashed else "sizes verified; bytes: inspect --verify"
        if damage:
            result = f"DAMAGED: {damage[0]} is not as it was written"
        rows.append((folder.name, format_bytes(total), result))
    return rows


def _is_intact(file: Path, num_bytes: int, sha256: str | None) -> bool:
    try:
        # A manifest is not trusted: no devices, nothing outside of its folder.
        if ".." in file.parts or not file.is_file() or file.stat().st_size != num_bytes:
            return False
        if sha256 is None:
            return True
        with file.open("rb") as stream:
            hasher = hashlib.sha256()
            while chunk := stream.read(1 << 20):
                hasher.update(chunk)
        return hasher.hexdigest() == sha256
    except (OSError, ValueError):
        return False


# -- How much of each source of the mixture a run has learned, and each one's held-out loss.


SOURCE_TABLE_HEADERS = (
    "source",
    "asked for",
    "learned tokens",
    "of all",
    "passes, by tokens",
    "held-out loss",
)


def source_rows(run: Run) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each source of the mixture, then for other held-out sources."""
    mixture = {source["name"]: source for source in run.start.get("mixture", [])}
    learned_tokens = dict.fromkeys(mixture, 0.0)
    for row in run.steps:
        for name, tokens in row.get("source_tokens", {}).items():
            learned_tokens[name] = learned_tokens.get(name, 0.0) + tokens
    total = sum(learned_tokens.values())
    held_out = [row["eval_losses"] for row in run.comparable_evals if row.get("eval_losses")]
    for name in dict.fromkeys([*learned_tokens, *(name for losses in held_out for name in losses)]):
        losses = [losses[name] for losses in held_out if name in losses]
        loss = f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""
        if name not in learned_tokens:
            yield name, "held out", "", "", "", loss
            continue
        tokens_per_pass = mixture.get(name, {}).get("learned_per_pass")
        yield (
            name,
            mixture.get(name, {}).get("asked", "not in the newest start"),
            f"{learned_tokens[name]:,.0f}",
            f"{learned_tokens[name] / total:.2%}" if total else "",
            f"{learned_tokens[name] / tokens_per_pass:.2f}" if tokens_per_pass else "",
            loss,
        )


# -- All figures of a report as one JSON value, for programs.


_CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "data_s", "comm_s"),
    *("host_bytes", "host_ranks_bytes", "device_bytes", "most_work_s", "least_work_s"),
)
_CURVE_DIGITS, _MAX_CURVE_POINTS = 5, 150
_HELD_OUT_PREFIX = "eval_preferences."
# Fields whose keys in the JSON, which programs read, are others.
_RENAMED_JSON_KEYS = {
    "wait_s": "waited_s",
    "prior_running_s": "before_s",
    "ending": "ended",
    "excluded_nodes": "left_out",
    "has_other_jobs": "has_others",
    "num_unknown_starts": "untold",
}


def render_json(runs: Sequence[Run]) -> str:
    """Return JSON that can be embedded in a page: it contains no ``<``."""
    text = json.dumps({"runs": [_run_as_json_object(run) for run in runs]}, default=str)
    without_nan = json.loads(text, parse_constant=str)
    text = json.dumps(without_nan, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _run_as_json_object(run: Run) -> dict[str, Any]:
    curves = {
        key: curve_points(run.steps, "step", key, max_points=_MAX_CURVE_POINTS) for key in _CURVES
    }
    return {
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "outcome": run.outcome,
        "steps": int(run.steps[-1]["step"]) if run.steps else 0,
        "total_steps": run.total_steps,
        "running_s": round(running_s(run), 3),
        "goodput": round(goodput(run), 4),
        "energy": _as_json_object(energy) if (energy := sum_energy(run.events)) else None,
        "energy_of_jobs": asdict(run.jobs_energy) if run.jobs_energy else None,
        "starts": [_as_json_object(start) for start in list_starts(run)],
        "evaluations": [[row["step"], row["eval_loss"]] for row in run.evals],
        "evaluations_by_source": [
            {"step": row["step"], **row["eval_losses"]} for row in run.evals if "eval_losses" in row
        ],
        "preferences": [
            measures | {"step": row["step"]}
            for row in run.evals
            if (measures := _held_out_preference_metrics(row))
        ],
        "curves": {
            key: {
                "step": list(map(round, steps)),
                key: [float(f"{value:.{_CURVE_DIGITS}g}") for value in values],
            }
            for key, (steps, values) in curves.items()
            if steps
        },
        "memory_by_phase": next(
            (event["phases"] for event in reversed(run.events_of_kind("memory"))), None
        ),
        "sent_bytes_per_step": {
            kind: {"predicted": round(predicted), "measured": round(measured)}
            for kind, (predicted, measured) in mean_sent_bytes(run).items()
        },
        "data": run.start.get("counts"),
        "settings": run.settings,
    }


def _as_json_object(value: Start | RunEnergy) -> dict[str, Any]:
    return {_RENAMED_JSON_KEYS.get(name, name): field for name, field in asdict(value).items()}


def _held_out_preference_metrics(row: Record) -> dict[str, float]:
    return {
        name.removeprefix(_HELD_OUT_PREFIX): value
        for name, value in row.items()
        if name.startswith(_HELD_OUT_PREFIX)
    }


# -- The page.


_MAX_SHOWN_EVENTS, _MAX_SHOWN_STARTS = 200, 50

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
    """Return the page as HTML; ``figures`` are (name, caption, SVG)."""
    title = ", ".join(run.name for run in runs)
    images = [_render_figure(caption, svg) for _, caption, svg in figures]
    if len(runs) > 1:
        parts = [*_render_comparison(runs), _render_grid(images)]
        parts += [_render_folded_details(run) for run in runs]
    else:
        [run] = runs
        has_gap = len(images) % 2 == 1  # next to the last figure
        filler, tail = ([_render_time_card(run)], []) if has_gap else ([], [_render_time_card(run)])
        parts = [_render_summary(run), _render_grid([*images, *filler]), *tail, *_detail_cards(run)]
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)} - hpc_tune</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + f"<footer>hpc_tune {__version__}, {timestamp}. All figures as JSON: the script element "
        'of id "figures" at the end of this file.</footer></main>'
        f'<script type="application/json" id="figures">{render_json(runs)}</script></body></html>\n'
    )


def _render_grid(cards: Iterable[str]) -> str:
    body = "".join(cards)
    return f'<div class="plots">{body}</div>' if body else ""


def _render_folded_details(run: Run) -> str:
    """Return the details of one of several runs, folded."""
    cards = "".join([_render_time_card(run), *_detail_cards(run)])
    name = _escape(f"{run.name}: where the time went, starts, data, settings and what happened")
    return f'<details class="card"><summary>{name}</summary>{cards}</details>'


def _detail_cards(run: Run) -> Iterator[str]:
    """Yield the cards of one run below the figures."""
    heads = ("", "predicted", "measured", "off by")
    all_starts = start_rows(run)
    note = _omission_note(len(all_starts), _MAX_SHOWN_STARTS)
    for name, body in (
        (f"Starts{note}", _render_table(START_TABLE_HEADERS, all_starts[-_MAX_SHOWN_STARTS:], "")),
        ("Predicted and measured", _render_table(heads, compare_predictions(run), "")),
        ("What ran", _render_table(None, list_start_facts(run), "")),
        ("What the data gave", _render_table(None, list_data_facts(run), "")),
        ("Sources", _render_table(SOURCE_TABLE_HEADERS, source_rows(run), "")),
        ("Software and hardware", _render_table(None, list_machine_facts(run), "")),
        (
            "Checkpoints",
            _render_table(("checkpoint", "size", "now"), verify_checkpoints(run.path), ""),
        ),
    ):
        if body:
            yield _render_card(name, body)
    yield _render_events(run)
    yield _render_card(
        "Settings that are not at their defaults",
        _render_table(("setting", "here", "default"), changed_settings(run), "none")
        + _render_all_settings(run),
    )


def _render_time_card(run: Run) -> str:
    return _render_card(
        "Where the time went", _render_table(None, time_breakdown(run), "nothing is known")
    )


def _render_all_settings(run: Run) -> str:
    text = yaml.safe_dump(_nest_settings(run.settings), sort_keys=False, allow_unicode=True)
    return f"<details><summary>All settings</summary><pre>{_escape(text)}</pre></details>"


def _render_summary(run: Run) -> str:
    """Return the first screen: how the run ended, its result, what to do next, main figures."""
    described_keys = ("status", "reason", "step", "exit_code", "rank", "host", "start")
    is_over = run.state != "running"
    rows = [
        ("How it ended" if is_over else "Now", describe_end(run)),
        ("What came out" if is_over else "So far", describe_result(run)),
    ]
    if starts_text := describe_starts(run):
        rows.append(("Starts", starts_text))
    rows += [
        (key, _format_outcome_value(key, value))
        for key, value in run.outcome.items()
        if key not in described_keys
    ]
    rows.append(("Next", suggest_next_action(run)))
    if command := rerun_command(run):
        rows.append(("To repeat it", command))
    log_probs = numeric_values(run.comparable_evals, "eval_preferences.chosen_log_prob")
    if warning := facts.likelihood_displacement_warning(facts.longest_falling_streak(log_probs)):
        rows.append(("Warning", warning))
    warn = " warn" if run.state in ("failed", "died") else ""
    cards = "".join(
        f"<div><span>{_escape(name)}</span><b>{_escape(value)}</b></div>"
        for name, value in summary_metrics(run).items()
    )
    return (
        f'<section class="card{warn}"><h1>{_escape(run.name)} '
        f'<span class="state {run.state}">{run.state}</span></h1>'
        f'<div class="told">{_render_table(None, rows, "")}</div></section>'
        f'<section class="card facts">{cards}</section>'
    )


def _render_comparison(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a card of the settings that differ between the runs, and one of their results."""
    names = ["", *(run.name for run in runs)]
    yield _render_card(
        f"{len(runs)} runs: settings that differ",
        _render_table(
            names,
            ((name, *values) for name, values in find_setting_differences(runs)),
            "none differs",
        ),
    )
    all_facts = [summary_metrics(run) for run in runs]
    fact_names = dict.fromkeys(name for values in all_facts for name in values)
    rows = [("how it ended", *(f"{run.state}: {describe_end(run)}" for run in runs))]
    rows += [(name, *(values.get(name, "") for values in all_facts)) for name in fact_names]
    rows += [("adapter", *map(find_adapter, runs))]
    yield _render_card("What came out", _render_table(names, rows, ""))


def _render_events(run: Run) -> str:
    shown_events = [e for e in run.events if e.get("kind") not in ("start", "memory", "layout")]
    rows = [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])),
            "" if event.get("step") is None else str(event["step"]),
            str(event.get("kind", "")),
            event_text(event),
        )
        for event in shown_events[-_MAX_SHOWN_EVENTS:]
    ]
    omission_note = _omission_note(len(shown_events), _MAX_SHOWN_EVENTS)
    table = _render_table(("time", "step", "kind", "what"), rows, "nothing but steps")
    return _render_card(f"What happened{omission_note}", table)


def _omission_note(num_rows: int, num_shown: int) -> str:
    return f" (the last {num_shown} of {num_rows})" if num_rows > num_shown else ""


def _render_figure(caption: str, svg: str) -> str:
    return (
        f'<section class="card"><figure role="img" aria-label="{_escape(caption)}">'
        f"<figcaption>{_escape(caption)}</figcaption>{svg}</figure></section>"
    )


def _render_card(title: str, body: str) -> str:
    return (
        f'<section class="card"><h2>{_escape(title)}</h2><div class="scroll">{body}</div></section>'
    )


def _render_table(
    headers: Sequence[str] | None, rows: Iterable[Sequence[str]], empty_text: str
) -> str:
    first = "<th>{}</th>" if headers is None else '<td class="when">{}</td>'
    body = "".join(
        "<tr>"
        + first.format(_escape(row[0]))
        + "".join(f"<td>{_escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    if not body:
        return f"<p>{_escape(empty_text)}</p>" if empty_text else ""
    head = "".join(f"<th>{_escape(name)}</th>" for name in headers or ())
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _nest_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        part, _, key = name.partition(".")
        tree.setdefault(part, {})[key] = value
    return tree


def _format_outcome_value(key: str, value: Any) -> str:
    return format_bytes(value) if key in ("need", "had") and isinstance(value, int) else str(value)


def _escape(value: str) -> str:
    return html.escape(value)


# -- Figures as SVG elements of a page.


_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def render_svgs(figures: Iterable[tuple[str, str, Figure]]) -> list[tuple[str, str, str]]:
    """Return (name, caption, SVG element) of figures; each glyph is defined once for all."""
    seen_glyphs: set[str] = set()

    def drop_repeated_glyph(glyph: re.Match[str]) -> str:
        is_new = glyph[1] not in seen_glyphs
        seen_glyphs.add(glyph[1])
        return glyph[0] if is_new else ""

    return [
        (name, caption, re.sub(r'<path id="(DejaVu[^"]*)".*?/>\s*', drop_repeated_glyph,
                               _render_svg(name, figure), flags=re.DOTALL))
        for name, caption, figure in figures
    ]  # fmt: skip


def _render_svg(name: str, figure: Figure) -> str:
    """Return a figure as an SVG element; ``name`` is a prefix that makes its ids unique."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)(?!DejaVu)', rf"\g<1>{name}-", text)
    # Keep hundredths of a pixel: a screen shows no more.
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)


# -- The report command: run directories -> report.html, and its figures as PNG if requested.


REPORT_FILE = "report.html"
_DPI = 144


def write_report(
    paths: Sequence[Path], out: Path | None = None, png: bool = False, asks_scheduler: bool = True
) -> Path:
    """Write one report of one or several runs; return its path.

    ``out`` is an .html file; by default report.html in the run directory of a single run, or in the
    current folder. ``png``: also write the figures into a folder of the same name next to it, such
    as ``report/``. ``asks_scheduler``: ask the scheduler for the energy of the runs' jobs.

    Raises:
        ConfigError: if a path is no run directory or checkpoint, or the report cannot be written.
    """
    loaded_runs = (read_run(path) for path in paths)
    runs = [replace(r, jobs_energy=find_jobs_energy(r.events, asks_scheduler)) for r in loaded_runs]
    out = out or ((runs[0].path if len(runs) == 1 else Path()) / REPORT_FILE)
    figures = list(draw_figures(runs))
    try:
        folder = out.parent / out.stem
        if png:
            folder.mkdir(parents=True, exist_ok=True)
            for name, _, figure in figures:
                figure.savefig(folder / f"{name}.png", dpi=_DPI)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, render_page(runs, render_svgs(figures)))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}; name another file with --out"
        ) from None
    return out
