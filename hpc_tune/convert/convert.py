"""The convert command: turn a config of another tool into one of hpc_tune.

THEIRS.yaml -> which tool? -> a rule for each key -> taken over | decided | not taken over
                                                  -> OURS.yaml, checked as a run checks it

The number of ranks is needed because other tools set the batch size per rank, while
batch.global_size counts the rows of all ranks.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hpc_tune.config.constraints import check_config
from hpc_tune.config.load import explain_errors, text_setting_names
from hpc_tune.config.schema import RunConfig
from hpc_tune.convert.axolotl import AXOLOTL
from hpc_tune.convert.axolotl_data import DATASET_LIST_KEYS
from hpc_tune.convert.llama_factory import LLAMA_FACTORY
from hpc_tune.convert.rules import (
    EMPTY_KEY,
    ForeignConfig,
    IgnoredKey,
    MappedKey,
    Outcome,
    Tool,
    UnsupportedKey,
    format_their_value,
)
from hpc_tune.convert.torchtune import TORCHTUNE
from hpc_tune.errors import ConfigError
from hpc_tune.files import write_file
from hpc_tune.safe_yaml import load_yaml

# -- Files of training tools that are recognized but not converted: what they are, and what to do.


_FLAG = re.compile(r"(?:^|\s)--([a-z][\w.-]*)(?:[ =]([^\s-][^\s]*))?")
_LLAMA_FACTORY_ADVICE = (
    "write them as model_name_or_path, stage: sft, finetuning_type, lora_rank, dataset and so on, "
    "the keys of LLaMA-Factory, and convert that, or begin with python -m hpc_tune init"
)


def explain_unsupported_tool(raw_config: dict[str, Any]) -> str | None:
    """Return which unsupported tool or format a config is for, and what to do; None if unknown."""
    is_name = isinstance(raw_config.get("model"), str)
    if is_name and {"train_dataset", "model_class", "peft_config"} & set(raw_config):
        return (
            "that is the newer form of LLaMA-Factory (v1, as in its examples/v1), which convert "
            f"does not read yet: {_LLAMA_FACTORY_ADVICE}"
        )
    if is_name and {"tuner_type", "train_type", "rlhf_type", "sft_type"} & set(raw_config):
        return f"that is a config of ms-swift, which convert does not read: {_LLAMA_FACTORY_ADVICE}"
    of_trl = {"dataset_name", "dataset_mixture", "use_peft", "lora_target_modules"}
    if "model_name_or_path" in raw_config and of_trl & set(raw_config):
        return f"that is a config of trl, which convert does not read: {_LLAMA_FACTORY_ADVICE}"
    return None


def explain_flags(text: str) -> str | None:
    """Return what to do about a script or command line with flags; None if it has no flags."""
    flags = _FLAG.findall(text)
    if not flags:
        return None
    name, value = next(((name, value) for name, value in flags if value), flags[0])
    value = value.strip("\"'") or "true"
    return (
        f"a command line of flags (--{name} and others), not YAML; write each flag as a line of "
        f"a YAML file, this one as {name}: {value}, and convert that file"
    )


# -- Numbers that YAML 1.1 reads as text, such as 1e-5 and 1e3, but other tools read as numbers.
#
# Values whose key stands for a name, a path or a column stay text.


_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_TEXT_KEY_PATTERN = re.compile(
    r"(name|path|dir|project|model|source|files|dataset|template|column)$"
    r"|^(test_)?datasets\.|^dataset\.column_map\."
)


def parse_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return values by dotted key: numeric text becomes a number, null is dropped from lists."""
    return {
        key: _parse_non_text(value) if _TEXT_KEY_PATTERN.search(key) else _parse_number(value)
        for key, value in values.items()
    }


def _parse_non_text(value: Any) -> Any:
    """Keep text as it is, drop null from a list, and parse numbers in other values."""
    if isinstance(value, list):
        return [
            item if isinstance(item, str) else _parse_number(item)
            for item in value
            if item is not None
        ]
    return value if isinstance(value, str) else _parse_number(value)


def _parse_number(value: Any) -> Any:
    if isinstance(value, list):
        return [_parse_number(item) for item in value if item is not None]
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    number = float(value)
    return int(number) if number.is_integer() and "." not in value else number


# -- The convert command.


