"""Preferences from rows to batches: two sides in a document, and both in a row of the batch."""

import json

import h5py
import numpy as np
import pytest
import torch
from tokenizers import models

from hpc_tune.batch import IGNORED_LABEL, padding_batch
from hpc_tune.config.data import DataConfig
from hpc_tune.data import chunks
from hpc_tune.data.encode import PreferenceEncoder
from hpc_tune.data.hdf5_format import TokenStore, append_checksum
from hpc_tune.data.loader import HeldOutRows, Loader
from hpc_tune.data.order import MixturePhase, MixtureSource, SampleOrder
from hpc_tune.data.packed_rows import MixedRows, PackedRows, count_learned_tokens, select_documents
from hpc_tune.data.preferences import to_labeled_answers, to_pair
from hpc_tune.data.prepare import (
    PrepareSettings,
    PreparingRanks,
    cache_file_name,
    join_parts,
    plan_preparation,
    prepare_data,
    tokenize_chunks,
)
from hpc_tune.data.reading import ReadOptions
from hpc_tune.data.show import (
    PLAIN_STYLE,
    describe_prepared_file,
    show_documents,
    show_prepared_file,
)
from hpc_tune.data.writer import verify_content
from hpc_tune.errors import DataError
from hpc_tune.train.data import preparation_settings
from tests.support.data import byte_tokenizer, chat, write_jsonl
from tests.unit.data.test_chat_families import FAMILIES, tokenizer_of

# What hpc_tune wrote for plain rows before it knew of preferences.
PLAIN_CONTENT = "fc398cc8d76ecfa536d96b9e7ce40807d66d0b5059bf58fe76a3b255c7b60ff6"
PLAIN_ATTRIBUTES = (
    "content counters format highest_token hpc_tune_version loss_on seq_len source template_date"
    " tokenizer tokenizer_fingerprint version vocab_size"
)
PLAIN_COUNTERS = (
    "bad_rows control_texts control_tokens documents dropped empty_answers ended_by_next examples"
    " left_out loss_tokens lost_calls lost_reasoning lost_tools marked_answers null_contents"
    " other_answers own_controls split tokens truncated unclear_answers unended_answers"
    " unended_texts"
)
PLAIN_KEY = "12cd4acc98a35b83"
PAIRS = [
    {"prompt": f"question {n}", "chosen": "good " * (n % 7 + 1), "rejected": "bad" * (n % 5 + 1)}
    for n in range(60)
]
LABELLED = [
    {"prompt": f"question {n}", "completion": f"answer {n}", "label": n % 3 == 0} for n in range(60)
]


def settings(form, seq_len=256):
    return PrepareSettings(seq_len, reading=ReadOptions(form=form))


def prepared(tmp_path, rows, form, seq_len=256, tokenizer=None, name="p"):
    source = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    out = tmp_path / f"{name}.h5"
    prepare_data(str(source), out, tokenizer or byte_tokenizer(), settings(form, seq_len))
    return TokenStore.open(out)


def sides_of(tokenizer, rows, seq_len=1000):
    """Return the sides of each document as (text, learned text), and the counts."""
    encoder, documents = PreferenceEncoder(tokenizer, seq_len, "answers"), []
    for block in encoder.encode(rows):
        starts = np.cumsum(block.lengths) - block.lengths
        for start, length, border in zip(starts, block.lengths, block.borders, strict=True):
            cuts = [start, start + border, start + length]
            document = []
            for a, b in zip(cuts, cuts[1:], strict=False):
                tokens, mask = block.tokens[a:b], block.loss_mask[a:b]
                document.append((tokenizer.decode(tokens), tokenizer.decode(tokens[mask > 0])))
            documents.append(document if length > border else document[:1])
    return documents, encoder.counters


def pair(prompt, chosen, rejected):
    return to_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected})


