import json
import random
from dataclasses import asdict
from itertools import permutations
from types import SimpleNamespace

import pytest

from hpc_tune.errors import WorldError
from hpc_tune.world.device import (
    DeviceReport,
    VisibleGpus,
    assign_gpus,
    check_devices,
    cpu_has_bf16,
    find_visible_gpus,
    gather_visible_gpus,
    name_gpus,
    numa_nodes_by_rank,
    pick_device,
)
from hpc_tune.world.discover import World


def gpu(rank, uuid, visible, node=0):
    return DeviceReport(rank, node, f"n{node}", "cuda", uuid, tuple(visible))


def test_one_rank_per_gpu_passes_whether_each_sees_all_or_only_its_own():
    assert check_devices([gpu(0, "a", "ab"), gpu(1, "b", "ab")], is_launched=True) is None
    assert check_devices([gpu(0, "a", "a"), gpu(1, "b", "b")], is_launched=True) is None
    assert check_devices([gpu(0, "a", "a"), gpu(1, "b", "b", node=1)], is_launched=True) is None


def test_two_ranks_on_one_gpu_stop_the_job():
    reports = [gpu(0, "a", "a"), gpu(1, "a", "a")]
    with pytest.raises(WorldError, match=r"ranks 0, 1 on n0 share one GPU \(a\) of 1 visible"):
        check_devices(reports, is_launched=True)


def test_an_idle_gpu_stops_a_launched_job_and_is_named():
    reports = [gpu(0, "a", "ab"), gpu(1, "b", "ab"), gpu(2, "c", "cd", node=1)]
    with pytest.raises(WorldError, match=r"n1: 1 of 2 GPUs idle \(d\).*CUDA_VISIBLE_DEVICES"):
        check_devices(reports, is_launched=True)


def test_a_single_process_may_leave_gpus_idle_and_is_told():
    warning = check_devices([gpu(0, "a", "abcd")], is_launched=False)
    assert "3 of 4 GPUs idle" in warning
    assert "mpirun -np 4 would use all" in warning


def test_nodes_without_gpus_beside_nodes_with_gpus_stop_the_job():
    reports = [gpu(0, "a", "a"), DeviceReport(1, 1, "n1", "cpu")]
    with pytest.raises(WorldError, match="those on n1 have none"):
        check_devices(reports, is_launched=True)
    assert check_devices([DeviceReport(0, 0, "n0", "cpu")], is_launched=True) is None


class FakeCuda:
    """Stands in for torch.cuda of a machine with GPUs."""

    def __init__(self, uuids):
        self._uuids, self.current = uuids, None

    def is_available(self):
        return bool(self._uuids)

    def device_count(self):
        return len(self._uuids)

    def get_device_properties(self, index):
        if self._uuids[index] == "!":
            raise RuntimeError("CUDA unknown error\nmore")
        return SimpleNamespace(uuid=self._uuids[index])

    def set_device(self, device):
        self.current = device.index


def on_node(*seen):
    """Return what ranks 0, 1, ... of a node see; a GPU's name is a letter."""
    return {
        rank: VisibleGpus(tuple(names), (None,) * len(names)) for rank, names in enumerate(seen)
    }


def world(rank, size):
    return World(rank, size, rank, size, 0, 1, "n0", "slurm")


