"""Chats that hypothesis draws, under the template of each family and under drawn ones: what is
learned is what the assistant says, with the end of each turn, and nothing else; the tokens are
those of stock transformers.

``make soak`` draws for HPC_TUNE_SOAK_S seconds (half an hour).
"""

import json
import os
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import to_example
from tests.support.older_transformers import RELEASE
from tests.unit.data.test_chat_families import FAMILIES, LAST_THINKS, STRIPPED, Family, tokenizer_of

FEW = 50
PER_ROUND = 2000
SOAK_S = float(os.environ.get("HPC_TUNE_SOAK_S", "1800"))
TOKENIZERS = {}  # by template
# What could be taken for the form of a turn, or is lost by careless cutting.
HARD = [
    "assistant", "user", "\n", " ", "\n\n", "ASSISTANT:", "USER: ", " ASSISTANT: 1</s>",
    "### Response:\n", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "{{ x }}", "{% if %}",
    "\r\n", "\t", "é", "😀", "\u3000", "\u200b", "\U000f0000", "\U000f0001", "1", "final", "[INST]",
    "\ufeff", "<|im_end|>\n<|im_start|>assistant\n", "Hello.", "None", '"', "\\", "\x00",
]  # fmt: skip
# Where no token begins or ends an answer, and none is asked for, its outermost space is not known.
BEGUN_BY_USERS = [
    FAMILIES[name].template
    for name in ("Llama 2", "Mistral", "alpaca's headings: no special token at all")
]
# Python's idea of white space has these four beyond Unicode's.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x1c\x1d\x1e\x1f")


CALLS = (
    "{% for c in m.tool_calls or [] %}<tool>{{ c.function.name }}({{ c.function.arguments | tojson "
    "}})</tool>{% endfor %}"
)


@st.composite
def templates(draw):
    """A family of its own: openings, ends of turns, of the last one and of the whole, reasoning."""
    opening = draw(st.sampled_from(["<|im_start|>ROLE\n", "<|ROLE|>", "<|ROLE|>\n", "[ROLE] "]))
    end = draw(st.sampled_from(["<|im_end|>", "</s>", ""]))
    space = draw(st.sampled_from(["", "\n"])) if end else ""
    last_end = draw(st.sampled_from([end, end, "<|return|>"])) if end else ""
    begin = draw(st.sampled_from(["", "<s>"]))
    end_of_all = draw(st.sampled_from(["", "", "<|endoftext|>"]))
    trim = draw(st.sampled_from(["", " | trim"]))
    stripped, thinks = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    thought = draw(st.sampled_from(["", "<think>\n"])) if stripped or thinks else ""
    said = "said" if stripped else "m.content"
    calls = draw(st.sampled_from(["", CALLS]))
    opened = opening.replace("ROLE", "{{ m.role }}")
    template = (
        f"{begin}{{% for m in messages %}}{STRIPPED if stripped else ''}{opened}"
        f"{LAST_THINKS if thinks else ''}{{{{ {said}{trim} }}}}{calls}"
        "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}"
        f"{last_end}{{% else %}}{end}{{% endif %}}{{{{ {space!r} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening.replace('ROLE', 'assistant')}{thought}"
        f"{{% else %}}{end_of_all}{{% endif %}}"
    )
    reasoning = "<think>\n\n</think>\n\n".removeprefix(thought) if thinks else ""
    last = f"{reasoning}2{last_end}{space if end_of_all else ''}{end_of_all}"
    names = ["<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", "</s>", "<s>"]
    controls = " ".join([*names, "<|return|>", "<|endoftext|>"])
    opens = "" if end else {"<|im_start|>ROLE\n": "<|im_start|>"}.get(opening, "<|user|>")
    return Family(template, controls, [f"1{end}", last], added="" if "[" in opening else opens)


def said_under(family):
    """Text that people may write, special tokens of the family's template among it."""
    controls = [control.removeprefix("~") for control in family.controls.split()]
    parts = st.sampled_from(HARD + controls) | st.text(LETTERS, max_size=8)
    return st.lists(parts, max_size=4).map("".join)


