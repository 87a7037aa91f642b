from dataclasses import replace

import numpy as np
import pytest
from tokenizers import models, trainers
from transformers import PreTrainedTokenizerFast

from hpc_tune.data import chunks, encode
from hpc_tune.data.counts import Counters, round_up_length
from hpc_tune.data.encode import Encoder
from hpc_tune.data.records import Chat, Completion, Text
from hpc_tune.errors import DataError
from tests.support.data import CHATML, byte_tokenizer


def _documents(encoder, examples):
    documents = []
    for block in encoder.encode(examples):
        stops = np.cumsum(block.lengths)[:-1]
        documents += zip(
            np.split(block.tokens, stops), np.split(block.loss_mask, stops), strict=True
        )
    return documents


def _encode(tokenizer, examples, seq_len=1000, loss_on="answers"):
    """(text, learned text) of each document; learned parts are joined by |."""
    encoder = Encoder(tokenizer, seq_len, loss_on)
    found = []
    for tokens, mask in _documents(encoder, examples):
        assert mask[0] == 0
        marks = np.flatnonzero(np.diff(mask, prepend=0, append=0) != 0).reshape(-1, 2)
        learned = "|".join(tokenizer.decode(tokens[a:b]) for a, b in marks)
        found.append((tokenizer.decode(tokens), learned))
    return found, encoder.counters


def _chat(*turns, first="user"):
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return Chat([{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)])


def test_only_what_the_assistant_says_is_learned_in_a_chat_of_many_turns():
    system = {"role": "system", "content": "be kind"}
    chat = Chat([system, *_chat("one é?", "  1 😀\n\n", "two?", "2").messages])
    found, counters = _encode(byte_tokenizer(), [chat])
    assert found == [
        (
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none é?<|im_end|>\n"
            "<|im_start|>assistant\n  1 😀\n\n<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n",
            "  1 😀\n\n<|im_end|>|2<|im_end|>",
        )
    ]
    assert (counters.examples, counters.documents, counters.dropped) == (1, 1, {})
    # "  1 " + 4 bytes of the smiley + 2 line ends + the mark; "2" + the mark
    assert counters.loss_tokens == (4 + 4 + 2 + 1) + 2


def test_a_chat_that_the_assistant_begins_and_the_user_ends():
    found, _ = _encode(byte_tokenizer(), [_chat("hi", "question", first="assistant")])
    assert found[0][1] == "hi<|im_end|>"


def test_loss_on_all_learns_the_prompts_too():
    found, counters = _encode(byte_tokenizer(), [_chat("q", "a")], loss_on="all")
    assert found[0][0] == "<|im_start|>" + found[0][1]
    assert counters.loss_tokens == counters.tokens - 1


def test_prompt_and_alpaca_become_turns_where_there_is_a_template():
    example = Completion("q", "a", plain_prompt="### q", system="s")
    found, _ = _encode(byte_tokenizer(), [example])
    turns = [{"role": "system", "content": "s"}, *_chat("q", "a").messages]
    assert found == _encode(byte_tokenizer(), [Chat(turns)])[0]


def test_prompt_and_answer_are_joined_with_an_end_where_there_is_no_template():
    example = Completion("q", "a b", plain_prompt="Question: q\n")
    found, _ = _encode(byte_tokenizer(template=None), [example])
    assert found == [("Question: q\na b<|im_end|>", "a b<|im_end|>")]
    found, _ = _encode(byte_tokenizer(template=None, bos=True), [example])
    assert found == [("<|im_start|>Question: q\na b<|im_end|>", "a b<|im_end|>")]


def test_messages_without_a_template_ask_for_one():
    with pytest.raises(DataError, match=r"no chat template; set data\.chat_template"):
        _encode(byte_tokenizer(template=None), [_chat("q", "a")])


REASONING = (  # as Qwen3: the thoughts of earlier turns are dropped
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.thoughts }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As DeepSeek-R1: the generation prompt opens a block that a finished turn does not have.
OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (REASONING, "1<|im_end|>|<think>b</think>2<|im_end|>"),
        (OPENS_THINKING, "1<|im_end|>|2<|im_end|>"),
    ],
)
def test_each_answer_is_learned_where_a_template_changes_earlier_turns(template, learned):
    chat = _chat("one?", "1", "two?", "2")
    for message, thoughts in zip(chat.messages, "-a-b", strict=True):
        message["thoughts"] = thoughts
    found, counters = _encode(byte_tokenizer(template), [chat])
    assert [document[1] for document in found] == [learned]
    assert counters.unclear_answers == 0


