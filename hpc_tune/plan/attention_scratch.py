"""What torch's variable-length attention takes in its backward pass, which its fake does not show.

Shapes: S tokens, H heads, K heads of keys and values, D values per head, N documents.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from hpc_tune import torch_versions
from hpc_tune.plan.traced_memory import replaced_attribute

BLOCK = 128  # rows that the kernel leaves free between two documents


@contextlib.contextmanager
def simulating_scratch() -> Iterator[None]:
    """Let the fake kernel take, and free, as much memory as the real one in its backward pass.

    That is when the gradient of its result arrives: the three gradients, sums in fp32 for each
    head, and where heads share keys the gradients of keys and values of each.
    """
    kernel: Any = torch_versions.varlen_attention

    @functools.wraps(kernel)
    def attend(
        query_SHD: Any, key_SKD: Any, value_SKD: Any, starts_N: Any, *more: Any, **options: Any
    ) -> Any:
        out_SHD = kernel(query_SHD, key_SKD, value_SKD, starts_N, *more, **options)
        if out_SHD.requires_grad:
            num_bytes = scratch_bytes(query_SHD.shape, key_SKD.shape[1], len(starts_N) - 1)
            out_SHD.register_hook(lambda grad: _allocate_briefly(num_bytes, grad))
        return out_SHD

    with replaced_attribute(torch_versions, "varlen_attention", attend):
        yield


def scratch_bytes(shape_SHD: tuple[int, ...], num_keys: int, num_documents: int) -> int:
    """Return what the backward pass takes of 16-bit values, with the gradients that it returns.

    In fp32: (D' + 1) x H for each of S + 128 N rows, D' being D rounded up to 32s, above 128 to
    64s. In 16 bits: S x D x (H + 2 K), and S x D x 2 H more where K < H.
    """
    tokens, heads, values = shape_SHD
    multiple = 32 if values <= 128 else 64
    rounded = -(-values // multiple) * multiple
    sums = 4 * (rounded + 1) * heads * (tokens + BLOCK * num_documents)
    each_head = 2 * heads if num_keys < heads else 0
    return sums + 2 * tokens * values * (heads + 2 * num_keys + each_head)


def _allocate_briefly(num_bytes: int, grad: torch.Tensor) -> None:
    torch.empty(num_bytes, dtype=torch.uint8, device=grad.device)
