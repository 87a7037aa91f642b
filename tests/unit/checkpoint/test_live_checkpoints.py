"""Commands that read the checkpoints of a run which goes on, and removes the one they read."""

import shutil

import pytest

from hpc_tune.checkpoint import store as storing
from hpc_tune.checkpoint.locate import describe_checkpoints, locate, retry_with_newest_checkpoint
from hpc_tune.checkpoint.store import Store
from hpc_tune.errors import CheckpointError
from tests.unit.checkpoint.test_checkpoint_state import state


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A run that keeps one checkpoint, and saves another in the middle of each of three looks."""
    store, step = Store(tmp_path / "checkpoints", keep=1), 10

    def save(*_):
        nonlocal step
        step += 10
        if step <= 40:
            store.commit(store.begin(step), state(step=step).to_json(), [])

    store.commit(store.begin(10), state(step=10).to_json(), [])
    real = storing._read_manifest

    def read(path):
        if path.parent == store.folder:
            save()
        return real(path)

    monkeypatch.setattr(storing, "_read_manifest", read)
    return tmp_path


def test_the_newest_is_found_though_each_is_removed_while_it_is_read(live):
    assert locate(live).checkpoint.name == "step-00000040"


def test_the_list_names_what_is_there_and_calls_nothing_damaged(live):
    lines, all_valid = describe_checkpoints(live, check_bytes=True)
    assert all_valid
    assert [line.split()[0] for line in lines] == ["step-00000040"]


def test_what_is_done_with_a_checkpoint_that_goes_is_done_with_the_newest(tmp_path):
    store = Store(tmp_path / "checkpoints", keep=1)
    store.commit(store.begin(10), state(step=10).to_json(), [])
    run, used = locate(tmp_path), []

    def work(checkpoint):
        used.append(int(checkpoint.name[5:]))
        if len(used) < 3:
            store.commit(store.begin(10 + used[-1]), state(step=10).to_json(), [])
        return (checkpoint / "manifest.json").stat().st_size

    assert retry_with_newest_checkpoint(run, tmp_path, work) > 0
    assert used == [10, 20, 30]
    with pytest.raises(CheckpointError, match="of its own"):
        retry_with_newest_checkpoint(locate(tmp_path), tmp_path, failing)
    shutil.rmtree(store.folder)
    with pytest.raises(FileNotFoundError):
        retry_with_newest_checkpoint(run, tmp_path, work)


def failing(checkpoint):
    raise CheckpointError("of its own")
