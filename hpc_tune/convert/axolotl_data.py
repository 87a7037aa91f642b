"""The rules for datasets in axolotl's configs: which files, which columns, what is learned.

datasets.0.path, datasets.0.data_files, datasets.1.path ... -> data.path, a list of all files
field_messages, type.field_output, field ...               -> data.columns, one for all
"""

from collections.abc import Iterator
from typing import Any

from hpc_tune.convert import preferences, rules
from hpc_tune.convert.rules import (
    ForeignConfig,
    IgnoredKey,
    MappedKey,
    Outcome,
    Rule,
    UnsupportedKey,
    rule_for_keys,
)

_PLAIN_FORMATS = ("{prompt}", "{chosen}", "{rejected}", "{completion}")
DATASET_LIST_KEYS = ("datasets", "test_datasets", "pretraining_dataset")
_LOADERS = ("json", "csv", "parquet", "arrow", "text")
_FORM_IMPLIED_KEY = IgnoredKey(rules.FORM_REASON)
_ANSWERS_LEARNED_KEY = IgnoredKey(
    "the assistant's answers are learned, each up to the token that ends it"
)
# Types whose records have fields that hpc_tune knows; axolotl adds words of its own to some.
_ALPACA_TYPES = ("alpaca", "alpaca_chat", "alpaca_w_system", "alpaca_instruct", "gpteacher")
_QUESTION_TYPES = ("jeopardy", "context_qa.load_v2")
_TEXT_TYPES = ("completion", "pretrain")
# How the columns of other types are read.
_COLUMNS_BY_TYPE = {
    "oasst": {"INSTRUCTION": "instruction", "RESPONSE": "output"},
    "summarizetldr": {"article": "prompt", "summary": "completion"},
    "alpaca_chat.load_camel_ai": {"message_1": "prompt", "message_2": "completion"},
    "metharme": {"generation": "completion"},
    "creative_acr.load_answer": {"instruction": "prompt", "revision": "completion"},
}
# Their keys that name a column, with the field that the column is read as.
_FIELD_KEYS = {
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field": "text",
    "text_column": "text",
    "type.field_system": "system",
    "type.field_instruction": "instruction",
    "type.field_input": "input",
    "type.field_output": "output",
}
# More of them that only count with rl, as in axolotl.
_PREFERENCE_KEYS = {
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "type.field_prompt": "prompt",
    "type.field_chosen": "chosen",
    "type.field_rejected": "rejected",
    "type.field_completion": "completion",
    "type.field_label": "label",
}
_COLUMN_ALIASES = {"conversations": "messages"}  # a column name that needs no entry in data.columns


def list_readable_data_files(dataset_list: str, config: ForeignConfig) -> list[str]:
    """Return the files in a list of datasets, named by its key, that hpc_tune can read."""
    return [file for item in config.items(dataset_list) for file in _usable_files(item)]


def _usable_files(item: dict[str, Any]) -> list[str]:
    path = str(item.get("path", ""))
    data_files = item.get("data_files")
    if data_files is None:
        return [path] if rules.is_data_path(path) else []
    names = [str(name) for name in (data_files if isinstance(data_files, list) else [data_files])]
    if rules.is_data_path(path) and path not in names:
        names = [name if name.startswith("/") else f"{path.rstrip('/')}/{name}" for name in names]
    elif path not in (*_LOADERS, *names):
        return []  # files in a hub repository
    return names if all(rules.is_usable_file(name) for name in names) else []


