"""How the ranks are laid out: four axes, their coordinates, and the groups that talk.

Ranks are numbered with ``tensor`` innermost, then ``shard``, ``replicate`` and ``pipeline``: the
axes that talk most are neighbours, which launchers put on one node.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; their product is the world size.

    ``replicate`` counts copies of the base weights and ``shard`` the ranks that hold one copy
    together, each with rows of its own. The ranks of the ``tensor`` axis share each matrix product,
    those of the ``pipeline`` axis hold different decoder blocks; both work on the same rows.
    """

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """The world size."""
        return self.data_size * self.tensor * self.pipeline

    @property
    def data_size(self) -> int:
        """How many ranks have rows of their own."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> "MeshCoordinates":
        """Return where ``rank`` stands on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return MeshCoordinates(replicate, shard, tensor, pipeline, replicate * self.shard + shard)

    def pipeline_of(self, rank: int) -> list[int]:
        """Return the ranks of the pipeline that ``rank`` belongs to, in the order of stages."""
        width = self.data_size * self.tensor
        return list(range(rank % width, self.size, width))

    def __str__(self) -> str:
        axes = {"replicate": self.replicate, "shard": self.shard}
        axes |= {
            name: size
            for name, size in (("tensor", self.tensor), ("pipeline", self.pipeline))
            if size > 1
        }
        return " x ".join(f"{name} {size}" for name, size in axes.items())


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


def world_group() -> dist.ProcessGroup:
    """Return the default process group, which engines run on."""
    group = dist.group.WORLD
    assert group is not None, "engines are made in a joined world"
    return group


class Mesh:
    """The process groups of a layout. Making it is collective; groups of one rank are None.

    A rank makes the groups that it is in, so that their number does not grow with the world.
    ``init_device_mesh`` calls torch for those of all others too: 12,288 times on 4,096 ranks.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Make the groups from the default process group."""
        self.layout, self.coordinates = layout, layout.coordinates(dist.get_rank())
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.tensor = self._group("tensor")
        self.data = self._group("replicate", "shard")
        self.data_tensor = self._group("replicate", "shard", "tensor")
        # Weights that are offloaded are FSDP's also where nothing is sharded.
        self._shards = DeviceMesh.from_group(self._group_of("shard"), device.type)
        self._replicated_shards = self._shards
        if layout.replicate > 1:
            ranks = torch.tensor(self._ranks("replicate", "shard"))
            names = ("replicate", "shard")
            self._replicated_shards = DeviceMesh.from_group(
                [self._group_of(name) for name in names],
                device.type,
                ranks.view(layout.replicate, layout.shard),
                mesh_dim_names=names,
            )

    def weights(self, with_replicas: bool) -> DeviceMesh:
        """Return the mesh over which weights are sharded (1-D), or also replicated (2-D)."""
        return self._replicated_shards if with_replicas else self._shards

    def _group(self, *names: str) -> dist.ProcessGroup | None:
        return self._group_of(*names) if len(self._ranks(*names)) > 1 else None

    def _group_of(self, *names: str) -> dist.ProcessGroup:
        ranks = self._ranks(*names)
        if len(ranks) == self.layout.size:
            return world_group()
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]

    def _ranks(self, *names: str) -> tuple[int, ...]:
        """Return the ranks that stand where this one does on all axes but ``names``."""
        layout, axes = self.layout, ("pipeline", "replicate", "shard", "tensor")
        ranks = torch.arange(layout.size).view([getattr(layout, axis) for axis in axes])
        for number, axis in enumerate(axes):
            if axis not in names:
                ranks = ranks.narrow(number, getattr(self.coordinates, axis), 1)
        return tuple(ranks.flatten().tolist())
