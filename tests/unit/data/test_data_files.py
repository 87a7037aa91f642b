import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_tune.data.files import describe_skipped_files, find_files, find_kind
from hpc_tune.errors import DataError


def _put(folder, *names):
    """Write files whose names tell their kind; each holds one row."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.table({"text": [name]}), file)
        else:
            file.write_text(json.dumps({"text": name}) + "\n")


def _found(path, folder):
    """Return the files that are read, and {file: why} of those that are not, below a folder."""
    found = find_files(path)
    skipped_files = {str(file.relative_to(folder)): why for file, why in found.skipped_files}
    return [str(file.relative_to(folder)) for file in found.files], skipped_files


def test_a_folder_as_it_is_downloaded_from_the_hub_gives_its_training_split(tmp_path):
    _put(
        tmp_path,
        *("README.md", "LICENSE", "dataset_infos.json", ".gitattributes"),
        *(".cache/huggingface/download/data/train-00000-of-00002.parquet.metadata", "make.py"),
        *(f"data/train-0000{n}-of-00002.parquet" for n in (1, 0)),
        *(f"data/{split}-00000-of-00001.parquet" for split in ("test", "unsupervised")),
    )
    files, skipped_files = _found(str(tmp_path), tmp_path)
    assert files == [f"data/train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert list(skipped_files) == [
        *("LICENSE", "README.md", "dataset_infos.json", "make.py"),
        *("data/test-00000-of-00001.parquet", "data/unsupervised-00000-of-00001.parquet"),
    ]
    said = "\n".join(describe_skipped_files(find_files(str(tmp_path))))
    assert "README.md" in said
    assert "make.py: its kind of data is not known" in said
    assert "unsupervised-00000-of-00001.parquet: its name is that of a split to hold out" in said


MISSING = {
    "train-00001-of-00003.parquet": (
        "data/train-00000-of-00003.parquet",
        "data/train-00002-of-00003.parquet",
    ),
    "c4.00000-of-00002.json.gz": ("c4.00001-of-00002.json.gz",),
    "part-2-of-2.jsonl": ("part-1-of-2.jsonl",),
}


@pytest.mark.parametrize(("missing", "names"), MISSING.items(), ids=MISSING)
def test_a_folder_that_lacks_parts_which_file_names_count_is_refused(tmp_path, missing, names):
    _put(tmp_path, *names)
    number = re.search(r"\d+-of-\d+", missing)[0]
    with pytest.raises(DataError, match=rf"lacks 1 of the \d parts .*such as {number};"):
        find_files(str(tmp_path))
    folder = (tmp_path / names[0]).parent
    assert len(find_files(f"{folder}/*{folder.joinpath(names[0]).suffix}").files) == len(names)
    _put(folder, missing)
    assert len(find_files(str(tmp_path)).files) == len(names) + 1


def test_a_folder_with_two_sets_of_parts_is_refused(tmp_path):
    """As it is when a dataset is written again in more parts: rows would be learned twice."""
    _put(
        tmp_path,
        *(f"train-0000{n}-of-0000{total}.parquet" for total in (2, 3) for n in range(total)),
    )
    with pytest.raises(DataError, match=r"00000-of-00002.* and train-00000-of-00003.*two sets"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("one", "other"),
    [("a.jsonl", "a.jsonl.gz"), ("a.json", "a.jsonl"), ("a.csv.zst", "a.csv"), ("a.txt", "a.md")],
)
def test_a_folder_with_a_file_and_its_copy_in_another_form_is_refused(one, other, tmp_path):
    _put(tmp_path, f"d/{one}", "d/b.jsonl" if ".json" in one else f"d/b{one[1:]}", f"e/{other}")
    assert len(find_files(str(tmp_path)).files) == 3
    _put(tmp_path, f"d/{other}")
    with pytest.raises(DataError, match=r"has a\S+ and a\S+, which may hold the same rows"):
        find_files(str(tmp_path))
    assert len(find_files(f"{tmp_path}/**/*.*").files) == 4


def test_rows_that_datasets_keeps_of_a_map_are_left_out_unless_they_are_named(tmp_path):
    cached = ["d/cache-4d1b1fe3547812d6.arrow", "d/cache-0123456789abcdef_00000_of_00002.arrow"]
    _put(tmp_path, "d/json-train.arrow", *cached)
    read, skipped_files = _found(str(tmp_path), tmp_path)
    assert read == ["d/json-train.arrow"]
    assert skipped_files == dict.fromkeys(
        cached, "cached by datasets: the result of a map or filter; name it to read it"
    )
    assert len(find_files(str(tmp_path / cached[0])).files) == 1


def test_a_card_alone_is_no_data_and_is_read_only_if_it_is_named(tmp_path):
    _put(tmp_path, "README.md", "data.zip")
    with pytest.raises(DataError, match=r"without any .*it has .*README\.md, .*data\.zip"):
        find_files(str(tmp_path))
    assert find_files(str(tmp_path / "README.md")).files == (tmp_path / "README.md",)


def test_splits_are_told_by_the_names_of_files_or_else_of_folders(tmp_path):
    _put(tmp_path, "a/train/x.jsonl", "a/test/x.jsonl", "a/val/train_ids.jsonl", "a/more.jsonl")
    assert _found(str(tmp_path), tmp_path) == (
        ["a/more.jsonl", "a/train/x.jsonl", "a/val/train_ids.jsonl"],
        {"a/test/x.jsonl": "its name is that of a split to hold out; name it in data.eval_path"},
    )
    assert _found(str(tmp_path / "a" / "test"), tmp_path) == (["a/test/x.jsonl"], {})


def test_splits_to_be_held_out_are_left_out_beside_others_and_read_alone(tmp_path):
    _put(tmp_path, "train.jsonl", "test-1.jsonl", "data.validation.jsonl", "other.jsonl")
    held_out = ("heldout.jsonl", "my-held-out.jsonl", "held_out_2.jsonl", "holdout.jsonl")
    _put(tmp_path, *held_out)
    assert _found(str(tmp_path), tmp_path)[0] == ["other.jsonl", "train.jsonl"]
    for name in held_out:
        (tmp_path / name).unlink()
    (tmp_path / "train.jsonl").unlink()
    assert _found(str(tmp_path), tmp_path)[0] == ["other.jsonl"]
    (tmp_path / "other.jsonl").unlink()
    assert _found(str(tmp_path), tmp_path) == (["data.validation.jsonl", "test-1.jsonl"], {})


@pytest.mark.parametrize(
    "names",
    [
        ("main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"),
        ("data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"),
    ],
)
def test_of_several_configurations_one_has_to_be_named(tmp_path, names):
    _put(tmp_path, *names)
    prefix = names[0].partition("-0")[0]
    with pytest.raises(DataError, match=f"several configurations or splits .*{prefix}-"):
        find_files(str(tmp_path))
    assert _found(f"{tmp_path}/{prefix}-*", tmp_path)[0] == [names[0]]
    assert len(find_files([f"{tmp_path}/{name}" for name in names]).files) == 2


def test_patterns_take_what_they_match_and_leave_held_out_splits_and_cards(tmp_path):
    _put(tmp_path, "b.jsonl", "a.jsonl", "test.jsonl", "README.md", "deep/er/c.jsonl", "d.parquet")
    assert _found(f"{tmp_path}/*.jsonl", tmp_path)[0] == ["a.jsonl", "b.jsonl"]
    files, skipped_files = _found(f"{tmp_path}/**/*.jsonl", tmp_path)
    assert files == ["a.jsonl", "b.jsonl", "deep/er/c.jsonl"]
    assert list(skipped_files) == ["test.jsonl"]
    assert "README.md" in _found(f"{tmp_path}/*", tmp_path)[1]
    assert _found(f"{tmp_path}/te*.jsonl", tmp_path)[0] == ["test.jsonl"]
    with pytest.raises(DataError, match=r"no file of a known kind matches .*\*\.csv"):
        find_files(f"{tmp_path}/*.csv")


def test_patterns_are_relative_to_where_one_is(tmp_path, monkeypatch):
    _put(tmp_path, "data/a.jsonl", "data/test.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [str(file) for file in find_files("data/*.jsonl").files] == ["data/a.jsonl"]


@pytest.mark.parametrize(
    "name", ["tatsu-lab/alpaca", "https://example.org/train.jsonl", "s3://bucket/train.jsonl"]
)
def test_an_address_is_told_that_nothing_is_downloaded(name):
    with pytest.raises(DataError, match=f"no data at {name};.* a run downloads nothing"):
        find_files(name)


def test_a_list_without_brackets_is_shown_with_them(tmp_path, monkeypatch):
    _put(tmp_path, "a.jsonl", "b.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"a list: data.path='\[a.jsonl, b.jsonl\]'"):
        find_files("a.jsonl,b.jsonl")


def test_a_list_is_read_in_its_order_and_each_file_once(tmp_path):
    _put(tmp_path, "b.jsonl", "a.parquet", "test.jsonl")
    names = [f"{tmp_path}/{name}" for name in ("test.jsonl", "b.jsonl", "a.parquet")]
    assert [str(file) for file in find_files(names).files] == names
    with pytest.raises(DataError, match=r"names .*b\.jsonl twice"):
        find_files([names[1], f"{tmp_path}/*.jsonl", f"{tmp_path}/b*"])
    with pytest.raises(DataError, match="empty list"):
        find_files([])
    _put(tmp_path, "d.h5")
    with pytest.raises(DataError, match=r"one prepared \.h5 file alone"):
        find_files([names[0], f"{tmp_path}/d.h5"])


def test_kinds_mixed_in_a_folder_are_named_wherever_they_are(tmp_path):
    _put(tmp_path, "a.jsonl", "more/b.parquet", "notes.txt")
    with pytest.raises(DataError) as caught:
        find_files(str(tmp_path))
    assert "a.jsonl (jsonl) and b.parquet (parquet) and notes.txt (text)" in str(caught.value)
    assert f"data.path='{tmp_path}/**/*.jsonl'" in str(caught.value)
    assert len(find_files(f"{tmp_path}/**/*.jsonl").files) == 1


def test_partitions_tell_splits_and_tables_with_a_history_are_refused(tmp_path):
    _put(tmp_path, "split=train/part-0.parquet", "split=test/part-0.parquet")
    assert _found(str(tmp_path), tmp_path)[0] == ["split=train/part-0.parquet"]
    _put(tmp_path, "_delta_log/00000000000000000000.json")
    with pytest.raises(DataError, match="is a Delta table"):
        find_files(str(tmp_path))
    _put(tmp_path / "hudi", "a.parquet", ".hoodie/hoodie.properties")
    with pytest.raises(DataError, match="is a Hudi table"):
        find_files(str(tmp_path / "hudi"))
    _put(tmp_path / "iceberg", "data/a.parquet", "metadata/v1.metadata.json")
    with pytest.raises(DataError, match="is an Iceberg table"):
        find_files(str(tmp_path / "iceberg"))


def test_links_to_folders_are_followed_and_a_circle_of_them_ends(tmp_path):
    _put(tmp_path, "far/away.jsonl", "here/a.jsonl")
    os.symlink(tmp_path / "far", tmp_path / "here" / "link")
    os.symlink(tmp_path / "here", tmp_path / "here" / "back")
    assert _found(str(tmp_path / "here"), tmp_path)[0] == ["here/a.jsonl", "here/link/away.jsonl"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl.gz", "jsonl"),
        ("a.JSON.zst", "jsonl"),
        ("a.csv.gz", "csv"),
        ("a.txt.zst", "text"),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a", None),
        ("v1.2.parquet", "parquet"),
    ],
)
def test_kinds_are_known_by_name_also_when_packed(tmp_path, name, kind):
    assert find_kind(tmp_path / name) == kind
