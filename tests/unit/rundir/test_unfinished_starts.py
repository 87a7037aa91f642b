"""Whether a start whose supervise has gone is over."""

import errno
import json
import os
import tempfile
from dataclasses import asdict, replace

import pytest

from hpc_tune.rundir import owner


def test_a_run_on_a_disk_that_is_full_is_not_taken_for_one_that_has_ended(tmp_path, monkeypatch):
    assert owner.has_run_ended(tmp_path)
    elsewhere = replace(owner.make_owner("nonce", tmp_path), host="elsewhere", place="elsewhere")
    (tmp_path / owner.LOCK_FILE).write_text(json.dumps(asdict(elsewhere)))
    assert not owner.has_run_ended(tmp_path)

    def refuse(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert not owner.has_run_ended(tmp_path)


@pytest.mark.parametrize(
    ("told", "ending"),
    [
        ({"status": "stopped", "reason": "SIGUSR1", "exit_code": 75}, ("stopped", "SIGUSR1", 75)),
        ({"status": "stopped", "reason": "SIGUSR1"}, None),
        ({"status": "stopped", "reason": None, "exit_code": 75}, None),
        ({"exit_code": 75}, None),
        ([], None),
    ],
)
def test_the_ending_of_a_start_is_what_its_outcome_tells_if_that_is_whole(tmp_path, told, ending):
    owner.write_start_file(tmp_path)
    noted = owner.read_unfinished_start(tmp_path)
    (tmp_path / "outcome.json").write_text(json.dumps(told))
    unknown = ("failed", owner._UNKNOWN_ENDING, 1)
    assert owner.find_start_ending(tmp_path, noted) == (ending or unknown)
    os.utime(tmp_path / "outcome.json", (0, 0))  # of an earlier start
    assert owner.find_start_ending(tmp_path, noted) == unknown


@pytest.mark.parametrize("text", ["{", "[]", "[" * 10**5])
def test_a_note_that_is_damaged_notes_no_start(tmp_path, text):
    (tmp_path / "start.json").write_text(text)
    assert owner.read_unfinished_start(tmp_path) is None
