"""What is asked of prepared data before a run begins."""

import json
from types import SimpleNamespace

import pytest
from test_data_support import byte_tokenizer, chat, write_jsonl, zero_tokens

from hpc_tune.config.schema import DataConfig
from hpc_tune.data.prepare import prepare
from hpc_tune.errors import DataError
from hpc_tune.train.inputs import Tokenizing, ready_data

ALONE = SimpleNamespace(world=SimpleNamespace(rank=0, size=1), threads=1)


@pytest.fixture
def model(tmp_path):
    """A model directory of which only the tokenizer and the number of embeddings are there."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 258}')
    return tmp_path / "model"


def opened(path, model, run_dir):
    run_dir.mkdir(exist_ok=True)
    data = DataConfig(path=str(path), seq_len=100)
    return ready_data(str(path), data, Tokenizing(model, None), ALONE, run_dir)


def test_zeroed_tokens_are_refused_by_the_name_of_their_file(tmp_path, model):
    rows = write_jsonl(tmp_path / "d.jsonl", [chat("q", "a")])
    prepare(str(rows), tmp_path / "d.h5", Tokenizing(model, None).tokenizer, seq_len=100)
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
    with pytest.raises(DataError, match=r"token 258 \(<image>\), and the model embeddings for 258"):
        opened(rows, model, tmp_path / "run")
    fine = write_jsonl(tmp_path / "fine.jsonl", [{"text": "none here"}])
    assert opened(fine, model, tmp_path / "run").attributes.highest_token == 257
