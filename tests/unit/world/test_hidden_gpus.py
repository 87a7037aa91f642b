"""GPUs of a node that a rank cannot open, as cgroups and containers hide them."""

import os
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.errors import WorldError
from hpc_tune.world import bootstrap, device
from hpc_tune.world.device import (
    DeviceReport,
    VisibleGpus,
    check_devices,
    count_openable_gpus,
    hidden_gpus_warning,
    pick_device,
)
from hpc_tune.world.discover import World


def test_what_may_be_opened_is_counted_whatever_variables_show(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_openable_gpus(tmp_path) == 3
    opened = os.open

    def by_cgroup(path, *more, **options):
        if str(path).endswith(("nvidia0", "nvidia12")):
            raise PermissionError(1, "Operation not permitted")
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", by_cgroup)
    assert count_openable_gpus(tmp_path) == 1
    assert count_openable_gpus(tmp_path / "of a container without GPUs") == 0


@pytest.mark.parametrize(
    ("reachable", "uuids", "is_told"),
    [
        (1, ["a", "b", "c", "d"], True),  # --gpus-per-task=1 under ConstrainDevices
        (2, ["a", "b", "c", "d"], True),
        (4, ["a", "b", "c", "d"], False),  # hidden by CUDA_VISIBLE_DEVICES alone
        (8, ["a", "b"], False),
        (1, ["a"], False),
        (0, ["a", "b"], False),  # AMD's
        (1, ["MIG-1", "MIG-2"], False),  # slices have no links
    ],
)
def test_who_is_told_that_the_others_gpus_are_hidden(reachable, uuids, is_told):
    here = [
        DeviceReport(rank, 0, "n0", "cuda", uuid, (uuid,), reachable=reachable)
        for rank, uuid in enumerate(uuids)
    ]
    assert check_devices(here, is_launched=True) is None
    text = hidden_gpus_warning(here)
    assert bool(text) == is_told
    if is_told:
        assert text.startswith(
            f"n0: ranks may open {reachable} of the 4 GPUs; the device files of "
        )
        assert "--gpus-per-node without --gpus-per-task" in text


def test_one_gpu_on_each_of_two_nodes_hides_nothing():
    apart = [
        DeviceReport(rank, rank, f"n{rank}", "cuda", "ab"[rank], ("ab"[rank],), reachable=1)
        for rank in range(2)
    ]
    assert hidden_gpus_warning(apart) is None


def test_a_rank_reports_what_it_may_open(monkeypatch):
    monkeypatch.setattr(device, "count_openable_gpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    world = World(0, 1, 0, 1, 0, 1, "n0", "slurm")
    _, report = pick_device("cuda", world, {0: VisibleGpus(("a", "b", "c"), (None,) * 3)})
    assert report == DeviceReport(0, 0, "n0", "cuda", "a", ("a", "b", "c"), reachable=3)


def test_devices_that_cannot_connect_name_what_is_hidden_before_the_network(monkeypatch):
    def fails(word):
        raise RuntimeError("NCCL error: invalid device ordinal")

    monkeypatch.setattr(torch.distributed, "all_reduce", fails)
    monkeypatch.setattr(bootstrap, "_create_groups", lambda *of: None)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    world = World(0, 2, 0, 2, 0, 1, "n0", "slurm")
    with pytest.raises(WorldError, match=r"ordinal. n0: hidden. Or NCCL's network does not"):
        bootstrap.init_groups(world, gpu, None, 10.0, 600.0, "n0: hidden")
