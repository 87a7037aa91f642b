"""chatml, which remarks name, writes tools as Qwen2.5 was trained on; samples can be read."""

import json
from pathlib import Path

import pytest

from hpc_tune.config.data import template_file
from hpc_tune.data.counts import _REMARKS, _ROLE_REMARKS
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from hpc_tune.model.tokenizer import refuse_syntax_errors
from tests.support.data import byte_tokenizer

SAMPLES = Path(__file__).parents[3] / "docs" / "samples"
CHATML = template_file("chatml")
TOOL = {"type": "function", "function": {"name": "sinfo", "parameters": {"type": "object"}}}
# As the tokenizer of Qwen2.5-7B-Instruct writes it, tool by tool and turn by turn.
QWEN = """<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "sinfo", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
How many nodes are free?<|im_end|>
<|im_start|>assistant
Both.
<tool_call>
{"name": "sinfo", "arguments": {"state": "idle"}}
</tool_call>
<tool_call>
{"name": "sinfo", "arguments": {"state": "größe"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
12
</tool_response>
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>assistant
Twelve.<|im_end|>
"""


def call(state):
    return {"type": "function", "function": {"name": "sinfo", "arguments": {"state": state}}}


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many nodes are free?"},
    {"role": "assistant", "content": "Both.", "tool_calls": [call("idle"), call("größe")]},
    {"role": "tool", "content": "12"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Twelve."},
]


def render(messages, tools=None, prompt=False):
    return byte_tokenizer(CHATML.read_text()).apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, tokenize=False
    )


def test_chatml_writes_tools_calls_and_results_as_qwen_does():
    assert render(MESSAGES, [TOOL]) == QWEN
    assert render(MESSAGES[:5], [TOOL], prompt=True) == QWEN.removesuffix("Twelve.<|im_end|>\n")


def test_without_tools_it_is_chatml():
    chat = [MESSAGES[0], MESSAGES[1], MESSAGES[5]]
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat]
    assert render(chat) == "".join(turns)
    assert render(chat[1:]) == "".join(turns[1:])


def test_what_the_assistant_says_and_calls_is_learned_and_nothing_is_left_out():
    tokenizer = byte_tokenizer(CHATML.read_text())
    encoder = Encoder(tokenizer, 2000, "answers")
    row = {"messages": MESSAGES, "tools": [TOOL]}
    (block,) = encoder.encode([to_example(row)])
    learned = tokenizer.decode(block.tokens[block.loss_mask.astype(bool)])
    answers = [text.partition("<|im_end|>")[0] for text in QWEN.split("assistant\n")[1:]]
    assert learned == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert encoder.counters.remarks() == []


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.jinja")), ids=lambda file: file.name)
def test_each_sample_can_be_read(file):
    refuse_syntax_errors(file.read_text(), file.name)


def test_the_remarks_about_calls_and_tools_name_chatml():
    names = [_REMARKS["lost_calls"], _REMARKS["lost_tools"], _ROLE_REMARKS["left_out"]]
    assert all("data.chat_template=chatml" in text for text in names)
    assert json.loads((SAMPLES / "tools.jsonl").read_text())["tools"]
