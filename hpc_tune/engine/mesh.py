"""The process groups of a layout, all of several ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hpc_tune import torch_versions
from hpc_tune.step.layout import GROUPING_AXES, Layout


def world_group() -> dist.ProcessGroup:
    """Return the default process group, which engines run on."""
    group = dist.group.WORLD
    assert group is not None, "engines are made in a joined world"
    return group


def wait_until_connected(device: torch.device) -> None:
    """Wait until a GPU has sent its messages, before another group is made or connected.

    NCCL may hang if many communicators connect at once, over PCIe
    (https://github.com/NVIDIA/nccl/issues/2379).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mirror_group_creation(ranks: Sequence[int]) -> None:
    """Do this rank's part while other ``ranks`` make a group by ``use_local_synchronization``.

    NCCL makes a group from the world's, and all ranks of the world take part. And torch tells
    groups of the same ranks apart by the number of groups so far, which each of their ranks counts:
    up to 2.13 by the names that are known, from 2.14 on by the names that were given.
    """
    world = world_group()
    device = world.bound_device_id
    source = distributed_c10d._get_split_source(world) if device is not None else None
    if source is not None:
        source.perform_nocolor_split(device)  # type: ignore[attr-defined]
    name = distributed_c10d._process_group_name(list(ranks), use_hashed_name=True)
    sends_nothing = dist.ProcessGroup(dist.HashStore(), -1, len(ranks))
    distributed_c10d._world.pg_names[sends_nothing] = name


class Mesh:
    """The process groups of a layout. Making it is collective; groups of one rank are None.

    A rank makes only the groups that it is in, so their number does not grow with the world.
    ``init_device_mesh`` calls torch for all other groups too: 12,288 times on 4,096 ranks.
    """

    def __init__(self, layout: Layout, device: torch.device, uses_fsdp: bool) -> None:
        """Make the groups from the default process group; ``step/layout.py`` counts them."""
        self.layout, self.coordinates = layout, layout.coordinates(dist.get_rank())
        self._groups_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.tensor = self.group("tensor")
        self.group("replicate", "shard")
        self.group("replicate", "shard", "tensor")
        self.group("expert")
        self.group("replicate", "expert_shard")
        self.group("context")
        self._shard_meshes: tuple[DeviceMesh, DeviceMesh] | None = None
        if uses_fsdp:
            self._shard_meshes = self._expert_shard_meshes = self._make_meshes("shard", device)
        if uses_fsdp and layout.expert > 1:
            self._expert_shard_meshes = self._make_meshes("expert_shard", device)

    def weight_mesh(self, includes_replicas: bool, for_experts: bool = False) -> DeviceMesh:
        """Return the mesh over which weights are sharded, 1-D.

        ``includes_replicas``: 2-D, with the replicas too, if there are several. ``for_experts``:
        the mesh for experts that are spread over ranks.
        """
        assert self._shard_meshes is not None, "no weights are sharded"
        shard_mesh, replica_mesh = self._expert_shard_meshes if for_experts else self._shard_meshes
        return replica_mesh if includes_replicas else shard_mesh

    def _make_meshes(self, axis: str, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh of ``axis``, and the mesh of replicate x ``axis``."""
        names, replicate = ("replicate", axis), self.layout.replicate
        shards = self.group(axis)
        ranks = torch.tensor(self._ranks_along(*names)).view(replicate, -1)
        if shards is not None:
            shard_mesh = DeviceMesh.from_group(shards, device.type)
        else:
            shard_mesh = _SingletonMesh(device.type, torch.tensor([dist.get_rank()]), [None])
        if replicate == 1:
            return shard_mesh, shard_mesh
        replicas = self._group_along("replicate")
        if shards is None:
            return shard_mesh, _SingletonMesh(device.type, ranks, [replicas, None], names)
        groups = [replicas, shards]
        return shard_mesh, DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of several ranks, in the order in which all ranks made them."""
        return [world_group(), *self._groups_by_ranks.values()] if self.layout.size > 1 else []

    def all_to_all_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups that send all-to-all messages: for experts, and for shared rows."""
        return [group for axis in GROUPING_AXES if (group := self.group(axis)) is not None]

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks along these axes; the first call for them is collective."""
        return self._group_along(*names) if len(self._ranks_along(*names)) > 1 else None

    def first_last_stage_group(self) -> dist.ProcessGroup | None:
        """Return the group of a pipeline's first and last rank; on others None. Collective.

        If tied, both hold the same weight, as the embedding and as the head.
        """
        if self.layout.pipeline <= 2:
            return self.group("pipeline")
        first, *middle_ranks, last = self._ranks_along("pipeline")
        if dist.get_rank() in middle_ranks:
            mirror_group_creation([first, last])
            return None
        return self._group_of_ranks((first, last))

    def _group_along(self, *names: str) -> dist.ProcessGroup:
        return self._group_of_ranks(self._ranks_along(*names))

    def _group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        assert len(ranks) > 1, "a rank needs no group for itself"
        if len(ranks) == self.layout.size:
            return world_group()
        if ranks not in self._groups_by_ranks:
            self._groups_by_ranks[ranks] = dist.new_group(
                list(ranks), use_local_synchronization=True
            )
        return self._groups_by_ranks[ranks]

    def _ranks_along(self, *names: str) -> tuple[int, ...]:
        return self.layout.group_of(dist.get_rank(), *names)


class _SingletonMesh(DeviceMesh):
    """A mesh with an axis of one rank, for weights that FSDP2 holds but does not shard.

    FSDP2 sends nothing along that axis, and asks its group only for size and rank.
    """

    def __init__(
        self,
        device_type: str,
        ranks: torch.Tensor,
        groups: Sequence[dist.ProcessGroup | None],
        names: tuple[str, ...] | None = None,
    ) -> None:
        """``groups`` of the axes, None for that of one rank."""
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False)
        self._groups = groups

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of the axis of one rank, the one that FSDP2 shards over."""
        assert self.mesh_dim_names is not None
        assert names == self.mesh_dim_names[-1], f"{names} is not sharded over"
        return _SingletonMesh(self.device_type, torch.tensor([dist.get_rank()]), [None])

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return what FSDP2 takes for the group of an axis."""
        if isinstance(mesh_dim, str):
            assert self.mesh_dim_names is not None
            mesh_dim = self.mesh_dim_names.index(mesh_dim)
        return self._groups[mesh_dim or 0] or _SingleRankGroup()


class _SingleRankGroup:
    """Answers as a group of one rank would."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


# -- Large messages on every group, before a device's memory is measured.
#
# NCCL connects an algorithm, and allocates its buffers, at the first message of its size: 0.5 to
# 1.6 GB for a group (https://github.com/NVIDIA/nccl/issues/864, 964), and once 2.4 GB among eight
# Hopper GPUs with NVLS (https://github.com/NVIDIA/nccl/issues/1410). Otherwise the first step of
# training would need that memory on a device that is already full.


LARGE_MESSAGE_BYTES = 64 << 20


def send_large_messages(
    mesh: Mesh,
    edges: Mapping[tuple[int, Literal["forward", "backward"]], dist.ProcessGroup],
    device: torch.device,
    num_bytes: int = LARGE_MESSAGE_BYTES,
) -> None:
    """Send ``num_bytes`` by each collective of the engine over the groups of ``mesh``. Collective.

    ``edges``: a pipeline's groups, by the rank that sends forward and the direction. All ranks have
    their groups in the same order.
    """
    message = torch.zeros(num_bytes // 4, device=device)
    for group in mesh.all_groups():
        part = torch.zeros(len(message) // group.size(), device=device)
        all_parts = message[: len(part) * group.size()]
        dist.all_reduce(all_parts, group=group)
        torch_versions.all_gather(all_parts, part, group)
        torch_versions.reduce_scatter(part, all_parts, dist.ReduceOp.SUM, group)
        wait_until_connected(device)
    for group in mesh.all_to_all_groups():
        even_part = message[: len(message) // group.size() * group.size()]
        dist.all_to_all_single(torch.empty_like(even_part), even_part, group=group)
        wait_until_connected(device)
    for (first, direction), group in edges.items():
        [other] = {*dist.get_process_group_ranks(group)} - {first}
        source, target = (first, other) if direction == "forward" else (other, first)
        if dist.get_rank() == source:
            dist.send(message, target, group)
        else:
            dist.recv(message, source, group)
        wait_until_connected(device)
