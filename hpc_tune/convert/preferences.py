"""Rules for training on preferences that the tools share: the objective says what keys mean.

A tool's file tells which objective a config is for; SFT where it is for none.
"""

from collections.abc import Callable
from typing import Any

from hpc_tune.config.tune import TuneConfig
from hpc_tune.convert.rules import (
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

SFT = "sft"
ObjectiveOf = Callable[[ForeignConfig], str]
RuleFunction = Callable[[Any, ForeignConfig], Outcome]
TAKE_ANOTHER_LOSS = (
    "Take one of dpo, ipo, simpo, orpo and kto in it, whose tune.beta must be found again, and "
    "convert it again. Stay with {tool} for this loss"
)
OTHER_LOSS = "that is a loss on preferences with no counterpart"
MEAN_REMARK = "of each answer's tokens; there of all tokens of a micro-batch"
WHOLE_STEP_REMARK = "KL is taken over the whole step; there over a micro-batch of a rank"
SMOOTHING_REMARK = (
    "there it mixes in the loss of the reversed pairs (cDPO); tune.label_smoothing={value} makes "
    "the loss unbiased for that share of wrong pairs (robust DPO): set it if that is meant"
)
_UNUSED = Ignored("training on preferences alone uses it")


def has_reference(objective: str) -> bool:
    """Return whether an objective compares with the model as it was."""
    return _make_tune(objective).has_reference


def number_rule(ours: str, objective_of: ObjectiveOf, remark: str = "") -> RuleFunction:
    """Rule for a number of objectives, such as tune.beta."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        objective = objective_of(theirs)
        if objective == SFT:
            return _UNUSED
        if _uses_setting(objective, ours):
            return Mapped({ours: value}, remark)
        if value in OFF:
            return Ignored("off in their config")
        return Ignored(f"{objective} does not use it")

    return rule


def sft_weight_rule(objective_of: ObjectiveOf, remark: str = "") -> RuleFunction:
    """Rule for the weight of the chosen answers' own loss."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        objective = objective_of(theirs)
        if objective == SFT:
            return _UNUSED
        if value in OFF:
            return Ignored("off in their config")
        if _uses_setting(objective, "tune.sft_weight"):
            return Mapped({"tune.sft_weight": value}, remark)
        return Unsupported(f"{objective} has no further loss of the chosen answers here", True)

    return rule


def smoothing_rule(objective_of: ObjectiveOf) -> RuleFunction:
    """Rule for label smoothing that is not ours."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        objective = objective_of(theirs)
        if objective == SFT:
            return _UNUSED
        if value in OFF:
            return Ignored("off in their config")
        if not _uses_setting(objective, "tune.label_smoothing"):
            return Ignored(f"{objective} does not use it")
        return Unsupported(SMOOTHING_REMARK.format(value=value), to_do=True)

    return rule


def lacking_rule(objective_of: ObjectiveOf, instead: str) -> RuleFunction:
    """Rule for what changes a loss on preferences and is lacking."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if objective_of(theirs) == SFT:
            return _UNUSED
        return Ignored("off in their config") if value in OFF else Unsupported(instead, to_do=True)

    return rule


def ignored_rule(objective_of: ObjectiveOf, why: str) -> RuleFunction:
    """Rule for what follows by itself in training on preferences."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        return _UNUSED if objective_of(theirs) == SFT else Ignored(why)

    return rule


def map_seq_len(length: int, objective: str, remark: str = "") -> Mapped:
    """Return the length of rows, which of pairs hold both answers; ``remark``: of other rows."""
    if _make_tune(objective).form == "pairs":
        why = "both answers of a pair are in one row, each after its prompt; what does not fit "
        why += "loses the left of its prompt, and no answer is cut"
        return Mapped({"data.seq_len": 2 * length}, why)
    if _make_tune(objective).form == "labels":
        return Mapped({"data.seq_len": length}, "a prompt is cut from the left, an answer never is")
    return Mapped({"data.seq_len": length}, remark)


def answers_rule(rule: Rule, objective_of: ObjectiveOf) -> RuleFunction:
    """Rule for what is learned, which with preferences are the answers."""
    return _replace_outcome(
        rule, objective_of, Ignored("with preferences only the answers are compared")
    )


def dropout_rule(rule: Rule, objective_of: ObjectiveOf, is_off_there: bool = True) -> RuleFunction:
    """Rule for dropout, which would move the model away from its own reference."""
    if is_off_there:
        off: Outcome = Ignored("there is no dropout in training on preferences, nor in theirs")
    else:
        off = Unsupported("there is no dropout in training on preferences", to_do=True)
    return _replace_outcome(rule, objective_of, off)


def noise_rule(rule: Rule, objective_of: ObjectiveOf) -> RuleFunction:
    """Rule for noise on embeddings, which preferences are without."""
    off = Unsupported("there is no noise in training on preferences", to_do=True)
    return _replace_outcome(rule, objective_of, off)


def reference_adapter_rule(rule: Rule, objective_of: ObjectiveOf, key: str = "") -> RuleFunction:
    """Rule for the adapter to begin with; ``key`` names that of the reference, if it can be told.

    Their reference is the model without the adapter otherwise.
    """

    def whole(value: Any, theirs: ForeignConfig) -> Outcome:
        outcome = _apply_rule(rule, value, theirs)
        is_same = bool(key) and theirs.get(key) == value
        if not isinstance(outcome, Mapped) or is_same or not has_reference(objective_of(theirs)):
            return outcome
        remark = "the reference is the model with this adapter, and there the one without it: "
        remark += f"if that is meant, merge nothing and stay with them; {outcome.remark}"
        return Mapped(outcome.settings, remark, to_do=True)

    return whole


def _uses_setting(objective: str, ours: str) -> bool:
    return ours.removeprefix("tune.") in _make_tune(objective).numbers


def _make_tune(objective: str) -> TuneConfig:
    return TuneConfig.model_validate({"objective": objective})


def _apply_rule(rule: Rule, value: Any, theirs: ForeignConfig) -> Outcome:
    return rule(value, theirs) if callable(rule) else rule


def _replace_outcome(rule: Rule, objective_of: ObjectiveOf, outcome: Outcome) -> RuleFunction:
    """Return a rule that gives ``outcome`` with preferences, where something is on."""

    def whole(value: Any, theirs: ForeignConfig) -> Outcome:
        if objective_of(theirs) == SFT or value in OFF:
            return _apply_rule(rule, value, theirs)
        return outcome

    return whole


# -- The rules for axolotl's training on preferences, rl: dpo and the like, which is trl's.


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


# -- The rules for LLaMA-Factory's training on preferences: stage: dpo and stage: kto.
#
# Its ipo, simpo and orpo are losses of stage dpo, of means over an answer's tokens as here, and
# pref_ftx is the chosen answer's mean loss, per pair.


_LLAMA_FACTORY_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}


def find_llama_factory_objective(theirs: ForeignConfig) -> str:
    """Return the objective; SFT for other stages."""
    match theirs.get("stage"):
        case "kto":
            return "kto"
        case "dpo":
            return _LLAMA_FACTORY_LOSSES.get(str(theirs.get("pref_loss", "sigmoid")), SFT)
    return SFT


def find_other_llama_factory_loss(theirs: ForeignConfig) -> WrongTask | None:
    """Return what a config of stage dpo trains for, if that has no counterpart."""
    if theirs.get("stage") != "dpo":
        return None
    if find_llama_factory_objective(theirs) == SFT:
        return WrongTask(("pref_loss",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    if theirs.get("pref_bco_weight") not in OFF:
        return WrongTask(("pref_bco_weight",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    return None


def llama_factory_preference_defaults(theirs: ForeignConfig) -> dict[str, Any]:
    """Return what is taken where a config says nothing."""
    if find_llama_factory_objective(theirs) == SFT:
        return {}
    return {"pref_beta": 0.1} | (
        {"simpo_gamma": 0.5} if find_llama_factory_objective(theirs) == "simpo" else {}
    )


def convert_stage(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for what is trained."""
    ours = find_llama_factory_objective(theirs)
    if ours != SFT:
        return Mapped({"tune.objective": ours}, WHOLE_STEP_REMARK if ours == "kto" else "")
    if value == "pt":
        return Ignored("records with text are learned as a whole")
    return Ignored("tune.objective=sft is the default")


def _convert_pref_loss(value: Any, theirs: ForeignConfig) -> Outcome:
    return _use_if_preferences(theirs, Ignored("tune.objective says it"))


def _reference(value: Any, theirs: ForeignConfig) -> Outcome:
    if value == theirs.get("model_name_or_path"):
        return _use_if_preferences(
            theirs, Ignored("the model as it was at the start is the reference")
        )
    instead = "the model as it was at the start is the reference, no other: leave it out there, or "
    return _use_if_preferences(theirs, Unsupported(instead + "stay with it", to_do=True))


def _reference_adapter(value: Any, theirs: ForeignConfig) -> Outcome:
    if value == theirs.get("adapter_name_or_path"):
        return _use_if_preferences(
            theirs, Ignored("the adapter of tune.init_from is the reference's, too")
        )
    instead = "the reference is the model with the adapter of tune.init_from"
    return _use_if_preferences(theirs, Unsupported(instead, to_do=True))


def _use_if_preferences(theirs: ForeignConfig, outcome: Outcome) -> Outcome:
    unused = Ignored("training on preferences alone uses it")
    return unused if find_llama_factory_objective(theirs) == SFT else outcome


LLAMA_FACTORY_PREFERENCES: dict[str, Rule] = {
    "stage": convert_stage,
    "pref_loss": _convert_pref_loss,
    "pref_beta": number_rule("tune.beta", find_llama_factory_objective),
    "pref_ftx": sft_weight_rule(find_llama_factory_objective),
    "simpo_gamma": number_rule("tune.gamma", find_llama_factory_objective),
    "dpo_label_smoothing": smoothing_rule(find_llama_factory_objective),
    "kto_chosen_weight": number_rule("tune.desirable_weight", find_llama_factory_objective),
    "kto_rejected_weight": number_rule("tune.undesirable_weight", find_llama_factory_objective),
    "ld_alpha": lacking_rule(
        find_llama_factory_objective, "tokens after the shorter answer's length count in full"
    ),
    "ref_model": _reference,
    "ref_model_adapters": _reference_adapter,
    **each(
        Ignored("training on rewards or another loss alone uses it"),
        "pref_bco_weight reward_model reward_model_adapters reward_model_type ppo_epochs "
        "ppo_buffer_size ppo_score_norm ppo_target ppo_whiten_rewards ref_model_quantization_bit "
        "reward_model_quantization_bit",
    ),
}


# -- The rules for torchtune's DPO recipes, whose loss says what is learned: DPOLoss or SimPOLoss.


_TORCHTUNE_LOSSES = {"DPOLoss": "dpo", "SimPOLoss": "simpo"}
_OTHER_TORCHTUNE_LOSSES = ("RSOLoss", "IPOLoss")  # its IPO is of sums over tokens, ours of means


def find_torchtune_objective(theirs: ForeignConfig) -> str:
    """Return the objective; SFT for other losses."""
    return _TORCHTUNE_LOSSES.get(_loss_name(theirs), SFT)


def find_other_torchtune_loss(theirs: ForeignConfig) -> WrongTask | None:
    """Return which loss on preferences a config has, if there is no counterpart."""
    if _loss_name(theirs) in _OTHER_TORCHTUNE_LOSSES:
        return WrongTask(("loss._component_",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    return None


def torchtune_preference_defaults(theirs: ForeignConfig) -> dict[str, Any]:
    """Return what is taken where a config says nothing."""
    match find_torchtune_objective(theirs):
        case "dpo":
            return {"loss.beta": 0.1}
        case "simpo":
            return {"loss.beta": 2.0, "loss.gamma": 0.5}
    return {}


def _loss_name(theirs: ForeignConfig) -> str:
    return str(theirs.get("loss._component_")).rpartition(".")[2]


def _reference_path(value: Any, theirs: ForeignConfig) -> Outcome:
    if not has_reference(find_torchtune_objective(theirs)):
        return Ignored("no reference is used")
    first = str(theirs.get("checkpointer.checkpoint_dir")).rstrip("/")
    if str(value).rstrip("/") == first:
        return Ignored("the model as it was at the start is the reference")
    return Unsupported(
        "the model as it was at the start is the reference, no other: begin with that one",
        to_do=True,
    )


def convert_loss(value: Any, theirs: ForeignConfig) -> Mapped | None:
    """Return what becomes of a loss on preferences; None of others."""
    ours = find_torchtune_objective(theirs)
    return None if ours == SFT else Mapped({"tune.objective": ours})


TORCHTUNE_PREFERENCES: dict[str, Rule] = {
    "loss.beta": number_rule("tune.beta", find_torchtune_objective),
    "loss.gamma": number_rule("tune.gamma", find_torchtune_objective),
    "loss.label_smoothing": smoothing_rule(find_torchtune_objective),
    "ref_checkpointer.checkpoint_dir": _reference_path,
    "base_model_path": _reference_path,
    **each(
        Ignored("the reference is computed once, before the first step, and kept"),
        "ref_checkpointer.* reference_model.* reference_checkpointer.*",
    ),
}
