"""Each tracker for real where it is installed, and what one that fails costs."""

import contextlib
import dataclasses
import json
import os
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_tune import trackers
from hpc_tune.config.load import load_config, setting_names
from hpc_tune.errors import ConfigError
from hpc_tune.trackers import (
    RunMetadata,
    TensorBoardEventFile,
    Trackers,
    list_trackers,
    open_trackers,
    require_trackers,
)
from hpc_tune.train.metrics import MetricsWriter
from tests.ranks.test_bad_input import mounted
from tests.unit.train.test_metrics import STEP

SETTINGS = ["run.name=first", "run.tags=[a,b]", "run.notes=why it is made", "train.seed=7"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def said(monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(trackers.log, level, lambda text, *values: lines.append(text % values))
    return lines


def opened(run_dir, names, start_step=0, words=SETTINGS):
    run_dir.mkdir(exist_ok=True)
    words = [*words, f"run.dir={run_dir}", f"run.trackers=[{names}]", "run.tensorboard=false"]
    config = load_config(None, words)
    run, settings = config.run, config.model_dump(mode="json")
    facts = RunMetadata(run_dir, run.name, run.tags, run.notes, "c0ffee", settings, start_step)
    return open_trackers(run, facts)


def two_starts(run_dir, name, look=lambda: None):
    """Track steps 1 to 3, and 4 and 5 in a second start that resumes; ``look`` before each end."""
    for steps in (range(1, 4), range(4, 6)):
        wait_for_another_second()
        told = opened(run_dir, name, start_step=steps[0] - 1)
        for step in steps:
            told.write(step, {"loss": step / 2, "sent_bytes/all_reduce": 8})
        look()
        told.close()


HALVES = {step: step / 2 for step in range(1, 6)}


BLOCK, FILE_HEADER, HEADER = 1 << 15, 7, 7


def framed(data):
    """Yield the records of a .wandb file: LevelDB's log format, behind a header of its own."""
    place, record = FILE_HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def records(run_dir):
    """Return (loss by step, runs) of what lies in a run directory for `wandb sync`."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, runs = {}, []
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in framed(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
                rows[int(items["step"])] = float(items["loss"])
    return rows, runs


def wait_for_another_second():
    """W&B names a start by its second; two starts of a run are never in the same one."""
    until_s = int(time.time()) + 1
    while time.time() < until_s:
        time.sleep(0.02)


@pytest.fixture(params=["tensorboard", "wandb", "mlflow", "trackio"])
def installed(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


def test_wandb_files_lie_in_the_run_directory_and_a_resume_goes_on_in_the_same_run(tmp_path, said):
    pytest.importorskip("wandb", reason="wandb is not installed")
    two_starts(tmp_path / "run", "wandb")
    until_s = time.monotonic() + 120
    while (found := records(tmp_path / "run"))[0] != HALVES and time.monotonic() < until_s:
        time.sleep(0.1)  # a process of W&B's own writes the files
    rows, runs = found
    assert rows == HALVES
    assert {(run.run_id, run.display_name, run.notes) for run in runs} == {
        (runs[0].run_id, "first", "why it is made")
    }
    assert {"a", "b"} == {tag for run in runs for tag in run.tags}
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert json.loads(config["git_commit"]) == "c0ffee"
    assert json.loads(config["train"])["seed"] == 7
    for line in said:  # it is told as wandb sync wants it
        assert list(Path(line.split("wandb sync ")[1]).glob("run-*.wandb"))
    assert len(said) == 2


def test_mlflow_files_lie_in_the_run_directory_and_a_resume_goes_on_in_the_same_run(tmp_path, said):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())

    def only_run():
        [experiment] = [e for e in client.search_experiments() if e.name == "hpc_tune"]
        [run] = client.search_runs([experiment.experiment_id])
        return run

    statuses = []
    two_starts(tmp_path / "run", "mlflow", lambda: statuses.append(only_run().info.status))
    assert said == []
    assert statuses == ["RUNNING", "RUNNING"]
    run = only_run()
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == HALVES
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    tags = run.data.tags
    assert tags["mlflow.note.content"] == "why it is made"
    assert (tags["tags"], tags["mlflow.source.git.commit"]) == ("a, b", "c0ffee")
    assert run.data.params["train.seed"] == "7"
    assert len(run.data.params) == len(setting_names())


def test_trackio_files_lie_in_the_run_directory_and_a_resume_goes_on_in_the_same_run(tmp_path):
    """In a process of its own: trackio reads its folder's name when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    call = f"two_starts(Path({str(tmp_path / 'run')!r}), 'trackio')"
    text = "from pathlib import Path; from tests.unit.test_trackers import two_starts; "
    text += call + "; from trackio import SQLiteStorage as Storage; import json; "
    text += "[run] = Storage.get_runs('hpc_tune'); "
    text += "rows = {r['step']: r['loss'] for r in Storage.get_logs('hpc_tune', run)}; "
    text += "print(json.dumps([run, rows, Storage.get_run_config('hpc_tune', run)]))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO")}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    name, rows, config = json.loads(done.stdout)
    assert (name, {int(step): loss for step, loss in rows.items()}) == ("first", HALVES)
    assert (config["tags"], config["notes"]) == ("a, b", "why it is made")
    assert (config["git_commit"], config["train.seed"]) == ("c0ffee", 7)
    assert list((tmp_path / "run" / "trackio").glob("*.db"))


