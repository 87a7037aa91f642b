"""The building blocks of every section of the configuration."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from hpc_tune.units import parse_bytes, parse_memory, parse_seconds


class Section(BaseModel):
    """A part of the configuration: frozen, and it refuses unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


ResumeRule = Literal["same", "warn", "free"]
PathKind = Literal["file", "model", "dataset"]


@dataclass(frozen=True)
class SettingMetadata:
    """The facts about a setting besides its type, default and description.

    resume: how a resumed run handles a changed value. same: refused, since it would make a
        different run; warn: the run continues, but differs from an uninterrupted one; free:
        allowed, as for layout, micro-batch, paths and logging.
    path: the value may begin with ~ and contain $VARIABLES; for a model or a dataset it may also be
        a name in the hub's cache.
    unordered: a list whose order does not matter.
    replaces: a setting of default.yaml with the same purpose, unset if the user gives this one.
    aliases: its names in peft, the Hugging Face Trainer, trl, torchtune, axolotl and LLaMA-Factory,
        for the message about an unknown name.
    """

    resume: ResumeRule
    path: PathKind | None = None
    unordered: bool = False
    replaces: str | None = None
    aliases: str = ""


def setting(
    default: Any,
    resume: ResumeRule,
    description: str,
    *,
    path: PathKind | None = None,
    unordered: bool = False,
    replaces: str | None = None,
    aliases: str = "",
) -> Any:
    """Return the field of a section; see ``SettingMetadata``."""
    metadata = SettingMetadata(resume, path, unordered, replaces, aliases)
    return Field(default, description=description, json_schema_extra=asdict(metadata))


def field_metadata(field: FieldInfo) -> SettingMetadata:
    """Return the facts of a field that ``setting`` made."""
    return SettingMetadata(**field.json_schema_extra)  # type: ignore[arg-type]


def flatten_settings(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a dumped configuration by full names such as ``train.seed``."""
    return {f"{name}.{key}": v for name, fields in sections.items() for key, v in fields.items()}


def format_setting(value: Any) -> str:
    """Return the value of a setting for people to read; a list of sources has one line each."""
    if value is None or repr(value) == "PydanticUndefined":
        return "unset"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "\n".join(map(format_setting, value))
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {format_setting(item)}" for key, item in value.items() if item is not None
        )
    return (
        ", ".join(map(format_setting, value)) if isinstance(value, list) and value else str(value)
    )


def _parse_unless_none(value: Any, parse: Any) -> Any:
    return value if value is None else parse(value)


def _check_profiled_steps(value: Any) -> Any:
    """Check STEP:COUNT. YAML 1.1 parses 5:2 as a base-60 number; undo that."""
    text = ":".join(map(str, divmod(value, 60))) if type(value) is int else value
    if value is not None and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", str(text)):
        raise ValueError(f"{value!r} is not STEP:COUNT, two numbers from 1 on, such as 10:2")
    return text


Bytes = Annotated[int, BeforeValidator(lambda v: _parse_unless_none(v, parse_bytes)), Field(gt=0)]
MemoryBytes = Annotated[
    int, BeforeValidator(lambda v: _parse_unless_none(v, parse_memory)), Field(gt=0)
]
Seconds = Annotated[
    float, BeforeValidator(lambda v: _parse_unless_none(v, parse_seconds)), Field(gt=0)
]
ProfiledSteps = Annotated[str, BeforeValidator(_check_profiled_steps)]
PositiveInt = Annotated[int, Field(gt=0)]