def _path_rule(dataset_list: str, our_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if value in _LOADERS:
            return rules.FORMAT_IMPLIED_KEY
        items = config.items(dataset_list)
        item = next(i for i in items if value in (i.get("path"), i.get("data_files")))
        if not _usable_files(item):
            if item.get("path") not in _LOADERS:
                return rules.explain_hub_data(value, our_key)
            return UnsupportedKey(
                f"write it as JSONL or Parquet into a folder, and name that in {our_key}",
                to_do=True,
            )
        files = list_readable_data_files(dataset_list, config)
        return MappedKey({our_key: files[0] if len(files) == 1 else files})

    return rule


def _convert_type(value: Any, config: ForeignConfig) -> Outcome:
    name = str(value)
    if config.has_preferences:
        kind = name.partition(".")[0]
        if kind == "chat_template":
            return IgnoredKey("prompt and answers are written by the chat template")
        return rules.explain_chat_template(kind)
    if name in _COLUMNS_BY_TYPE:
        return MappedKey({"data.columns": _all_columns(config)})
    if name in _TEXT_TYPES:
        return IgnoredKey("records with text are learned as a whole")
    if name == "chat_template" or name.startswith("sharegpt"):
        return IgnoredKey("messages are written by the chat template")
    if name.split(".")[0].split(":")[0] in _ALPACA_TYPES or name in _QUESTION_TYPES:
        return UnsupportedKey(
            "the chat template formats the prompt here, not axolotl's words and headings (without "
            "a template of the tokenizer, alpaca's headings do): to keep axolotl's, write them "
            "into the records, as prompt and completion",
            to_do=True,
        )
    return UnsupportedKey(
        "bring the records into a form of docs/data.md: messages, prompt and completion, or text",
        to_do=True,
    )


def _convert_column(value: Any, config: ForeignConfig) -> Outcome:
    columns = _all_columns(config)
    if not isinstance(value, str):
        return UnsupportedKey(rules.COLUMN_NAME_REASON, to_do=True)
    if value in columns:
        return MappedKey({"data.columns": columns})
    if value in (*_FIELD_KEYS.values(), *_PREFERENCE_KEYS.values(), *_COLUMN_ALIASES):
        return _FORM_IMPLIED_KEY
    return UnsupportedKey("data.columns reads it as something else for another dataset", to_do=True)


def _convert_format(value: Any, config: ForeignConfig) -> Outcome:
    if str(value).strip() in _PLAIN_FORMATS:
        return IgnoredKey("prompt and answers are taken from their columns")
    return UnsupportedKey(
        "prompts and answers are formatted by a chat template here: write this format as a Jinja "
        "file, and set data.chat_template to it",
        to_do=True,
    )


def _all_columns(config: ForeignConfig) -> dict[str, str]:
    """Return data.columns for all datasets together; each field keeps the first column found."""
    columns: dict[str, str] = {}
    for dataset_list in DATASET_LIST_KEYS:
        for item in config.items(dataset_list):
            for name, field in _find_renamed_columns(item, config.has_preferences):
                if field not in columns.values():
                    columns.setdefault(name, field)
    return columns


def _find_renamed_columns(item: dict[str, Any], has_preferences: bool) -> Iterator[tuple[str, str]]:
    """Yield (column, field) for the columns whose names differ from those of their fields."""
    yield from _COLUMNS_BY_TYPE.get(str(item.get("type")), {}).items()
    for key, field in (_FIELD_KEYS | (_PREFERENCE_KEYS if has_preferences else {})).items():
        name = str(item.get(key, field))
        if field not in (name, _COLUMN_ALIASES.get(name)):
            yield name, field


def _split_rule(dataset_list: str, our_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        has_others = config.items("test_datasets") or config.get("val_set_size")
        is_whole = (
            dataset_list == "datasets" and len(config.items(dataset_list)) == 1 and not has_others
        )
        return rules.convert_split(value, our_key, _single_file(dataset_list, config), is_whole)

    return rule


def _shards_rule(dataset_list: str, our_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        item = next((entry for entry in config.items(dataset_list) if "shards" in entry), {})
        shards, index = str(item.get("shards")), str(item.get("shards_idx", 0))
        if not shards.isdecimal() or not index.isdecimal():
            return UnsupportedKey("cut the data beforehand", to_do=True)
        return rules.advise_on_slice(
            f"{index}::{shards}", our_key, _single_file(dataset_list, config)
        )

    return rule


def _single_file(dataset_list: str, config: ForeignConfig) -> str | None:
    files = list_readable_data_files(dataset_list, config)
    return files[0] if len(files) == 1 else None


def _convert_template(value: Any, config: ForeignConfig) -> Outcome:
    name = str(value)
    if name == "jinja":
        return IgnoredKey("data.chat_template says it")
    if name.startswith("tokenizer_default"):
        return IgnoredKey("the tokenizer's chat template; data.chat_template names another")
    return rules.explain_chat_template(name)


def _convert_jinja(value: Any, config: ForeignConfig) -> Outcome:
    if "{" in str(value) or "\n" in str(value):
        return UnsupportedKey("write it into a file and set data.chat_template to that", to_do=True)
    return MappedKey({"data.chat_template": value})


def _convert_seq_len(value: Any, config: ForeignConfig) -> Outcome:
    remark = "longer rows are cut and counted; there they are dropped"
    return preferences.convert_seq_len(config.integer("sequence_len"), config, remark)


def _convert_excess_length(value: Any, config: ForeignConfig) -> Outcome:
    if config.has_preferences:
        return IgnoredKey("a prompt that does not fit is cut from the left, and no answer is cut")
    reason = "rows longer than data.seq_len are cut at the end, and counted"
    if value == "truncate":
        return IgnoredKey(reason)
    return UnsupportedKey(f"{reason}, not dropped: drop them beforehand", to_do=True)


_CHAT_TEMPLATE_RULES: dict[str, Rule] = {
    "chat_template": _convert_template,
    "chat_template_jinja": _convert_jinja,
}
_MAPPED_RULES: dict[str, Rule] = {
    **_CHAT_TEMPLATE_RULES,
    "conversation": _convert_template,
    "type": _convert_type,
    **rule_for_keys(_convert_column, " ".join(_FIELD_KEYS)),
    **preferences.restrict_to_preferences(
        {
            **rule_for_keys(_convert_column, " ".join(_PREFERENCE_KEYS)),
            **rule_for_keys(
                _convert_format,
                "type.prompt_format type.chosen_format type.rejected_format type.completion_format",
            ),
        }
    ),
    "roles_to_train": preferences.override_for_preferences(
        preferences.ANSWERS_ONLY_KEY,
        rules.known_values_rule(
            (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
            _ANSWERS_LEARNED_KEY,
            rules.known_values_rule(
                ([],),
                IgnoredKey("marks in the data tell which answers are learned"),
                UnsupportedKey(
                    "roles cannot be chosen: data.loss_on=answers learns the assistant's answers, "
                    "data.loss_on=all learns all text",
                    to_do=True,
                ),
            ),
        ),
    ),
    **rule_for_keys(
        preferences.override_for_preferences(
            preferences.ANSWERS_ONLY_KEY,
            rules.known_values_rule(
                ("turn",),
                _ANSWERS_LEARNED_KEY,
                UnsupportedKey(_ANSWERS_LEARNED_KEY.reason, to_do=True),
            ),
        ),
        "train_on_eos train_on_eot",
    ),
    **rule_for_keys(
        rules.known_values_rule(
            ("role", "content", "from", "value", "tool_calls", "name", "reasoning_content"),
            IgnoredKey("role and content, and ShareGPT's from and value, are known"),
            UnsupportedKey("name it role or content in the data", to_do=True),
        ),
        "message_property_mappings.* message_field_role message_field_content",
    ),
    "message_field_training": rules.known_values_rule(
        ("train", "training", "weight", "loss", "loss_mask"),
        IgnoredKey("such a mark in the data tells whether an answer is learned"),
        UnsupportedKey("call the mark train in the data", to_do=True),
    ),
    **rule_for_keys(
        UnsupportedKey(
            "random tokens are not supported as data; try builtin:pydocs first", to_do=True
        ),
        "length sequence_length min_input_id max_input_id seed",
    ),
}
_IGNORED_KEYS = {
    rules.FORM_REASON: "field_human field_model roles.* input_format",
    rules.FORMAT_IMPLIED_KEY.reason: "ds_type",
    "all keys of a message are given to the template": "field_thinking",
    "all ranks prepare the data, each one a part": "preprocess_shards",
    "only training on rewards or a teacher's probabilities uses it": "logprobs_field temperature "
    "step_separator max_completion_length train_on_last_step_only",
}
_UNSUPPORTED_KEYS = {"no code of a data set is run": "trust_remote_code"}
_TODO_KEYS = {
    "name the files of that configuration or revision": "name revision",
    "write the prompt as a Jinja file; set data.chat_template": "type.format type.no_input_format "
    "type.system_format",
    "give each record a system field": "type.system_prompt",
    "an answer is learned as a whole": "message_field_training_detail",
    "remove the system messages from the data": "drop_system_message",
    "the template splits reasoning from answers, if it knows how": "split_thinking "
    "template_thinking_key",
    "change the records beforehand": "input_transform",
}
_DATASET_RULES = rules.rule_table(_MAPPED_RULES, _IGNORED_KEYS, _UNSUPPORTED_KEYS, _TODO_KEYS)


def _dataset_list_rules(dataset_list: str, our_key: str) -> dict[str, Rule]:
    """Return the rules for all keys of one of DATASET_LIST_KEYS."""
    rows: dict[str, Rule] = {
        dataset_list: UnsupportedKey(
            f"set {our_key} to a file, a folder or a list of them", to_do=True
        ),
        **rule_for_keys(
            _path_rule(dataset_list, our_key), f"{dataset_list}.path {dataset_list}.data_files"
        ),
        f"{dataset_list}.split": _split_rule(dataset_list, our_key),
        f"{dataset_list}.skip": rules.record_count_rule(our_key, "{}:"),
        **rule_for_keys(
            _shards_rule(dataset_list, our_key), f"{dataset_list}.shards {dataset_list}.shards_idx"
        ),
    }
    return rules.join_tables(
        rows, {f"{dataset_list}.{key}": rule for key, rule in _DATASET_RULES.items()}
    )


DATA_RULES: dict[str, Rule] = {
    **_dataset_list_rules("datasets", "data.path"),
    **_dataset_list_rules("test_datasets", "data.eval_path"),
    **_dataset_list_rules("pretraining_dataset", "data.path"),
    **_CHAT_TEMPLATE_RULES,
    "sequence_len": _convert_seq_len,
    "excess_length_strategy": _convert_excess_length,
    "sample_packing": rules.PACKING_RULE,
    "train_on_inputs": preferences.override_for_preferences(
        preferences.ANSWERS_ONLY_KEY,
        rules.on_off_rule(
            MappedKey({"data.loss_on": "all"}), MappedKey({"data.loss_on": "answers"})
        ),
    ),
}
