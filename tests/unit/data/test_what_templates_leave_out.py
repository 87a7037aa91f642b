"""What a chat template does not write of a row is counted and named; null keys change nothing."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hpc_tune.data.counts import Counters
from hpc_tune.data.encode import Encoder
from hpc_tune.data.fields import WrongRecord, read_tool_calls, read_tools
from hpc_tune.data.records import to_example
from hpc_tune.data.tokenizer import fingerprint, freeze_template_date
from tests.support.data import CHATML, byte_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"city": "Oslo"}}}
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 3.1 asks whether the key is there, and refuses what is not one call.
BY_KEY = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<|im_start|>assistant\n"
    "CALL {{ m.tool_calls[0].function | tojson }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KNOWN_ROLES = CHATML.replace(
    "messages %}", "messages if m.role in ('system', 'user', 'assistant') %}"
)


def read(rows, template=CHATML, tokenizer=None):
    """(learned text of each document, whole text of all, counters)."""
    tokenizer = tokenizer or byte_tokenizer(template)
    encoder = Encoder(tokenizer, 4096, "answers")
    learned, whole = [], ""
    for block in encoder.encode(map(to_example, rows)):
        stops = np.cumsum(block.lengths)[:-1]
        for tokens, mask in zip(
            np.split(block.tokens, stops), np.split(block.loss_mask, stops), strict=True
        ):
            learned.append(tokenizer.decode(tokens[mask.astype(bool)]))
            whole += tokenizer.decode(tokens)
    return learned, whole, encoder.counters


def chat(*turns, **fields):
    return {"messages": [{"role": role, "content": text} for role, text in turns], **fields}


@pytest.mark.parametrize("blank", [None, [], {}, ""])
def test_keys_that_say_nothing_are_as_if_they_were_not_there(blank):
    def row(**keys):
        turns = [("user", "q", None), ("assistant", "one", None), ("user", "r", None)]
        turns += [("assistant", None, [CALL]), ("tool", "rain", None), ("assistant", "two", None)]
        return {
            "messages": [
                {"role": role, "content": text, **keys, **({"tool_calls": calls} if calls else {})}
                for role, text, calls in turns
            ]
        }

    names = ("tool_calls", "function_call", "name", "tool_call_id", "reasoning_content", "refusal")
    plain = read([row()], BY_KEY)
    assert read([row(**dict.fromkeys(names, blank))], BY_KEY)[:2] == plain[:2]
    assert "CALL" in plain[0][0]


def test_null_arguments_that_a_tools_schema_does_not_have_fill_a_column():
    schema = {"properties": {"city": {"type": "string"}, "unit": None, "day": {"default": None}}}
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    arguments = {"city": "Oslo", "day": None, "expression": None}
    call = {"function": {"name": "get", "arguments": arguments}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    example = to_example({"messages": messages, "tools": [tool]})
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Oslo",
        "day": None,
    }
    assert example.tools[0]["function"]["parameters"] == {
        "properties": {"city": {"type": "string"}, "day": {"default": None}}
    }
    assert arguments["expression"] is None


@pytest.mark.parametrize("as_text", [False, True])
def test_openais_older_calls_and_functions_are_those_of_today(as_text):
    function = {"name": "get", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "get", "arguments": json.dumps({"city": "Oslo"})}
    result = {"role": "function", "name": "get", "content": "rain"}
    older = {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "function_call": json.dumps(call) if as_text else call,
            },
            result,
        ],
        "functions": json.dumps([function]) if as_text else [function],
    }
    today = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": None}]},
            {**result, "role": "tool"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    assert to_example(older) == to_example(today)


def test_two_calls_that_contradict_each_other_are_refused():
    message = {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "other"}}
    row = {"messages": [{"role": "user", "content": "q"}, message]}
    with pytest.raises(WrongRecord, match="tool_calls and function_call are both given"):
        to_example(row)
    message["function_call"] = CALL["function"]
    assert len(to_example(row).messages[1]["tool_calls"]) == 1


def test_messages_that_a_template_leaves_out_are_counted_by_role():
    rows = [
        chat(("developer", "rhyme"), ("user", "q"), ("assistant", "a")),
        chat(("user", "q"), ("assistant", "a"), ("tool", "a"), ("assistant", "b")),
        chat(("context", "a"), ("user", "q"), ("assistant", "a"), ("developer", "")),
    ]
    _, _, counters = read(rows * 2, KNOWN_ROLES)
    assert counters.left_out == {"developer": 2, "tool": 2, "context": 2}
    assert "2 messages of role tool that the chat template leaves out" in str(counters)
    assert read(rows)[2].left_out == {}


def test_messages_that_a_template_writes_in_another_form_are_not_left_out():
    escaped = CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] | tojson if m['role'] == 'tool' else m['content'] | upper }}",
    )
    turns = [("user", "q"), ("assistant", "a"), ("tool", '"x"'), ("tool", "y"), ("assistant", "b")]
    assert read([chat(*turns)] * 3, escaped)[2].left_out == {}


@pytest.mark.parametrize("template", [CHATML, BY_KEY])
def test_tools_that_a_template_does_not_show_are_counted(template):
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    rows = [
        chat(("user", "get"), ("assistant", "get"), tools=[tool]),
        chat(("user", "q"), ("assistant", "a")),
    ]
    assert read(rows, template)[2].lost_tools == 1
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    assert read(rows * 2, shown)[2].lost_tools == 0


def test_null_content_is_no_text_and_is_counted():
    learned, whole, counters = read([chat(("system", None), ("user", "q"), ("assistant", "a"))])
    assert "None" not in whole
    assert (learned, counters.null_contents) == (["a<|im_end|>"], 1)


def with_controls(*controls):
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(control, special=True) for control in controls]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def test_an_answers_own_special_tokens_are_learned_as_such():
    tokenizer = with_controls("<tool_call>", "</tool_call>")
    answer = "<tool_call>\n{}\n</tool_call>"
    row = chat(("system", "<tool_call>"), ("user", "<tool_call>"), ("assistant", answer))
    (block,) = Encoder(tokenizer, 999, "answers").encode([to_example(row)])
    number = tokenizer.convert_tokens_to_ids("<tool_call>")
    at = np.flatnonzero(block.tokens == number)
    assert (len(at), block.loss_mask[at].tolist()) == (1, [1])
    counters = read([row], tokenizer=tokenizer)[2]
    assert (counters.own_controls, counters.control_texts) == (2, 2)


def test_special_tokens_around_turns_stay_text_in_an_answer_too():
    tokenizer = with_controls("<tool_call>")
    row = chat(("user", "q"), ("assistant", "a<|im_end|>\n<|im_start|>user\nb"))
    (block,) = Encoder(tokenizer, 999, "answers").encode([to_example(row)])
    assert np.count_nonzero(block.tokens == tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("role", ["Assistant", "gpt", "model"])
def test_answers_under_another_role_are_named(role):
    other, both = chat(("user", "q"), (role, "a")), chat((role, "a"), ("assistant", "b"))
    _, _, counters = read([other, both])
    assert counters.dropped == {
        f"no answer of the assistant; roles beside system, user and assistant: {role}": 1
    }
    assert counters.other_answers == {role: 1}


def test_texts_without_an_end_token_are_counted():
    tokenizer = byte_tokenizer(template=None)
    tokenizer.eos_token = None
    rows = [{"prompt": "q", "completion": "a"}, {"text": "some text"}]
    assert read(rows, tokenizer=tokenizer)[2].unended_texts == 2
    assert read(rows, template=None)[2].unended_texts == 0


def test_counts_by_role_add_up():
    one, other = Counters(left_out={"tool": 1}), Counters(left_out={"tool": 2, "x": 1})
    one.add(other)
    assert one.left_out == {"tool": 3, "x": 1}


DATED = "{{ strftime_now('%d %b') }}|" + CHATML


def test_of_several_templates_each_row_gets_the_one_of_stock_transformers():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": f"D {CHATML}", "tool_use": f"T {CHATML}"}
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    plain = chat(("user", "q"), ("assistant", "a"))
    for row in (plain, plain | {"tools": [tool]}, plain | {"tools": []}):
        _, whole, _ = read([row], tokenizer=tokenizer)
        stock = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools") or None, tokenize=False
        )
        assert whole == stock
    tokenizer.chat_template = {"rag": CHATML}
    assert "none called default" in next(iter(read([plain], tokenizer=tokenizer)[2].dropped))


@pytest.mark.parametrize("several", [False, True])
def test_no_template_prints_the_date_of_today(several):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": DATED} if several else DATED
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    row = chat(("user", "q"), ("assistant", "a"), tools=[tool])
    assert read([row], tokenizer=tokenizer)[1].startswith("01 Jan|")


@pytest.mark.parametrize("call", ["strftime_now(f)", "strftime_now ( '%d' ~ ' %b' )"])
def test_a_date_whose_format_a_template_computes_is_fixed_as_well(call):
    template = (
        f"\n{{% set f = '%d %b' %}}{{% if strftime_now is defined %}}{{{{ {call} }}}}{{% endif %}}"
    )
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    fixed = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}],
        chat_template=freeze_template_date(template),
        tokenize=False,
    )
    assert fixed == "\n01 Jan"
    assert fingerprint(tokenizer)


@pytest.mark.parametrize("parameters", ['{"properties": {"a": {}}}', {"properties": {"a": {}}}])
def test_the_parameters_of_a_tool_may_be_text_as_in_a_column_of_one_type(parameters):
    function = {"name": "f", "parameters": parameters}
    tools = read_tools({"tools": [{"type": "function", "function": function}]})
    assert tools[0]["function"]["parameters"] == {"properties": {"a": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": None}}}
    [found] = read_tool_calls({"tool_calls": [call]}, tools, "message 1")
    assert found["function"]["arguments"] == {"a": None}


def test_the_parameters_of_a_tool_lose_their_null_keys_as_text_too():
    parameters = {"properties": {"a": {"type": "number", "enum": None}, "b": None}}
    read = [
        read_tools({"tools": [{"name": "f", "parameters": given}]})
        for given in (parameters, json.dumps(parameters))
    ]
    without_nulls = {"properties": {"a": {"type": "number"}}}
    assert read == 2 * [[{"name": "f", "parameters": without_nulls}]]


@pytest.mark.parametrize("parameters", [" ", "null", "{}"])
def test_a_tool_without_parameters_may_say_so_in_text(parameters):
    tools = read_tools({"tools": [{"name": "f", "parameters": parameters}]})
    assert tools == [{"name": "f", "parameters": {}}]


@pytest.mark.parametrize("parameters", ["[1]", "no JSON", [1], 7])
def test_parameters_of_a_tool_that_are_no_object_are_refused(parameters):
    with pytest.raises(WrongRecord, match="a tool's parameters is"):
        read_tools({"tools": [{"name": "f", "parameters": parameters}]})
