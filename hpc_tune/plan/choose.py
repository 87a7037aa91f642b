"""Which layout a run takes."""

from hpc_tune.config.schema import ParallelConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.errors import ConfigError
from hpc_tune.plan.account import ModelSize, static_bytes
from hpc_tune.units import format_bytes

ROOM_FOR_ACTIVATIONS = 0.6  # of the memory a rank has may go to weights, gradients and optimizer


def choose_layout(
    parallel: ParallelConfig, world_size: int, size: ModelSize, bytes_per_rank: int
) -> tuple[Layout, str]:
    """Return the layout for this world and the reason in words.

    Axes that are set are kept; unset ones replicate where the model fits into
    ``ROOM_FOR_ACTIVATIONS`` of ``bytes_per_rank``, else they shard.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size.
    """
    replicate, shard = parallel.replicate, parallel.shard
    if replicate is not None or shard is not None:
        if replicate is None:
            replicate = world_size // (shard or 1)
        if shard is None:
            shard = world_size // replicate
        if replicate * shard != world_size or 1 not in (replicate, shard):
            raise ConfigError(
                f"parallel.replicate={parallel.replicate}, parallel.shard={parallel.shard} on "
                f"{world_size} ranks: expected replicate x shard = {world_size}, one of them 1; "
                f"set parallel.replicate={world_size} or parallel.shard={world_size}, or neither"
            )
        layout = Layout(replicate, shard)
        return layout, f"as configured, {format_bytes(static_bytes(size, layout))} per rank"
    whole = Layout(world_size, 1)
    needed, room = static_bytes(size, whole), int(bytes_per_rank * ROOM_FOR_ACTIVATIONS)
    sizes = f"{format_bytes(needed)} of {format_bytes(room)}"
    if needed <= room or world_size == 1:
        return whole, f"each rank can hold the model ({sizes})"
    return Layout(1, world_size), f"no rank can hold the model ({sizes})"
