"""Tokens are those of tokenizer.json, whatever class transformers makes of it."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as post
from transformers import AutoTokenizer

from hpc_tune.data.tokenizer import fingerprint, num_ids
from hpc_tune.errors import DataError
from hpc_tune.model.tokenizer import fix_exported_tokenizer_class, load_tokenizer, stop_ids

TEXT = (
    "were021720250650anci In  2023 there were  650841823 people.\n  17 nodes, cafe\u0301 <|user|> "
    "a<|user|>\n👍 b"
)
LINES = ["how many people live in 650 cities? 17 nodes were there in 2023"] * 3
THREE_DIGITS = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
CLASSES = (
    "Llama",
    "CodeLlama",
    "Qwen2",
    "Gemma",
    "GPT2",
    "Cohere",
    "GPTNeoX",
    "CodeGen",
    "Roberta",
)


def write(folder, tokenizer_class, **settings):
    """Write a byte-level tokenizer that cuts numbers into three digits; return its backend."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(THREE_DIGITS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>", "<|user|>")]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters)
    made.train_from_iterator(LINES, trainer)
    made.post_processor = post.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": tokenizer_class, **names, **settings}
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("name", CLASSES)
def test_the_file_wins_over_a_class_that_makes_other_tokens(name, tmp_path, caplog):
    caplog.set_level("INFO", "hpc_tune")
    file = write(tmp_path, f"{name}Tokenizer")
    tokenizer = load_tokenizer(tmp_path)
    backend = tokenizer.backend_tokenizer
    assert backend.encode(TEXT).ids == file.encode(TEXT).ids
    assert backend.get_vocab() == file.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    stock = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    was_other = stock.encode(TEXT).ids != file.encode(TEXT).ids
    assert ("text is tokenized as its tokenizer.json says" in caplog.text) == was_other
    assert name == "Llama" or was_other  # transformers looks for a byte-level file there itself


def test_the_word_none_stays_a_word_where_a_class_has_no_token_for_a_role(tmp_path):
    file = write(tmp_path, "GPT2Tokenizer")
    file.add_tokens([AddedToken("None", special=False)])  # a token of many vocabularies of code
    file.save(str(tmp_path / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(tmp_path).sep_token is None
    tokenizer = load_tokenizer(tmp_path)
    assert "None" not in tokenizer.all_special_tokens
    assert (tokenizer.sep_token, tokenizer.cls_token, tokenizer.pad_token) == (None,) * 3
    ids = tokenizer("def f(x=None)", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "def f(x=None)"


def test_a_class_that_cannot_be_made_of_the_file_leaves_the_file(tmp_path, caplog):
    caplog.set_level("INFO", "hpc_tune")
    file = write(tmp_path, "T5Tokenizer")
    assert load_tokenizer(tmp_path).backend_tokenizer.encode(TEXT).ids == file.encode(TEXT).ids
    assert "tokenizer.json is loaded without it" in caplog.text


def test_a_tokenizer_that_names_no_class_stays_as_it_is_and_nothing_is_said(tmp_path, caplog):
    caplog.set_level("INFO", "hpc_tune")
    write(tmp_path, "absent")
    load_tokenizer(tmp_path)
    assert caplog.text == ""


def test_an_export_makes_stock_transformers_take_the_file_too(tmp_path):
    file = write(tmp_path, "GPT2Tokenizer")
    fix_exported_tokenizer_class(load_tokenizer(tmp_path), tmp_path)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert stock.backend_tokenizer.encode(TEXT).ids == file.encode(TEXT).ids
    assert (stock.bos_token, stock.eos_token) == ("<s>", "</s>")


def test_an_export_of_a_tokenizer_that_all_read_alike_is_not_rewritten(tmp_path):
    write(tmp_path, "PreTrainedTokenizerFast")
    before = (tmp_path / "tokenizer_config.json").read_text()
    fix_exported_tokenizer_class(load_tokenizer(tmp_path), tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == before


@pytest.mark.parametrize("named", ["", None, "absent"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_the_tokenizer_does_not_name_is_the_models(named, file, tmp_path, caplog):
    caplog.set_level("INFO", "hpc_tune")
    write(tmp_path, "PreTrainedTokenizerFast", eos_token=named)
    model = {"model_type": "llama", "vocab_size": 400}
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert load_tokenizer(tmp_path).eos_token_id is None
    ends = {"eos_token_id": [2, 3]} if file == "generation_config.json" else {"eos_token_id": 2}
    settings = model | ends if file == "config.json" else ends
    (tmp_path / file).write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).eos_token == "</s>"
    assert f"texts and answers end with </s>, the end token in {file}" in caplog.text


def test_the_template_of_the_processor_is_taken_where_there_is_no_other(tmp_path):
    write(tmp_path, "PreTrainedTokenizerFast")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ own }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ own }}"


@pytest.mark.parametrize(
    "template",
    [7, ["x"], [{"name": "a"}], [{"template": "x"}], {"../a": "x"}, {"a/b": "x"}, {"": "x"}],
)
def test_a_template_of_the_processor_that_is_no_text_is_refused(template, tmp_path):
    """A name with a slash would let an export write outside its folder."""
    write(tmp_path, "PreTrainedTokenizerFast")
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(DataError, match=r"processor_config\.json: chat_template: expected a text"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("ends", [[[2]], [{"a": 2}], {"a": 2}, "2", [True]])
def test_end_tokens_that_are_no_numbers_are_none(ends, tmp_path):
    write(tmp_path, "PreTrainedTokenizerFast", eos_token=None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id is None
    assert stop_ids(tokenizer, tmp_path) == set()


def test_numbers_behind_a_gap_are_counted(tmp_path):
    write(tmp_path, "PreTrainedTokenizerFast")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(
        content["added_tokens"][-1] | {"id": 70000, "content": "<|far|>"}
    )
    content["model"]["vocab"]["<|far|>"] = 70000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (num_ids(tokenizer), len(tokenizer) < 400) == (70001, True)


def test_special_tokens_as_text_are_another_tokenizer(tmp_path):
    write(tmp_path, "PreTrainedTokenizerFast")
    plain = fingerprint(load_tokenizer(tmp_path))
    write(tmp_path, "PreTrainedTokenizerFast", split_special_tokens=True)
    assert fingerprint(load_tokenizer(tmp_path)) != plain
