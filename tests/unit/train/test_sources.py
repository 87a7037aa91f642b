"""Which sources a run has, what a resume may change of them, and how often they are repeated."""

import json
import re
from dataclasses import asdict, replace

import pytest

from hpc_tune.config.data import DataConfig, HeldOutSource, TrainingSource
from hpc_tune.config.schema import TrainConfig
from hpc_tune.data.order import MixturePhase, MixtureSource, SampleOrder, compute_progress
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.errors import CheckpointError, ConfigError, DataError
from hpc_tune.train.data import LazyTokenizer, open_sources, require_data
from hpc_tune.train.sources import (
    build_rows,
    check_source_repeats,
    describe_planned_sources,
    determine_phases,
    list_eval_sources,
    list_training_sources,
)
from tests.support.data import byte_tokenizer, chat, write_jsonl
from tests.unit.train.test_data_inputs import ALONE

PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def part(rows=100, learned=1_000, **share):
    return MixtureSource("hash", None, rows, learned, **share)


def saved(phases, rows):
    """A position as a checkpoint's manifest has it: JSON, with sorted names."""
    state = {"rows": rows, "phases": [asdict(phase) for phase in phases]}
    return json.loads(json.dumps(state, sort_keys=True))


OLD = {"a": part(weight=0.6), "b": part(weight=0.4)}


def test_the_same_mixture_goes_on_and_says_nothing():
    assert determine_phases(None, OLD, False) == [MixturePhase(OLD)]
    assert determine_phases(saved([MixturePhase(OLD)], 40), OLD, False) == [MixturePhase(OLD)]
    assert determine_phases(saved([MixturePhase(OLD)], 40), OLD, True) == [MixturePhase(OLD)]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"a": part(weight=0.5), "b": part(weight=0.5)}, "a weight 0.6, now weight 0.5; b weight"),
        ({"a": part(weight=1.0)}, "b left out; a weight 0.6, now weight 1"),
        ({**OLD, "c": part(weight=0.1)}, "c new, with weight 0.1"),
    ],
)
def test_another_mixture_needs_the_setting_and_begins_where_the_run_is(now, said):
    position = saved([MixturePhase(OLD)], 40)
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        determine_phases(position, now, False)
    assert "set data.new_mixture=true" in str(raised.value)
    first, second = determine_phases(position, now, True)
    assert first == MixturePhase(OLD)
    assert (second.first_row, second.first_epoch) == (40, 40 / 200)
    before = {name: p.rows_before for name, p in second.parts.items()}
    assert before == {name: {"a": 24, "b": 16}.get(name, 0) for name in now}
    # Started again with the same settings it is no new phase.
    assert determine_phases(saved([first, second], 60), now, True) == [first, second]


def test_a_source_that_comes_back_goes_on_where_it_was():
    only_a = {"a": part(weight=1.0)}
    phases = determine_phases(saved([MixturePhase(OLD)], 50), only_a, True)
    phases = determine_phases(saved(phases, 70), OLD, True)
    assert {name: p.rows_before for name, p in phases[-1].parts.items()} == {"a": 50, "b": 20}


