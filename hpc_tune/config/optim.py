"""the ``optim`` section of the configuration: AdamW and its learning rate."""

import math
from typing import Annotated, Literal

from pydantic import Field

from hpc_tune.config.section import PositiveInt, Section

LR_OF_ADAPTERS, LR_OF_ALL_WEIGHTS = 2e-4, 1e-5  # optim.lr=auto
_WARMUP_RATIO = 0.03


class OptimConfig(Section):
    """AdamW (arXiv:1711.05101) and its learning rate."""

    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="The peak learning rate. auto: 2e-4 for adapters, and 1e-5 with "
        "tune.method=full, which changes what the model has learned before.",
    )
    reference_batch: PositiveInt | None = Field(
        None,
        description="The batch.global_size that lr was found for: with another one lr is scaled "
        "by batch_scaling. Unset: lr is used as it is.",
    )
    batch_scaling: Literal["sqrt", "linear"] = Field(
        "sqrt",
        description="How lr follows batch.global_size / reference_batch: its square root, which "
        "suits AdamW (arXiv:2205.10287), or the ratio itself (arXiv:1706.02677).",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine",
        description="How the learning rate falls after the warm-up, over all steps of the run.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Steps over which the learning rate rises from 0; unset: as many as "
        "warmup_ratio says.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="The same as a share of all steps of the run, in place of warmup_steps. Both "
        "unset: 0.03, since AdamW is least certain of its first steps; a run of less than 34 steps "
        "has no warm-up then.",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Where linear and cosine end, as a share of lr."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Decay of the first moment."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="Decay of the second moment."
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        1e-8, description="Keeps the division by the second moment finite."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Decoupled weight decay on trained matrices."
    )
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="The gradient is scaled down to this global L2 norm; 0 leaves it as it is."
    )

    @property
    def peak_lr(self) -> float:
        """``lr`` as a number: ``load_config`` has put one in the place of auto."""
        return float(self.lr)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of warm-up in a run of ``total_steps``."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)  # as transformers rounds
        return int(_WARMUP_RATIO * total_steps)