PLACEHOLDER = "FILL_IN"
UNKNOWN_KEY_ADVICE = "hpc_tune does not know this key; python -m hpc_tune --help lists all settings"
_EXPECTED_TOOLS = (
    "expected a training config of torchtune (optimizer, and model with _component_), "
    "LLaMA-Factory (model_name_or_path, and stage or finetuning_type) or axolotl (base_model and "
    "datasets). docs/coming-from.md has tables for LitGPT and TorchTitan"
)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SECRET_KEY_PATTERN = re.compile(
    r"(api_key|(?:hub|auth|access)_token|password|secret|webhook_url)$"
)


@dataclass(frozen=True)
class OutcomeLine:
    """The outcome of all keys that share one remark.

    ``keys`` include their values. ``to_do``: the user must act on the remark before a run.
    """

    keys: tuple[str, ...]
    remark: str
    to_do: bool = False

    def __str__(self) -> str:
        """Return the line for people."""
        return ", ".join(self.keys) + self.remark


@dataclass(frozen=True)
class ConvertedConfig:
    """The outcome of a conversion: ``config`` is ours, the rest are lines for people.

    Each of their keys is in exactly one of ``mapped_keys``, ``ignored_keys`` and
    ``unsupported_keys``. ``further_notes``: what to do about our settings that none of their keys
    gives.
    """

    tool: str
    config: dict[str, dict[str, Any]]
    mapped_keys: tuple[OutcomeLine, ...]
    ignored_keys: tuple[OutcomeLine, ...]
    unsupported_keys: tuple[OutcomeLine, ...]
    further_notes: tuple[str, ...]

    @property
    def to_do(self) -> tuple[str, ...]:
        """What the user must do before the first run."""
        lines = (*self.mapped_keys, *self.unsupported_keys)
        return (*(str(line) for line in lines if line.to_do), *self.further_notes)


def convert_file(file: Path, ranks: int | None, out: Path | None) -> tuple[list[str], str]:
    """Convert ``file``, made for ``ranks`` ranks (None: 1 is assumed, with a note).

    Write our YAML to ``out``, a new file (None: nowhere); return the outcome of each key as lines,
    and our YAML.

    Raises:
        ConfigError: if it cannot be converted or written.
    """
    conversion = convert_config(read_yaml(file), 1 if ranks is None else ranks)
    notes = list(conversion.to_do)
    if ranks is None:
        notes.insert(0, "batch.global_size: --ranks was not given, so 1 rank is assumed")
    text, lines = render_yaml(conversion, notes, file.name), format_report(conversion, notes)
    if out is not None:
        write_new_file(out, text)
        lines += (
            [f"wrote {out}. When the starred lines are done:"] if notes else [f"wrote {out}. Next:"]
        )
        lines.append(f"  python -m hpc_tune plan --config {shlex.quote(str(out))}")
    return lines, text


def convert_config(raw_config: dict[str, Any], ranks: int) -> ConvertedConfig:
    """Convert ``raw_config``, which was made for ``ranks`` ranks.

    Raises:
        ConfigError: if the tool is not recognized, the kind of training has no counterpart here,
            or values are invalid.
    """
    tool = recognize_tool(raw_config)
    raw_values = dict(flatten_keys(raw_config, tool.array_keys))
    resolved_values = {
        key: value for key, value in resolve_references(raw_values).items() if value is not None
    }
    values = parse_numbers(resolved_values)
    defaults = tool.defaults(ForeignConfig(tool, values, ranks))
    config = ForeignConfig(tool, {**defaults, **values}, ranks)
    if message := next(filter(None, (refusal.message(config) for refusal in tool.refusals)), None):
        raise ConfigError(message)
    references = {name for value in raw_values.values() for name in _REFERENCE.findall(str(value))}
    sheet = _OutcomeRecorder()
    for key in [*raw_values, *(key for key in defaults if key not in raw_values)]:
        outcome = tool.outcome(key, config)
        if outcome is None and key not in config.values:
            outcome = EMPTY_KEY
        elif outcome is None and key in references:
            outcome = IgnoredKey("used where ${...} names it")
        elif outcome is None:
            outcome = UnsupportedKey(UNKNOWN_KEY_ADVICE, to_do=True)
        value = (
            "(not shown)"
            if _SECRET_KEY_PATTERN.search(key)
            else format_their_value(resolved_values.get(key, config.get(key)))
        )
        text = f"{key} = {value}" if key in config.values else key
        text += " (their default)" if key in defaults.keys() - values else ""
        sheet.record_outcome(key, text, outcome)
    sheet.fill_in_placeholders("model.path", "data.path")
    return sheet.conversion(tool.name)


