import errno
import hashlib
import json
import logging
import math
import os
import shutil
from pathlib import Path

import pytest

from hpc_tune.checkpoint import store as store_module
from hpc_tune.checkpoint.store import MANIFEST, Store, read_state, verify_checkpoint
from hpc_tune.errors import CheckpointError, UnreadableError
from hpc_tune.log import log
from hpc_tune.model.regions import WrittenFile


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints", keep=3)


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.WARNING, log.name):
        yield lambda: [record.getMessage() for record in caplog.records]


def put(folder: Path, name: str, content: bytes) -> WrittenFile:
    (folder / name).write_bytes(content)
    return WrittenFile(name, len(content), hashlib.sha256(content).hexdigest())


def save(store: Store, step: int) -> Path:
    temporary = store.begin(step)
    files = [put(temporary, f"rank-{r:05d}.safetensors", b"%d-%d" % (step, r) * 9) for r in (0, 1)]
    return store.commit(temporary, {"step": step}, files)


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_store_without_a_folder_has_no_checkpoint(store):
    assert store.step_folders() == []
    assert store.latest_checkpoint() is None


def test_what_is_committed_is_found_verifies_and_gives_its_state_back(store):
    path = save(store, 100)
    assert path == store.folder / "step-00000100"
    assert store.latest_checkpoint() == path
    verify_checkpoint(path)
    assert read_state(path) == {"step": 100}
    assert (path / "rank-00001.safetensors").read_bytes() == b"100-1" * 9


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_of_all_shares_exactly_one_finds_a_damaged_file(store, parts):
    path = save(store, 100)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[::-1])
        found = []
        for part in range(parts):
            try:
                verify_checkpoint(path, part, parts)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1
        assert f"{name} is damaged" in found[0]
        (path / name).write_bytes(content)


