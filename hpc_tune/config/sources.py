"""The sources of a mixture: what each is, how it is read, and how much of it is learned."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_tune.config.section import PositiveInt, Section

LossOn = Literal["answers", "all"]
_FIELDS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion",
    "response", "text", "system", "history", "tools", "weight", "loss_scale", "train", "loss",
    "loss_mask", "chosen", "rejected", "label",
)  # fmt: skip
_SUM_TOLERANCE = 1e-6  # of weights such as 0.333333 three times


def _require_values(columns: Any) -> Any:
    """Refuse ``{NAME:prompt}``, which YAML reads as one name without a value."""
    if isinstance(columns, dict) and (bare := [k for k, v in columns.items() if v is None]):
        raise ValueError(f"{bare[0]} has no value; put a space after the colon: {{NAME: prompt}}")
    return columns


def _check_fields(columns: dict[str, str]) -> dict[str, str]:
    for name, field in columns.items():
        if field not in _FIELDS:
            raise ValueError(f"{name}: {field} is not one of {', '.join(_FIELDS)}")
    if len(set(columns.values())) < len(columns):
        raise ValueError("two columns are to be read as the same field")
    return columns


Columns = Annotated[dict[str, str], BeforeValidator(_require_values), AfterValidator(_check_fields)]


class HeldOutSource(Section):
    """A named source of held-out data, and how it is read."""

    path: str | list[str] = Field(description="As data.path, a prepared .h5 file included.")
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = Field(
        None,
        description="What metrics and reports call it: letters, digits, _, - and dots. Unset: the "
        "name of the file or folder.",
    )
    limit: PositiveInt | None = Field(
        None,
        description="Documents of it that are used, drawn by a hash of their numbers: the same "
        "ones in each pass, each run and on any number of ranks. Unset: all.",
    )
    columns: Columns | None = Field(None, description="Unset: data.columns.")
    chat_template: str | None = Field(None, description="Unset: data.chat_template.")
    loss_on: LossOn | None = Field(None, description="Unset: data.loss_on.")

    @property
    def label(self) -> str:
        """Its name, given or by its file."""
        first = self.path if isinstance(self.path, str) else [*self.path, "data"][0]
        stem = Path(first).name.split(".")[0]
        return self.name or re.sub(r"[^\w.-]+", "-", stem).strip("-") or "data"


class TrainedSource(HeldOutSource):
    """A source of a mixture: exactly one of ``weight`` and ``epochs``, the same one in all."""

    weight: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Its share of the learned tokens, not of documents or rows; those of all "
        "sources add up to 1.",
    )
    epochs: PositiveInt | None = Field(
        None,
        description="How often each of its documents comes in one epoch of the mixture.",
    )
    max_epochs: Annotated[float, Field(gt=0)] = Field(
        4.0,
        description="A run that would come to more passes over this source is refused: a small "
        "source with a large weight is learned by heart. More than one pass is a warning.",
    )


def list_names(sources: Sequence[HeldOutSource]) -> list[str]:
    """Return what the sources are called."""
    return [source.label for source in sources]


def check_sources(sources: Sequence[TrainedSource]) -> Iterator[str]:
    """Yield what is wrong with the sources of a mixture together."""
    if not sources:
        yield "data.sources is an empty list; name at least one source, or data.path"
        return
    yield from check_names("data.sources", sources)
    names = list_names(sources)
    has = [_describe_amount(source) for source in sources]
    if set(has) not in ({"weight"}, {"epochs"}):
        said = ", ".join(f"{name} has {what}" for name, what in zip(names, has, strict=True))
        yield (
            f"data.sources: {said}; give weight (its share of the learned tokens) to all of them, "
            "or epochs (how often each of its documents comes) to all of them"
        )
        return
    weights = [source.weight or 0.0 for source in sources]
    if has[0] == "weight" and abs((total := sum(weights)) - 1) > _SUM_TOLERANCE:
        normalised = ", ".join(f"{n} {w / total:.4g}" for n, w in zip(names, weights, strict=True))
        yield (
            f"data.sources: the weights add up to {total:g}, and as shares of the learned tokens "
            f"they must add up to 1; divided by their sum they are {normalised}"
        )
    for source in sources:
        if source.epochs is not None and source.epochs > source.max_epochs:
            yield (
                f"data.sources: {source.label} has epochs={source.epochs} and max_epochs="
                f"{source.max_epochs:g}; lower epochs, or raise its max_epochs"
            )


def _describe_amount(source: TrainedSource) -> str:
    if source.weight is not None and source.epochs is not None:
        return "both weight and epochs"
    return "weight" if source.weight is not None else "epochs" if source.epochs else "neither"


def check_names(setting: str, sources: Sequence[HeldOutSource]) -> Iterator[str]:
    """Yield what is wrong with the names of sources: metrics are told apart by them."""
    names = list_names(sources)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{setting}: {names.count(name)} sources are called {name}; give each another name"
    for source in sources:
        if source.path == []:
            yield f"{setting}: {source.label} has an empty list as path; name at least one file"
