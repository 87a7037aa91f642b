"""What a refused start has made in a run directory is removed, and nothing else."""

import errno
import os
from pathlib import Path

from hpc_tune.rundir.owner import list_run_files, remove_new_files


def made_by_a_start(run_dir):
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "logs" / "rank-0.txt").touch()
    for name in ("config.resolved.yaml", "outcome.json", "events.jsonl", "live.json"):
        (run_dir / name).touch()
    (run_dir / "data").mkdir(exist_ok=True)


def test_a_new_directory_keeps_what_tells_of_the_start(tmp_path):
    run_dir = tmp_path / "run"
    assert (before := list_run_files(run_dir)) == frozenset()
    made_by_a_start(run_dir)
    (run_dir / "data" / ".prepared.h5.1234.parts").mkdir()
    (run_dir / "weights").symlink_to(tmp_path)
    assert remove_new_files(run_dir, before) == []
    assert list_run_files(run_dir) == {"outcome.json", "events.jsonl", "live.json"}
    assert tmp_path.is_dir()


def test_prepared_data_stays_and_is_told(tmp_path):
    before = list_run_files(tmp_path)
    made_by_a_start(tmp_path)
    (tmp_path / "data" / "prepared.h5").touch()
    assert remove_new_files(tmp_path, before) == ["data"]
    assert (tmp_path / "data" / "prepared.h5").exists()


def test_what_was_there_stays(tmp_path):
    made_by_a_start(tmp_path)
    (tmp_path / "notes.txt").touch()
    before = list_run_files(tmp_path)
    (tmp_path / "memory").mkdir()
    assert remove_new_files(tmp_path, before) == []
    assert list_run_files(tmp_path) == before


def test_a_directory_that_cannot_be_read_counts_as_unknown_and_not_as_empty(tmp_path, monkeypatch):
    made_by_a_start(tmp_path)
    before = list_run_files(tmp_path) - {"data"}
    (tmp_path / "data" / "prepared.h5").touch()
    listed = Path.iterdir

    def iterdir(folder):
        if folder == unreadable:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    unreadable = tmp_path
    assert list_run_files(tmp_path) is None
    unreadable = tmp_path / "data"
    assert remove_new_files(tmp_path, before) == ["data"]
    assert (tmp_path / "data" / "prepared.h5").exists()
