"""The ``tune`` section of the configuration: which weights are trained, and on what."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hpc_tune.config.section import PositiveInt, Section, setting

# Default coefficients of the objectives; simpo has a default beta of its own.
_BETA, _SIMPO_BETA, _SIMPO_GAMMA = 0.1, 2.0, 1.0
_OBJECTIVES_OF_COEFFICIENT = {
    "beta": ("dpo", "ipo", "simpo", "orpo", "kto"),
    "gamma": ("simpo",),
    "sft_weight": ("dpo", "ipo", "simpo"),
    "label_smoothing": ("dpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def _check_patterns(patterns: dict[str, Any]) -> dict[str, Any]:
    """Check that each key is a regular expression, alone and after a path; values are positive."""
    for key, value in patterns.items():
        if not value > 0:
            raise ValueError(f"{key} has the value {value}, expected more than 0")
        try:
            re.compile(key)
            re.compile(_path_end_pattern(key))  # (?i) may not follow other text, (?i:...) may
        except re.error as error:
            raise ValueError(
                f"{key} is not a regular expression for the end of a path: {error}"
            ) from None
    return patterns


def match_patterns(patterns: Mapping[str, float], layer_path: str) -> list[str]:
    """Return the patterns that match a layer's whole path or its end after a dot, as in peft."""
    return [key for key in patterns if re.match(_path_end_pattern(key), layer_path)]


