"""Kernels for torch's variable-length attention on a CPU: by document, in fp32.

torch has none there. The operator is torch's own, with the arguments, checks, autograd formula and
fakes that a GPU has. Before torch 2.11 it is the operator below varlen_attn, which takes no window
yet. ``CALLS`` holds the arguments of each call.
"""

import functools
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from hpc_tune.packages import parse_release

HAS_WINDOWS = parse_release(torch.__version__) >= (2, 11)
CALLS: list[dict[str, Any]] = []
_BELOW = torch.library.Library("aten", "IMPL")


@functools.cache
def use_cpu_kernels() -> None:
    """Register the kernels with torch's operator, once per process."""
    if not HAS_WINDOWS:
        _BELOW.impl("_flash_attention_forward", _forward_below, "CPU")
        _BELOW.impl("_flash_attention_backward", _backward_below, "CPU")
        return
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def attention(
    query_SHD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    starts: list[int],
    scale: float | None,
    before: int = -1,
    key_starts: list[int] | None = None,
) -> torch.Tensor:
    """Return causal attention within each document, over ``before`` tokens back or all of them.

    The last query of a document is at its last key.
    """
    parts, groups = [], query_SHD.shape[1] // key_SKD.shape[1]
    for own, seen in zip(pairwise(starts), pairwise(key_starts or starts), strict=True):
        query = query_SHD[slice(*own)].transpose(0, 1).float()
        key, value = (x[slice(*seen)].transpose(0, 1).float() for x in (key_SKD, value_SKD))
        key, value = (tensor.repeat_interleave(groups, 0) for tensor in (key, value))
        mask = ~_hidden(query.shape[1], key.shape[1], before)
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts).to(query_SHD.dtype)


def _hidden(queries: int, keys: int, before: int) -> torch.Tensor:
    """Return a mask that is true where the last tokens of a document may not attend."""
    apart = torch.arange(keys)[keys - queries :].unsqueeze(1) - torch.arange(keys)
    return (apart < 0) | (apart > before) if before >= 0 else apart < 0


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = cu_seq_q.numpy().tolist()  # tests of host waits forbid Tensor.tolist
    assert window_size is not None
    before, after = window_size
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    CALLS.append({"shapes": shapes, "starts": starts, "before": before})
    assert cu_seq_q.dtype == torch.int32
    assert cu_seq_k is not None
    assert cu_seq_k.dtype == torch.int32
    key_starts = cu_seq_k.numpy().tolist()
    assert len(key_starts) == len(starts)
    assert starts[0] == key_starts[0] == 0
    assert starts[-1] == len(query), "else tokens are left out"
    assert key_starts[-1] == len(key) == len(value)
    assert max_q == max(stop - start for start, stop in pairwise(starts))
    assert max_k == max(stop - start for start, stop in pairwise(key_starts))
    assert type(max_q) is type(max_k) is int
    assert after == 0
    assert is_causal == (before == -1)
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    out = attention(query, key, value, starts, scale, before, key_starts)
    sums = torch.zeros(query.shape[1], len(query))
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    # Written out, because an operator's kernel runs below autograd.
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[2] ** -0.5
    ends = (pairwise(starts.numpy().tolist()) for starts in (cu_seq_q, cu_seq_k))
    for own, seen in zip(*ends, strict=True):
        q, grad = (x[slice(*own)].transpose(0, 1).float() for x in (query, grad_out))
        k, v = (x[slice(*seen)].transpose(0, 1).float() for x in (key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        before = window_size[0] if window_size is not None else -1
        hidden = _hidden(q.shape[1], k.shape[1], before)
        p = (scale * q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1)
        grad_p = grad @ v.mT
        grad_scores = scale * p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        parts = grad_scores @ k, grad_scores.mT @ q, p.mT @ grad
        for whole, at, part in zip(grads, (own, seen, seen), parts, strict=True):
            heads = part.unflatten(0, (whole.shape[1], -1)).sum(1)
            whole[slice(*at)] = heads.transpose(0, 1).to(whole.dtype)
    return tuple(grads)


def _forward_below(*given: Any, scale: float | None = None, **window: Any) -> tuple[Any, ...]:
    *inputs, _, is_causal, _ = given
    found = _forward(*inputs, is_causal, scale, _window(**window))
    return *found, torch.empty((), dtype=torch.uint64), torch.empty(0)


def _backward_below(*given: Any, scale: float | None = None, **window: Any) -> tuple[Any, ...]:
    *inputs, _, is_causal, rng_state, _ = given
    return _backward(*inputs, is_causal, rng_state, scale, _window(**window))


def _window(window_size_left: int, window_size_right: int, **_: Any) -> list[int]:
    return [window_size_left, window_size_right]
