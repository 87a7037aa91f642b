"""Weights of rows and messages: read, stored beside the tokens, and laid out in batches."""

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc_tune.data.encode import Encoder
from hpc_tune.data.fields import WrongRecord
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.packed_rows import (
    PackedRows,
    count_learned_tokens,
    make_batch,
    make_micro_batches,
    select_documents,
)
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import ReadOptions
from hpc_tune.data.records import Chat, Completion, NoLearnedTextError, Text, to_example
from hpc_tune.data.show import PLAIN_STYLE, describe_prepared_file, show_prepared_file
from hpc_tune.data.writer import verify_content
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer


def chat(*answers, **row):
    turns = []
    for number, marks in enumerate(answers):
        turns += [{"role": "user", "content": f"q{number}"}]
        turns += [{"role": "assistant", "content": f"answer {number}", **marks}]
    return {"messages": turns, **row}


def weights_by_text(example, loss_on="answers", seq_len=512):
    """Return the text of each run of equal weights that is learned, with its weight."""
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer, seq_len, loss_on)
    (block,) = encoder.encode([example])
    weights = block.loss_mask if block.loss_weights is None else block.loss_weights
    assert ((weights > 0) == (block.loss_mask > 0)).all()
    at = np.flatnonzero(np.diff(weights, prepend=-1, append=-1))
    runs = [(tokenizer.decode(block.tokens[a:b]), float(weights[a])) for a, b in pairwise(at)]
    return [(text, weight) for text, weight in runs if weight], encoder.counters


def test_messages_have_the_weights_of_openai_mistral_and_ms_swift():
    found, counters = weights_by_text(
        to_example(chat({"weight": 0}, {"weight": 0.5}, {"weight": 1}, {"loss_scale": 2.5}, {}))
    )
    expected = [("answer 1", 0.5), ("answer 2", 1), ("answer 3", 2.5), ("answer 4", 1)]
    assert found == [(f"{text}<|im_end|>", weight) for text, weight in expected]
    assert (counters.marked_answers, counters.weighted) == (1, 1)


def test_a_rows_weight_holds_for_its_answers_and_multiplies_their_own():
    assert to_example(chat({}, {"weight": 0.5}, weight=3)) == Chat(
        chat({}, {})["messages"], weight=3.0, weights={3: 1.5}
    )
    found, _ = weights_by_text(to_example(chat({}, {"weight": 0.5}, weight=3)))
    assert [weight for _, weight in found] == [3, 1.5]
    # As without weights: a turn's own mark stands against its row's.
    assert to_example(chat({}, {"weight": 1}, weight=0)).unlearned == {1}


@pytest.mark.parametrize(
    "row", [{"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}, {"text": "t"}]
)
def test_rows_of_every_form_have_weights(row):
    assert to_example({**row, "weight": 0.25}).weight == 0.25
    assert to_example({**row, "weight": 1.0}) == to_example(row)
    with pytest.raises(NoLearnedTextError):
        to_example({**row, "weight": 0.0})
    found, _ = weights_by_text(to_example({**row, "weight": 0.25}))
    assert {weight for _, weight in found} == {0.25}


def test_with_loss_on_all_prompts_have_the_rows_weight():
    row = to_example(chat({"weight": 3}, {"weight": 0}, weight=2))
    found, _ = weights_by_text(row, loss_on="all")
    assert [weight for _, weight in found] == [2, 6, 2, 2]
    assert found[1][0] == "answer 0<|im_end|>"
    assert not any("answer 1" in text for text, _ in found)
    assert weights_by_text(Text("abc", weight=2.0), "all")[0] == [("bc<|im_end|>", 2.0)]
    completion = Completion("q", "a", plain_prompt="q", weight=0.5)
    assert {w for _, w in weights_by_text(completion, "all")[0]} == {0.5}


def test_a_text_that_is_split_keeps_its_weight():
    tokenizer = byte_tokenizer()
    (block,) = Encoder(tokenizer, 16, "answers").encode([Text("x" * 40, weight=0.5)])
    assert (block.lengths.tolist(), set(block.loss_weights.tolist())) == ([16, 16, 9], {0.0, 0.5})


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"weight": -0.5}, r"weight is -0.5, expected a number from 0 on"),
        ({"weight": float("nan")}, "weight is NaN, expected a number from 0 on"),
        ({"weight": float("inf")}, "weight is Infinity, expected"),
        ({"weight": 10**400}, "expected a number from 0 on"),
        ({"weight": 1e-60}, "weight is 1e-60, expected"),
        ({"weight": "0.5"}, 'weight is "0.5", expected a number from 0 on'),
        ({"weight": [1]}, r"weight is \[1\], expected"),
        ({"loss_scale": -1}, "loss_scale is -1, expected a number"),
        ({"loss": 0.5}, "loss is 0.5, expected 0 or 1"),
        ({"weight": 0.5, "loss_scale": 0.7}, "weight and loss_scale contradict each other"),
        ({"weight": 0.5, "loss": False}, "weight and loss contradict each other"),
    ],
)
def test_what_is_no_weight_is_refused(marks, said):
    for row in (chat(marks), chat({}, **marks), {"text": "t", **marks}):
        with pytest.raises(WrongRecord, match=said):
            to_example(row)


