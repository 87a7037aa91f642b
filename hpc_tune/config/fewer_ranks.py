"""The layout for fewer ranks than a configuration was written for, as after the loss of a node."""

import math

from hpc_tune.config.parallel import ParallelConfig


def fit_layout(parallel: ParallelConfig, num_ranks: int) -> dict[str, int] | None:
    """Return the axes to set anew for ``num_ranks`` ranks; ``None`` if no layout divides them.

    Axes that are not set follow by themselves. tensor and pipeline stay, since they fit the model;
    expert becomes the largest divisor of the one set that divides the rest, shard the largest
    multiple of it up to the one set that does, and replicate the remaining factor.
    """
    rest, remainder = divmod(num_ranks, (parallel.tensor or 1) * (parallel.pipeline or 1))
    if remainder or not rest:
        return None
    replicate, shard = parallel.replicate, parallel.shard
    if parallel.zero_stage is not None or (replicate is None and shard is None):
        return {}
    if shard is None:
        axes = {"replicate": _largest_divisor(rest, replicate or 1)}
    else:
        # Experts stay dealt over as many ranks if that can be, else over fewer.
        expert = math.gcd(rest, parallel.expert)
        axes = {
            "shard": expert * _largest_divisor(rest // expert, shard // expert),
            "expert": expert,
        }
        if replicate is not None:
            axes["replicate"] = rest // axes["shard"]
    return {name: size for name, size in axes.items() if size != getattr(parallel, name)}


def _largest_divisor(of: int, most: int) -> int:
    return next(size for size in range(min(of, most), 0, -1) if of % size == 0)
