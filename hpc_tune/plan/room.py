"""How many tokens a micro-batch may have, by what a plan leaves of memory."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS, Phase
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import GPU_SLACK, PhaseMemory


def spare_bytes(phases: Sequence[PhaseMemory], machine: Machine) -> int:
    """Return the bytes that a rank's peak may grow by; less than 0 where it must shrink."""
    steady = next(phase for phase in phases if phase.name == Phase.STEADY)
    if machine.device_bytes is not None:
        return int(
            (DEVICE_LIMITS.filled * machine.device_bytes - steady.device_bytes) / (1 + GPU_SLACK)
        )
    return _spare_host_bytes(steady, machine)


def limit_by_host(
    most: int, phases: Sequence[PhaseMemory], machine: Machine, moved_bytes: int, tokens: int
) -> tuple[int, Literal["", "GPU", "node"]]:
    """Return ``most``, or as many tokens as a node can hold the inputs of blocks of, and which.

    ``moved_bytes`` are those of ``tokens``, on each rank; of 0 nothing is said.
    """
    if not moved_bytes:
        return most, ""
    steady = next(phase for phase in phases if phase.name == Phase.STEADY)
    on_host = max(0, tokens + tokens * _spare_host_bytes(steady, machine) // moved_bytes)
    return (on_host, "node") if on_host < most else (most, "GPU")


def tokens_that_fit(
    left_at: Callable[[int, int, int], int], left_bytes: int, rows: int, seq_len: int
) -> int:
    """Return about how many tokens a micro-batch may have.

    ``left_bytes`` are those of ``rows`` of ``seq_len``; ``left_at(rows, length, of_step)`` traces
    others, where rows of ``of_step`` tokens wait in the loader.
    Masks grow with the square of the length: what another row takes is at most what the second half
    of the rows takes twice.
    """
    if left_bytes >= 0:
        half_len = max(1, seq_len // 2)
        grown = left_at(rows, half_len, seq_len) - left_bytes
        per_token = grown / max(1, rows * (seq_len - half_len))
        return rows * seq_len + int(left_bytes / per_token if per_token > 0 else 0)
    of_one_row = left_at(1, seq_len, seq_len) if rows > 1 else left_bytes
    if of_one_row >= 0:
        return seq_len * (1 + of_one_row * (rows - 1) // (of_one_row - left_bytes))
    return _longest_row(lambda length: left_at(1, length, length), {seq_len: of_one_row})


def _longest_row(left_at: Callable[[int], int], left: dict[int, int]) -> int:
    """Return a length that fits of which 1.1 times as much does not.

    Where more tokens always take more, 1.05 times as much does not either.
    ``left``: the bytes that one length leaves, less than 0. 0: not even a 64th of it fits, so it is
    not the tokens that need so much. Long rows take long to trace: the search goes along straight
    lines, and by halves where these come nearer from one side alone. A heap is a matter of chance:
    above a length that does not fit, longer ones may.
    """
    most = longer = max(left)
    shorter = longer // 64
    if shorter == 0 or left_at(shorter) < 0:
        return 0
    left[shorter] = left_at(shorter)
    fit: list[bool] = []
    while longer > max(1.05 * shorter, shorter + 1):
        share = left[shorter] / (left[shorter] - left[longer])
        tried = (shorter + share * (longer - shorter)) * (0.98 if fit[-1:] == [False] else 1.02)
        if fit[-2:] in ([True, True], [False, False]):
            tried, fit = math.sqrt(shorter * longer), []
        length = min(max(int(tried), shorter + 1), longer - 1)
        left[length] = left_at(length)
        fit.append(left[length] >= 0)
        shorter, longer = (length, longer) if fit[-1] else (shorter, length)
    while longer < (above := shorter * 11 // 10) < most and left_at(above) >= 0:
        shorter = above
    return shorter


def _spare_host_bytes(steady: PhaseMemory, machine: Machine) -> int:
    left = int(HOST_LIMITS.filled * machine.host_bytes) - steady.node_bytes(machine)
    return left // machine.ranks_per_node
