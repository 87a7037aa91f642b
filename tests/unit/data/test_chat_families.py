"""What is learned under the chat templates of model families, each written after its documentation.

The chat: one? 1, two? 2. Expected: what the model has to write in each turn, its end included.
"""

import dataclasses

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpc_tune.data.chats import find_answer_end_token
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from tests.support.older_transformers import since


@dataclasses.dataclass(frozen=True)
class Family:
    """A template, its special tokens (``~`` in front: swallows white space behind it).

    ``added``: to a last answer, which the template does not end.
    """

    template: str
    controls: str
    learned: list[str]
    unended: int = 0
    added: str = ""


def plain(turn, prompt, start="", end=""):
    """A template of one form for all turns; ROLE and TEXT stand for what they say."""
    turn = turn.replace("ROLE", "{{ m.role }}").replace("TEXT", "{{ m.content }}")
    return (
        f"{start}{{% for m in messages %}}{turn}{{% endfor %}}{end}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def by_role(user, assistant, prompt, start="", end=""):
    """A template with a form for each of two roles."""
    turn = f"{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}"
    return plain(turn, prompt, start, end)


# Reasoning in front of an answer is left out once the next question follows.
STRIPPED = (
    "{% set said = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content "
    "else m.content %}"
)
LAST_THINKS = (
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}"
)
FAMILIES = {
    "ChatML: Qwen2, Yi, InternLM": Family(
        plain("<|im_start|>ROLE\nTEXT<|im_end|>\n", "<|im_start|>assistant\n"),
        "<|im_start|> <|im_end|>",
        ["1<|im_end|>", "2<|im_end|>"],
    ),
    "Llama 3": Family(
        plain(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|begin_of_text|>",
        ),
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        ["1<|eot_id|>", "2<|eot_id|>"],
    ),
    "Llama 2": Family(
        by_role("<s>[INST] TEXT [/INST]", " TEXT </s>", ""), "<s> </s>", [" 1 </s>", " 2 </s>"]
    ),
    "Mistral": Family(
        by_role("[INST] TEXT[/INST]", " TEXT</s>", "", "<s>"),
        "<s> </s> [INST] [/INST]",
        [" 1</s>", " 2</s>"],
    ),
    "Gemma": Family(
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else "
        "m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        ["1<end_of_turn>", "2<end_of_turn>"],
    ),
    "Phi-3: tokens swallow the line end, and an end of the whole": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "~<|user|> ~<|assistant|> ~<|end|> <|endoftext|>",
        ["1<|end|>", "2<|end|><|endoftext|>"],
    ),
    "Phi-4": Family(
        plain("<|im_start|>ROLE<|im_sep|>TEXT<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "<|im_start|> <|im_sep|> <|im_end|>",
        ["1<|im_end|>", "2<|im_end|>"],
    ),
    "Qwen3: an empty block of reasoning in the last turn": Family(
        plain("<|im_start|>ROLE\n" + LAST_THINKS + "TEXT<|im_end|>\n", "<|im_start|>assistant\n"),
        "<|im_start|> <|im_end|>",
        ["1<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"],
    ),
    "Qwen3.5: the prompt opens the reasoning": Family(
        plain(
            "<|im_start|>ROLE\n" + LAST_THINKS + "TEXT<|im_end|>\n",
            "<|im_start|>assistant\n<think>\n",
        ),
        "<|im_start|> <|im_end|>",
        ["1<|im_end|>", "\n</think>\n\n2<|im_end|>"],
    ),
    "DeepSeek R1: the prompt opens reasoning that no turn has": Family(
        plain(
            STRIPPED + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
            "{{ said }}<｜end▁of▁sentence｜>{% endif %}",
            "<｜Assistant｜><think>\n",
            "<｜begin▁of▁sentence｜>",
        ),
        "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
        ["1<｜end▁of▁sentence｜>", "2<｜end▁of▁sentence｜>"],
    ),
    "DeepSeek V3.1: answers open with the end of reasoning": Family(
        by_role(
            "<｜User｜>TEXT",
            "<｜Assistant｜></think>TEXT<｜end▁of▁sentence｜>",
            "<｜Assistant｜></think>",
            "<｜begin▁of▁sentence｜>",
        ),
        "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
        ["1<｜end▁of▁sentence｜>", "2<｜end▁of▁sentence｜>"],
    ),
    "GPT-OSS: the last turn ends with another token": Family(
        "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}<|start|>"
        "{% if m.role == 'user' %}user<|message|>{{ m.content }}<|end|>{% else %}assistant"
        "<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|start|> <|end|> <|message|> <|channel|> <|return|>",
        ["<|channel|>final<|message|>1<|end|>", "<|channel|>final<|message|>2<|return|>"],
    ),
    "Nemotron: strips and opens reasoning": Family(
        plain(
            STRIPPED + "<SPECIAL_11>ROLE\n{{ said }}<SPECIAL_12>\n",
            "<SPECIAL_11>assistant\n<think>\n",
        ),
        "<SPECIAL_11> <SPECIAL_12>",
        ["1<SPECIAL_12>", "2<SPECIAL_12>"],
    ),
    "GLM-4: the next turn ends an answer": Family(
        plain("<|ROLE|>\nTEXT", "<|assistant|>\n", "[gMASK]<sop>"),
        "[gMASK] <sop> <|user|> <|assistant|> <|endoftext|>",
        ["1<|user|>", "2<|user|>"],
        added="<|user|>",
    ),
    "Zephyr": Family(plain("<|ROLE|>\nTEXT</s>\n", "<|assistant|>\n"), "</s>", ["1</s>", "2</s>"]),
    "Command R": Family(
        by_role(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<BOS_TOKEN>",
        ),
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>"
        " <|CHATBOT_TOKEN|>",
        ["1<|END_OF_TURN_TOKEN|>", "2<|END_OF_TURN_TOKEN|>"],
    ),
    "Granite": Family(
        plain(
            "<|start_of_role|>ROLE<|end_of_role|>TEXT<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        "<|start_of_role|> <|end_of_role|> <|end_of_text|>",
        ["1<|end_of_text|>", "2<|end_of_text|>"],
    ),
    "OLMo 2: the last turn has no line end": Family(
        by_role(
            "<|user|>\nTEXT\n",
            "<|assistant|>\nTEXT<|endoftext|>{{ '' if loop.last else '\n' }}",
            "<|assistant|>\n",
            "<|endoftext|>",
        ),
        "<|endoftext|>",
        ["1<|endoftext|>", "2<|endoftext|>"],
    ),
    "EXAONE": Family(
        plain("[|ROLE|]TEXT[|endofturn|]\n", "[|assistant|]"),
        "[|user|] [|assistant|] [|endofturn|]",
        ["1[|endofturn|]", "2[|endofturn|]"],
    ),
    "Kimi": Family(
        by_role(
            "<|im_user|>user<|im_middle|>TEXT<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>TEXT<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_user|> <|im_assistant|> <|im_middle|> <|im_end|>",
        ["1<|im_end|>", "2<|im_end|>"],
    ),
    "Hunyuan": Family(
        by_role(
            "<｜hy_User｜>TEXT",
            "<｜hy_Assistant｜>TEXT<｜hy_place▁holder▁no▁2｜>",
            "<｜hy_Assistant｜>",
            "<｜hy_begin▁of▁sentence｜>",
        ),
        "<｜hy_begin▁of▁sentence｜> <｜hy_User｜> <｜hy_Assistant｜> <｜hy_place▁holder▁no▁2｜>",
        ["1<｜hy_place▁holder▁no▁2｜>", "2<｜hy_place▁holder▁no▁2｜>"],
    ),
    "Vicuna": Family(
        by_role("USER: TEXT ", "ASSISTANT: TEXT</s>", "ASSISTANT:"), "</s>", [" 1</s>", " 2</s>"]
    ),
    "alpaca's headings: no special token at all": Family(
        by_role("### Instruction:\nTEXT\n\n", "### Response:\nTEXT\n\n", "### Response:\n"),
        "<|endoftext|>",
        ["1\n\n", "2\n\n"],
        unended=2,
    ),
    "marked by its author": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|> <|im_end|>",
        ["1<|im_end|>", "2<|im_end|>"],
    ),
    "marked by its author, tokens swallow the line end": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|end|>{% endgeneration %}\n{% else %}{{ m.content }}<|end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "~<|user|> ~<|assistant|> ~<|end|>",
        ["1<|end|>", "2<|end|>"],
    ),
}


