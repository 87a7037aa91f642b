"""Attention within documents on GPUs: torch's variable-length kernel, without a mask.

    lengths of documents, on the host -> DocumentStarts, once per micro-batch, without a wait
    a layer -> varlen_attn over the tokens of all rows, end to end
    a sliding window -> encode_window, passed to the layer in place of a mask

The kernel (FlashAttention inside torch) is told where documents begin, and computes only what a
T x T mask would keep. The host reads nothing from the device, so it never waits. A wrong kernel
would silently train a wrong model, so it is compared once with masked attention.

Shapes: B rows, T tokens, S = B x T, H heads, K heads of keys and values, D values per head, N
documents.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from hpc_tune import torch_versions
from hpc_tune.errors import first_line
from hpc_tune.log import log
from hpc_tune.packages import is_installed
from hpc_tune.world.device import FLASH_ATTENTION_PACKAGES, find_architecture

DTYPES = (torch.bfloat16, torch.float16)
# Values per head: torch pads others only for its own attention.
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8
# Tolerance relative to the norm. Rounding results to the dtype gives an error of 0.2 eps, rounding
# the probabilities up to 1 eps more; a start that is off by one token gives 16 eps in bf16, whose
# eps is the largest.
MAX_ERROR_EPS = 4
# Documents of one token, of one block of the kernel (128), shorter, longer, and a whole row.
CHECKED_LENGTHS = ((1, 62, 128, 9), (143, 57), (200,))


@dataclass(frozen=True)
class DocumentStarts:
    """Where the documents of a micro-batch begin in its rows, laid end to end.

    ``starts_N`` are int32 on the device, followed by the end of the last document. Each row begins
    with a new document. ``max_length`` is the length of the longest document. ``supports_windows``:
    the kernel supports sliding windows too.
    """

    starts_N: torch.Tensor
    num_rows: int
    num_tokens: int
    max_length: int
    supports_windows: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether any row has several documents."""
        return self.starts_N.shape[0] - 1 > self.num_rows

    def document_ids_BT(self) -> torch.Tensor:
        """Return the index of each token's document."""
        ends_N, num_positions = self.starts_N[1:], self.num_rows * self.num_tokens
        positions_S = torch.arange(num_positions, dtype=ends_N.dtype, device=ends_N.device)
        return torch.bucketize(positions_S, ends_N, right=True).view(self.num_rows, self.num_tokens)

    def document_lengths_BT(self) -> torch.Tensor:
        """Return for each token the length of its document."""
        return self.starts_N.diff()[self.document_ids_BT()]

    def mask_B1TT(self, window: int | None = None) -> torch.Tensor:
        """Return a mask, true where a token may attend: to ``window`` tokens, or to all."""
        document_ids_BT = self.document_ids_BT()
        same_BTT = (document_ids_BT.unsqueeze(2) == document_ids_BT.unsqueeze(1)).tril()
        return (same_BTT if window is None else same_BTT.triu(1 - window)).unsqueeze(1)

    def mask_B1ST(self, positions_S: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Return the rows of ``mask_B1TT`` for the tokens at these places."""
        document_ids_BT = self.document_ids_BT()
        distance_ST = positions_S.unsqueeze(1) - torch.arange(
            self.num_tokens, device=positions_S.device
        )
        is_seen_ST = (distance_ST >= 0) & (distance_ST < (window or self.num_tokens))
        same_BST = document_ids_BT[:, positions_S].unsqueeze(2) == document_ids_BT.unsqueeze(1)
        return (same_BST & is_seen_ST).unsqueeze(1)


def make_document_starts(
    lengths: Sequence[Sequence[int]], device: torch.device, supports_windows: bool = True
) -> DocumentStarts:
    """Return where documents begin, from each row's document lengths; rows are equally long."""
    [num_tokens] = {sum(row_lengths) for row_lengths in lengths}
    flat = [length for row_lengths in lengths for length in row_lengths]
    starts_N = _lengths_to_starts(flat, device)
    return DocumentStarts(starts_N, len(lengths), num_tokens, max(flat), supports_windows)


def _lengths_to_starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    starts_N = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    if device.type == "cuda":
        starts_N = starts_N.pin_memory().to(device, non_blocking=True)
    return starts_N


# Row, start of document, first query, end: each query attends to tokens from the start to itself.
DocumentPart = tuple[int, int, int, int]


@dataclass(frozen=True)
class DocumentParts:
    """Parts of the documents of rows: their queries, and the keys that the queries attend to.

    ``parts`` are in the order of the queries. For a kernel, ``starts_N`` and ``key_starts_N`` say
    where each part begins among all queries and among all keys, laid end to end; they are int32 on
    the device, followed by the end.
    """

    parts: Sequence[DocumentPart]
    starts_N: torch.Tensor | None = None
    key_starts_N: torch.Tensor | None = None

    @classmethod
    def from_parts(cls, parts: Sequence[DocumentPart], device: torch.device) -> "DocumentParts":
        """Return the parts for a kernel on ``device``, without waiting for it."""
        queries = [stop - first for _, _, first, stop in parts]
        keys = [stop - start for _, start, _, stop in parts]
        return cls(parts, _lengths_to_starts(queries, device), _lengths_to_starts(keys, device))

    @functools.cached_property
    def max_lengths(self) -> tuple[int, int]:
        """The largest number of queries, and of keys, in a part."""
        queries = (stop - first for _, _, first, stop in self.parts)
        return max(queries), max(stop - start for _, start, _, stop in self.parts)

    @functools.cached_property
    def num_earlier_keys(self) -> list[int]:
        """How many keys of each part come before its first query."""
        return [first - start for _, start, first, _ in self.parts]

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """First row, end row, start and stop of each part's queries; all queries form one row."""
        ends = list(accumulate(stop - first for _, _, first, stop in self.parts))
        return [(0, 1, start, end) for start, end in pairwise([0, *ends])]

    @functools.cached_property
    def key_ranges(self) -> list[tuple[int, int, int]]:
        """Row, start and end of the keys that parts attend to, adjacent ranges joined."""
        ranges: list[tuple[int, int, int]] = []
        for row, start, _, stop in self.parts:
            if ranges and ranges[-1][::2] == (row, start):
                start = ranges.pop()[1]
            ranges.append((row, start, stop))
        return ranges

    def take_keys(self, x_BKTD: torch.Tensor) -> torch.Tensor:
        """Return the keys that each part attends to, part after part, as one row: 1KND."""
        taken_NKD: torch.Tensor = _TakeRanges.apply(x_BKTD.transpose(1, 2), self.key_ranges)
        return taken_NKD.transpose(0, 1).unsqueeze(0)


class _TakeRanges(torch.autograd.Function):
    """Takes ranges of tokens of rows, end to end; autograd would make whole rows for each range."""

    @staticmethod
    def forward(ctx: Any, x_BTKD: torch.Tensor, ranges: Sequence[tuple[int, int, int]]) -> Any:
        ctx.shape, ctx.ranges = x_BTKD.shape, ranges
        return torch.cat([x_BTKD[row, start:stop] for row, start, stop in ranges])

    @staticmethod
    def backward(ctx: Any, grad_NKD: torch.Tensor) -> Any:  # type: ignore[override]
        grad_BTKD, end = grad_NKD.new_zeros(ctx.shape), 0
        for row, start, stop in ctx.ranges:
            begin, end = end, end + stop - start
            grad_BTKD[row, start:stop] += grad_NKD[begin:end]
        return grad_BTKD, None


def encode_window(window: int, device: torch.device) -> torch.Tensor:
    """Return a mark to pass to a layer in place of a sliding window's mask: 1 x 1 x 1 x ``window``.

    It has one value in memory, so it cannot be mistaken for a mask made elsewhere.
    """
    return torch.ones((), dtype=torch.bool, device=device).expand(1, 1, 1, window)


def decode_window(mask: torch.Tensor) -> int | None:
    """Return the window size that ``mask`` encodes, or None if it is an ordinary mask."""
    is_mark = mask.dim() == 4 and mask.shape[:3] == (1, 1, 1) and mask.stride(3) == 0
    return mask.shape[3] if is_mark else None


def cast_to_autocast_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to autocast's dtype, as torch does for its own attention."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def is_supported(
    query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, dropout: float
) -> bool:
    """Whether the kernel supports these inputs: a layer may differ from its model's config."""
    head_dim = query_BHTD.shape[-1]
    return (
        not dropout
        and query_BHTD.dtype == key_BKTD.dtype == value_BKTD.dtype
        and query_BHTD.dtype in DTYPES
        and key_BKTD.shape == value_BKTD.shape
        and key_BKTD.shape[-1] == head_dim
        and head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_DIM_MULTIPLE == 0
    )


