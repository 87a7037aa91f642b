"""The possible outcomes for a key of another tool's config, and the rules that tools share.

key, value -> its row in the tool's table -> Mapped | Ignored | Unsupported
"""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.files import COMPRESSIONS, KIND_BY_SUFFIX
from hpc_tune.errors import ConfigError

SFT = "sft"
OFF_VALUES: tuple[Any, ...] = (None, False, 0, "", "none", "no", "false", [], {})
METHOD_ADVICE = "tune.method is lora, dora, qlora or full; lora is used"
QUANTIZATION_ADVICE = "only tune.method=qlora has a quantized base, of 4 bits"
COLUMN_NAME_REASON = "it is not the name of a column"
# Reasons that apply to keys of several tools.
LAYOUT_REASON = "the layout follows from memory, or from measured links with parallel: auto"
MICRO_BATCH_REASON = "the micro-batch is the largest that fits"
METRICS_REASON = "metrics.jsonl in run.dir has each step, with tokens per second and memory"
PARTIAL_READ_REASON = "each rank reads only its parts of the files of model.path"
COMPILE_REASON = "one decoder block is compiled and reused for all"
EXPORT_MERGE_REASON = "python -m hpc_tune export --to merged merges an adapter"
FORM_REASON = "the form of a record is found by its keys"
OPTIMIZER_ADVICE = "AdamW is the only optimizer; find optim.lr again"
DTYPE_ADVICE = "model.dtype is bf16 or fp32; auto takes bf16 on a GPU that has it"
FLOAT8_ADVICE = "set train.float8=true with train.compile=true, if the GPU has it"
SHUFFLE_REASON = "rows are always shuffled, by train.seed"
UNREADABLE_STATE_ADVICE = "their training state cannot be read; tune.init_from takes adapters"
SYSTEM_MESSAGE_ADVICE = "begin each record's messages with a system message"
VOCAB_ADVICE = "no tokens are added; save the model and its tokenizer with them first"
RECOMPUTE_ADVICE = (
    "parallel.recompute=full saves that memory, and parallel.offload_activations=true saves more"
)
PURE_BF16_REMARK = (
    "as in theirs; tune.param_dtype=fp32 keeps small updates and takes twice the memory"
)


