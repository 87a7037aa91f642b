"""What every part of the configuration is made of."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hpc_tune.units import parse_bytes, parse_seconds


class Part(BaseModel):
    """A part of the configuration: frozen, and without fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


def _number(value: Any, parse: Any) -> Any:
    return value if value is None else parse(value)


Bytes = Annotated[int, BeforeValidator(lambda v: _number(v, parse_bytes)), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(lambda v: _number(v, parse_seconds)), Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0)]
