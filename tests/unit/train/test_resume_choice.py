"""Which checkpoint a start goes on from."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_tune.checkpoint import store as store_module
from hpc_tune.checkpoint.store import MANIFEST, Store
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError, UnreadableError
from hpc_tune.train.resume import find_checkpoint
from hpc_tune.world.comm import ResumePoint
from tests.unit.checkpoint.test_checkpoint_state import state
from tests.unit.train.test_data_inputs import ALONE


def saved(folder: Path, config: RunConfig, *step_folders: int) -> Store:
    folder.mkdir(exist_ok=True)
    store = Store(folder / "checkpoints", keep=9)
    for step in step_folders:
        store.commit(store.begin(step), state(config, step=step).to_json(), [])
    return store


def started(store: Store, config: RunConfig) -> Path | None:
    job = SimpleNamespace(setup_comm=ALONE, config=config, store=store, resume_point=ResumePoint())
    return find_checkpoint(job)


def flip(manifest: Path) -> None:
    content = manifest.read_bytes()
    assert b'"step": 8' in content
    manifest.write_bytes(content.replace(b'"step": 8', b'"step": 9'))


@pytest.mark.parametrize("wanted", ["PATH", "none", "auto"])
def test_the_same_command_again_goes_on_where_it_was_though_the_newest_is_damaged(tmp_path, wanted):
    first = saved(tmp_path / "first", RunConfig(), 2).step_folders()[0]
    resume = {"resume": str(first) if wanted == "PATH" else wanted}
    config = RunConfig.model_validate({"checkpoint": resume})
    own = saved(tmp_path / "own", config, 4, 6, 8)
    assert started(own, config) == own.step_folders()[-1]
    flip(own.step_folders()[-1] / MANIFEST)
    assert started(own, config) == own.step_folders()[1]


def test_another_command_starts_as_it_says(tmp_path):
    own = saved(tmp_path, RunConfig(), 4, 6)
    older = RunConfig.model_validate({"checkpoint": {"resume": str(own.step_folders()[0])}})
    assert started(own, older) == own.step_folders()[0]
    with pytest.raises(ConfigError, match="holds checkpoints"):
        started(own, RunConfig.model_validate({"checkpoint": {"resume": "none"}}))


def test_nothing_older_is_taken_in_place_of_one_that_cannot_be_read(tmp_path, monkeypatch):
    own = saved(tmp_path, RunConfig(), 4, 6)
    newest, real = own.step_folders()[-1] / MANIFEST, Path.open

    def fail(path, *args, **more):
        if path == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **more)

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(store_module.time, "sleep", lambda _: None)
    with pytest.raises(UnreadableError, match="Input/output error"):
        started(own, RunConfig())
