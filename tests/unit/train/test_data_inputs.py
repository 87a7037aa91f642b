"""What is asked of prepared data before a run begins."""

import json

import pytest
import torch

from hpc_tune.config.data import DataConfig
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.errors import DataError
from hpc_tune.train.data import LazyTokenizer, open_or_prepare_store, open_sources
from hpc_tune.world.comm import Comm
from hpc_tune.world.discover import World
from tests.support.data import byte_tokenizer, chat, write_jsonl, zero_tokens

WORLD = World(0, 1, 0, 1, 0, 1, "n0", "single")
ALONE = Comm(WORLD, torch.device("cpu"), None, (), None, "nonce", threads=1, sees_local_pids=True)


@pytest.fixture
def model(tmp_path):
    """A model directory of which only the tokenizer and the number of embeddings are there."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 258}')
    return tmp_path / "model"


def opened(path, model, run_dir):
    run_dir.mkdir(exist_ok=True)
    data = DataConfig(path=str(path), seq_len=100)
    return open_or_prepare_store(str(path), data, LazyTokenizer(model, None), ALONE, run_dir)


def test_zeroed_tokens_are_refused_by_the_name_of_their_file(tmp_path, model):
    rows = write_jsonl(tmp_path / "d.jsonl", [chat("q", "a")])
    prepare_data(
        str(rows), tmp_path / "d.h5", LazyTokenizer(model, None).tokenizer, PrepareSettings(100)
    )
    zero_tokens(tmp_path / "d.h5")
    with pytest.raises(DataError, match=r"d\.h5: its documents are not as `prepare` wrote them"):
        opened(tmp_path / "d.h5", model, tmp_path / "run")


def test_a_file_that_the_run_has_prepared_itself_is_verified_at_its_next_start(tmp_path, model):
    rows = write_jsonl(tmp_path / "d.jsonl", [chat("q", "a")])
    store = opened(rows, model, tmp_path / "run")
    opened(rows, model, tmp_path / "run")
    zero_tokens(store.path)
    with pytest.raises(DataError, match="not as `prepare` wrote them"):
        opened(rows, model, tmp_path / "run")


def test_a_token_of_the_text_that_the_model_has_no_embedding_for_is_refused(tmp_path, model):
    rows = write_jsonl(tmp_path / "d.jsonl", [{"text": "an <image> here"}])
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    said = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**said, "image_token": "<image>"}))
    with pytest.raises(
        DataError, match=r"token 258 \(<image>\), but the model has embeddings for only 258"
    ):
        opened(rows, model, tmp_path / "run")
    fine = write_jsonl(tmp_path / "fine.jsonl", [{"text": "none here"}])
    assert opened(fine, model, tmp_path / "run").attributes.highest_token == 257


def stores(model, run_dir, **settings):
    run_dir.mkdir(exist_ok=True)
    found = open_sources(
        DataConfig(seq_len=100, **settings), ALONE, run_dir, LazyTokenizer(model, None)
    )
    return [source.store for part in found for source in part]


def test_a_fraction_gives_training_data_and_held_out_data_once_for_all_starts(tmp_path, model):
    rows = [chat(f"q{n}", f"a{n}") for n in range(100)]
    path = str(write_jsonl(tmp_path / "d.jsonl", rows))
    train, held_out = stores(model, tmp_path / "run", path=path, eval_fraction=0.2)
    assert train.num_documents + held_out.num_documents == 100
    assert 5 < held_out.num_documents < 40
    again = stores(model, tmp_path / "run", path=path, eval_fraction=0.2)
    assert [store.path for store in again] == [train.path, held_out.path]
    assert train.path != stores(model, tmp_path / "run", path=path)[0].path


def test_what_is_left_out_of_a_folder_is_said_and_training_data_as_held_out_data_too(
    tmp_path, model, caplog
):
    for name in ("train", "test"):
        folder = tmp_path / "set" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / f"{name}-00000-of-00001.jsonl", [chat("q", name)])
    (tmp_path / "set" / "README.md").write_text("about")
    folder = str(tmp_path / "set")
    store, held_out = stores(
        model, tmp_path / "run", path=folder, eval_path=f"{folder}/data/test-*"
    )
    assert (store.num_documents, held_out.num_documents) == (1, 1)
    assert store.attributes.content != held_out.attributes.content
    assert "README.md: it describes the data" in caplog.text
    assert "test-00000-of-00001.jsonl: its name is that of a split to hold out" in caplog.text
    assert "nothing about new data" not in caplog.text
    stores(model, tmp_path / "run", path=folder, eval_path=folder)
    assert "both read" in caplog.text
    assert "train-00000-of-00001.jsonl: held-out loss on training data" in caplog.text


def test_another_reading_of_the_same_file_is_prepared_anew(tmp_path, model):
    rows = [{"question": "q", "answer": "a", "solution": "b"}, {"question": "q"}]
    settings = {"path": str(write_jsonl(tmp_path / "d.jsonl", rows))}
    with pytest.raises(DataError, match="line 2"):
        stores(model, tmp_path / "run", **settings)
    first = stores(model, tmp_path / "run", **settings, bad_rows="skip")[0]
    columns = {"question": "prompt", "solution": "completion"}
    second = stores(model, tmp_path / "run", **settings, bad_rows="skip", columns=columns)[0]
    assert first.attributes.content != second.attributes.content