def attend(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    starts: DocumentStarts,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return causal attention within documents, as BTHD.

    ``window`` counts the query's own token too.
    """
    query_SHD, key_SKD, value_SKD = map(_flatten_rows, (query_BHTD, key_BKTD, value_BKTD))
    documents = starts.starts_N, starts.starts_N, starts.max_length, starts.max_length
    left_window = -1 if window is None else window - 1
    out_SHD = torch_versions.varlen_attention(
        query_SHD, key_SKD, value_SKD, documents, scale, left_window
    )
    return out_SHD.unflatten(0, (starts.num_rows, starts.num_tokens))


def attend_parts(
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    document_parts: DocumentParts,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention of a rank's queries over the keys of whole rows, as BSHD.

    The kernel aligns the last query of a part with its last key.
    """
    query_SHD = query_BHSD.transpose(1, 2).flatten(0, 1)
    key_NKD, value_NKD = (
        _flatten_rows(document_parts.take_keys(x)) for x in (key_BKTD, value_BKTD)
    )
    documents = document_parts.starts_N, document_parts.key_starts_N, *document_parts.max_lengths
    left_window = -1 if window is None else window - 1
    out_SHD = torch_versions.varlen_attention(
        query_SHD, key_NKD, value_NKD, documents, scale, left_window
    )
    return out_SHD.unflatten(0, (query_BHSD.shape[0], -1))


@functools.cache
def varlen_kernel_fault(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads_per_group: int,
    window: int | None = None,
    queries_are_partial: bool = False,
) -> str:
    """Return, and log, why the kernel must not be used for such heads here; "" if it may be used.

    ``window``: the size of a sliding window, if there is one; ``queries_are_partial``: queries are
    only the last tokens of documents.
    """
    max_error = MAX_ERROR_EPS * torch.finfo(dtype).eps
    try:
        gaps = compare_kernel_with_mask(
            device, dtype, head_dim, heads_per_group, window, queries_are_partial
        )
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # or its interface changed
        reason = f"torch's variable-length kernel fails here ({first_line(error)})"
    else:
        wrong = [f"{name} by {gap:.1e}" for name, gap in gaps.items() if not gap <= max_error]
        if not wrong:
            return ""
        name = str(dtype).removeprefix("torch.")
        reason = (
            "torch's variable-length kernel is wrong here: it differs from masked attention in "
            f"{', '.join(wrong)} of the norm, where rounding to {name} explains {max_error:.1e}"
        )
    if window is not None:
        reason = f"sliding windows: {reason}"
    if queries_are_partial:
        reason = f"the last tokens of documents: {reason}"
    log.warning(
        "packed rows use a mask of row length x row length, which takes more time and memory: %s",
        reason,
    )
    return reason


def compare_kernel_with_mask(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads_per_group: int,
    window: int | None = None,
    queries_are_partial: bool = False,
) -> dict[str, float]:
    """Return the kernel's error relative to masked attention in fp64, as shares of the norms.

    ``heads_per_group`` query heads share one key head, and each token attends to ``window`` tokens
    or to all. The result and the gradients of queries, keys and values are compared on random rows
    of packed documents. ``queries_are_partial``: the queries are the second half of each row.
    """
    starts = make_document_starts(CHECKED_LENGTHS, device)
    generator = torch.Generator().manual_seed(0)
    rows, tokens, scale = starts.num_rows, starts.num_tokens, 0.8 * head_dim**-0.5
    first = tokens // 2 if queries_are_partial else 0

    def draw_values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inputs = [draw_values(rows, heads, tokens, head_dim) for heads in (2 * heads_per_group, 2, 2)]
    inputs[0] = inputs[0][:, :, first:]
    grad_BTHD = draw_values(rows, tokens, 2 * heads_per_group, head_dim)[:, first:]

    def attend_with_mask(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(heads_per_group, 1) for tensor in (key, value))
        mask = starts.mask_B1TT(window)[:, :, first:]
        out_BHTD = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        return out_BHTD.transpose(1, 2)

    def attend_with_kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if not queries_are_partial:
            return attend(query, key, value, starts, scale, window)
        ends = [(n, [0, *accumulate(lengths)]) for n, lengths in enumerate(CHECKED_LENGTHS)]
        parts = [(n, a, max(a, first), b) for n, row in ends for a, b in pairwise(row) if b > first]
        document_parts = DocumentParts.from_parts(parts, device)
        return attend_parts(query, key, value, document_parts, scale, window)

    def run_forward_backward(
        attention: Callable[..., torch.Tensor], compute_dtype: torch.dtype
    ) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(compute_dtype).requires_grad_() for tensor in inputs]
        out_BTHD = attention(*leaves)
        gradients = torch.autograd.grad(out_BTHD, leaves, grad_BTHD.to(compute_dtype))
        return [out_BTHD.detach(), *gradients]

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        kernel_results = run_forward_backward(attend_with_kernel, dtype)
        exact_results = run_forward_backward(attend_with_mask, torch.float64)
    names = ("its result", "the gradient of queries", "that of keys", "that of values")
    return {
        name: float((result.double() - exact).norm() / exact.norm())
        for name, result, exact in zip(names, kernel_results, exact_results, strict=True)
    }


