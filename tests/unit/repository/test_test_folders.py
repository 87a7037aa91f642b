"""Where a new test looks: the index of tests/support, and the folder that a unit test lies in."""

import re

from tests.support.ranks import ROOT

UNIT, SUPPORT = ROOT / "tests" / "unit", ROOT / "tests" / "support"
NOT_OF_A_PACKAGE = {"repository", "tools", "untrusted"}


def test_each_file_of_support_has_one_line_in_its_index():
    listed = re.findall(r"^\| `(.+?)` \| \S", (SUPPORT / "README.md").read_text(), re.MULTILINE)
    files = [f.name for f in SUPPORT.iterdir() if f.is_file() and f.name != "README.md"]
    assert sorted(listed) == sorted(files)


def test_unit_tests_lie_in_folders_named_after_packages():
    folders = {f.parent.name for f in UNIT.glob("*/**/test_*.py")} - NOT_OF_A_PACKAGE
    assert {name for name in folders if not (ROOT / "hpc_tune" / name).is_dir()} == set()


def test_the_files_that_begin_first_are_there():
    text = (ROOT / "tests" / "conftest.py").read_text()
    named = re.findall(r'^    "(\S+/test_\w+\.py)",$', text, re.MULTILINE)
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_a_unit_test_outside_of_the_folders_is_of_a_file_at_the_top():
    tests = [f.stem.removeprefix("test_") for f in UNIT.glob("test_*.py")]
    files = {f.stem for f in (ROOT / "hpc_tune").glob("*.py")} | {"entry"}  # __main__.py
    assert [name for name in tests if name not in files] == []