def test_a_source_that_comes_back_with_other_data_is_refused():
    left_out = determine_phases(saved([MixturePhase(OLD)], 50), {"a": part(weight=1.0)}, True)
    position = saved(left_out, 70)
    for changes, said in (
        ({"content": "grown"}, "b is not the data this run was trained on"),
        ({"limit": 7}, "b has limit=7, but no limit in the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=said):
            determine_phases(position, {**OLD, "b": replace(OLD["b"], **changes)}, True)
    with pytest.raises(ConfigError, match="b back, with weight 0.4"):
        determine_phases(position, OLD, False)


def test_other_data_under_an_old_name_are_refused():
    position = saved([MixturePhase(OLD)], 40)
    for changes, said in (
        ({"content": "grown"}, "a is not the data this run was trained on"),
        ({"limit": 7}, "a has limit=7, but no limit in the checkpoint"),
    ):
        now = {**OLD, "a": replace(OLD["a"], **changes)}
        for allowed in (False, True):
            with pytest.raises(ConfigError, match=said):
                determine_phases(position, now, allowed)


def test_epochs_do_not_change_within_a_run():
    old = {"a": part(epochs=1), "b": part(epochs=2)}
    with pytest.raises(ConfigError, match="b epochs 2, now epochs 3") as raised:
        determine_phases(saved([MixturePhase(old)], 10), {**old, "b": part(epochs=3)}, True)
    assert "new_mixture" not in str(raised.value)


def test_a_position_in_data_path_or_a_damaged_one_is_refused():
    with pytest.raises(
        ConfigError, match=r"from a run with data\.path, but this run sets data\.sources"
    ):
        determine_phases({"rows": 3, "content": "hash"}, OLD, True)
    with pytest.raises(CheckpointError, match="mixture cannot be used"):
        determine_phases({"rows": 3, "phases": [{"parts": 1}]}, OLD, True)


def test_what_a_run_reaches_is_its_shares_and_passes():
    parts = {"a": part(10, 100, weight=0.6), "b": part(100, 10_000, weight=0.4)}
    phase = MixturePhase(parts)
    a, b = compute_progress([phase], phase.num_rows)
    assert a.passes == pytest.approx(60.6, abs=0.2)
    assert (a.share, b.share) == (pytest.approx(0.6, abs=0.01), pytest.approx(0.4, abs=0.01))
    assert str(b).startswith("b, weight 0.4: 40 rows, 0.40 passes, 4.0k learned tokens, 39.72% of")


def test_too_many_passes_are_refused_and_more_than_one_is_said():
    parts = {"a": part(10, weight=0.5), "b": part(10, weight=0.5)}
    sources = [TrainingSource(path=n, weight=0.5, max_epochs=4) for n in "ab"]
    assert list(check_source_repeats(sources, [MixturePhase(parts)], 20)) == []
    (line,) = check_source_repeats(sources, [MixturePhase(parts)], 30)
    assert "the run passes over a 1.50 times, b 1.50 times" in line
    assert len(list(check_source_repeats(sources, [MixturePhase(parts)], 80))) == 1
    with pytest.raises(ConfigError, match=re.escape("pass over a 4.10 times (max_epochs=4)")):
        list(check_source_repeats(sources, [MixturePhase(parts)], 81))


def test_held_out_sources_are_read_as_the_source_of_their_name():
    data = DataConfig(
        path=None,
        sources=[TrainingSource(path="a.jsonl", weight=1, columns={"q": "prompt"}, limit=5)],
        eval_sources=[
            HeldOutSource(path="x.jsonl", name="a"),
            HeldOutSource(path="y.jsonl", loss_on="all"),
        ],
    )
    first, second = list_eval_sources(data)
    assert (first.path, first.data.columns, first.limit) == ("x.jsonl", {"q": "prompt"}, None)
    assert (second.name, second.data.columns, second.data.loss_on) == ("y", {}, "all")
    split = data.model_copy(update={"eval_sources": None, "eval_fraction": 0.1})
    assert [(w.part, w.limit) for w in list_training_sources(split)] == [("train", 5)]
    assert [(w.part, w.limit) for w in list_eval_sources(split)] == [("held-out", None)]


@pytest.fixture
def model(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 300}')
    return tmp_path / "model"


def opened(model, sources, **settings):
    data = DataConfig(path=None, sources=sources, seq_len=100, **settings)
    run_dir = model.parent / "run"
    run_dir.mkdir(exist_ok=True)
    require_data(data, ALONE, run_dir)
    training, held_out = open_sources(data, ALONE, run_dir, LazyTokenizer(model, None))
    rows = build_rows(data, training, SampleOrder(100, True, 0), None, ALONE)
    return rows, training, held_out


def test_sources_of_different_forms_and_templates_are_one_stream(tmp_path, model):
    (tmp_path / "plain.jinja").write_text(PLAIN_TEMPLATE)
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat(f"q{n}", f"a{n}") for n in range(40)])
    asked = [{"ask": f"{n}?", "say": f"yes {n}"} for n in range(30)]
    questions = write_jsonl(tmp_path / "questions.jsonl", asked)
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"text {n} " * 9} for n in range(20)])
    rows, training, held_out = opened(
        model,
        [
            TrainingSource(path=str(chats), weight=0.6),
            TrainingSource(
                path=str(questions),
                weight=0.3,
                columns={"ask": "prompt", "say": "completion"},
                chat_template=str(tmp_path / "plain.jinja"),
            ),
            TrainingSource(path=str(texts), weight=0.1, loss_on="all", limit=8),
        ],
        eval_fraction=0.2,
    )
    assert [source.name for source in held_out] == ["chats", "questions", "texts"]
    marks = [source.store.attributes.tokenizer_fingerprint for source in training]
    assert marks[0] == marks[2] != marks[1]
    assert training[2].limit == 8
    assert rows.names == ["chats", "questions", "texts"]
    learned = dict.fromkeys(rows.names, 0)
    total = rows.num_rows * 3
    for number in range(total):
        name = rows.names[rows.source_and_row(number)[0]]
        learned[name] += sum(int(mask[:100].sum()) for ((_, mask),) in rows.read(number).sides)
    shares = {name: count / sum(learned.values()) for name, count in learned.items()}
    assert shares == {
        name: pytest.approx(share, abs=0.04)
        for name, share in {"chats": 0.6, "questions": 0.3, "texts": 0.1}.items()
    }