def test_the_manifest_lists_size_and_hash_of_each_file(store):
    manifest = json.loads((save(store, 7) / MANIFEST).read_text())
    content = b"7-0" * 9
    assert manifest["files"]["rank-00000.safetensors"] == {
        "bytes": 27,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_checkpoints_are_ordered_by_step_not_by_name(store):
    for step in (99_999_999, 5, 100_000_000):
        (store.folder / f"step-{step:08d}").mkdir(parents=True)
    assert [p.name for p in store.step_folders()] == [
        "step-00000005",
        "step-99999999",
        "step-100000000",
    ]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay_and_older_ones_go(tmp_path, keep):
    store = Store(tmp_path, keep)
    for step in (10, 20, 30, 40):
        save(store, step)
        assert store.latest_checkpoint() == tmp_path / f"step-{step:08d}"
    assert names(store) == [f"step-{step:08d}" for step in (10, 20, 30, 40)[-keep:]]


def test_every_kth_stays_as_well(tmp_path):
    store = Store(tmp_path, keep=1, keep_every=20)
    for step in (10, 20, 30, 40, 50):
        save(store, step)
    assert names(store) == ["step-00000020", "step-00000040", "step-00000050"]


def test_the_best_stays_as_well_until_there_is_a_better_one(tmp_path):
    store = Store(tmp_path, keep=1, keep_best=True)
    kept = []
    for step, loss in ((10, 3.0), (20, 2.0), (30, None), (40, 2.5), (50, 2.0), (60, 2.2)):
        temporary = store.begin(step)
        store.commit(temporary, {"step": step, "eval_loss": loss}, [])
        kept.append([int(name[5:]) for name in names(store)])
    assert kept == [[10], [20], [20, 30], [20, 40], [50], [50, 60]]


def test_the_best_of_each_held_out_data_stays(tmp_path):
    store = Store(tmp_path, keep=1, keep_best=True)
    for step, loss, held_out in ((10, 2.0, "a"), (20, 3.0, "a"), (30, 5.0, "b"), (40, 6.0, "b")):
        state = {"step": step, "eval_loss": loss, "held_out": held_out}
        store.commit(store.begin(step), state, [])
    assert [int(name[5:]) for name in names(store)] == [10, 30, 40]


def test_a_loss_that_is_measured_late_makes_a_checkpoint_the_best(tmp_path, warnings):
    store = Store(tmp_path, keep=1, keep_best=True)
    path = save(store, 10)
    store.change_state(10, {"eval_loss": 1.5})
    store.change_state(11, {"eval_loss": 0.5})  # there is none
    verify_checkpoint(path)
    assert read_state(path) == {"step": 10, "eval_loss": 1.5}
    save(store, 20)
    save(store, 30)
    assert names(store) == ["step-00000010", "step-00000030"]
    tear(path / MANIFEST)
    store.change_state(10, {"eval_loss": 0.1})
    assert f"{path} stays without its held-out loss" in warnings()[0]


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a .tmp folder": lambda p: p.rename(p.with_name(p.name + ".tmp")),
    "no manifest": lambda p: (p / MANIFEST).unlink(),
    "an empty manifest": lambda p: (p / MANIFEST).write_bytes(b""),
    "a torn manifest": lambda p: tear(p / MANIFEST),
    "a flipped bit in the manifest": lambda p: flip(p / MANIFEST),
    "a manifest that is a list": lambda p: (p / MANIFEST).write_text("[]"),
    "a torn file": lambda p: tear(p / "rank-00001.safetensors"),
    "a longer file": lambda p: (p / "rank-00000.safetensors").open("ab").write(b"x"),
    "a flipped bit in a file": lambda p: flip(p / "rank-00000.safetensors"),
    "a missing file": lambda p: (p / "rank-00001.safetensors").unlink(),
    "a folder in a file's place": lambda p: (
        (p / "rank-00001.safetensors").unlink(),
        (p / "rank-00001.safetensors").mkdir(),
    ),
    "an empty folder": lambda p: [file.unlink() for file in p.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(store, warnings, damage):
    before, newest = save(store, 10), save(store, 20)
    DAMAGES[damage](newest)
    assert store.latest_checkpoint() == before
    if newest.exists():
        assert len(warnings()) == 1
        assert str(newest) in warnings()[0]
        with pytest.raises(CheckpointError, match="step-00000020"):
            verify_checkpoint(newest)
    else:
        assert warnings() == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_put_aside_when_its_step_comes_again(store, damage):
    save(store, 10)
    DAMAGES[damage](save(store, 20))
    left = [p.name for p in store.step_folders()]
    again = save(store, 20)
    assert store.latest_checkpoint() == again
    aside = ["step-00000020.superseded"] if "step-00000020" in left else []
    assert names(store) == ["step-00000010", "step-00000020", *aside]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_after_a_damaged_newer_one_is_not_the_one_that_goes(tmp_path, keep):
    store = Store(tmp_path, keep)
    save(Store(tmp_path, keep=2), 50)
    flip(save(Store(tmp_path, keep=2), 100) / MANIFEST)
    assert store.latest_checkpoint() == tmp_path / "step-00000050"
    path = save(store, 60)
    assert store.latest_checkpoint() == path
    kept = ["step-00000050", "step-00000060"][-keep:]
    assert names(store) == [*kept, "step-00000100.superseded"]


def test_a_run_that_went_back_puts_aside_what_came_after_and_says_so(store, warnings):
    """A later start must not go on from step 30 of the run before, and nothing is lost."""
    paths = [save(store, step) for step in (10, 20, 30)]
    held = [(path / "rank-00001.safetensors").read_bytes() for path in paths]
    assert store.latest_checkpoint() != (path := save(store, 11))
    assert store.latest_checkpoint() == path
    aside = [path.with_name(f"{path.name}.superseded") for path in paths[1:]]
    assert store.list_superseded_checkpoints() == aside
    assert names(store) == ["step-00000010", "step-00000011", *(path.name for path in aside)]
    for path, content in zip(aside, held[1:], strict=True):
        verify_checkpoint(path)
        assert (path / "rank-00001.safetensors").read_bytes() == content
    assert [str(path) in said for path, said in zip(aside, warnings(), strict=True)] == [True] * 2
    save(store, 20)
    save(store, 12)
    assert [path.name for path in store.list_superseded_checkpoints()] == [
        "step-00000020.2.superseded",
        "step-00000020.superseded",
        "step-00000030.superseded",
    ]


class Failing:
    """Lets reading one file fail a number of times, as a server does that is replaced."""

    def __init__(self, monkeypatch, path, number, times):
        self.left, self.waited = times, []
        real = Path.open

        def open_(file, *args, **more):
            if file == path and self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return real(file, *args, **more)

        monkeypatch.setattr(Path, "open", open_)
        monkeypatch.setattr(store_module.time, "sleep", self.waited.append)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", [MANIFEST, "rank-00001.safetensors"])
def test_a_file_that_cannot_be_read_is_no_damage_and_nothing_older_is_taken(
    store, monkeypatch, name, number
):
    save(store, 10)
    newest = save(store, 20)
    failing = Failing(monkeypatch, newest / name, number, times=2)
    assert store.latest_checkpoint() == newest
    assert failing.waited == [0.5, 2.0]
    failing.left = 1000
    with pytest.raises(
        UnreadableError, match=rf"{name} cannot be read: .*4 times in 8 s.*may be intact"
    ):
        store.latest_checkpoint()
    assert failing.left == 996


def test_the_best_is_not_removed_where_its_loss_cannot_be_read(tmp_path, monkeypatch, warnings):
    store = Store(tmp_path, keep=1, keep_best=True)
    for step, loss in ((10, 2.0), (20, 3.0)):
        store.commit(store.begin(step), {"step": step, "eval_loss": loss}, [])
    Failing(monkeypatch, tmp_path / "step-00000010" / MANIFEST, errno.EIO, times=1000)
    store.commit(store.begin(30), {"step": 30, "eval_loss": 4.0}, [])
    assert names(store) == ["step-00000010", "step-00000020", "step-00000030"]
    assert "no old checkpoint is removed" in warnings()[0]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    store, kept = Store(tmp_path, keep=1, keep_best=True), []
    for step, loss in enumerate((math.nan, 3.0, 2.0, math.inf, -math.inf, math.nan, 2.5), 1):
        store.commit(store.begin(step), {"step": step, "eval_loss": loss}, [])
        kept.append([int(name[5:]) for name in names(store)])
    assert kept == [[1], [2], [3], [3, 4], [3, 5], [3, 6], [3, 7]]


def test_a_commit_that_is_not_wanted_any_more_changes_nothing_from_then_on(tmp_path):
    """Its thread may wake up when the run has given it up, and saved again."""
    found = []
    for calls in range(1, 6):
        for step in (10, 20, 40):
            save(Store(tmp_path / str(calls), keep=9), step)
        (tmp_path / str(calls) / "step-00000025.tmp").mkdir()
        store, left = Store(tmp_path / str(calls), keep=1), iter([False] * (calls - 1) + [True])

        def raise_if_obsolete(left=left):
            if next(left):
                raise CheckpointError("given up")

        with pytest.raises(CheckpointError, match="given up"):
            store.commit(store.begin(35), {"step": 35}, [], raise_if_obsolete)
        found.append([name[5:].lstrip("0") for name in names(store)])
    assert found == [
        ["10", "20", "25.tmp", "35.tmp", "40"],
        ["10", "20", "25.tmp", "35", "40"],
        ["10", "20", "25.tmp", "35", "40.superseded"],
        ["10", "20", "35", "40.superseded"],
        ["20", "35", "40.superseded"],
    ]


def test_what_a_kill_left_behind_is_removed_by_the_next_commit(store):
    save(store, 10)
    put(store.begin(15), "rank-00000.safetensors", b"half")
    (store.folder / "step-00000005.old.tmp").mkdir()
    (store.folder / "notes.txt").write_text("the user's")
    save(store, 20)
    assert names(store) == ["notes.txt", "step-00000010", "step-00000020"]


def test_beginning_again_starts_from_an_empty_folder(store):
    put(store.begin(10), "rank-00007.safetensors", b"of another world size")
    assert list(store.begin(10).iterdir()) == []


def test_a_checkpoint_of_a_later_format_is_refused_by_number(store, monkeypatch):
    monkeypatch.setattr(store_module, "FORMAT", 99)
    path = save(store, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 99"):
        read_state(path)


def test_everything_is_synced_before_the_rename_and_the_folder_after_it(store, monkeypatch):
    temporary = store.begin(5)
    file = put(temporary, "rank-00000.safetensors", b"x")
    done = []
    fsync, rename = os.fsync, Path.rename

    def traced_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_manifest = path.name.startswith(f".{MANIFEST}.")  # which is renamed before the next sync
        if is_manifest:
            assert json.loads(path.read_text())["state"] == {"step": 5}
        done.append(f"sync {MANIFEST if is_manifest else path.name}")
        fsync(descriptor)

    def traced_rename(self, target):
        done.append(f"rename {self.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    store.commit(temporary, {"step": 5}, [file])
    assert done == [
        "sync manifest.json",
        "sync step-00000005.tmp",
        "rename step-00000005.tmp",
        "sync checkpoints",
    ]


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches SIGKILL."""


# What the store, json and shutil call to change the file system.
OPERATIONS = [
    (os, "fsync"),
    (os, "open"),
    (os, "mkdir"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (json, "dumps"),
]


def fail_at(monkeypatch, k: int, error: BaseException, after: bool) -> list[str]:
    """Make the k-th operation fail, before its effect or after it; return the calls so far."""
    calls: list[str] = []

    def failing(original, name):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == k and not after:
                raise error
            result = original(*args, **kwargs)
            if len(calls) == k:
                raise error
            return result

        return call

    for owner, name in OPERATIONS:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), name))
    return calls


def old_and_damaged(folder: Path) -> Store:
    """Steps 10 and 20 are good, 30 is damaged and will be written again, 25 was cut off."""
    store = Store(folder, keep=2)
    for step in (10, 20):
        save(store, step)
    bad = store.begin(30)
    (bad / MANIFEST).write_text('{"not": "a manifest"}')
    bad.rename(folder / "step-00000030")
    (folder / "step-00000025.tmp").mkdir()
    return store


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["killed", "refused"])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch, kind, after
):
    finished = False
    seen = set()
    for k in range(1, 200):
        store = old_and_damaged(tmp_path / str(k))
        error = Killed() if kind == "killed" else OSError(errno.EIO, "input/output error")
        with monkeypatch.context() as patch:
            calls = fail_at(patch, k, error, after)
            try:
                save(store, 30)
            except (Killed, CheckpointError):
                outcome = "stopped"
            else:
                outcome = "went on"
        latest_checkpoint = store.latest_checkpoint()
        assert latest_checkpoint is not None
        assert latest_checkpoint.name in ("step-00000020", "step-00000030")
        assert read_state(latest_checkpoint) == {"step": int(latest_checkpoint.name[5:])}
        verify_checkpoint(store.folder / "step-00000020")
        seen.add((outcome, latest_checkpoint.name))
        if kind == "refused" and outcome == "went on":
            # An error that is not reported must not have cost the new checkpoint.
            assert latest_checkpoint.name == "step-00000030"
        save(store, 40)
        assert names(store)[-1] == "step-00000040"
        assert not [name for name in names(store) if name.endswith(".tmp")]
        if len(calls) < k:
            finished = True
            break
        shutil.rmtree(store.folder)
    assert finished
    assert k > 15, "the operations were not seen"
    assert {("stopped", "step-00000020"), ("went on", "step-00000030")} <= seen


def test_a_full_disk_is_a_checkpoint_error_and_older_ones_stay(store, monkeypatch):
    before = save(store, 10)
    temporary = store.begin(20)
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    )
    with pytest.raises(CheckpointError, match=r"step-00000020 cannot be committed.*No space left"):
        store.commit(temporary, {}, [])
    assert store.latest_checkpoint() == before


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Store(tmp_path / "checkpoints", 1).begin(1)
