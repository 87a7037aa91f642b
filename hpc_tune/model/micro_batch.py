"""The micro-batch that is being computed, for layers that transformers calls without it.

    LossModel.forward   with batch_context.using(MicroBatch(...)):
    a layer in it       batch_context.batch

The one module state of the models. A global: the backward pass, which recomputes layers, has its
own threads.
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
    """What layers need to know of a micro-batch.

    ``rows`` are the indices of its rows in the global stream, by which dropout draws its masks.
    ``documents`` make up all rows; attention stays within each. On a GPU ``starts`` are where they
    begin. With neither, transformers' masks keep documents apart. ``positions_BT`` begin again at 0
    with each document. ``real_BT``: which tokens are no padding, where routers are watched.
    ``kept``: what layers find out in a first pass and need again when they are recomputed, by
    whom; None where nothing may be kept. ``share``: of rows that ranks share, how
    (``SharedRows``), and ``whole_rows``, where their documents begin (``DocumentStarts``);
    ``documents`` and ``starts`` are of whole rows too then, all else of the own tokens. Where keys
    are gathered, ``own_documents`` are the parts of documents that each rank has whose attention is
    computed here.
    """

    rows: Sequence[int] = ()
    documents: Sequence[Document] = ()
    starts: DocumentStarts | None = None
    positions_BT: torch.Tensor | None = None
    real_BT: torch.Tensor | None = None
    share: Any = None
    whole_rows: Any = None
    own_documents: Mapping[int, DocumentParts] = field(default_factory=dict)
    kept: dict[object, Any] | None = field(default=None, compare=False, repr=False)


class CurrentBatch:
    """The current micro-batch, for as long as a context lasts."""

    def __init__(self) -> None:
        self.batch = MicroBatch()

    @contextmanager
    def using(self, batch: MicroBatch) -> Iterator[None]:
        """Make ``batch`` the current one."""
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward``, which runs with the batch of now whenever it is recomputed."""
        batch = self.batch

        def recompute(*args: Any, **kwargs: Any) -> Any:
            with self.using(batch):
                return forward(*args, **kwargs)

        return recompute


batch_context = CurrentBatch()
