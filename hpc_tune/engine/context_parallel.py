"""Rows shared by the ranks of the context axis; see ``model/shared_rows.py``."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from hpc_tune import torch_versions
from hpc_tune.batch import Batch
from hpc_tune.engine.base import EngineSettings
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.mesh import LARGE_MESSAGE_BYTES, wait_until_connected
from hpc_tune.errors import ConfigError
from hpc_tune.model.kernels import explain_unsupported_document_parts
from hpc_tune.model.loss import LossModel
from hpc_tune.model.packed_attention import force_document_attention
from hpc_tune.model.shared_rows import (
    RankSharedRows,
    RowCollectives,
    SharedRows,
    shard_batch_to_rank,
)
from hpc_tune.step.layout import Layout


def make_context_group(layout: Layout, device: torch.device) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share this one's rows, None if it is alone. Collective.

    On a GPU the group is connected here: otherwise the first pass would connect it between its
    other messages. An engine with a ``Mesh`` takes the group from there.
    """
    ranks = layout.group_of(dist.get_rank(), "context")
    if len(ranks) == 1:
        return None
    group = dist.group.WORLD
    if len(ranks) < layout.size:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    if device.type == "cuda":
        buffer = torch.zeros(LARGE_MESSAGE_BYTES // 4 // len(ranks) * len(ranks), device=device)
        dist.all_reduce(buffer, group=group)
        dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group)
        part = buffer[: len(buffer) // len(ranks)].clone()
        torch_versions.all_gather(buffer, part, group)
        torch_versions.reduce_scatter(part, buffer, group=group)
        wait_until_connected(device)
    return group


def share_rows(
    group: dist.ProcessGroup | None,
    collectives: CountedCollectives,
    settings: EngineSettings,
    dtype: torch.dtype,
) -> RankSharedRows | None:
    """Return this rank's share of the rows of a context group, or None if rows are not shared.

    ``dtype`` is that of attention.
    """
    if group is None:
        return None
    messages = RowCollectives(
        lambda out, x: collectives.all_to_all(out, x, None, None, group),
        partial(collectives.all_reduce, group=group),
        partial(collectives.all_gather_into, group=group),
        partial(collectives.reduce_scatter_into, group=group),
    )
    part = settings.plan.row_shard(group.rank())
    kernel_supports_parts = not (
        part.is_head_tail
        and explain_unsupported_document_parts(settings.plan.model, dtype, settings.device)
    )
    return RankSharedRows(part, messages, kernel_supports_parts)


def parallelize_attention(module: LossModel, row_sharing: SharedRows | None) -> None:
    """Make the attention of ``module`` exchange the tokens of its rows.

    Raises:
        ConfigError: if its attention cannot be replaced, or needs a mask; in a run, the
            architecture check has reported that before.
    """
    if row_sharing is None:
        return
    uses_eager = force_document_attention(module.causal_lm())
    if uses_eager is None or module.needs_mask:
        raise ConfigError("its attention uses its own masks, which do not cover whole rows")
    row_sharing.uses_eager, module.row_sharing = uses_eager, row_sharing


def try_parallelizing_attention(module: LossModel) -> bool:
    """Return whether ``parallelize_attention`` is possible; replaces the attention to find out."""
    return not module.needs_mask and force_document_attention(module.causal_lm()) is not None


def shard_batches(batches: Sequence[Batch], row_sharing: RankSharedRows | None) -> list[Batch]:
    """Return this rank's tokens of each batch."""
    if row_sharing is None:
        return list(batches)
    return [shard_batch_to_rank(batch, row_sharing.part) for batch in batches]
