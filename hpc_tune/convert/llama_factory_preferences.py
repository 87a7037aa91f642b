"""The rules for LLaMA-Factory's training on preferences: stage: dpo and stage: kto.

Its ipo, simpo and orpo are losses of stage dpo, of means over an answer's tokens as here, and
pref_ftx is the chosen answer's mean loss, per pair.
"""

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
    OTHER_LOSS,
    SFT,
    TAKE_ANOTHER_LOSS,
    WHOLE_STEP_REMARK,
    lacking_rule,
    number_rule,
    sft_weight_rule,
    smoothing_rule,
)

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