def test_a_mark_beside_a_weight_only_says_that_it_is_learned():
    assert to_example(chat({"weight": 0.5, "loss": True})).weights == {1: 0.5}


def _prepare(folder, rows, name="one", **settings):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = settings.pop("reading", ReadOptions())
    settings = PrepareSettings(seq_len=64, loss_on="answers", reading=reading, **settings)
    counters = prepare_data(
        str(folder / f"{name}.jsonl"), folder / f"{name}.h5", byte_tokenizer(), settings
    )
    return TokenStore.open(folder / f"{name}.h5"), counters


ROWS = [chat({"weight": 0.5 + n}) if n % 3 else chat({}) for n in range(30)]


def test_weights_are_stored_beside_the_tokens_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_tune.data.encode.BATCH_CHARS", 200)  # blocks with weights and without
    store, counters = _prepare(tmp_path, ROWS)
    assert (store.attributes.version, counters.weighted) == (6, 20)
    assert counters.loss_tokens == int(np.count_nonzero(store.loss_weights[:]))
    assert counters.loss_tokens == int(store.loss_mask[:].sum())
    found = {float(store.document(d)[1].max()) for d in range(store.num_documents)}
    assert found == {1.0, *(0.5 + n for n in range(30) if n % 3)}
    verify_content(store)
    lines, is_valid = describe_prepared_file(store.path)
    assert is_valid
    assert "version 6" in lines[0]
    assert "20 documents with weights in the loss other than 0 and 1" in " ".join(lines)
    shown = "\n".join(show_prepared_file(store, byte_tokenizer(), 2, PLAIN_STYLE))
    assert "learned with weight 1.5" in shown
    with store.path.open("r+b") as file:
        at = store.loss_weights._offset + 4 * int(np.flatnonzero(store.loss_weights[:])[0])
        file.seek(at)
        file.write(np.float32(9).tobytes())
    with pytest.raises(DataError, match="documents are not as"):
        verify_content(TokenStore.open(store.path))