def _path_end_pattern(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


class TuneConfig(Section):
    """Which weights are trained, and for what."""

    method: Literal["lora", "dora", "qlora", "full"] = setting(
        "lora",
        "same",
        "lora: low-rank adapters on a frozen base (arXiv:2106.09685), with gradients "
        "and optimizer state for the adapters alone; dora: lora plus a learned magnitude "
        "(arXiv:2402.09353), slower and often a little better; qlora: lora on a base whose blocks "
        "have their linear layers in 4 bits (NF4, arXiv:2305.14314), which takes an eighth of "
        "fp32's memory, is slower and needs pip install 'hpc_tune[qlora]'; full: all weights, "
        "which takes the most memory.",
        aliases="finetuning_type adapter use_dora peft_use_dora load_in_4bit quantization_bit "
        "use_peft train_type quantize_base",
    )
    objective: Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto"] = setting(
        "sft",
        "same",
        "What is learned. sft: to write the answers in the data. The others learn "
        "from preferences, pairs of a chosen and a rejected answer: dpo (arXiv:2305.18290) and "
        "ipo (arXiv:2310.12036) compare with the model as it was at the start, whose "
        "log-probabilities are computed once; simpo (arXiv:2405.14734) and orpo "
        "(arXiv:2403.07691) do not, and orpo adds sft; kto (arXiv:2402.01306) learns from single "
        "answers, each labeled good or not.",
        aliases="stage rl rl_type pref_loss loss_type rlhf_type",
    )
    beta: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "same",
        "How far an objective on preferences lets the model drift: the smaller, the "
        "further. Unset: 0.1, or 2 with simpo, which takes means over tokens.",
        aliases="pref_beta rl_beta dpo_beta kto_beta",
    )
    gamma: Annotated[float, Field(ge=0)] | None = setting(
        None,
        "same",
        "The margin by which simpo wants the chosen answer's reward to be higher. "
        "Unset: 1, half of the default beta.",
        aliases="simpo_gamma cpo_gamma",
    )
    sft_weight: Annotated[float, Field(ge=0)] | None = setting(
        None,
        "same",
        "The factor of the chosen answer's mean loss per token, which is added to the loss of "
        "each pair (arXiv:2404.19733), to keep chosen answers from becoming less likely. Unset: "
        "0; orpo always includes it.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = setting(
        None,
        "same",
        "The assumed share of pairs whose answers are swapped; it makes the loss of dpo and "
        "simpo unbiased (arXiv:2403.00409). Unset: 0.",
    )
    desirable_weight: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "same",
        "The weight of good answers in kto. Times the number of good answers, it should be 1 to "
        "1.33 times undesirable_weight times the number of the others. Unset: 1.",
    )
    undesirable_weight: Annotated[float, Field(gt=0)] | None = setting(
        None, "same", "The weight of the answers in kto that are not good. Unset: 1."
    )

    rank: PositiveInt = setting(
        16,
        "same",
        "The rank of the adapters. 16 is a common choice; a higher rank can learn "
        "more, and the adapters' memory and flops grow in proportion.",
        aliases="r lora_r lora_rank",
    )
    alpha: Annotated[float, Field(gt=0)] = setting(
        32.0,
        "same",
        "The adapter's output is scaled by alpha / rank. Twice the rank is the common "
        "choice; more acts like a higher learning rate.",
        aliases="lora_alpha",
    )
    rank_pattern: Annotated[dict[str, int], AfterValidator(_check_patterns)] = setting(
        {},
        "same",
        "Ranks of some layers, as in peft's rank_pattern: regular expressions for the end "
        "of a layer's path, and the rank in place of tune.rank, such as {'layers.[01].*': 8}. At "
        "most one pattern may match a layer.",
    )
    alpha_pattern: Annotated[dict[str, float], AfterValidator(_check_patterns)] = setting(
        {},
        "same",
        "Like rank_pattern, for alpha: a layer of another rank keeps tune.alpha unless a "
        "pattern here matches it.",
    )
    expert_rank: PositiveInt | None = setting(
        None,
        "same",
        "The rank of the adapter of each routed expert of a mixture, if tune.targets names "
        "experts; it has the same scale as the other adapters. Unset: tune.rank / experts per "
        "token.",
    )
    rslora: bool = setting(
        False,
        "same",
        "Scale the adapter's output by alpha / sqrt(rank) in place of alpha / rank "
        "(rank-stabilized LoRA, arXiv:2312.03732): high ranks then learn as fast as low ones. At "
        "the same alpha the output is sqrt(rank) times as large, so start with a lower alpha or "
        "optim.lr.",
        aliases="use_rslora peft_use_rslora",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.0,
        "same",
        "The probability with which each input of an adapter is set to zero in "
        "training. 0 is fastest and right for one or two epochs; more counters overfitting.",
        aliases="lora_dropout",
    )
    neftune_alpha: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "warn",
        "Noise on the embeddings in training, uniform in plus or minus neftune_alpha / "
        "sqrt(tokens of the document x values of an embedding) (NEFTune, arXiv:2310.05914): chat "
        "models then give longer answers, and held-out losses may rise. The paper uses "
        "5 to 15. Unset: none.",
        aliases="neftune_noise_alpha noisy_embedding_alpha",
    )
    router_aux_loss: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "warn",
        "The factor of a load-balancing loss that is added to the objective, so that the "
        "routers of a mixture of experts spread tokens evenly. Per layer and row, over the T "
        "tokens that are not padding, it is E / (k T^2) x the sum over experts of (number of the "
        "expert's tokens x its summed probabilities), which is 1 if the load is even; rows are "
        "weighted by their tokens, layers are added up. 0.001 is common. It does not depend on "
        "ranks or micro-batches, unlike the loss in transformers, which combines all layers and "
        "the rows of a micro-batch. Adapters on attention learn from it even if routers are "
        "frozen. Unset: none.",
    )
    router_z_loss: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "warn",
        "The factor of the mean squared log-sum-exp of a router's logits in the loss "
        "(arXiv:2202.08906, equation 5), over tokens that are not padding, added up over layers: "
        "it keeps logits small. 0.001 is common. Unset: none.",
    )
    targets: list[str] | Literal["all-linear"] = setting(
        "all-linear",
        "same",
        "Names of the linear layers that get adapters, such as [q_proj, v_proj]. "
        "all-linear: every one but the output head; fewer take less memory and learn less. In a "
        "mixture of experts it leaves out routed experts and routers, which can be added: "
        "[all-linear, experts]. A named layer whose adapters get no gradient, such as Jamba's "
        "dt_proj, is refused; one that all-linear includes is reported. The same holds for "
        "Mamba's out_proj, whose weight the fused kernels use directly.",
        unordered=True,
        aliases="target_modules lora_target lora_target_modules lora_target_linear "
        "lora_attn_modules apply_lora_to_mlp apply_lora_to_output target_parameters",
    )
    modules_to_save: list[str] = setting(
        [],
        "same",
        "Names of modules that are trained in full beside the adapters and saved with "
        "them, as in peft's modules_to_save, such as [embed_tokens, lm_head]: embeddings, the "
        "output head and norms. A name means every module whose path ends with it. These modules "
        "take as much memory as with tune.method=full, on each rank, split only by "
        "parallel.tensor and pipeline.",
        unordered=True,
    )
    trainable_tokens: list[int | str] = setting(
        [],
        "same",
        "Tokens, by text or number, whose rows of the embedding are trained beside the "
        "adapters, as in peft's trainable_token_indices: tokens that were added, such as "
        "['<tool>', '</tool>']. If the output head is tied to the embedding, its rows are trained "
        "too. That takes 16 bytes per value of these rows, not of the whole embedding.",
        unordered=True,
        aliases="trainable_token_indices",
    )
    init_from: str | None = setting(
        None,
        "free",
        "A folder with an adapter that peft or the Hugging Face Trainer saved, of the "
        "same rank, alpha and targets, to start from. Unset: a new adapter, which does not change "
        "the model's output at first.",
        path="model",
        aliases="adapter_name_or_path lora_model_dir adapter_path adapter_checkpoint",
    )
    base_dtype: Literal["fp8"] | None = setting(
        None,
        "warn",
        "fp8: the frozen weights of the blocks' linear layers and routed experts are "
        "kept in float8 (e4m3) with a scale for each row, quantized while they are read: half of "
        "bf16's memory and messages. GPUs with float8 matmuls (NVIDIA's H100, L40, RTX 40 or "
        "later, AMD's MI350) multiply in float8, inputs and gradients too, about twice as fast; "
        "elsewhere weights are dequantized for each matmul. Unset: model.dtype, or 4 bits with "
        "tune.method=qlora.",
    )
    param_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "warn",
        "The dtype of trained weights, their gradients and optimizer state. bf16 takes "
        "half the memory and loses small updates in rounding: use it if fp32 does not fit.",
        aliases="pure_bf16",
    )

    @property
    def base_format(self) -> str:
        """The packed format of the blocks' frozen weights, in words; "" for model.dtype."""
        return "4 bits" if self.method == "qlora" else "float8" if self.base_dtype else ""

    @property
    def router_loss_factors(self) -> dict[str, float]:
        """The factors of the router losses that are set, by the setting's name."""
        factors = {"router_aux_loss": self.router_aux_loss, "router_z_loss": self.router_z_loss}
        return {f"tune.{name}": value for name, value in factors.items() if value is not None}

    @property
    def form(self) -> Literal["answers", "pairs", "labels"]:
        """What rows of data contain for this objective."""
        match self.objective:
            case "sft":
                return "answers"
            case "kto":
                return "labels"
            case _:
                return "pairs"

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the model with what it was at the start."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def unused_coefficients(self) -> dict[str, float]:
        """The coefficients that are set but not used by this objective."""
        return {
            name: value
            for name, users in _OBJECTIVES_OF_COEFFICIENT.items()
            if (value := getattr(self, name)) is not None and self.objective not in users
        }

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients that the objective uses, with defaults filled in."""
        is_simpo = self.objective == "simpo"
        defaults = {
            "beta": _SIMPO_BETA if is_simpo else _BETA,
            "gamma": _SIMPO_GAMMA,
            "sft_weight": 0.0,
            "label_smoothing": 0.0,
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
        }
        return {
            name: defaults[name] if (value := getattr(self, name)) is None else float(value)
            for name, users in _OBJECTIVES_OF_COEFFICIENT.items()
            if self.objective in users
        }

    def adapter_scale(self, layer_path: str) -> float:
        """Return the scale of the output of the adapter on the layer with this path."""
        ranks = [self.rank_pattern[key] for key in match_patterns(self.rank_pattern, layer_path)]
        alphas = [self.alpha_pattern[key] for key in match_patterns(self.alpha_pattern, layer_path)]
        rank, alpha = [*ranks, self.rank][0], [*alphas, self.alpha][0]
        return alpha / (math.sqrt(rank) if self.rslora else rank)
