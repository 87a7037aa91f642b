"""Which element-wise kernels a compiler fuses, and what the fused kernels read and write.

The rule is a simple version of what torch's compiler does. An element-wise kernel is fused with
kernels whose results it reads, or that read what it reads, if it can run as early as they do (its
inputs exist by then) or they can run as late as it (no other kernel needs their results before).
A fused kernel reads each outside input once, and writes only what is read outside. If only fused
kernels of the backward pass use a result of the forward pass, they recompute it from the forward
kernel's inputs where that moves fewer bytes.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from gpu_kernels import Kernel

MAX_DISTANCE = 32  # number of earlier groups that are considered


@dataclass(eq=False)
class Group:
    """Fused kernels, by number, and the bytes that they read and write together, by storage."""

    members: list[int]
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


def join_kernels(kernels: list[Kernel], alive: set[int]) -> list[Group]:
    """Return the fused kernels; ``alive`` are the storages that outlive the step."""
    readers: dict[int, list[int]] = defaultdict(list)
    for number, kernel in enumerate(kernels):
        for storage in kernel.reads:
            readers[storage].append(number)
    groups = _groups(kernels, readers)
    for group in groups:
        _fill_traffic(group, kernels, readers, alive)
    _recompute(groups, kernels, readers)
    return groups


def _groups(kernels: list[Kernel], readers: dict[int, list[int]]) -> list[Group]:
    groups: list[Group] = []
    written: dict[int, int] = {}
    makers: dict[int, set[int]] = {}
    for number, kernel in enumerate(kernels):
        if kernel.fusible:
            makers[number] = {written.get(storage, -1) for storage in kernel.reads}
            own = Group([number])
            for group in groups[-MAX_DISTANCE:][::-1]:
                if kernels[group.members[0]].backward != kernel.backward:
                    break
                if not _shares(kernels, group, kernel):
                    continue
                needed = {maker for n in own.members for maker in makers[n]}
                is_early = max(needed - {*own.members}, default=-1) <= group.members[-1]
                if is_early or not _is_needed_before(kernels, group, number, readers):
                    own.members = sorted([*group.members, *own.members])
                    groups.remove(group)
            groups.append(own)
        for storage in kernel.writes:
            written[storage] = number
    return groups


def _shares(kernels: list[Kernel], group: Group, kernel: Kernel) -> bool:
    used = {*kernel.reads, *kernel.writes}
    return any(
        not used.isdisjoint(kernels[n].reads) or not used.isdisjoint(kernels[n].writes)
        for n in group.members
    )


def _is_needed_before(
    kernels: list[Kernel], group: Group, number: int, readers: dict[int, list[int]]
) -> bool:
    """Whether a kernel outside a group reads its results before kernel ``number`` does."""
    first, members = group.members[0], set(group.members)
    return any(
        first < reader < number and reader not in members
        for n in group.members
        for storage in kernels[n].writes
        for reader in readers[storage]
    )


def _fill_traffic(
    group: Group, kernels: list[Kernel], readers: dict[int, list[int]], alive: set[int]
) -> None:
    members = set(group.members)
    made: dict[int, int] = {}
    for number in group.members:
        for storage, size in kernels[number].reads.items():
            if storage not in made:
                group.reads[storage] = max(group.reads.get(storage, 0), size)
        for storage, size in kernels[number].writes.items():
            made[storage] = max(made.get(storage, 0), size)
    for storage, size in made.items():
        later = (n for n in readers[storage] if n > group.members[0] and n not in members)
        if storage in alive or next(later, None) is not None:
            group.writes[storage] = size


def _recompute(groups: list[Group], kernels: list[Kernel], readers: dict[int, list[int]]) -> None:
    group_of = {number: group for group in groups for number in group.members}
    for group in groups:
        if kernels[group.members[0]].backward:
            continue
        for storage, size in list(group.writes.items()):
            later = [n for n in readers[storage] if n > group.members[0]]
            users = {group_of.get(n) for n in later} - {group}
            others = {user for user in users if user is not None}
            if None in users or not all(kernels[u.members[0]].backward for u in others):
                continue
            added = sum(
                read
                for user in others
                for source, read in group.reads.items()
                if source not in user.reads
            )
            if added < size * (1 + len(others)):
                del group.writes[storage]
                for user in others:
                    user.reads.pop(storage, None)
                    user.reads.update(group.reads | user.reads)
