"""What stands in for parts that older versions of torch lack, beside what this one has."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_tune import torch_versions
from hpc_tune.model import grouped_matmul
from hpc_tune.model.grouped_matmul import SortedRows
from hpc_tune.packages import parse_release

FLASH = ("_flash_attention_forward", "_flash_attention_backward")


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the operators of FlashAttention, by their names."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func._schema.name.partition("::")[2]) in FLASH:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            shown = {
                key: tuple(value.shape) if isinstance(value, torch.Tensor) else value
                for key, value in given.items()
            }
            self.calls.append((name, shown))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [-1, 70])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_operator_below_is_given_what_the_newer_function_gives_it(monkeypatch, before, scale):
    """On fake tensors: forward by torch's own varlen_attn, and both passes by ours."""
    if parse_release(torch.__version__) < (2, 11):
        pytest.skip("torch before 2.11 has no varlen_attn that takes a scale and a window")
    from torch.nn.attention import varlen

    with FakeTensorMode():
        query = torch.zeros(40, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        key, value = (
            torch.zeros(40, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        starts = torch.zeros(4, dtype=torch.int32)
        with Recorder() as theirs:
            varlen._varlen_attn._init_fn(
                *(query, key, value, starts, starts, 20, 20),
                is_causal=before == -1,
                scale=scale,
                window_size=[before, 0],
            )
        monkeypatch.setattr(torch_versions, "_VARLEN_HAS_WINDOWS", False)
        with Recorder() as ours:
            out = torch_versions.varlen_attention(
                query, key, value, (starts, starts, 20, 20), scale, before
            )
            out.sum().backward()
    (_, wanted), (_, forward), (_, backward) = *theirs.calls, *ours.calls
    kept = {name: given for name, given in wanted.items() if given is not None or name in forward}
    assert forward == kept
    assert out.shape == (40, 4, 16)
    shared = forward.keys() & backward.keys()
    assert shared >= {"window_size_left", "window_size_right", "is_causal", "max_q"}
    assert backward.get("scale") == scale
    assert {name: backward[name] for name in shared} == {name: forward[name] for name in shared}
    assert [part.grad.shape for part in (query, key, value)] == [
        part.shape for part in (query, key, value)
    ]


def test_a_product_that_wants_aligned_operands_goes_another_way(monkeypatch):
    pytest.importorskip("transformers.integrations.moe")  # it has the other way
    torch.manual_seed(0)
    rows = SortedRows.sort_by_expert(torch.tensor([[0], [1], [1]]), 2, torch.float32)
    x = torch.randn(3 * 8 + 1)[1:].view(3, 8)  # 4 bytes behind a multiple of 16
    weight = torch.randn(2, 8, 8)
    plain, weight_gradient = rows.multiply_by_expert(x, weight), rows.weight_gradient(x, x, weight)
    monkeypatch.setattr(torch_versions, "GROUPED_MM_TAKES_ANY_ADDRESS", False)
    assert not grouped_matmul.has_grouped_matmul(x, weight)
    assert grouped_matmul.has_grouped_matmul(x.clone(), weight)
    assert torch.allclose(rows.multiply_by_expert(x, weight), plain, atol=1e-6)
    assert torch.allclose(rows.weight_gradient(x, x, weight), weight_gradient, atol=1e-6)


def test_whole_numbers_ask_for_no_gradient():
    stand_in = torch_versions._NnWithIntegerParameters()
    codes = stand_in.Parameter(torch.zeros(3, dtype=torch.uint8))
    assert isinstance(codes, nn.Parameter)
    assert not codes.requires_grad
    assert stand_in.Parameter(torch.zeros(3)).requires_grad
    assert stand_in.Module is nn.Module


def test_functions_of_older_versions_are_taken_where_newer_names_are_missing(monkeypatch):
    import torch.distributed as dist

    monkeypatch.delattr(F, "grouped_mm", raising=False)
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, name, raising=False)
    try:
        older = importlib.reload(torch_versions)
        assert older.grouped_mm is torch._grouped_mm
        assert older.all_gather is dist.all_gather_into_tensor
        assert older.reduce_scatter is dist.reduce_scatter_tensor
    finally:
        monkeypatch.undo()
        importlib.reload(torch_versions)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.12.0a0+nv26.02", (2, 12)),
        ("2.9.1+rocm7.0", (2, 9)),
        ("2.10.0a0+git123", (2, 10)),
        ("2.13.0", (2, 13)),
    ],
)
def test_a_pre_release_counts_as_what_it_is_ahead_of(version, release):
    assert parse_release(version) == release


@pytest.mark.parametrize(("release", "word"), [((2, 8), "older"), ((2, 99), "newer")])
def test_a_torch_that_no_run_was_compared_on_is_told_of(monkeypatch, release, word):
    assert torch_versions.untested_torch_warning() is None, "the one of constraints.txt is tested"
    monkeypatch.setattr(torch_versions, "_RELEASE", release)
    assert (
        f"is {word} than the versions that hpc_tune was tested with (2.9 to "
        in torch_versions.untested_torch_warning()
    )
