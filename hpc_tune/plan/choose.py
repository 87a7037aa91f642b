"""Which layout a run takes, and whether the model can be laid out like that."""

from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.pipeline import why_no_stages
from hpc_tune.engine.tensor import why_no_slices
from hpc_tune.errors import ConfigError
from hpc_tune.plan.account import ModelSize, static_bytes
from hpc_tune.units import format_bytes

ROOM_FOR_ACTIVATIONS = 0.6  # of the memory a rank has may go to weights, gradients and optimizer


def choose_layout(
    parallel: ParallelConfig,
    world_size: int,
    size: ModelSize,
    bytes_per_rank: int,
    ranks_per_node: int = 1,
) -> tuple[Layout, str]:
    """Return the layout for this world and the reason in words.

    Axes that are set are kept; tensor and pipeline are 1 unless set; of replicate and shard an
    unset one takes what is left. Where both are unset, all ranks replicate if the model fits into
    ``ROOM_FOR_ACTIVATIONS`` of ``bytes_per_rank``; else each node holds a sharded copy if one fits
    there, so that weights are gathered over its fast links alone (``ranks_per_node``: 1 where nodes
    differ); else all ranks shard.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size.
    """
    if parallel.zero_stage is not None:
        layout = Layout(1, world_size) if parallel.zero_stage == 3 else Layout(world_size, 1)
        return layout, f"DeepSpeed ZeRO {parallel.zero_stage}, as configured"
    tensor, pipeline = parallel.tensor or 1, parallel.pipeline or 1
    replicate, shard = parallel.replicate, parallel.shard
    fixed = tensor * pipeline * (replicate or 1) * (shard or 1)
    rest = world_size // fixed
    if fixed * rest != world_size or (replicate and shard and rest != 1):
        raise ConfigError(_not_the_product(parallel, world_size))
    if replicate is not None or shard is not None:
        layout = Layout(replicate or rest, shard or rest, tensor, pipeline)
        return layout, f"as configured, {format_bytes(static_bytes(size, layout))} per rank"
    whole = Layout(rest, 1, tensor, pipeline)
    needed, room = static_bytes(size, whole), int(bytes_per_rank * ROOM_FOR_ACTIVATIONS)
    sizes = f"{format_bytes(needed)} of {format_bytes(room)}"
    if needed <= room:
        return whole, f"each rank can hold its part of the model ({sizes})"
    if rest == 1:
        return whole, f"the model does not fit, and no rank is left to split it over ({sizes})"
    by_node = ranks_per_node // tensor  # stages are further apart than shards
    if 1 < by_node < rest and rest % by_node == 0:
        hybrid = Layout(rest // by_node, by_node, tensor, pipeline)
        if (needed := static_bytes(size, hybrid)) <= room:
            sizes = f"{format_bytes(needed)} of {format_bytes(room)}"
            return hybrid, f"the ranks of a node can hold the model together ({sizes} each)"
    return Layout(1, rest, tensor, pipeline), f"no rank can hold the model ({sizes})"


def without_effect(layout: Layout, parallel: ParallelConfig) -> list[str]:
    """Return, in words, the settings that do nothing in a layout."""
    settings = {
        "reshard": parallel.reshard != "auto",
        "blocks_per_unit": parallel.blocks_per_unit != 1,
        "reduce_dtype": parallel.reduce_dtype != "fp32",
    }
    return [
        f"parallel.{name}={getattr(parallel, name)} has no effect where nothing is sharded "
        f"({layout})"
        for name, is_set in settings.items()
        if is_set and layout.shard == 1 and parallel.offload_params == "none"
    ]


def check_layout(layout: Layout, parallel: ParallelConfig, config: Any) -> None:
    """Check a layout against the shape of a model, before any weight is read.

    ``config`` is the model's transformers config.

    Raises:
        ConfigError: lists all that is impossible, and what would work.
    """
    problems = []
    if layout.tensor > 1:
        problems += why_no_slices(config, layout.tensor)
    if layout.pipeline > 1:
        problems += why_no_stages(config, layout.pipeline, parallel.stages_per_rank)
    if problems:
        raise ConfigError(
            "this model cannot be laid out like that:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def keeps_gathered(parallel: ParallelConfig, size: ModelSize, layout: Layout, room: int) -> str:
    """Return parallel.reshard with ``auto`` decided: step where a whole copy fits into ``room``."""
    if parallel.reshard != "auto":
        return parallel.reshard
    whole = Layout(layout.data_size, 1, layout.tensor, layout.pipeline)
    return "step" if static_bytes(size, whole) <= room * ROOM_FOR_ACTIVATIONS else "block"


def _not_the_product(parallel: ParallelConfig, world_size: int) -> str:
    axes = {
        name: getattr(parallel, name)
        for name in ("replicate", "shard", "tensor", "pipeline")
        if getattr(parallel, name) is not None
    }
    said = ", ".join(f"parallel.{name}={value}" for name, value in axes.items())
    others = [f"parallel.{n}={v}" for n, v in axes.items() if n in ("tensor", "pipeline")]
    split = (parallel.tensor or 1) * (parallel.pipeline or 1)
    if world_size % split:
        advice = f"start a multiple of {split} ranks, or change {' and '.join(others)}"
    else:
        left = world_size // split
        advice = f"set parallel.replicate={left} or parallel.shard={left}, or neither"
    return (
        f"{said} on {world_size} ranks: expected replicate x shard x tensor x pipeline = "
        f"{world_size}; {advice}"
    )
