"""The rules for axolotl's training on preferences, rl: dpo and the like, which is trl's."""

from typing import Any

from hpc_tune.convert.outcomes import (
    OFF,
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Rule,
    Unsupported,
    WrongTask,
    each,
)
from hpc_tune.convert.preferences import (
    MEAN_REMARK,
    OTHER_LOSS,
    SFT,
    TAKE_ANOTHER_LOSS,
    WHOLE_STEP_REMARK,
    ignored_rule,
    lacking_rule,
    number_rule,
    sft_weight_rule,
    smoothing_rule,
)

_KINDS = ("dpo", "ipo", "simpo", "orpo", "kto")
_UNBIASED = "robust"
# Lists of loss_type that are one objective of ours.
_DPO = (["sigmoid"], [_UNBIASED], ["sigmoid", "sft"], ["sft", "sigmoid"])
_BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is set counts


def find_axolotl_objective(theirs: ForeignConfig) -> str:
    """Return the objective; SFT for none, and for what has no counterpart."""
    kind = str(theirs.get("rl", "")).lower()
    if kind == "dpo" and (losses := _axolotl_losses(theirs)) not in _DPO:
        return "ipo" if losses == ["ipo"] else SFT
    return kind if kind in _KINDS else SFT


def find_other_axolotl_loss(theirs: ForeignConfig) -> WrongTask | None:
    """Return what a config of rl: dpo trains for, if that has no counterpart."""
    if str(theirs.get("rl", "")).lower() != "dpo":
        return None
    if find_axolotl_objective(theirs) == SFT:
        return WrongTask(("dpo_loss_type",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    return None


def axolotl_preference_defaults(theirs: ForeignConfig) -> dict[str, Any]:
    """Return what is taken where a config says nothing."""
    ours = find_axolotl_objective(theirs)
    if ours == SFT:
        return {}
    defaults = {} if any(theirs.get(key) is not None for key in _BETAS) else {"rl_beta": 0.1}
    return defaults | ({"simpo_gamma": 0.5, "cpo_alpha": 1.0} if ours == "simpo" else {})


def _axolotl_losses(theirs: ForeignConfig) -> list[str]:
    value = theirs.get("dpo_loss_type", ["sigmoid"])
    return [str(name) for name in (value if isinstance(value, list) else [value])]


def _rl(value: Any, theirs: ForeignConfig) -> Outcome:
    ours = find_axolotl_objective(theirs)
    if ours == SFT:
        return Ignored("off in their config")
    return Mapped({"tune.objective": ours}, WHOLE_STEP_REMARK if ours == "kto" else "")


def _convert_rl_loss(value: Any, theirs: ForeignConfig) -> Outcome:
    losses = _axolotl_losses(theirs)
    if (
        find_axolotl_objective(theirs) != SFT
        and "sft" in losses
        and theirs.get("dpo_loss_weights") is None
    ):
        return Mapped({"tune.sft_weight": 1.0}, MEAN_REMARK)
    return ignored_rule(find_axolotl_objective, "tune.objective says it")(value, theirs)


def _weights(value: Any, theirs: ForeignConfig) -> Outcome:
    if find_axolotl_objective(theirs) == SFT:
        return Ignored("training on preferences alone uses it")
    weights = dict(
        zip(_axolotl_losses(theirs), value if isinstance(value, list) else [value], strict=False)
    )
    if len(weights) == 1 and list(weights.values()) == [1]:
        return Ignored("there is one loss, of weight 1")
    if weights.keys() == {"sigmoid", "sft"} and weights["sigmoid"] == 1:
        return Mapped({"tune.sft_weight": weights["sft"]}, MEAN_REMARK)
    return Unsupported(
        "the loss of pairs has weight 1, and tune.sft_weight is that of the chosen answers' own: "
        "divide all weights, and multiply optim.lr",
        to_do=True,
    )


def _smoothing(value: Any, theirs: ForeignConfig) -> Outcome:
    ours = find_axolotl_objective(theirs)
    if ours == "dpo" and _axolotl_losses(theirs) == [_UNBIASED] and value not in OFF:
        return Mapped({"tune.label_smoothing": value})
    if ours not in ("dpo", SFT):
        return Ignored(f"{ours} does not use it there")
    return smoothing_rule(find_axolotl_objective)(value, theirs)


def _beta(key: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        first = next((one for one in _BETAS if theirs.get(one) is not None), key)
        if find_axolotl_objective(theirs) != SFT and first != key:
            return Ignored(f"{first} takes precedence")
        return number_rule("tune.beta", find_axolotl_objective)(value, theirs)

    return rule


AXOLOTL_PREFERENCES: dict[str, Rule] = {
    "rl": _rl,
    "trl.beta": _beta("trl.beta"),
    "rl_beta": _beta("rl_beta"),
    "dpo_beta": _beta("dpo_beta"),
    "orpo_alpha": _beta("orpo_alpha"),
    "dpo_loss_type": _convert_rl_loss,
    "dpo_loss_weights": _weights,
    "dpo_label_smoothing": _smoothing,
    "simpo_gamma": number_rule("tune.gamma", find_axolotl_objective),
    "rpo_alpha": sft_weight_rule(find_axolotl_objective, MEAN_REMARK),
    "cpo_alpha": sft_weight_rule(find_axolotl_objective, MEAN_REMARK),
    "kto_desirable_weight": number_rule("tune.desirable_weight", find_axolotl_objective),
    "kto_undesirable_weight": number_rule("tune.undesirable_weight", find_axolotl_objective),
    "dpo_use_weighting": lacking_rule(find_axolotl_objective, "all pairs count alike"),
    "dpo_norm_loss": lacking_rule(
        find_axolotl_objective, "dpo takes sums of log-probabilities; ipo has means"
    ),
    "dpo_generate_during_eval": lacking_rule(
        find_axolotl_objective,
        "accuracy, margin and log-probabilities are measured; generate comes afterwards",
    ),
    "max_prompt_len": ignored_rule(
        find_axolotl_objective, "a prompt is cut only where the answers need its room"
    ),
    "precompute_ref_log_probs": ignored_rule(
        find_axolotl_objective, "the reference is computed once, and kept"
    ),
    **each(
        ignored_rule(
            find_axolotl_objective, "logits are never held whole, and padding is not computed"
        ),
        "dpo_use_logits_to_keep dpo_use_liger_kernel dpo_padding_free",
    ),
    **each(
        Ignored("training on rewards or another loss alone uses it"),
        "reward_model process_reward_model trl.* vllm.* ebft.* center_rewards_coefficient "
        "num_labels",
    ),
}
