"""How often what is measured is called, and which calls count."""

from types import SimpleNamespace

import pytest
import torch

from hpc_tune.autotune import microbenchmark


@pytest.mark.parametrize(
    ("device", "cold_s", "calls"),
    [
        # The first call tells how often 0.01 s make 0.3 s; three times that is measured.
        ("cuda", 4.0, 2 + 3 * 30),
        ("cuda", 0.01, 2 + 3 * 30),
        ("cpu", 0.01, 1 + 3 * 30),
    ],
)
def test_a_gpus_first_call_does_not_count(device, cold_s, calls, monkeypatch):
    now_s, called = [0.0], []

    def work():
        now_s[0] += 0.01 if called else cold_s
        called.append(None)

    monkeypatch.setattr(microbenchmark.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(microbenchmark, "_MIN_TIMED_S", 0.2999)
    comm = SimpleNamespace(
        device=torch.device(device), barrier=lambda what: None, max=lambda values: values
    )
    assert microbenchmark._slowest_rank_s(work, comm) == pytest.approx(0.01)
    assert len(called) == calls
