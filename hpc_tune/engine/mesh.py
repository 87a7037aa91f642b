"""How the ranks are laid out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis: ``replicate x shard`` is the world size.

    ``replicate`` counts copies of the base weights, ``shard`` the ranks that hold one copy
    together. Every rank trains on rows of its own, whatever the axis.
    """

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        """The world size."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard}"
