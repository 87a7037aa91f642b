"""What is being computed with now, for layers that are not told by their callers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """A value for as long as a context lasts. A global: the backward pass has its own threads."""

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def of(self, value: T) -> Iterator[None]:
        """Make ``value`` the current one."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before

    def remembering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward``, to be recomputed later with the value of now."""
        value = self.value

        def again(*args: Any, **kwargs: Any) -> Any:
            with self.of(value):
                return forward(*args, **kwargs)

        return again
