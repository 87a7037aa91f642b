"""OWNER/NAME names what is in the hub's cache, and which revision that is is said."""

from pathlib import Path

import pytest

from hpc_tune.commands import model_folder
from hpc_tune.config.load import load_config
from hpc_tune.data.files import find_files
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.hub_cache import hub_cache_root
from hpc_tune.model.language import require_model_directory
from tests.support.hub import cache

OLD, NEW = "a" * 40, "b" * 40
FILES = {OLD: {"config.json": "{}"}, NEW: {"config.json": "{ }"}}
ROWS = {OLD: {"d.jsonl": "{}"}, NEW: {"d.jsonl": "{ }"}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf" / "hub"
    cache(folder / "models--Org--Tiny", FILES, main=f"{NEW}\n")
    cache(folder / "datasets--Org--Set", ROWS, main=OLD)
    return folder


@pytest.mark.parametrize(
    ("setting", "revision", "why"),
    [
        ("model.path=Org/Tiny", NEW, "refs/main"),
        ("model.path=Org/Tiny@main", NEW, "refs/main"),
        (f"model.path=Org/Tiny@{OLD}", OLD, "as named"),
        (f"model.path=Org/Tiny@{OLD[:7]}", OLD, "as named"),
        ("model.path=hf/hub/models--Org--Tiny", NEW, "refs/main"),
        ("data.path=Org/Set", OLD, "refs/main"),
        (f"data.path=Org/Set@{NEW}", NEW, "as named"),
        ("data.eval_path=[Org/Set, other.jsonl]", OLD, "refs/main"),
    ],
)
def test_a_name_of_the_hub_is_the_folder_in_its_cache(hub, caplog, setting, revision, why):
    caplog.set_level("INFO", "hpc_tune")
    part, name = setting.partition("=")[0].split(".")
    found = getattr(getattr(load_config(None, [setting]), part), name)
    place = found[0] if isinstance(found, list) else found
    kind = "datasets--Org--Set" if part == "data" else "models--Org--Tiny"
    assert place == str(hub / kind / "snapshots" / revision)
    assert f"revision {revision} ({why}) of the hub's cache" in caplog.text


def test_sources_of_a_mixture_are_named_so_too(hub):
    sources = (
        "data.sources=[{name: a, path: Org/Set, epochs: 1}, {name: b, path: b.jsonl, epochs: 1}]"
    )
    config = load_config(None, [sources, "data.eval_path=null"])
    assert config.data.sources[0].path == str(hub / "datasets--Org--Set" / "snapshots" / OLD)


def test_an_adapter_to_begin_with_is_named_so_too(hub):
    config = load_config(None, ["tune.method=lora", "tune.init_from=Org/Tiny"])
    assert config.tune.init_from == str(hub / "models--Org--Tiny" / "snapshots" / NEW)


def test_generate_and_export_take_the_name_as_well(hub):
    assert model_folder("Org/Tiny") == hub / "models--Org--Tiny" / "snapshots" / NEW
    assert str(model_folder("my/model")) == "my/model"


def test_a_folder_of_that_name_goes_before_the_cache(hub, tmp_path):
    (tmp_path / "Org" / "Tiny").mkdir(parents=True)
    assert load_config(None, ["model.path=Org/Tiny"]).model.path == str(tmp_path / "Org" / "Tiny")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.path=Org/Tiny@v2", f"no revision v2; name one that it has: Org/Tiny@{OLD}"),
        ("data.path=Org/Set@" + "c" * 40, f"no revision ccc.*Org/Set@{NEW}"),
    ],
)
def test_a_revision_that_is_not_there_is_refused_with_those_that_are(hub, setting, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, [setting])


def test_several_revisions_without_refs_main_have_to_be_named(hub):
    (hub / "models--Org--Tiny" / "refs" / "main").unlink()
    with pytest.raises(ConfigError, match=rf"no refs/main; name one .*Org/Tiny@{NEW}"):
        load_config(None, ["model.path=Org/Tiny"])


def test_what_is_not_in_the_cache_is_told_where_it_was_looked_for(hub):
    with pytest.raises(DataError, match=f"nor is a model of that name in the hub's cache, {hub}"):
        require_model_directory(Path(load_config(None, ["model.path=Org/Other"]).model.path))
    with pytest.raises(DataError, match=f"nor is a dataset of that name in the hub's cache, {hub}"):
        find_files("Org/Other")


def test_a_folder_with_the_cache_in_it_names_the_data_and_not_the_models(hub, tmp_path):
    with pytest.raises(DataError, match="data.path=hf/hub/datasets--Org--Set$"):
        find_files("hf")
    cache(tmp_path / "alone" / "models--Org--Tiny", FILES, main=NEW)
    with pytest.raises(DataError, match="a model in the hub's cache, which is not data"):
        find_files("alone")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_own_tools_have_it(environment, folder):
    assert str(hub_cache_root(environment)) == folder
