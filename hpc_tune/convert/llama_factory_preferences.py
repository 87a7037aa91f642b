"""The rules for LLaMA-Factory's training on preferences: stage: dpo and stage: kto.

Its ipo, simpo and orpo are losses of stage dpo, of means over an answer's tokens as here, and
pref_ftx is the chosen answer's mean loss, per pair.
"""

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
    OTHER_LOSS,
    SFT,
    TAKE_ANOTHER_LOSS,
    WHOLE_STEP,
    lacking_here,
    number,
    sft_part,
    smoothing,
)

_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}


def objective(theirs: ForeignConfig) -> str:
    """Return the objective; SFT for other stages."""
    match theirs.get("stage"):
        case "kto":
            return "kto"
        case "dpo":
            return _LOSSES.get(str(theirs.get("pref_loss", "sigmoid")), SFT)
    return SFT


def other_loss(theirs: ForeignConfig) -> Another | None:
    """Return what a config of stage dpo trains for, if that has no counterpart."""
    if theirs.get("stage") != "dpo":
        return None
    if objective(theirs) == SFT:
        return Another(("pref_loss",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    if theirs.get("pref_bco_weight") not in OFF:
        return Another(("pref_bco_weight",), OTHER_LOSS, TAKE_ANOTHER_LOSS)
    return None


def preference_defaults(theirs: ForeignConfig) -> dict[str, Any]:
    """Return what is taken where a config says nothing."""
    if objective(theirs) == SFT:
        return {}
    return {"pref_beta": 0.1} | ({"simpo_gamma": 0.5} if objective(theirs) == "simpo" else {})


def stage(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for what is trained."""
    ours = objective(theirs)
    if ours != SFT:
        return Mapped({"tune.objective": ours}, WHOLE_STEP if ours == "kto" else "")
    if value == "pt":
        return Automatic("records with text are learned as a whole")
    return Automatic("tune.objective=sft is the default")


def _loss(value: Any, theirs: ForeignConfig) -> Outcome:
    return _ours(theirs, Automatic("tune.objective says it"))


def _reference(value: Any, theirs: ForeignConfig) -> Outcome:
    if value == theirs.get("model_name_or_path"):
        return _ours(theirs, Automatic("the model as it was at the start is the reference"))
    instead = "the model as it was at the start is the reference, no other: leave it out there, or "
    return _ours(theirs, Unsupported(instead + "stay with it", to_do=True))


def _reference_adapter(value: Any, theirs: ForeignConfig) -> Outcome:
    if value == theirs.get("adapter_name_or_path"):
        return _ours(theirs, Automatic("the adapter of tune.init_from is the reference's, too"))
    instead = "the reference is the model with the adapter of tune.init_from"
    return _ours(theirs, Unsupported(instead, to_do=True))


def _ours(theirs: ForeignConfig, outcome: Outcome) -> Outcome:
    unused = Automatic("training on preferences alone uses it")
    return unused if objective(theirs) == SFT else outcome


PREFERENCES: dict[str, Rule] = {
    "stage": stage,
    "pref_loss": _loss,
    "pref_beta": number("tune.beta", objective),
    "pref_ftx": sft_part(objective),
    "simpo_gamma": number("tune.gamma", objective),
    "dpo_label_smoothing": smoothing(objective),
    "kto_chosen_weight": number("tune.desirable_weight", objective),
    "kto_rejected_weight": number("tune.undesirable_weight", objective),
    "ld_alpha": lacking_here(objective, "tokens behind the shorter answer's length count in full"),
    "ref_model": _reference,
    "ref_model_adapters": _reference_adapter,
    **each(
        Automatic("training on rewards or another loss alone uses it"),
        "pref_bco_weight reward_model reward_model_adapters reward_model_type ppo_epochs "
        "ppo_buffer_size ppo_score_norm ppo_target ppo_whiten_rewards ref_model_quantization_bit "
        "reward_model_quantization_bit",
    ),
}
