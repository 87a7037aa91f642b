"""The ``optim`` section of the configuration: AdamW and its learning rate."""

import math
from typing import Annotated, Literal

from pydantic import Field

from hpc_tune.config.section import PositiveInt, Section, setting
from hpc_tune.config.tune import TuneConfig

# What optim.lr=auto means: (for adapters, for all weights), by the kind of objective.
_AUTO_LR = {"answers": (2e-4, 1e-5), "preferences": (1e-5, 1e-6)}
_WARMUP_RATIO, _DECAY_RATIO = 0.03, 0.1


def auto_lr(tune: TuneConfig) -> float:
    """Return the learning rate that optim.lr=auto stands for."""
    of_adapters, of_all = _AUTO_LR["answers" if tune.objective == "sft" else "preferences"]
    return of_all if tune.method == "full" else of_adapters


class OptimConfig(Section):
    """AdamW (arXiv:1711.05101) and its learning rate."""

    name: Literal["adamw", "adamw_8bit"] = setting(
        "adamw",
        "warn",
        "adamw: AdamW with two moments per trained value, in tune.param_dtype. "
        "adamw_8bit: the moments in 8 bits with a scale for each 256 values (arXiv:2110.02861), "
        "as in torchao, except for parameters of less than 4,096 values; 2 bytes per trained "
        "value instead of 8, for tune.method=full where that does not fit. Losses differ a "
        "little. It needs pip install 'hpc_tune[adamw8bit]'.",
        aliases="optimizer",
    )
    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = setting(
        "auto",
        "warn",
        "The peak learning rate. auto: 2e-4 for adapters, and 1e-5 with "
        "tune.method=full, which changes what the model has learned before; with a tune.objective "
        "on preferences 1e-5 and 1e-6, as in trl for all weights. A higher rate learns faster "
        "until it diverges.",
        aliases="learning_rate",
    )
    reference_batch: PositiveInt | None = setting(
        None,
        "warn",
        "The batch.global_size that lr was tuned for: with another batch size, lr is scaled "
        "as batch_scaling says. Unset: lr is used as it is.",
    )
    batch_scaling: Literal["sqrt", "linear"] = setting(
        "sqrt",
        "warn",
        "How lr scales with batch.global_size / reference_batch. sqrt: with its square root, "
        "which suits AdamW (arXiv:2205.10287); linear: with the ratio itself, a rule for SGD "
        "(arXiv:1706.02677).",
    )
    lora_b_ratio: Annotated[float, Field(ge=1)] = setting(
        1.0,
        "warn",
        "The learning rate of adapters' B matrices as a multiple of lr, and of DoRA's "
        "magnitudes as in peft (LoRA+, arXiv:2402.12354). With 16, the paper's choice, set lr to "
        "at most half of what suits 1; hard tasks gain most. 1: one rate for all. The logged rate "
        "is lr.",
        aliases="loraplus_lr_ratio",
    )
    schedule: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = setting(
        "cosine",
        "warn",
        "How the learning rate falls after warmup, over all steps of the run. cosine "
        "and linear end at min_lr_ratio; cosine_with_restarts does so several times, each time "
        "from lr (arXiv:1608.03983); wsd (warmup, stable, decay; arXiv:2404.06395) stays at lr "
        "and falls linearly over the last decay_ratio of the steps, so that a run that has not "
        "begun to decay can be made longer; constant suits a run whose length is not known yet.",
        aliases="lr_scheduler_type lr_scheduler",
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = setting(
        None,
        "warn",
        "The share of all steps over which schedule=wsd falls. Unset: 0.1, as "
        "published; more gives the low rates more steps.",
    )
    restarts: PositiveInt | None = setting(
        None,
        "warn",
        "How many times schedule=cosine_with_restarts restarts at lr. Unset: 1, which is "
        "two cosines; each restart undoes some of what the low rates had settled.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = setting(
        None,
        "warn",
        "Optimizer steps over which the learning rate rises from 0. Unset: warmup_ratio decides.",
        aliases="warmup num_warmup_steps",
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = setting(
        None,
        "warn",
        "Warmup as a share of all steps of the run, in place of warmup_steps. Both "
        "unset: 0.03, since AdamW's averages are least certain at first; a run of fewer than 34 "
        "steps then has no warmup.",
        replaces="optim.warmup_steps",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = setting(
        0.1,
        "warn",
        "The final rate of a decaying schedule, as a share of lr. With 0.1 the last steps "
        "still learn; with 0 the weights come to rest.",
        aliases="cosine_min_lr_ratio min_lr min_lr_rate",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.9,
        "warn",
        "The decay of AdamW's first moment, the average of gradients, in each step. "
        "0.9 as published: it averages over about 10 steps.",
        aliases="adam_beta1",
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.999,
        "warn",
        "The decay of AdamW's second moment, the average of squared gradients, in "
        "each step. 0.999 as published: it averages over about 1000 steps; 0.95 follows changes "
        "sooner.",
        aliases="adam_beta2",
    )
    eps: Annotated[float, Field(gt=0)] = setting(
        1e-8,
        "warn",
        "Added to the square root of the second moment, so that the division by it "
        "stays finite. 1e-8 as published; more damps the updates of weights with small gradients.",
        aliases="adam_epsilon",
    )
    weight_decay: Annotated[float, Field(ge=0)] = setting(
        0.0,
        "warn",
        "Decoupled weight decay: each step shrinks trained matrices by lr * "
        "weight_decay. 0 for short fine-tuning; 0.01 to 0.1 counter overfitting in long runs.",
    )
    clip_norm: Annotated[float, Field(ge=0)] = setting(
        1.0,
        "warn",
        "The global L2 norm to which a larger gradient is scaled down. 1.0 is the "
        "common choice and limits the effect of single bad batches; 0 never clips.",
        aliases="max_grad_norm clip_grad_norm gradient_clipping",
    )

    @property
    def is_8bit(self) -> bool:
        """Whether the moments are kept in 8 bits."""
        return self.name == "adamw_8bit"

    @property
    def peak_lr(self) -> float:
        """``lr`` as a number: ``load_config`` has replaced auto by one."""
        return float(self.lr)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the warmup steps of a run of ``total_steps``."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)  # as transformers rounds
        return int(_WARMUP_RATIO * total_steps)

    def num_decay_steps(self, total_steps: int) -> int:
        """Return the steps over which schedule=wsd decays: at most all steps after the warmup."""
        decay_steps = math.ceil((self.decay_ratio or _DECAY_RATIO) * total_steps)
        return min(decay_steps, total_steps - 1 - self.num_warmup_steps(total_steps))