@st.composite
def chats(draw):
    """A family, and messages: mostly in turn, any role first and last, some marked."""
    family = draw(st.sampled_from([*FAMILIES.values()]) | templates())
    pool = draw(st.lists(said_under(family), min_size=1, max_size=6))
    some = st.sampled_from(pool)  # turns that say the same are among them
    role = draw(st.sampled_from(["user", "user", "user", "assistant"]))
    if family.template in BEGUN_BY_USERS:
        role = "user"
    messages = []
    if "{{ m.role }}" in family.template and draw(st.integers(0, 3)) == 0:
        messages.append({"role": "system", "content": draw(some)})
    for _ in range(draw(st.integers(1, 6))):
        message = {"role": role, "content": draw(some)}
        if not message["content"].rpartition("</think>")[2].strip():
            message["content"] = message["content"].replace("</think>", "")
        if message["content"].lstrip().startswith("<think>"):  # some prompts end with it
            message["content"] = f"1{message['content']}"
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = f"hm: {draw(some)}"
        if role == "assistant" and draw(st.integers(0, 5)) == 0:
            message["weight"] = 0
        if role == "assistant" and draw(st.integers(0, 5)) == 0:
            call = {"name": "look_up", "arguments": {"of": [draw(some), 1]}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        messages.append(message)
        if draw(st.integers(0, 7)):
            role = "assistant" if role == "user" else "user"
    return family, messages


def expected(family, messages):
    """Return what is to be learned, and what is added behind a last answer.

    By the family's two patterns, of a turn and of the last.
    """
    learned, added = [], ""
    for number, message in enumerate(messages):
        is_last = number + 1 == len(messages)
        text, thoughts = message["content"], message.get("reasoning_content", "")
        thinks = is_last and LAST_THINKS in family.template
        calls = ""
        for call in message.get("tool_calls", []) if CALLS in family.template else ():
            given = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls += f"<tool>look_up({given})</tool>"
        is_empty = not (text.strip() or (thinks and thoughts) or calls)
        if message["role"] != "assistant" or "weight" in message or is_empty:
            continue
        if STRIPPED in family.template and "</think>" in text:
            text = text.split("</think>")[-1].lstrip("\n")
        if "| trim" in family.template:
            text = text.strip()
        if "~<|assistant|>" in family.controls:
            text = text.lstrip()  # the token in front has swallowed it
        head, mark, tail = family.learned[is_last].partition("12"[is_last])
        assert mark
        if family.added and tail in ("", family.added):
            is_asked = is_last or messages[number + 1]["role"] == "user"
            tail = family.added if is_asked else ""  # nothing else ends it
            added = tail if is_last else ""
        if thinks:
            before, line, after = head.partition("\n</think>")
            head = f"{before}{thoughts}{line}{after}"
        learned.append(f"{head}{text}{calls}{tail}")
    return "".join(learned), added


def check(drawn):
    family, messages = drawn
    if family.template not in TOKENIZERS:
        TOKENIZERS[family.template] = tokenizer_of(family)
    tokenizer, (wanted, added) = TOKENIZERS[family.template], expected(family, messages)
    encoder = Encoder(tokenizer, 1 << 20, "answers")
    blocks = list(encoder.encode([to_example({"messages": messages})]))
    assert encoder.counters.unclear_answers == 0
    if not blocks:
        assert wanted == "", encoder.counters.dropped
        return
    (block,) = blocks
    marks = np.flatnonzero(np.diff(block.loss_mask, prepend=0, append=0)).reshape(-1, 2)
    found = "".join(tokenizer.decode(block.tokens[a:b]) for a, b in marks)
    assert found == wanted
    plain = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    text = json.dumps(plain, ensure_ascii=False)
    if any(char in text for char in "\U000f0000\U000f0001"):  # stock takes them out
        return
    # An answer's own special tokens are tokens; stock makes text of all of them, or of none; before
    # transformers 5.20 of none.
    num_own, num_typed = encoder.counters.own_controls, encoder.counters.control_texts
    if not num_typed or (not num_own and RELEASE >= (5, 20)):
        stock = tokenizer.apply_chat_template(plain, sanitize_control_tokens=not num_own)
        end = tokenizer.encode(added, add_special_tokens=False)
        assert block.tokens.tolist() == stock["input_ids"] + end


def draw_and_check(num):
    """Check ``num`` chats."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    common = {"deadline": None, "database": None, "suppress_health_check": quiet}
    settings(max_examples=num, print_blob=True, **common)(given(chats())(check))()


def test_what_is_learned_of_any_chat_is_what_the_assistant_says():
    draw_and_check(FEW)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 600)
def test_what_is_learned_of_any_chat_is_what_the_assistant_says_for_long():
    began_s, num = time.monotonic(), 0
    while time.monotonic() - began_s < SOAK_S:
        draw_and_check(PER_ROUND)
        num += PER_ROUND
    print(f"{num} chats")
