"""How the ranks are laid out: four axes, the coordinates of a rank, and who shares an axis.

Ranks are numbered with ``tensor`` innermost, then ``shard``, ``replicate`` and ``pipeline``: the
axes that talk most are neighbours, which launchers put on one node.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

_OUTERMOST_FIRST = ("pipeline", "replicate", "expert_shard", "expert", "tensor")
_SHARD_AXES = ("expert_shard", "expert")


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; their product is the world size.

    ``replicate`` counts copies of the base weights and ``shard`` the ranks that hold one copy
    together, each with rows of its own. The ranks of the ``tensor`` axis share each matrix product,
    those of the ``pipeline`` axis hold different decoder blocks; both work on the same rows.

    A mixture's routed experts are dealt over ``expert`` neighbours of the shard axis, and those of
    one rank are sharded over the ``expert_shard`` ranks that have the same: for experts the shard
    axis is expert_shard x expert.
    """

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """The world size."""
        return self.data_size * self.tensor * self.pipeline

    @property
    def data_size(self) -> int:
        """How many ranks have rows of their own."""
        return self.replicate * self.shard

    @property
    def expert_shard(self) -> int:
        """How many ranks of the shard axis have the same experts."""
        return self.shard // self.expert

    def size_of(self, axes: Iterable[str]) -> int:
        """Return the ranks of a group along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def rows_per_rank(self, global_rows: int) -> int:
        """Return the rows of a step on the rank that has most."""
        return -(-global_rows // self.data_size)

    def coordinates(self, rank: int) -> "MeshCoordinates":
        """Return where ``rank`` stands on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return MeshCoordinates(replicate, shard, tensor, pipeline, replicate * self.shard + shard)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that stand where ``rank`` does on all axes but ``axes``, in order."""
        ranks, stride = [rank], self.size
        for axis in _OUTERMOST_FIRST:
            size = getattr(self, axis)
            stride //= size
            if axis in axes or (axis in _SHARD_AXES and "shard" in axes):
                own = rank // stride % size
                ranks = [r + (i - own) * stride for r in ranks for i in range(size)]
        return tuple(ranks)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks of each group along these axes, each in order."""
        groups = (self.group_of(rank, *axes) for rank in range(self.size))
        return list(dict.fromkeys(groups))

    @property
    def saved(self) -> dict[str, int]:
        """What checkpoints say of it: ranks by axis, and by ``expert`` where experts are dealt."""
        return {name: n for name, n in asdict(self).items() if name != "expert" or n > 1}

    def __str__(self) -> str:
        axes = {"replicate": self.replicate, "shard": self.shard}
        axes |= {
            name: size
            for name, size in (("tensor", self.tensor), ("pipeline", self.pipeline))
            if size > 1
        }
        dealt = f", expert {self.expert}" if self.expert > 1 else ""
        return " x ".join(f"{name} {size}" for name, size in axes.items()) + dealt


@dataclass(frozen=True)
class MeshCoordinates:
    """A rank's coordinate on each axis; ``data`` says which rows it gets."""

    replicate: int
    shard: int
    tensor: int
    pipeline: int
    data: int

    @property
    def counts_rows(self) -> bool:
        """Whether this rank speaks for its rows where ranks that share them are added up."""
        return self.tensor == 0 and self.pipeline == 0
