"""Rules for training on preferences, and messages for kinds of training without a counterpart.

The module of each tool determines the objective of a config; SFT if it has no preferences.
"""

import re
from collections.abc import Callable
from typing import Any

from hpc_tune.convert.rules import (
    OFF_VALUES,
    PREFERENCE_ONLY_KEY,
    ForeignConfig,
    IgnoredKey,
    MappedKey,
    Outcome,
    Refusal,
    Rule,
    UnsupportedKey,
    apply_rule,
    ignore_if_off,
    make_tune_config,
    objective_uses_setting,
)

MEAN_REMARK = "a mean over each answer's tokens; there over all tokens of a micro-batch"
OBJECTIVE_IMPLIED_KEY = IgnoredKey("tune.objective says it")
ANSWERS_ONLY_KEY = IgnoredKey("with preferences only the answers are compared")
UNUSED_DROPOUT_KEY = IgnoredKey("neither tool uses dropout in training on preferences")
UNSUPPORTED_DROPOUT_KEY = UnsupportedKey(
    "there is no dropout in training on preferences", to_do=True
)
UNSUPPORTED_NOISE_KEY = UnsupportedKey("there is no noise in training on preferences", to_do=True)
SAME_REFERENCE_KEY = IgnoredKey("the model as it was at the start is the reference")
OTHER_REFERENCE_ADVICE = "the model as it was at the start is the reference, no other: "
REWARD_ONLY_KEY = IgnoredKey("only training on rewards or another loss uses it")


def map_objective(config: ForeignConfig) -> MappedKey:
    """Return the setting of the objective."""
    remark = "KL is taken over the whole step; there over a micro-batch of a rank"
    return MappedKey(
        {"tune.objective": config.objective}, remark if config.objective == "kto" else ""
    )


def override_for_preferences(outcome: Outcome, rule: Rule) -> Rule:
    """Rule that gives ``outcome`` for preferences if the value is on, and else applies ``rule``."""

    def overriding_rule(value: Any, config: ForeignConfig) -> Outcome:
        is_other = config.has_preferences and value not in OFF_VALUES
        return apply_rule(outcome if is_other else rule, value, config)

    return overriding_rule


def restrict_to_preferences(rows: dict[str, Rule]) -> dict[str, Rule]:
    """Return ``rows`` with rules that ignore the keys unless a config trains on preferences."""

    def restrict_rule(rule: Rule) -> Rule:
        return lambda value, config: (
            apply_rule(rule, value, config) if config.has_preferences else PREFERENCE_ONLY_KEY
        )

    return {key: restrict_rule(rule) for key, rule in rows.items()}


def sft_weight_rule(remark: str = "") -> Rule:
    """Rule for the weight of the additional loss on the chosen answers."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if objective_uses_setting(config, "tune.sft_weight"):
            return MappedKey({"tune.sft_weight": value}, remark)
        reason = f"{config.objective} has no further loss on the chosen answers here"
        return UnsupportedKey(reason, to_do=True)

    return ignore_if_off(rule)


def _convert_smoothing(value: Any, config: ForeignConfig) -> Outcome:
    if not objective_uses_setting(config, "tune.label_smoothing"):
        return IgnoredKey(f"{config.objective} does not use it")
    return UnsupportedKey(
        "there it mixes in the loss of the reversed pairs (cDPO); "
        f"tune.label_smoothing={value} makes the loss unbiased for that share of wrong pairs "
        "(robust DPO): set it if you mean that",
        to_do=True,
    )


SMOOTHING_RULE = ignore_if_off(_convert_smoothing)  # another method than tune.label_smoothing


def convert_seq_len(length: int, config: ForeignConfig, remark: str = "") -> MappedKey:
    """Return data.seq_len, twice ``length`` for pairs; ``remark`` is for rows of answers."""
    match make_tune_config(config).form:
        case "pairs":
            reason = "both answers of a pair are in one row, each after its prompt; a prompt that "
            reason += "does not fit is cut from the left, and no answer is cut"
            return MappedKey({"data.seq_len": 2 * length}, reason)
        case "labels":
            remark = "a prompt is cut from the left, an answer never is"
    return MappedKey({"data.seq_len": length}, remark)


def reference_adapter_rule(rule: Rule, reference_key: str = "") -> Rule:
    """Rule for the adapter to start from: ``rule``, with a remark if their reference differs.

    ``reference_key`` is their key for the reference's adapter, if they have one. If it is not set,
    their reference is the model without any adapter.
    """

    def rule_with_remark(value: Any, config: ForeignConfig) -> Outcome:
        outcome = apply_rule(rule, value, config)
        is_same = bool(reference_key) and config.get(reference_key) == value
        has_reference = make_tune_config(config).has_reference
        if not isinstance(outcome, MappedKey) or is_same or not has_reference:
            return outcome
        remark = "the reference is the model with this adapter here, and without it there: "
        remark += f"if you need theirs, merge nothing and stay with them; {outcome.remark}"
        return MappedKey(outcome.settings, remark, to_do=True)

    return rule_with_remark


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
    return Refusal(key, lambda value, config: config.objective is None, *OTHER_LOSS)


def is_on(value: Any, config: ForeignConfig) -> bool:
    """Return whether a value switches something on."""
    return value not in OFF_VALUES


def accept_any(value: Any, config: ForeignConfig) -> bool:
    """Return True for every value."""
    return True


def matches_pattern(pattern: str) -> Callable[[Any, ForeignConfig], bool]:
    """Return a predicate that tells whether a pattern occurs in a value."""
    regex = re.compile(pattern)
    return lambda value, config: regex.search(str(value)) is not None


def exclude_preferences(
    refuses_value: Callable[[Any, ForeignConfig], bool],
) -> Callable[[Any, ForeignConfig], bool]:
    """Return a predicate like ``refuses_value`` that is False for configs with preferences."""
    return lambda value, config: not config.has_preferences and refuses_value(value, config)
