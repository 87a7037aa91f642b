"""What the report says of each source of a mixture, and what inspect does."""

import io
import json
from dataclasses import asdict

from rich.console import Console

from hpc_tune.checkpoint.locate import describe_checkpoints
from hpc_tune.data.order import MixturePhase, MixtureSource
from hpc_tune.report import watch as watching
from hpc_tune.report.page import source_rows
from hpc_tune.report.read import read_run
from tests.support.training import give_manifest

MIXTURE = [
    {"name": "chat", "asked": "weight 0.75", "learned_per_pass": 50, "rows": 3},
    {"name": "code", "asked": "weight 0.25", "learned_per_pass": 1000, "rows": 1},
]


def run_of(folder, start, evals):
    steps = [
        {"step": n, "step_s": 1.0, "time": 1e9 + n, "loss": 1.0, "source_tokens": tokens}
        for n, tokens in enumerate(({"chat": 100, "code": 20}, {"chat": 50, "code": 30}), 1)
    ]
    rows = [*steps, *({"step": n, "eval_loss": 1.0, "eval_losses": e} for n, e in enumerate(evals))]
    started = {"kind": "start", "time": 1e9, "step": None, "rank": 0, **start}
    (folder / "config.resolved.yaml").write_text("run: {name: null}")
    for name, lines in (("metrics", rows), ("events", [started])):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return read_run(folder)


def test_shares_and_passes_are_those_of_the_tokens_that_were_learned(tmp_path):
    evals = [{"chat": 2.0, "math": 3.0}, {"chat": 1.5, "math": 3.25}]
    run = run_of(tmp_path, {"mixture": MIXTURE}, evals)
    assert list(source_rows(run)) == [
        ("chat", "weight 0.75", "150", "75.00%", "3.00", "2.0000 → 1.5000"),
        ("code", "weight 0.25", "50", "25.00%", "0.05", ""),
        ("math", "held out", "", "", "", "3.0000 → 3.2500"),
    ]
    console = Console(width=120, file=io.StringIO())
    console.print(watching._render_metrics(run))
    shown = console.file.getvalue()
    assert "  math" in shown
    assert "3.2500" in shown


def test_a_start_that_says_nothing_or_something_odd_leaves_what_the_steps_say(tmp_path):
    for odd in ([], [3, None], [{"name": 5, "learned_per_pass": "x"}]):
        names = [row[0] for row in source_rows(run_of(tmp_path, {"mixture": odd}, []))]
        assert {"chat", "code"} <= {*names}


def test_inspect_says_what_the_newest_checkpoint_has_had_of_each_source(tmp_path):
    parts = {name: MixtureSource("hash", None, 10, 100, weight=0.5) for name in ("chat", "code")}
    loader = {"rows": 12, "phases": [asdict(MixturePhase(parts))]}
    for step, state in ((1, {}), (2, loader)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        give_manifest(folder, loader=state)
    lines, are_valid = describe_checkpoints(tmp_path, check_bytes=False)
    assert are_valid
    said = "step-00000002  source {}, weight 0.5: 6 rows, 0.60 passes, 60 learned tokens, 50.00%"
    assert [said.format(name) in "\n".join(lines) for name in parts] == [True, True]
    give_manifest(folder, loader={"rows": 12, "phases": []})
    lines, _ = describe_checkpoints(tmp_path, check_bytes=False)
    assert "its mixture cannot be read: it names no phase" in lines[-1]
