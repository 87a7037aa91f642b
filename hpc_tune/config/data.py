"""The ``data`` section of the configuration: what the model is trained on."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_tune.config.section import PositiveInt, Section

# What is read from rows: answers to learn, pairs of a chosen and a rejected answer, or answers with
# a label that says whether they are desirable.
Form = Literal["answers", "pairs", "labels"]
_FIELDS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion",
    "response", "text", "system", "history", "tools", "weight", "loss_scale", "train", "loss",
    "loss_mask", "chosen", "rejected", "label",
)  # fmt: skip


def _with_values(columns: Any) -> Any:
    """Refuse ``{NAME:prompt}``, which YAML reads as one name without a value."""
    if isinstance(columns, dict) and (bare := [k for k, v in columns.items() if v is None]):
        raise ValueError(f"{bare[0]} has no value; put a space after the colon: {{NAME: prompt}}")
    return columns


def _fields_of_rows(columns: dict[str, str]) -> dict[str, str]:
    """Check what the columns of data are to be read as."""
    for name, field in columns.items():
        if field not in _FIELDS:
            raise ValueError(f"{name}: {field} is not one of {', '.join(_FIELDS)}")
    if len(set(columns.values())) < len(columns):
        raise ValueError("two columns are to be read as the same field")
    return columns


class DataConfig(Section):
    """What the model is trained on."""

    path: str | list[str] = Field(
        "builtin:pydocs",
        description="A prepared .h5 file, or raw data: .json, .jsonl, .csv, .parquet, .arrow, .txt "
        "or .md, a folder of one of these kinds, a pattern such as data/*.jsonl, or a list of "
        "these. Raw data is prepared first, into data.cache. builtin:pydocs: questions about this "
        "Python's modules and functions, with their docstrings as answers; it needs no download.",
    )
    eval_path: str | list[str] | None = Field(
        None,
        description="Held-out data in the same forms, on which the loss is measured. Unset: none, "
        "unless eval_fraction is set. builtin:pydocs:heldout is the held-out part of pydocs.",
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="The share of data.path's documents that is held out, from 0 to 1, in place "
        "of eval_path; 0 trains on all. A hash of its content decides for each document: the same "
        "ones are held out in each run, on any number of ranks, and duplicates are on one side.",
    )
    columns: Annotated[
        dict[str, str], BeforeValidator(_with_values), AfterValidator(_fields_of_rows)
    ] = Field(
        {},
        description="Names in the data and the fields that they are read as, such as "
        "{problem: prompt, solution: completion}. question and answer, query and response, "
        "context and system_prompt are known without it.",
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        "refuse",
        description="refuse: the first row that cannot be used ends the preparation, with its "
        "place and the reason, since what is wrong with one row is often wrong with many; skip: "
        "such rows are left out and counted.",
    )
    seq_len: PositiveInt = Field(
        1024,
        description="Tokens per row; longer documents are cut there, and counted. 1024 holds most "
        "questions with their answers; the memory of activations grows in proportion.",
    )
    packing: bool = Field(
        True,
        description="Put several documents into one row, separated in attention and positions: the "
        "same gradient with less padding, and so faster. false: one document per row. Where a "
        "model cannot keep documents apart packing is switched off, with a line in the log.",
    )
    loss_on: Literal["answers", "all"] = Field(
        "answers",
        description="answers: only what the assistant writes is learned, since prompts are given "
        "when the model is used; all: the prompts too.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja file that replaces the tokenizer's chat template. Unset: the "
        "tokenizer's own; chats need one or the other.",
    )
    cache: str | None = Field(
        None,
        description="The folder for files prepared from raw data, which all nodes share; runs with "
        "the same folder prepare the same data once. Unset: data/ in the run directory.",
    )


def is_prepared(path: str | list[str] | None) -> bool:
    """Return whether a path names one file that ``prepare`` wrote."""
    return isinstance(path, str) and path.endswith((".h5", ".hdf5"))
