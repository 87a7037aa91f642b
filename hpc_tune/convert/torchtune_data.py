"""The rules for the datasets of torchtune's configs: which file, which columns, what is learned."""

from typing import Any

from hpc_tune.convert.outcomes import (
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Rule,
    Unsupported,
    each,
    explain_hub_data,
    is_data_path,
    lacking,
    packing,
    usable_file,
)
from hpc_tune.convert.parts import complement, convert_split
from hpc_tune.convert.preferences import SFT
from hpc_tune.convert.torchtune_preferences import find_torchtune_objective

PARTS = {"dataset": "data.path", "dataset_val": "data.eval_path"}
# Fields of components whose columns have names of their own, as data.columns calls them.
_PAIR = {"input": "prompt", "output": "completion"}
_PREFERENCES = {"chosen": "chosen", "rejected": "rejected"}
_RANKED = {"prompt": "prompt", **_PREFERENCES}
_RANKED_COLUMNS = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
_FIELDS = {
    "instruct_dataset": _PAIR,
    "preference_dataset": _PREFERENCES,
    "hh_rlhf_helpful_dataset": _PREFERENCES,
    "stack_exchange_paired_dataset": _RANKED,
}
_BY_KEYS = Ignored("the form of a record is found by its keys")
_HELD_OUT = Ignored("data.eval_fraction says it")
_PREAMBLE = (
    "alpaca's preamble (Below is an instruction that ...) and headings stand in each prompt there "
    "and not here: write them into the records (as prompt and completion) if they are to stay"
)


def last_name(value: Any) -> str:
    """Return the last part of a dotted name: of a component, what it is called."""
    return str(value).rpartition(".")[2]


def find_usable_path(part: str, theirs: ForeignConfig) -> Any:
    """Return the file or folder that ``dataset`` or ``dataset_val`` reads, if hpc_tune can."""
    files, source = theirs.get(f"{part}.data_files"), str(theirs.get(f"{part}.source", ""))
    if part == "dataset_val" and theirs.get(f"{part}.split", "train") != "train":
        return None
    if files is not None:
        return files if usable_file(files) else None
    return source if is_data_path(source) else None


