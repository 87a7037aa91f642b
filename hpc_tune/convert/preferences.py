"""Rules for training on preferences that the tools share: the objective says what keys mean.

A tool's file tells which objective a config is for; SFT where it is for none.
"""

from collections.abc import Callable
from typing import Any

from hpc_tune.config.tune import TuneConfig
from hpc_tune.convert.outcomes import (
    OFF,
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Rule,
    Unsupported,
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
