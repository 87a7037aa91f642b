"""Chat templates by name write what the published ones do, and mark the answers.

published_chats.json holds texts that the published templates made of the chats below, by name of
ours, with the public repository and file of each. The templates themselves are not in it.
"""

import copy
import json
import logging
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken
from transformers import AutoTokenizer

from hpc_tune.checkpoint.export_metadata import write_chat_templates
from hpc_tune.config.data import NAMED_TEMPLATES, TEMPLATE_FOLDER, is_template_path, template_file
from hpc_tune.config.load import load_config
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.tokenizer import load_tokenizer, refuse_syntax_errors
from tests.support.data import byte_tokenizer

PUBLISHED = json.loads(Path(__file__).with_name("published_chats.json").read_text("utf-8"))
TOOL = {
    "type": "function",
    "function": {
        "name": "sinfo",
        "description": "Count the nodes of a ö state.",
        "parameters": {
            "type": "object",
            "properties": {"state": {"type": "string"}},
            "required": ["state"],
        },
    },
}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(number, state):
    function = {"name": "sinfo", "arguments": {"state": state}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


BRIEF = said("system", "Be brief.")
RANK, PROCESS = said("user", "What is a rank?"), said("assistant", "A process of a job.")
NODE, HOST = said("user", "And a node?"), said("assistant", "A host.")
CALL = said("assistant", "", tool_calls=[call(1, "idle")])
CALLS = said("assistant", "Both.", tool_calls=[call(1, "idle"), call(2, "größe")])
RESULT = said("tool", "12", tool_call_id="abcdefgh1", name="sinfo")
OTHER_RESULT = said("tool", "3", tool_call_id="abcdefgh2", name="sinfo")
THOUGHT = said("assistant", "A host.", reasoning_content="Think of racks.")
BLOCK = said("assistant", "<think>\nThink of racks.\n</think>\n\nA host.")
# Messages and tools; with "prompt" in the name an answer is asked for.
CHATS = {
    "turns": ([RANK, PROCESS, NODE, HOST], None),
    "system": ([BRIEF, RANK, PROCESS, NODE, HOST], None),
    "prompt": ([RANK, PROCESS, NODE], None),
    "system_prompt": ([BRIEF, RANK, PROCESS, NODE], None),
    "one_call": ([BRIEF, RANK, PROCESS, NODE, CALL, RESULT, HOST], [TOOL]),
    "one_call_prompt": ([BRIEF, NODE, CALL, RESULT], [TOOL]),
    "tools_prompt": ([BRIEF, RANK], [TOOL, TOOL]),
    "tools_no_system": ([RANK, CALL, RESULT, HOST, NODE, PROCESS], [TOOL]),
    "two_calls": ([NODE, CALLS, RESULT, OTHER_RESULT, HOST], [TOOL]),
    "question_after_results": ([NODE, CALL, RESULT, RANK, PROCESS], [TOOL]),
    "reasoning": ([RANK, THOUGHT, NODE, THOUGHT], None),
    "think_block": ([RANK, BLOCK, NODE, BLOCK], None),
    "think_and_call": ([RANK, {**CALL, "reasoning_content": "Look."}, RESULT, THOUGHT], [TOOL]),
}
TEXTS = [
    pytest.param(name, chat, "".join(lines), id=f"{name}-{chat}: {reference['source']}")
    for name, references in PUBLISHED.items()
    for reference in references
    for chat, lines in reference["texts"].items()
]


def tokenizer_of(name, lacks=()):
    """A token per byte, and the special tokens of a template."""
    tokenizer = byte_tokenizer(template_file(name).read_text("utf-8"))
    own = {
        "<s>",
        "</s>",
        NAMED_TEMPLATES[name].end_token or "</s>",
        *NAMED_TEMPLATES[name].control_tokens,
    } - {*lacks}
    tokenizer.add_tokens([AddedToken(text, special=True) for text in sorted(own)])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


def render(name, chat):
    messages, tools = copy.deepcopy(CHATS[chat])
    return tokenizer_of(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt="prompt" in chat, tokenize=False
    )


@pytest.mark.parametrize(("name", "chat", "text"), TEXTS)
def test_a_template_writes_what_the_published_one_does(name, chat, text):
    assert render(name, chat) == text


def test_each_name_has_a_file_and_published_texts_and_is_no_path():
    assert (
        {file.stem for file in TEMPLATE_FOLDER.iterdir()}
        == NAMED_TEMPLATES.keys()
        == PUBLISHED.keys()
    )
    assert not any(is_template_path(name) for name in NAMED_TEMPLATES)


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_each_file_can_be_read_by_jinja_and_marks_answers(name):
    text = template_file(name).read_text("utf-8")
    refuse_syntax_errors(text, name)
    assert text.count("generation %}") == 2


def learned(name, chat, **row):
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer, 4000, "answers")
    messages, tools = CHATS[chat]
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    (block,) = encoder.encode([to_example(copy.deepcopy(row))])
    text = tokenizer.decode(block.tokens[block.loss_mask.astype(bool)])
    return text, encoder.counters.remarks()


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_answers_are_learned_with_their_end_and_nothing_else(name):
    end_token, space = (
        NAMED_TEMPLATES[name].end_token or "</s>",
        " " if name in ("llama2", "mistral") else "",
    )
    behind = " " if name == "llama2" else ""
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    text, remarks = learned(name, "turns")
    assert (
        text
        == f"{space}A process of a job.{behind}{end_token}{space}{empty}A host.{behind}{end_token}"
    )
    assert len(remarks) == (name == "qwen3"), remarks  # the empty block is counted


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("chatml", '<tool_call>\n{"name": "sinfo", "arguments": {"state": "idle"}}\n</tool_call>'),
        ("qwen2.5", '<tool_call>\n{"name": "sinfo", "arguments": {"state": "idle"}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "sinfo", "arguments": {"state": "idle"}}\n</tool_call>'),
        ("granite", '<tool_call>\n{"name": "sinfo", "arguments": {"state": "idle"}}\n</tool_call>'),
        ("llama3", '{"name": "sinfo", "parameters": {"state": "idle"}}'),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "sinfo", "arguments": {"state": "idle"}, "id": "abcdefgh1"}]',
        ),
    ],
)
def test_calls_are_learned_and_tools_and_results_are_not(name, first):
    end_token = NAMED_TEMPLATES[name].end_token or "</s>"
    text, remarks = learned(name, "tools_no_system")
    assert text.startswith(first + end_token)
    assert text.count(end_token) == 3
    assert "12" not in text
    assert "Count the nodes" not in text
    assert len(remarks) == (name == "qwen3"), remarks


