"""Whether labelled answers are of both kinds, and how much each weighs: what kto learns from."""

from hpc_tune.errors import DataError

# Between these, all good answers together weigh as much as all others (arXiv:2402.01306, 4.2).
MIN_RATIO, MAX_RATIO = 1.0, 1.33


def require_both_labels(num_good: int, num_bad: int, where: str) -> None:
    """Check that there are good answers and others.

    Raises:
        DataError: if there is one kind alone.
    """
    if num_good and num_bad:
        return
    found = "true" if num_good else "false"
    instead = "or tune.objective=sft, which learns answers that are all good" if num_good else ""
    raise DataError(
        f"all {num_good + num_bad} labels of {where} are {found}: kto compares good answers with "
        f"others; give answers of both kinds{', ' if instead else ''}{instead}"
    )


def describe_label_imbalance(
    num_good: int, num_bad: int, desirable_weight: float, undesirable_weight: float
) -> str | None:
    """Return what to say of kinds that do not weigh the same, with the weights that would."""
    ratio = desirable_weight * num_good / (undesirable_weight * num_bad)
    if MIN_RATIO <= ratio <= MAX_RATIO:
        return None
    weights = f"tune.desirable_weight={undesirable_weight * num_bad / num_good:.3g}"
    if num_bad < num_good:
        weights = f"tune.undesirable_weight={desirable_weight * num_good / num_bad:.3g}"
    return (
        f"{num_good} answers are good and {num_bad} are not, so that the good ones weigh "
        f"{ratio:.3g} times as much in kto as the others, and {MIN_RATIO:g} to {MAX_RATIO:g} is "
        f"usual: {weights} makes it 1"
    )
