"""The process groups of a layout."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_tune.step.layout import Layout


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

    def __init__(self, layout: Layout, device: torch.device, uses_fsdp: bool) -> None:
        """Make the groups from the default process group; ``step/groups.py`` counts them."""
        self.layout, self.coordinates = layout, layout.coordinates(dist.get_rank())
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.tensor = self.group("tensor")
        self.group("replicate", "shard")
        self.group("replicate", "shard", "tensor")
        self.group("expert")
        self.group("replicate", "expert_shard")
        self._shards: tuple[DeviceMesh, DeviceMesh] | None = None
        if uses_fsdp:  # of one rank where nothing is sharded: weights that are offloaded
            self._shards = self._shards_of_experts = self._meshes_of("shard", device)
        if uses_fsdp and layout.expert > 1:
            self._shards_of_experts = self._meshes_of("expert_shard", device)

    def weights(self, with_replicas: bool, of_experts: bool = False) -> DeviceMesh:
        """Return the mesh over which weights are sharded (1-D), or also replicated (2-D).

        ``of_experts``: that of experts which are dealt.
        """
        assert self._shards is not None, "no weights are sharded"
        alone, replicated = self._shards_of_experts if of_experts else self._shards
        return replicated if with_replicas else alone

    def _meshes_of(self, axis: str, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh of an axis, and that of replicate x axis."""
        names, replicate = ("replicate", axis), self.layout.replicate
        alone = DeviceMesh.from_group(self._group_of(axis), device.type)
        if replicate == 1:
            return alone, alone
        ranks = torch.tensor(self._ranks(*names)).view(replicate, -1)
        groups = [self._group_of(name) for name in names]
        return alone, DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of several ranks, in the order in which all ranks have made theirs."""
        made = [group for group in self._made.values() if group.size() > 1]
        return [world_group(), *made] if self.layout.size > 1 else []

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks along these axes; the first call for them is collective."""
        return self._group_of(*names) if len(self._ranks(*names)) > 1 else None

    def _group_of(self, *names: str) -> dist.ProcessGroup:
        ranks = self._ranks(*names)
        if len(ranks) == self.layout.size:
            return world_group()
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]

    def _ranks(self, *names: str) -> tuple[int, ...]:
        return self.layout.group_of(dist.get_rank(), *names)