def tokenizer_of(family):
    """A token per byte, and the family's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(word.removeprefix("~"), special=True, rstrip=word.startswith("~"))
            for word in family.controls.split()
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=family.template)


def learned(family, record, loss_on="answers"):
    """Return the learned parts of the one document of a record, and the counts."""
    tokenizer = tokenizer_of(family)
    encoder = Encoder(tokenizer, 1000, loss_on)
    parts = []
    for block in encoder.encode([to_example(record)]):
        marks = np.flatnonzero(np.diff(block.loss_mask, prepend=0, append=0) != 0).reshape(-1, 2)
        parts += [tokenizer.decode(block.tokens[a:b]) for a, b in marks]
    return parts, encoder.counters


def chat(*turns, **flags):
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    } | flags


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_is_learned_with_its_end(name):
    family = FAMILIES[name]
    found, counters = learned(family, chat("one?", "1", "two?", "2"))
    assert found == family.learned
    assert counters.unended_answers == family.unended
    assert not counters.dropped


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_that_the_user_ends_teaches_the_answers_before(name):
    found, _ = learned(FAMILIES[name], chat("one?", "1", "two?"))
    assert len(found) == 1
    assert "1" in found[0]
    assert "two" not in found[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_marked_not_to_be_learned_is_not(name):
    record = chat("one?", "1", "two?", "2")
    record["messages"][1]["weight"] = 0
    found, counters = learned(FAMILIES[name], record)
    assert found == FAMILIES[name].learned[1:]
    assert counters.marked_answers == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ends_an_answer_is_known_to_generate(name):
    family = FAMILIES[name]
    end = find_answer_end_token(tokenizer_of(family))
    assert (end is None) == bool(family.unended)
    assert family.learned[0].endswith(end or "")


CHATML = FAMILIES["ChatML: Qwen2, Yi, InternLM"]


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss", "loss_mask"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_every_trainers_mark_is_obeyed(flag, value):
    record = chat("one?", "1", "two?", "2")
    record["messages"][1][flag] = value
    assert learned(CHATML, record)[0] == ["2<|im_end|>"]
    whole, _ = learned(CHATML, record, loss_on="all")
    assert "one?" in whole[0]
    assert not any("1" in part for part in whole)


def test_a_mark_on_the_row_holds_for_its_answers():
    found, counters = learned(CHATML, chat("one?", "1", weight=0))
    assert (found, counters.marked_answers) == ([], 1)
    assert counters.dropped == {"no answer that is to be learned": 1}


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in "
    "m.tool_calls or [] %}<tool>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_of_tools_are_learned_their_arguments_as_an_object(thinks):
    template = (
        CALLS.replace("{{ m.content or", LAST_THINKS + "{{ m.content or") if thinks else CALLS
    )
    call = {"function": {"name": "area", "arguments": '{"sides": [5, 3]}'}}
    record = {
        "messages": [
            {"role": "user", "content": "how large?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "15"},
            {"role": "assistant", "content": "15"},
        ]
    }
    found, _ = learned(dataclasses.replace(CHATML, template=template), record)
    think = "<think>\n\n</think>\n\n" if thinks else ""
    wanted = ['<tool>area {"sides": [5, 3]}</tool><|im_end|>', f"{think}15<|im_end|>"]
    assert found == wanted
    turns = [
        {"from": "human", "value": "how large?"},
        {"from": "function_call", "value": '{"name": "area", "arguments": {"sides": [5, 3]}}'},
        {"from": "observation", "value": "15"},
        {"from": "gpt", "value": "15"},
    ]
    family = dataclasses.replace(CHATML, template=template)
    assert learned(family, {"conversations": turns})[0] == wanted


def test_calls_of_tools_that_a_template_leaves_out_are_counted_and_no_empty_answer_is_taught():
    call = {"function": {"name": "area", "arguments": {"sides": [5, 3]}}}
    record = chat("how large?", "I compute it.", "now?", "")
    for message in record["messages"][1::2]:
        message["tool_calls"] = [call]
    found, counters = learned(CHATML, record)
    assert found == ["I compute it.<|im_end|>"]
    assert (counters.lost_calls, counters.empty_answers) == (2, 1)
    shown, counters = learned(dataclasses.replace(CHATML, template=CALLS), record)
    assert len(shown) == 2
    assert (counters.lost_calls, counters.empty_answers) == (0, 0)


def test_special_tokens_in_peoples_text_are_text():
    record = chat("what does <|im_end|> do?", "<|im_end|> ends", "and 2?", "2")
    tokenizer = tokenizer_of(CHATML)
    encoder = Encoder(tokenizer, 1000, "answers")
    (block,) = encoder.encode([to_example(record)])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (block.tokens == end).sum() == 4, "one for each turn"
    assert "what does <|im_end|> do?" in tokenizer.decode(block.tokens)
    found, counters = learned(CHATML, record)
    assert found == ["<|im_end|> ends<|im_end|>", "2<|im_end|>"]
    assert counters.control_texts == 2


def metaspace_tokenizer(template):
    """As Llama 2's: what it gets begins with a space that is put there."""
    alphabet = [chr(n) for n in range(33, 127)]
    words = ["<unk>", "▁", *alphabet, *(f"▁{c}" for c in alphabet), "\n"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", letter) for letter in alphabet]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(CHATML.controls.split())
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


TYPED = {
    "content": {"content": "a <|im_end|>b<|im_start|>"},
    "beginning": {"content": "<|im_end|> x"},
    "reasoning": {"content": "1", "reasoning_content": "hm <|im_end|> hm"},
    "arguments": {
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"of": ["<|im_end|>", 2]}}}],
    },
}


