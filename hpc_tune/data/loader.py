"""Prepared data -> the micro-batches of one rank for each optimizer step.

    PackedSampler (order.py): stream row -> documents
    step: rows [start, start + global_size) -> this rank's every size-th -> micro-batches -> Batch

The rows of a step depend only on the number of rows consumed before: not on the number of ranks or
the micro-batch size. So the whole state is one number, and resuming at any row takes no time. A
thread prefetches steps under a byte budget; a step counts as consumed when it is handed out.

Shapes: B rows, T tokens per row.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from hpc_tune.batch import Batch
from hpc_tune.config.data import DataForm
from hpc_tune.data.counts import round_up_length
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import ORDER_VERSION, SampleOrder
from hpc_tune.data.packed_rows import PackedRows, Rows, make_micro_batches
from hpc_tune.errors import CheckpointError, ConfigError
from hpc_tune.log import log
from hpc_tune.world.device import set_thread_device

# -- Prefetches steps in one background thread, under a byte budget.


BuildStep = Callable[[int], tuple[list[Batch], int] | None]
CLOSE_TIMEOUT_S = 60.0


class Prefetcher:
    """A queue of steps that never holds more than ``limit`` bytes.

    ``build(start)`` returns the step that begins at a row, and the row after it; None at the end
    of the stream. ``step_bytes`` is the most that a step can take: a step is built only if that
    much is free. If not even one step fits (or the limit is 0), each step is built on request,
    without a thread.
    """

    def __init__(self, build: BuildStep, limit_bytes: int, step_bytes: int) -> None:
        """Begin at row 0; the thread starts with the first ``take``."""
        self._build, self._limit, self._step_bytes = build, limit_bytes, step_bytes
        self._build_lock = threading.Lock()
        self._condition = threading.Condition()
        # Guarded by _condition. The queue holds the steps up to row _next_row without a gap.
        self._queue: deque[tuple[int, list[Batch], int]] = deque()
        self._queued_bytes = self._next_row = self._generation = 0
        self._is_at_end = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self, start: int) -> list[Batch]:
        """Return the step that begins at ``start``, where the last one ended or ``restart`` put it.

        An error of ``build`` in the thread is raised here.
        """
        with self._condition:
            while self._error is None and not self._queue and self._step_bytes <= self._limit:
                if self._is_at_end or self._is_closed:
                    break
                self._start_thread()
                self._condition.wait(CLOSE_TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if self._queue:
                row, batches, num_bytes = self._queue.popleft()
                assert row == start, f"prefetched the step from row {row}, asked for row {start}"
                self._queued_bytes -= num_bytes
                self._condition.notify_all()
                return batches
        with self._build_lock:
            step = self._build(start)
        assert step is not None, f"row {start} is after the end of the stream"
        with self._condition:
            self._next_row = step[1]
        return step[0]

    def restart(self, start: int) -> None:
        """Discard the queue and continue at ``start``."""
        with self._condition:
            self._queue.clear()
            self._queued_bytes, self._next_row = 0, start
            self._is_at_end, self._error = False, None
            self._generation += 1
            self._condition.notify_all()

    def set_limit_bytes(self, limit_bytes: int) -> None:
        """Change the budget; the steps farthest ahead are discarded first."""
        with self._condition:
            self._limit = limit_bytes
            while self._queue and self._queued_bytes > limit_bytes:
                self._next_row, _, num_bytes = self._queue.pop()
                self._queued_bytes -= num_bytes
                self._is_at_end = False
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread and discard the queue; later steps are built when they are asked for."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None
        self.restart(self._queue[0][0] if self._queue else self._next_row)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def _has_room(self) -> bool:
        return self._queued_bytes + self._step_bytes <= self._limit

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._is_closed and (
                    self._is_at_end or self._error is not None or not self._has_room()
                ):
                    self._condition.wait()
                if self._is_closed:
                    return
                start, generation = self._next_row, self._generation
            step, error = None, None
            try:
                with self._build_lock:
                    step = self._build(start)
            except BaseException as caught:  # handed to the thread that asks for the step
                error = caught
            with self._condition:
                if generation == self._generation and self._next_row == start and self._has_room():
                    self._queue_step(start, step, error)
                self._condition.notify_all()

    def _queue_step(
        self, start: int, step: tuple[list[Batch], int] | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self._error = error
        elif step is None:
            self._is_at_end = True
        else:
            batches, self._next_row = step
            num_bytes = sum(batch.num_bytes for batch in batches)
            self._queue.append((start, batches, num_bytes))
            self._queued_bytes += num_bytes


# -- The micro-batches of one rank.


PREFETCH_BYTES = 64 << 20
BYTES_PER_TOKEN = 3 * 8  # tokens, labels and positions, int64
# A pair takes 25 bytes more, and has at least 4 tokens. A labeled answer has at least 2 tokens,
# and the mismatched answers may take as much again.
BYTES_PER_TOKEN_OF_FORM: dict[DataForm, int] = {
    "answers": BYTES_PER_TOKEN,
    "pairs": BYTES_PER_TOKEN + 8,
    "labels": 2 * BYTES_PER_TOKEN + 16,
}
_State = dict[str, Any]


class Loader:
    """Gives each data-parallel rank its share of the stream of rows, step by step."""

    def __init__(
        self,
        rows: Rows,
        order: SampleOrder,
        *,
        global_size: int,
        total_rows: int | None = None,
        rank: int = 0,
        size: int = 1,
        micro_size: int = 1,
        prefetch_bytes: int | None = None,
    ) -> None:
        """Begin with the first of ``rows``, whose order is ``order``; no row is read yet.

        ``rank`` and ``size`` are those of the data-parallel axis. ``total_rows`` is where the
        stream ends, by default after one epoch; ``global_size`` rows go into each step over all
        ranks, fewer into the last one. ``prefetch_bytes``: see ``set_prefetch``; None means
        ``prefetch_limit_bytes``.
        """
        self._global_size, self.stream = global_size, rows
        self._rank, self._size, self._micro_size = rank, size, micro_size
        self._identity: _State = {"order": ORDER_VERSION, **asdict(order)}
        self.total_rows = rows.num_rows if total_rows is None else total_rows
        self._rows = 0
        self._pin_device: torch.device | None = None
        limit = self.prefetch_bytes if prefetch_bytes is None else prefetch_bytes
        self._prefetcher = Prefetcher(self._build_step, limit, self._step_bytes())

    @property
    def num_rows_per_epoch(self) -> int:
        """Rows per epoch."""
        return self.stream.num_rows

    @property
    def padding(self) -> float:
        """The share of the rows' tokens that packing leaves empty."""
        return self.stream.padding

    @property
    def prefetch_bytes(self) -> int:
        """How many bytes prefetched steps may take, unless ``set_prefetch`` was called."""
        return prefetch_limit_bytes(self._step_bytes())

    @property
    def micro_size(self) -> int:
        """Rows per micro-batch."""
        return self._micro_size

    @property
    def rows(self) -> int:
        """Rows consumed so far, over all ranks."""
        return self._rows

    @property
    def epoch(self) -> float:
        """Epochs consumed so far."""
        return self.stream.epoch_at(self._rows)

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches for the next step: the same number on every rank.

        An empty list means on every rank that the stream has ended.

        Raises:
            DataError: if the data cannot be read, by this thread or the prefetching one.
        """
        if self._rows >= self.total_rows:
            return []
        batches = self._prefetcher.take(self._rows)
        self._rows = self._find_step_end(self._rows)
        return batches

    def state(self) -> _State:
        """Return the position in the stream; prefetched steps do not count."""
        return {"rows": self._rows, **self._identity, **self.stream.state()}

    def restore(self, state: _State) -> None:
        """Resume at the position that ``state`` holds; takes no time, on any number of ranks.

        Raises:
            ConfigError: if it is a position in another stream.
            CheckpointError: if it is not a position.
        """
        changes = {k: v for k, v in self._identity.items() if state.get(k) != v}
        if changes:
            diffs = [f"{k}: {state.get(k)} in the checkpoint, {v} now" for k, v in changes.items()]
            raise ConfigError(
                f"the rows have another order than this run was trained with ({'; '.join(diffs)}). "
                "Give the old values, or another run.dir"
            )
        self.stream.require_state(state)
        if not isinstance(state.get("rows"), int):
            raise CheckpointError("the checkpoint's position in the data has no row number")
        self._rows = state["rows"]
        self._prefetcher.restart(self._rows)

    def set_micro_size(self, num_rows: int) -> None:
        """Change the micro-batch size of later steps; prefetched steps are discarded."""
        self._micro_size = num_rows
        self._prefetcher.restart(self._rows)

    def set_prefetch(self, num_bytes: int) -> None:
        """Limit the bytes of prefetched steps; 0 disables prefetching."""
        self._prefetcher.set_limit_bytes(num_bytes)

    def discard_prefetched_steps(self) -> None:
        """Discard prefetched steps, after something that they contain has changed."""
        self._prefetcher.restart(self._rows)

    def pin_batches(self, gpu: torch.device) -> None:
        """Build steps in pinned memory from now on, for a GPU to copy them while it computes."""
        self._pin_device = gpu
        self._prefetcher.restart(self._rows)

    def close(self) -> None:
        """End the thread."""
        self._prefetcher.close()

    def _find_step_end(self, start: int) -> int:
        return min(start + self._global_size, self.total_rows)

    def _step_bytes(self) -> int:
        """Return the most that a step of this rank takes: rows * seq_len * 24 bytes or more."""
        rows = -(-self._global_size // self._size)
        # Weights are fp32, one for each token with loss.
        token_bytes = BYTES_PER_TOKEN_OF_FORM[self.stream.form] + 4 * self.stream.has_weights
        return rows * self.stream.seq_len * token_bytes

    def _build_step(self, start: int) -> tuple[list[Batch], int] | None:
        """Build the step that begins at stream row ``start``; None after the end of the stream."""
        stop, micro_size = self._find_step_end(start), self._micro_size
        if start >= stop:
            return None
        own_rows = range(start + self._rank, stop, self._size)
        max_rows_per_rank = -(-(stop - start) // self._size)
        batches = make_micro_batches(self.stream, own_rows, max_rows_per_rank, micro_size)
        if self._pin_device is None:
            return batches, stop
        set_thread_device(self._pin_device)
        return [batch.pinned() for batch in batches], stop


class HeldOutRows:
    """A fixed sample of held-out rows, packed once: the same for any number of ranks."""

    def __init__(
        self,
        store: TokenStore,
        order: SampleOrder,
        num_rows: int | None = None,
        rank: int = 0,
        size: int = 1,
        document_limit: int | None = None,
    ) -> None:
        """Pack the lengths of up to ``document_limit`` documents. ``num_rows``: None means all."""
        self._packed_rows, self._rank, self._size = (
            PackedRows(store, order, document_limit),
            rank,
            size,
        )
        num_packed = self._packed_rows.num_rows
        self._num_rows = min(num_rows or num_packed, num_packed)
        if rank == 0:
            warn_of_truncated_documents(store, order.seq_len, include_advice=False)

    def num_batches(self, micro_size: int) -> int:
        """Return how many batches of ``micro_size`` rows each rank gets."""
        return -(-self._num_rows // (self._size * micro_size))

    def set_reference_log_probs(self, reference_D2: np.ndarray) -> None:
        """Set the log-probabilities of preferences under the reference, as in ``PackedRows``."""
        self._packed_rows.set_reference_log_probs(reference_D2)

    def documents_in(self, batch: Batch) -> list[int]:
        """Return the store's numbers of a batch's documents, in their order in the batch.

        Over all rows and ranks, each document comes once. A ``Loader`` with the same order has the
        same rows.
        """
        return self._packed_rows.documents_in(batch)

    def batches(self, micro_size: int = 1) -> Iterator[Batch]:
        """Yield this rank's batches: the same number on every rank.

        The end is padded with ``padding_batch``.
        """
        for start in range(0, self._num_rows, self._size * micro_size):
            stop = min(start + self._size * micro_size, self._num_rows)
            own_rows = range(start + self._rank, stop, self._size)
            yield from make_micro_batches(self._packed_rows, own_rows, 1, micro_size)


def prefetch_limit_bytes(step_bytes: int) -> int:
    """Return how many bytes prefetched steps may take: at least one step, however large it is."""
    return max(PREFETCH_BYTES, step_bytes)


def warn_of_truncated_documents(
    store: TokenStore, seq_len: int, include_advice: bool = True
) -> None:
    """Warn if documents are longer than a row, or were before they were prepared; if
    ``include_advice``, say which data.seq_len would keep them whole.
    """
    prepared_seq_len, counters = store.attributes.seq_len, store.attributes.counters
    num_cut = counters.truncated + counters.cut_prompts
    lengths = _count_overlong_documents(store, seq_len)
    if prepared_seq_len < seq_len and num_cut:
        log.warning(
            "%s was prepared with seq_len %d: %d documents are cut there, although data.seq_len is"
            " %d; prepare it again to keep more of them",
            store.path,
            prepared_seq_len,
            num_cut,
            seq_len,
        )
    if prepared_seq_len < seq_len or not lengths:
        return
    num_dropped = max(sum(counters.cut_lengths.values()) - num_cut, 0)
    excess = np.maximum(store.length_values - seq_len, 0)
    longest, p99 = _length_quantile(lengths, 1.0), _length_quantile(lengths, 0.99)
    advice = (
        f". data.seq_len={longest} holds all of them{f', {p99} 99%' if p99 < longest else ''}; "
        "docs/long-rows.md says what makes such rows fit (parallel.context, parallel.row_pieces, "
        "parallel.offload_activations), and what they take: python -m hpc_tune plan --config FILE "
        f"data.seq_len={longest}"
    )
    log.warning(
        "%d of %d documents in %s are longer than data.seq_len=%d and are cut there%s: about %s"
        " tokens are not used%s%s",
        sum(lengths.values()),
        store.num_documents + num_dropped,
        store.path,
        seq_len,
        f", or dropped ({num_dropped})" if num_dropped else "",
        f"{counters.cut_tokens + int(excess @ store.length_counts):,}",
        " (texts that were split lose none if they are prepared again with this data.seq_len)"
        if counters.split and excess.any()
        else "",
        advice if include_advice else "",
    )


def _count_overlong_documents(store: TokenStore, seq_len: int) -> Counter[int]:
    """Count the documents of more than ``seq_len`` tokens by their rounded length, for documents
    that were cut in preparation their length before that.
    """
    counters, values = store.attributes.counters, store.length_values.tolist()
    length_counts = Counter(dict(zip(values, store.length_counts.tolist(), strict=True)))
    if counters.cut_lengths:  # cut documents now count as full rows
        length_counts[store.attributes.seq_len] -= counters.truncated
    totals = Counter({int(length): num for length, num in counters.cut_lengths.items()})
    for length, num in length_counts.items():
        totals[round_up_length(length)] += num if length > seq_len else 0
    return Counter({length: num for length, num in totals.items() if length > seq_len and num > 0})


def _length_quantile(lengths: Counter[int], fraction: float) -> int:
    """Return the length that ``fraction`` of the documents do not exceed."""
    sorted_lengths = sorted(lengths)
    ends = np.cumsum([lengths[length] for length in sorted_lengths])
    return sorted_lengths[int(np.searchsorted(ends, fraction * ends[-1]))]