def recognize_tool(raw_config: dict[str, Any]) -> Tool:
    """Return the tool that a config is for.

    Raises:
        ConfigError: if no known tool has such keys.
    """
    model = raw_config.get("model")
    if isinstance(model, dict) and "_component_" in model and "optimizer" in raw_config:
        return TORCHTUNE
    if isinstance(raw_config.get("policy_model"), dict) and "optimizer" in raw_config:
        return TORCHTUNE  # reinforcement learning, which is refused by name
    if "model_name_or_path" in raw_config and {"stage", "finetuning_type"} & set(raw_config):
        return LLAMA_FACTORY
    if "base_model" in raw_config and {*DATASET_LIST_KEYS, "adapter", "micro_batch_size"} & set(
        raw_config
    ):
        return AXOLOTL
    keys = ", ".join(map(str, list(raw_config)[:12])) or "nothing"
    keys += " and more" if len(raw_config) > 12 else ""
    raise ConfigError(
        f"found the keys {keys}; {explain_unsupported_tool(raw_config) or _EXPECTED_TOOLS}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        ConfigError: if there is no such file, or it is not YAML with keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = load_yaml(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {explain_flags(text) or f'not YAML: {error}'}") from None
    if not isinstance(content, dict):
        if flags := explain_flags(text):
            raise ConfigError(f"{path}: {flags}")
        raise ConfigError(f"{path}: expected keys with values, found {type(content).__name__}")
    return content


