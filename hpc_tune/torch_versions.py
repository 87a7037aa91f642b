"""Compatibility with the torch versions that hpc_tune runs on: missing or renamed functions.

    from 2.13   all_gather_single and reduce_scatter_single; before, under older names
                FSDP2 requires no gradient of integers (4-bit weights); 2.12 was not tried
    from 2.12   varlen_attn has an option for GQA; 2.11 always allows it
    from 2.11   varlen_attn takes a scale and a window; before, only the operator below it does
                grouped matmuls on a CPU take operands at any address; before, multiples of 16
    from 2.10   torch.nn.functional.grouped_mm; before, torch._grouped_mm

Versions are compared by their first two numbers, so that a vendor's pre-release counts as the
release that it precedes.

Shapes: S tokens, H heads, K heads of keys and values, D values per head, N documents.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpc_tune.packages import parse_release

_RELEASE = parse_release(torch.__version__)
TESTED_RELEASES = ((2, 9), (2, 14))  # the oldest and the newest on which runs were compared

grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
GROUPED_MM_TAKES_ANY_ADDRESS = _RELEASE >= (2, 11)
_VARLEN_HAS_WINDOWS = _RELEASE >= (2, 11)
_VARLEN_HAS_GQA = _RELEASE >= (2, 12)
_FSDP_TAKES_INTEGERS = _RELEASE >= (2, 13)

all_gather: Any
reduce_scatter: Any
if hasattr(dist, "all_gather_single"):
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def varlen_attention(
    query_SHD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    document_lengths: tuple[Any, Any, int, int],
    scale: float | None,
    window_left: int,
) -> torch.Tensor:
    """Return causal attention within documents by torch's FlashAttention kernel, as SHD.

    ``document_lengths``: cumulative lengths of queries and of keys (N + 1 values each), and the
    most queries and keys of a document. The last query of a document is aligned with its last key.
    Each token attends to itself and the ``window_left`` tokens before it, or to all before it if
    -1.
    """
    if not _VARLEN_HAS_WINDOWS:
        out_SHD: torch.Tensor = torch.ops.aten._flash_attention_forward(
            *(query_SHD, key_SKD, value_SKD, *document_lengths),
            dropout_p=0.0,
            is_causal=window_left == -1,
            return_debug_mask=False,
            scale=scale,
            window_size_left=window_left,
            window_size_right=0,
        )[0]
        return out_SHD
    from torch.nn.attention import varlen  # here, because it imports the compiler

    kernel: Any = varlen.varlen_attn
    options = {"enable_gqa": True} if _VARLEN_HAS_GQA else {}
    out_SHD = kernel(
        *(query_SHD, key_SKD, value_SKD, *document_lengths),
        scale=scale,
        window_size=(window_left, 0),
        **options,
    )
    return out_SHD


def untested_torch_warning() -> str | None:
    """Return a warning if this torch is older or newer than the tested releases."""
    oldest, newest = TESTED_RELEASES
    if oldest <= _RELEASE <= newest:
        return None
    word = "newer" if newest < _RELEASE else "older"
    return (
        f"torch {torch.__version__} is {word} than the versions that hpc_tune was tested with "
        f"({_format_release(oldest)} to {_format_release(newest)}); compare the first losses with "
        "those of a run on a tested version"
    )


def _format_release(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


class _NnWithIntegerParameters:
    """torch.nn with a Parameter that requires no gradient of integers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:  # noqa: N802
        return nn.Parameter(data, requires_grad and data.is_floating_point())


def let_fsdp_shard_integers() -> None:
    """Let FSDP2 shard frozen 4-bit weights in versions that would require their gradient."""
    if not _FSDP_TAKES_INTEGERS:
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        _fsdp_param.nn = _NnWithIntegerParameters()  # type: ignore[assignment]