@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_are_what_the_stock_template_writes_and_the_answer_is_learned(name):
    tokenizer = tokenizer_of(FAMILIES[name])
    asked = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]
    asked.append({"role": "user", "content": "two?"})
    rows = [to_pair({"prompt": asked, "chosen": "2", "rejected": "3"})]
    encoder = PreferenceEncoder(tokenizer, 1000, "answers")
    (block,) = encoder.encode(rows)
    border = int(block.borders[0])
    for side, answer in ((slice(0, border), "2"), (slice(border, None), "3")):
        whole = [*asked, {"role": "assistant", "content": answer}]
        stock = tokenizer.apply_chat_template(whole, tokenize=False) + FAMILIES[name].added
        ids = tokenizer(stock, add_special_tokens=False)["input_ids"]
        assert block.tokens[side].tolist() == ids
        mask = block.loss_mask[side]
        learned = FAMILIES[name].learned[1].replace("2", answer, 1)
        assert tokenizer.decode(block.tokens[side][mask > 0]) == learned
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if ids[: len(prompt_ids)] == prompt_ids:
            assert int(np.argmax(mask)) == len(prompt_ids)
    assert encoder.counters.documents == 1
    assert not encoder.counters.dropped
    assert encoder.counters.marked_answers == 0


def test_text_without_a_template_is_prompt_answer_and_end():
    rows = [pair("q: ", "yes", "no")]
    documents, _ = sides_of(byte_tokenizer(None), rows)
    assert documents == [
        [("q: yes<|im_end|>", "yes<|im_end|>"), ("q: no<|im_end|>", "no<|im_end|>")]
    ]


def test_the_prompt_is_cut_from_the_left_on_both_sides_alike():
    row = pair("0123456789", "yes", "no")
    documents, counters = sides_of(byte_tokenizer(None), [row], 16)
    assert documents[0][0][0] == "6789yes<|im_end|>"
    assert documents[0][1][0] == "6789no<|im_end|>"
    assert documents[0][0][1] == "yes<|im_end|>"
    assert (counters.cut_prompts, counters.tokens) == (1, 15)
    whole = len("0123456789") * 2 + len("yes") + len("no") + 2
    assert (counters.cut_tokens, counters.cut_lengths) == (whole - 15, {str(whole): 1})
    assert "1 prompts cut from the left" in str(counters)


def test_a_bos_in_front_is_kept_and_a_token_of_the_prompt_beside_it():
    tokenizer, row = byte_tokenizer(None, bos=True), pair("0123456789", "yes", "no")
    documents, _ = sides_of(tokenizer, [row], 11)
    assert [text for text, _ in documents[0]] == [
        "<|im_start|>9yes<|im_end|>",
        "<|im_start|>9no<|im_end|>",
    ]
    documents, counters = sides_of(tokenizer, [row], 10)
    assert documents == []
    assert counters.dropped == {"the answers leave no room in seq_len for a token of the prompt": 1}
    assert counters.cut_prompts == 0
    whole = 2 * (1 + len("0123456789") + 1) + len("yes") + len("no")
    assert (counters.cut_tokens, counters.cut_lengths) == (whole, {str(whole): 1})


def test_sides_that_are_no_pair_to_the_model_are_dropped_and_counted():
    strips = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endfor %}"
    rows = [pair("q", "yes", "yes "), pair("q", "yes", "no")]
    documents, counters = sides_of(byte_tokenizer(strips), rows)
    assert len(documents) == 1
    assert counters.dropped == {"the two answers are the same to the model": 1}
    merging = byte_tokenizer(None)
    vocab = {**merging.get_vocab(), "qy": 300}
    merging.backend_tokenizer.model = models.BPE(vocab=vocab, merges=[("q", "y")])
    documents, counters = sides_of(merging, [pair("q", "yes", "no"), pair("q ", "yes", "no")])
    assert len(documents) == 1
    assert counters.dropped == {
        "the prompt has other tokens before one answer than before the other": 1
    }


