"""The rules for torchtune's DPO recipes, whose loss says what is learned: DPOLoss or SimPOLoss."""

from typing import Any

from hpc_tune.convert.outcomes import (
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
    has_reference,
    number_rule,
    smoothing_rule,
)

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
