"""Data that cannot be learned from is refused at the start: all answers cut, raw data gone."""

import re
from pathlib import Path

import numpy as np
import pytest

from hpc_tune.config.data import DataConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.writer import Block, write_store
from hpc_tune.errors import DataError
from hpc_tune.train.data import _require_source, _require_source_loss_tokens
from hpc_tune.train.sources import OpenSource, SourceConfig
from tests.support.data import attributes, histogram_of


def store_of(path, first_learned, length=100):
    """Documents of one length, each learned from a position on."""
    sizes = np.full(len(first_learned), length, dtype=np.int64)
    mask = np.concatenate([np.arange(length) >= first for first in first_learned])
    tokens = np.ones(len(mask), np.uint16)
    block = Block(sizes, tokens, mask.astype(np.uint8))
    write_store(path, [block], histogram_of(sizes), attributes(seq_len=length))
    return TokenStore.open(path)


def order(seq_len, seed=0, packing=True):
    return SampleOrder(seq_len, packing, seed)


@pytest.mark.parametrize(
    ("name", "word"), [("data.path", "learned"), ("data.eval_path", "measured")]
)
def test_answers_that_all_begin_behind_seq_len_are_refused_with_what_to_do(tmp_path, name, word):
    store = store_of(tmp_path / "d.h5", [64, 90, 70])
    with pytest.raises(DataError) as raised:
        _require_source_loss_tokens(OpenSource("", name, store), order(64), None, word)
    message = str(raised.value)
    assert message.startswith(f"{name}={tmp_path / 'd.h5'}: none of its 3 rows of data.seq_len=64")
    assert f"has a token that is {word}" in message
    assert "it was prepared with seq_len 100" in message
    assert "Raise data.seq_len" in message
    _require_source_loss_tokens(OpenSource("", name, store), order(65), None, word)


def test_a_first_token_is_nobodys_target(tmp_path):
    store = store_of(tmp_path / "d.h5", [0], length=1)
    with pytest.raises(DataError, match="none of its 1 rows"):
        _require_source_loss_tokens(OpenSource("", "data.path", store), order(64), 9, "learned")


def test_only_rows_that_are_used_count(tmp_path):
    store = store_of(tmp_path / "d.h5", [80] * 40 + [10])
    source = OpenSource("", "data.path", store)
    _require_source_loss_tokens(source, order(64, packing=False), 41, "learned")
    refused = 0
    for seed in range(8):
        try:
            _require_source_loss_tokens(source, order(64, seed, packing=False), 2, "learned")
        except DataError:
            refused += 1
    assert refused >= 6


def wanted(setting, path):
    return SourceConfig("", setting, DataConfig(path=str(path)))


def test_raw_data_that_is_gone_names_the_file_that_was_prepared_from_it(tmp_path):
    raw, cache = tmp_path / "raw" / "d.jsonl", tmp_path / "run" / "data"
    raw.parent.mkdir()
    with pytest.raises(DataError, match=r"there is no data at .*d\.jsonl$"):
        _require_source(wanted("data.path", raw), cache)
    for folder, source in ((cache, raw), (cache, "another.jsonl"), (raw.parent, raw)):
        folder.mkdir(parents=True, exist_ok=True)
        sizes, file = np.array([4]), folder / f"{Path(source).stem}.h5"
        block = Block(sizes, np.ones(4, np.uint16), np.ones(4, np.uint8))
        write_store(file, [block], histogram_of(sizes), attributes(source=str(source)))
        if source == raw:
            said = f"{file} was prepared from it: use that, as in data.eval_path={file}"
            with pytest.raises(DataError, match=re.escape(said)):
                _require_source(wanted("data.eval_path", raw), cache)
    raw.mkdir()  # there, and no data in it
    with pytest.raises(DataError, match="is a folder without any"):
        _require_source(wanted("data.path", raw), cache)