def test_tensorboard_has_the_figures_and_a_page_about_the_run(tmp_path):
    two_starts(tmp_path / "run", "tensorboard")
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {event.step: event.value for event in read.Scalars("loss")} == HALVES
    text = read.Tensors("run")[0].tensor_proto.string_val[0].decode()
    for line in ('name: "first"', 'notes: "why it is made"', 'git commit: "c0ffee"'):
        assert f"    {line}\n" in text
    assert "    train.seed: 7\n" in text


class Broken:
    """Raises from the second step on, and when it is closed."""

    def write(self, step, scalars):
        if step > 1:
            raise RuntimeError("no more\nof this")

    close = write


def test_a_tracker_that_raises_is_reported_once_and_the_others_and_the_run_go_on(
    tmp_path, said, monkeypatch
):
    def refuse(facts):
        raise OSError("no network to https://me:secret@there/x")

    openers = {"wandb": lambda facts: Broken(), "mlflow": refuse}
    monkeypatch.setattr(trackers, "OPENERS", trackers.OPENERS | openers)
    told = opened(tmp_path / "run", "tensorboard,wandb,mlflow")
    metrics = MetricsWriter(tmp_path / "run", 4, 0, told)
    for step in range(1, 5):
        metrics.record_step(dataclasses.replace(STEP, step=step, comm_s=0.0))
    metrics.close()
    assert [line for line in said if line.startswith("tracker ")] == [
        "tracker mlflow cannot be opened, and the run continues without it: OSError: "
        "no network to https://there/x",
        "tracker wandb fails, and the run continues without it: RuntimeError: no more of this",
    ]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    [file] = (tmp_path / "run" / "tensorboard").iterdir()
    assert file.stat().st_size > 1000


def test_one_that_fails_at_the_end_is_reported_too(said):
    told = Trackers()
    told.open(
        "wandb",
        lambda: dataclasses.make_dataclass(
            "Full",
            [],
            namespace={"write": lambda self, step, scalars: None, "close": lambda self: 1 / 0},
        )(),
    )
    told.close()
    [line] = said
    assert line.startswith("tracker wandb may lack the last metrics")


