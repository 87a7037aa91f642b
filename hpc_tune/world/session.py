"""What a rank knows of its world, from the bootstrap to its end."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from hpc_tune.world.discover import World
from hpc_tune.world.hang import HangWatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store


class Watch(Protocol):
    """What tells of lost hosts; see ``reach.HostWatch``."""

    def close(self) -> None:
        """Watch no more."""


@dataclass(frozen=True)
class Peer:
    """One rank as a process."""

    rank: int
    node: int
    hostname: str
    pid: int


@dataclass(frozen=True)
class Session:
    """A bootstrapped world.

    ``cpu_group`` is a gloo group of all ranks for control traffic, with a long timeout; a world of
    one has it too. ``roster`` holds every rank. ``store`` is the rendezvous store, ``nonce`` unique
    to this start of the job. ``sees_local_pids``: whether the ranks of a node see each other's
    processes. ``reformed``: how often its ranks were chosen and numbered anew. ``hang`` is what
    ``watched`` watches with, where a run has set it.
    """

    world: World
    device: "torch.device"
    cpu_group: "ProcessGroup"
    roster: tuple[Peer, ...]
    store: "Store"
    nonce: str
    threads: int
    sees_local_pids: bool
    watch: Watch | None = None
    reformed: int = 0
    hang: HangWatch | None = None

    def watched(self, what: str) -> AbstractContextManager[None]:
        """Watch a block in which this rank works alone: where it stands still, the world ends."""
        return self.hang.over(what) if self.hang is not None else nullcontext()

    def in_training(self) -> "Session":
        """Return this session with control traffic that waits no longer than run.timeout.

        Before training and after it one rank may work for hours; in between all go step by step,
        and one that does not come never will.
        """
        import torch.distributed as dist

        everyone = dist.group.WORLD
        assert everyone is not None, "a session has process groups"
        return replace(self, cpu_group=everyone)
