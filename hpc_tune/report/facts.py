"""Derive from a run what a reader wants to know, as rows of text and as numbers. Pure."""

import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_tune.config.load import describe_fields
from hpc_tune.config.section import format_setting
from hpc_tune.report.read import Record, Run
from hpc_tune.rundir.facts import STRAGGLER_ADVICE, STRAGGLER_FACTOR, divide_by_median, sum_energy
from hpc_tune.units import format_bytes, format_count, format_quantity, format_seconds, list_some

# -- The starts of a run: when each ran, on what, how it ended; and starts that were refused.


START_TABLE_HEADERS = (
    "start",
    "began",
    "after a wait of",
    "ranks",
    "layout",
    "steps",
    "ran",
    "ended",
)


@dataclass(frozen=True)
class Start:
    """One start of a run.

    ``wait_s``: since the previous start ended. ``prior_running_s``: running time of all
    earlier starts. ``excluded_nodes``: nodes that later starts do not use.
    """

    number: int
    begin_s: float
    seconds: float
    wait_s: float
    prior_running_s: float
    ranks: int | None
    layout: str
    first_step: int | None
    last_step: int | None
    ending: str
    excluded_nodes: tuple[str, ...] = ()


def list_starts(run: Run) -> list[Start]:
    """Return the starts of a run, the first one first."""
    starts, segments = [], run.segments
    steps = _group_by_segment(run, run.steps)
    events = _group_by_segment(run, run.events_of_kind("start"))
    stops = _group_by_segment(run, run.events_of_kind("stop"))
    exclusions = _group_by_segment(run, run.events_of_kind("left_out"))
    for index, segment in enumerate(segments):
        event = events[index][-1] if events[index] else {}
        # Without stops of starts that failed before they wrote their own first event.
        endings = [e for e in stops[index] if e.get("began_s", 0.0) <= segment.begin_s]
        default_ending = str(run.state) if index + 1 == len(segments) else "killed"
        starts.append(
            Start(
                number=index + 1,
                begin_s=segment.begin_s,
                seconds=segment.end_s - segment.begin_s,
                wait_s=segment.begin_s - segments[index - 1].end_s if index else 0.0,
                prior_running_s=segment.prior_running_s,
                ranks=int(event["size"]) if "size" in event else None,
                layout=str(event.get("layout", "")).partition(":")[0],
                first_step=int(steps[index][0]["step"]) if steps[index] else None,
                last_step=int(steps[index][-1]["step"]) if steps[index] else None,
                ending=str(endings[-1].get("reason", "")) if endings else default_ending,
                excluded_nodes=tuple(str(event.get("node")) for event in exclusions[index]),
            )
        )
    return starts


def _group_by_segment(run: Run, rows: Iterable[Record]) -> list[list[Record]]:
    groups: list[list[Record]] = [[] for _ in run.segments]
    for row in rows:
        if (index := run.start_index_at(row.get("time", -1.0))) >= 0:
            groups[index].append(row)
    return groups