def test_examples_with_nothing_to_learn_are_dropped_by_reason():
    picky = byte_tokenizer(
        "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    examples = [
        _chat("only a question"),
        _chat("q", ""),
        _chat("a", "q", first="assistant"),
        _chat("q" * 100, "a"),
        _chat("q", "a"),
        Text(""),
    ]
    found, counters = _encode(picky, examples, seq_len=50)
    assert found == [("[user]q[assistant]a", "a")]
    assert counters.dropped == {
        "no answer of the assistant": 1,
        "empty answer": 1,
        "the chat template refused the messages (no)": 1,
        "the answer begins after seq_len": 1,
        "empty text": 1,
    }
    assert (counters.examples, counters.documents) == (6, 1)


def test_a_long_chat_is_cut_at_its_end():
    found, counters = _encode(byte_tokenizer(), [_chat("q", "a" * 100)], seq_len=60)
    head = 1 + len("user\nq") + 2 + 1 + len("assistant\n")  # marks are one token
    assert found[0][1] == "a" * (60 - head)
    assert (counters.truncated, counters.tokens) == (1, 60)


def test_what_examples_lose_at_seq_len_is_counted_with_their_length_and_texts_lose_nothing():
    examples = [_chat("q", "a" * 100), _chat("q" * 200, "a"), _chat("q", "a"), Text("t" * 300)]
    _, counters = _encode(byte_tokenizer(), examples, seq_len=60)
    lengths = [_num_tokens("q", "a" * 100), _num_tokens("q" * 200, "a")]
    assert (counters.truncated, counters.split) == (1, 1)
    # The answer of the second begins after token 60: nothing of it is left.
    assert counters.cut_tokens == lengths[0] - 60 + lengths[1]
    assert counters.cut_lengths == {str(round_up_length(length)): 1 for length in lengths}
    again = Counters()
    again.add(counters)
    again.add(counters)
    assert again.cut_lengths == {str(round_up_length(length)): 2 for length in lengths}


def _num_tokens(*turns):
    (tokens, _), *_ = _documents(Encoder(byte_tokenizer(), 1000, "answers"), [_chat(*turns)])
    return len(tokens)


def test_a_rounded_length_holds_the_length_and_is_at_most_3_percent_more():
    assert [round_up_length(n) for n in (1, 63, 64, 65, 4097, 100_001)] == [
        1, 63, 64, 66, 4224, 100_352,
    ]  # fmt: skip
    for length in range(1, 10_000):
        assert length <= round_up_length(length) <= length * (1 + 1 / 32)


def test_a_long_text_is_split_into_pieces_and_all_of_it_is_kept():
    text = "".join(f"line {n}\n" for n in range(100))
    documents = _documents(Encoder(byte_tokenizer(), 64, "answers"), [Text(text)])
    tokens = np.concatenate([tokens for tokens, _ in documents])
    assert byte_tokenizer().decode(tokens) == text + "<|im_end|>"
    assert [len(t) for t, _ in documents[:-1]] == [64] * (len(documents) - 1)
    assert all(mask.tolist() == [0] + [1] * (len(mask) - 1) for _, mask in documents)


def test_a_text_that_goes_on_in_the_next_chunk_has_no_marks_between():
    parts = [Text("ab ", ends=False), Text("cd", begins=False)]
    found, counters = _encode(byte_tokenizer(bos=True), parts)
    assert [document[0] for document in found] == ["<|im_start|>ab ", "cd<|im_end|>"]
    assert counters.examples == 1


LONG = "word " * 60


@pytest.mark.parametrize("text", ["a <|im_end|> b", f"{LONG}<|im_start|> {LONG}"])
@pytest.mark.parametrize("is_text", [False, True])
def test_plain_text_is_tokenized_as_the_stock_tokenizer_does_and_special_tokens_counted(
    monkeypatch, text, is_text
):
    monkeypatch.setattr(encode, "BATCH_CHARS", 200)
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = is_text
    base = byte_tokenizer(template=None)
    base.split_special_tokens = is_text
    stock = byte_tokenizer()(text, split_special_tokens=is_text)["input_ids"]
    end = [tokenizer.eos_token_id]
    encoder = Encoder(tokenizer, 5000, "answers")
    (plain, _), (chat, _) = _documents(encoder, [Text(text), _chat("q", "a")])
    assert plain.tolist() == stock + end
    assert (chat == end[0]).sum() == 2, "those of the template are special tokens"
    assert encoder.counters.control_tokens == (0 if is_text else 1)
    encoder = Encoder(base, 5000, "answers")
    ((prompt, _),) = _documents(encoder, [Completion(text, text, text)])
    assert prompt.tolist() == stock + stock + end
    assert encoder.counters.control_tokens == (0 if is_text else 2)


