"""A chat template that Jinja cannot read is one error, before any row is read."""

import subprocess
import sys

import pytest

from hpc_tune import cli
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from hpc_tune.errors import DataError
from hpc_tune.model.tokenizer import refuse_syntax_errors
from tests.support.data import byte_tokenizer, chat, write_jsonl

BROKEN = "{% for m in messages %}\n{{ m.role | upper }}: {{ m.content || 1 }}\n{% endfor %}"
GOOD = (
    "{%- for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}\n"
    "{% generation %}{{ m.content | tojson(indent=2) }}{% endgeneration %}{% endfor %}"
)


def is_told(said):
    (line,) = [line for line in said.splitlines() if "cannot be read" in line]
    return "mine.jinja, line 2: the chat template cannot be read: " in line and "|| 1" in line


@pytest.fixture
def forty_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text(BROKEN)
    write_jsonl(tmp_path / "d.jsonl", [chat("one?", "1")] * 40)


def test_a_template_with_a_syntax_error_is_one_error_of_show(forty_rows, capfd):
    assert cli.main(["show", "d.jsonl", "data.chat_template=mine.jinja"]) == 2
    assert is_told(capfd.readouterr().err)


@pytest.mark.full
@pytest.mark.parametrize("command", ["prepare --out out.h5", "train run.dir=run"])
def test_a_template_with_a_syntax_error_is_one_error_of_each_command(forty_rows, command):
    words = [sys.executable, "-m", "hpc_tune", *command.split()]
    words += ["data.path=d.jsonl", "data.chat_template=mine.jinja"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert is_told(ended.stderr)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BROKEN, "line 2"),
        ("\n\n{{ messages | no_filter }}", "line 3.*No filter named 'no_filter'"),
        ("{% for m in messages %}", "line 1.*end of template"),
        ({"default": GOOD, "tool_use": BROKEN}, r"\(tool_use\), line 2"),
    ],
)
def test_the_line_that_cannot_be_read_is_named(text, words):
    with pytest.raises(DataError, match=words):
        refuse_syntax_errors(text, "here")


@pytest.mark.parametrize("text", [GOOD, byte_tokenizer().chat_template, None, ""])
def test_what_transformers_reads_is_taken(text):
    refuse_syntax_errors(text, "here")


def test_a_broken_template_of_the_model_itself_is_no_reason_to_drop_rows():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = BROKEN
    with pytest.raises(DataError, match="line 2, cannot be read: expected token"):
        list(Encoder(tokenizer, 99, "answers").encode([to_example(chat("one?", "1"))]))
