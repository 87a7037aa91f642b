import hashlib
import html.parser
import io
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from math import nan

import pytest
from rich.console import Console

from hpc_tune import cli
from hpc_tune.report import figures
from hpc_tune.report import page as report_page
from hpc_tune.report import watch as watching
from hpc_tune.report.facts import (
    compare_predictions,
    describe_straggler,
    list_starts,
    summary_metrics,
    time_breakdown,
)
from hpc_tune.report.figures import FIGURES, _heatmap_columns, draw_figures
from hpc_tune.report.page import source_rows, verify_checkpoints, write_report
from hpc_tune.report.read import LineReader, find_setting_differences, read_run
from hpc_tune.rundir import outcome, owner
from hpc_tune.rundir.facts import STRAGGLER_ADVICE, RunEnergy
from hpc_tune.rundir.owner import make_owner

BEGAN_S = 1_700_000_000.0
LIMIT = 8 << 30
TABLE = {"step": 10, "since": 0, "layers": [1, 4], "tokens": [[9, 9, 9], [9, 9]]}


def step(number, at_s, **changes):
    row = {
        **{"time": at_s, "step": number, "epoch": 0.1, "loss": 3.0 - 0.1 * number, "lr": 1e-4},
        **{"grad_norm": 1.0, "tokens": 100, "loss_tokens": 50, "tokens_per_s": 50.0, "mfu": 0.4},
        **{"step_s": 2.0, "data_s": 0.1, "comm_s": 0.5, "most_work_s": 1.4, "least_work_s": 1.0},
        **{"slowest_rank": 1, "host_bytes": 4 << 30, "host_limit_bytes": LIMIT},
        "host_ranks_bytes": 1 << 30,
        **{"device_bytes": 2 << 30, "device_limit_bytes": LIMIT, "samples_seen": 4 * number},
        "preferences": measured(0.05 * number, -2.0),
    }
    return row | changes


def measured(accuracy, chosen):
    rest = {"margin": 2 * accuracy, "rejected_log_prob": chosen - 0.5}
    return {"accuracy": accuracy, "chosen_log_prob": chosen, **rest}


def evaluated(number, chat, code, at_s=None):
    losses = {"eval_loss": (chat + code) / 2, "eval_losses": {"chat": chat, "code": code}}
    when = {} if at_s is None else {"time": at_s}
    return {**when, "step": number, **losses, "eval_tokens": 9, "eval_s": 1.0}


def event(kind, at_s, **fields):
    return {"time": at_s, "step": None, "rank": 0, "kind": kind} | fields


@pytest.fixture
def make(tmp_path):
    """Write a run directory: ten steps of two seconds, then what ``changes`` say."""

    def make(
        name="run", steps=None, events=(), outcome=None, evals=True, settings="lr: 0.1", ranks=True
    ):
        folder = tmp_path / name
        (folder / "memory").mkdir(parents=True)
        (folder / "config.resolved.yaml").write_text(f"optim: {{{settings}}}\nrun: {{name: null}}")
        rows = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)] if steps is None else steps
        rows += [evaluated(10, 1.75, 2.25)] if evals else []
        begun = event("start", BEGAN_S, size=2, total_steps=10, command=["python", "-m", "x y"])
        begun |= {"launcher": "openmpi", "folder": "/home/me", "layout": "shard 2: fits"}
        begun |= {"counts": COUNTS, "remarks": ["3 cut at seq_len"], "hosts": {"n1": 2}}
        work = [{"step": n, "work_s": [1.0, 1.4]} for n in range(1, 11)] if ranks else []
        files = {"metrics": rows, "events": [begun, *events], "ranks": work, "experts": [TABLE]}
        for file, lines in files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{file}.jsonl").write_text(text)
            os.utime(folder / f"{file}.jsonl", (BEGAN_S, BEGAN_S))
        if outcome is not None:
            (folder / "outcome.json").write_text(json.dumps(outcome))
        return folder

    return make


COUNTS = {"documents": 70, "tokens": 1000, "loss_tokens": 250, "rows": 10, "padding": 0.125}
DONE = {"status": "done", "reason": "all steps done", "step": 10, "exit_code": 0}
PHASES = {"steady": {"rank_bytes": 2 << 30, "planned": 1 << 30}, "load": {"rank_bytes": 1 << 30}}
EVENTS = (
    event("checkpoint", BEGAN_S + 9, step=4, bytes=1 << 20, save_s=3.0, blocked_s=0.5),
    event(
        "governor",
        BEGAN_S + 11,
        step=5,
        action="split",
        message="7 GiB of 8 GiB: micro-batches of 1 rows",
    ),
    event("memory", BEGAN_S + 20, phases=PHASES),
    event("layout", BEGAN_S + 20, predicted_step_s=1.6, measured_step_s=2.0),
)


