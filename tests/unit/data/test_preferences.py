"""Rows of preferences as others' tools write them, and what is said of wrong ones."""

import json

import pytest

from hpc_tune.data.chunks import list_chunks, read_chunk
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.fields import WrongRecord
from hpc_tune.data.preferences import (
    LabeledAnswers,
    PreferencePair,
    replace_answer,
    to_labeled_answers,
    to_pair,
)
from hpc_tune.data.reading import ReadOptions, read_example
from hpc_tune.data.records import Chat, Completion, NoLearnedTextError, Text
from hpc_tune.errors import DataError
from tests.support.data import write_jsonl


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


TOOL = {"type": "function", "function": {"name": "area", "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [user("2 + 2?")]
CHAT = ("2 + 2?", "4", "5")
PAIRS = {
    "trl, text": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "trl, messages": {"prompt": ASKED, "chosen": [says("4")], "rejected": [says("5")]},
    "trl, implicit": {"chosen": [*ASKED, says("4")], "rejected": [*ASKED, says("5")]},
    "UltraFeedback": {
        "prompt": "2 + 2?",
        "messages": [*ASKED, says("4")],
        "chosen": [*ASKED, says("4")],
        "rejected": [*ASKED, says("5")],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "LLaMA-Factory, alpaca": {"instruction": "2 + 2?", "input": "", "chosen": "4", "rejected": "5"},
    "LLaMA-Factory, sharegpt": {
        "conversations": [{"from": "human", "value": "2 + 2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "OpenAI": {
        "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        "preferred_output": [says("4")],
        "non_preferred_output": [says("5")],
    },
    "ms-swift": {"messages": [*ASKED, says("4")], "rejected_response": "5"},
    "ms-swift, messages": {
        "messages": [*ASKED, says("4")],
        "rejected_messages": [*ASKED, says("5")],
    },
    "axolotl, intel": {"question": "2 + 2?", "chosen": "4", "rejected": "5"},
    "axolotl, argilla": {"instruction": "2 + 2?", "chosen_response": "4", "rejected_response": "5"},
    "axolotl, icr": {"input": "2 + 2?", "chosen": "4", "rejected": "5"},
    "axolotl, chat_template": {"messages": ASKED, "chosen": says("4"), "rejected": says("5")},
    "hh-rlhf": {
        "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
    },
    "implicit text": {"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"},
}


def text_of(value):
    return json.dumps(value)


# The same in cells of tables that have one type per column.
PAIRS |= {
    "JSON text of answers": {
        "prompt": text_of(ASKED),
        "chosen": text_of([says("4")]),
        "rejected": text_of([says("5")]),
    },
    "JSON text of a prompt alone": {"prompt": text_of(ASKED), "chosen": "4", "rejected": "5"},
    "JSON text of a message": {
        "prompt": "2 + 2?",
        "chosen": text_of(says("4")),
        "rejected": text_of({"from": "gpt", "value": "5"}),
    },
    "JSON text of whole chats": {
        "chosen": text_of([*ASKED, says("4")]),
        "rejected": text_of([*ASKED, says("5")]),
    },
    "JSON text of messages and tools": {
        "chosen": text_of({"messages": [*ASKED, says("4")], "tools": []}),
        "rejected": text_of({"messages": [*ASKED, says("5")], "tools": []}),
    },
    "objects of messages": {
        "chosen": {"messages": [*ASKED, says("4")], "tools": None},
        "rejected": {"messages": [*ASKED, says("5")], "tools": None},
    },
    "JSON text of one list per key": {
        "prompt": ASKED,
        "chosen": text_of({"role": ["assistant"], "content": ["4"]}),
        "rejected": text_of({"role": ["assistant"], "content": ["5"]}),
    },
    "OpenAI, JSON text": {
        "input": text_of({"messages": ASKED, "tools": []}),
        "preferred_output": text_of([says("4")]),
        "non_preferred_output": text_of([says("5")]),
    },
    "ms-swift, JSON text": {
        "messages": text_of([*ASKED, says("4")]),
        "rejected_response": text_of([says("5")]),
    },
    "ms-swift, query": {"query": "2 + 2?", "chosen": "4", "rejected_response": "5"},
}


def messages_of(example):
    return (example.as_chat() if isinstance(example, Completion) else example).messages


def unlearned_of(example):
    return (example.as_chat() if isinstance(example, Completion) else example).unlearned


@pytest.mark.parametrize("name", PAIRS)
def test_each_form_gives_the_same_pair(name):
    pair = to_pair(PAIRS[name])
    assert messages_of(pair.chosen) == [*ASKED, says("4")]
    assert messages_of(pair.rejected) == [*ASKED, says("5")]


@pytest.mark.parametrize("name", PAIRS)
def test_each_form_is_two_labeled_answers_as_well(name):
    pair = to_pair(PAIRS[name])
    labeled = to_labeled_answers(PAIRS[name])
    assert labeled == LabeledAnswers((pair.chosen, pair.rejected), (True, False))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [*ASKED, says("4"), user("sure?")]},
        {"messages": [*ASKED, says("4"), user("sure?")]},
        {"instruction": "sure?", "history": [["2 + 2?", "4"]]},
        {"prompt": "sure?", "history": [["2 + 2?", "4"]]},
        {"query": "sure?", "history": json.dumps([["2 + 2?", "4"]])},
    ],
)
def test_only_answers_are_learned_not_those_in_the_prompt(row):
    pair = to_pair({**row, "chosen": "yes", "rejected": "no"})
    for example, text in ((pair.chosen, "yes"), (pair.rejected, "no")):
        assert messages_of(example) == [*ASKED, says("4"), user("sure?"), says(text)]
        assert unlearned_of(example) == {1}


def test_a_dialogue_as_text_is_read_as_turns_and_stays_text_without_a_template():
    head = "\n\nHuman: 2 + 2?\n\nAssistant: 4\n\nHuman: sure?\n\nAssistant: "
    pair = to_pair({"chosen": f"{head}Yes.", "rejected": f"{head}Yellow."})
    assert pair.chosen == Completion("sure?", "Yes.", head, history=(("2 + 2?", "4"),))
    assert pair.rejected.completion == "Yellow."
    assert unlearned_of(pair.chosen) == {1}


def test_turns_of_a_dialogue_that_do_not_alternate_are_messages():
    head = "\n\nHuman: 2 + 2?\n\nHuman: hello?\n\nAssistant: "
    pair = to_pair({"chosen": f"{head}4", "rejected": f"{head}5"})
    assert pair.chosen == Chat([user("2 + 2?"), user("hello?"), says("4")])


def test_texts_are_cut_at_white_space_never_inside_a_word():
    pair = to_pair({"chosen": "Q: x\nA: yesterday", "rejected": "Q: x\nA: yes"})
    assert (pair.chosen.prompt, pair.chosen.plain_prompt) == ("Q: x\nA:", "Q: x\nA: ")
    assert (pair.chosen.completion, pair.rejected.completion) == ("yesterday", "yes")


def test_chats_that_part_earlier_are_learned_from_there():
    chosen = [*ASKED, says("4"), user("sure?"), says("yes")]
    rejected = [*ASKED, says("5"), user("sure?"), says("no")]
    pair = to_pair({"chosen": chosen, "rejected": rejected})
    assert pair == PreferencePair(Chat(chosen), Chat(rejected))


def test_system_and_tools_are_of_both_sides():
    row = {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"}
    assert messages_of(to_pair(row).rejected) == [SYSTEM, *ASKED, says("5")]
    openai = {**PAIRS["OpenAI"], "input": {"messages": ASKED, "tools": [TOOL]}}
    assert [side.tools for side in vars(to_pair(openai)).values()] == [[TOOL], [TOOL]]
    with_tools = to_pair({**PAIRS["trl, text"], "tools": [TOOL], "system": "Be brief."})
    assert with_tools.chosen == Chat([SYSTEM, *ASKED, says("4")], [TOOL])


CALL = {"type": "function", "function": {"name": "area", "arguments": {}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4"}


def test_rejected_response_of_ms_swift_stands_for_all_after_the_last_turn_of_the_user():
    call = {"role": "tool_call", "content": json.dumps({"name": "area", "arguments": {}})}
    result = {"role": "tool_response", "content": "4"}
    row = {"messages": [*ASKED, call, result, says("4")], "rejected_response": "5"}
    pair = to_pair(row)
    assert pair.chosen == Chat([*ASKED, CALLS, RESULT, says("4")])
    assert pair.rejected == Chat([*ASKED, says("5")])
    with_a_call = to_pair({**row, "rejected_response": [call, result, says("5")]})
    assert with_a_call.rejected == Chat([*ASKED, CALLS, RESULT, says("5")])
    again = to_pair({**row, "messages": [*ASKED, says("4"), user("sure?"), says("yes")]})
    assert again.rejected == Chat(
        [*ASKED, says("4"), user("sure?"), says("5")], None, frozenset([1])
    )


def test_tools_of_the_rejected_answer_alone_are_refused():
    row = {**PAIRS["ms-swift"], "tools": [TOOL]}
    assert to_pair({**row, "rejected_tools": json.dumps([TOOL])}) == to_pair(row)
    with pytest.raises(WrongRecord, match="rejected_tools and tools differ"):
        to_pair({**row, "rejected_tools": [{**TOOL, "type": "other"}]})


def test_tools_in_the_cells_of_two_chats_are_the_rows():
    sides = [[*ASKED, says("4")], [*ASKED, says("5")]]
    cells = [text_of({"messages": side, "tools": [TOOL]}) for side in sides]
    pair = to_pair({"chosen": cells[0], "rejected": cells[1]})
    assert (pair.chosen.tools, pair.rejected.tools) == ([TOOL], [TOOL])
    with pytest.raises(WrongRecord, match="chosen has other tools than the rest of the row"):
        to_pair({"chosen": cells[0], "rejected": cells[1], "tools": [{**TOOL, "type": "other"}]})


def test_answers_that_are_json_of_something_else_stay_text():
    for text in ('[{"role": "admin", "content": "x"}]', '{"a": 1}', "[1, 2]", "[unfinished", "{}"):
        pair = to_pair({"prompt": "q", "chosen": text, "rejected": "5"})
        assert pair.chosen == Completion("q", text, "q")


def test_an_answer_may_be_a_call_of_a_tool():
    call = {"type": "function", "function": {"name": "area", "arguments": {}}}
    chosen = {"role": "assistant", "content": None, "tool_calls": [call]}
    pair = to_pair({"messages": ASKED, "tools": [TOOL], "chosen": chosen, "rejected": says("5")})
    assert pair.chosen.messages[-1]["tool_calls"] == [call]


def test_a_row_that_is_marked_is_not_learned():
    unlearned = [{"role": "assistant", "content": "a", "weight": 0}]
    with pytest.raises(NoLearnedTextError):
        to_labeled_answers(
            {"prompt": [{"role": "user", "content": "q"}], "completion": unlearned, "label": 1}
        )
    with pytest.raises(NoLearnedTextError):
        to_pair({**PAIRS["trl, text"], "train": False})


LABELLED = {
    "trl": {"prompt": "2 + 2?", "completion": "4", "label": True},
    "trl, messages": {"prompt": ASKED, "completion": [says("4")], "label": True},
    "LLaMA-Factory, sharegpt": {
        "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
        "kto_tag": True,
    },
    "LLaMA-Factory, messages": {"messages": [*ASKED, says("4")], "kto_tag": True},
    "LLaMA-Factory, alpaca": {"instruction": "2 + 2?", "output": "4", "kto_tag": True},
    "ms-swift": {"messages": [*ASKED, says("4")], "label": 1},
    "a message as completion": {"prompt": ASKED, "completion": says("4"), "label": True},
    "text as completion": {"prompt": ASKED, "completion": "4", "label": True},
    "JSON text": {"prompt": text_of(ASKED), "completion": text_of([says("4")]), "label": True},
    "JSON text of a prompt": {"prompt": text_of(ASKED), "completion": "4", "label": True},
    "JSON text of a chat": {"messages": text_of([*ASKED, says("4")]), "label": True},
    "an object of messages": {"messages": {"messages": [*ASKED, says("4")]}, "label": True},
}


@pytest.mark.parametrize("name", LABELLED)
def test_each_form_gives_the_same_labeled_answer(name):
    labeled = to_labeled_answers(LABELLED[name])
    assert labeled.labels == (True,)
    assert [messages_of(answer) for answer in labeled.answers] == [[*ASKED, says("4")]]


def test_only_the_last_answer_of_a_labeled_chat_is_learned():
    row = {"messages": [*ASKED, says("4"), user("sure?"), says("yes")], "label": False}
    assert to_labeled_answers(row) == LabeledAnswers(
        (Chat(row["messages"], None, frozenset({1})),), (False,)
    )


def test_a_labeled_answer_is_what_its_tool_takes_for_it():
    """ms-swift: all after the user's last turn; trl: the completion; LLaMA-Factory: the last."""
    answer = [CALLS, RESULT, says("4")]
    whole = [user("1 + 1?"), says("2"), *ASKED, *answer]
    for row, unlearned in (
        ({"messages": whole, "label": True}, {1}),
        ({"prompt": whole[:3], "completion": answer, "label": True}, {1}),
        ({"messages": whole, "kto_tag": True}, {1, 3}),
    ):
        assert to_labeled_answers(row).answers == (Chat(whole, None, frozenset(unlearned)),)


def test_a_prompt_takes_the_answer_of_another_row_in_any_form():
    text, chat = (to_labeled_answers(LABELLED[name]).answers[0] for name in ("trl", "ms-swift"))
    other = Completion("q", "other", "q")
    assert replace_answer(text, other) == Completion("2 + 2?", "other", "2 + 2?")
    for example, answers in ((chat, other), (text, Chat([user("q"), says("other")]))):
        assert messages_of(replace_answer(example, answers)) == [*ASKED, says("other")]


WRONG_PAIRS = [
    ({"prompt": "q", "text": 3}, "found the fields prompt, text; answers alone are for"),
    ({"prompt": "q", "ranked": ["a", "b"]}, "found the fields prompt, ranked; expected pairs"),
    ({"prompt": "q", "completion": "a"}, "answers alone are for tune.objective=sft; expected"),
    ({"messages": [*ASKED, says("4")]}, "found the fields messages; answers alone are for tune."),
    (
        {"prompt": "q", "completion": "a", "label": True},
        "answers with a label are for tune.objective=kto; expected pairs",
    ),
    ({"messages": [*ASKED, says("4")], "kto_tag": False}, "are for tune.objective=kto"),
    ({"prompt": "q", "chosen": None, "rejected": None}, r"\(chosen, rejected without a value\)"),
    ({"prompt": "q", "chosen": [], "rejected": "a"}, "chosen is empty list"),
    ({"prompt": "q", "chosen": ["a"], "rejected": ["b"]}, 'message 1 is "a", expected an object'),
    (
        {"prompt": "q", "chosen": [*ASKED, says("4")], "rejected": "5"},
        "chosen is a whole chat and rejected is text: expected two .*data.bad_rows=skip",
    ),
    (
        {"chosen": "4", "rejected": [*ASKED, says("5")]},
        "rejected is a whole chat and chosen is text",
    ),
    (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant:"},
        "rejected ends without an answer of Assistant",
    ),
    ({"prompt": "q", "chosen": "a"}, "found chosen, but rejected is missing"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same, .*data.bad_rows=skip"),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is empty text, expected an answer"),
    ({"prompt": "q", "chosen": 3, "rejected": "a"}, "chosen is number, expected text or messages"),
    ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty text, expected a prompt"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is number, expected a list"),
    (
        {"chosen": "yes", "rejected": "no"},
        "texts that begin with different words, but there is no prompt",
    ),
    ({"chosen": "q: a", "rejected": "q: "}, "rejected is only what the other begins with"),
    ({"chosen": [says("4")], "rejected": [says("5")]}, "are answers, and their prompt is missing"),
    (
        {"chosen": [*ASKED, says("4")], "rejected": [user("3 + 3?"), says("5")]},
        "do not begin with the same prompt: they differ in message 1",
    ),
    ({"chosen": [*ASKED, says("4")], "rejected": [says("5")]}, "do not begin with the same prompt"),
    (
        {"prompt": "3 + 3?", "chosen": [*ASKED, says("4")], "rejected": [*ASKED, says("5")]},
        'prompt is "3 . 3.", but the chats of chosen and rejected begin with',
    ),
    (
        {"prompt": "q", "chosen": "a", "chosen_response": "b", "rejected": "c"},
        "found the fields chosen and chosen_response, and either could be meant",
    ),
    ({"messages": ASKED, "rejected_response": "5"}, "messages ends with a turn of user, expected"),
    (
        {"messages": [*ASKED, says("4")], "chosen": "a", "rejected": "b"},
        "the turn before chosen is also the assistant's",
    ),
    ({"messages": ASKED, "chosen": says(""), "rejected": says("b")}, "expected an answer of the"),
    (
        {"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: ?", "rejected": "\n\nHuman: q"},
        "chosen ends without an answer of Assistant",
    ),
    (
        {"messages": ASKED, "chosen": {"role": "assistant", "content": 3}, "rejected": says("b")},
        r"with chosen: messages: message 2 \(assistant\): content is number, expected text",
    ),
    ([1], "found a JSON list, expected an object"),
]
WRONG_LABELS = [
    ({"prompt": "q", "completion": "a"}, "found the fields prompt, completion; expected label"),
    ({"prompt": "q", "completion": "a", "label": "true"}, 'label is "true", expected true or fal'),
    ({"prompt": "q", "completion": "a", "label": None}, r"\(label without a value\); expected"),
    ({"messages": [*ASKED, says("4")]}, "found the fields messages; expected label"),
    ({"prompt": "q", "completion": "a", "label": [True]}, r"label is \[true\], expected true"),
    ({"prompt": "q", "completion": None, "label": True}, "completion is null, expected text"),
    ({"prompt": "q", "chosen": "a", "label": True}, "columns={chosen: completion} names it"),
    ({"prompt": "q", "completion": "a", "label": 2}, "label is 2, expected true or false"),
    ({"prompt": "q", "completion": "a", "label": 0.5}, "label is 0.5, expected true or false"),
    ({"prompt": "q", "completion": "a", "label": True, "kto_tag": True}, "label and kto_tag, and"),
    ({"prompt": "q", "completion": " ", "label": True}, "the answer is empty text, expected"),
    ({"prompt": " ", "completion": "a", "label": True}, "the prompt is empty text, expected"),
    ({"prompt": "q", "label": True}, "completion is missing"),
    ({"text": "q a", "label": True}, "found text with a label, and no prompt"),
    ({"messages": ASKED, "label": True}, "the last message is .*, expected an answer"),
    ({"messages": [says("4")], "label": True}, "an answer of the assistant alone"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, "are both there: expected an"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    ("text", "found a JSON text, expected an object"),
]


@pytest.mark.parametrize(("row", "message"), WRONG_PAIRS)
def test_a_wrong_pair_is_refused_with_what_is_expected(row, message):
    with pytest.raises(WrongRecord, match=message):
        to_pair(row)


@pytest.mark.parametrize(("row", "message"), WRONG_LABELS)
def test_a_wrong_labeled_answer_is_refused_with_what_is_expected(row, message):
    with pytest.raises(WrongRecord, match=message):
        to_labeled_answers(row)


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"good": "chosen", "bad": "rejected", "q": "prompt"}, {"q": "x", "good": "a", "bad": "b"}),
        ({"good": "chosen"}, {"prompt": "x", "good": "a", "rejected": "b", "chosen_response": "c"}),
    ],
)
def test_columns_name_what_is_chosen_and_what_is_rejected(columns, row):
    reading, findings = ReadOptions(tuple(columns.items()), form="pairs"), ReadFindings()
    pair = read_example(row, reading, findings)
    assert pair == PreferencePair(Completion("x", "a", "x"), Completion("x", "b", "x"))
    assert findings.unread == [name for name in ("chosen_response",) if name in row]


def test_question_and_answer_are_known_beside_a_label():
    row = {"question": "q", "answer": "a", "label": False, "id": 3}
    reading = ReadOptions(form="labels")
    findings = ReadFindings()
    assert read_example(row, reading, findings).answers == (Completion("q", "a", "q"),)
    assert findings.unread == ["id"]


def test_rows_of_answers_stay_refused_where_answers_are_learned():
    for row in (PAIRS["trl, text"], LABELLED["trl"]):
        with pytest.raises(WrongRecord, match="rows of preferences.*tune.objective=dpo"):
            read_example(row, ReadOptions(), ReadFindings())


# Without chosen, and text that begins with its prompt.
NOT_REFUSED = {"ms-swift", "ms-swift, messages", "ms-swift, JSON text"}
NOT_KNOWN = {"OpenAI", "OpenAI, JSON text", "axolotl, argilla"}
WHOLE_TEXTS = {"hh-rlhf", "implicit text"}
# A label that is a number may be a class.
BY_NUMBER = {"ms-swift"}
BOTH = [PAIRS[n] for n in sorted(PAIRS.keys() - NOT_REFUSED - NOT_KNOWN - WHOLE_TEXTS)]
BOTH += [LABELLED[n] for n in sorted(LABELLED.keys() - BY_NUMBER)]


def columns_of(row):
    with pytest.raises(WrongRecord, match="rows of preferences cannot be used here") as raised:
        read_example(row, ReadOptions(), ReadFindings())
    advice = str(raised.value).partition("data.columns={")[2].partition("}")[0]
    return tuple(tuple(part.split(": ")) for part in advice.split(", "))


@pytest.mark.parametrize("row", BOTH, ids=str)
def test_the_columns_that_a_refusal_names_learn_the_better_answers(row):
    learned = read_example(row, ReadOptions(columns_of(row)), ReadFindings())
    assert messages_of(learned) == [*ASKED, says("4")]


@pytest.mark.parametrize("name", sorted(WHOLE_TEXTS))
def test_the_columns_that_a_refusal_names_learn_texts_as_a_whole(name):
    row = PAIRS[name]
    assert read_example(row, ReadOptions(columns_of(row)), ReadFindings()) == Text(row["chosen"])


def test_messages_beside_preferences_are_learned_where_columns_say_so():
    reading, findings = ReadOptions((("messages", "messages"),)), ReadFindings()
    learned = read_example(PAIRS["UltraFeedback"], reading, findings)
    assert learned == Chat([*ASKED, says("4")])
    assert {"chosen", "rejected"} <= {*findings.unread}


def test_wrong_rows_are_named_by_their_place_or_skipped(tmp_path):
    rows = [PAIRS["trl, text"], {"prompt": "q", "chosen": "a", "rejected": "a"}]
    (chunk,) = list_chunks(str(write_jsonl(tmp_path / "p.jsonl", rows)))
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: chosen and rejected are the same"):
        list(read_chunk(chunk, ReadOptions(form="pairs")))
    rows[1] = {"prompt": "q", "completion": "a", "label": "yes"}
    rows[0] = LABELLED["trl"]
    (labeled,) = list_chunks(str(write_jsonl(tmp_path / "l.jsonl", rows)))
    with pytest.raises(DataError, match="l.jsonl, line 2: label is .*; data.bad_rows=skip leaves"):
        list(read_chunk(labeled, ReadOptions(form="labels")))
    rows.reverse()  # of other data, from the first row on: there is nothing to skip
    (labeled,) = list_chunks(str(write_jsonl(tmp_path / "l.jsonl", rows)))
    with pytest.raises(DataError, match="l.jsonl, line 1: label is .*desirable$"):
        list(read_chunk(labeled, ReadOptions(form="labels")))
    findings = ReadFindings()
    assert len(list(read_chunk(chunk, ReadOptions(form="pairs", bad_rows="skip"), findings))) == 1
    assert findings.num_bad == 1


def test_csv_and_parquet_give_the_same_pairs(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "p.csv").write_text("prompt,chosen,rejected\n2 + 2?,4,5\n")
    pq.write_table(pa.Table.from_pylist([PAIRS["trl, text"]]), tmp_path / "p.parquet")
    openai = pa.Table.from_pylist([{**PAIRS["OpenAI"], "input": {"messages": ASKED}}])
    pq.write_table(openai, tmp_path / "o.parquet")
    for name in ("p.csv", "p.parquet", "o.parquet"):
        (chunk,) = list_chunks(str(tmp_path / name))
        (pair,) = read_chunk(chunk, ReadOptions(form="pairs"))
        assert messages_of(pair.chosen) == [*ASKED, says("4")]
    (tmp_path / "l.csv").write_text("prompt,completion,label\n2 + 2?,4,true\n2 + 2?,5,false\n")
    (chunk,) = list_chunks(str(tmp_path / "l.csv"))
    assert [row.labels for row in read_chunk(chunk, ReadOptions(form="labels"))] == [
        (True,),
        (False,),
    ]


def test_text_and_built_in_answers_are_no_preferences(tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    for path in (str(tmp_path / "t.txt"), "builtin:pydocs:heldout"):
        with pytest.raises(DataError, match="expected rows with fields for preferences"):
            list(read_chunk(list_chunks(path)[0], ReadOptions(form="pairs")))


def test_a_pair_is_held_out_or_not_by_its_content():
    rows = [{"prompt": f"q {n}", "chosen": "a", "rejected": "b"} for n in range(200)]
    parts = [
        {
            n
            for n, row in enumerate(rows)
            if read_example(row, ReadOptions((), "refuse", 0.3, part, form), ReadFindings())
            is not None
        }
        for form in ("pairs", "labels")
        for part in ("train", "held-out")
    ]
    assert parts[0] | parts[1] == set(range(200))
    assert not parts[0] & parts[1]
    assert 30 < len(parts[1]) < 90
    assert 30 < len(parts[3]) < 90


def test_half_a_character_in_a_pair_is_refused():
    row = {"prompt": "q \ud83d", "chosen": "a", "rejected": "b"}
    with pytest.raises(WrongRecord, match="one half of a surrogate pair"):
        read_example(row, ReadOptions(form="pairs"), ReadFindings())