def eval_every(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for the steps between evaluations, if something is held out."""
    if find_usable_path("dataset_val", theirs) or _holds_out(theirs):
        return Mapped({"train.eval_every_steps": value})
    return Unsupported(f"set train.eval_every_steps={value} together with data.eval_path")


def _holds_out(theirs: ForeignConfig) -> bool:
    """Return whether a share of the data's one file is held out."""
    return isinstance(_part("dataset", theirs.get("dataset.split", "train"), theirs), Mapped)


def _is_rest_of_file(theirs: ForeignConfig) -> bool:
    """Return whether the held-out data, if any, are the rest of the file that is trained on."""
    held_out = {key: value for key, value in theirs.values.items() if key.startswith("dataset_val")}
    if not held_out:
        return True
    given = str(theirs.get("dataset.split", "train")).replace(" ", "")
    is_rest = complement(theirs.get("dataset_val.split")) == given
    same = ("source", "data_files")
    return is_rest and all(
        theirs.get(f"dataset_val.{key}", theirs.get(f"dataset.{key}"))
        == theirs.get(f"dataset.{key}")
        for key in same
    )


def _split(part: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if part == "dataset_val" and complement(value) and _holds_out(theirs):
            return _HELD_OUT
        return _part(part, value, theirs)

    return rule


def _part(part: str, value: Any, theirs: ForeignConfig) -> Outcome:
    is_whole = part == "dataset" and _is_rest_of_file(theirs)
    file = theirs.get(f"{part}.data_files", theirs.get(f"{part}.source"))
    known = file if isinstance(file, str) and is_data_path(file) else None
    return convert_split(value, PARTS[part], known, is_whole)


def _component(value: Any, theirs: ForeignConfig) -> Outcome:
    name = last_name(value)
    if not theirs.get("dataset.source") and not theirs.get("dataset.data_files"):
        instead = (
            f"compute nodes have no internet: on a login node write the records of {name} to a "
            "JSONL or Parquet file, and set data.path to it"
        )
        more = _PREAMBLE if "alpaca" in name else ""
        if "stack_exchange_paired" in name:
            more = "call question, response_j and response_k there prompt, chosen and rejected"
        return Unsupported(f"{instead}; {more}" if more else instead, to_do=True)
    if "alpaca" in name:
        return Unsupported(_PREAMBLE, to_do=True)
    if (fields := _FIELDS.get(name)) is None:
        return _BY_KEYS
    usual = _RANKED_COLUMNS if fields is _RANKED else {}
    named = {
        str(theirs.get(f"dataset.column_map.{key}", usual.get(key, key))): ours
        for key, ours in fields.items()
    }
    named = {column: ours for column, ours in named.items() if column != ours}
    return Mapped({"data.columns": named}) if named else _BY_KEYS


def _source(part: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if theirs.get(f"{part}.data_files"):
            return Ignored("the ending of the file says its kind")
        if part == "dataset_val" and _holds_out(theirs):
            return _HELD_OUT
        path = find_usable_path(part, theirs)
        return Mapped({PARTS[part]: path}) if path else explain_hub_data(value, PARTS[part])

    return rule


def _files(part: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if part == "dataset_val" and _holds_out(theirs):
            return _HELD_OUT
        path = find_usable_path(part, theirs)
        if path:
            return Mapped({PARTS[part]: path})
        instead = f"put it as JSONL or Parquet into one file or folder; set {PARTS[part]}"
        return Unsupported(instead, to_do=True)

    return rule


def _loss_on(value: Any, theirs: ForeignConfig) -> Outcome:
    if find_torchtune_objective(theirs) != SFT:
        return Ignored("with preferences only the answers are compared")
    choices = {"true": "all", "false": "answers"}
    choices |= {"train_on_all": "all", "train_on_assistant": "answers"}
    choice = choices.get(str(value).lower())
    if choice:
        return Mapped({"data.loss_on": choice})
    return Unsupported("data.loss_on is answers or all: answers is used", to_do=True)


def _column(*names: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if value in names:
            return _BY_KEYS
        if not isinstance(value, str):
            return Unsupported("it is no name of a column", to_do=True)
        return Mapped({"data.columns": {value: names[0]}})

    return rule


def _column_map(value: Any, theirs: ForeignConfig) -> Outcome:
    if last_name(theirs.get("dataset._component_")) in _FIELDS:
        return Ignored("data.columns says it")
    return Unsupported(
        "set data.columns={NAME: FIELD}, with the fields of docs/data.md", to_do=True
    )


DATA: dict[str, Rule] = {
    "dataset": Unsupported("set data.path to a list of the files of all of them", to_do=True),
    "dataset._component_": _component,
    "dataset.source": _source("dataset"),
    "dataset.data_files": _files("dataset"),
    "dataset_val.source": _source("dataset_val"),
    "dataset_val.data_files": _files("dataset_val"),
    "dataset.split": _split("dataset"),
    "dataset_val.split": _split("dataset_val"),
    "dataset.packed": packing,
    **each(_loss_on, "dataset.train_on_input dataset.masking_strategy"),
    "dataset.conversation_column": _column("messages", "conversations"),
    "dataset.column": _column("text"),
    "dataset.column_map.*": _column_map,
    "run_val_every_n_steps": eval_every,
    **each(_BY_KEYS, "dataset.conversation_style"),
    **each(Ignored("validation data are read as data.path is"), "dataset_val.*"),
    **each(Ignored("what is longer than a row is cut"), "dataset.split_across_pack"),
    "dataset.new_system_prompt": lacking(
        "begin each record's messages with a system message", to_do=True
    ),
    **each(
        lacking("the chat template is applied; data.chat_template names another", to_do=True),
        "dataset.template dataset.prompt_template dataset.chat_format",
    ),
    **each(
        lacking("name the files of that configuration in data.path", to_do=True),
        "dataset.name dataset.subset",
    ),
    "dataset.filter_fn": lacking("take those records out of the data beforehand", to_do=True),
    "dataset.add_eos": lacking("a text always ends with the end token"),
}