class Checker(html.parser.HTMLParser):
    """Counts what is opened and closed, and what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(file):
    checker = Checker()
    checker.feed(file.read_text())
    assert checker.open == []
    assert checker.fetched == []
    return " ".join(checker.text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [],
            "Slurm counted 1.00 Wh for the nodes of job 7, from start to end, including other "
            "jobs there; not known: job 9 (sacct knows of no such job at that time)",
        ),
        (
            ["--no-job-energy"],
            "Slurm was not asked, since a job's energy is known only after its end",
        ),
    ],
)
def test_the_report_asks_slurm_what_the_nodes_of_the_jobs_took(
    make, tmp_path, monkeypatch, options, words
):
    sacct, rows = tmp_path / "bin" / "sacct", tmp_path / "rows"
    times = f"{BEGAN_S:.0f}|{BEGAN_S + 90:.0f}"
    rows.write_text(f"7|{times}|0\n7.extern|{times}|3600\n")
    sacct.parent.mkdir()
    sacct.write_text(f"#!/bin/sh\ncat {rows}\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sacct.parent}:{os.environ['PATH']}")
    jobs = [
        event("start", BEGAN_S + at_s, job=job, scheduler=scheduler, size=2)
        for at_s, job, scheduler in ((20, "7", "Slurm"), (900, "9", "Slurm"), (70, "1.h", "PBS"))
    ]
    run = make(events=jobs, outcome=DONE)
    assert cli.main(["report", *options, str(run)]) == 0
    assert words in checked(run / "report.html")
    page = (run / "report.html").read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])
    assert figures["runs"][0]["energy_of_jobs"]["joules"] == (None if options else 3600)


def test_the_report_is_one_page_with_each_figure_and_what_matters(make):
    run = make(events=EVENTS, outcome=DONE)
    file = write_report([run])
    text = checked(file)
    for words in (
        *("done", "all steps done, exit code 0", "10 of 10", "2.9000 → 2.0000", "50", "40.0%"),
        *("4.00 GiB of 8.00 GiB", "python -m 'x y'", "micro-batches of 1 rows", "generate --run"),
        *(
            "1.6 s",
            "+25%",
            "+100%",
            "rank 1 in 9 of 9 steps",
            "the others wait for it: look at its clocks",
        ),
    ):
        assert words in text, words
    pictures = re.findall(r"<svg.*?</svg>", file.read_text(), re.DOTALL)
    assert len(pictures) == len(FIGURES)
    ids = [place for picture in pictures for place in re.findall(r'\bid="([^"]*)"', picture)]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]*)', "".join(pictures))
    assert set(used) <= set(ids)
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_the_first_screen_says_what_came_out_how_it_ended_and_what_repeats_it(make):
    run = make(events=EVENTS, outcome=DONE | {"start": "5200a3a49310a817"})
    (run / "export" / "adapter").mkdir(parents=True)
    first = checked(write_report([run])).partition("All starts on one axis")[0]
    for words in (
        "Training loss 2.9000 → 2.0000; held-out loss 2.0000 → 2.0000; the adapter is in",
        "all steps done, exit code 0",
        "cd /home/me && mpirun -np 2 python -m 'x y'",
        "generate --run",
    ):
        assert words in first, words
    assert "5200a3a49310a817" not in first, "it tells a program which start has ended"
    lost = {
        "status": "failed",
        "reason": "host n7 is gone",
        "exit_code": 1,
        "rank": 3,
        "host": "n0",
    }
    text = checked(write_report([make("lost", events=EVENTS, outcome=lost)]))
    assert "host n7 is gone (reported by rank 3 on n0), exit code 1" in text


def evaluations(*chosen):
    return [
        {"step": n, "eval_loss": 2.0, "eval_pairs": 9, "eval_s": 1.0}
        | {"eval_preferences": measured(0.25 * (n + 1), log_prob)}
        for n, log_prob in enumerate(chosen)
    ]


def test_what_preferences_did_is_told_and_that_chosen_answers_are_unlearned_too(make):
    steps = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)]
    falling = make("falling", [*steps, *evaluations(-2.0, -2.1, -2.2, -2.3)], evals=False)
    text = checked(write_report([falling]))
    for words in ("25.0% → 100.0%", "0.5 → 2", "in 3 evaluations in a row, from -2.000 to -2.300"):
        assert words in text, words
    names = {name for name, _, _ in draw_figures([read_run(falling)])}
    assert {"preferences", "log-probs"} <= names
    steady = make("steady", [*steps, *evaluations(-2.0, -2.1, -2.0, -2.3)], evals=False)
    page = write_report([steady])
    assert "evaluations in a row" not in checked(page)
    assert '"margin":0.5' in page.read_text()


def test_a_run_without_preferences_has_no_figure_of_them(make):
    plain = [step(n, BEGAN_S + 2 * n, preferences=None) for n in range(1, 11)]
    run = make("plain", plain)
    names = {name for name, _, _ in draw_figures([read_run(run)])}
    assert "loss" in names
    assert not {"preferences", "log-probs"} & names
    assert "accuracy" not in checked(write_report([run]))


def test_pictures_are_written_where_asked_for_alone(make, tmp_path, monkeypatch):
    run = make(events=EVENTS, outcome=DONE)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "run"]) == 0
    assert not (run / "report").exists()
    assert cli.main(["report", "run", "--png"]) == 0
    names = [name for name, _, _ in FIGURES]
    assert sorted(p.stem for p in (run / "report").glob("*.png")) == sorted(names)


def test_ranks_that_a_later_start_added_are_in_the_column_of_both_starts(monkeypatch):
    monkeypatch.setattr(figures, "_MAX_HEATMAP_COLUMNS", 1)
    lines = [{"step": 1, "work_s": [1.0, 1.0]}, {"step": 2, "work_s": [1.0, 2.0, 1.0, 1.0]}]
    for order in (lines, lines[::-1]):
        [column] = _heatmap_columns([row | {"step": n} for n, row in enumerate(order)], 4, 1)
        assert column == [1.0, 2.0, 1.0, 1.0]


def test_all_figures_are_there_as_json_too(make):
    run = make(
        events=EVENTS, outcome=DONE | {"reason": "a </script> and NaN", "need": float("nan")}
    )
    [text] = re.findall(
        r'<script type="application/json" id="figures">(.*?)</script>',
        write_report([run]).read_text(),
    )
    [found] = json.loads(text, parse_constant=pytest.fail)["runs"]
    assert found["reason"] == "a </script> and NaN"
    assert found["curves"]["loss"]["loss"][0] == 2.9
    assert found["evaluations"] == [[10, 2.0]]
    assert found["data"] == COUNTS
    assert found["memory_by_phase"] == PHASES
    assert found["starts"][0].keys() == {
        *("number", "begin_s", "seconds", "waited_s", "before_s", "ranks", "layout"),
        *("first_step", "last_step", "ended", "left_out"),
    }
    assert report_page._as_json_object(RunEnergy(None)).keys() == {
        *("joules", "parts", "tokens", "missing", "has_others", "starts", "untold", "step")
    }


def test_each_start_has_its_place_on_the_axis_of_time(make):
    """20 s on 2 ranks, 1000 s in a queue, 10 s on 4 ranks."""
    later = [step(n, BEGAN_S + 1020 + 2 * (n - 10)) for n in range(11, 16)]
    steps = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)] + later
    stop = event("stop", BEGAN_S + 20, step=10, reason="SIGUSR1")
    again = event("start", BEGAN_S + 1020, size=4, total_steps=15, layout="shard 4: fits")
    first, second = list_starts(read_run(make(steps=steps, events=[stop, again], outcome=DONE)))
    assert (first.ranks, first.layout, first.first_step, first.last_step) == (2, "shard 2", 1, 10)
    assert (first.ending, first.seconds, first.prior_running_s) == ("SIGUSR1", 20, 0)
    assert (second.ranks, second.layout, second.first_step) == (4, "shard 4", 11)
    assert (second.wait_s, second.seconds, second.prior_running_s) == (1000, 10, 20)


def test_a_start_that_failed_early_does_not_say_how_the_one_before_ended(make):
    """Killed after 20 s; 500 s later a start that fails before its first event; then one more."""
    failed = BEGAN_S + 520
    events = [
        event("warning", failed, message="it was killed", began_s=failed - 3),
        event("stop", failed + 1, reason="no such model", began_s=failed - 3),
        event("start", BEGAN_S + 1020, size=4),
        event("stop", BEGAN_S + 1030, reason="memory is short", began_s=BEGAN_S + 1010),
    ]
    first, second = list_starts(read_run(make(events=events)))
    assert (first.ending, first.seconds) == ("killed", 20)
    assert second.ending == "memory is short"


def test_a_start_that_was_refused_is_no_time_running(make):
    """A day before, and between two starts: neither is on the axis of time, both are told of."""
    day_s = 86_400.0
    refused = [
        event("stop", at_s, reason="data.seq_len is too short", began_s=at_s - 5)
        for at_s in (BEGAN_S - day_s, BEGAN_S + 500)
    ]
    again = event("start", BEGAN_S + 1020, size=2)
    last = event("stop", BEGAN_S + 1030, reason="all steps done")
    path = make(events=[*refused, again, last], outcome=DONE)
    run = read_run(path)
    assert [start.seconds for start in list_starts(run)] == [20, 10]
    assert (list_starts(run)[0].begin_s, list_starts(run)[1].wait_s) == (BEGAN_S, 1000)
    assert summary_metrics(run)["time running"] == "30s in 2 starts"
    figure = dict((name, figure) for name, _, figure in draw_figures([run]))["timeline"]
    stops = [line for line in figure.axes[1].lines if line.get_marker() == "s"]
    assert [list(line.get_xdata()) for line in stops] == [[30.0]]
    first_screen = checked(write_report([path])).partition("All starts on one axis")[0]
    assert "2 more ended while starting, see What happened" in first_screen


def test_losses_are_drawn_when_they_were_measured_and_lost_steps_are_a_gap(make):
    """Step 0 after 6 s; steps 1 to 5 until 20 s, lost ones until 26 s, then 6 to 8."""
    times = [*(BEGAN_S + 10 + 2 * n for n in range(1, 6)), *(BEGAN_S + 100 + n for n in (2, 4, 6))]
    steps = [step(n, at_s) for n, at_s in enumerate(times, 1)]
    evals = [evaluated(0, 3.0, 3.0, BEGAN_S + 6), evaluated(8, 1.0, 1.0, BEGAN_S + 107)]
    lost = event("stop", BEGAN_S + 26, reason="host n2 is gone")
    events = [lost, event("start", BEGAN_S + 100, size=2)]
    settings = "lr: 0.1}\ntune: {objective: dpo"

    def lines_of(run):
        figures = {name: figure for name, _, figure in draw_figures([run])}
        above = figures["timeline"].axes[0]
        assert above.get_ylabel() == figures["loss"].axes[0].get_ylabel() == "loss"
        return [list(map(float, line.get_xdata())) for line in above.lines[:2]]

    trained, held_out = lines_of(
        read_run(make("new", [*steps, *evals], events, evals=False, settings=settings))
    )
    assert trained == pytest.approx([12, 14, 16, 18, 20, nan, 28, 30, 32], nan_ok=True)
    assert held_out == [6, 33]
    for row in evals:  # as older versions have written them
        del row["time"]
    _, held_out = lines_of(
        read_run(make("old", [*steps, *evals], events, evals=False, settings=settings))
    )
    assert held_out == [10, 32]


def test_a_held_out_loss_has_the_step_that_it_is_of_and_none_of_other_data_beside_it(make):
    steps = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)]
    evals = [evaluated(0, 4.0, 4.0, BEGAN_S), evaluated(8, 3.0, 2.0, BEGAN_S + 17)]
    run = read_run(make("cut", [*steps, *evals], evals=False))
    [(_, said)] = [(k, v) for k, v in summary_metrics(run).items() if k.startswith("held-out loss")]
    assert said == "4.0000 → 2.5000 (of step 8)"
    other = event("held_out", BEGAN_S + 16.5, step=8)
    run = read_run(make("other", [*steps, *evals], [other], evals=False))
    [(_, said)] = [(k, v) for k, v in summary_metrics(run).items() if k.startswith("held-out loss")]
    assert said == "2.5000 → 2.5000 (of step 8)"
    assert [row[-1] for row in source_rows(run)] == ["3.0000 → 3.0000", "2.0000 → 2.0000"]


def test_each_held_out_source_has_its_own_curve(make):
    steps = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)]
    evals = [evaluated(0, 4.0, 3.0), evaluated(5, 3.0, 3.5), evaluated(10, 2.0, 4.0)]
    run = make("mixture", [*steps, *evals], evals=False)
    figures = {name: figure for name, _, figure in draw_figures([read_run(run)])}
    drawn = {line.get_label(): list(line.get_ydata()) for line in figures["held-out"].axes[0].lines}
    assert drawn == {"chat": [4.0, 3.0, 2.0], "code": [3.0, 3.5, 4.0]}
    assert '"evaluations_by_source":[{"step":0,"chat":4.0' in write_report([run]).read_text()
    one = make("one", [*steps, {"step": 10, "eval_loss": 2.0}], evals=False)
    assert "held-out" not in {name for name, _, _ in draw_figures([read_run(one)])}


def test_sources_among_the_settings_are_read_line_by_line(make):
    listed = "[{path: a.jsonl, name: chat, weight: 0.6, limit: null}, {path: b, weight: 0.4}]"
    run = make(settings=f"lr: 0.1}}\ndata: {{sources: {listed}")
    text = checked(write_report([run]))
    assert "path a.jsonl, name chat, weight 0.6\npath b, weight 0.4" in text
    assert "{'path'" not in text


def test_a_node_that_supervise_has_left_out_is_told_with_the_start_that_lost_it(make):
    message = "node n2 is left out from now on: Slurm says: down"
    events = [
        event("stop", BEGAN_S + 20, reason="host n2 is gone"),
        event("left_out", BEGAN_S + 40, node="n2", message=message, began_s=BEGAN_S + 40),
        event("start", BEGAN_S + 60, size=1),
    ]
    path = make(events=events, outcome=DONE)
    first, second = list_starts(read_run(path))
    assert (first.ending, first.excluded_nodes, first.seconds) == ("host n2 is gone", ("n2",), 20)
    assert second.ending == "done"
    text = checked(write_report([path]))
    assert message in text
    assert "host n2 is gone; node n2 is left out from then on" in text
    first_screen = text.partition("All starts on one axis")[0]
    assert "2 starts, the newest after: host n2 is gone; left out: node n2" in first_screen


def test_what_was_sent_is_compared_with_the_formula(make):
    sent = {"sent_bytes": {"all_reduce": 3 << 20}, "expected_bytes": {"all_reduce": 2 << 20}}
    run = read_run(make(steps=[step(n, BEGAN_S + n, **sent) for n in (1, 2)]))
    assert compare_predictions(run) == [
        ("sent per step by rank 0: all_reduce", "2.00 MiB", "3.00 MiB", "+50.0%")
    ]


def test_checkpoints_are_verified_against_their_manifests(tmp_path):
    for step_number, data in ((1, b"good"), (2, b"bad!"), (3, b"short")):
        folder = tmp_path / "checkpoints" / f"step-{step_number:08d}"
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(data)
        wanted = {"bytes": 4, "sha256": hashlib.sha256(b"good").hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({"files": {"x": wanted}}))
    (tmp_path / "checkpoints" / "step-00000004").mkdir()
    told = [what for _, _, what in verify_checkpoints(tmp_path)]
    assert told[0] == "every byte verified"
    assert told[1] == told[2] == "DAMAGED: x is not as it was written"
    assert "manifest.json cannot be used" in told[3]
    assert [what for _, _, what in verify_checkpoints(tmp_path, max_total_bytes=7)][:2] == [
        "every byte verified",
        "sizes verified; bytes: inspect --verify",
    ]


def test_every_axis_says_what_it_shows_in_which_unit(make):
    figures = list(draw_figures([read_run(make(events=EVENTS, outcome=DONE))]))
    assert len(figures) == len(FIGURES)
    units = re.compile(
        r"layer|expert|share|reward|step|second|GiB|nats|minutes|hours|rate|norm|% of peak|rank"
        r"|median"
    )
    for name, _, figure in figures:
        assert any(units.search(axes.get_xlabel()) for axes in figure.axes), name
        for axes in figure.axes:
            words = [text.get_text() for text in axes.get_yticklabels()]
            assert units.search(axes.get_ylabel()) or words[0].isalpha(), name


def test_a_run_that_was_killed_is_told_of_with_its_last_words(make):
    run = make(events=EVENTS)
    word = outcome.Heartbeat(BEGAN_S + 21, "saving", "n1", 7 << 30, LIMIT, "cgroup", None, 0)
    outcome.write_heartbeat(word, outcome.heartbeat_path(run, 0))
    text = checked(write_report([run]))
    assert read_run(run).state == "died"
    assert "it was killed: no outcome.json. Last seen on n1" in text
    assert "while saving: 7.00 GiB of 8.00 GiB" in text


def test_a_status_that_this_version_does_not_know_is_named(make):
    run = read_run(make(outcome=DONE | {"status": "paused"}))
    assert run.state == "unknown"
    assert run.reason == "its outcome.json has the unknown status 'paused'"


def test_a_run_without_a_step_a_torn_line_or_of_an_older_version_has_its_report_too(make):
    checked(
        write_report([make("none", steps=[], evals=False, outcome=DONE | {"status": "failed"})])
    )
    torn = make("torn", outcome=DONE)
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1')
    assert len(read_run(torn).steps) == 10
    old = [{k: row[k] for k in ("step", "loss", "lr", "step_s")} for row in read_run(torn).steps]
    checked(write_report([make("old", steps=old, outcome=DONE)]))
    nulls = make("nulls", steps=[step(1, BEGAN_S, loss=None, grad_norm=None)])
    (nulls / "events.jsonl").unlink()
    checked(write_report([nulls]))


def test_text_of_a_run_cannot_become_html(make):
    bad = "<script>alert(1)</script>"
    run = make(events=[event("warning", BEGAN_S, message=bad)], outcome=DONE | {"reason": bad})
    page = write_report([run]).read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 2, "the warning and the reason are both there"


def test_waits_between_starts_are_no_running_time(make):
    """20 s of work, then 1000 s in a queue, then 10 s more."""
    later = [step(n, BEGAN_S + 1000 + 2 * n, slowest_rank=0) for n in range(11, 16)]
    steps = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)] + later
    again = [event("start", BEGAN_S + 1020, size=4, total_steps=15)]
    run = read_run(make(steps=steps, events=again, evals=False))
    assert summary_metrics(run)["time running"] == "30s in 2 starts"
    assert summary_metrics(run)["goodput (steps that count)"] == "100%"  # 15 x 2 s
    assert run.elapsed_s(BEGAN_S + 500) == 20
    assert run.elapsed_s(BEGAN_S + 1024) == 24
    parts = dict(time_breakdown(run))
    assert parts["compute"] == "21s (70.0%)"  # 15 x (2 - 0.1 - 0.5)
    assert parts["messages, waiting for other ranks included"] == "8s (25.0%)"
    assert parts["total"] == "30s"


def test_a_straggler_is_named_and_even_ranks_are_not_blamed(make):
    """Of 1.0 and 1.4 s the median is 1.2: as the profile and the figure of all ranks have it."""
    said = describe_straggler(read_run(make()))
    assert said.startswith("rank 1 in 9 of 9 steps; it works 1.17 x as long as the median rank, ")
    assert said.endswith(STRAGGLER_ADVICE)
    even = [step(n, BEGAN_S + n, slowest_rank=n % 2) for n in range(1, 11)]
    assert STRAGGLER_ADVICE not in describe_straggler(read_run(make("even", steps=even)))
    none = describe_straggler(read_run(make("none", ranks=False)))
    assert none == "rank 1 in 9 of 9 steps"


def test_several_runs_lie_over_each_other_with_the_settings_that_differ(make, tmp_path):
    runs = [make("a", outcome=DONE), make("b", outcome=DONE, settings="lr: 0.2")]
    assert find_setting_differences([read_run(run) for run in runs]) == [
        ("optim.lr", ["0.1", "0.2"])
    ]
    out = write_report(runs, tmp_path / "both.html")
    text = checked(out)
    assert "2 runs: settings that differ" in text.partition("What came out")[0]
    assert "optim.lr" in text
    figures = {name: figure for name, _, figure in draw_figures([read_run(run) for run in runs])}
    labels = [text.get_text() for text in figures["loss"].legends[0].get_texts()]
    assert labels == ["a: training", "a: held-out", "b: training", "b: held-out"]


def big_run(make, num_steps, num_ranks):
    """A run of many steps on many ranks: starts, saves and actions too."""
    sent = {name: {"all_gather": 5 << 30} for name in ("sent_bytes", "expected_bytes")}
    steps = [
        step(n, BEGAN_S + 2 * n, loss=3 + n % 97 / 97, grad_norm=1 + n % 89 / 89, **sent)
        for n in range(1, num_steps + 1)
    ]
    every = num_steps // 500
    happened = [
        event("checkpoint", BEGAN_S + 2 * n, step=n, bytes=1 << 30, save_s=3.0, blocked_s=0.5)
        for n in range(1, num_steps, every)
    ]
    happened += [
        event(kind, BEGAN_S + 2 * n, step=n, size=num_ranks, action="recompute")
        for n in range(1, num_steps, 20 * every)
        for kind in ("governor", "start")
    ]
    run = make(steps=steps, events=happened, outcome=DONE)
    with (run / "ranks.jsonl").open("w") as file:
        for n in range(num_steps // 200, num_steps + 1, num_steps // 200):
            work_s = [1 + (rank * n % 83) / 800 + (rank == 137) for rank in range(num_ranks)]
            file.write(json.dumps({"step": n, "work_s": work_s}) + "\n")
    return run


def test_ten_thousand_steps_on_512_ranks_give_a_small_page(make):
    assert write_report([big_run(make, 10_000, 512)]).stat().st_size < 500_000


@pytest.mark.soak
def test_a_hundred_thousand_steps_on_512_ranks_are_drawn_in_ten_seconds(make):
    run = big_run(make, 100_000, 512)
    began_s = time.monotonic()
    file = write_report([run])
    took_s = time.monotonic() - began_s
    print(f"{file.stat().st_size:,} bytes in {took_s:.1f} s")
    assert file.stat().st_size < 500_000
    assert took_s < 10


def test_odd_lines_of_any_file_still_give_a_page(make):
    run = make(outcome=DONE)
    odd = [{"step": 5, "work_s": [1.0]}, {"step": 3, "work_s": [2.0, "x"]}, {"step": -7}]
    odd += [{"step": 1e299, "work_s": [1e299, 0, -1]}, {"work_s": [1]}, {"step": 2, "work_s": {}}]
    with (run / "ranks.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in odd)
    begun = event("start", BEGAN_S, counts={"tokens": "many", "rows": None}, remarks="none")
    begun |= {"hosts": ["n1"], "launcher": 3, "links": {}, "command": {"a": 1}}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(begun) + "\n")
    checked(write_report([run]))


def test_a_manifest_leads_to_no_file_outside_of_its_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    empty = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    (tmp_path / "outside").write_bytes(b"")
    for name in ("/dev/zero", "../../outside", f"{tmp_path}/outside"):
        (folder / "manifest.json").write_text(json.dumps({"files": {name: empty}}))
        [(_, _, told)] = verify_checkpoints(tmp_path)
        assert told.startswith("DAMAGED"), name


def test_the_slow_rank_is_the_dark_one(make):
    """Rank 1 works 1.4 s beside 1.0 s: 1.17 and 0.83 of the median."""
    figures = {name: figure for name, _, figure in draw_figures([read_run(make())])}
    [image] = figures["rank-steps"].axes[0].images
    assert image.get_array().shape == (2, 10)
    assert [round(float(row[0]), 2) for row in image.get_array()] == [0.83, 1.17]


def test_the_newest_tokens_of_experts_are_drawn_by_their_layers_mean(make):
    """Layers 1 and 4, of which the second has fewer experts; damaged lines are left out."""
    run, layers = make(), {"layers": [1, 4]}
    lines = [
        TABLE | {"step": 3},
        {"step": 8, "since": 3, **layers, "tokens": [[30, 0, 60], [0, 0]]},
        {"step": 9, "since": 8, **layers, "tokens": [[1, "x", 1], [1, 1]]},
        {"step": 9, "since": 8, "layers": [1], "tokens": [[1, 1, 1], [1, 1]]},
        {"step": 9, "since": None, **layers, "tokens": [[1, 1, 1], [1, 1]]},
        {"step": 9, "since": 8, "layers": [], "tokens": []},
    ]
    (run / "experts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {name: figure for name, _, figure in draw_figures([read_run(run)])}
    axes = figures["experts"].axes[0]
    [image] = axes.images
    assert image.get_array().filled(-1).tolist() == [[1, 0, 2], [0, 0, -1]]
    assert axes.get_title() == "steps 4 to 8"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "4"]
    others = {name for name, _, _ in draw_figures([read_run(make("dense")), read_run(run)])}
    assert "experts" not in others


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "nowhere"], "nowhere is not a folder; expected the run directory"),
        (["report", "."], "is a folder without config.resolved.yaml"),
        (["report", "run", "--out", "x.pdf"], "expected the name of an .html file"),
        (["report", "run", "--out", "/proc/x/y.html"], "cannot be written"),
        (["watch", "nowhere"], "nowhere is not a folder"),
        (["watch", "run", "--every", "0"], "--every: found 0, expected at least 0.01"),
    ],
)
def test_wrong_uses_are_told_in_one_message(make, tmp_path, monkeypatch, capsys, arguments, said):
    make()
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_leads_to_its_run(make):
    run = make(outcome=DONE)
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert read_run(run / "checkpoints" / "step-00000010").path == run


def test_growing_files_are_read_once_and_replaced_ones_anew(tmp_path):
    file = tmp_path / "lines"
    lines = LineReader(file)
    assert lines.read() == []
    file.write_text('{"a": 1}\n{"a"')
    assert lines.read() == [{"a": 1}]
    with file.open("a") as opened:
        opened.write(': 2}\nno json\n[3]\n{"a": 4}\n')
    assert lines.read() == [{"a": 1}, {"a": 2}, {"a": 4}]
    (tmp_path / "other").write_text('{"b": 1}\n')
    (tmp_path / "other").rename(file)
    assert lines.read() == [{"b": 1}]


def seen(run):
    console = Console(file=io.StringIO(), width=120)
    console.print(watching._render_run(run))
    return console.file.getvalue()


def test_watch_shows_what_a_person_asks_first(make):
    text = seen(read_run(make(events=EVENTS)))
    for words in (
        *("step 10/10", "loss", "2.0000", "█▇", "50% of 8.00 GiB", "micro-batches of 1"),
        *("layout", "shard 2", "newest save", "step 4", "1 action", "slowest rank", "rank 1"),
    ):
        assert words in text, words
    assert "no optimizer step yet" in seen(read_run(make("young", steps=[], evals=False)))


def test_a_run_that_writes_is_running_until_it_is_silent_for_long(make, monkeypatch):
    run = make()
    assert read_run(run).state == "unknown"
    os.utime(run / "metrics.jsonl")
    assert read_run(run).state == "running"
    word = outcome.Heartbeat(time.time(), "training step 3", "n1", 1, 2, "x", None, 0)
    outcome.write_heartbeat(word, outcome.heartbeat_path(run, 0))
    assert read_run(run).reason == "it is training step 3"
    text = checked(write_report([run]))
    assert re.search(r"Now +it is training step 3 +So far +Training loss", text)
    assert f"python -m hpc_tune watch {run}" in text


def test_a_run_that_was_killed_on_this_host_is_not_running_any_more(make, capsys):
    run = make()
    word = outcome.Heartbeat(time.time(), "training step 3", "n1", 1, 2, "x", None, 0)
    outcome.write_heartbeat(word, outcome.heartbeat_path(run, 0))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = replace(make_owner("abc", run), pid=process.pid)
        mark = replace(mark, start=owner._process_start_ticks(process.pid))
        (run / owner.LOCK_FILE).write_text(json.dumps(asdict(mark)))
        assert read_run(run).state == "running"
        assert cli.main(["inspect", str(run)]) == 0
        assert "none yet, the run is training step 3" in capsys.readouterr().out
        process.kill()
    assert read_run(run).state == "died"
    assert cli.main(["inspect", str(run)]) == 0
    assert "outcome: it was killed: no outcome.json" in capsys.readouterr().out


def test_a_run_that_is_silent_for_seconds_says_so(make, capsys):
    run = make()
    word = outcome.Heartbeat(time.time() - 20, "training step 3", "n1", 1, 2, "x", None, 0)
    outcome.write_heartbeat(word, outcome.heartbeat_path(run, 0))
    assert read_run(run).reason == "it is training step 3, no sign of life for 20 s"
    assert cli.main(["inspect", str(run)]) == 0
    assert "training step 3, no sign of life for 20 s" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["no such model", None])
def test_a_run_that_failed_at_its_start_has_no_checkpoint_and_says_why(make, capsys, reason):
    ending = {"status": "failed", "reason": reason, "step": None, "exit_code": 2}
    run = make(outcome=ending if reason else None)
    assert cli.main(["export", str(run), "--to", "adapter"]) == 2
    why = reason or "it has not reached a save"
    assert f"{run} has no checkpoint: {why}" in capsys.readouterr().err


def test_watch_ends_with_the_run(make, monkeypatch):
    run = make(outcome=DONE)
    monkeypatch.setattr(watching.Console, "is_terminal", True)
    assert cli.main(["watch", str(run)]) == 0


@pytest.mark.parametrize(("values", "line"), [([1.0, 2.0, 3.0], "▁▅█"), ([2.0, 2.0], "▁▁")])
def test_a_sparkline_goes_from_the_least_to_the_most(values, line):
    assert watching.sparkline(values) == line
