"""A start that is refused changes nothing in a run that has checkpoints, and leaves no new one."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hpc_tune.model.builtin import write_tiny_model
from tests.ranks.test_bad_input import BASE
from tests.support.training import many_runs, train

TEMPLATES = [
    "{% for m in messages %}<" + name + " {{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    for name in ("trained", "other")
]


def content_of(run_dir: Path) -> dict[str, bytes]:
    """Return what tells of the run, by name: not the logs of its starts, nor prepared data."""
    files = [run_dir / "config.resolved.yaml", run_dir / "chat_template.jinja"]
    files += (run_dir / "checkpoints").rglob("*.*")
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in files}


TELLS = {"outcome.json", "events.jsonl"}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.path=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["tune.method=lora", "tune.targets=[no_such_layer]"], "no_such_layer"),
        (["parallel.shard=3"], "parallel.shard=3"),
        (["memory.host_limit=1MiB"], "memory"),
        (["tune.method=lora", "tune.init_from=/nowhere"], "/nowhere"),
        (["checkpoint.resume=/nowhere"], "/nowhere"),
    ],
    ids=["data", "targets", "layout", "memory", "adapter", "checkpoint"],
)
def test_in_a_new_run_directory(tmp_path, ranks, words, said):
    run_dir = tmp_path / "run"
    done = train([*BASE, "data.path=builtin:pydocs:heldout", f"run.dir={run_dir}", *words], n=ranks)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "this start left" not in done.stderr
    assert {path.name for path in run_dir.iterdir()} <= TELLS


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_after_data_was_prepared_it_alone_stays_and_is_told(tmp_path, ranks):
    (tmp_path / "held_out.jsonl").write_text('{"no": "text"}\n')
    words = [*BASE, "data.path=builtin:pydocs:heldout", f"run.dir={tmp_path}"]
    done = train([*words, f"data.eval_path={tmp_path / 'held_out.jsonl'}"], n=ranks)
    assert done.returncode == 2, done.stderr
    assert f"this start left prepared data in run.dir={tmp_path}\n" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == TELLS | {"held_out.jsonl", "data"}


@pytest.mark.full
def test_with_other_settings_data_or_weights(tmp_path):
    write_tiny_model(tmp_path / "model")
    for number, text in enumerate(TEMPLATES):
        (tmp_path / f"{number}.jinja").write_text(text)
    run_dir, template = tmp_path / "run", "data.chat_template={}/{}.jinja".format
    words = [*BASE, "tune.method=lora", "data.path=builtin:pydocs:heldout", f"run.dir={run_dir}"]
    words += [f"model.path={tmp_path / 'model'}", template(tmp_path, 0)]
    assert many_runs(1, [{"overrides": words}], tmp_path) == [0]
    before = content_of(run_dir)
    assert before["chat_template.jinja"].decode() == TEMPLATES[0]

    shutil.copytree(tmp_path / "model", tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    save_file({name: values.flip(0) for name, values in load_file(weights).items()}, weights)
    for changed, said in (
        ("tune.rank=3", "tune.rank: 16 in the checkpoint, 3 now"),
        (template(tmp_path, 1), "is not the data this run was trained on"),
        (f"model.path={tmp_path / 'other'}", "model.path: it has other weights"),
    ):
        done = train([*words, "train.max_steps=4", changed])
        assert done.returncode in (1, 2), done.stderr
        assert said in done.stderr
        assert content_of(run_dir) == before
        assert not (run_dir / "config.starting.yaml").exists()
    done = train([*words, "train.max_steps=4"])
    assert done.returncode == 0, done.stderr
    assert "max_steps: 4" in (run_dir / "config.resolved.yaml").read_text()
