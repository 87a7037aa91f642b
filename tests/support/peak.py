"""The peak host memory of a process during a block."""

import threading
from typing import Any

from hpc_tune.memory.host import own_bytes

POLL_S = 0.005


class Peak:
    """``with Peak() as peak: ...``; after it ``peak.bytes`` of anonymous + shared memory."""

    def __enter__(self) -> "Peak":
        self.bytes = own_bytes()
        self._finished = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._finished.set()
        self._watcher.join()
        self.bytes = max(self.bytes, own_bytes())

    def _watch(self) -> None:
        while not self._finished.wait(POLL_S):
            self.bytes = max(self.bytes, own_bytes())