def start_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the starts as rows of a table."""
    return [
        (
            str(start.number),
            time.strftime("%m-%d %H:%M:%S", time.localtime(start.begin_s)),
            format_seconds(start.wait_s) if start.number > 1 else "",
            "" if start.ranks is None else str(start.ranks),
            start.layout,
            "none" if start.first_step is None else f"{start.first_step} to {start.last_step}",
            format_seconds(start.seconds),
            "; ".join(
                [
                    start.ending,
                    *(f"node {node} is left out from then on" for node in start.excluded_nodes),
                ]
            ),
        )
        for start in list_starts(run)
    ]


def list_refused_starts(run: Run) -> list[Record]:
    """Return the stop events of refused starts, which ended before they wrote a start event."""
    segments = run.segments
    return [
        stop
        for stop in run.events_of_kind("stop")
        if (index := run.start_index_at(stop["time"])) < 0
        or stop.get("began_s", 0.0) > segments[index].begin_s
    ]


def describe_starts(run: Run) -> str:
    """Describe how many starts there were and which nodes were lost; "" for one good start."""
    all_starts, refused_starts = list_starts(run), list_refused_starts(run)
    lost_nodes = [str(event.get("node")) for event in run.events_of_kind("left_out")]
    if len(all_starts) < 2 and not refused_starts and not lost_nodes:
        return ""
    parts = [format_quantity(len(all_starts), "start")]
    if len(all_starts) > 1:
        parts[0] += f", the newest after: {all_starts[-2].ending}"
    if lost_nodes:
        parts.append(f"left out: node{'s' * (len(lost_nodes) > 1)} {', '.join(lost_nodes)}")
    if refused_starts:
        parts.append(f"{len(refused_starts)} more ended while starting, see What happened")
    return "; ".join(parts)


# -- Facts of a run.


_STRAGGLER_SHARE = 0.8  # of all steps: a straggler is the slowest rank in more than this share
_MPIRUN_LAUNCHERS = ("openmpi", "pmix", "mpich", "intelmpi", "mvapich", "pals")
_NO_PLAN_TEXT = "not planned: far below the limit"
_NO_LINKS_TEXT = "not measured: parallel.layout=auto and hpc_tune doctor measure them"
_HIDDEN_SETTINGS = {"run.dir", "run.name", "run.tags"}  # always differ from run to run
_MEMORY_LABELS = {
    "host": "most host memory of a node, including that of others",
    "device": "most device memory of a rank",
}
_MAX_JOINED_NAMES = 4
FactRows = list[tuple[str, str]]


def describe_end(run: Run) -> str:
    """Describe why a run ended, with rank, host and exit code if known."""
    text, outcome = run.reason, run.outcome
    if outcome.get("host") is not None and run.state in ("failed", "stopped"):
        rank = f"rank {outcome['rank']} on " if outcome.get("rank") is not None else ""
        text += f" (reported by {rank}{outcome['host']})"
    code = outcome.get("exit_code")
    return text + (f", exit code {code}" if code is not None else "")


def describe_result(run: Run) -> str:
    """Describe the losses and where the adapter, or else the newest checkpoint, is."""
    parts = []
    losses = numeric_values(run.steps, "loss")
    if losses:
        parts.append(f"training loss {losses[0]:.4f} → {losses[-1]:.4f}")
    if change := _describe_held_out_loss(run):
        parts.append(f"held-out loss {change}")
    if adapter := find_adapter(run):
        parts.append(f"the adapter is in {adapter}")
    elif path := next((e.get("path") for e in reversed(run.events_of_kind("checkpoint"))), None):
        parts.append(f"the newest checkpoint is {path}")
    else:
        parts.append("no checkpoint")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def _describe_held_out_loss(run: Run) -> str:
    """Describe the change of the held-out loss, with the newest one's step if not the last step."""
    evals = [row for row in run.comparable_evals if row.get("eval_loss") is not None]
    if not evals:
        return ""
    eval_step, last_step = int(evals[-1]["step"]), int(run.steps[-1]["step"]) if run.steps else 0
    step_note = f" (of step {eval_step})" if eval_step < last_step else ""
    return f"{evals[0]['eval_loss']:.4f} → {evals[-1]['eval_loss']:.4f}{step_note}"


def _join_with_and(names: Sequence[str]) -> str:
    parts = [
        *names[:_MAX_JOINED_NAMES],
        *([f"{num_more} more"] if (num_more := len(names) - _MAX_JOINED_NAMES) > 0 else []),
    ]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def find_adapter(run: Run) -> str:
    """Return the folder of a finished run's adapter, or "" if there is none."""
    folder = run.path / "export" / "adapter"
    return str(folder) if run.state == "done" and folder.is_dir() else ""


