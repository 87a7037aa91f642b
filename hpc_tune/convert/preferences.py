"""Rules for training on preferences, and messages for kinds of training without a counterpart.

The module of each tool determines the objective of a config; SFT if it has no preferences.
"""

import re
from collections.abc import Callable
from typing import Any

from hpc_tune.convert.rules import (
    OFF_VALUES,
    ONLY_FOR_PREFERENCES,
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Refusal,
    Rule,
    Unsupported,
    apply_rule,
    objective_uses_setting,
    tune_with_objective,
    unless_off,
)

MEAN_REMARK = "a mean over each answer's tokens; there over all tokens of a micro-batch"
OBJECTIVE_SAYS_IT = Ignored("tune.objective says it")
ONLY_ANSWERS = Ignored("with preferences only the answers are compared")
NO_DROPOUT_THERE = Ignored("there is no dropout in training on preferences, nor in theirs")
NO_DROPOUT = Unsupported("there is no dropout in training on preferences", to_do=True)
NO_NOISE = Unsupported("there is no noise in training on preferences", to_do=True)
SAME_REFERENCE = Ignored("the model as it was at the start is the reference")
OTHER_REFERENCE = "the model as it was at the start is the reference, no other: "
ONLY_FOR_REWARDS = Ignored("only training on rewards or another loss uses it")


def map_objective(theirs: ForeignConfig) -> Mapped:
    """Return the setting of the objective."""
    remark = "KL is taken over the whole step; there over a micro-batch of a rank"
    return Mapped({"tune.objective": theirs.objective}, remark if theirs.objective == "kto" else "")


def override_for_preferences(outcome: Outcome, rule: Rule) -> Rule:
    """Rule that gives ``outcome`` for preferences if the value is on, and else applies ``rule``."""

    def overridden(value: Any, theirs: ForeignConfig) -> Outcome:
        is_other = theirs.has_preferences and value not in OFF_VALUES
        return apply_rule(outcome if is_other else rule, value, theirs)

    return overridden


def for_preferences_only(rows: dict[str, Rule]) -> dict[str, Rule]:
    """Return ``rows`` with rules that ignore the keys unless a config trains on preferences."""

    def with_preferences(rule: Rule) -> Rule:
        return lambda value, theirs: (
            apply_rule(rule, value, theirs) if theirs.has_preferences else ONLY_FOR_PREFERENCES
        )

    return {key: with_preferences(rule) for key, rule in rows.items()}


def sft_weight_rule(remark: str = "") -> Rule:
    """Rule for the weight of the additional loss on the chosen answers."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if objective_uses_setting(theirs, "tune.sft_weight"):
            return Mapped({"tune.sft_weight": value}, remark)
        why = f"{theirs.objective} has no further loss on the chosen answers here"
        return Unsupported(why, to_do=True)

    return unless_off(rule)


def _convert_smoothing(value: Any, theirs: ForeignConfig) -> Outcome:
    if not objective_uses_setting(theirs, "tune.label_smoothing"):
        return Ignored(f"{theirs.objective} does not use it")
    return Unsupported(
        "there it mixes in the loss of the reversed pairs (cDPO); "
        f"tune.label_smoothing={value} makes the loss unbiased for that share of wrong pairs "
        "(robust DPO): set it if you mean that",
        to_do=True,
    )


SMOOTHING_RULE = unless_off(_convert_smoothing)  # another method than tune.label_smoothing


def convert_seq_len(length: int, theirs: ForeignConfig, remark: str = "") -> Mapped:
    """Return data.seq_len, twice ``length`` for pairs; ``remark`` is for rows of answers."""
    match tune_with_objective(theirs).form:
        case "pairs":
            why = "both answers of a pair are in one row, each after its prompt; a prompt that "
            why += "does not fit is cut from the left, and no answer is cut"
            return Mapped({"data.seq_len": 2 * length}, why)
        case "labels":
            remark = "a prompt is cut from the left, an answer never is"
    return Mapped({"data.seq_len": length}, remark)


def reference_adapter_rule(rule: Rule, key: str = "") -> Rule:
    """Rule for the adapter to start from: ``rule``, with a remark if their reference differs.

    ``key`` is their key for the reference's adapter, if they have one. If it is not set, their
    reference is the model without any adapter.
    """

    def with_remark(value: Any, theirs: ForeignConfig) -> Outcome:
        outcome = apply_rule(rule, value, theirs)
        is_same = bool(key) and theirs.get(key) == value
        has_reference = tune_with_objective(theirs).has_reference
        if not isinstance(outcome, Mapped) or is_same or not has_reference:
            return outcome
        remark = "the reference is the model with this adapter here, and without it there: "
        remark += f"if you need theirs, merge nothing and stay with them; {outcome.remark}"
        return Mapped(outcome.settings, remark, to_do=True)

    return with_remark


# -- Kinds of training that have no counterpart: what each one is, and what to do.


REWARD_TRAINING = (
    "that is training on rewards",
    "Stay with {tool} for this part; supervised fine-tuning before it can be done here, and "
    "{tool} can start from the exported model",
)
OTHER_LOSS = (
    "that is a loss on preferences with no counterpart",
    "Choose one of dpo, ipo, simpo, orpo and kto in it, with a newly tuned beta, and convert it "
    "again. Stay with {tool} for this loss",
)
UNNAMED_LOSS = (
    "that is preference data, whose loss the config does not name",
    "Name it there (axolotl: rl, torchtune: loss, LLaMA-Factory: stage) and convert it again. "
    "Stay with {tool} for a reward model",
)
DISTILLATION = (
    "that is distillation, whose loss compares with a teacher's probabilities",
    "Stay with {tool} for it; or let the teacher write the answers, and convert a config for "
    "supervised fine-tuning on these",
)
MEDIA_TRAINING = (
    "that is training with images, sound or video",
    "Stay with {tool} for it; if all its records are text, convert a config for text (the language "
    "part of such a model can be trained here)",
)


def preference_loss_refusal(key: str) -> Refusal:
    """Return the refusal of a preference loss without counterpart; ``key`` names the loss."""
    return Refusal(key, lambda value, theirs: theirs.objective is None, *OTHER_LOSS)


def is_on(value: Any, theirs: ForeignConfig) -> bool:
    """Return whether a value switches something on."""
    return value not in OFF_VALUES


def always(value: Any, theirs: ForeignConfig) -> bool:
    """Return True for every value."""
    return True


def matches_pattern(pattern: str) -> Callable[[Any, ForeignConfig], bool]:
    """Return a predicate that tells whether a pattern occurs in a value."""
    compiled = re.compile(pattern)
    return lambda value, theirs: compiled.search(str(value)) is not None


def unless_preferences(
    is_asked_for: Callable[[Any, ForeignConfig], bool],
) -> Callable[[Any, ForeignConfig], bool]:
    """Return a predicate like ``is_asked_for`` that is False for configs with preferences."""
    return lambda value, theirs: not theirs.has_preferences and is_asked_for(value, theirs)