@pytest.mark.parametrize("batch_chars", [200, 1 << 20])
def test_a_text_of_any_length_that_brings_its_begin_and_end_gets_no_second_ones(
    monkeypatch, batch_chars
):
    monkeypatch.setattr(encode, "BATCH_CHARS", batch_chars)
    text = f"<|im_start|>{LONG}<|im_end|>"
    found, counters = _encode(byte_tokenizer(bos=True), [Text(text)])
    assert [document for document, _ in found] == [text]
    assert counters.control_tokens == 0


@pytest.mark.parametrize("batch_chars", [2, 10, 40, 1 << 20])
def test_how_much_the_tokenizer_gets_at_once_changes_no_document(monkeypatch, batch_chars):
    tokenizer = byte_tokenizer()
    text = "word " * 30 + "\n" + "x" * 100 + "\n" + "é" * 50
    examples = [_chat("q", "a" * 30), Text(text), Completion("q", "b", "q"), Text("short")]
    expected = _documents(Encoder(tokenizer, 32, "answers"), examples)
    monkeypatch.setattr(encode, "BATCH_CHARS", batch_chars)
    found = _documents(Encoder(tokenizer, 32, "answers"), examples)
    assert len(found) == len(expected)
    for (tokens, mask), (other_tokens, other_mask) in zip(found, expected, strict=True):
        assert tokens.tolist() == other_tokens.tolist()
        assert mask.tolist() == other_mask.tolist()


def test_tools_reach_the_template():
    template = "{{ tools | tojson if tools else 'none' }}|" + REASONING
    chat = Chat(_chat("q", "a").messages, tools=[{"name": "f"}])
    found, _ = _encode(byte_tokenizer(template), [chat])
    assert found[0][0].startswith('[{"name": "f"}]|')


def test_a_white_space_token_before_the_answer_is_not_learned():
    from tokenizers import pre_tokenizers, processors

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # As GPT-2 and Llama 3: offsets leave white space out, so that a "\n" token has no width.
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    found, _ = _encode(tokenizer, [_chat("q", "a \n b\n")])
    assert found[0][1] == "a \n b\n<|im_end|>"


def test_answers_whose_first_token_begins_in_the_prompt_are_counted():
    """As a line end of the prompt and one of the answer may be one token, or a space and a word."""
    tokenizer = byte_tokenizer()
    vocab = {**tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False), "ĊĊ": 258}
    tokenizer.backend_tokenizer.model = models.BPE(vocab, merges=[("Ċ", "Ċ")])
    chats = [_chat("one?", "\n\n1", "two?", "2"), _chat("one?", "1\n\n")]
    found, counters = _encode(tokenizer, chats)
    assert [learned for _, learned in found] == ["\n\n\n1<|im_end|>|2<|im_end|>", "1\n\n<|im_end|>"]
    assert counters.joined_starts == 1
    assert "1 answers whose first token includes the end of the prompt" in str(counters)
    weighted = Chat(chats[0].messages, weights={1: 0.5})
    assert _encode(tokenizer, [weighted], loss_on="all")[1].joined_starts == 0


@pytest.mark.parametrize("seq_len", [30, 400, 3000])
def test_of_a_long_chat_only_the_head_is_tokenized_and_its_documents_stay_the_same(
    monkeypatch, seq_len
):
    """Byte pairs learned from real text, whose words are cut anywhere; the limit is made small."""
    text = "".join(
        f"{question} {answer}\n" for question, answer in chunks.read_pydocs_module("json")
    )
    tokenizer = byte_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|im_start|>", "<|im_end|>"])
    backend = tokenizer.backend_tokenizer
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML)
    examples = [
        _chat(text[:shift] + "?", text[shift:] * 3, "more?", text) for shift in (1, 77, 2000)
    ]
    whole = Encoder(tokenizer, seq_len, "answers")
    expected = _documents(whole, examples)
    monkeypatch.setattr(encode, "BATCH_CHARS", 700)
    monkeypatch.setattr(encode, "TRUNCATION_MARGIN_CHARS", 100)
    sizes = []
    head = Encoder._truncate_long_chat
    monkeypatch.setattr(
        Encoder, "_truncate_long_chat", lambda self, item: sizes.append(r := head(self, item)) or r
    )
    encoder = Encoder(tokenizer, seq_len, "answers")
    found = _documents(encoder, examples)
    assert len(found) == len(expected)
    for (tokens, mask), (all_tokens, all_mask) in zip(found, expected, strict=True):
        assert tokens.tolist() == all_tokens.tolist()
        assert mask.tolist() == all_mask.tolist()
    assert encoder.counters.cut_tokens == pytest.approx(whole.counters.cut_tokens, rel=0.5)
    estimated = {"cut_tokens": 0, "cut_lengths": {}}
    assert replace(encoder.counters, **estimated) == replace(whole.counters, **estimated)
    assert max(len(item.text) for item in sizes) < len(text) * 4
