"""FlashAttention 3 and 4 where they are installed: tried, used or taken back.

Neither runs here. What torch is asked, and what follows from a result that is right, wrong or an
error, is real; the comparison with masked attention is that of test_varlen_attention.py.
"""

import pytest
import torch
from torch.nn import attention

from hpc_tune.model import varlen_attention

GPU = torch.device("cuda", 0)
TRIED = (GPU, torch.bfloat16, 128, 4)


@pytest.fixture
def asked(monkeypatch):
    """What torch was told, with both packages installed on a Hopper."""
    calls = []
    varlen_attention.use_flash_attention.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen_attention, "is_installed", lambda module: True)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", calls.append, raising=False)
    restore = lambda **_: calls.append("torch's own")  # noqa: E731
    monkeypatch.setattr(attention, "restore_flash_attention_impl", restore, raising=False)
    yield calls
    varlen_attention.use_flash_attention.cache_clear()


def gaps(monkeypatch, *answers):
    given = iter(answers)

    def found(*of):
        answer = next(given)
        if isinstance(answer, Exception):
            raise answer
        return {"its result": answer}

    monkeypatch.setattr(varlen_attention, "compare_kernel_with_mask", found)


def test_the_best_is_used_where_it_is_right(asked, monkeypatch):
    gaps(monkeypatch, 1e-3)
    assert varlen_attention.use_flash_attention(*TRIED) == "FlashAttention 3"
    assert asked == ["FA3"]
    assert varlen_attention.use_flash_attention(*TRIED) == "FlashAttention 3"
    assert asked == ["FA3"], "it is tried once"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (0.5, "it differs from masked attention by 5.0e-01 of the norm"),
        (float("nan"), "it differs from masked attention by nan of the norm"),
        (RuntimeError("undefined symbol: _ZN3c10"), "it fails here (undefined symbol: _ZN3c10)"),
        (OSError("libcudart.so.12: cannot open"), "it fails here (libcudart.so.12: cannot open)"),
    ],
)
def test_one_that_is_wrong_is_taken_back_and_said(asked, monkeypatch, caplog, answer, why):
    gaps(monkeypatch, answer, 1e-3)
    assert varlen_attention.use_flash_attention(*TRIED) == "FlashAttention 4"
    assert asked == ["FA3", "torch's own", "FA4"]
    assert f"FlashAttention 3 is installed but not used: {why}" in caplog.text


def test_a_window_is_tried_too(asked, monkeypatch):
    gaps(monkeypatch, 1e-3, 0.5, 0.5)
    assert varlen_attention.use_flash_attention(*TRIED, 70) == ""
    assert asked == ["FA3", "torch's own", "FA4", "torch's own"]


@pytest.mark.parametrize(("capability", "found"), [((8, 0), []), ((10, 0), ["FA4"])])
def test_each_is_for_some_gpus(asked, monkeypatch, capability, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert varlen_attention.list_flash_attention_versions(GPU) == found


def test_an_older_torch_has_none(asked, monkeypatch):
    monkeypatch.delattr(attention, "activate_flash_attention_impl")
    assert varlen_attention.use_flash_attention(*TRIED) == ""


def test_what_is_not_installed_is_not_asked_for(monkeypatch):
    varlen_attention.use_flash_attention.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert varlen_attention.use_flash_attention(*TRIED) == ""
