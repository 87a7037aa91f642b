"""The files that a dataset's card names, beside what the datasets library reads of the folder."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from hpc_tune.data.files import find_files
from hpc_tune.errors import DataError

FILES = ("a/one.jsonl", "a/two.jsonl", "b/three.jsonl", "pairs/four.jsonl")


def card(folder, text):
    for name in FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) + "\n")
    (folder / "README.md").write_text(f"---\nlicense: mit\n{text}\n---\n# Data\n---\n")
    return str(folder)


CARDS = {
    "splits": """configs:
- config_name: default
  data_files:
  - split: train
    path: a/*
  - split: test
    path: b/*""",
    "a list of patterns": """configs:
- config_name: all
  data_files:
  - split: train
    path: [b/*.jsonl, a/two.jsonl]
  - split: validation
    path: a/one.jsonl""",
    "a pattern alone": """configs:
- config_name: some
  data_files: "a/*.jsonl" """,
    "one of several is the default": """configs:
- config_name: pairs
  data_files: pairs/*.jsonl
- config_name: chats
  default: true
  data_files:
  - split: train
    path: b/three.jsonl""",
    "a folder within": """configs:
- config_name: default
  data_dir: a""",
}


@pytest.mark.parametrize("kind", CARDS)
def test_the_training_split_is_that_of_the_datasets_library(tmp_path, kind):
    import datasets

    path = card(tmp_path / "data", CARDS[kind])
    theirs = datasets.load_dataset(path, cache_dir=str(tmp_path / "cache"), split="train")
    found = find_files(path)
    ours = [json.loads(file.read_text())["text"] for file in found.files]
    assert sorted(ours) == sorted(row["text"] for row in theirs)
    skipped_files = {str(file.relative_to(path)): why for file, why in found.skipped_files}
    assert {*ours, *skipped_files} == {*FILES, "README.md"}, "nothing is left out in silence"
    assert all("card" in why for name, why in skipped_files.items() if name != "README.md")


def test_of_several_configurations_of_a_card_one_has_to_be_named(tmp_path):
    import datasets

    text = "configs:\n- config_name: x\n  data_files: a/*\n- config_name: y\n  data_files: b/*"
    path = card(tmp_path, text)
    with pytest.raises(DataError, match=r"several configurations, as its card says.* x \(.*y \("):
        find_files(path)
    with pytest.raises(ValueError, match="Config name is missing"):
        datasets.load_dataset(path, cache_dir=str(tmp_path / "cache"))


def test_splits_without_one_for_training_have_to_be_named(tmp_path):
    text = "configs:\n- config_name: x\n  data_files: {sft: a/one.jsonl, gen: a/two.jsonl}"
    with pytest.raises(DataError, match=r"no split called train in its card.* sft \(data\.path="):
        find_files(card(tmp_path, text))


def advised(message):
    """Return the files that each data.path of a message names, as a shell and a run read it."""
    found = re.findall(r"data\.path=('[^']*'|[^\s,;()]+)", message)
    return [find_files(yaml.safe_load(path.strip("'"))).files for path in found]


@pytest.mark.parametrize(
    ("data_files", "split", "expected"),
    [
        ("{sft: a/*, gen: b/*}", 0, ["a/one.jsonl", "a/two.jsonl"]),
        ("{sft: a/*, gen: b/*}", 1, ["b/three.jsonl"]),
        ("{sft: [a/*, b/*], gen: pairs/*}", 0, ["a/one.jsonl", "a/two.jsonl", "b/three.jsonl"]),
        ("{sft: [a/one.jsonl, b/*], gen: pairs/*}", 0, ["a/one.jsonl", "b/three.jsonl"]),
    ],
)
@pytest.mark.parametrize("is_relative", [True, False])
def test_the_path_that_is_proposed_for_a_split_reads_all_of_it_and_nothing_else(
    tmp_path, monkeypatch, data_files, split, expected, is_relative
):
    monkeypatch.chdir(tmp_path)
    name = "set" if is_relative else str(tmp_path / "set")
    card(tmp_path / "set", f"configs:\n- config_name: x\n  data_files: {data_files}")
    with pytest.raises(DataError) as refused:
        find_files(name)
    files = advised(str(refused.value))[split]
    assert [str(file.relative_to(name)) for file in files] == expected


def test_the_paths_that_are_proposed_for_configurations_read_what_each_is_trained_on(tmp_path):
    text = "configs:\n- config_name: x\n  data_files: {test: b/*, train: a/*}\n"
    path = card(tmp_path, f"{text}- config_name: y\n  data_dir: pairs")
    with pytest.raises(DataError) as refused:
        find_files(path)
    names = [[file.name for file in files] for files in advised(str(refused.value))]
    assert names == [["one.jsonl", "two.jsonl"], ["four.jsonl"]]


@pytest.mark.parametrize(
    "text",
    [
        "configs: 7",
        "configs: [7, null, {}]",
        "configs:\n- config_name: x\n  data_files: nowhere/*",
        "configs:\n- config_name: x\n  data_files: ../*",
        "configs:\n- config_name: x\n  data_files: [{path: {}}]",
        "configs: [",
        "configs: [{data_files: a/*}]\nconfigs: [{data_files: b/*}]",
        "",
    ],
)
def test_a_card_that_says_nothing_of_use_leaves_files_to_their_names(tmp_path, text):
    found = find_files(card(tmp_path, text))
    assert len(found.files) == len(FILES)


@pytest.mark.parametrize("entry", ["split: null\n    path: a/*", "path: [a/*, null]"])
def test_null_in_a_card_is_no_name(tmp_path, entry):
    other = "- config_name: pairs\n  data_files: pairs/*"
    path = card(tmp_path, f"configs:\n- config_name: null\n  data_files:\n  - {entry}\n{other}")
    (tmp_path / "None").write_text("")
    assert [file.name for file in find_files(path).files] == ["one.jsonl", "two.jsonl"]


def test_a_card_that_cannot_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
    path, opened = card(tmp_path, CARDS["splits"]), Path.open

    def refuse(file, *args, **kwargs):
        if file.name == "README.md":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="README.md cannot be read: Permission denied"):
        find_files(path)
