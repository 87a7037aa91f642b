"""A pseudo-random permutation of range(n) that is computed element by element, without memory.

A Feistel network over Z_a x Z_b with a * b just above n, so that hardly an element leaves the
range; one that does is sent through again until it is back in it ("cycle walking"). J. Black and P.
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. It is no cipher here: the round
function is a multiply-and-shift hash.
"""

import hashlib
import math

ROUNDS = 6
_MASK = (1 << 64) - 1


class Shuffle:
    """The permutation of range(n) that belongs to a key such as (seed, epoch, purpose)."""

    __slots__ = ("_a", "_b", "_keys", "n")

    def __init__(self, n: int, *key: int | str) -> None:
        """Derive the round keys; costs the same for any n."""
        self.n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [
            int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * ROUNDS, 8)
        ]

    def __call__(self, index: int) -> int:
        """Return where ``index`` goes."""
        a, b = self._a, self._b
        while True:
            left, right = divmod(index, b)
            for number, key in enumerate(self._keys):
                if number & 1:
                    right = (right + _mix(left ^ key)) % b
                else:
                    left = (left + _mix(right ^ key)) % a
            index = left * b + right
            if index < self.n:
                return index


def _mix(value: int) -> int:
    """Hash 64 bits (the finaliser of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
