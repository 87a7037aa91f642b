"""What can become of a key of another tool's config, and what the rules of all tools share.

key, value -> rule -> Mapped | Automatic | Unsupported
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hpc_tune.data.files import COMPRESSIONS, KINDS
from hpc_tune.errors import ConfigError

LAYOUT = "the layout follows from memory, or from measured links with parallel: auto"
NO_TRACKER = (
    "run.trackers takes tensorboard, wandb, mlflow and trackio; metrics.jsonl always has each step"
)
OFF: tuple[Any, ...] = (None, False, 0, "", "none", "no", "false", [], {})


@dataclass(frozen=True)
class ForeignConfig:
    """Another tool's config: values by dotted key, with its defaults, without what is empty.

    ``ranks`` is the number of ranks it was made for.
    """

    values: dict[str, Any]
    ranks: int

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default``."""
        return self.values.get(key, default)

    def is_on(self, key: str) -> bool:
        """Return whether a switch is there and on."""
        return str(self.get(key)).lower() == "true"

    def items(self, name: str) -> list[dict[str, Any]]:
        """Return the items of a list of mappings, each with its values by dotted key."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            if match := re.fullmatch(rf"{name}\.(\d+)\.(.+)", key):
                found.setdefault(match[1], {})[match[2]] = value
        return list(found.values())

    def number(self, key: str) -> float:
        """Return a number; NaN, which compares as false with all others, where there is none."""
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else math.nan

    def whole(self, key: str) -> int:
        """Return a whole number.

        Raises:
            ConfigError: if it is none from 1 on.
        """
        value = self.get(key)
        text = str(value).removesuffix(".0")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{key} = {value!r} in their config is not a whole number from 1 on")
        return int(text)


@dataclass(frozen=True)
class Mapped:
    """Their key gives values to ours; ``remark`` says where the meaning differs.

    ``to_do``: the user must see to the remark before a run.
    """

    settings: dict[str, Any]
    remark: str = ""
    to_do: bool = False


@dataclass(frozen=True)
class Ignored:
    """hpc_tune decides this itself, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """Their key is not taken over. ``to_do``: the user must act on ``instead`` before a run."""

    instead: str
    to_do: bool = False


@dataclass(frozen=True)
class WrongTask:
    """Their config is for another training: ``what`` it is, and what to do ``instead``.

    ``keys`` say so in the config.
    """

    keys: tuple[str, ...]
    what: str
    instead: str

    def message(self, theirs: ForeignConfig, tool: str) -> str:
        """Return the one message for people."""
        said = ", ".join(f"{key} = {format_value(theirs.get(key))}" for key in self.keys[:3])
        return (
            f"{said} in their config: {self.what}, and hpc_tune has supervised fine-tuning and "
            "preferences (dpo, ipo, simpo, orpo, kto) of text alone. Nothing is converted. "
            f"{self.instead.format(tool=tool)}"
        )


NO_ADAPTERS = Ignored("there are no adapters in full fine-tuning")
Outcome = Mapped | Ignored | Unsupported
Rule = Outcome | Callable[[Any, ForeignConfig], Outcome]


@dataclass(frozen=True)
class Tool:
    """Another tool: its rules by key (``part.*``: all keys below it; of lists without the number).

    ``wrong_task`` returns why a config cannot be converted at all: it is for another training.
    ``lists`` names the keys whose lists are taken apart, since they have keys in them.
    ``defaults`` gives what the tool takes for keys that a config leaves out, where hpc_tune would
    take something else.
    """

    name: str
    rules: dict[str, Rule]
    defaults: Callable[[ForeignConfig], dict[str, Any]]
    wrong_task: Callable[[ForeignConfig], WrongTask | None]
    lists: tuple[str, ...] = ()

    def outcome(self, key: str, theirs: ForeignConfig) -> Outcome | None:
        """Return what becomes of a key; None: it is not known."""
        parts = [part for part in key.split(".") if not part.isdecimal()]
        names = [
            ".".join(parts),
            *(".".join(parts[:n]) + ".*" for n in range(len(parts) - 1, 0, -1)),
        ]
        rule = next((self.rules[name] for name in names if name in self.rules), None)
        if key not in theirs.values:
            is_part = any(name.startswith(f"{names[0]}.") for name in self.rules)
            return Ignored("empty in their config") if rule or is_part else None
        return rule(theirs.values[key], theirs) if callable(rule) else rule


def format_value(value: Any) -> str:
    """Return a value of theirs on one line of at most 80 characters."""
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def each(rule: Rule, keys: str) -> dict[str, Rule]:
    """Give one rule to several keys, with spaces between them."""
    return dict.fromkeys(keys.split(), rule)