def rerun_command(run: Run) -> str:
    """Return the command that repeats the newest start, or "" if it is unknown."""
    start = run.start
    words = shlex.join(map(str, start.get("command", [])))
    if not words:
        return ""
    launcher, size = start.get("launcher"), int(start.get("size") or 1)
    if launcher in _MPIRUN_LAUNCHERS:
        words = f"mpirun -np {size} {words}"
    elif str(launcher).startswith("srun"):
        words = f"srun --ntasks={size} {words}"
    elif launcher == "torchrun":
        words = words.replace(" -m hpc_tune", " -m torch.distributed.run … -m hpc_tune", 1)
    folder = start.get("folder")
    return f"cd {shlex.quote(folder)} && {words}" if folder else words


def suggest_next_action(run: Run) -> str:
    """Return what to do next with the run, in words."""
    if run.state == "done":
        return f"python -m hpc_tune generate --run {shlex.quote(str(run.path))} --prompt …"
    if run.state == "failed":
        resumes = ": it resumes" if run.events_of_kind("checkpoint") else ""
        return f"fix what is named above, then run the same command{resumes}"
    if run.state == "running":
        return f"python -m hpc_tune watch {shlex.quote(str(run.path))}"
    return "run the same command: it resumes from the newest checkpoint"


def summary_metrics(run: Run) -> dict[str, str]:
    """Return the main figures of a run as text, by name."""
    steps = run.steps
    total = f" of {run.total_steps}" if run.total_steps else ""
    values = {"optimizer steps": f"{int(steps[-1]['step']) if steps else 0}{total}"}
    if total_s := running_s(run):
        starts_text = f" in {len(run.segments)} starts" if len(run.segments) > 1 else ""
        values["time running"] = format_seconds(total_s) + starts_text
        if steps:
            values["goodput (steps that count)"] = f"{goodput(run):.0%}"
    if (energy := sum_energy(run.events)) is not None and energy.joules is not None:
        values["energy"] = energy.short_text
    losses = numeric_values(steps, "loss")
    if losses:
        values["training loss, first to last"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
    evals = run.comparable_evals
    if change := _describe_held_out_loss(run):
        names = list(evals[-1].get("eval_losses", {}))
        note = f", the mean of those of {_join_with_and(names)}" if len(names) > 1 else ""
        values[f"held-out loss, first to last{note}"] = change
    for name, kind in (("accuracy", ".1%"), ("margin", ".3g")):
        if held_out := numeric_values(evals, f"eval_preferences.{name}"):
            values[f"held-out {name}, first to last"] = (
                f"{held_out[0]:{kind}} → {held_out[-1]:{kind}}"
            )
    speeds = numeric_values(steps[1:] or steps, "tokens_per_s")
    if speeds:
        values["tokens per second, median"] = format_count(statistics.median(speeds))
    if mfu := numeric_values(steps[1:] or steps, "mfu"):
        values["MFU, median"] = f"{statistics.median(mfu):.1%}"
    if seconds := sum(numeric_values(steps, "step_s")):
        values["time in messages"] = f"{sum(numeric_values(steps, 'comm_s')) / seconds:.1%}"
    for kind in ("host", "device"):
        if used_bytes := numeric_values(steps, f"{kind}_bytes"):
            limits = numeric_values(steps, f"{kind}_limit_bytes")
            note = f" of {format_bytes(limits[-1])}" if limits else ""
            values[_MEMORY_LABELS[kind]] = f"{format_bytes(max(used_bytes))}{note}"
            if own_bytes := numeric_values(steps, f"{kind}_ranks_bytes"):
                values["of which this run's ranks, most on a node"] = format_bytes(max(own_bytes))
    values["saves"] = str(len(run.events_of_kind("checkpoint")))
    values["governor's actions"] = str(len(run.governor_actions))
    return values


def running_s(run: Run) -> float:
    """Return the running time of all starts together."""
    if not run.segments:
        return 0.0
    last = run.segments[-1]
    return last.prior_running_s + last.end_s - last.begin_s


def goodput(run: Run) -> float:
    """Return the share of the running time of all starts that went into steps that count."""
    return min(1.0, sum(numeric_values(run.steps, "step_s")) / max(running_s(run), 1e-9))


def list_start_facts(run: Run) -> FactRows:
    """Return what the newest start logged about itself."""
    start = run.start
    tags = run.settings.get("run.tags")
    rows = [
        ("model", start.get("model")),
        ("experts", start.get("experts")),
        ("data", start.get("data")),
        ("world", start.get("world")),
        ("layout", start.get("layout")),
        ("batch", start.get("batch")),
        ("learning rate", start.get("rate")),
        ("memory", start.get("memory")),
        ("slowest rank", describe_straggler(run)),
        ("energy", energy.full_text if (energy := sum_energy(run.events)) else ""),
        ("energy of the jobs", run.jobs_energy.words if run.jobs_energy else ""),
        ("tags", ", ".join(map(str, tags if isinstance(tags, list) else []))),
    ]
    return [(name, str(value)) for name, value in rows if value]


def list_machine_facts(run: Run) -> FactRows:
    """Return the software and hardware of the newest start."""
    start, last = run.start, run.steps[-1] if run.steps else {}
    limits = ", ".join(
        f"{kind} memory {format_bytes(last[key])} per {owner}"
        for kind, owner in (("host", "node"), ("device", "rank"))
        if (key := f"{kind}_limit_bytes") in last
    )
    hosts = start.get("hosts", {})
    host_texts = (f"{host} ({format_quantity(count, 'rank')})" for host, count in hosts.items())
    versions = start.get("versions", {})
    no_links = _NO_LINKS_TEXT if (start.get("size") or 1) > 1 else ""
    rows = [
        ("hardware", start.get("hardware")),
        ("hosts", list_some(host_texts, 8)),
        ("limits", limits),
        ("links as measured", start.get("links") or no_links),
        ("software", ", ".join(f"{name} {number}" for name, number in versions.items())),
        ("git commit", start.get("commit")),
    ]
    return [(name, str(value)) for name, value in rows if value]


def list_data_facts(run: Run) -> FactRows:
    """Return the documents, tokens, cuts and padding of the training data."""
    counts = run.start.get("counts", {})
    rows: FactRows = []
    names = {"held_out_documents": "held-out documents"}
    for key in ("examples", "documents", "held_out_documents", "tokens"):
        if key in counts:
            rows.append((names.get(key, key), f"{counts[key]:,.0f}"))
    if counts.get("tokens") and "loss_tokens" in counts:
        num_learned = counts["loss_tokens"]
        rows.append(
            ("tokens learned", f"{num_learned:,.0f} ({num_learned / counts['tokens']:.1%})")
        )
    if "rows" in counts and "padding" in counts:
        rows.append(("rows of an epoch", f"{counts['rows']:,.0f}, {counts['padding']:.1%} padding"))
    remarks = [str(remark) for remark in run.start.get("remarks", [])]
    if counts:
        rows.append(("cut, dropped, not learned", "; ".join(remarks) or "nothing"))
    if tokens := sum(numeric_values(run.steps, "tokens")):
        num_learned = sum(numeric_values(run.steps, "loss_tokens"))
        rows.append(("trained on", f"{tokens:,.0f} tokens, {num_learned:,.0f} of them learned"))
    return rows


def describe_straggler(run: Run) -> str:
    """Describe which rank the others wait for most often and how much slower it is; "" if none."""
    rows = [row for row in run.steps[1:] if "slowest_rank" in row]
    if not rows or (run.start.get("size") or 1) == 1:
        return ""
    rank, times = Counter(int(row["slowest_rank"]) for row in rows).most_common(1)[0]
    text = f"rank {rank} in {times} of {len(rows)} steps"
    works = [row["work_s"] for row in run.ranks if len(row["work_s"]) > max(1, rank)]
    if works:
        ratio = statistics.median(divide_by_median(work_s)[rank] for work_s in works)
        text += f"; it works {ratio:.2f} x as long as the median rank"
        if ratio > STRAGGLER_FACTOR and times > _STRAGGLER_SHARE * len(rows):
            text += f", and the others wait for it: {STRAGGLER_ADVICE}"
    return text


def time_breakdown(run: Run) -> FactRows:
    """Return the seconds of the whole run by kind, all starts together."""
    total_s = running_s(run)
    if not total_s:
        return []
    step_s, data_s, comm_s = (
        sum(numeric_values(run.steps, k)) for k in ("step_s", "data_s", "comm_s")
    )
    parts = {
        "compute": step_s - data_s - comm_s,
        "messages, waiting for other ranks included": comm_s,
        "data": data_s,
        "evaluation": sum(numeric_values(run.evals, "eval_s")),
        "waiting for saves": sum(numeric_values(run.events_of_kind("checkpoint"), "blocked_s")),
    }
    parts["starting, and repeated steps"] = max(0.0, total_s - sum(parts.values()))
    rows = [
        (name, f"{format_seconds(seconds)} ({seconds / max(total_s, 1e-9):.1%})")
        for name, seconds in parts.items()
    ]
    wait_s = sum(start.wait_s for start in list_starts(run))
    waits = [("between starts, not in the total", format_seconds(wait_s))] if wait_s else []
    return [*rows, ("total", format_seconds(total_s)), *waits]


def compare_predictions(run: Run) -> list[tuple[str, ...]]:
    """Return rows (figure, predicted, measured, error): step time, memory by phase, sent bytes."""
    rows: list[tuple[str, ...]] = []
    for event in run.events_of_kind("layout")[-1:]:
        measured, predicted = event.get("measured_step_s"), event.get("predicted_step_s")
        if measured and predicted:
            error = f"{measured / predicted - 1:+.0%}"
            rows.append(("step time", f"{predicted:.3g} s", f"{measured:.3g} s", error))
    for kind, (predicted, measured) in mean_sent_bytes(run).items():
        error = f"{measured / predicted - 1:+.1%}" if predicted else ""
        texts = [format_bytes(n) for n in (predicted, measured)]
        rows.append((f"sent per step by rank 0: {kind}", *texts, error))
    for event in run.events_of_kind("memory")[-1:]:
        for phase, row in event.get("phases", {}).items():
            if not (rank_bytes := row.get("rank_bytes")):
                continue
            planned_bytes = row.get("planned")
            error = f"{rank_bytes / planned_bytes - 1:+.0%}" if planned_bytes else ""
            predicted_text = format_bytes(planned_bytes) if planned_bytes else _NO_PLAN_TEXT
            rows.append(
                (f"memory of a rank: {phase}", predicted_text, format_bytes(rank_bytes), error)
            )
    return rows


def mean_sent_bytes(run: Run) -> dict[str, tuple[float, float]]:
    """Return (predicted, measured) bytes that rank 0 sent per step, on average, by collective."""
    rows = [row for row in run.steps if "sent_bytes" in row and "expected_bytes" in row]
    if not rows:
        return {}
    sums: dict[str, list[float]] = {}
    for row in rows:
        for index, name in enumerate(("expected_bytes", "sent_bytes")):
            for kind, num_bytes in row[name].items():
                sums.setdefault(kind, [0.0, 0.0])[index] += num_bytes
    return {kind: (a / len(rows), b / len(rows)) for kind, (a, b) in sums.items() if a or b}


def changed_settings(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, value, default) for each setting that is not at its default."""
    for name, _, default, _ in describe_fields():
        if name in run.settings and name not in _HIDDEN_SETTINGS and run.settings[name] != default:
            yield name, format_setting(run.settings[name]), format_setting(default)


def event_text(event: Record) -> str:
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
        case "energy":
            energy = sum_energy([event])
            return energy.full_text if energy else ""
        case "mixture":
            return f"from here on: {event.get('changes')}"
        case "held_out":
            return "earlier held-out losses are over other data, or another number of rows"
        case _:
            return str(event.get("message", ""))


def numeric_values(rows: Iterable[Record], key: str) -> list[float]:
    """Return the numbers that rows have under a key."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]
