"""What every part of the configuration is made of."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from hpc_tune.units import parse_bytes, parse_memory, parse_seconds


class Section(BaseModel):
    """A part of the configuration: frozen, and without fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


Resume = Literal["same", "warn", "free"]
PathKind = Literal["file", "model", "dataset"]


@dataclass(frozen=True)
class SettingFacts:
    """What is to be known of a setting beside its type, default and description.

    resume: what another value does to a run that resumes. same: it is refused, since it would make
        a different run; warn: the run goes on and differs from an uninterrupted one; free: anything
        else, such as layout, micro-batch, paths and logging.
    path: its value may begin with ~ and hold $VARIABLES; of a model or a dataset it may also be a
        name in the hub's cache.
    unordered: a list whose order does not matter.
    replaces: the setting of default.yaml that says the same; the user's is meant.
    aliases: what peft, the Trainer of Hugging Face, trl, torchtune, axolotl and LLaMA-Factory call
        it, for the message about a name that is not known here.
    """

    resume: Resume
    path: PathKind | None = None
    unordered: bool = False
    replaces: str | None = None
    aliases: str = ""


def setting(
    default: Any,
    resume: Resume,
    description: str,
    *,
    path: PathKind | None = None,
    unordered: bool = False,
    replaces: str | None = None,
    aliases: str = "",
) -> Any:
    """Return the field of a section; see ``SettingFacts``."""
    facts = SettingFacts(resume, path, unordered, replaces, aliases)
    return Field(default, description=description, json_schema_extra=asdict(facts))


def facts_of(field: FieldInfo) -> SettingFacts:
    """Return the facts of a field that ``setting`` has made."""
    return SettingFacts(**field.json_schema_extra)  # type: ignore[arg-type]


def flatten(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a dumped configuration by their whole names, such as ``train.seed``."""
    return {f"{name}.{key}": v for name, fields in sections.items() for key, v in fields.items()}


def format_setting(value: Any) -> str:
    """Return the value of a setting as people read it; of a list of sources a line for each."""
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


def _parse_number(value: Any, parse: Any) -> Any:
    return value if value is None else parse(value)


def _check_profiled_steps(value: Any) -> Any:
    """Check STEP:COUNT. YAML 1.1 has read 5:2 as a number of base 60."""
    text = ":".join(map(str, divmod(value, 60))) if type(value) is int else value
    if value is not None and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", str(text)):
        raise ValueError(f"{value!r} is not STEP:COUNT, two numbers from 1 on, such as 10:2")
    return text


Bytes = Annotated[int, BeforeValidator(lambda v: _parse_number(v, parse_bytes)), Field(gt=0)]
Memory = Annotated[int, BeforeValidator(lambda v: _parse_number(v, parse_memory)), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(lambda v: _parse_number(v, parse_seconds)), Field(gt=0)]
Steps = Annotated[str, BeforeValidator(_check_profiled_steps)]
PositiveInt = Annotated[int, Field(gt=0)]
