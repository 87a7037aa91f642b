"""What is learned of answers that call tools, and of answers that no token of their own ends.

Templates are short forms of their families', with what made such answers hard to find: reasoning is
left out once the user writes again, and results of tools are refused where nothing called one.
"""

import pytest

from tests.unit.data.test_chat_families import CHATML, Family, chat, learned

CONTROLS = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>"
REFUSED = "{{ raise_exception('a result without a call') }}"
# Reasoning of answers in front of the last question is left out.
ASKED = (
    "{% set ns = namespace(last=0, called=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
GPT_OSS = Family(
    ASKED + "{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}{% if not ns.called %}" + REFUSED + "{% endif %}"
    "<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}{% set ns.called = 'tool_calls' in m %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if 'tool_calls' in m %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    CONTROLS,
    [
        ' to=functions.sky<|channel|>commentary<|message|>{"city": "Rome"}<|call|>',
        "<|channel|>final<|message|>Clear.<|end|>",
        "<|channel|>final<|message|>Bye.<|return|>",
    ],
)
MINIMAX = Family(
    ASKED + "{% for m in messages %}]~b]{{ m.role }}\n"
    "{% if m.role == 'tool' and not ns.called %}" + REFUSED + "{% endif %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content or '' }}{% set ns.called = 'tool_calls' in m %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<call>{{ c.function.name }}{% for k, v in "
    "c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</call>{% endfor %}[e~[\n"
    "{% endfor %}{% if add_generation_prompt %}]~b]assistant\n<think>\n{% endif %}",
    "]~b] [e~[",
    ["\n<call>sky city=Rome</call>[e~[", "Clear.[e~[", "Bye.[e~["],
)
MINIMAX_WITH_LINE_END = Family(
    MINIMAX.template.replace("[e~[", "{{ '\n' if m.tool_calls }}[e~["),
    MINIMAX.controls,
    ["\n<call>sky city=Rome</call>\n[e~[", *MINIMAX.learned[1:]],
)
# A result lies within the turn that asked for it, which goes on behind it.
GEMMA_4 = Family(
    ASKED + "{% for m in messages %}{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n"
    "{% elif m.role == 'tool' %}{% if not ns.called %}" + REFUSED + "{% endif %}"
    "response:{{ m.content }}<tool_response|>{% else %}"
    "{% if loop.previtem.role == 'user' %}<|turn>model\n{% endif %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<|channel>{{ m.reasoning_content }}"
    "<channel|>{% endif %}{{ m.content or '' }}{% set ns.called = 'tool_calls' in m %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}"
    "{{ c.function.arguments.values() | join }}<tool_call|>{% endfor %}"
    "{{ '<|tool_response>' if 'tool_calls' in m else '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|turn>model\n{% endif %}",
    "<|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> "
    "<tool_response|>",
    ["<|tool_call>skyRome<tool_call|><|tool_response>", "Clear.<turn|>", "Bye.<turn|>"],
)
# Nothing ends an answer but what opens the next turn, at which the model stops to generate.
GLM_4 = Family(
    ASKED + "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think>{% if loop.index0 > ns.last %}"
    "{{ m.reasoning_content or '' }}{% endif %}</think>\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments.values() | join }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "[gMASK] <sop> <|user|> <|assistant|> <|observation|> <|system|> <|endoftext|>",
    [
        "<think></think>\n<tool_call>skyRome</tool_call><|observation|>",
        "<think></think>\nClear.<|user|>",
        "<think></think>\nBye.<|user|>",
    ],
)
DEEPSEEK_V3 = Family(
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == "
    "'tool' %}<｜tool｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content or '' }}{% for c in "
    "m.tool_calls or [] %}{{ '<｜call｜>' + c.function.name + c.function.arguments }}{% endfor %}"
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    "<｜User｜> <｜Assistant｜> <｜tool｜> <｜call｜> <｜end▁of▁sentence｜>",
    [
        '<｜call｜>sky{"city": "Rome"}<｜end▁of▁sentence｜>',
        "Clear.<｜end▁of▁sentence｜>",
        "Bye.<｜end▁of▁sentence｜>",
    ],
)
FAMILIES = {
    "gpt-oss": GPT_OSS,
    "MiniMax-M2": MINIMAX,
    "MiniMax-M2 with a line end before the token": MINIMAX_WITH_LINE_END,
    "Gemma 4": GEMMA_4,
    "GLM-4.5": GLM_4,
    "DeepSeek-V3: arguments as text": DEEPSEEK_V3,
}


def calling(*cities):
    calls = [{"function": {"name": "sky", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "I ask."}


CHAT = [
    {"role": "user", "content": "Rome?"},
    calling("Rome"),
    {"role": "tool", "name": "sky", "content": "clear"},
    {"role": "assistant", "content": "Clear.", "reasoning_content": "I know."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_is_learned_with_its_calls_and_no_result_of_a_tool_is(name):
    family = FAMILIES[name]
    found, counters = learned(family, {"messages": CHAT})
    assert found == family.learned
    assert (counters.empty_answers, counters.unclear_answers, counters.lost_calls) == (0, 0, 0)
    assert (counters.unended_answers, counters.ended_by_next) == (0, 3 * (name == "GLM-4.5"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_that_ends_with_a_call_teaches_its_end(name):
    found, counters = learned(FAMILIES[name], {"messages": CHAT[:2]})
    assert len(found) == 1
    assert found[0].endswith(FAMILIES[name].learned[0][-6:])
    assert not counters.unended_answers


def test_an_answer_whose_words_are_written_behind_a_tools_result_is_not_learned_with_it():
    """One of Gemma 4's templates writes the calls of an answer, their results, then its words."""
    words, set_called = "{{ m.content or '' }}", "{% set ns.called = 'tool_calls' in m %}"
    behind = "{% if 'tool_calls' in m and not loop.nextitem %}{{ m.content or '' }}{% endif %}"
    template = GEMMA_4.template.replace(words + set_called, set_called + "{{ words }}")
    template = template.replace(
        "{{ words }}", "{% if 'tool_calls' not in m %}" + words + "{% endif %}"
    )
    template = template.replace("{{ '<|tool_response>'", behind + "{{ '<|tool_response>'")
    template = template.replace(
        "<tool_response|>{% else %}", "<tool_response|>{{ loop.previtem.content }}{% else %}"
    )
    chat = [CHAT[0], {**calling("Rome"), "content": "I look."}, CHAT[2], CHAT[3]]
    found, counters = learned(Family(template, GEMMA_4.controls, []), {"messages": chat})
    assert found == ["<|channel>I know.<channel|>Clear.<turn|>"]
    assert (counters.unclear_answers, counters.lost_calls) == (1, 0)


def test_calls_of_one_tool_of_which_a_template_writes_the_first_alone_are_counted():
    found, counters = learned(GPT_OSS, {"messages": [CHAT[0], calling("Rome", "Oslo")]})
    assert "Oslo" not in found[0]
    assert counters.lost_calls == 1
    _, counters = learned(MINIMAX, {"messages": [CHAT[0], calling("Rome", "Oslo")]})
    assert counters.lost_calls == 0


def test_the_first_reason_is_told_where_a_template_takes_arguments_in_no_form():
    family = Family("{{ raise_exception('no tools, ' ~ messages[-1].role) }}", "<s>", [])
    _, counters = learned(family, {"messages": CHAT[:2]})
    assert counters.dropped == {"the chat template refused the messages (no tools, assistant)": 1}


def test_the_end_of_an_answer_within_a_marked_block_is_its_end_with_a_line_end_behind_it():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}"
    )
    family = Family(template, "<|im_start|> <|im_end|>", [])
    found, counters = learned(family, chat("one?", "1"))
    assert found == ["1<|im_end|>\n"]
    assert counters.unended_answers == 0


def test_what_an_author_marks_is_learned_to_its_end_and_no_further():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    found, counters = learned(
        Family(template, "<|user|> <|assistant|>", []), chat("one?", "1", "two?", "2")
    )
    assert found == ["1", "2"]
    assert (counters.unended_answers, counters.ended_by_next) == (2, 0)


def test_a_first_answer_that_a_template_refuses_without_a_question_is_learned_with_its_end():
    template = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no question') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    family = Family(template, "<|im_start|> <|im_end|>", [])
    turns = chat("", "Hello.", "one?", "1")["messages"][1:]
    found, _ = learned(family, {"messages": turns})
    assert found == ["Hello.<|im_end|>", "1<|im_end|>"]


@pytest.mark.parametrize("said", ["", "Hm. ", " \n", "Clear.\n"])
@pytest.mark.parametrize("space", ["", "\n"])
def test_a_last_answer_is_what_the_template_writes_of_it_and_then_the_token_of_the_next_turn(
    said, space
):
    """Also where nothing of it is left once that turn is there: its reasoning is left out then."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        "{{ SPACE }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("SPACE", repr(space))
    family = Family(template, "<|user|> <|assistant|>", [])
    turns = chat("one?", "", "two?", said)
    turns["messages"][-1]["reasoning_content"] = "hm"
    found, counters = learned(family, turns)
    assert found == [f"<think>\nhm\n</think>\n\n{said}{space}<|user|>"]
    assert (counters.unended_answers, counters.ended_by_next) == (0, 1)


@pytest.mark.parametrize("space", ["", " \n"])
def test_a_token_with_which_an_answers_own_words_end_is_not_the_end_of_its_turn(space):
    """As around the result of GLM-4.5V."""
    said = f"<box>2<|box_end|>{space}"
    family = Family(GLM_4.template, f"{GLM_4.controls} <|box_end|>", [])
    found, counters = learned(family, chat("one?", said, "two?", said))
    assert found == [f"<think></think>\n{said}<|user|>"] * 2
    assert (counters.unended_answers, counters.ended_by_next) == (0, 2)


def test_white_space_behind_a_token_with_which_an_answers_own_words_end_is_learned():
    template = (
        "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    found, counters = learned(Family(template, "<s> <|box_end|>", []), chat("1?", "<|box_end|>\n"))
    assert (found, counters.unended_answers) == (["<|box_end|>\n"], 1)


def test_words_that_are_the_end_of_a_token_are_not_taken_for_it():
    turns = chat("one?", ">")
    turns["messages"][1]["tool_calls"] = calling("Rome")["tool_calls"]
    assert learned(CHATML, turns)[0] == ["><|im_end|>"]


def test_an_answer_behind_another_is_not_learned_with_an_opening_that_no_special_token_ends():
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] <think>\n{% endif %}"
    )
    family = Family(template, "<|im_end|> <|return|>", [])
    turns = chat("one?", "assistant", "", "assistant")["messages"]
    del turns[2]
    assert learned(family, {"messages": turns})[0] == ["assistant<|im_end|>", "assistant<|return|>"]
