"""How the ranks are laid out: four axes, their coordinates, and the groups that talk.

Ranks are numbered with ``tensor`` innermost, then ``shard``, ``replicate`` and ``pipeline``: the
axes that talk most are neighbours, which launchers put on one node.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


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

    def place(self, rank: int) -> "Place":
        """Return where ``rank`` stands on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Place(replicate, shard, tensor, pipeline, replicate * self.shard + shard)

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
class Place:
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


class Mesh:
    """The process groups of a layout. Making it is collective; groups of one rank are None."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Make the groups from the default process group."""
        self.layout, self.place = layout, layout.place(dist.get_rank())
        self.device_mesh = dist.init_device_mesh(
            device.type,
            (layout.pipeline, layout.replicate, layout.shard, layout.tensor),
            mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
        )
        self.tensor = self._group("tensor")
        self.data = self._group("replicate", "shard")
        self.data_tensor = self._group("replicate", "shard", "tensor")

    def weights(self, with_replicas: bool) -> Any:
        """Return the mesh over which weights are sharded (1-D), or also replicated (2-D)."""
        if with_replicas and self.layout.replicate > 1:
            return self.device_mesh["replicate", "shard"]
        return self.device_mesh["shard"]

    def _group(self, *names: str) -> dist.ProcessGroup | None:
        used = tuple(name for name in names if getattr(self.layout, name) > 1)
        if not used:
            return None
        mesh = self.device_mesh[used]
        return (mesh._flatten() if len(used) > 1 else mesh).get_group()