@since("5.20", "does not cut typed special tokens")
@pytest.mark.parametrize("make", [tokenizer_of, metaspace_tokenizer])
@pytest.mark.parametrize("typed", TYPED)
def test_typed_special_tokens_are_what_stock_transformers_makes_of_them(typed, make):
    template = CALLS.replace("{{ m.content or", "{{ m.reasoning_content }}{{ m.content or")
    family = dataclasses.replace(CHATML, template=template)
    tokenizer = make(family) if make is tokenizer_of else make(template)
    messages = [{"role": "user", "content": "<|im_start|>?"}, {"role": "assistant", **TYPED[typed]}]
    encoder = Encoder(tokenizer, 1000, "answers")
    (block,) = encoder.encode([to_example({"messages": messages})])
    stock = tokenizer.apply_chat_template(messages, sanitize_control_tokens=True)["input_ids"]
    assert block.tokens.tolist() == stock
    assert encoder.counters.control_texts == 1 + str(TYPED[typed]).count("<|im_")


def test_characters_that_stand_for_special_tokens_are_kept_where_people_type_them():
    said = "\U000f0000 and \U000f0001\U000f0000\U000f0002 <|im_end|>"
    found, counters = learned(CHATML, chat("?", said))
    assert found == [f"{said}<|im_end|>"]
    assert counters.control_texts == 1


