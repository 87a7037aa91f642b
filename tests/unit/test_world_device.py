import pytest

from hpc_tune.errors import WorldError
from hpc_tune.world.device import DeviceReport, check_devices, cpu_has_bf16, pick_device
from hpc_tune.world.discover import World


def gpu(rank, uuid, visible, node=0):
    return DeviceReport(rank, node, f"n{node}", "cuda", uuid, tuple(visible))


def test_one_rank_per_gpu_passes_whether_each_sees_all_or_only_its_own():
    assert check_devices([gpu(0, "a", "ab"), gpu(1, "b", "ab")], launched=True) is None
    assert check_devices([gpu(0, "a", "a"), gpu(1, "b", "b")], launched=True) is None
    assert check_devices([gpu(0, "a", "a"), gpu(1, "b", "b", node=1)], launched=True) is None


def test_two_ranks_on_one_gpu_stop_the_job():
    reports = [gpu(0, "a", "a"), gpu(1, "a", "a")]
    with pytest.raises(WorldError, match=r"ranks 0, 1 on n0 share one GPU \(a\) of 1 visible"):
        check_devices(reports, launched=True)


def test_an_idle_gpu_stops_a_launched_job_and_is_named():
    reports = [gpu(0, "a", "ab"), gpu(1, "b", "ab"), gpu(2, "c", "cd", node=1)]
    with pytest.raises(WorldError, match=r"n1: 1 of 2 GPUs idle \(d\).*CUDA_VISIBLE_DEVICES"):
        check_devices(reports, launched=True)


def test_a_single_process_may_leave_gpus_idle_and_is_told():
    warning = check_devices([gpu(0, "a", "abcd")], launched=False)
    assert "3 of 4 GPUs idle" in warning
    assert "mpirun -np 4 would use all" in warning


def test_nodes_without_gpus_beside_nodes_with_gpus_stop_the_job():
    reports = [gpu(0, "a", "a"), DeviceReport(1, 1, "n1", "cpu")]
    with pytest.raises(WorldError, match="those on n1 have none"):
        check_devices(reports, launched=True)
    assert check_devices([DeviceReport(0, 0, "n0", "cpu")], launched=True) is None


class FakeCuda:
    """Stands in for torch.cuda of a machine with GPUs."""

    def __init__(self, uuids):
        self._uuids, self.current = uuids, None

    def is_available(self):
        return bool(self._uuids)

    def device_count(self):
        return len(self._uuids)

    def get_device_properties(self, index):
        return type("Properties", (), {"uuid": self._uuids[index]})

    def set_device(self, device):
        self.current = device.index


@pytest.mark.parametrize(
    ("uuids", "local_rank", "index", "uuid"),
    [("abcd", 2, 2, "c"), ("c", 2, 0, "c"), ("abcd", 0, 0, "a")],
)
def test_the_local_rank_is_the_device_unless_only_one_is_shown(
    monkeypatch, uuids, local_rank, index, uuid
):
    import torch

    fake = FakeCuda(uuids)
    monkeypatch.setattr(torch, "cuda", fake)
    device, report = pick_device("auto", World(2, 4, local_rank, 4, 0, 1, "n0", "openmpi"))
    assert (str(device), fake.current, report.uuid) == (f"cuda:{index}", index, uuid)


def test_more_ranks_than_gpus_on_a_node_is_an_error_with_the_right_number(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "cuda", FakeCuda("ab"))
    _, report = pick_device("auto", World(2, 4, 2, 4, 0, 1, "n0", "openmpi"))
    with pytest.raises(WorldError, match=r"n0 runs 4 ranks but shows 2 GPUs.*start 2 ranks"):
        check_devices([report], launched=True)


def test_cuda_that_was_asked_for_and_is_missing_is_an_error(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "cuda", FakeCuda(""))
    _, report = pick_device("cuda", World(0, 1, 0, 1, 0, 1, "n0", "single"))
    with pytest.raises(WorldError, match=r"finds no CUDA device on n0.*run.device=cpu"):
        check_devices([report], launched=False)
    assert pick_device("auto", World(0, 1, 0, 1, 0, 1, "n0", "single"))[1].error is None


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        (None, True),
    ],
)
def test_a_cpu_says_whether_it_multiplies_bf16(tmp_path, text, has):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert cpu_has_bf16(file) is has
