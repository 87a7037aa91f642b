"""docs/code.md names files and functions that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")


def test_the_files_it_names_are_there():
    named = re.findall(r"`((?:hpc_tune/)?[\w/]+\.py)`", TEXT)
    assert len(named) > 25
    for name in named:
        assert (ROOT / "hpc_tune" / name.removeprefix("hpc_tune/")).is_file(), name


def test_the_functions_it_names_are_in_the_file_it_names():
    for names, file in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", TEXT):
        text = (ROOT / "hpc_tune" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", text), (name, file)
