"""Matmuls grouped by expert: torch's kernel, or a loop over experts if that is missing or wrong.

    rows sorted by expert -> grouped_matmul: each row times its expert's matrix
                          -> gradient: each expert's sum of outer products

On a GPU the kernel may leave uninitialized memory as the gradient of an expert without rows
(https://github.com/pytorch/pytorch/issues/172439 on Blackwell, 174314 on MI300), which may be NaN
(193633). Such gradients are filled with zeros, without a device sync. A wrong kernel would train a
wrong model without an error, so it is compared once with a loop. The kernel indexes values with 32
bits, and reads from wrong addresses if there are more
(https://github.com/pytorch/torchtitan/issues/1932): such matmuls are split by rows.

Shapes: S rows, E experts, I and O features in and out of a matmul, R and N the two sides of a
gradient.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hpc_tune import torch_versions
from hpc_tune.errors import first_line
from hpc_tune.log import log

_LIBRARY = torch.library.Library("hpc_tune", "FRAGMENT")
_LIBRARY.define("sums_of_outer_products(Tensor low, Tensor wide, Tensor ends) -> Tensor")
ROW_ALIGNMENT_BYTES = 16  # a grouped matmul needs rows of a multiple of this
MAX_KERNEL_VALUES = (1 << 31) - 1
# Error relative to the norm: rounding to the dtype causes 0.3 eps, one row at a wrong expert 30.
MAX_ERROR_IN_EPS = 4
# Rows per expert: none for the first, two in the middle and the last; for the others one, less than
# a tile of the kernel (16 to 128), and more.
CHECKED_ROWS_PER_EXPERT = (0, 1, 40, 0, 0, 130, 17, 0)
_CHECKED_WIDTH, _CHECKED_RANK = 96, 16  # features, and the rank of an adapter


def grouped_matmul(
    x_SI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Return each row times the matrix of its expert; the experts' rows end at ``ends_E``."""
    out_SO: torch.Tensor
    if has_grouped_matmul(x_SI, weight_EIO) and not _is_kernel_refused(x_SI):
        out_SO = _matmul_by_kernel(x_SI, weight_EIO, ends_E)
    else:
        out_SO = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, ends_E)
    return out_SO


def grouped_weight_gradient(
    low_rank_SR: torch.Tensor,
    features_SN: torch.Tensor,
    weight_ERN: torch.Tensor,
    ends_E: torch.Tensor,
) -> torch.Tensor:
    """Return, for each expert, the sum of its rows' outer products, in the shape of a weight."""
    out_ERN: torch.Tensor
    if has_grouped_matmul(low_rank_SR, weight_ERN, features_SN) and not _is_kernel_refused(
        low_rank_SR
    ):
        out_ERN = _gradient_by_kernel(low_rank_SR, features_SN, ends_E)
    else:
        out_ERN = torch.ops.hpc_tune.sums_of_outer_products(low_rank_SR, features_SN, ends_E)
    return out_ERN


