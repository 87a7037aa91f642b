"""The communicator of a run: a rank's view of its world, and small collectives over it.

Control traffic goes over the CPU group: objects, numbers, sums, maxima, a barrier, agreement on
errors. A single rank skips it. Objects are sent as pickles between the ranks of one trusted job.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hpc_tune.errors import DiskError, HpcTuneError, RemoteError
from hpc_tune.world import liveness
from hpc_tune.world.discover import World
from hpc_tune.world.liveness import HangWatch, time_limit

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")


class RunAndAgree(Protocol):
    """The type of ``Comm.run_and_agree``, for code that does not depend on ``Comm``.

    It runs this rank's ``work``, which sends no messages; an error on one rank is raised on all.
    """

    def __call__(self, activity: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. Collective."""


def run_on_single_rank(activity: str, work: Callable[[], T]) -> T:
    """Run ``work``; this is ``run_and_agree`` for a process without other ranks."""
    return work()


class RankWatch(Protocol):
    """Finds lost hosts; see ``watch.HostWatch``.

    ``reported_exit_code``: the exit code of the rank that has reported why the world ends, if any.
    """

    reported_exit_code: int | None

    def ended_ranks(self) -> set[int]:
        """Return the ranks of other hosts that are known to have ended without a report."""
        ...

    def renumber(self, comm: "Comm", ranks: Sequence[int]) -> None:
        """Number the ranks as in ``comm`` from now on; ``ranks`` are their previous numbers."""

    def announce_exit(self, exit_code: int) -> None:
        """Tell the ranks of other hosts that this rank has reported why the world ends."""

    def close(self) -> None:
        """Stop watching."""


@dataclass
class ResumePoint:
    """The step from which the next start would resume; None while it is not known.

    ``initial_files``: the files in the run directory before this start, so that a refused start can
    remove its own; None until they are listed, and again once nothing can refuse the start.
    """

    step: int | None = None
    initial_files: frozenset[str] | None = None


@dataclass(frozen=True)
class Peer:
    """The process of one rank."""

    rank: int
    node: int
    hostname: str
    pid: int


class GroupWatch(Protocol):
    """Checks process groups for errors until the world ends; see ``nccl.NcclWatch``."""

    def renumber(self, comm: "Comm") -> None:
        """Number this rank as in ``comm`` from now on."""

    def close(self) -> None:
        """Stop checking."""


