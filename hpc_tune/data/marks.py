"""What a row, or a turn of it, says of its own learning: whether, and with which weight.

OpenAI, Mistral   weight            0 or 1, on turns of the assistant
ms-swift          loss, loss_scale  whether, and how much
axolotl, verl     train, training; loss_mask
"""

from typing import Any

import numpy as np

from hpc_tune.data.values import WrongRecord, format_value, is_unset

_WEIGHT_FIELDS = ("weight", "loss_scale")
MARK_FIELDS = (*_WEIGHT_FIELDS, "train", "training", "loss", "loss_mask")
# Advantages of reinforcement learning, which are not read: see docs/data.md.
ADVANTAGE_FIELDS = ("advantage", "advantages")


def read_weight(fields: dict[str, Any], where: str) -> float | None:
    """Return what a turn, or a row, counts in the loss by its own marks; None without a mark.

    Raises:
        WrongRecord: if a mark is no such number, or two of them contradict each other.
    """
    marks = {name: fields[name] for name in MARK_FIELDS if not is_unset(fields.get(name))}
    weights = {name: _read_number(name, value, where) for name, value in marks.items()}
    # A mark that says no more than "learned" leaves the weight to the others.
    said = {weights[name] for name in _WEIGHT_FIELDS if name in weights} or set(weights.values())
    if len(said) > 1 or len(set(map(bool, weights.values()))) > 1:
        raise WrongRecord(f"{where}: {' and '.join(marks)} contradict each other")
    return said.pop() if said else None


def _read_number(name: str, value: Any, where: str) -> float:
    if name not in _WEIGHT_FIELDS:
        if value not in (0, 1):
            raise WrongRecord(
                f"{where}: {name} is {format_value(value)}, expected 0 or 1, false or true: an "
                "answer is learned or not; weight says how much it counts"
            )
        return float(value)
    if isinstance(value, int | float):
        with np.errstate(over="ignore", under="ignore"):
            stored = float(np.float32(min(value, 1e300)))  # as it is kept in prepared data
        if value == 0 or 0 < stored < float("inf"):
            return stored
    raise WrongRecord(
        f"{where}: {name} is {format_value(value)}, expected a number from 0 on: how much it "
        "counts in the loss, 0 for what is not learned, 1 as without it"
    )


def refuse_advantages(record: dict[str, Any]) -> None:
    """Refuse a row with an advantage of reinforcement learning.

    Raises:
        WrongRecord: if it has one.
    """
    if fields := [name for name in ADVANTAGE_FIELDS if record.get(name) is not None]:
        raise WrongRecord(
            f"{fields[0]}: advantages are of reinforcement learning, where each update needs the "
            "probabilities that the answers were written with; they are not used here. "
            "Keep the best answers, or give each a weight from 0 on (data.columns="
            f"{{{fields[0]}: weight}} if none is negative); else take the field out"
        )
