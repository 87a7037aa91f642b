"""The ``data`` section of the configuration: what the model is trained on."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_tune.config.section import PositiveInt, Section, setting

# -- The sources of a mixture: what each one is, how it is read, and how much of it is trained on.


LossOn = Literal["answers", "all"]
_RECORD_FIELDS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion",
    "response", "text", "system", "history", "tools", "weight", "loss_scale", "train", "loss",
    "loss_mask", "chosen", "rejected", "label",
)  # fmt: skip
_WEIGHT_SUM_TOLERANCE = 1e-6  # of weights such as 0.333333 three times


def _require_values(columns: Any) -> Any:
    """Refuse ``{NAME:prompt}``, which YAML reads as a single key without a value."""
    if isinstance(columns, dict) and (names := [k for k, v in columns.items() if v is None]):
        raise ValueError(f"{names[0]} has no value; put a space after the colon: {{NAME: prompt}}")
    return columns


def _check_fields(columns: dict[str, str]) -> dict[str, str]:
    for name, field in columns.items():
        if field not in _RECORD_FIELDS:
            raise ValueError(f"{name}: {field} is not one of {', '.join(_RECORD_FIELDS)}")
    if len(set(columns.values())) < len(columns):
        raise ValueError("two columns are read as the same field")
    return columns


Columns = Annotated[dict[str, str], BeforeValidator(_require_values), AfterValidator(_check_fields)]


class HeldOutSource(Section):
    """A named source of held-out data, and how it is read."""

    path: str | list[str] = Field(description="As data.path, a prepared .h5 file included.")
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = Field(
        None,
        description="Its name in metrics and reports: letters, digits, _, - and dots. Unset: the "
        "name of the file or folder.",
    )
    limit: PositiveInt | None = Field(
        None,
        description="How many of its documents are used, drawn by a hash of their numbers: the "
        "same ones in each pass, in each run and on any number of ranks. Unset: all.",
    )
    columns: Columns | None = Field(None, description="Unset: data.columns.")
    chat_template: str | None = Field(None, description="Unset: data.chat_template.")
    loss_on: LossOn | None = Field(None, description="Unset: data.loss_on.")

    @property
    def label(self) -> str:
        """The given name, or one derived from the file's."""
        first = self.path if isinstance(self.path, str) else [*self.path, "data"][0]
        stem = Path(first).name.split(".")[0]
        return self.name or re.sub(r"[^\w.-]+", "-", stem).strip("-") or "data"


class TrainingSource(HeldOutSource):
    """A source of a mixture. All sources set ``weight``, or all set ``epochs``; never both."""

    weight: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Its share of the learned tokens, not of documents or rows; the weights of "
        "all sources add up to 1.",
    )
    epochs: PositiveInt | None = Field(
        None, description="How often each of its documents occurs in one epoch of the mixture."
    )
    max_epochs: Annotated[float, Field(gt=0)] = Field(
        4.0,
        description="A run that would make more passes over this source is refused: a small "
        "source with a large weight is learned by heart. More than one pass is a warning.",
    )


def check_sources(sources: Sequence[TrainingSource]) -> Iterator[str]:
    """Yield a problem for each conflict between the sources of a mixture."""
    if not sources:
        yield "data.sources is an empty list; name at least one source, or data.path"
        return
    yield from check_source_names("data.sources", sources)
    names = [source.label for source in sources]
    kinds = [_describe_weighting(source) for source in sources]
    if set(kinds) not in ({"weight"}, {"epochs"}):
        texts = ", ".join(f"{name} has {kind}" for name, kind in zip(names, kinds, strict=True))
        yield (
            f"data.sources: {texts}; give weight (its share of the learned tokens) to all of them, "
            "or epochs (how often each of its documents comes) to all of them"
        )
        return
    weights = [source.weight or 0.0 for source in sources]
    if kinds[0] == "weight" and abs((total := sum(weights)) - 1) > _WEIGHT_SUM_TOLERANCE:
        shares = ", ".join(f"{n} {w / total:.4g}" for n, w in zip(names, weights, strict=True))
        yield (
            f"data.sources: the weights add up to {total:g}, and as shares of the learned tokens "
            f"they must add up to 1; divided by their sum they are {shares}"
        )
    for source in sources:
        if source.epochs is not None and source.epochs > source.max_epochs:
            yield (
                f"data.sources: {source.label} has epochs={source.epochs} and max_epochs="
                f"{source.max_epochs:g}; lower epochs, or raise its max_epochs"
            )


def _describe_weighting(source: TrainingSource) -> str:
    if source.weight is not None and source.epochs is not None:
        return "both weight and epochs"
    return "weight" if source.weight is not None else "epochs" if source.epochs else "neither"