@dataclass(frozen=True)
class Comm:
    """A bootstrapped world and its collectives.

    ``cpu_group`` is a gloo group of all ranks for control traffic, with a long timeout; a single
    rank has it too. ``roster`` holds every rank. ``store`` is the rendezvous store; ``nonce`` is
    unique to this start of the job. ``sees_local_pids``: whether the ranks of a node see each
    other's processes. ``num_regroups``: how often ranks were chosen and renumbered. ``store_rank``:
    the launcher's first rank, which has the store and all connections of ``watch``. ``hang_watch``:
    the watch behind ``watch_for_hang``, if a run has set one. ``solo_work``: work that this rank
    does by itself now; if it failed, the others would wait forever in any collective inside it.
    ``activity`` and ``resume_point``: what this rank does now, and where a next start would resume.
    """

    world: World
    device: "torch.device"
    cpu_group: "ProcessGroup"
    roster: tuple[Peer, ...]
    store: "Store"
    nonce: str
    threads: int
    sees_local_pids: bool
    watch: RankWatch | None = None
    nccl: GroupWatch | None = None
    startup_limit_s: float = liveness.START_LIMIT_S
    num_regroups: int = 0
    store_rank: int = 0
    hang_watch: HangWatch | None = None
    solo_work: list[str] = field(default_factory=list)
    activity: list[str] = field(default_factory=lambda: ["starting"])
    resume_point: ResumePoint = field(default_factory=ResumePoint)

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes files and logs for all."""
        return self.world.rank == 0

    def begin(self, activity: str) -> str:
        """Note what this rank does from now on; return what it did before."""
        previous_activity, self.activity[:] = self.activity[0], [activity]
        return previous_activity

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the object of rank ``src``; the other ranks' are ignored. Collective."""
        import torch.distributed as dist

        self._require_no_solo_work()
        if self.world.size == 1:
            return value
        box = [value if self.world.rank == src else None]
        dist.broadcast_object_list(box, src=src, group=self.cpu_group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank, on all ranks. Collective."""
        self._require_no_solo_work()
        return [value] if self.world.size == 1 else all_gather(value, self.cpu_group)

    def gather_elementwise(self, values: Sequence[float]) -> list[list[float]]:
        """Return, for each of ``values``, the values of all ranks, by rank. Collective.

        It takes one message, and half as many hops around gloo's ring as a sum.
        """
        import torch

        from hpc_tune.torch_versions import all_gather

        self._require_no_solo_work()
        own_values = torch.tensor(values, dtype=torch.float64)
        if self.world.size == 1:
            return [[number] for number in own_values.tolist()]
        all_values = own_values.new_empty(self.world.size * len(values))
        all_gather(all_values, own_values, self.cpu_group)
        result: list[list[float]] = all_values.view(self.world.size, -1).T.tolist()
        return result

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the ranks, added in fp64. Collective."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over the ranks. Collective."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self, condition: str, limit_s: float | None = None) -> None:
        """Wait for every rank; after ``limit_s`` end the world, naming ``condition`` it waited for.

        Without a limit the CPU group's timeout applies.
        """
        import torch.distributed as dist

        self._require_no_solo_work()
        if self.world.size == 1:
            return
        if limit_s is None:
            dist.barrier(group=self.cpu_group)
            return
        with time_limit(condition, limit_s, "another rank did not arrive", self.world.label):
            dist.barrier(group=self.cpu_group)

    def agree_on_error(self, error: HpcTuneError | None, activity: str) -> None:
        """Raise on every rank if any rank brings an error. Collective.

        Call it outside ``except`` and ``finally``. The lowest rank that has an error raises its
        own; all others raise ``RemoteError`` with that error's message and exit code, so that only
        one rank prints.
        """
        import torch.distributed as dist

        rank, size = self.world.rank, self.world.size
        first = int(self._reduce([rank if error else size], dist.ReduceOp.MIN)[0])
        if first == size:
            return
        own_report = (str(error), error.exit_code) if error else ("", 0)
        message, exit_code = self.broadcast(own_report, src=first)
        if error is not None and rank == first:
            raise error
        raise RemoteError(f"rank {first} failed in {activity}: {message}", exit_code)

    def run_and_agree(self, activity: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; if it raises HpcTuneError on one, raise on all. Collective.

        ``work`` must not contain a collective. An OSError that ``DiskError`` describes is one too.
        """
        self._require_no_solo_work()
        previous_activity = self.begin(activity)
        result: T | None = None
        error: HpcTuneError | None = None
        self.solo_work.append(activity)
        try:
            with self.watch_for_hang(activity):
                result = work()
        except HpcTuneError as caught:
            error = caught
        except OSError as caught:
            if (error := DiskError.from_os_error(caught, activity)) is None:
                raise
        finally:
            self.solo_work.pop()
        self.agree_on_error(error, activity)
        self.begin(previous_activity)
        return result  # type: ignore[return-value]

    def run_on_rank_0(self, activity: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result everywhere; raise on all if it fails.

        Collective.
        """
        result = self.run_and_agree(activity, lambda: work() if self.is_rank_0 else None)
        return self.broadcast(result)  # type: ignore[return-value]

    def watch_for_hang(self, activity: str) -> AbstractContextManager[None]:
        """Watch a block in which this rank works alone: if it hangs, the world ends."""
        return self.hang_watch.watching(activity) if self.hang_watch is not None else nullcontext()

    def with_step_timeout(self) -> "Comm":
        """Return this communicator with control traffic that fails a minute after run.timeout.

        Before and after training one rank may work alone for hours; during training all ranks move
        step by step, and a rank that is later than run.timeout will not arrive.
        """
        from torch.distributed.distributed_c10d import _get_default_group

        return replace(self, cpu_group=_get_default_group())

    def _require_no_solo_work(self) -> None:
        assert not self.solo_work, (
            f"a collective within {self.solo_work[-1]!r}, where a rank may fail alone"
        )

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        import torch
        import torch.distributed as dist

        self._require_no_solo_work()
        if self.world.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.cpu_group)
        result: list[float] = tensor.tolist()
        return result


def all_gather(value: T, group: "ProcessGroup") -> list[T]:
    """Return every rank's object, by rank; for code that has a group but no ``Comm``."""
    import torch.distributed as dist

    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


class StoreKeys:
    """The keys of one subject in the world's store; any thread of a rank may use them.

    A subject has a number that ranks add to or read, or one JSON value, and a JSON value per rank.
    All methods raise RuntimeError once the store is gone with its rank.
    """

    def __init__(self, store: "Store", subject: str) -> None:
        """Take the store and a subject; send nothing yet."""
        self._store, self._key = store, f"hpc_tune/{subject}"

    def add(self, increment: int) -> int:
        """Add to the subject's number, which starts at 0, and return the sum."""
        return self._store.add(self._key, increment)

    def set(self, value: object, rank: int | None = None) -> None:
        """Set a rank's value, or the subject's without ``rank``."""
        self._store.set(self._key_of_rank(rank), json.dumps(value))

    def is_set(self) -> bool:
        """Whether the subject has a value or a number."""
        return self._store.check([self._key])

    def get(self, rank: int | None = None) -> Any:
        """Return a rank's value, or the subject's without ``rank``; wait until it is set."""
        return json.loads(self._store.get(self._key_of_rank(rank)))

    def find(self, rank: int) -> Any:
        """Return a rank's value, or None if it is not set."""
        return self.get(rank) if self._store.check([self._key_of_rank(rank)]) else None

    def delete(self, rank: int | None = None) -> None:
        """Remove a value, or the subject's number."""
        self._store.delete_key(self._key_of_rank(rank))

    def _key_of_rank(self, rank: int | None) -> str:
        return self._key if rank is None else f"{self._key}/{rank}"
