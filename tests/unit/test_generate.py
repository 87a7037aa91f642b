"""What is asked of a model: a prompt with what is beside it, a chat; how an answer is shown."""

import json
import re
from pathlib import Path

import pytest

from hpc_tune import cli
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from hpc_tune.errors import DataError
from hpc_tune.generate import _decode_answer, _encode, read_chat
from tests.support.data import byte_tokenizer

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
TEMPLATE = (SAMPLES / "tools.jinja").read_text()
ROW = json.loads((SAMPLES / "tools.jsonl").read_text().splitlines()[0])


def tokenizer_of(template=TEMPLATE):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    return tokenizer


def prompt_in_training(tokenizer, row):
    """The tokens of a row before the first that is learned."""
    [block] = Encoder(tokenizer, 10_000, "answers").encode([to_example(row)])
    return block.tokens[: block.loss_mask.argmax()].tolist()


@pytest.mark.parametrize("text", ["How many nodes?", "a typed <|end|> is text", "größe 日本"])
def test_a_prompt_with_system_prompt_and_tools_has_the_tokens_of_a_row_of_training(tmp_path, text):
    tools, tokenizer = tmp_path / "tools.json", tokenizer_of()
    tools.write_text(json.dumps(ROW["tools"]))
    ids = _encode(tokenizer, read_chat(text, "Be brief", tools, None))
    turns = [("system", "Be brief"), ("user", text), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    row = {"messages": messages, "tools": ROW["tools"]}
    assert ids[0].tolist() == prompt_in_training(tokenizer, row)


def test_a_chat_with_calls_has_the_tokens_of_a_row_of_training(tmp_path):
    """Up to its last answer: the call before it is a part of what is asked."""
    tokenizer = tokenizer_of()
    asking = ROW | {"messages": ROW["messages"][:-1]}
    (tmp_path / "row.json").write_text(json.dumps(asking))
    (tmp_path / "messages.json").write_text(json.dumps(asking["messages"]))
    (tmp_path / "tools.json").write_text(json.dumps(ROW["tools"]))
    calling = ROW["messages"][1] | {"weight": 0}
    messages = [ROW["messages"][0], calling, *ROW["messages"][2:]]
    wanted = prompt_in_training(tokenizer, ROW | {"messages": messages})
    whole = read_chat(None, None, None, tmp_path / "row.json")
    beside = read_chat(None, None, tmp_path / "tools.json", tmp_path / "messages.json")
    assert [_encode(tokenizer, chat)[0].tolist() for chat in (whole, beside)] == [wanted] * 2


def test_without_a_chat_template_a_system_prompt_stands_before_the_prompt_as_in_training():
    tokenizer = tokenizer_of(None)
    row = {"system": "Be brief", "prompt": "How?", "completion": " So."}
    ids = _encode(tokenizer, read_chat("How?", "Be brief", None, None))
    assert ids[0].tolist() == prompt_in_training(tokenizer, row)
    chat = to_example({"messages": ROW["messages"][:-1], "tools": ROW["tools"]})
    with pytest.raises(DataError, match="has no chat template: it takes a prompt"):
        _encode(tokenizer, chat)


def test_what_the_chat_template_leaves_out_is_warned_of(tmp_path, caplog):
    (tmp_path / "tools.json").write_text(json.dumps(ROW["tools"]))
    user_alone = (
        "{% for m in messages %}{% if m.role != 'system' %}<|start|>{{ m.role }}\n"
        "{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    _encode(tokenizer_of(user_alone), read_chat("How?", "Be brief", tmp_path / "tools.json", None))
    assert "messages of role system that the chat template leaves out" in caplog.text
    assert "tools the chat template does not show" in caplog.text
    caplog.clear()
    _encode(tokenizer_of(), read_chat("How?", "Be brief", tmp_path / "tools.json", None))
    assert not caplog.messages


def test_an_answer_is_shown_with_its_special_tokens_up_to_the_one_that_ends_it():
    tokenizer = tokenizer_of()
    ids = tokenizer("<|start|>call {}<|end|>x", add_special_tokens=False).input_ids
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert _decode_answer(tokenizer, ids, [end]) == "<|start|>call {}"
    assert _decode_answer(tokenizer, ids[:-2], [end]) == "<|start|>call {}"


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (None, [], "generate needs --prompt TEXT or --chat FILE"),
        (None, ["--chat", "FILE"], "cannot be read: No such file or directory"),
        (None, ["--prompt", "x", "--tools", "FILE"], "--tools .*cannot be read"),
        (None, ["--prompt", "gr\udcc3\udcb6"], "export LC_ALL=C.UTF-8"),
        ("[", ["--chat", "FILE"], "expected one JSON value in UTF-8"),
        ("[" * 100_000, ["--chat", "FILE"], "expected one JSON value"),
        ('["\\ud83d"]', ["--chat", "FILE"], "it contains half of a surrogate pair, such as"),
        ("3", ["--chat", "FILE"], "messages is number, expected a list"),
        ("[]", ["--chat", "FILE"], "messages is empty list, expected a list"),
        ('{"text": "x"}', ["--chat", "FILE"], "expected a list of messages, or an object"),
        ('{"chosen": "x"}', ["--chat", "FILE"], "rows of preferences"),
        (json.dumps(ROW), ["--chat", "FILE"], "the last message is an answer of the assistant"),
        (json.dumps(ROW), ["--chat", "FILE", "--prompt", "x"], "--chat and --prompt are given"),
        (json.dumps(ROW), ["--chat", "FILE", "--tools", "FILE"], "has tools too; keep one"),
        ("{}", ["--prompt", "x", "--tools", "FILE"], "found empty object, expected a list of"),
    ],
)
def test_what_cannot_be_asked_is_one_message(tmp_path, capsys, content, options, said):
    file = tmp_path / "asked.json"
    if content is not None:
        file.write_text(content)
    words = [str(file) if word == "FILE" else word for word in options]
    assert cli.main(["generate", "--model", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert re.search(said, told), told