def test_files_without_weights_are_what_they_are_with_other_marks(tmp_path, monkeypatch):
    marked = [chat({"weight": 1}, {"weight": 0}), chat({"loss_scale": 1.0}, weight=1.0)]
    plain = [chat({}, {"train": False}), chat({})]
    for name, rows in (("marked", marked), ("plain", plain)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        store, _ = _prepare(Path(), rows)
        assert (store.attributes.version, store.loss_weights) == (4, None)
    first, second = ((tmp_path / name / "one.h5").read_bytes() for name in ("marked", "plain"))
    assert first == second
    with h5py.File(tmp_path / "plain" / "one.h5") as file:
        assert "weighted" not in file.attrs["counters"]
        assert "loss_weights" not in file


def test_weights_do_not_move_rows_between_training_and_held_out(tmp_path):
    """The split goes by what a row says, so that a file with weights has that of one without."""
    sides = []
    for rows in (ROWS, [chat({"weight": 1}) for _ in ROWS]):
        rows = [
            {**r, "messages": [{"role": "system", "content": str(n)}, *r["messages"]]}
            for n, r in enumerate(rows)
        ]
        reading = ReadOptions(part="held-out", held_out=0.4)
        store, _ = _prepare(tmp_path, rows, f"part{len(sides)}", reading=reading)
        sides.append([store.document(d)[0].tolist() for d in range(store.num_documents)])
    assert sides[0] == sides[1]


def test_a_batch_has_the_weights_of_its_labels_row_by_row(tmp_path):
    store, _ = _prepare(tmp_path, ROWS)
    packed = PackedRows(store, SampleOrder(256, packing=True, seed=1))
    (batch,) = make_micro_batches(packed, range(0, 4, 2), 2, 2)
    documents = [store.document(d) for row in batch.rows for d in packed.sampler.documents_of(row)]
    labels = batch.labels_BT[batch.labels_BT >= 0].tolist()
    assert labels == [int(t) for tokens, w in documents for t in tokens[1:][w[1:] > 0]]
    wanted = [float(x) for _, w in documents for x in w[1:][w[1:] > 0]]
    assert batch.weights_N.tolist() == wanted
    assert batch.num_loss_terms == pytest.approx(sum(wanted), rel=1e-12)
    assert batch.num_loss_tokens == len(wanted)
    assert batch.num_bytes == 3 * batch.tokens_BT.nbytes + 4 * len(wanted)


@pytest.mark.parametrize("limit", [None, 11])
def test_a_source_of_a_mixture_has_learned_tokens_whatever_they_weigh(tmp_path, limit):
    store, _ = _prepare(tmp_path, ROWS)
    numbers = range(30) if limit is None else select_documents(30, limit)
    by_hand = sum(int(np.count_nonzero(store.document(n)[1])) for n in map(int, numbers))
    assert count_learned_tokens(store, 64, limit) == by_hand


def test_data_of_which_nothing_counts_are_refused(tmp_path):
    for row in (chat({"weight": 0}), chat({}, weight=0), {"text": "t", "weight": 0}):
        with pytest.raises(DataError, match="gives no example to learn from"):
            _prepare(tmp_path, [row] * 3)


@pytest.mark.parametrize("form", ["answers", "pairs", "labels"])
def test_advantages_are_refused_by_name(tmp_path, form):
    row = {"prompt": "q", "completion": "a", "advantage": -0.5}
    if form == "pairs":
        row = {"prompt": "q", "chosen": "a", "rejected": "b", "advantage": 1}
    if form == "labels":
        row["label"] = True
    with pytest.raises(DataError, match="advantage: advantages belong to reinforcement learning"):
        _prepare(tmp_path, [row], reading=ReadOptions(form=form))
    if form == "answers":
        columns = (("advantage", "weight"),)
        reading = ReadOptions(columns=columns)
        store, _ = _prepare(tmp_path, [{**row, "advantage": 0.5}], "renamed", reading=reading)
        assert store.attributes.has_weights
        with pytest.raises(DataError, match=r"weight is -0\.5, expected a number from 0 on"):
            _prepare(tmp_path, [row], "negative", reading=reading)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0.5}),
        ("labels", {"prompt": "q", "completion": "a", "label": True, "weight": 2}),
        ("labels", chat({"weight": 2}, label=False)),
        ("pairs", {**chat({"weight": 2}), "rejected_response": "b"}),
    ],
)
def test_preferences_with_weights_are_refused_by_name(tmp_path, form, row):
    with pytest.raises(DataError, match=r"weights other than 0 and 1 are for answers"):
        _prepare(tmp_path, [row], reading=ReadOptions(form=form))


def test_beside_weighted_documents_the_tokens_of_others_count_one():
    tokens = np.arange(4, dtype=np.uint32)
    plain = (tokens, np.array([0, 1, 0, 1], dtype=np.uint8))
    weighted = (tokens, np.array([0, 0.5, 2, 0], dtype=np.float32))
    batch = make_batch([[plain, weighted], [plain]], 16, 0)
    assert batch.weights_N.tolist() == [1, 1, 0.5, 2, 1, 1]
    assert batch.num_loss_tokens == 6
    assert batch.num_loss_terms == 6.5
    assert make_batch([[plain], [plain]], 16, 0).weights_N is None
