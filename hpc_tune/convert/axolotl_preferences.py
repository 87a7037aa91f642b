"""The rules for axolotl's training on preferences, rl: dpo and the like, which is trl's."""

from typing import Any

from hpc_tune.convert.outcomes import (
    OFF,
    Another,
    Automatic,
    ForeignConfig,
    Mapped,
    Outcome,
    Rule,
    Unsupported,
    each,
)
from hpc_tune.convert.preferences import (
    MEANS,
    OTHER_LOSS,
    SFT,
    TAKE_ANOTHER_LOSS,
    WHOLE_STEP,
    decided,
    lacking_here,
    number,
    sft_part,
    smoothing,
)

_KINDS = ("dpo", "ipo", "simpo", "orpo", "kto")
_UNBIASED = "robust"
# Lists of loss_type that are one objective of ours.
_DPO = (["sigmoid"], [_UNBIASED], ["sigmoid", "sft"], ["sft", "sigmoid"])
_BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is set counts


def objective(theirs: ForeignConfig) -> str:
    """Return the objective; SFT for none, and for what has no counterpart."""
    kind = str(theirs.get("rl", "")).lower()
    if kind == "dpo" and (losses := _losses(theirs)) not in _DPO:
        return "ipo" if losses == ["ipo"] else SFT
    return kind if kind in _KINDS else SFT


def other_loss(theirs: ForeignConfig) -> Another | None:
    """Return what a config of rl: dpo trains for, if that has no counterpart."""
    if str(theirs.get("rl", "")).lower() != "dpo":
        return None
    if objective(theirs) == SFT:
        return Another(("dpo_loss_type",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    return None


def preference_defaults(theirs: ForeignConfig) -> dict[str, Any]:
    """Return what is taken where a config says nothing."""
    ours = objective(theirs)
    if ours == SFT:
        return {}
    defaults = {} if any(theirs.get(key) is not None for key in _BETAS) else {"rl_beta": 0.1}
    return defaults | ({"simpo_gamma": 0.5, "cpo_alpha": 1.0} if ours == "simpo" else {})


def _losses(theirs: ForeignConfig) -> list[str]:
    value = theirs.get("dpo_loss_type", ["sigmoid"])
    return [str(name) for name in (value if isinstance(value, list) else [value])]


def _rl(value: Any, theirs: ForeignConfig) -> Outcome:
    ours = objective(theirs)
    if ours == SFT:
        return Automatic("off in their config")
    return Mapped({"tune.objective": ours}, WHOLE_STEP if ours == "kto" else "")


def _loss(value: Any, theirs: ForeignConfig) -> Outcome:
    losses = _losses(theirs)
    if objective(theirs) != SFT and "sft" in losses and theirs.get("dpo_loss_weights") is None:
        return Mapped({"tune.sft_weight": 1.0}, MEANS)
    return decided(objective, "tune.objective says it")(value, theirs)


def _weights(value: Any, theirs: ForeignConfig) -> Outcome:
    if objective(theirs) == SFT:
        return Automatic("training on preferences alone uses it")
    weights = dict(
        zip(_losses(theirs), value if isinstance(value, list) else [value], strict=False)
    )
    if len(weights) == 1 and list(weights.values()) == [1]:
        return Automatic("there is one loss, of weight 1")
    if weights.keys() == {"sigmoid", "sft"} and weights["sigmoid"] == 1:
        return Mapped({"tune.sft_weight": weights["sft"]}, MEANS)
    return Unsupported(
        "the loss of pairs has weight 1, and tune.sft_weight is that of the chosen answers' own: "
        "divide all weights, and multiply optim.lr",
        to_do=True,
    )


def _smoothing(value: Any, theirs: ForeignConfig) -> Outcome:
    ours = objective(theirs)
    if ours == "dpo" and _losses(theirs) == [_UNBIASED] and value not in OFF:
        return Mapped({"tune.label_smoothing": value})
    if ours not in ("dpo", SFT):
        return Automatic(f"{ours} does not use it there")
    return smoothing(objective)(value, theirs)


def _beta(key: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        first = next((one for one in _BETAS if theirs.get(one) is not None), key)
        if objective(theirs) != SFT and first != key:
            return Automatic(f"{first} goes before it")
        return number("tune.beta", objective)(value, theirs)

    return rule


PREFERENCES: dict[str, Rule] = {
    "rl": _rl,
    "trl.beta": _beta("trl.beta"),
    "rl_beta": _beta("rl_beta"),
    "dpo_beta": _beta("dpo_beta"),
    "orpo_alpha": _beta("orpo_alpha"),
    "dpo_loss_type": _loss,
    "dpo_loss_weights": _weights,
    "dpo_label_smoothing": _smoothing,
    "simpo_gamma": number("tune.gamma", objective),
    "rpo_alpha": sft_part(objective, MEANS),
    "cpo_alpha": sft_part(objective, MEANS),
    "kto_desirable_weight": number("tune.desirable_weight", objective),
    "kto_undesirable_weight": number("tune.undesirable_weight", objective),
    "dpo_use_weighting": lacking_here(objective, "all pairs count alike"),
    "dpo_norm_loss": lacking_here(objective, "of dpo log-probabilities are sums; ipo has means"),
    "dpo_generate_during_eval": lacking_here(
        objective, "accuracy, margin and log-probabilities are measured; generate comes afterwards"
    ),
    "max_prompt_len": decided(objective, "a prompt is cut only where the answers need its room"),
    "precompute_ref_log_probs": decided(objective, "the reference is computed once, and kept"),
    **each(
        decided(objective, "logits are never held whole, and padding is not computed"),
        "dpo_use_logits_to_keep dpo_use_liger_kernel dpo_padding_free",
    ),
    **each(
        Automatic("training on rewards or another loss alone uses it"),
        "reward_model process_reward_model trl.* vllm.* ebft.* center_rewards_coefficient "
        "num_labels",
    ),
}