def flatten_keys(
    tree: dict[Any, Any], array_keys: Sequence[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty mapping and a list not in ``array_keys`` are values.

    A key of ``array_keys`` may also have a single item instead of a list.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in array_keys and isinstance(value, dict) and value:
            value = [value]
        if (
            key in array_keys
            and isinstance(value, list)
            and all(isinstance(v, dict) for v in value)
        ):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            yield from flatten_keys(value, array_keys, f"{key}.")
        else:
            yield key, value


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace ``${other.key}`` by its value; ``${oc.env:NAME}``, which we support too, is kept.

    Raises:
        ConfigError: if there is no such key, or keys refer to each other in a circle.
    """

    def resolve_value(key: str, chain: tuple[str, ...]) -> Any:
        if key in chain:
            circle = [*chain[chain.index(key) :], key]
            raise ConfigError(f"keys in their config refer to each other: {' -> '.join(circle)}")
        if key not in values:
            raise ConfigError(f"{chain[-1]} in their config refers to ${{{key}}}, which is not set")
        value = values[key]
        if not isinstance(value, str):
            return value
        if reference := _REFERENCE.fullmatch(value):
            return resolve_value(reference[1], (*chain, key))
        return _REFERENCE.sub(lambda match: str(resolve_value(match[1], (*chain, key))), value)

    return {key: resolve_value(key, ()) for key in values}


def render_yaml(conversion: ConvertedConfig, notes: Sequence[str], file_name: str) -> str:
    """Return our YAML, with the remaining tasks as comments above it."""
    lines = [f"# From {file_name}, a config of {conversion.tool}, by hpc_tune convert."]
    lines += ["# To do before the first run:"] if notes else []
    lines += [f"#   {' '.join(note.split())}" for note in notes]
    return "\n".join(lines) + "\n" + yaml.safe_dump(conversion.config, sort_keys=False)


def format_report(conversion: ConvertedConfig, notes: Sequence[str]) -> list[str]:
    """Return the outcome of each key as lines; what is left to do is marked with a star."""
    groups = {
        "taken over": conversion.mapped_keys,
        "decided by hpc_tune itself": conversion.ignored_keys,
        "not taken over": conversion.unsupported_keys,
    }
    lines = [f"recognized: a config of {conversion.tool} (* marks what to do before the first run)"]
    for title, group in groups.items():
        lines.append(f"{title} ({sum(len(line.keys) for line in group)})")
        lines += [f"{'*' if line.to_do else ' '} {line}" for line in group]
    outcome_lines = {str(line) for group in groups.values() for line in group}
    further_notes = [note for note in notes if note not in outcome_lines]
    lines += [f"further notes ({len(further_notes)})"] if further_notes else []
    return [*lines, *(f"* {note}" for note in further_notes)]


def write_new_file(path: Path, text: str) -> None:
    """Write a new file.

    Raises:
        ConfigError: if it exists already, or cannot be written.
    """
    if os.path.exists(path):
        raise ConfigError(f"--out {path} exists; remove it or choose another name")
    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None


@dataclass
class _OutcomeRecorder:
    """The outcomes so far: for each remark, the keys that have it, with their values."""

    our_settings: dict[str, Any] = field(default_factory=dict)
    mapped_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    ignored_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    unsupported_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    to_do_remarks: set[str] = field(default_factory=set)
    further_notes: list[str] = field(default_factory=list)

    def record_outcome(self, key: str, key_with_value: str, outcome: Outcome) -> None:
        """Record the outcome of a key; ``key_with_value`` is the key with its value."""
        settings = outcome.settings if isinstance(outcome, MappedKey) else {}
        clashes = [
            name for name, value in settings.items() if self.our_settings.get(name, value) != value
        ]
        if clashes:
            text = format_their_value(self.our_settings[clashes[0]])
            outcome = UnsupportedKey(f"another key gave {clashes[0]} = {text} already", to_do=True)
        match outcome:
            case MappedKey():
                self.our_settings |= settings
                assignments = ", ".join(
                    f"{name} = {format_their_value(v)}" for name, v in settings.items()
                )
                remark = f" -> {assignments}" + (f" ({outcome.remark})" if outcome.remark else "")
                self.mapped_keys.setdefault(remark, {})[key] = key_with_value
            case IgnoredKey():
                remark = f": {outcome.reason}"
                self.ignored_keys.setdefault(remark, {})[key] = key_with_value
            case UnsupportedKey():
                remark = f": {outcome.advice}"
                self.unsupported_keys.setdefault(remark, {})[key] = key_with_value
        if not isinstance(outcome, IgnoredKey) and outcome.to_do:
            self.to_do_remarks.add(remark)

    def fill_in_placeholders(self, *keys: str) -> None:
        """Set a placeholder for unset ``keys``, where a run would use a built-in default."""
        for key in keys:
            if key not in self.our_settings:
                self.our_settings[key] = PLACEHOLDER
                if not any(key in remark for remark in self.to_do_remarks):
                    self.further_notes.append(
                        f"{key}: replace {PLACEHOLDER}, since their config does not say it"
                    )

    def conversion(self, tool: str) -> ConvertedConfig:
        """Return the conversion from ``tool``. Ignored keys that share a remark lack their values.

        Raises:
            ConfigError: if a run would refuse our settings.
        """
        ignored_keys = (
            OutcomeLine(tuple(keys if len(keys) > 1 else keys.values()), remark)
            for remark, keys in self.ignored_keys.items()
        )
        mapped_keys, unsupported_keys = (
            tuple(
                OutcomeLine(tuple(keys.values()), remark, remark in self.to_do_remarks)
                for remark, keys in group.items()
            )
            for group in (self.mapped_keys, self.unsupported_keys)
        )
        our_settings = _validate_settings(self.our_settings)
        return ConvertedConfig(
            tool,
            our_settings,
            mapped_keys,
            tuple(ignored_keys),
            unsupported_keys,
            tuple(self.further_notes),
        )


def _validate_settings(our_settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return our settings as a tree of validated values.

    Raises:
        ConfigError: if a run would refuse them.
    """
    tree: dict[str, dict[str, Any]] = {part: {} for part in RunConfig.model_fields}
    for key, value in our_settings.items():
        part, _, name = key.partition(".")
        is_bare = key in text_setting_names() and isinstance(value, int | float | date)
        tree[part][name] = str(value) if is_bare else value
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = explain_errors(error.errors(), "their config")
    else:
        problems = check_config(config)
    if problems:
        raise ConfigError("hpc_tune does not accept these values:\n  " + "\n  ".join(problems))
    return {
        part: values for part, values in config.model_dump(exclude_unset=True).items() if values
    }