def same(ours: str, remark: str = "") -> Rule:
    """Take a value over as it is."""
    return lambda value, theirs: Mapped({ours: value}, remark)


def lacking(instead: str, to_do: bool = False) -> Rule:
    """Rule for what hpc_tune lacks: left, unless their config switches it off."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        return Ignored("off in their config") if value in OFF else Unsupported(instead, to_do)

    return rule


def adapter_rule(ours: str, method: Callable[[ForeignConfig], str]) -> Rule:
    """Take a value of adapters over, unless all weights are trained."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        return NO_ADAPTERS if method(theirs) == "full" else Mapped({ours: value})

    return rule


def dora_rule(method: Callable[[ForeignConfig], str]) -> Rule:
    """Rule for the switch for DoRA, which tune.method says here."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if str(value).lower() != "true":
            return Ignored("tune.method says it")
        match method(theirs):
            case "full":
                return NO_ADAPTERS
            case "qlora":
                return Unsupported("tune.method=dora has no 4-bit base", True)
        return Mapped({"tune.method": "dora"})

    return rule


def rslora_rule(method: Callable[[ForeignConfig], str]) -> Rule:
    """Rule for the switch for a scale of alpha / sqrt(rank)."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if str(value).lower() != "true":
            return Ignored("off in their config")
        return NO_ADAPTERS if method(theirs) == "full" else Mapped({"tune.rslora": True})

    return rule


def global_batch(
    theirs: ForeignConfig, rows: str, accumulation: str, ranks_per_row: int = 1
) -> Mapped:
    """Return the global batch of rows per rank, accumulation and data-parallel ranks.

    Raises:
        ConfigError: if the ranks are no multiple of those that share a row.
    """
    if theirs.ranks % ranks_per_row:
        raise ConfigError(
            f"--ranks {theirs.ranks}: in their config {ranks_per_row} ranks share each row; give a "
            f"multiple of {ranks_per_row}"
        )
    factors = theirs.whole(rows), theirs.whole(accumulation), theirs.ranks // ranks_per_row
    size = factors[0] * factors[1] * factors[2]
    remark = "{} per rank x {} accumulated x {} ranks".format(*factors)
    return Mapped({"batch.global_size": size}, remark)


def usable_file(value: Any) -> bool:
    """Return whether a value names a file, a pattern or a folder of a kind that hpc_tune reads."""
    if not isinstance(value, str) or "://" in value:
        return False
    path = PurePosixPath(value)
    path = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return path.suffix in ("", *KINDS, ".h5", ".hdf5")


def is_path(name: str) -> bool:
    """Return whether a name is a path rather than one of a hub, such as meta-llama/Llama-3.1-8B."""
    return name.startswith(("/", ".", "~", "$")) or name.count("/") != 1


def is_data_path(name: str) -> bool:
    """Return whether a name is a path to data that hpc_tune reads, rather than one of a hub."""
    if not usable_file(name):
        return False
    return bool(PurePosixPath(name).suffix) or ("/" in name and is_path(name))


def explain_hub_data(name: Any, ours: str) -> Unsupported:
    """Return what to do about a dataset of a hub."""
    return Unsupported(
        "compute nodes have no internet: on a login node hf download --repo-type dataset "
        f"{name} --local-dir DIR, and name DIR in {ours}",
        to_do=True,
    )


def model_path(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for a model that is a directory or a name of the hub."""
    if is_path(str(value)):
        return Mapped({"model.path": value}, "a Hugging Face directory")
    return Unsupported(
        "it looks like a name of the hub, which compute nodes cannot reach: on a login node "
        f"hf download {value} --local-dir DIR, then set model.path to DIR (to ./{value} if it is "
        "a folder)",
        to_do=True,
    )


def explain_chat_template(name: Any) -> Unsupported:
    """Return what to do about a template that a tool has by a name of its own."""
    return Unsupported(
        f"the chat template of model.path's tokenizer is taken: if that is not {name}'s, set "
        f"data.chat_template to a name of docs/data.md, or write {name}'s as a Jinja file",
        to_do=True,
    )


def offload_params(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for a switch that keeps sharded weights on the host."""
    if str(value).lower() == "true":
        return Mapped({"parallel.offload_params": "cpu"}, "the state of the optimizer goes along")
    return Ignored("plan says whether the weights need it: parallel.offload_params")


def packing(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for a packing switch."""
    if str(value).lower() == "true":
        return Mapped({"data.packing": True}, "documents in a row do not see each other")
    remark = "true is faster; a row then holds several documents, so make the batch smaller"
    return Mapped({"data.packing": False}, remark)
