"""Patterns match what Python's glob matches, and end where links lead back."""

import errno
import glob
import os

import pytest

from hpc_tune.data.dataset_card import glob_files
from hpc_tune.data.files import find_files
from hpc_tune.errors import DataError

PATTERNS = ("**/*.jsonl", "a/**/*.jsonl", "a/**", "**", "**/b/**/*.jsonl", "?/**/b/*", "*.jsonl")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("x.jsonl", "a/y.jsonl", "a/b/z.jsonl", "a/b/b/[1].jsonl", ".h/a.jsonl", "a/.s"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_pattern_matches_what_glob_matches(tree, pattern, is_absolute):
    pattern = str(tree / pattern) if is_absolute else pattern
    expected = {name.rstrip("/") or "." for name in glob.glob(pattern, recursive=True)}
    assert set(glob_files(pattern)) - {"."} == expected - {"."}


@pytest.mark.timeout(60)
def test_a_search_ends_where_links_lead_back_and_finds_each_file_once(tree):
    (tree / "a" / "self").symlink_to(".")
    (tree / "a" / "up").symlink_to("..")
    (tree / "a" / "0-link").symlink_to("b")
    found = [str(file) for file in find_files("a/**/*.jsonl").files]
    assert found == ["a/b/b/[1].jsonl", "a/b/z.jsonl", "a/up/x.jsonl", "a/y.jsonl"]


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "a/**", "*/*/*.jsonl", "a/b/*.jsonl"])
def test_a_folder_that_cannot_be_read_is_an_error_and_not_left_out(tree, monkeypatch, pattern):
    listed = os.scandir

    def scandir(folder):
        if str(folder) == "a/b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="a/b cannot be read: Permission denied"):
        glob_files(pattern)
