"""Small collectives over the CPU group: objects, sums, maxima, a barrier, agreement on errors.

Every function but ``all_gather`` takes the session, and a world of one pays nothing. Objects travel
as pickles between the ranks of one trusted job.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_tune.errors import HpcTuneError, RemoteError
from hpc_tune.world.failure import time_limit
from hpc_tune.world.session import Session

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_gather(value: T, group: "ProcessGroup") -> list[T]:
    """Return every rank's object, by rank; for use before there is a session."""
    import torch.distributed as dist

    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(session: Session, value: T, src: int = 0) -> T:
    """Return the object of rank ``src``; the others' is ignored."""
    import torch.distributed as dist

    if session.world.size == 1:
        return value
    box = [value if session.world.rank == src else None]
    dist.broadcast_object_list(box, src=src, group=session.cpu_group)
    return box[0]  # type: ignore[return-value]


def gather_objects(session: Session, value: T) -> list[T]:
    """Return every rank's object, by rank, on all ranks."""
    return all_gather(value, session.cpu_group)


def sum_of(session: Session, values: Sequence[float]) -> list[float]:
    """Return the element-wise sum over the ranks, added in fp64."""
    import torch.distributed as dist

    return _reduce(session, values, dist.ReduceOp.SUM)


def max_of(session: Session, values: Sequence[float]) -> list[float]:
    """Return the element-wise maximum over the ranks."""
    import torch.distributed as dist

    return _reduce(session, values, dist.ReduceOp.MAX)


def barrier(session: Session, what: str, limit_s: float | None = None) -> None:
    """Wait until every rank is here; after ``limit_s`` the world ends, saying ``what`` it was.

    Without a limit the CPU group's long timeout holds.
    """
    import torch.distributed as dist

    if session.world.size == 1:
        return
    if limit_s is None:
        dist.barrier(group=session.cpu_group)
        return
    who = f"rank {session.world.rank} on {session.world.hostname}"
    with time_limit(what, limit_s, "another rank did not come", who):
        dist.barrier(group=session.cpu_group)


def agree(session: Session, error: HpcTuneError | None, what: str) -> None:
    """Raise on every rank if any rank brings an error; call it outside ``except`` and ``finally``.

    The lowest rank that has an error raises its own; all others raise ``RemoteError`` with its
    message and exit code, so that one rank prints.
    """
    import torch.distributed as dist

    rank, size = session.world.rank, session.world.size
    first = int(_reduce(session, [rank if error else size], dist.ReduceOp.MIN)[0])
    if first == size:
        return
    found = broadcast_object(session, (str(error), error.exit_code) if error else None, src=first)
    if error is not None and rank == first:
        raise error
    assert found is not None
    message, exit_code = found
    raise RemoteError(f"rank {first} failed in {what}: {message}", exit_code)


def _reduce(session: Session, values: Sequence[float], op: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    if session.world.size == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=session.cpu_group)
    result: list[float] = tensor.tolist()
    return result
