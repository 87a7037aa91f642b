"""What a rank sends in a collective (pure).

The ring algorithms, which gloo and NCCL use for large messages: of g ranks each sends a g-th of the
message to the next of its group, g - 1 times in an all-gather or a reduce-scatter and 2 (g - 1)
times in an all-reduce (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). In an all-to-all
it sends a g-th to each of the others.
"""

from typing import Literal

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "reduce", "send", "all_to_all"
]


def ring_steps(kind: CollectiveKind, ranks: int) -> int:
    """Return how often a rank sends the ``ranks``-th part of a message."""
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1)
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return ranks - 1
        case _:  # along a chain, whole; of a reduction all but its last rank
            return ranks if ranks > 1 else 0


def sent_bytes(kind: CollectiveKind, ranks: int, num_bytes: int) -> int:
    """Return the bytes that a rank sends.

    ``num_bytes`` is the whole message: what is summed or scattered, what all have after a
    gathering, or is sent.
    """
    return ring_steps(kind, ranks) * num_bytes // ranks