def labeled(number, answer=None):
    return to_labeled_answers(
        {"prompt": f"q{number} ", "completion": answer or f"a{number}", "label": number != 1}
    )


def test_each_labeled_answer_has_the_next_rows_answer_after_its_prompt():
    documents, counters = sides_of(byte_tokenizer(None), [labeled(n) for n in range(3)])
    texts = [[text.removesuffix("<|im_end|>") for text, _ in sides] for sides in documents]
    assert texts == [["q0 a0", "q0 a1"], ["q1 a1", "q1 a2"], ["q2 a2", "q2 a0"]]
    assert documents[0][1][1] == "a1<|im_end|>"
    assert counters.unmatched == 0


@pytest.mark.parametrize("as_chat", [False, True])
def test_an_answer_to_the_same_prompt_is_no_mismatched_one(as_chat):
    def row(question, answer):
        fields = {"prompt": question, "completion": answer}
        if as_chat:
            turns = (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            )
            fields = {"messages": [*turns]}
        return to_labeled_answers({**fields, "label": True})

    rows = [row(*qa) for qa in (("p", "1"), ("p", "2"), ("q", "3"), ("r", "4"), ("r", "5"))]
    documents, counters = sides_of(byte_tokenizer(), rows)
    learned = [[own.removesuffix("<|im_end|>") for _, own in sides] for sides in documents]
    assert learned == [["1", "3"], ["2", "3"], ["3", "4"], ["4", "1"], ["5", "1"]]
    assert counters.unmatched == 0
    ends_as_it_begins = [rows[0], rows[2], rows[3], rows[1]]
    for only, others in ((rows[:2], []), (ends_as_it_begins, ["3", "4", "2", "3"])):
        documents, counters = sides_of(byte_tokenizer(), only)
        own = [sides[1][1].removesuffix("<|im_end|>") for sides in documents if len(sides) > 1]
        assert own == others
        assert counters.unmatched == len(only) - len(others)


def test_mismatched_answers_are_rendered_by_the_chat_template():
    documents, counters = sides_of(byte_tokenizer(), [labeled(n) for n in range(2)])
    turn = "<|im_start|>user\nq0 <|im_end|>\n<|im_start|>assistant\n"
    assert [text for text, _ in documents[0]] == [f"{turn}a0<|im_end|>\n", f"{turn}a1<|im_end|>\n"]
    assert counters.examples == 2


def test_a_labeled_answer_that_fits_keeps_its_prompt_whatever_the_next_answer_is():
    rows = [labeled(0), labeled(1, "long" * 9)]
    documents, counters = sides_of(byte_tokenizer(None), rows, 40)
    assert [[text.removesuffix("<|im_end|>") for text, _ in sides] for sides in documents] == [
        ["q0 a0", "q0 " + "long" * 9],
        ["q1 " + "long" * 9, "q1 a0"],
    ]
    assert (counters.unmatched, counters.cut_prompts, counters.cut_others) == (0, 0, 0)


def test_each_side_of_a_labeled_answer_is_cut_by_itself():
    rows = [labeled(0), labeled(1, "long" * 9)]
    documents, counters = sides_of(byte_tokenizer(None), rows, 38)
    assert [[text.removesuffix("<|im_end|>") for text, _ in sides] for sides in documents] == [
        ["q0 a0", " " + "long" * 9],
        [" " + "long" * 9, "q1 a0"],
    ]
    assert (counters.unmatched, counters.cut_prompts, counters.cut_others) == (0, 1, 1)
    assert "1 prompts cut from the left, for the answers to fit into seq_len" in str(counters)
    assert "1 prompts cut from the left before the answer of another row" in str(counters)


def test_only_own_answers_of_labeled_ones_are_counted():
    rows = [labeled(0), labeled(1, "long" * 9)]
    _, counters = sides_of(byte_tokenizer(None), rows, 100)
    own = [len("q0 a0") + 1, len("q1 " + "long" * 9) + 1]
    assert (counters.tokens, counters.loss_tokens) == (sum(own), sum(own) - 6)


