"""The ``data`` section of the configuration: what the model is trained on."""

from typing import Annotated, Literal

from pydantic import Field

from hpc_tune.config.section import PositiveInt, Section
from hpc_tune.config.sources import Columns, HeldOutSource, LossOn, TrainedSource

# What is read from rows: answers to learn, pairs of a chosen and a rejected answer, or answers with
# a label that says whether they are desirable.
Form = Literal["answers", "pairs", "labels"]


class DataConfig(Section):
    """What the model is trained on."""

    path: str | list[str] | None = Field(
        "builtin:pydocs",
        description="A prepared .h5 file, or raw data: .json, .jsonl, .csv, .parquet, .arrow, .txt "
        "or .md, Megatron's .bin with its .idx, a folder of one of these kinds, a pattern such as "
        "data/*.jsonl, or a list of these. Raw data is prepared first, into data.cache. "
        "builtin:pydocs: questions about this Python's modules and functions, with their "
        "docstrings as answers; it needs no download. null: data.sources says it.",
    )
    sources: list[TrainedSource] | None = Field(
        None,
        description="Several sources in place of data.path, each with path and weight (its share "
        "of the learned tokens; they add up to 1) or, for all of them, epochs; and if need be "
        "name, max_epochs, limit, columns, chat_template and loss_on: see docs/mixtures.md.",
    )
    new_mixture: bool = Field(
        False,
        description="Let a run that resumes go on with other weights or further sources than it "
        "had: they hold from there on, and the change is recorded. false: that is refused.",
    )
    eval_path: str | list[str] | None = Field(
        None,
        description="Held-out data in the same forms, on which the loss is measured. Unset: none, "
        "unless eval_fraction is set. builtin:pydocs:heldout is the held-out part of pydocs.",
    )
    eval_sources: list[HeldOutSource] | None = Field(
        None,
        description="Several sources of held-out data in place of eval_path, each with path and if "
        "need be name, limit, columns, chat_template and loss_on, which default to those of the "
        "source in data.sources with its name. The loss of each is measured by name; "
        "their mean is the held-out loss that checkpoint.keep_best and train.stop_after_evals go "
        "by.",
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="The share of the documents of data.path, or of each source, that is held "
        "out, from 0 to 1, in place of eval_path; 0 trains on all. A hash of its content decides "
        "for each document: the same ones are held out in each run, on any number of ranks, and "
        "duplicates are on one side.",
    )
    columns: Columns = Field(
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
        description="Tokens per row; longer documents are cut there, and counted. Of pairs "
        "(tune.objective) both answers with their prompts share a row. 1024 holds most "
        "questions with their answers; the memory of activations grows in proportion.",
    )
    packing: bool = Field(
        True,
        description="Put several documents into one row, separated in attention and positions: the "
        "same gradient with less padding, and so faster. false: one document per row. Where a "
        "model cannot keep documents apart packing is switched off, with a line in the log.",
    )
    loss_on: LossOn = Field(
        "answers",
        description="answers: only what the assistant writes is learned, since prompts are given "
        "when the model is used; all: the prompts too.",
    )
    chat_template: str | None = Field(
        None,
        description="What replaces the tokenizer's chat template: a Jinja file, whose path ends in "
        ".jinja or has a slash, or a name such as chatml, llama3 or qwen3 (docs/data.md has all). "
        "Unset: the tokenizer's own; chats need one or the other.",
    )
    cache: str | None = Field(
        None,
        description="The folder for files prepared from raw data, which all nodes share; runs with "
        "the same folder prepare the same data once. Unset: data/ in the run directory.",
    )

    @property
    def has_held_out(self) -> bool:
        """Whether a held-out loss is measured."""
        return bool(self.eval_path or self.eval_fraction or self.eval_sources)

    def of_source(self, source: HeldOutSource) -> "DataConfig":
        """Return the section as it is for a source alone; not its held-out data."""
        own = {"columns": source.columns, "chat_template": source.chat_template}
        own["loss_on"] = source.loss_on
        said = {name: value for name, value in own.items() if value is not None}
        return self.model_copy(
            update={"path": source.path, "sources": None, "eval_sources": None, **said}
        )


def is_prepared(path: str | list[str] | None) -> bool:
    """Return whether a path names one file that ``prepare`` wrote."""
    return isinstance(path, str) and path.endswith((".h5", ".hdf5"))