@dataclass(frozen=True)
class ForeignConfig:
    """Another tool's config: values by dotted key, the tool's defaults included, without nulls.

    ``ranks`` is the number of ranks that the config was made for.
    """

    tool: "Tool"
    values: dict[str, Any]
    ranks: int

    @property
    def method(self) -> str:
        """The tune.method that trains the same weights."""
        return self.tool.method(self)

    @property
    def objective(self) -> str | None:
        """The tune.objective; None for a preference loss that has no counterpart."""
        return self.tool.objective(self)

    @property
    def has_preferences(self) -> bool:
        """Whether it trains on preferences."""
        return self.objective != SFT

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default``."""
        return self.values.get(key, default)

    def is_on(self, key: str) -> bool:
        """Return whether a switch is set and on."""
        return str(self.get(key)).lower() == "true"

    def items(self, list_key: str) -> list[dict[str, Any]]:
        """Return the items of a list of mappings, each with its values by dotted key."""
        items: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            if match := re.fullmatch(rf"{list_key}\.(\d+)\.(.+)", key):
                items.setdefault(match[1], {})[match[2]] = value
        return list(items.values())

    def number(self, key: str) -> float:
        """Return a number, or NaN, which compares as false with everything, if it is none."""
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else math.nan

    def integer(self, key: str) -> int:
        """Return a positive whole number.

        Raises:
            ConfigError: if the value is anything else.
        """
        value = self.get(key)
        text = str(value).removesuffix(".0")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{key} = {value!r} in their config is not a positive whole number")
        return int(text)


@dataclass(frozen=True)
class MappedKey:
    """Their key sets our ``settings``; ``remark`` says where the meaning differs.

    ``to_do``: the user must act on the remark before a run.
    """

    settings: dict[str, Any]
    remark: str = ""
    to_do: bool = False


@dataclass(frozen=True)
class IgnoredKey:
    """hpc_tune decides this itself, for this ``reason``."""

    reason: str


@dataclass(frozen=True)
class UnsupportedKey:
    """Their key is not taken over. ``to_do``: the user must act on ``advice`` before a run."""

    advice: str
    to_do: bool = False


@dataclass(frozen=True)
class Refusal:
    """A kind of training without a counterpart here. ``advice``: what to do instead.

    A config asks for it if one of ``keys`` (separated by spaces, without the numbers of list items)
    has a value for which ``refuses_value`` holds.
    """

    keys: str
    refuses_value: Callable[[Any, ForeignConfig], bool]
    description: str
    advice: str

    def message(self, config: ForeignConfig) -> str | None:
        """Return the message that refuses the config; None if the config does not ask for it."""
        keys = [
            key
            for key, value in config.values.items()
            if _drop_list_indices(key) in self.keys.split() and self.refuses_value(value, config)
        ]
        if not keys:
            return None
        settings = ", ".join(f"{key} = {format_their_value(config.get(key))}" for key in keys[:3])
        return (
            f"{settings} in their config: {self.description}, but hpc_tune only has supervised "
            "fine-tuning and preferences (dpo, ipo, simpo, orpo, kto), on text. Nothing is "
            f"converted. {self.advice.format(tool=config.tool.name)}"
        )


OFF_KEY = IgnoredKey("off in their config")
ADAPTER_ONLY_KEY = IgnoredKey("there are no adapters in full fine-tuning")
METHOD_IMPLIED_KEY = IgnoredKey("tune.method says it")
EMPTY_KEY = IgnoredKey("empty in their config")
PREFERENCE_ONLY_KEY = IgnoredKey("only training on preferences uses it")
FORMAT_IMPLIED_KEY = IgnoredKey("the ending of a file tells its format")
Outcome = MappedKey | IgnoredKey | UnsupportedKey
# A setting that takes the value as it is; an outcome whatever the value; or a function.
Rule = str | Outcome | Callable[[Any, ForeignConfig], Outcome]
_ADAPTER_SETTINGS = (
    *("tune.rank", "tune.alpha", "tune.dropout", "tune.rslora"),
    *("tune.modules_to_save", "tune.trainable_tokens", "optim.lora_b_ratio"),
)
_OBJECTIVE_SETTINGS = (
    "tune.beta",
    "tune.gamma",
    "tune.desirable_weight",
    "tune.undesirable_weight",
)


@dataclass(frozen=True)
class Tool:
    """Another tool: its rules by key (``part.*``: all keys below; list items without numbers).

    ``refusals``: what cannot be converted at all; the first one that applies is reported.
    ``array_keys``: keys whose lists are flattened, since their items are mappings.
    ``defaults``: the tool's values for keys that a config leaves out, where hpc_tune would use a
    different value.
    """

    name: str
    rules: dict[str, Rule]
    defaults: Callable[[ForeignConfig], dict[str, Any]]
    method: Callable[[ForeignConfig], str]
    objective: Callable[[ForeignConfig], str | None]
    refusals: tuple[Refusal, ...]
    array_keys: tuple[str, ...] = ()

    def outcome(self, key: str, config: ForeignConfig) -> Outcome | None:
        """Return the outcome for a key; None if the key is unknown."""
        name = _drop_list_indices(key)
        parts = name.split(".")
        wildcards = (".".join(parts[:n]) + ".*" for n in range(len(parts) - 1, 0, -1))
        rule = next((self.rules[p] for p in (name, *wildcards) if p in self.rules), None)
        if key not in config.values:
            is_part = any(known_key.startswith(f"{name}.") for known_key in self.rules)
            return EMPTY_KEY if rule or is_part else None
        return None if rule is None else apply_rule(rule, config.values[key], config)


def apply_rule(rule: Rule, value: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome of a rule for a value."""
    if isinstance(rule, str):
        return _copy_value(rule, value, config)
    return rule(value, config) if callable(rule) else rule


