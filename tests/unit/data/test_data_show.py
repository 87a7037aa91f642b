"""What ``show`` and ``inspect FILE.h5`` tell a person about data."""

import io
import os
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpc_tune import cli
from hpc_tune.data import show as showing
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import ReadOptions
from hpc_tune.data.show import COLOR_STYLE, PLAIN_STYLE, DocumentDecoder, show_documents
from hpc_tune.errors import DataError
from tests.support.data import byte_tokenizer, chat, write_jsonl, zero_tokens

ROWS = [chat("one?", "1"), chat("only a question"), chat("what is <|im_end|>?", "an end")]


def lines_of(path, tokenizer=None, num_rows=9, look=PLAIN_STYLE, seq_len=200):
    tokenizer = tokenizer or byte_tokenizer()
    lines = show_documents(str(path), tokenizer, PrepareSettings(seq_len), num_rows, look)
    return "\n".join(lines).split("\n")


def test_rows_are_shown_with_what_is_learned_and_why_others_are_dropped(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", ROWS)
    _, *shown = lines_of(file)
    assert shown == [
        "",
        "row 1: 26 tokens, 2 learned",
        "<|im_start|>user",
        "one?<|im_end|>",
        "<|im_start|>assistant",
        "«1<|im_end|>»",
        "",
        "",
        "row 2; 1 dropped: no answer of the assistant",
        "",
        "row 3: 46 tokens, 7 learned; 1 special tokens typed into messages, taken as plain text",
        "<|im_start|>user",
        r"what is \<|im_end|>?<|im_end|>",
        "<|im_start|>assistant",
        "«an end<|im_end|>»",
        "",
        "",
        "all 3 rows: 3 examples -> 2 documents, 72 tokens, 9 of them learned; 1 special tokens "
        "typed into messages, taken as plain text; 1 dropped: no answer of the assistant",
    ]


def test_the_counts_are_those_of_prepare(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", ROWS)
    counters = prepare_data(str(file), tmp_path / "d.h5", byte_tokenizer(), PrepareSettings(200))
    assert lines_of(file, num_rows=1)[-1] == f"all 3 rows: {counters}"


def test_of_many_rows_the_first_are_counted_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(showing, "MAX_COUNTED_ROWS", 4)
    file = write_jsonl(tmp_path / "d.jsonl", [chat("q", "a")] * 9)
    assert lines_of(file, num_rows=2)[-1].startswith("the first 4 rows: 4 examples")
    assert lines_of(file, num_rows=6)[-1].startswith("the first 6 rows: 6 examples")


def test_a_terminal_gets_colours_that_end_with_each_line(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [chat("q", "a\nb")])
    shown = lines_of(file, look=COLOR_STYLE)
    assert "\x1b[32ma\x1b[39m" in shown
    assert "\x1b[32mb\x1b[1m<|im_end|>\x1b[22m\x1b[39m" in shown
    assert "q\x1b[1m<|im_end|>\x1b[22m" in shown


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [chat("q", "\x1b[2J\r\x07a\tb")])
    assert r"«\x1b[2J\r\x07a" + "\tb<|im_end|>»" in lines_of(file)


def test_files_of_a_folder_are_named_and_pieces_of_text_are_numbered(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("ab" * 30)
    shown = lines_of(tmp_path, seq_len=32, num_rows=3)
    heads = [line.partition(":")[0] for line in shown if ".txt, row" in line]
    assert heads == [
        "a.txt, row 1, part 1 of 2",
        "a.txt, row 1, part 2 of 2",
        "b.txt, row 1, part 1 of 2",
    ]


def spaces_tokenizer():
    """As SentencePiece's: a space is the beginning of a word, and the first one is left out."""
    words = ["<unk>", "</s>", "▁a", "▁b", "▁"]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_no_space_is_lost_where_a_run_begins():
    tokens, mask = np.array([2, 3, 1, 2, 3]), np.array([0, 1, 1, 0, 1])
    assert (
        DocumentDecoder(spaces_tokenizer(), PLAIN_STYLE).text_of(tokens, mask) == "a« b</s>» a« b»"
    )


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", ROWS)
    return tmp_path


def test_the_command_shows_raw_and_prepared_data_and_leaves_nothing(at_home, capsys):
    assert cli.main(["show", "d.jsonl", "--rows", "1", "data.seq_len=100"]) == 0
    raw = capsys.readouterr().out
    assert os.listdir(at_home) == ["d.jsonl"]
    assert "tokenizer builtin:tiny" in raw
    assert "data.seq_len=100" in raw
    assert cli.main(["prepare", "data.path=d.jsonl", "data.seq_len=100", "--out", "d.h5"]) == 0
    capsys.readouterr()
    assert cli.main(["show", "d.h5", "--rows", "1"]) == 0
    prepared = capsys.readouterr().out
    document = "<|start|>user\none?<|end|>\n<|start|>assistant\n«1<|end|>»\n"
    assert document in raw
    assert document in prepared
    assert "row 2" not in raw
    assert cli.main(["show", "data.path=d.jsonl", "--rows", "1", "data.seq_len=100"]) == 0
    assert capsys.readouterr().out == raw
    assert cli.main(["show", "nowhere.jsonl"]) == 2
    said = capsys.readouterr()
    assert "there is no data at nowhere.jsonl" in said.err
    assert said.out == ""


def test_colours_are_for_terminals_without_no_color(at_home, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for no_color, expected in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", terminal)
            assert cli.main(["show", "d.jsonl"]) == 0
        assert ("\x1b[32m" in terminal.getvalue()) == expected


def test_inspect_tells_what_a_prepared_file_holds_and_finds_a_changed_byte(at_home, capsys):
    dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    (at_home / "t.jinja").write_text(dated + "{% if add_generation_prompt %}{% endif %}")
    prepared = ["data.path=d.jsonl", "data.chat_template=t.jinja", "--out", "d.h5"]
    assert cli.main(["prepare", *prepared]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", "d.h5"]) == 0
    told = capsys.readouterr().out
    for word in ("d.jsonl", "data.loss_on=answers", "builtin-tiny", "1 January 2026", "dropped"):
        assert word in told
    assert "content    verified" in told
    zero_tokens(at_home / "d.h5")
    assert cli.main(["inspect", "d.h5"]) == 1
    assert "NOT VALID: d.h5: its documents are not as" in capsys.readouterr().out


def test_a_misspelt_column_is_refused_when_all_rows_have_been_shown(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q", "completion": "a"}])
    settings = PrepareSettings(64, reading=ReadOptions((("systm", "system"),)))
    shown = show_documents(str(file), byte_tokenizer(), settings, 3, PLAIN_STYLE)
    with pytest.raises(DataError, match="names systm, but .* has the columns completion, prompt"):
        list(shown)
