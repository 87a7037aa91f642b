"""Prefetches steps in one background thread, under a byte budget."""

import threading
from collections import deque
from collections.abc import Callable

from hpc_tune.batch import Batch

Build = Callable[[int], tuple[list[Batch], int] | None]
CLOSE_TIMEOUT_S = 60.0


class Prefetcher:
    """A queue of steps that never holds more than ``limit`` bytes.

    ``build(start)`` returns the step that begins at a row, and the row after it; None at the end
    of the stream. ``step_bytes`` is the most that a step can take: a step is built only if that
    much is free. Where not even one fits (or the limit is 0), each step is built when it is asked
    for, without a thread.
    """

    def __init__(self, build: Build, limit: int, step_bytes: int) -> None:
        """Begin at row 0; the thread starts with the first ``take``."""
        self._build, self._limit, self._step_bytes = build, limit, step_bytes
        self._building = threading.Lock()
        self._changed = threading.Condition()
        # Guarded by _changed. The queue holds the steps up to row _next without a gap.
        self._queue: deque[tuple[int, list[Batch], int]] = deque()
        self._queued_bytes = self._next = self._generation = 0
        self._is_at_end = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self, start: int) -> list[Batch]:
        """Return the step that begins at ``start``, which follows the last one, or the restart.

        An error of ``build`` in the thread is raised here.
        """
        with self._changed:
            while self._error is None and not self._queue and self._step_bytes <= self._limit:
                if self._is_at_end or self._is_closed:
                    break
                self._start_thread()
                self._changed.wait(CLOSE_TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if self._queue:
                row, batches, num_bytes = self._queue.popleft()
                assert row == start, f"prefetched the step from row {row}, asked for row {start}"
                self._queued_bytes -= num_bytes
                self._changed.notify_all()
                return batches
        with self._building:
            built = self._build(start)
        assert built is not None, f"row {start} is after the end of the stream"
        with self._changed:
            self._next = built[1]
        return built[0]

    def restart(self, start: int) -> None:
        """Discard the queue and continue at ``start``."""
        with self._changed:
            self._queue.clear()
            self._queued_bytes, self._next = 0, start
            self._is_at_end, self._error = False, None
            self._generation += 1
            self._changed.notify_all()

    def set_limit(self, limit: int) -> None:
        """Change the budget; the steps farthest ahead are discarded first."""
        with self._changed:
            self._limit = limit
            while self._queue and self._queued_bytes > limit:
                self._next, _, num_bytes = self._queue.pop()
                self._queued_bytes -= num_bytes
                self._is_at_end = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and discard the queue; later steps are built when they are asked for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None
        self.restart(self._queue[0][0] if self._queue else self._next)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def _has_room(self) -> bool:
        return self._queued_bytes + self._step_bytes <= self._limit

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (
                    self._is_at_end or self._error is not None or not self._has_room()
                ):
                    self._changed.wait()
                if self._is_closed:
                    return
                start, generation = self._next, self._generation
            built, error = None, None
            try:
                with self._building:
                    built = self._build(start)
            except BaseException as caught:  # handed to the thread that asks for the step
                error = caught
            with self._changed:
                if generation == self._generation and self._next == start and self._has_room():
                    self._keep(start, built, error)
                self._changed.notify_all()

    def _keep(
        self, start: int, built: tuple[list[Batch], int] | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self._error = error
        elif built is None:
            self._is_at_end = True
        else:
            batches, self._next = built
            num_bytes = sum(batch.num_bytes for batch in batches)
            self._queue.append((start, batches, num_bytes))
            self._queued_bytes += num_bytes