def _copy_value(our_key: str, value: Any, config: ForeignConfig) -> Outcome:
    """Take a value over as it is, if the method and the objective use the setting."""
    if our_key in _ADAPTER_SETTINGS and config.method == "full":
        return ADAPTER_ONLY_KEY
    if our_key in _OBJECTIVE_SETTINGS:
        if not config.has_preferences:
            return PREFERENCE_ONLY_KEY
        if not objective_uses_setting(config, our_key):
            return (
                OFF_KEY
                if value in OFF_VALUES
                else IgnoredKey(f"{config.objective} does not use it")
            )
    return MappedKey({our_key: value})


def objective_uses_setting(config: ForeignConfig, our_key: str) -> bool:
    """Return whether the objective of a config uses a coefficient such as tune.beta."""
    return our_key.removeprefix("tune.") in make_tune_config(config).coefficients


def make_tune_config(config: ForeignConfig) -> TuneConfig:
    """Return a tune section with the objective of a config."""
    return TuneConfig.model_validate({"objective": config.objective})


def _drop_list_indices(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def format_their_value(value: Any) -> str:
    """Return a value of theirs on one line of at most 80 characters."""
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- Tables of rules, and functions that build rules from rules.


def rule_table(
    rows: dict[str, Rule],
    ignored_keys: dict[str, str] | None = None,
    unsupported_keys: dict[str, str] | None = None,
    todo_keys: dict[str, str] | None = None,
) -> dict[str, Rule]:
    """Return ``rows`` plus rules for keys that set nothing, given as reason -> keys (by spaces).

    ``ignored_keys``: hpc_tune decides these itself. ``unsupported_keys``: not supported; ignored if
    a config switches them off. ``todo_keys``: like ``unsupported_keys``, but the user must act.
    """
    extra_tables = [
        rule_for_keys(IgnoredKey(reason), keys) for reason, keys in (ignored_keys or {}).items()
    ]
    for must_act, table in ((False, unsupported_keys), (True, todo_keys)):
        for advice, keys in (table or {}).items():
            extra_tables.append(rule_for_keys(unsupported_rule(advice, must_act), keys))
    return join_tables(rows, *extra_tables)


def join_tables(*tables: dict[str, Rule]) -> dict[str, Rule]:
    """Join tables that have no key in common."""
    joined: dict[str, Rule] = {}
    for table in tables:
        assert not (duplicates := joined.keys() & table.keys()), f"{duplicates} have two rules"
        joined |= table
    return joined


def rule_for_keys(rule: Rule, keys: str) -> dict[str, Rule]:
    """Return a table with one rule for several keys, separated by spaces."""
    return join_tables(*({key: rule} for key in keys.split()))


def unsupported_rule(advice: str, to_do: bool = False) -> Rule:
    """Rule for an unsupported feature: not taken over, unless their config switches it off."""
    return ignore_if_off(UnsupportedKey(advice, to_do))


def ignore_if_off(rule: Rule) -> Rule:
    """Rule that applies ``rule`` unless their config switches the feature off."""
    return lambda value, config: OFF_KEY if value in OFF_VALUES else apply_rule(rule, value, config)


def on_off_rule(on_rule: Rule, off_rule: Rule = OFF_KEY) -> Rule:
    """Rule for a boolean key."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        is_on = str(value).lower() == "true"
        return apply_rule(on_rule if is_on else off_rule, is_on, config)

    return rule


def known_values_rule(values: tuple[Any, ...], known_rule: Rule, other_rule: Rule) -> Rule:
    """Rule that applies ``known_rule`` to the values listed, and ``other_rule`` to all others."""
    return lambda value, config: apply_rule(
        known_rule if value in values else other_rule, value, config
    )


# -- Rules shared by several tools.


def torch_compile_rule(*context_keys: str) -> Rule:
    """Rule for compilation; ``context_keys`` hold the number of ranks that share a row."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if any((config.get(key) or 1) != 1 for key in context_keys):
            return IgnoredKey("with parallel.context, blocks communicate and are not compiled")
        return MappedKey({"train.compile": str(value).lower() in ("true", "auto")})

    return rule


def convert_context_parallel(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for the number of ranks that share a row."""
    if value in OFF_VALUES or value == 1:
        return OFF_KEY
    if isinstance(value, bool) or not str(value).isdecimal():
        return UnsupportedKey("it is not a number of ranks", to_do=True)
    return MappedKey({"parallel.context": int(value)}, "the losses are those of one rank")


def choose_method(is_full: bool, is_4_bit: bool, is_dora: bool) -> str:
    """Return tune.method."""
    return "full" if is_full else "qlora" if is_4_bit else "dora" if is_dora else "lora"


def map_method(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for a key that decides, possibly with others, which weights are trained."""
    return MappedKey({"tune.method": config.method})


def _convert_dora(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "full":
        return ADAPTER_ONLY_KEY
    if config.method == "qlora":
        return UnsupportedKey("tune.method=dora has no 4-bit base", True)
    return MappedKey({"tune.method": "dora"})


DORA_RULE = on_off_rule(_convert_dora, METHOD_IMPLIED_KEY)
OFFLOAD_PARAMS_RULE = on_off_rule(
    MappedKey({"parallel.offload_params": "cpu"}, "the optimizer state is moved too"),
    IgnoredKey("plan says whether the weights need it: parallel.offload_params"),
)
PACKING_ADVICE = "true is faster; a row then holds several documents, so make the batch smaller"
PACKING_RULE = on_off_rule(
    MappedKey({"data.packing": True}, "documents in a row do not see each other"),
    MappedKey({"data.packing": False}, PACKING_ADVICE),
)


def map_global_batch(
    config: ForeignConfig, rows_key: str, accumulation_key: str, *sharing_keys: str
) -> MappedKey:
    """Return the global batch: rows per rank x accumulation x data-parallel ranks.

    ``rows_key``, ``accumulation_key``: their keys for the first two; without a key, nothing is
    accumulated. ``sharing_keys``: keys with a number of ranks that share a row; a missing key
    counts as 1.

    Raises:
        ConfigError: if the ranks are not a multiple of the ranks that share a row, or a value is no
        positive whole number.
    """
    ranks_per_row = math.prod(config.integer(key) for key in sharing_keys if config.get(key))
    if config.ranks % ranks_per_row:
        raise ConfigError(
            f"--ranks {config.ranks}: in their config {ranks_per_row} ranks share each row; give a "
            f"multiple of {ranks_per_row}"
        )
    rows_per_rank = config.integer(rows_key)
    num_accumulated = config.integer(accumulation_key) if accumulation_key else 1
    factors = rows_per_rank, num_accumulated, config.ranks // ranks_per_row
    remark = "{} per rank x {} accumulated x {} ranks".format(*factors)
    return MappedKey({"batch.global_size": math.prod(factors)}, remark)


def is_usable_file(value: Any) -> bool:
    """Return whether a value names a file, pattern or folder in a format that hpc_tune reads."""
    if not isinstance(value, str) or "://" in value:
        return False
    path = PurePosixPath(value)
    path = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return path.suffix in ("", *KIND_BY_SUFFIX, ".h5", ".hdf5")


def is_local_path(name: str) -> bool:
    """Return whether a name is a path, not a hub name such as meta-llama/Llama-3.1-8B."""
    return name.startswith(("/", ".", "~", "$")) or name.count("/") != 1


def is_data_path(name: str) -> bool:
    """Return whether a name is a path to data that hpc_tune reads, not a hub name."""
    if not is_usable_file(name):
        return False
    return bool(PurePosixPath(name).suffix) or ("/" in name and is_local_path(name))


def explain_hub_data(name: Any, our_key: str) -> UnsupportedKey:
    """Return what to do about a dataset on the hub."""
    return UnsupportedKey(
        "compute nodes have no internet: on a login node hf download --repo-type dataset "
        f"{name} --local-dir DIR, and name DIR in {our_key}",
        to_do=True,
    )


def convert_model_path(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for a model that is given as a directory or a hub name."""
    if is_local_path(str(value)):
        return MappedKey({"model.path": value}, "a Hugging Face directory")
    return UnsupportedKey(
        "it looks like a hub name, and compute nodes cannot reach the hub: on a login node "
        f"hf download {value} --local-dir DIR, then set model.path to DIR (to ./{value} if it is "
        "a folder)",
        to_do=True,
    )


def explain_chat_template(name: Any) -> UnsupportedKey:
    """Return what to do about a template that only the other tool knows by this name."""
    return UnsupportedKey(
        f"the chat template of model.path's tokenizer is used: if that is not {name}'s, set "
        f"data.chat_template to a name in docs/data.md, or write {name}'s as a Jinja file",
        to_do=True,
    )


# -- Parts of files in the notation of other tools: hpc_tune uses whole files, or holds out a share.
#
# train[:95%]      -> data.eval_fraction=0.05
# train[:1000]     -> a command that writes these records to a file of their own


# Prints records of a file (a JSON list, or one record per line); {part} is a slice of the list.
_EXTRACT_COMMAND = (
    "import json,sys; t=open(sys.argv[1],encoding='utf-8-sig').read(); "
    "r=json.loads(t) if t.lstrip()[:1]=='[' else [json.loads(s) for s in t.split('\\n') if "
    "s.strip()]; [print(json.dumps(x)) for x in r[{part}]]"
)
_SLICE_PATTERN = re.compile(r"train\[(?:(\d+)(%?))?:(?:(\d+)(%?))?\]")
_MIN_TRAINED_PERCENT = 50  # a smaller part is a subset, not data with a held-out rest


def advise_on_slice(slice_text: str, our_key: str, file: Any = None) -> UnsupportedKey:
    """Return how to extract a part of a file; ``slice_text``: a slice of its records ``r``."""
    is_known = isinstance(file, str)
    if is_known and not file.endswith((".json", ".jsonl")):
        records = slice_text.replace("len(r)", "their number")
        advice = f"write records {records} of {file} (the first is 0) to a file of their own; set "
        return UnsupportedKey(f"{advice}{our_key} to that", to_do=True)
    name = shlex.quote(file) if is_known else "FILE"
    hint = "" if is_known else ", FILE being JSON or JSONL"
    command = f'python -c "{_EXTRACT_COMMAND.format(part=slice_text)}" {name} > part.jsonl'
    return UnsupportedKey(
        f"write these records of a file to one of their own: {command}{hint}; then set {our_key} "
        "to part.jsonl",
        to_do=True,
    )


def record_count_rule(our_key: str, slice_template: str) -> Rule:
    """Rule for a number of records of each file; ``slice_template`` has {} for the number."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if not str(value).isdecimal():
            return UnsupportedKey("it is not a number of records", to_do=True)
        slice_text = slice_template.format(value)
        return OFF_KEY if slice_text == "0:" else advise_on_slice(slice_text, our_key)

    return rule


def convert_split(value: Any, our_key: str, file: Any, is_whole_data: bool) -> Outcome:
    """Return the outcome for a part of a file, such as train[:95%].

    ``our_key``: our setting that names the file; ``file``: the file, if known. ``is_whole_data``:
    it is all the data, and nothing else determines what is held out.
    """
    if value == "train":
        return IgnoredKey("files are used whole; in a folder, those of the train split")
    match = _SLICE_PATTERN.fullmatch(str(value).replace(" ", ""))
    if match is None:
        return UnsupportedKey(
            f"name the file of this part in {our_key}: files are used whole", to_do=True
        )
    start, _, end, percent = match.groups()
    if is_whole_data and not start and percent and _MIN_TRAINED_PERCENT <= int(end) < 100:
        remark = "the rest is held out; a hash of each document chooses, not its position"
        return MappedKey({"data.eval_fraction": (100 - int(end)) / 100}, remark)
    return advise_on_slice(
        f"{_slice_bound(*match.group(1, 2))}:{_slice_bound(*match.group(3, 4))}", our_key, file
    )


def complement_split(value: Any) -> str | None:
    """Return the complement of the part ``value``: train[:95%] for train[95%:]."""
    match = re.fullmatch(r"train\[(\d+%):\]", str(value).replace(" ", ""))
    return f"train[:{match[1]}]" if match else None


def _slice_bound(number: str | None, percent: str | None) -> str:
    if number is None:
        return ""
    return f"round(len(r)*{number}/100)" if percent else number
