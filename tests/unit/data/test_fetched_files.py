"""Folders as other tools leave them: pointers instead of files, the hub's cache."""

import json
import os

import pytest
from transformers import LlamaConfig

from hpc_tune.data.chunks import list_chunks, read_chunk
from hpc_tune.data.files import find_files
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.errors import DataError
from hpc_tune.model.language import read_config
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.weights import index_files, index_model_directory
from tests.support.data import byte_tokenizer
from tests.support.hub import cache

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 123456789\n"
EXTENDED = LFS.replace("oid", "ext-0-foo sha256:11\noid")
OLDER = LFS.replace("git-lfs.github", "hawser.github")
ANNEX = "/annex/objects/SHA256E-s1234--4d7a2146.jsonl\n"
DATA = ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.txt", "a.md", "a.jsonl.gz", "a.h5")


@pytest.mark.parametrize("pointer", [LFS, EXTENDED, OLDER, ANNEX, LFS.replace("\n", "\r\n")])
@pytest.mark.parametrize("name", DATA)
def test_a_pointer_in_place_of_data_is_refused_before_any_reader(name, pointer, tmp_path):
    file = tmp_path / name
    file.write_text(pointer, newline="")
    read = TokenStore.open if name.endswith("h5") else find_files
    with pytest.raises(DataError, match=f"{name} is a pointer of git-(lfs|annex)"):
        read(str(file))
    if read is find_files:
        with pytest.raises(DataError, match="made without its large files"):
            find_files(str(tmp_path))


def test_text_about_pointers_is_data(tmp_path):
    (tmp_path / "a.txt").write_text(f"A pointer begins with: {LFS}")
    (tmp_path / "b.txt").write_text(LFS + "and more text of a page about it\n" * 99)
    assert len(find_files(str(tmp_path)).files) == 2


def test_a_link_of_git_annex_that_was_not_fetched_is_refused(tmp_path):
    (tmp_path / "b.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl").symlink_to("../.git/annex/objects/x/y/SHA256E-s1.jsonl")
    for path in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(DataError, match="a link of git-annex"):
            find_files(str(path))
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is a link to gone\.jsonl, where there is no"):
        find_files(str(tmp_path))


def test_a_link_to_a_name_that_is_not_utf8_and_leads_nowhere_is_refused(tmp_path):
    os.symlink(b"gone-\xff.jsonl", tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is a link to gone-"):
        find_files(str(tmp_path))


@pytest.fixture
def model(tmp_path):
    LlamaConfig(vocab_size=300, hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("config.json", load_tokenizer),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", load_tokenizer),
        ("model.safetensors.index.json", load_tokenizer),
        ("model.safetensors.index.json", index_model_directory),
    ],
)
def test_a_pointer_in_a_models_folder_is_refused_by_its_name(name, read, model):
    (model / name).write_text(LFS)
    with pytest.raises(DataError, match=f"{name} is a pointer of git-lfs to a file of 123,456"):
        read(model)


def test_a_pointer_in_place_of_weights_is_refused(model):
    (model / "model.safetensors").write_text(LFS)
    with pytest.raises(DataError, match="pointer of git-lfs"):
        index_model_directory(model)
    (model / "model.safetensors").write_text("x")
    with pytest.raises(DataError, match="not a whole safetensors file"):
        index_files([model / "model.safetensors"])


def row(text):
    return json.dumps({"text": text}) + "\n"


def texts(path):
    return [example.text for chunk in list_chunks(str(path)) for example in read_chunk(chunk)]


@pytest.mark.parametrize("inner", ["", "snapshots"])
def test_of_the_hubs_cache_the_revision_of_refs_main_is_read(inner, tmp_path):
    files = {"a" * 40: {"data/x.jsonl": row("old")}, "b" * 40: {"data/x.jsonl": row("new")}}
    root = cache(tmp_path / "datasets--o--n", files, main="a" * 40)
    assert texts(root / inner) == ["old"]
    (left,) = find_files(str(root / inner)).skipped_files
    assert (left[0].name, "another revision" in left[1]) == ("b" * 40, True)
    (root / "refs" / "main").write_text("c" * 40)
    with pytest.raises(DataError, match="2 revisions, and refs/main names none of them; name one"):
        find_files(str(root))
    with pytest.raises(DataError, match="files of 2 revisions of"):
        find_files(str(root / "snapshots" / "*" / "data" / "*.jsonl"))
    assert texts(root / "snapshots" / ("b" * 40)) == ["new"]
    with pytest.raises(DataError, match="a folder of the hub's cache; name that folder"):
        find_files(str(tmp_path))


def test_one_revision_is_read_whatever_its_name(tmp_path):
    files = {"README.md": "# x\n", "x.jsonl": row("a")}
    assert texts(cache(tmp_path / "d", {"a" * 40: files})) == ["a"]


def test_two_names_of_one_blob_are_two_files(tmp_path):
    files = {"p-1.jsonl": row("same"), "p-2.jsonl": row("same"), "p-3.jsonl": row("other")}
    root = cache(tmp_path / "d", {"c" * 40: files}, main="c" * 40)
    assert texts(root) == ["same", "same", "other"]
    file = str(root / "snapshots" / ("c" * 40) / "p-1.jsonl")
    with pytest.raises(DataError, match="twice"):
        find_files([file, file])


def test_a_models_folder_in_the_cache_is_told_its_snapshot(tmp_path):
    root = cache(tmp_path / "models--o--n", {"d" * 40: {"config.json": "{}"}}, main="d" * 40)
    with pytest.raises(DataError, match=f"name its snapshot: model.path={root}/snapshots/ddd"):
        read_config(root)