def test_calls_of_deepseek_are_learned_and_that_it_lists_no_tools_is_said():
    text, (remark,) = learned("deepseek-v3", "two_calls")
    end_token = "<｜end▁of▁sentence｜>"
    assert text.startswith(
        "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>sinfo"
    )
    assert text.endswith(f"<｜tool▁calls▁end｜>{end_token}A host.{end_token}")
    assert "tools the chat template does not show" in remark


def test_mistral_keeps_the_system_prompt_of_a_chat_that_is_answered():
    """The published template leaves it out there; mistral-common has it in the last question."""
    asked, answered = render("mistral", "system_prompt"), render("mistral", "system")
    assert answered == f"{asked} A host.</s>"


@pytest.mark.parametrize(
    ("name", "chat", "why"),
    [
        ("gemma", "system", "no system prompt"),
        ("gemma3", "one_call", "must alternate"),
        ("llama2", "one_call", "must alternate"),
        ("llama3", "two_calls", "several calls"),
        ("mistral", "question_after_results", "must alternate"),
    ],
)
def test_what_the_published_one_refuses_is_refused(name, chat, why):
    with pytest.raises(TemplateError, match=why):
        render(name, chat)


def test_mistral_asks_for_ids_of_nine_characters():
    messages = [NODE, said("assistant", "", tool_calls=[{**call(1, "idle"), "id": "call_1"}])]
    with pytest.raises(TemplateError, match="an id of 9 letters"):
        tokenizer_of("mistral").apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("setting", ["chat_template=chatlm", "sources.0.chat_template"])
def test_an_unknown_name_lists_the_known_ones_and_says_what_a_path_is(setting):
    words = [f"data.{setting}"]
    if setting.startswith("sources"):
        words = ["data.path=null", "data.sources=[{path: a, weight: 1, chat_template: chatlm}]"]
    with pytest.raises(ConfigError) as raised:
        load_config(None, words)
    message = str(raised.value)
    assert f"data.{setting.partition('=')[0]}=chatlm is not a known chat template" in message
    assert "chatml, deepseek-v3, gemma" in message
    assert "ends in .jinja or has a slash; did you mean chatml?" in message


def test_a_file_in_the_working_directory_does_not_change_what_a_name_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("zephyr", "mine", "zephyr.jinja"):
        Path(name).write_text(f"the file {name}")
    folder = saved(tmp_path, "zephyr")
    assert load_tokenizer(folder, "zephyr").chat_template.startswith("{#- Zephyr")
    assert load_tokenizer(folder, "./zephyr").chat_template == "the file zephyr"
    assert load_tokenizer(folder, "zephyr.jinja").chat_template == "the file zephyr.jinja"
    with pytest.raises(ConfigError, match=r"for the file of that name write \./mine"):
        load_config(None, ["data.chat_template=mine"])


def saved(tmp_path, name, lacks=()):
    folder = tmp_path / "model"
    tokenizer = tokenizer_of(name, lacks)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizer_without_the_end_of_turns_is_refused_and_what_fits_is_named(tmp_path):
    folder = saved(tmp_path, "llama3")
    with pytest.raises(DataError) as raised:
        load_tokenizer(folder, "gemma")
    message = str(raised.value)
    assert "ends answers with <end_of_turn>, and <end_of_turn> is no token of" in message
    assert "one whose tokens it has: chatml, llama2, llama3, qwen2.5, qwen3, tulu, zeph" in message


def test_a_template_that_ends_with_the_end_token_needs_one(tmp_path):
    tokenizer = tokenizer_of("llama3")
    tokenizer.eos_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"with the end token \(eos_token\), and there is none"):
        load_tokenizer(tmp_path, "zephyr")


def test_other_special_tokens_that_are_missing_are_warned_of(tmp_path, caplog):
    folder = saved(tmp_path, "phi4", lacks=["<|im_sep|>"])
    with caplog.at_level(logging.WARNING, "hpc_tune"):
        load_tokenizer(folder, "phi4")
        load_tokenizer(folder, "chatml")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "data.chat_template=phi4: <|im_sep|> is no token of the tokenizer of" in warning
    assert "cut into pieces" in warning


def test_an_export_has_the_text_of_the_template(tmp_path):
    folder, out = saved(tmp_path, "qwen3"), tmp_path / "out"
    template = load_tokenizer(folder, "qwen3").chat_template
    load_tokenizer(folder).save_pretrained(out)
    write_chat_templates(template, folder, out)
    assert (out / "chat_template.jinja").read_text("utf-8") == template
    asked = AutoTokenizer.from_pretrained(out).apply_chat_template(
        CHATS["prompt"][0], add_generation_prompt=True, tokenize=False
    )
    assert asked == render("qwen3", "prompt")
