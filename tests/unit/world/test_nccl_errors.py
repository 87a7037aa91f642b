"""Who ends the world where NCCL has an error, and what is said."""

import queue
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from hpc_tune.world import bootstrap, liveness, nccl
from hpc_tune.world.nccl import NcclWatch, disable_nccl_error_handling, find_group_errors


class NcclGroup:
    """A group of which NCCL has one of torch's ErrorType."""

    def __init__(self, name):
        self.error = SimpleNamespace(name=name)

    def _get_backend(self, device):
        if self.error.name == "of the host":
            raise RuntimeError("No backend type associated with device type cuda")
        return SimpleNamespace(get_error=lambda: self.error)


def comm():
    world = SimpleNamespace(rank=3, size=8, hostname="n1")
    return SimpleNamespace(world=world, activity=["training step 7"])


@pytest.fixture
def ended(monkeypatch):
    """What the world was ended with, once the others have had no time to."""
    monkeypatch.setattr(liveness, "exit_soon", lambda: None)
    monkeypatch.setattr(liveness, "NCCL_CAUSE_LIMIT_S", 0.05)
    return queue.Queue()


def watched(ended, errors):
    return NcclWatch(comm(), 100.0, lambda of, error: ended.put((of, error)), errors, 0.01)


def test_an_error_of_any_group_ends_the_world_with_what_it_means(ended, monkeypatch):
    names = ("SUCCESS", "of the host", "COMM_ERROR")
    groups = dict.fromkeys(map(NcclGroup, names))
    monkeypatch.setattr(distributed_c10d, "_pg_map", groups)
    assert find_group_errors() == ["COMM_ERROR"]
    watch = watched(ended, find_group_errors)
    of, error = ended.get(timeout=60)
    assert of.world.rank == 3
    assert str(error).startswith(
        "NCCL has lost its connection to another rank while training step 7, and no"
    )
    watch.close()


def test_the_ranks_new_number_is_named_once_ranks_are_in_another_order(ended):
    errors = []
    watch = watched(ended, lambda: errors)
    later = comm()
    later.world.rank = 5
    watch.renumber(later)
    errors.append("COMM_ERROR")
    assert ended.get(timeout=60)[0] is later
    watch.close()


def test_whoever_hears_of_a_ranks_end_speaks_first(ended, monkeypatch):
    assert liveness.NCCL_CAUSE_LIMIT_S < 1
    monkeypatch.undo()
    assert (
        liveness.NCCL_CAUSE_LIMIT_S > liveness.RANK_END_REPORT_LIMIT_S + liveness.NCCL_CHECK_EVERY_S
    )
    asked = []
    watch = watched(ended, lambda: asked.append(None) or ["COMM_ERROR"])
    while not asked:
        time.sleep(0.01)
    watch.close()  # as the world ends
    time.sleep(0.2)
    assert ended.empty()


def test_a_late_collective_ends_the_world_unless_the_job_was_suspended(ended, monkeypatch):
    _, error = (watched(ended, lambda: ["TIMEOUT"]), ended.get(timeout=60))[1]
    assert "had not finished 60 s after run.timeout (100 s)" in str(error)
    now_s = [0.0]
    monkeypatch.setattr(nccl.time, "monotonic", lambda: now_s[0])
    shown, looks = ["SUCCESS"], []
    watch = NcclWatch(comm(), 100.0, lambda *told: ended.put(told), lambda: [], 3600.0)
    watch._errors = lambda: looks.append(None) or [name for name in shown if name != "SUCCESS"]
    assert not watch._check_groups()
    now_s[0], shown[:] = 7200.0, ["TIMEOUT"]  # stopped for two hours
    assert not watch._check_groups()
    assert not watch._check_groups()
    assert ended.empty()
    shown[:] = ["COMM_ERROR"]
    assert watch._check_groups()
    assert "NCCL has lost its connection" in str(ended.get(timeout=1)[1])
    watch.close()


class WithErrors:
    def get_error(self):
        """Return an ErrorType."""


@pytest.mark.parametrize(
    ("backend", "was", "is_changed"),
    [
        (WithErrors, {}, True),
        (WithErrors, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False),
        (WithErrors, {"NCCL_ASYNC_ERROR_HANDLING": "3"}, False),
        (WithErrors, {"TORCH_NCCL_ENABLE_MONITORING": "1"}, False),
        (object, {}, False),  # a torch that cannot tell
    ],
)
def test_torch_ends_no_process_where_its_errors_can_be_looked_at(
    backend, was, is_changed, monkeypatch
):
    native = torch._C._distributed_c10d
    monkeypatch.setattr(native, "ProcessGroupNCCL", backend, raising=False)
    environ = dict(was)
    disable_nccl_error_handling(environ)
    assert (environ != was) == is_changed
    if is_changed:
        assert environ == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }


def test_it_is_said_before_groups_are_made_and_on_gpus_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(
        bootstrap, "disable_nccl_error_handling", lambda environ: calls.append("errors")
    )
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: calls.append("group")
    )
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", None)
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", None, raising=False)
    world = SimpleNamespace(rank=0, size=1, label="rank 0 on n0")
    store = torch.distributed.HashStore()
    bootstrap._create_groups(world, SimpleNamespace(type="cuda"), store, 10.0)
    bootstrap._create_groups(world, SimpleNamespace(type="cpu"), store, 10.0)
    assert calls == ["errors", "group", "group"]
