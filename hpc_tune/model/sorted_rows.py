"""Tokens sorted by the experts that they go to.

On a CPU a product in 16 bits has a kernel for each number of rows, which takes as long to make as
five products: there an expert's rows are padded to one of few numbers.

Shapes: T tokens, K experts of a token, S rows sorted by expert (T K, and padding), E experts, I and
O features in and out of a product, R and N the two sides of a gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from hpc_tune.model import grouped_products
from hpc_tune.model.grouped_products import ROW_BYTES

MIN_PADDING_STEP, NUM_PADDING_STEPS = (
    16,
    4,
)  # a padded expert's rows: a multiple of 16, at least 4 numbers per octave


@dataclass(frozen=True)
class SortedRows:
    """Behind which row each expert's end, and in which row each token is for its experts."""

    ends_E: torch.Tensor
    rows_TK: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, index_TK: torch.Tensor, num_experts: int, dtype: torch.dtype) -> "SortedRows":
        """Sort tokens by expert; in 16 bits on a CPU, with padding behind those of each."""
        expert_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        numbers_E = torch.arange(num_experts, device=expert_S.device)
        ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
        sorted_S, num_rows = torch.arange(len(order_S), device=order_S.device), len(order_S)
        if _is_padded(index_TK, dtype):
            counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
            padded_E = torch.tensor([pad_rows(count) for count in counts_E.tolist()])
            more_E = (padded_E - counts_E).cumsum(0)
            sorted_S += (more_E - padded_E + counts_E)[expert_S]
            ends_E, num_rows = (ends_E + more_E).int(), num_rows + int(more_E[-1])
        elif isinstance(index_TK, FakeTensor) and dtype.itemsize == 2:
            num_rows += traced_padding(num_rows, num_experts)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = sorted_S
        return cls(ends_E, places_S.view_as(index_TK), num_rows)

    def tokens(self) -> torch.Tensor:
        """Return which token each row is of; of padding, the first one."""
        token_S = self.rows_TK.new_zeros(self.num_rows)
        num_tokens, num_chosen = self.rows_TK.shape
        numbers_TK = torch.arange(num_tokens, device=token_S.device).unsqueeze(1)
        places_S = self.rows_TK.flatten()
        return token_S.scatter_(0, places_S, numbers_TK.expand(-1, num_chosen).flatten())

    def experts(self) -> torch.Tensor:
        """Return which expert each row is for."""
        numbers_S = torch.arange(self.num_rows, device=self.ends_E.device, dtype=torch.int32)
        return torch.searchsorted(self.ends_E, numbers_S, right=True)

    def row_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weight of each row, S x 1; of padding, 0."""
        weight_S = weights_TK.new_zeros(self.num_rows)
        return weight_S.scatter_(0, self.rows_TK.flatten(), weights_TK.flatten()).unsqueeze(1)

    def clear_padding(self, x_SI: torch.Tensor) -> None:
        """Make rows of padding zero, so that nothing in them can overflow."""
        is_fake = isinstance(x_SI, FakeTensor)  # whose padding is in no place
        if self.num_rows > self.rows_TK.numel() and not is_fake:
            is_padding_S = torch.ones(self.num_rows, dtype=torch.bool)
            is_padding_S[self.rows_TK.flatten()] = False
            x_SI.index_fill_(0, is_padding_S.nonzero().squeeze(1), 0.0)

    def sum_by_token(
        self, y_SO: torch.Tensor, weights_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of each token's rows, times their weights, in one pass."""
        return F.embedding_bag(self.rows_TK, y_SO, mode="sum", per_sample_weights=weights_TK)

    def times(self, x_SI: torch.Tensor, weight_EIO: torch.Tensor) -> torch.Tensor:
        """Return each row times the matrix of its expert."""
        return grouped_products.grouped_matmul(x_SI, weight_EIO, self.ends_E)

    def gradient(
        self, low_SR: torch.Tensor, wide_SN: torch.Tensor, weight_ERN: torch.Tensor
    ) -> torch.Tensor:
        """Return, for each expert, the sum of its rows' outer products, in the shape of a weight.

        The narrow side first: the other way round takes up to five times as long on a CPU.
        """
        return grouped_products.grouped_weight_gradient(low_SR, wide_SN, weight_ERN, self.ends_E)

    def sums_by_expert(
        self, y_SO: torch.Tensor, weight_S: torch.Tensor, bias_EO: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of each expert's rows times their weights, in the shape of a bias."""
        wide = ROW_BYTES // y_SO.dtype.itemsize
        weight_SR = weight_S.view(-1, 1).repeat(1, wide)
        return self.gradient(weight_SR, y_SO, bias_EO.unsqueeze(1).expand(-1, wide, -1))[:, 0]


def pad_rows(num_rows: int) -> int:
    """Return as how many rows a CPU computes an expert's in 16 bits: at most a quarter more, or 16.

    Up to 64 a row is nearly free: reading an expert takes as long as computing 36 rows.
    """
    step = _padding_step(num_rows)
    return -(-num_rows // step) * step


def traced_padding(num_rows: int, num_experts: int) -> int:
    """Return the rows of padding in a trace, in which experts have no numbers of tokens: none.

    A trace for CPUs puts ``likely_padding`` in its place.
    """
    return 0


def likely_padding(num_rows: int, num_experts: int) -> int:
    """Return about how many rows of padding there are in 16 bits on a CPU: half a step for each."""
    return num_experts * _padding_step(num_rows // num_experts) // 2


def _padding_step(num_rows: int) -> int:
    return max(MIN_PADDING_STEP, (1 << num_rows.bit_length()) // 2 // NUM_PADDING_STEPS)


def _is_padded(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu" and dtype.itemsize == 2 and not isinstance(tensor, FakeTensor)
    )