def test_what_a_full_disk_refuses_costs_figures_and_not_the_run(tmp_path, installed, said, capfd):
    """Opened on a disk with room, which then is full."""
    place = tmp_path / "disk"
    place.mkdir()
    with mounted(place, "size=8m"):
        told = opened(place / "run", installed)
        told.write(1, {"loss": 1.0})
        with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(1 << 16)):
                pass
        for step in range(2, 400):
            told.write(step, {f"value/{i}": float(i) for i in range(40)})
        told.close()
    reports = [line for line in said if line.startswith("tracker ")]
    assert len(reports) <= 1
    if installed == "mlflow":
        assert "No space left on device" in reports[0]


def test_one_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(trackers, "is_importable", lambda name: False)
    require_trackers(load_config(None, ["run.tensorboard=false"]).run)
    for name, package in (("mlflow", "mlflow-skinny"), ("tensorboard", "tensorboard")):
        words = ["run.tensorboard=false", f"run.trackers=[{name}]"]
        with pytest.raises(ConfigError, match=rf"pip install {package},"):
            require_trackers(load_config(None, words).run)


def test_the_default_one_is_left_out_with_a_word_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(trackers, "is_importable", lambda name: False)
    said = []
    monkeypatch.setattr(trackers.log, "warning", said.append)
    run = load_config(None, []).run
    require_trackers(run)
    assert list_trackers(run) == []
    (line,) = said
    assert line.startswith("tensorboard is not installed, so no metrics are written for it; python")


def test_a_folder_of_its_name_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "tracker_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trackers, "list_trackers", lambda run: ["tracker_of_mine"])
    with pytest.raises(ConfigError, match="not installed"):
        require_trackers(load_config(None, []).run)


def test_a_wrong_mode_of_wandb_is_refused_at_once(monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ConfigError, match="WANDB_MODE=onlin: expected one of online, offline"):
        require_trackers(load_config(None, ["run.trackers=[wandb]"]).run)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["tensorboard"]),
        (["run.tensorboard=false"], []),
        (["run.trackers=[mlflow,tensorboard]"], ["tensorboard", "mlflow"]),
        (["run.tensorboard=false", "run.trackers=[wandb,tensorboard]"], ["wandb", "tensorboard"]),
    ],
)
def test_which_trackers_a_configuration_asks_for(words, names):
    assert list_trackers(load_config(None, words).run) == names


def test_a_setting_that_is_gone_names_its_successor():
    with pytest.raises(ConfigError, match=r"run.wandb: no such key .*use run.trackers=\[wandb\]"):
        load_config(None, ["run.wandb=true"])


# -- What TensorBoard reads in the event files of a run.


def scalars(folder):
    """Return {tag: [(step, value), ...]} as TensorBoard shows them."""
    read = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, round(e.value, 6)) for e in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_values_are_read_by_tensorboard(tmp_path):
    file = TensorBoardEventFile(tmp_path, 0)
    for step in (1, 2):
        file.write(step, {"loss": 1 / step, "sent_bytes/broadcast": 2.0**40})
    file.close()
    file.write(3, {"loss": 0.0})
    assert scalars(tmp_path) == {
        "loss": [(1, 1.0), (2, 0.5)],
        "sent_bytes/broadcast": [(1, 2.0**40), (2, 2.0**40)],
    }


def test_the_steps_that_a_resume_does_again_are_shown_once(tmp_path):
    for start_step, value in [(0, 1.0), (2, 5.0)]:
        file = TensorBoardEventFile(tmp_path, start_step)
        for step in range(start_step + 1, 5):
            file.write(step, {"loss": value})
        file.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]}


def test_what_a_full_disk_does_not_take_is_missing_and_the_rest_is_read(tmp_path):
    file = TensorBoardEventFile(tmp_path, 0)
    file.write(1, {"loss": 1.0})
    [path] = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        file.write(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(3, {"loss": 3.0})
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (3, 3.0)]}


def test_a_folder_that_cannot_be_made_is_said_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/tensorboard"):
        TensorBoardEventFile(tmp_path / "file" / "tensorboard", 0)