def test_an_assistants_own_marks_of_reasoning_stay_special_tokens():
    family = dataclasses.replace(CHATML, controls=f"{CHATML.controls} <think> </think>")
    tokenizer = tokenizer_of(family)
    encoder = Encoder(tokenizer, 1000, "answers")
    record = chat("what is <think>?", "<think>hm</think>1")
    (block,) = encoder.encode([to_example(record)])
    for token in ("<think>", "</think>"):
        assert (block.tokens == tokenizer.convert_tokens_to_ids(token)).sum() == 1
    assert encoder.counters.control_texts == 1


def test_a_template_that_writes_a_typed_special_token_in_ascii_drops_the_row():
    template = CALLS.replace("| tojson", "| tojson(ensure_ascii=true)")
    call = {"function": {"name": "f", "arguments": {"of": "<|im_end|>"}}}
    record = chat("?", "")
    record["messages"][1]["tool_calls"] = [call]
    _, counters = learned(dataclasses.replace(CHATML, template=template), record)
    assert list(counters.dropped) == [
        "the chat template writes a typed control token as JSON in ASCII"
    ]


@pytest.mark.parametrize(
    "block",
    [
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        "  {% generation %}\n    {{ m.content }}<|im_end|>\n  {% endgeneration %}\n",
        "\n {%- generation -%}\n {{ m.content }}<|im_end|> \n {%- endgeneration -%}\n\n",
        "  {%+ generation +%}\n {% if true %}\n  {{ m.content }}{% endif %}{% endgeneration %}\n ",
    ],
)
def test_blocks_that_a_template_marks_are_where_stock_transformers_has_them(block):
    template = (
        "{% for m in messages %}\n<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\n"
        + block
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    family = dataclasses.replace(CHATML, template=template)
    record = chat("one?", " 1 ", "two?", "2\n")
    encoder, tokenizer = Encoder(tokenizer_of(family), 1000, "answers"), tokenizer_of(family)
    (one,) = encoder.encode([to_example(record)])
    stock = tokenizer.apply_chat_template(record["messages"], return_assistant_tokens_mask=True)
    assert one.tokens.tolist() == stock["input_ids"]
    assert one.loss_mask.tolist() == stock["assistant_masks"]


ANSWER = "{{ m.content }}<|im_end|>"
MARKED = f"{{% generation %}}{ANSWER}{{% endgeneration %}}"


@pytest.mark.parametrize(
    ("block", "num_unmarked"),
    [
        (f"{{% if loop.last %}}{MARKED}{{% else %}}{ANSWER}{{% endif %}}\n", 1),
        (f"{{% if loop.first or m.content == '1' %}}{MARKED}{{% else %}}{ANSWER}{{% endif %}}", 1),
        (f"{{% generation %}}<think>{{% endgeneration %}}hm</think>{MARKED}\n", 0),
        (f"{{% if m.reasoning %}}{MARKED}{{% else %}}{ANSWER}{{% endif %}}\n", 2),
    ],
    ids=["the last", "the first", "two in each", "none"],
)
def test_where_a_template_marks_other_text_than_each_answer_that_is_learned(block, num_unmarked):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + block
    )
    template += "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = tokenizer_of(dataclasses.replace(CHATML, template=template))
    record = chat("one?", "1", "two?", "2")
    encoder = Encoder(tokenizer, 1000, "answers")
    found = [*encoder.encode([to_example(record)])]
    stock = tokenizer.apply_chat_template(record["messages"], return_assistant_tokens_mask=True)
    assert encoder.counters.unmarked_answers == num_unmarked
    if num_unmarked == 2:
        assert [*encoder.counters.dropped] == [
            "the chat template marks no answer in it ({% generation %})"
        ]
        assert found == []
        assert not any(stock["assistant_masks"])
    else:
        assert found[0].loss_mask.tolist() == stock["assistant_masks"]