def _flatten_rows(tensor_BHTD: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all rows, as SHD; a view if the memory layout allows it."""
    tensor_SHD = tensor_BHTD.transpose(1, 2).flatten(0, 1)
    return tensor_SHD if tensor_SHD.stride(-1) == 1 else tensor_SHD.contiguous()


# -- FlashAttention 3 and 4 in place of torch's own kernel, if they are installed.
#
# torch contains FlashAttention 2, and calls a newer one if told to
# (``torch.nn.attention.activate_flash_attention_impl``, torch 2.11). On an H100 version 3 takes
# about half of the time (arXiv:2407.08608). Like torch's own kernel, it is compared with masked
# attention before use, and deactivated if it differs.


FLASH_NAMES = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}


def list_flash_attention_versions(device: torch.device) -> list[str]:
    """Return which of them are installed and suit a GPU, the best first."""
    from torch.nn import attention

    architecture = find_architecture(device)
    if architecture is None or not hasattr(attention, "activate_flash_attention_impl"):
        return []
    return [
        name
        for name in architecture.flash_attention_versions
        if is_installed(FLASH_ATTENTION_PACKAGES[name][0])
    ]


@functools.cache
def use_flash_attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads_per_group: int,
    window: int | None = None,
) -> str:
    """Make torch use the best installed FlashAttention that is right; return its name, or "".

    ``head_dim``: values per head; ``heads_per_group``: query heads per key head; ``window``: a
    sliding window in tokens that is tried too, if given. The choice holds for the whole process.
    """
    from torch.nn import attention

    flash: Any = attention
    max_error = MAX_ERROR_EPS * torch.finfo(dtype).eps
    for name in list_flash_attention_versions(device):
        try:
            flash.activate_flash_attention_impl(name)
            gaps = [
                gap
                for tried_window in {None, window}
                for gap in compare_kernel_with_mask(
                    device, dtype, head_dim, heads_per_group, tried_window
                ).values()
            ]
        except Exception as error:  # noqa: BLE001 - such as a package built for another torch
            reason = f"it fails here ({first_line(error)})"
        else:
            if all(gap <= max_error for gap in gaps):
                return FLASH_NAMES[name]
            reason = f"it differs from masked attention by {max(gaps):.1e} of the norm"
        flash.restore_flash_attention_impl(_raise_warn=False)
        log.warning("%s is installed but not used: %s", FLASH_NAMES[name], reason)
    return ""