def check_source_names(setting: str, sources: Sequence[HeldOutSource]) -> Iterator[str]:
    """Yield a problem for each duplicate name (metrics use names) and each empty path."""
    names = [source.label for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{setting}: {names.count(name)} sources are called {name}; give each another name"
    for source in sources:
        if source.path == []:
            yield f"{setting}: {source.label} has an empty list as path; name at least one file"


# -- The section.


# What rows contain: answers to learn, pairs of a chosen and a rejected answer, or answers with a
# label that says whether they are desirable.
DataForm = Literal["answers", "pairs", "labels"]


class DataConfig(Section):
    """What the model is trained on."""

    path: str | list[str] | None = setting(
        "builtin:pydocs",
        "free",
        "A prepared .h5 file, or raw data: .json, .jsonl, .csv, .parquet, .arrow, .txt "
        "or .md, Megatron's .bin with its .idx, a folder of one of these kinds, a pattern such as "
        "data/*.jsonl, or a list of these. Raw data is prepared first, into data.cache. "
        "builtin:pydocs: questions about this Python's modules and functions, with their "
        "docstrings as answers; it needs no download. null: data.sources names the data.",
        path="dataset",
        aliases="train_file dataset datasets dataset_name dataset_dir train_data data_files",
    )
    sources: list[TrainingSource] | None = setting(
        None,
        "free",
        "Several sources in place of data.path, each with path and weight (its share "
        "of the learned tokens; they add up to 1) or, for all of them, epochs; and optionally "
        "name, max_epochs, limit, columns, chat_template and loss_on: see docs/mixtures.md.",
    )
    new_mixture: bool = setting(
        False,
        "free",
        "Let a resumed run continue with other weights or more sources than before: they apply "
        "from there on, and the change is recorded. false: such a change is refused.",
    )
    eval_path: str | list[str] | None = setting(
        None,
        "free",
        "Held-out data in the same forms, on which the loss is measured. Unset: none, "
        "unless eval_fraction is set. builtin:pydocs:heldout is the held-out part of pydocs.",
        path="dataset",
        aliases="eval_dataset test_datasets eval_file validation_file dataset_val",
    )
    eval_sources: list[HeldOutSource] | None = setting(
        None,
        "free",
        "Several sources of held-out data in place of eval_path, each with path and optionally "
        "name, limit, columns, chat_template and loss_on, which default to those of the "
        "source in data.sources with the same name. The loss of each source is reported by name; "
        "their mean is the held-out loss that checkpoint.keep_best and train.stop_after_evals "
        "use.",
        replaces="data.eval_path",
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.0,
        "free",
        "The share of the documents of data.path, or of each source, that is held "
        "out, from 0 to 1, in place of eval_path; 0 trains on all. A hash of each document's "
        "content decides: the same ones are held out in each run, on any number of ranks, and "
        "duplicates are never split between training and held-out data.",
        replaces="data.eval_path",
        aliases="val_size val_set_size test_size",
    )
    columns: Columns = setting(
        {},
        "free",
        "Names of columns in the data and the fields that they are read as, such as "
        "{problem: prompt, solution: completion}. question and answer, query and response, "
        "context and system_prompt are known without it.",
        aliases="dataset_text_field column_map",
    )
    bad_rows: Literal["refuse", "skip"] = setting(
        "refuse",
        "free",
        "refuse: the first row that cannot be used ends the preparation with its "
        "position and the reason, since what is wrong with one row is often wrong with many; "
        "skip: such rows are left out and counted.",
    )
    seq_len: PositiveInt = setting(
        1024,
        "same",
        "Tokens per row; longer documents are cut there, and counted. Both answers of a pair "
        "(tune.objective), each with its prompt, share a row. 1024 holds most "
        "questions with their answers; the memory of activations grows in proportion.",
        aliases="max_length max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
    )
    packing: bool = setting(
        True,
        "same",
        "Put several documents into one row, separated in attention and positions: the "
        "same gradient with less padding, and so faster. false: one document per row. If a "
        "model cannot keep documents apart, packing is switched off, with a line in the log.",
        aliases="sample_packing neat_packing packed",
    )
    loss_on: LossOn = setting(
        "answers",
        "free",
        "answers: the loss is on the assistant's text only, since prompts are given "
        "when the model is used; all: on the prompts too.",
        aliases="train_on_inputs train_on_input train_on_prompt assistant_only_loss "
        "completion_only_loss masking_strategy",
    )
    chat_template: str | None = setting(
        None,
        "free",
        "Replaces the tokenizer's chat template: a Jinja file, whose path ends in "
        ".jinja or has a slash, or a name such as chatml, llama3 or qwen3 (docs/data.md lists "
        "all). Unset: the tokenizer's own; chats need one or the other.",
        path="file",
        aliases="template prompt_template",
    )
    cache: str | None = setting(
        None,
        "free",
        "The folder for files prepared from raw data, shared by all nodes; runs with the same "
        "folder prepare the same data only once. Unset: data/ in the run directory.",
        path="file",
        aliases="dataset_prepared_path tokenized_path cache_dir",
    )

    @property
    def has_held_out_data(self) -> bool:
        """Whether a held-out loss is measured."""
        return bool(self.eval_path or self.eval_fraction or self.eval_sources)

    def with_source(self, source: HeldOutSource) -> "DataConfig":
        """Return this section as it applies to one source, without the lists of sources."""
        update = {"path": source.path, "sources": None, "eval_sources": None}
        for name in ("columns", "chat_template", "loss_on"):
            if (override := getattr(source, name)) is not None:
                update[name] = override
        return self.model_copy(update=update)


def is_prepared(path: str | list[str] | None) -> bool:
    """Return whether a path names one file that ``prepare`` wrote."""
    return isinstance(path, str) and path.endswith((".h5", ".hdf5"))


# -- Chat templates by name: hpc_tune/chat_templates/NAME.jinja, and the tokens each one requires.
#
# They render the same text as the published tokenizers' own templates, and mark the answers.


TEMPLATE_FOLDER = Path(__file__).resolve().parent.parent / "chat_templates"
TEMPLATE_SUFFIX = ".jinja"


@dataclass(frozen=True)
class NamedTemplate:
    """``end_token`` ends an answer (None: eos_token); ``control_tokens`` are the others."""

    end_token: str | None
    control_tokens: tuple[str, ...] = ()


def _make_template(end_token: str | None, control_tokens: str = "") -> NamedTemplate:
    return NamedTemplate(end_token, tuple(control_tokens.split()))


NAMED_TEMPLATES = {
    "chatml": _make_template("<|im_end|>", "<|im_start|>"),
    "deepseek-v3": _make_template(
        "<｜end▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> "
        "<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜> <｜tool▁outputs▁end｜>",
    ),
    "gemma": _make_template("<end_of_turn>", "<start_of_turn>"),
    "gemma3": _make_template("<end_of_turn>", "<start_of_turn>"),
    "granite": _make_template("<|end_of_text|>", "<|start_of_role|> <|end_of_role|>"),
    "llama2": _make_template(None),
    "llama3": _make_template("<|eot_id|>", "<|start_header_id|> <|end_header_id|>"),
    "mistral": _make_template(
        None,
        "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS]",
    ),
    "phi3": _make_template("<|end|>", "<|system|> <|user|> <|assistant|>"),
    "phi4": _make_template("<|im_end|>", "<|im_start|> <|im_sep|>"),
    "qwen2.5": _make_template("<|im_end|>", "<|im_start|>"),
    "qwen3": _make_template("<|im_end|>", "<|im_start|>"),
    "tulu": _make_template(None),
    "zephyr": _make_template(None),
}


def is_template_path(chat_template: str) -> bool:
    """Return whether data.chat_template is the path of a file, as opposed to a template's name."""
    return "/" in chat_template or chat_template.endswith(TEMPLATE_SUFFIX)


def template_file(chat_template: str) -> Path:
    """Return the file of a template that is given by name or by path."""
    if is_template_path(chat_template) or chat_template not in NAMED_TEMPLATES:
        return Path(chat_template)
    return TEMPLATE_FOLDER / f"{chat_template}{TEMPLATE_SUFFIX}"


def check_template_names(data: DataConfig) -> Iterator[str]:
    """Yield a problem for each chat template that is neither a known name nor a path."""
    templates = {"data.chat_template": data.chat_template}
    for name in ("sources", "eval_sources"):
        for index, source in enumerate(getattr(data, name) or []):
            templates[f"data.{name}.{index}.chat_template"] = source.chat_template
    for name, value in templates.items():
        if value is None or is_template_path(value) or value in NAMED_TEMPLATES:
            continue
        matches = difflib.get_close_matches(value.lower(), NAMED_TEMPLATES, 1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        here = f"; for the file of that name write ./{value}" if Path(value).is_file() else ""
        yield (
            f"{name}={value} is not a known chat template ({', '.join(NAMED_TEMPLATES)}), "
            f"nor a path, which ends in {TEMPLATE_SUFFIX} or has a slash{hint or here}"
        )
