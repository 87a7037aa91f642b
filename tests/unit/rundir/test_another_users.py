"""A run in a group's folder, begun by one user and gone on with by another."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpc_tune.checkpoint.store import Store, find_damage
from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import EXIT_USER_ERROR, DataError, DiskError, NoRightError
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.weights import index_files
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.rundir.owner import RunLock, RunPermissionError, make_owner, require_permissions
from hpc_tune.train.job import _prepare_run_dir

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become two users")
ANNA, BEN, GROUP = 61001, 61002, 62000


@contextmanager
def user(number: int, *groups: int, umask: int = 0o022):
    """Be a user without root's rights, in a block."""
    before, mask = os.getgroups(), os.umask(umask)
    os.setgroups(groups)
    os.setegid(groups[0] if groups else number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
        os.umask(mask)


@pytest.fixture
def run_dir():
    folder = Path(tempfile.mkdtemp())  # what pytest gives is root's alone
    folder.chmod(0o755)
    run_dir = folder / "run"
    run_dir.mkdir()
    os.chown(run_dir, ANNA, GROUP)
    run_dir.chmod(0o2775)
    yield run_dir
    shutil.rmtree(folder)


def begin(run_dir: Path, umask: int) -> None:
    with user(ANNA, GROUP, umask=umask):
        EventsWriter(run_dir / "events.jsonl").close()
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "rank-3.txt").write_text("begun\n")
        (run_dir / "outcome.json").write_text("{}")
        store = Store(run_dir / "checkpoints", keep=1)
        temporary = store.begin(1)
        store.commit(temporary, {}, [])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_user_may_go_on_with_a_run_begun_under_umask_002(run_dir):
    begin(run_dir, umask=0o002)
    with user(BEN, GROUP, umask=0o002):
        require_permissions(run_dir)


def test_a_start_of_another_user_is_refused_by_whose_files_they_are_and_changes_nothing(run_dir):
    begin(run_dir, umask=0o022)
    before = contents(run_dir)
    lock = RunLock(run_dir, make_owner("nonce", run_dir), lambda _: None)
    with user(BEN, GROUP), pytest.raises(RunPermissionError) as refused:
        _prepare_run_dir(run_dir, lock, RunSettings(), lambda path: path.write_text("settings"))
    said = str(refused.value)
    assert f"{run_dir}/events.jsonl is a file of user {ANNA} (group {GROUP}, mode 0644)" in said
    assert f"this runs as user {BEN}" in said
    assert f"user {ANNA} runs chmod -R g+rwX {run_dir} once, and umask 002 before" in said
    assert "chgrp" not in said
    assert refused.value.exit_code == EXIT_USER_ERROR
    assert contents(run_dir) == before


def test_who_is_not_in_the_files_group_is_told_of_chgrp_too(run_dir):
    begin(run_dir, umask=0o002)
    with (
        user(BEN),
        pytest.raises(RunPermissionError, match="chgrp -R to a group that includes user 61002"),
    ):
        require_permissions(run_dir)


@pytest.mark.parametrize("name", ["logs/rank-3.txt", "checkpoints", "checkpoints/step-00000001"])
def test_what_only_other_ranks_or_later_saves_write_is_found_at_the_start(run_dir, name):
    begin(run_dir, umask=0o002)
    (run_dir / name).chmod(0o755)
    with user(BEN, GROUP), pytest.raises(RunPermissionError, match=f"{name} cannot be opened"):
        require_permissions(run_dir)


def test_an_open_that_is_refused_anywhere_is_the_users_to_mend(run_dir):
    begin(run_dir, umask=0o022)
    with user(BEN, GROUP), pytest.raises(PermissionError) as refused:
        EventsWriter(run_dir / "events.jsonl")
    with user(BEN, GROUP):
        error = DiskError.from_os_error(refused.value, "opening the events")
    assert error is not None
    assert error.exit_code == EXIT_USER_ERROR
    assert "Permission denied: " in str(error)
    assert f"is a file of user {ANNA}" in str(error)


def test_a_checkpoint_that_may_not_be_read_is_neither_damaged_nor_tried_again(run_dir):
    begin(run_dir, umask=0o002)
    checkpoint = run_dir / "checkpoints" / "step-00000001"
    (checkpoint / "manifest.json").chmod(0o600)
    with user(BEN, GROUP), pytest.raises(NoRightError, match=f"a file of user {ANNA}") as refused:
        find_damage(checkpoint)
    assert refused.value.exit_code == EXIT_USER_ERROR


def test_weights_that_may_not_be_read_are_not_called_damaged(run_dir):
    file = run_dir / "model.safetensors"
    save_file({"weight": torch.zeros(1)}, file)
    os.chown(file, ANNA, GROUP)
    file.chmod(0o600)
    with user(BEN, GROUP), pytest.raises(DataError) as refused:
        index_files([file])
    assert f"is a file of user {ANNA}" in str(refused.value)
    assert "damaged" not in str(refused.value)


def test_files_of_the_tiny_model_have_the_rights_of_the_umask(run_dir):
    mask = os.umask(0o002)
    try:
        write_tiny_model(run_dir / "builtin-tiny")
    finally:
        os.umask(mask)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (run_dir / "builtin-tiny").iterdir()
    }
    assert set(modes.values()) == {0o664}, modes