# What the ranks of a node see, in their order, and the GPU of each; "-" is none.
ASSIGNED = {
    "each sees its own": (["a", "b", "c"], "abc"),
    "all see all": (["abcd"] * 4, "abcd"),
    "all see all, fewer ranks than GPUs": (["abcd"] * 2, "ab"),
    "--gpu-bind: two halves of a node": (["abcd"] * 4 + ["efgh"] * 4, "abcdefgh"),
    "halves, and ranks in turn": (["ab", "cd"] * 2, "acbd"),
    "--gpus-per-task=2": (["ab", "cd", "ef", "gh"], "aceg"),
    "each has the node's GPUs in an order of its own": (["abc", "bca", "cab"], "abc"),
    "overlapping": (["ab", "bc", "ca"], "abc"),
    "overlapping, and the first must make room": (["ab", "a"], "ba"),
    "overlapping, and two must make room": (["ab", "bc", "a"], "bca"),
    "more ranks than GPUs": (["ab"] * 3, "ab-"),
    "two see the same one": (["a", "a", "b"], "a-b"),
    "one sees none": (["a", "", "b"], "a-b"),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_each_rank_gets_a_gpu_that_it_sees_and_no_other_has(name):
    seen, expected = ASSIGNED[name]
    chosen = assign_gpus(dict(enumerate(seen)))
    assert "".join(chosen.get(rank, "-") for rank in range(len(seen))) == expected


@pytest.mark.parametrize("seed", range(30))
def test_no_rank_stays_without_a_gpu_that_some_assignment_would_give_it(seed):
    draw = random.Random(seed)
    seen = {rank: draw.sample("abcde", draw.randint(1, 3)) for rank in range(5)}
    most = max(
        sum(gpu in seen[rank] for rank, gpu in enumerate(order)) for order in permutations("abcde")
    )
    chosen = assign_gpus(seen)
    assert len(chosen) == len(set(chosen.values())) == most
    assert all(gpu in seen[rank] for rank, gpu in chosen.items())


@pytest.mark.parametrize(
    ("seen", "rank", "index", "uuid"),
    [
        (["abcd"] * 4, 2, 2, "c"),
        (["a", "b", "c"], 2, 0, "c"),
        (["abcd"] * 4 + ["efgh"] * 4, 5, 1, "f"),
        (["ab", "cd"], 1, 0, "c"),
        (["ab", "a"], 0, 1, "b"),
    ],
)
def test_the_device_is_an_index_into_what_the_rank_itself_sees(
    monkeypatch, seen, rank, index, uuid
):
    import torch

    fake = FakeCuda(seen[rank])
    monkeypatch.setattr(torch, "cuda", fake)
    assert find_visible_gpus("auto").names == tuple(seen[rank])
    device, report = pick_device("auto", world(rank, len(seen)), on_node(*seen))
    assert (str(device), fake.current, report.uuid) == (f"cuda:{index}", index, uuid)
    assert report.error is None


# What the ranks of a node see, the rank that has no GPU, and what it says.
REFUSED = {
    "all see too few": (
        ["ab"] * 4,
        2,
        r"ranks 0, 1, 2, 3 on n0 share 2 GPUs \(a, b\); 4 ranks run there and see 2 in all: "
        r"start 2 per node \(--ntasks-per-node=2\), request 4 GPUs per node "
        r"\(--gpus-per-node=4\), or set run.device=cpu",
    ),
    "all see one": (["a", "a"], 1, r"ranks 0, 1 on n0 share one GPU \(a\); 2 ranks"),
    "half of them see too few": (
        ["ab"] * 3 + ["cd"],
        2,
        r"ranks 0, 1, 2 on n0 share 2 GPUs \(a, b\), while its 4 ranks see 4 in all; show each "
        r"rank all GPUs of the job \(without --gpu-bind and --gpus-per-task\)",
    ),
    "some, by way of another": (["ab", "b", "a", "cde"], 2, r"ranks 0, 1, 2 on n0 share 2 GPUs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_with_too_few_gpus_are_named_with_numbers_and_remedies(name):
    seen, rank, words = REFUSED[name]
    _, report = pick_device("auto", world(rank, len(seen)), on_node(*seen))
    with pytest.raises(WorldError, match=words):
        check_devices([report], is_launched=True)


def test_a_second_gpu_of_each_task_is_idle_and_the_remedy_names_the_option():
    reports = [gpu(0, "a", "ab"), gpu(1, "c", "cd"), gpu(2, "e", "ef"), gpu(3, "g", "gh")]
    with pytest.raises(WorldError) as refused:
        check_devices(reports, is_launched=True)
    assert str(refused.value) == (
        "n0: 4 of 8 GPUs idle (b, d, f, h); a rank was given up to 2 GPUs and uses one: start 8 "
        "ranks per node (--ntasks-per-node=8) that each see all GPUs (--gpus-per-node=8, without "
        "--gpus-per-task)"
    )
    with pytest.raises(WorldError, match="--ntasks-per-node=4"):
        check_devices([gpu(0, "a", "abcd"), gpu(1, "b", "abcd")], is_launched=True)


def properties(uuid=None, bus=None, domain=0, gfx=None):
    fields = {} if uuid is None else {"uuid": uuid}
    fields |= {} if gfx is None else {"gcnArchName": gfx}
    if bus is not None:
        fields |= {"pci_domain_id": domain, "pci_bus_id": bus, "pci_device_id": 0}
    return SimpleNamespace(**fields)


ZEROS = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("found", "environ", "names"),
    [
        ([properties("a", 1), properties("b", 2)], {}, ("a", "b")),
        (
            [properties(ZEROS, 0xC1), properties(None, 0xC6, 1)],
            {},
            ("0000:c1:00.0", "0001:c6:00.0"),
        ),
        ([properties("a", 1)] * 2, {}, ("a, 0", "a, 1")),
        ([properties()] * 2, {}, ("device 0", "device 1")),
        ([properties("whole", 1)], {"CUDA_VISIBLE_DEVICES": "MIG-5e1f"}, ("MIG-5e1f",)),
        ([properties("whole", 1)], {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, ("MIG-1",)),
        ([properties("a", 1)], {"CUDA_VISIBLE_DEVICES": "GPU-a"}, ("a",)),
        ([properties("a", 1)], {"ROCR_VISIBLE_DEVICES": "3"}, ("a",)),
        (
            [properties("a", 1, gfx="gfx90a:xnack-"), properties("a", 2, gfx="gfx90a:xnack-")],
            {},
            ("a at 0000:01:00.0", "a at 0000:02:00.0"),
        ),
        ([properties("a", 1, gfx="NVIDIA A100")], {}, ("a",)),
    ],
)
def test_a_gpu_has_a_name_that_all_ranks_of_its_node_agree_on(found, environ, names):
    assert name_gpus(found, environ) == names


def test_cuda_that_was_asked_for_and_is_missing_is_an_error(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "cuda", FakeCuda(""))
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "7")
    alone = on_node(find_visible_gpus("cuda").names)
    _, report = pick_device("cuda", world(0, 1), alone)
    words = r"finds no GPU on n0 .*ROCR_VISIBLE_DEVICES is 7.*run.device=cpu"
    with pytest.raises(WorldError, match=words):
        check_devices([report], is_launched=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    assert pick_device("auto", world(0, 1), alone)[1].error is None


def test_a_gpu_on_which_cuda_does_not_start_is_reported_and_not_raised(monkeypatch):
    """The other ranks wait for what this one sees."""
    import torch

    monkeypatch.setattr(torch, "cuda", FakeCuda("!"))
    device, report = pick_device("auto", world(0, 1), {0: find_visible_gpus("auto")})
    assert device.type == "cpu"
    assert "cannot start CUDA (CUDA unknown error) on n0" in report.error


def test_where_the_gpus_of_a_node_are_is_told_by_rank():
    seen = {
        4: VisibleGpus(("a", "b"), (3, 1)),
        5: VisibleGpus(("a", "b"), (3, 1)),
        7: VisibleGpus(("c",), (None,)),
    }
    assert numa_nodes_by_rank({**seen, 8: VisibleGpus()}) == [3, 1, None, None]


class OneOf:
    """Stands for a channel over which every rank has sent its row."""

    def __init__(self, rows):
        self._rows = rows

    def all_gather(self, value):
        assert list(value) == list(self._rows[0])
        return json.loads(json.dumps(self._rows))


def test_a_rank_learns_what_the_ranks_of_its_node_see():
    rows = [[0, ("a", "b"), (0, None), None], [1, ("x",), (0,), None], [0, (), (), "broken"]]
    own = VisibleGpus(("a", "b"), (0, None))
    assert gather_visible_gpus(world(0, 3), own, OneOf(rows)) == {
        0: own,
        2: VisibleGpus(error="broken"),
    }


def test_a_report_is_the_same_after_its_way_to_the_other_ranks():
    report = gpu(3, "b", "ab", node=1)
    assert DeviceReport.from_json(json.loads(json.dumps(asdict(report)))) == report


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