def test_what_is_wrong_with_one_source_is_said_by_its_name(tmp_path, model):
    good = write_jsonl(tmp_path / "good.jsonl", [chat("q", "a")])
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    unlearned = write_jsonl(tmp_path / "unlearned.jsonl", [chat("only asked")])

    def said(other, **settings):
        sources = [
            TrainingSource(path=str(good), weight=0.5),
            TrainingSource(path=str(other), name="other", weight=0.5, **settings),
        ]
        with pytest.raises(DataError) as raised:
            opened(model, sources)
        assert raised.value.exit_code == 2
        return str(raised.value)

    assert said(tmp_path / "gone.jsonl").startswith("data.sources: other: there is no data at")
    assert re.match(r"data\.sources: other: .*empty", said(empty))
    assert re.match(r"data\.sources: other: .* gives no example to learn from", said(unlearned))
    renamed = said(good, columns={"x": "text"})
    assert re.match(r"data\.sources: other: .* data\.columns=", renamed)


def test_a_plan_says_passes_of_prepared_sources_and_which_are_not_prepared(tmp_path, model):
    raw = write_jsonl(tmp_path / "raw.jsonl", [chat(f"q{n}", "a") for n in range(40)])
    tokenizer = LazyTokenizer(model, None).tokenizer
    prepare_data(str(raw), tmp_path / "p.h5", tokenizer, PrepareSettings(100))
    sources = [TrainingSource(path=str(tmp_path / "p.h5"), name="p", epochs=2)]
    data = DataConfig(path=None, sources=sources, seq_len=100)
    ready, repeated = describe_planned_sources(data, TrainConfig(), 4)
    assert ready.startswith("source  p, epochs 2: ")
    assert "2.00 passes" in ready
    assert "passes over p 2.00 times" in repeated
    with pytest.raises(ConfigError, match=re.escape("pass over p 6.00 times (max_epochs=4)")):
        list(describe_planned_sources(data, TrainConfig(epochs=3), 4))
    mixed = [*sources, TrainingSource(path=str(raw), epochs=1)]
    (line,) = describe_planned_sources(data.model_copy(update={"sources": mixed}), TrainConfig(), 4)
    assert "of which raw not prepared yet" in line
    assert list(describe_planned_sources(DataConfig(), TrainConfig(), 4)) == []


def test_a_file_of_two_sources_is_said(tmp_path, model, caplog):
    path = str(write_jsonl(tmp_path / "d.jsonl", [chat(f"q{n}", "a") for n in range(9)]))
    opened(model, [TrainingSource(path=path, name=name, weight=0.5) for name in "ab"])
    assert f"data.sources: a and data.sources: b both read {path}" in caplog.text


def test_a_limit_above_what_there_is_is_said(tmp_path, model, caplog):
    good = write_jsonl(tmp_path / "good.jsonl", [chat(f"q{n}", "a") for n in range(3)])
    rows, training, _ = opened(model, [TrainingSource(path=str(good), weight=1, limit=9)])
    assert "limit=9, but it has only 3 documents" in caplog.text
    assert training[0].limit is None
    assert rows.phase.parts["good"].limit is None
