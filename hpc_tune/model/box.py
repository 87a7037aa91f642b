"""A box of a tensor: the values that a file or a rank has of it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """``shape`` values of a tensor from ``offset`` on, along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_values(self) -> int:
        """The values in it."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends along each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_within(self, full_shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape has it; what a file says may be of any type."""
        return len(self.offset) == len(self.shape) == len(full_shape) and all(
            type(o) is int and type(f) is int and o >= 0 and o + n <= f
            for o, n, f in zip(self.offset, self.shape, full_shape, strict=True)
        )

    def overlap(self, other: "Box") -> "Box | None":
        """Return the box of the values that both have; None without any."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(b - a for a, b in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def slices(self, origin: tuple[int, ...] = ()) -> tuple[slice, ...]:
        """Return the index of its values in a part that begins at ``origin``, or in the whole."""
        at = origin or (0,) * len(self.offset)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.offset, self.end, at, strict=True))