def test_a_mismatched_answer_of_several_messages_is_the_whole_of_it():
    def turns(question, *said):
        asked = {"role": "user", "content": question}
        roles = ("assistant", "user", "assistant")
        return [asked, *({"role": r, "content": s} for r, s in zip(roles, said, strict=False))]

    rows = [
        to_labeled_answers(
            {
                "chosen": turns("q0", "FIRST OWN", "go on", "OWN"),
                "rejected": turns("q0", "FIRST BAD", "go on", "BAD"),
            }
        ),
        to_labeled_answers({"chosen": turns("q1", "OTHER"), "rejected": turns("q1", "WORSE")}),
    ]
    documents, _ = sides_of(byte_tokenizer(), rows)
    end = "<|im_end|>"
    asked, says = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"
    assert documents[0][0][1] == f"FIRST OWN{end}OWN{end}"
    assert documents[0][1] == (asked.format("q0") + says.format("OTHER"), f"OTHER{end}")
    theirs = says.format("FIRST OWN") + asked.format("go on") + says.format("OWN")
    assert documents[2][1] == (asked.format("q1") + theirs, f"FIRST OWN{end}OWN{end}")


def test_rows_of_one_prompt_are_no_mismatch_where_answers_are_several_messages():
    def row(first, last):
        call = [{"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
        asked = [{"role": "user", "content": "q"}]
        last = [{"role": "assistant", "content": last}]
        fields = {"chosen": asked + call + last, "rejected": [*asked, *last]}
        return to_labeled_answers(fields)

    documents, counters = sides_of(byte_tokenizer(), [row("a", "b"), row("c", "d")])
    assert [len(sides) for sides in documents] == [1, 1, 1, 1]
    assert counters.unmatched == 4


def test_a_row_alone_has_no_second_side_nor_has_one_whose_neighbor_is_too_long():
    documents, counters = sides_of(byte_tokenizer(None), [labeled(0)])
    assert [len(sides) for sides in documents] == [1]
    assert counters.unmatched == 1
    rows = [labeled(0), labeled(1, "long" * 9)]
    documents, counters = sides_of(byte_tokenizer(None), rows, 37)
    assert [[text for text, _ in sides] for sides in documents] == [["q0 a0<|im_end|>"]]
    assert (counters.unmatched, counters.cut_prompts) == (1, 0)
    assert sum(counters.dropped.values()) == 1


def test_the_two_answers_of_a_pair_take_those_of_the_next_pair():
    rows = [
        to_labeled_answers({"prompt": f"q{n} ", "chosen": f"c{n}", "rejected": f"r{n}"})
        for n in (0, 1)
    ]
    documents, counters = sides_of(byte_tokenizer(None), rows)
    texts = [[text.removesuffix("<|im_end|>") for text, _ in sides] for sides in documents]
    assert texts == [["q0 c0", "q0 c1"], ["q0 r0", "q0 r1"], ["q1 c1", "q1 c0"], ["q1 r1", "q1 r0"]]
    assert (counters.examples, counters.unpaired) == (4, 2)
    assert "2 pairs taken as two labeled answers each" in str(counters)


def test_blocks_do_not_change_the_documents(monkeypatch):
    rows = [to_pair(row) for row in PAIRS]
    whole, _ = sides_of(byte_tokenizer(), rows)
    monkeypatch.setattr("hpc_tune.data.encode.BATCH_CHARS", 100)
    assert sides_of(byte_tokenizer(), rows)[0] == whole


def test_loss_on_prompts_is_refused():
    with pytest.raises(DataError, match=r"data\.loss_on=all: with preferences only the answers"):
        PreferenceEncoder(byte_tokenizer(), 100, "all")


@pytest.mark.parametrize(("rows", "form"), [(PAIRS, "pairs"), (LABELLED, "labels")])
def test_the_same_bytes_for_any_number_of_ranks(tmp_path, monkeypatch, rows, form):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    source, tokenizer = str(write_jsonl(tmp_path / "raw.jsonl", rows)), byte_tokenizer()
    files = []
    for size in (1, 3):
        work = plan_preparation(source, tmp_path / f"{size}.h5", tokenizer, settings(form))
        assert len(work.chunks) > 3
        for rank in range(size):
            tokenize_chunks(work, tokenizer, PreparingRanks(rank, size))
        join_parts(work)
        files.append(work.out.read_bytes())
    assert files[0] == files[1]


def test_a_chunk_is_rotated_on_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    store = prepared(tmp_path, LABELLED[:55], "labels", tokenizer=byte_tokenizer(None))
    decode = byte_tokenizer(None).decode
    second = [decode(store.sides(n)[1][0]) for n in range(55)]
    following = [int(text.split("answer ")[1].removesuffix("<|im_end|>")) for text in second]
    back = [n for n, other in enumerate(following) if other != n + 1]
    assert len(back) > 3
    assert [following[n] for n in back] == [0, *(n + 1 for n in back[:-1])]


def test_a_store_of_pairs_says_what_it_is(tmp_path):
    store = prepared(tmp_path, PAIRS, "pairs")
    verify_content(store)
    with h5py.File(store.path) as file:
        assert file.attrs["version"] == 5
        assert file.attrs["form"] == "pairs"
        assert file["documents/borders"].dtype == np.int64
        assert "labels" not in file["documents"]
    assert (store.form, store.num_documents, store.labels) == ("pairs", 60, None)
    (chosen, chosen_mask), (rejected, rejected_mask) = store.sides(3)
    assert len(chosen) == store.borders[3]
    assert np.r_[chosen, rejected].tolist() == store.document(3)[0].tolist()
    assert chosen_mask[0] == rejected_mask[0] == 0
    assert chosen_mask.sum() == len("good " * 4) + 1
    assert rejected_mask.sum() == len("bad" * 4) + 1
    store.require_form("pairs")
    with pytest.raises(DataError, match=r"holds pairs of .*, but this training needs answers to l"):
        store.require_form("answers")


def test_a_store_of_labels_has_them(tmp_path):
    store = prepared(tmp_path, LABELLED, "labels")
    verify_content(store)
    assert store.labels[:].tolist() == [n % 3 == 0 for n in range(60)]
    assert store.labels.dtype == np.uint8
    assert len(store.sides(0)) == 2
    with h5py.File(store.path) as file:
        assert file.attrs["version"] == 7


def test_a_labeled_answer_takes_as_much_of_a_row_as_its_longer_side(tmp_path):
    rows = [{**row, "completion": "word " * (n % 9 + 1)} for n, row in enumerate(LABELLED)]
    store = prepared(tmp_path, rows, "labels")
    longer = [max(len(tokens) for tokens, _ in store.sides(n)) for n in range(60)]
    assert store.packed_lengths(0, 60).tolist() == longer
    assert store.packed_lengths(7, 9).tolist() == longer[7:9]
    assert store.length_values.tolist() == sorted({*longer})
    for limit in (None, 20):
        packed = PackedRows(store, ORDER, limit)
        for row in range(packed.num_rows):
            documents = [store.sides(n) for n in packed.sampler.documents_of(row)]
            for side in (0, 1):
                assert sum(len(sides[side][0]) for sides in documents) <= ORDER.seq_len
    own = [int(store.sides(n)[0][1].sum()) for n in range(60)]
    assert count_learned_tokens(store, ORDER.seq_len) == sum(own)
    assert count_learned_tokens(store, ORDER.seq_len, 20) == sum(
        own[n] for n in select_documents(60, 20)
    )


def test_labeled_answers_of_the_version_before_are_refused_with_what_to_do(tmp_path):
    store = prepared(tmp_path, LABELLED, "labels")
    with h5py.File(store.path, "r+") as file:
        file.attrs["version"] = 5
    append_checksum(store.path)
    with pytest.raises(DataError, match=r"version 5 .* make room .*train in another run\.dir"):
        TokenStore.open(store.path)


@pytest.mark.parametrize("dataset", ["documents/borders", "documents/labels", "loss_mask"])
def test_a_changed_border_or_label_is_found(tmp_path, dataset):
    store = prepared(tmp_path, LABELLED, "labels")
    with h5py.File(store.path) as file:
        offset = file[dataset].id.get_offset()
    with store.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x07")
    with pytest.raises(DataError, match="not as `prepare` wrote them"):
        verify_content(TokenStore.open(store.path))


def test_plain_data_is_prepared_to_the_same_bytes_as_before_preferences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpc_tune.data.prepare.__version__", "0")
    rows = [chat(f"question {n}", "answer " * (n % 40)) for n in range(1, 300)]
    write_jsonl(tmp_path / "raw.jsonl", rows)
    prepare_data("raw.jsonl", "p.h5", byte_tokenizer(), PrepareSettings(128))
    with h5py.File("p.h5") as file:
        assert file.attrs["version"] == 4
        assert file.attrs["content"] == PLAIN_CONTENT
        assert " ".join(sorted(file.attrs)) == PLAIN_ATTRIBUTES
        known = {*PLAIN_COUNTERS.split(), "cut_lengths", "cut_tokens"}
        assert {*json.loads(file.attrs["counters"])} == known, "some are cut"
        assert [*file["documents"]] == ["by_length", "offsets"]
    prepare_data("raw.jsonl", "whole.h5", byte_tokenizer(), PrepareSettings(512))
    with h5py.File("whole.h5") as file:
        assert " ".join(json.loads(file.attrs["counters"])) == PLAIN_COUNTERS
    monkeypatch.setattr("hpc_tune.data.prepare.source_fingerprint", lambda paths: "identity")
    assert cache_file_name("raw.jsonl", "mark", PrepareSettings(128)) == f"raw-{PLAIN_KEY}.h5"


def test_each_form_has_a_name_of_its_own_in_the_cache(tmp_path):
    source = str(write_jsonl(tmp_path / "raw.jsonl", PAIRS))
    names = {
        cache_file_name(source, "mark", settings(form)) for form in ("answers", "pairs", "labels")
    }
    assert len(names) == 3
    assert preparation_settings(DataConfig(), form="pairs").reading.form == "pairs"


ORDER = SampleOrder(256, packing=True, seed=0)


def loaded(store):
    return Loader(PackedRows(store, ORDER), ORDER, global_size=4, micro_size=2)


def rows_of(store):
    return HeldOutRows(store, ORDER)


def test_pairs_are_neighbors_in_a_row_and_counted(tmp_path):
    store = prepared(tmp_path, PAIRS, "pairs")
    loader = loaded(store)
    reference = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    loader.stream.set_reference_log_probs(reference)
    seen = []
    while batches := loader.next_step():
        for batch in batches:
            numbers = rows_of(store).documents_in(batch)
            sides = [side for number in numbers for side in store.sides(number)]
            seen += numbers
            assert batch.form == "pairs"
            assert batch.mismatched_batch is None
            assert batch.num_loss_terms == len(numbers)
            assert batch.unpadded_document_lengths == [len(tokens) for tokens, _ in sides]
            expected = [[int(mask.sum()) for _, mask in store.sides(n)] for n in numbers]
            assert batch.pairs.num_loss_tokens_P2.tolist() == expected
            assert batch.num_loss_tokens == np.sum(expected)
            assert (
                batch.pairs.reference_log_probs_P2.numpy().tolist() == reference[numbers].tolist()
            )
            assert batch.pairs.reference_log_probs_P2.dtype == torch.float32
            assert batch.pairs.is_desirable_P.tolist() == []
            starts = batch.positions_BT == 0
            laid = [
                row[: len(row) - padded]
                for row, padded in zip(batch.tokens_BT, batch.padding, strict=True)
            ]
            whole = np.concatenate([tokens for tokens, _ in sides])
            assert torch.cat(laid).tolist() == whole.tolist()
            assert int(starts.sum()) == len(sides) + sum(map(bool, batch.padding))
            # The first token of a side is nobody's label.
            before_a_start = starts.roll(-1, 1)
            assert (batch.labels_BT[before_a_start] == IGNORED_LABEL).all()
    assert sorted(seen) == list(range(60))
    loader.close()


def test_pairs_of_a_mixture_have_the_reference_of_their_own_source(tmp_path):
    sources, parts = {}, {}
    for at, (name, rows) in enumerate({"p": PAIRS[:40], "q": PAIRS[40:]}.items()):
        store = prepared(tmp_path, rows, "pairs", name=name)
        sources[name] = PackedRows(store, ORDER)
        numbers = np.arange(2 * len(rows), dtype=np.float32).reshape(-1, 2)
        sources[name].set_reference_log_probs(1000 * at + numbers)
        parts[name] = MixtureSource("", None, sources[name].num_rows, 100, epochs=1)
    mixed = MixedRows(sources, [MixturePhase(parts)])
    loader, seen = Loader(mixed, ORDER, global_size=3, micro_size=2), []
    while batches := loader.next_step():
        for batch in batches:
            assert batch.form == "pairs"
            places = [mixed.source_and_row(row) for row in batch.rows]
            packed = [sources[mixed.names[source]] for source, _ in places]
            numbers = [
                1000 * source + 2 * document
                for (source, row), rows in zip(places, packed, strict=True)
                for document in rows.sampler.documents_of(row)
            ]
            assert batch.pairs.reference_log_probs_P2[:, 0].tolist() == numbers
            seen += numbers
    assert len(seen) == len(set(seen)) == 60
    loader.close()


def test_labeled_answers_and_the_mismatched_ones_are_two_batches_of_the_same_rows(tmp_path):
    store = prepared(tmp_path, LABELLED[:59], "labels")
    loader = loaded(store)
    reference = np.arange(118, dtype=np.float32).reshape(59, 2)
    loader.stream.set_reference_log_probs(reference)
    for batch in loader.next_step():
        numbers, others = rows_of(store).documents_in(batch), batch.mismatched_batch
        assert batch.form == "labels"
        assert others.rows == batch.rows
        assert not batch.pairs.num_loss_tokens_P2[:, 1].any()
        assert not others.pairs.num_loss_tokens_P2[:, 0].any()
        assert torch.equal(others.pairs.reference_log_probs_P2, batch.pairs.reference_log_probs_P2)
        assert batch.unpadded_document_lengths == [len(store.sides(n)[0][0]) for n in numbers]
        assert others.unpadded_document_lengths == [len(store.sides(n)[1][0]) for n in numbers]
        counts = [[int(mask.sum()) for _, mask in store.sides(n)] for n in numbers]
        assert (batch.pairs.num_loss_tokens_P2 + others.pairs.num_loss_tokens_P2).tolist() == counts
        assert batch.num_loss_tokens == sum(own for own, _ in counts)
        assert others.num_loss_tokens == sum(other for _, other in counts)
        assert batch.pairs.is_desirable_P.tolist() == [n % 3 == 0 for n in numbers]
        assert batch.pairs.reference_log_probs_P2.numpy().tolist() == reference[numbers].tolist()
    loader.close()


def test_a_missing_side_has_a_count_of_zero(tmp_path):
    store = prepared(tmp_path, LABELLED[:1], "labels")
    (batch,) = loaded(store).next_step()[:1]
    assert batch.pairs.num_loss_tokens_P2[0].tolist() == [len("answer 0") + 1, 0]
    assert batch.mismatched_batch.tokens_BT.shape == (1, 8)
    assert batch.mismatched_batch.num_loss_tokens == 0
    assert batch.mismatched_batch.unpadded_document_lengths == []


@pytest.mark.parametrize(("rows", "form"), [(PAIRS, "pairs"), (LABELLED, "labels")])
@pytest.mark.parametrize("size", [1, 3])
def test_held_out_rows_name_each_document_once_over_all_ranks(tmp_path, rows, form, size):
    store, order = prepared(tmp_path, rows, form), SampleOrder(256, packing=True, seed=0)
    seen, nums = [], []
    for rank in range(size):
        held_out = HeldOutRows(store, order, rank=rank, size=size)
        held_out.set_reference_log_probs(np.ones((60, 2), np.float32))
        batches = list(held_out.batches(micro_size=2))
        nums.append(len(batches))
        for batch in batches:
            numbers = held_out.documents_in(batch)
            assert len(batch.pairs.num_loss_tokens_P2) == len(numbers)
            assert (batch.pairs.reference_log_probs_P2 == 1).all()
            seen += numbers
    assert sorted(seen) == list(range(60))
    assert len(set(nums)) == 1


def test_empty_batches_have_empty_pairs():
    for form in ("answers", "pairs", "labels"):
        batch = padding_batch(3, form)
        assert batch.form == form
        assert batch.num_loss_terms == 0
        if form != "answers":
            assert [tensor.shape for tensor in batch.pairs.tensors] == [(0, 2), (0, 2), (0,)]
    assert padding_batch(3, "labels").mismatched_batch.pairs.num_loss_tokens_P2.shape == (0, 2)


def test_preferences_longer_than_a_row_are_refused(tmp_path):
    store = prepared(tmp_path, PAIRS, "pairs")
    longest = int(store.length_values[-1])
    order = SampleOrder(longest - 1, packing=True, seed=0)
    with pytest.raises(DataError, match=rf"set data\.seq_len={longest} or more, or prepare"):
        HeldOutRows(store, order)


@pytest.mark.parametrize(("rows", "form"), [(PAIRS, "pairs"), (LABELLED, "labels")])
def test_prefetched_steps_take_no_more_than_they_are_counted_for(tmp_path, rows, form):
    loader = loaded(prepared(tmp_path, rows, form))
    while batches := loader.next_step():
        assert sum(batch.num_bytes for batch in batches) <= loader._step_bytes()
    loader.close()


def test_show_prints_the_prompt_once_and_both_answers(tmp_path):
    rows = [{"prompt": "q: ", "chosen": "yes", "rejected": "no"}]
    source, tokenizer = str(write_jsonl(tmp_path / "p.jsonl", rows)), byte_tokenizer(None)
    store = prepared(tmp_path, rows, "pairs", tokenizer=tokenizer)
    for lines in (
        show_documents(source, tokenizer, settings("pairs"), 3, PLAIN_STYLE),
        show_prepared_file(store, tokenizer, 3, PLAIN_STYLE),
    ):
        text = "\n".join(lines)
        assert "7 and 6 tokens, 4 and 3 learned" in text
        assert "\nq: \nchosen: «yes<|im_end|>»\nrejected: «no<|im_end|>»\n" in text
    lines, is_valid = describe_prepared_file(store.path)
    assert is_valid
    assert "version 5" in lines[0]
    assert any(line.startswith("pairs      1 of 13") for line in lines)


def test_show_prints_the_label_of_an_answer(tmp_path):
    source, tokenizer = str(write_jsonl(tmp_path / "p.jsonl", LABELLED)), byte_tokenizer(None)
    store = prepared(tmp_path, LABELLED, "labels", tokenizer=tokenizer)
    for lines in (
        show_documents(source, tokenizer, settings("labels"), 2, PLAIN_STYLE),
        show_prepared_file(store, tokenizer, 2, PLAIN_STYLE),
    ):
        text = "\n".join(lines)
        assert "question 0\ndesirable: «answer 0<|im_end|>»" in text
        assert "question 1\nundesirable: «answer 1<|im_end|>»" in text
        assert "without another row's" not in text