@torch.library.impl(_LIBRARY, "sums_of_outer_products", "CompositeExplicitAutograd")
def sums_of_outer_products(
    low_rank_SR: torch.Tensor, features_SN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Return ``grouped_weight_gradient``, computed expert by expert.

    transformers' own, since 5.23, also makes the gradient of the rows, which is not needed here.
    """
    out_ERN, start = _fake_sums(low_rank_SR, features_SN, ends_E), 0
    for expert, end in enumerate(ends_E.tolist()):
        torch.mm(low_rank_SR[start:end].t(), features_SN[start:end], out=out_ERN[expert])
        start = end
    return out_ERN


@torch.library.register_fake("hpc_tune::sums_of_outer_products", lib=_LIBRARY)
def _fake_sums(
    low_rank_SR: torch.Tensor, features_SN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    return low_rank_SR.new_empty(len(ends_E), low_rank_SR.shape[1], features_SN.shape[1])


def has_grouped_matmul(
    x: torch.Tensor, weight_EIO: torch.Tensor, *other_tensors: torch.Tensor
) -> bool:
    """Whether torch has a grouped matmul for these tensors; in traces only for bf16."""
    is_traced = isinstance(x, FakeTensor)
    needs_alignment = (
        x.device.type == "cpu" and not torch_versions.GROUPED_MM_TAKES_ANY_ADDRESS and not is_traced
    )
    if needs_alignment and any(
        part.data_ptr() % ROW_ALIGNMENT_BYTES for part in (x, weight_EIO, *other_tensors)
    ):
        return False
    dtypes = {torch.bfloat16} if is_traced else {torch.bfloat16, torch.float32}
    alignment = ROW_ALIGNMENT_BYTES // x.dtype.itemsize
    return x.dtype in dtypes and not any(width % alignment for width in weight_EIO.shape[1:])


@functools.cache
def grouped_kernel_fault(device: torch.device, dtype: torch.dtype) -> str:
    """Return and log why the kernel must not be used in ``dtype`` on this device; "" if it may."""
    max_gap = MAX_ERROR_IN_EPS * torch.finfo(dtype).eps
    try:
        gaps = compare_kernel_with_loop(device, dtype)
    except (RuntimeError, TypeError, ValueError) as error:  # or its interface differs
        reason = f"torch's grouped matmul fails here ({first_line(error)})"
    else:
        large_gaps = [f"{name} by {gap:.1e}" for name, gap in gaps.items() if not gap <= max_gap]
        if not large_gaps:
            return ""
        name = str(dtype).removeprefix("torch.")
        reason = (
            f"torch's grouped matmul is wrong here: it differs from a loop over experts in "
            f"{', '.join(large_gaps)} of the norm, where rounding to {name} explains {max_gap:.1e}"
        )
    log.warning("experts are computed in a loop: %s", reason)
    return reason


def compare_kernel_with_loop(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the kernel's differences from a loop over experts in fp64, relative to the norms.

    Memory that the kernel may leave uninitialized holds NaN.
    """
    generator, counts = torch.Generator().manual_seed(0), CHECKED_ROWS_PER_EXPERT
    ends_E = torch.tensor(counts).cumsum(0).int().to(device)
    num_rows, num_experts = sum(counts), len(counts)

    def draw_values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x_SI, grad_SR = draw_values(num_rows, _CHECKED_WIDTH), draw_values(num_rows, _CHECKED_RANK)
    down_EIR = draw_values(num_experts, _CHECKED_WIDTH, _CHECKED_RANK)
    up_ERI = draw_values(num_experts, _CHECKED_RANK, _CHECKED_WIDTH)

    def run_in_nan_memory(
        out_shape: tuple[int, ...], product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        no_numbers = torch.full(out_shape, torch.nan, dtype=dtype, device=device)
        del no_numbers  # the allocator gives this memory to the result, of the same size
        return product()

    narrow, up_EIR = (num_rows, _CHECKED_RANK), up_ERI.transpose(1, 2)
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        results = [
            run_in_nan_memory(
                narrow, lambda: torch_versions.grouped_mm(x_SI, down_EIR, offs=ends_E)
            ),
            run_in_nan_memory(narrow, lambda: torch_versions.grouped_mm(x_SI, up_EIR, offs=ends_E)),
            run_in_nan_memory(up_ERI.shape, lambda: _gradient_by_kernel(grad_SR, x_SI, ends_E)),
        ]
        x_by_E, grad_by_E = x_SI.double().split(counts), grad_SR.double().split(counts)
        references = [
            torch.cat([x @ w for x, w in zip(x_by_E, down_EIR.double(), strict=True)]),
            torch.cat([x @ w for x, w in zip(x_by_E, up_EIR.double(), strict=True)]),
            torch.stack([grad.t() @ x for grad, x in zip(grad_by_E, x_by_E, strict=True)]),
        ]
    names = ("its result", "its result with transposed weights", "the gradient of weights")
    return {
        name: float((result.double() - reference).norm() / reference.norm())
        for name, result, reference in zip(names, results, references, strict=True)
    }


def _matmul_by_kernel(
    x_SI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    pieces = _split_rows(x_SI, max(weight_EIO.shape[1:]))
    if len(pieces) == 1:
        out_SO: torch.Tensor = torch_versions.grouped_mm(x_SI, weight_EIO, offs=ends_E)
        return out_SO
    out_SO = x_SI.new_empty(len(x_SI), weight_EIO.shape[2])
    for begin, end in pieces:
        clipped_E = _clip_ends(ends_E, begin, end)
        out_SO[begin:end] = torch_versions.grouped_mm(x_SI[begin:end], weight_EIO, offs=clipped_E)
    return out_SO


def _gradient_by_kernel(
    low_rank_SR: torch.Tensor, features_SN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    pieces = _split_rows(low_rank_SR, max(low_rank_SR.shape[1], features_SN.shape[1]))
    if len(pieces) == 1:
        return _gradient_of_piece(low_rank_SR, features_SN, ends_E)
    out_ERN: torch.Tensor | None = None
    for begin, end in pieces:
        clipped_E = _clip_ends(ends_E, begin, end)
        piece_ERN = _gradient_of_piece(low_rank_SR[begin:end], features_SN[begin:end], clipped_E)
        out_ERN = piece_ERN if out_ERN is None else out_ERN.add_(piece_ERN)
    assert out_ERN is not None
    return out_ERN


def _gradient_of_piece(
    low_rank_SR: torch.Tensor, features_SN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    out_ERN: torch.Tensor = torch_versions.grouped_mm(low_rank_SR.t(), features_SN, offs=ends_E)
    if _may_skip_empty_experts(low_rank_SR):
        is_empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        out_ERN.masked_fill_(is_empty_E.view(-1, 1, 1), 0)  # not times 0: 0 x nan is nan
    return out_ERN


def _split_rows(x: torch.Tensor, width: int) -> list[tuple[int, int]]:
    """Return begin and end of ranges of rows, ``width`` values each, that the kernel can take."""
    rows = len(x)
    max_rows = max(1, _max_kernel_values(x) // width)
    return [(begin, min(begin + max_rows, rows)) for begin in range(0, rows, max_rows)] or [(0, 0)]


def _clip_ends(ends_E: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return where the experts' rows end among those from ``begin`` to ``end``."""
    return (ends_E - begin).clamp_(0, end - begin)


def _max_kernel_values(x: torch.Tensor) -> int:
    return sys.maxsize if x.device.type == "cpu" else MAX_KERNEL_VALUES


def _may_skip_empty_experts(x: torch.Tensor) -> bool:
    return x.device.type != "cpu"


def _is_kernel_refused(x: torch.Tensor) -> bool:
    """Whether the kernel was tried on the device of ``x`` and must not be used there."""
    is_real = x.device.type == "cuda" and not isinstance(x, FakeTensor)
    return is_real and bool(grouped_kernel_fault(x.device, x.dtype))


# -- Tokens sorted by the experts that they go to.
#
# On a CPU, a 16-bit matmul generates a kernel for each number of rows, which takes as long as five
# matmuls: there an expert's rows are padded to one of a few numbers.
#
# Shapes: T tokens, K experts of a token, S rows sorted by expert (T K, and padding), E experts, I
# and O features in and out of a matmul, R and N the two sides of a gradient.


# a padded expert's rows: multiples of 16, at most 4 numbers per power of two
MIN_PADDING_STEP = 16
NUM_PADDING_STEPS = 4


@dataclass(frozen=True)
class SortedRows:
    """Where each expert's rows end, and in which row each token lies for each of its experts."""

    ends_E: torch.Tensor
    row_indices_TK: torch.Tensor
    num_rows: int

    @classmethod
    def sort_by_expert(
        cls, expert_ids_TK: torch.Tensor, num_experts: int, dtype: torch.dtype
    ) -> "SortedRows":
        """Sort tokens by expert; in 16 bits on a CPU, add padding after the rows of each expert."""
        expert_S, order_S = torch.sort(expert_ids_TK.flatten(), stable=True)
        numbers_E = torch.arange(num_experts, device=expert_S.device)
        ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
        sorted_S, num_rows = torch.arange(len(order_S), device=order_S.device), len(order_S)
        if _needs_padding(expert_ids_TK, dtype):
            counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
            padded_E = torch.tensor([num_padded_rows(count) for count in counts_E.tolist()])
            cum_padding_E = (padded_E - counts_E).cumsum(0)
            sorted_S += (cum_padding_E - padded_E + counts_E)[expert_S]
            ends_E, num_rows = (ends_E + cum_padding_E).int(), num_rows + int(cum_padding_E[-1])
        elif isinstance(expert_ids_TK, FakeTensor) and dtype.itemsize == 2:
            num_rows += num_padding_rows_in_trace(num_rows, num_experts)
        positions_S = torch.empty_like(order_S)
        positions_S[order_S] = sorted_S
        return cls(ends_E, positions_S.view_as(expert_ids_TK), num_rows)

    def tokens(self) -> torch.Tensor:
        """Return the token of each row; for padding, the first one."""
        token_S = self.row_indices_TK.new_zeros(self.num_rows)
        num_tokens, num_chosen = self.row_indices_TK.shape
        numbers_TK = torch.arange(num_tokens, device=token_S.device).unsqueeze(1)
        positions_S = self.row_indices_TK.flatten()
        return token_S.scatter_(0, positions_S, numbers_TK.expand(-1, num_chosen).flatten())

    def experts(self) -> torch.Tensor:
        """Return the expert of each row."""
        numbers_S = torch.arange(self.num_rows, device=self.ends_E.device, dtype=torch.int32)
        return torch.searchsorted(self.ends_E, numbers_S, right=True)

    def row_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weight of each row, S x 1; 0 for padding."""
        out_S = weights_TK.new_zeros(self.num_rows)
        return out_S.scatter_(0, self.row_indices_TK.flatten(), weights_TK.flatten()).unsqueeze(1)

    def clear_padding(self, x_SI: torch.Tensor) -> None:
        """Zero the rows of padding, so that nothing in them can overflow."""
        is_fake = isinstance(x_SI, FakeTensor)  # its padding has no position
        if self.num_rows > self.row_indices_TK.numel() and not is_fake:
            is_padding_S = torch.ones(self.num_rows, dtype=torch.bool)
            is_padding_S[self.row_indices_TK.flatten()] = False
            x_SI.index_fill_(0, is_padding_S.nonzero().squeeze(1), 0.0)

    def sum_by_token(
        self, y_SO: torch.Tensor, weights_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of each token's rows, times their weights, in one pass."""
        return F.embedding_bag(self.row_indices_TK, y_SO, mode="sum", per_sample_weights=weights_TK)

    def multiply_by_expert(self, x_SI: torch.Tensor, weight_EIO: torch.Tensor) -> torch.Tensor:
        """Return each row times the matrix of its expert."""
        return grouped_matmul(x_SI, weight_EIO, self.ends_E)

    def weight_gradient(
        self, low_rank_SR: torch.Tensor, features_SN: torch.Tensor, weight_ERN: torch.Tensor
    ) -> torch.Tensor:
        """Return, for each expert, the sum of its rows' outer products, in the shape of a weight.

        Pass the narrow side first: the reverse takes up to five times as long on a CPU.
        """
        return grouped_weight_gradient(low_rank_SR, features_SN, weight_ERN, self.ends_E)

    def sum_by_expert(
        self, y_SO: torch.Tensor, weight_S: torch.Tensor, bias_EO: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of each expert's rows times their weights, in the shape of a bias."""
        num_columns = ROW_ALIGNMENT_BYTES // y_SO.dtype.itemsize
        weight_SR = weight_S.view(-1, 1).repeat(1, num_columns)
        like_ERO = bias_EO.unsqueeze(1).expand(-1, num_columns, -1)
        return self.weight_gradient(weight_SR, y_SO, like_ERO)[:, 0]


def num_padded_rows(num_rows: int) -> int:
    """Return the padded number of an expert's rows in 16 bits on a CPU: up to a quarter or 15 more.

    Padding of few rows is nearly free: reading an expert takes as long as computing 36 rows.
    """
    step = _padding_step(num_rows)
    return -(-num_rows // step) * step


def num_padding_rows_in_trace(num_rows: int, num_experts: int) -> int:
    """Return the rows of padding in a trace: 0, since it has no token counts of experts.

    A trace for CPUs replaces this function by ``estimate_padding_rows``.
    """
    return 0


def estimate_padding_rows(num_rows: int, num_experts: int) -> int:
    """Estimate the rows of padding in 16 bits on a CPU: half a step for each expert."""
    return num_experts * _padding_step(num_rows // num_experts) // 2


def _padding_step(num_rows: int) -> int:
    return max(MIN_PADDING_STEP, (1 << num_rows.bit_length()) // 2 // NUM_PADDING_STEPS)


def _needs_padding(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu" and dtype.itemsize == 2 and not isinstance(tensor, FakeTensor)
    )
