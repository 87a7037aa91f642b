"""What can become of a key of another tool's config, and what the rules of all tools share.

key, value -> rule -> Mapped | Automatic | Unsupported
"""

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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


# -- Parts of files, as other tools name them: hpc_tune uses a file whole, or holds a share out.
#
# train[:95%]      -> data.eval_fraction=0.05
# train[:1000]     -> a command that writes these records to a file of their own


# The records of a file, one list of JSON or one record a line; {part} is a slice of the list.
_COMMAND = (
    "import json,sys; t=open(sys.argv[1],encoding='utf-8-sig').read(); "
    "r=json.loads(t) if t.lstrip()[:1]=='[' else [json.loads(s) for s in t.split('\\n') if "
    "s.strip()]; [print(json.dumps(x)) for x in r[{part}]]"
)
_SLICE = re.compile(r"train\[(?:(\d+)(%?))?:(?:(\d+)(%?))?\]")
_MIN_TRAINED = 50  # percent; of which less is trained on is a part, and not data with a rest


def advise_cut(part: str, ours: str, file: Any = None) -> Unsupported:
    """Return how to write a part of a file; ``part`` is a slice of the list of records ``r``."""
    is_known = isinstance(file, str)
    if is_known and not file.endswith((".json", ".jsonl")):
        records = part.replace("len(r)", "their number")
        instead = f"write records {records} of {file} (the first is 0) to a file of their own; set "
        return Unsupported(f"{instead}{ours} to that", to_do=True)
    name = shlex.quote(file) if is_known else "FILE"
    which = "" if is_known else ", FILE being JSON or JSONL"
    command = f'python -c "{_COMMAND.format(part=part)}" {name} > part.jsonl'
    return Unsupported(
        f"write these records of a file to one of their own: {command}{which}; then set {ours} to "
        "part.jsonl",
        to_do=True,
    )


def first_records(ours: str) -> Rule:
    """Rule for a number of records at the beginning of each file."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if not str(value).isdecimal():
            return Unsupported("it is no number of records", to_do=True)
        return advise_cut(f":{value}", ours)

    return rule


def convert_split(value: Any, ours: str, file: Any, is_whole_data: bool) -> Outcome:
    """Return what becomes of a part of a file, such as train[:95%].

    ``is_whole_data``: the file is all the data, and nothing else says what is held out.
    """
    if value == "train":
        return Ignored("files are used whole; in a folder, those of the train split")
    found = _SLICE.fullmatch(str(value).replace(" ", ""))
    if found is None:
        return Unsupported(
            f"name the file of this part in {ours}: files are used whole", to_do=True
        )
    start, _, end, percent = found.groups()
    if is_whole_data and not start and percent and _MIN_TRAINED <= int(end) < 100:
        remark = "the rest is held out; a hash of each document chooses, not its position"
        return Mapped({"data.eval_fraction": (100 - int(end)) / 100}, remark)
    return advise_cut(
        f"{_slice_bound(*found.group(1, 2))}:{_slice_bound(*found.group(3, 4))}", ours, file
    )


def complement(value: Any) -> str | None:
    """Return the part that is all but ``value``: train[:95%] for train[95%:]."""
    found = re.fullmatch(r"train\[(\d+%):\]", str(value).replace(" ", ""))
    return f"train[:{found[1]}]" if found else None


def _slice_bound(number: str | None, percent: str | None) -> str:
    if number is None:
        return ""
    return f"round(len(r)*{number}/100)" if percent else number


# -- Which layers the model of a config has, to see whether its adapters find theirs.
#
# model.path is a directory here -> the names of its weights, without reading one
#               not here          -> None: nobody knows yet, and plan checks it later


# Families whose modules have names of their own, by model_type of config.json.
_GPT_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_LAYERS = {
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _GPT_NEOX),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2"), _LLAMA),
    "phi3": _PHI3,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
# torchtune's builders of models whose layers it splits, and Hugging Face's files do not.
_FUSED_BUILDERS = ("phi3", "phi4")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_STACK = re.compile(r"(?:[a-z_]+\.)*experts\.(gate_up|down)_proj")
_OUTPUT_HEAD = {"lm_head"}  # files leave out one that is tied to the embedding
_LARGEST_HEADER = 64 << 20  # bytes; one of more is damaged


def convert_targets(names: list[str], model_key: str, theirs: ForeignConfig) -> Outcome:
    """Return what becomes of the names of layers that get adapters, for the model of a config."""
    layers = read_layer_names(Path(str(theirs.get(model_key, ""))).expanduser())
    unknown = [] if layers is None else [name for name in names if name not in layers]
    if not unknown or layers is None:
        return Mapped({"tune.targets": names})
    is_one = len(unknown) == 1
    return Unsupported(
        f"{theirs.get(model_key)} has no {'layer' if is_one else 'layers'} {', '.join(unknown)}; "
        f"set tune.targets to some of {', '.join(sorted(layers))}, or leave it out for all linear "
        "layers",
        to_do=True,
    )


def are_expert_stacks(parameters: Any) -> bool:
    """Return whether peft's target_parameters are both stacks of the experts of all layers."""
    names = parameters if isinstance(parameters, list) else [parameters]
    found = [_STACK.fullmatch(str(name)) for name in names]
    return all(found) and {match[1] for match in found if match} == {"gate_up", "down"}


def add_experts(outcome: Outcome, rank: Any) -> Outcome:
    """Return targets with routed experts among them; peft gives each expert the whole rank."""
    if not isinstance(outcome, Mapped):
        return outcome
    names = outcome.settings["tune.targets"]
    every = [*([names] if isinstance(names, str) else names), "experts"]
    settings = {"tune.targets": every, "tune.expert_rank": rank}
    return Mapped(settings, "the rank of each expert, as there")


def fuse_targets(names: list[str], builder: str) -> Outcome | None:
    """Return the targets for a builder of torchtune whose layers are joined in Hugging Face files.

    None: the builder is of no such model.
    """
    if not any(f".{family}." in builder for family in _FUSED_BUILDERS):
        return None
    ours = list(dict.fromkeys(_FUSED.get(name, name) for name in names))
    joined = {_FUSED[name] for name in names if name in _FUSED}
    others = [part for part, whole in _FUSED.items() if whole in joined and part not in names]
    if not joined:
        return Mapped({"tune.targets": ours})
    remark = f"{' and '.join(sorted(joined))} of the Hugging Face model: one adapter for what has "
    remark += "several there"
    remark += f", and so also for {' and '.join(others)}" if others else ""
    return Mapped({"tune.targets": ours}, remark, to_do=True)


def read_layer_names(directory: Path) -> set[str] | None:
    """Return what the linear layers of a model directory are called in their blocks.

    None: there is no such directory, or its files do not say it.
    """
    if not directory.is_dir():
        return None
    names = set(_OUTPUT_HEAD)
    for weight in _read_weight_names(directory):
        *_, module, last = f"..{weight}".split(".")
        if last == "weight" and "norm" not in module and "embed" not in module:
            names.add(module)
    if names == _OUTPUT_HEAD:
        model_type = _read_json(directory / "config.json").get("model_type")
        names |= set(_LAYERS.get(str(model_type), ()))
    return None if names == _OUTPUT_HEAD else names


def _read_weight_names(directory: Path) -> list[str]:
    index = _read_json(directory / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict) and index:
        return list(map(str, index))
    try:
        with (directory / "model.safetensors").open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= _LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return []
    return list(header) if isinstance(header, dict) else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
