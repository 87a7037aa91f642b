"""Telling whoever watches memory before much of it is taken, wherever that happens.

with asking(governor.ensure):   # train
    ...
        ask(num_bytes)          # where memory is filled faster than it is sampled
"""

import contextlib
from collections.abc import Callable, Iterator

_askers: list[Callable[[int], None]] = []


@contextlib.contextmanager
def asking(before: Callable[[int], None]) -> Iterator[None]:
    """Call ``before`` with the bytes that are about to be taken, for what is done herein."""
    _askers.append(before)
    try:
        yield
    finally:
        _askers.remove(before)


def ask(num_bytes: int) -> None:
    """Tell that this process is about to take ``num_bytes`` of host memory."""
    for before in _askers:
        before(num_bytes)
