"""The ``optim`` section of the configuration: AdamW and its learning rate."""

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
        "tune.method=full, which changes what the model has learned before. A higher one learns "
        "faster until it diverges.",
    )
    reference_batch: PositiveInt | None = Field(
        None,
        description="The batch.global_size for which lr was found: with another one lr is scaled "
        "by batch_scaling. Unset: lr is used as it is.",
    )
    batch_scaling: Literal["sqrt", "linear"] = Field(
        "sqrt",
        description="How lr follows batch.global_size / reference_batch. sqrt: its square root, "
        "which suits AdamW (arXiv:2205.10287); linear: the ratio itself, which was found for SGD "
        "(arXiv:1706.02677).",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine",
        description="How the learning rate falls after warmup, over all steps of the run. cosine "
        "and linear end at min_lr_ratio; constant suits a run whose length is not known yet.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Optimizer steps over which the learning rate rises from 0. Unset: "
        "warmup_ratio decides.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Warmup as a share of all steps of the run, in place of warmup_steps. Both "
        "unset: 0.03, since AdamW's averages are least certain at first; a run of less than 34 "
        "steps has no warmup then.",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1,
        description="Where linear and cosine end, as a share of lr. With 0.1 the last steps still "
        "learn; with 0 the weights come to rest.",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9,
        description="The decay of AdamW's first moment, the average of gradients, in each step. "
        "0.9 as published: it averages over about 10 steps.",
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999,
        description="The decay of AdamW's second moment, the average of squared gradients, in "
        "each step. 0.999 as published: it averages over about 1000 steps; 0.95 follows changes "
        "sooner.",
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        1e-8,
        description="Added to the square root of the second moment, so that the division by it "
        "stays finite. 1e-8 as published; more damps the updates of weights with small gradients.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Decoupled weight decay: each step shrinks trained matrices by lr * "
        "weight_decay. 0 for short fine-tuning; 0.01 to 0.1 counter overfitting in long runs.",
    )
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        1.0,
        description="The global L2 norm to which a larger gradient is scaled down. 1.0 is the "
        "common choice and takes the force out of single bad batches; 0 never clips.",
    )

    @property
    def peak_lr(self) -> float:
        """``lr`` as a number: ``load_config`` has put one in the place of auto."""
        return float(self.lr)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the warmup steps of a run of ``total_steps``."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)  # as transformers rounds
        return int(_WARMUP_RATIO * total_steps)