def test_answers_without_content_teach_nothing_and_are_counted():
    for nothing in ("", None, " \n"):
        found, counters = learned(CHATML, chat("one?", nothing, "two?", "2"))
        assert (found, counters.empty_answers) == (["2<|im_end|>"], 1)
        assert learned(CHATML, chat("one?", nothing))[1].dropped == {"empty answer": 1}


def test_reasoning_that_a_template_leaves_out_is_counted():
    record = chat("one?", "1", "two?", "2")
    for message in record["messages"][1::2]:
        message["reasoning_content"] = "hm"
    family = FAMILIES["Qwen3: an empty block of reasoning in the last turn"]
    found, counters = learned(family, record)
    assert found == ["1<|im_end|>", "<think>\nhm\n</think>\n\n2<|im_end|>"]
    assert (counters.lost_reasoning, counters.written_reasoning) == (1, 0)


def test_an_empty_block_of_reasoning_that_a_template_writes_into_an_answer_is_counted():
    family = FAMILIES["Qwen3: an empty block of reasoning in the last turn"]
    found, counters = learned(family, chat("one?", "1", "two?", "2"))
    assert found == ["1<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    assert counters.written_reasoning == 1
    assert "1 answers without reasoning, learned with an empty reasoning block" in str(counters)
    own = chat("one?", "<think>\n\n</think>\n\n1")
    assert learned(family, own)[1].written_reasoning == 0


def test_a_template_that_prints_the_date_gives_the_same_tomorrow():
    dated = plain("ROLE on {{ strftime_now('%d %b %Y') }}\nTEXT<|im_end|>", "assistant on")
    family = dataclasses.replace(CHATML, template=dated)
    found, _ = learned(family, chat("one?", "1"), loss_on="all")
    assert found[0].count("01 Jan 2026") == 2


def test_alpacas_history_is_earlier_turns_with_a_template_and_without():
    record = {"instruction": "two?", "output": "2", "history": [["one?", "1"]]}
    assert learned(CHATML, record)[0] == ["1<|im_end|>", "2<|im_end|>"]
    assert learned(dataclasses.replace(CHATML, template=None), record)[0] == ["1", "2"]


@pytest.mark.parametrize("field", ["messages", "text"])
def test_texts_that_bring_their_begin_and_end_get_no_second_ones(field):
    tokenizer = tokenizer_of(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    encoder = Encoder(tokenizer, 1000, "answers")
    text = "<|im_start|>x<|im_end|>"
    record = {"text": text} if field == "text" else chat("one?", "1")
    (block,) = encoder.encode([to_example(record)])
    wanted = text if field == "text" else "<|im_start|>user\none?<|im_end|>\n"
    wanted += "" if field == "text" else "<|im_start|>assistant\n1<|im_end|>\n"
    assert tokenizer.decode(block.tokens) == wanted
