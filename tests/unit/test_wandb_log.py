import struct
import time
from pathlib import Path

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.errors import ConfigError
from hpc_tune.train import wandb_log
from hpc_tune.train.wandb_log import WandbLog

wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)


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
    """Return (loss by step, tags, names, ids) of what lies in a run directory for `wandb sync`."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, tags, names, ids = {}, set(), set(), set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in framed(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                tags |= set(record.run.tags)
                names.add(record.run.display_name)
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
                rows[int(items["step"])] = float(items["loss"])
    return rows, tags, names, ids


def opened(run_dir, config):
    return WandbLog(run_dir, config.run, config.model_dump(mode="json"))


def wait_for_another_second():
    """W&B names a start by its second; two starts of a run are never in the same one."""
    until_s = int(time.time()) + 1
    while time.time() < until_s:
        time.sleep(0.02)


def test_figures_lie_in_the_run_directory_and_a_resume_goes_on_in_the_same_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = load_config(None, [f"run.dir={run_dir}", "run.name=first", "run.tags=[a,b]"])
    for steps in (range(1, 4), range(4, 6)):
        wait_for_another_second()
        told = opened(run_dir, config)
        for step in steps:
            told.write(step, {"loss": step / 2})
        told.close()
    wanted, until_s = {step: step / 2 for step in range(1, 6)}, time.monotonic() + 120
    while (found := records(run_dir))[0] != wanted and time.monotonic() < until_s:
        time.sleep(0.1)  # a process of W&B's own writes the files
    rows, tags, names, ids = found
    assert rows == wanted
    assert (tags, names, len(ids)) == ({"a", "b"}, {"first"}, 1)


def test_what_wandb_throws_costs_its_figures_and_not_the_run(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(wandb_log.log, "warning", lambda text, *values: said.append(text % values))
    told = opened(tmp_path, load_config(None, [f"run.dir={tmp_path}"]))
    told.write(1, {"loss": object()})
    told.write(2, {"loss": object()})
    told.close()
    assert len(said) == 1


def test_where_it_lies_is_told_as_wandb_sync_wants_it(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(wandb_log.log, "info", lambda text, *values: said.append(text % values))
    opened(tmp_path, load_config(None, [f"run.dir={tmp_path}"])).close()
    [line] = said
    assert list(Path(line.split("wandb sync ")[1]).glob("run-*.wandb"))


def test_wandb_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(wandb_log.importlib.util, "find_spec", lambda name: None)
    wandb_log.require_wandb(False)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_tune\[wandb\]'"):
        wandb_log.require_wandb(True)


def test_a_wrong_mode_is_refused_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ConfigError, match="WANDB_MODE=onlin"):
        opened(tmp_path, load_config(None, [f"run.dir={tmp_path}"]))
