"""How many groups of ranks the messages of a layout go through."""

from hpc_tune.step.layout import Layout

_COMMON_AXES = (
    ("tensor",),
    ("replicate", "shard"),
    ("replicate", "shard", "tensor"),
    ("expert",),
    ("replicate", "expert_shard"),
)
_FSDP_AXES = (("shard",), ("replicate",), ("expert_shard",))


def num_groups(layout: Layout, uses_fsdp: bool, ties_ends: bool = False) -> int:
    """Return the groups of several ranks that the first rank is in, the world among them.

    Without those of two neighbours in a pipeline. ``ties_ends``: its first and last stage train one
    weight, the embedding and the head.
    """
    axes = (*_COMMON_AXES, *(_FSDP_AXES if uses_fsdp else ()))
    ranks = {layout.group_of(0, *names) for names in axes} | {tuple(range(layout.size))}
    if ties_ends:
        first, *_ = stages = layout.group_of(0, "pipeline")
        ranks.add((first, stages[-1]) if len(stages) > 1 else (first,))
    return sum(len(members) > 1 for members in ranks)
