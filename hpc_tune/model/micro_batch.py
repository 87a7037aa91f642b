"""The current micro-batch, for layers that transformers calls without passing it.

    LossModel.forward   with batch_context.use_batch(MicroBatch(...)):
    a layer in it       batch_context.batch

This is the models' only module-level state. It is global, not per thread, because the backward
pass recomputes layers in threads of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc_tune.model.varlen_attention import DocumentParts, DocumentStarts

Document = tuple[slice, int, int]  # rows, start, stop


@dataclass(frozen=True)
class MicroBatch:
    """What layers need to know about a micro-batch.

    ``rows``: the indices of its rows in the global stream, from which dropout derives its masks.
    ``documents`` cover all rows; attention stays within each. ``starts``: where documents begin, on
    a GPU. With neither, transformers' masks separate documents. ``positions_BT`` restart at 0 with
    each document. ``is_real_BT``: which tokens are not padding, if routers are watched.
    ``recompute_cache``: what layers compute in the first pass and need again when recomputed, keyed
    by its owner; None if nothing may be kept. If ranks share rows, ``row_sharing`` (``SharedRows``)
    says how, and ``whole_row_document_starts`` (``DocumentStarts``) where their documents begin;
    ``documents`` and ``starts`` then describe whole rows too, all else only this rank's tokens. If
    keys are gathered, ``document_parts_by_rank`` are the parts of documents of each rank whose
    attention is computed here.
    """

    rows: Sequence[int] = ()
    documents: Sequence[Document] = ()
    starts: DocumentStarts | None = None
    positions_BT: torch.Tensor | None = None
    is_real_BT: torch.Tensor | None = None
    row_sharing: Any = None
    whole_row_document_starts: Any = None
    document_parts_by_rank: Mapping[int, DocumentParts] = field(default_factory=dict)
    recompute_cache: dict[object, Any] | None = field(default=None, compare=False, repr=False)


class CurrentBatch:
    """Holds the current micro-batch for the duration of a context."""

    def __init__(self) -> None:
        self.batch = MicroBatch()

    @contextmanager
    def use_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Make ``batch`` the current one."""
        previous_batch, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = previous_batch

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` bound to the present batch, also when it is recomputed later."""
        batch = self.batch

        def recompute(*args: Any, **kwargs: Any) -> Any:
            with self.use_batch(batch):
                return forward(*args, **kwargs)

        return recompute


batch_context = CurrentBatch()
