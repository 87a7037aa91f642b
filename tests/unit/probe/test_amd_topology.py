"""AMD's GPUs from trees as the kernel's compute driver shows them, of the nodes of four sites."""

import dataclasses

import pytest

from hpc_tune.probe.topology import amd_gpus, read_topology

# A node of LUMI or Frontier: 8 dies of MI250X, linked within a card and to some neighbors.
MI250X = {
    4: (90010, 0xC100, (5, 6, 10)),
    5: (90010, 0xC600, (4, 7, 9)),
    6: (90010, 0xC900, (4, 7, 8)),
    7: (90010, 0xCE00, (5, 6, 11)),
    8: (90010, 0xD100, (6, 9, 10)),
    9: (90010, 0xD600, (5, 8, 11)),
    10: (90010, 0xD900, (4, 8, 11)),
    11: (90010, 0xDE00, (7, 9, 10)),
}
MI300A = {node: (90402, 0x100 + node, tuple({0, 1, 2, 3} - {node})) for node in range(4)}
MI300X = {n: (90402, n << 8, tuple({*range(2, 10)} - {n})) for n in range(2, 10)}
MI355X = {n: (90500, n << 8, tuple({*range(2, 10)} - {n})) for n in range(2, 10)}


def shown(folder, gpus, cpus=(0, 1)):
    """Write the driver's tree of these GPUs, and of nodes that are CPUs alone."""
    nodes = folder / "class" / "kfd" / "kfd" / "topology" / "nodes"
    for node in {*cpus, *gpus}:
        (nodes / str(node) / "io_links").mkdir(parents=True)
        (nodes / str(node) / "gpu_id").write_text("51234\n" if node in gpus else "0\n")
    for node, (version, location, linked) in gpus.items():
        facts = f"simd_count 440\ngfx_target_version {version}\nlocation_id {location}\ndomain 0\n"
        (nodes / str(node) / "properties").write_text(f"{facts}unique_id {1000 + node}\n")
        kinds = {**dict.fromkeys(cpus[:1], 2), **dict.fromkeys(linked, 11)}
        for number, (to, kind) in enumerate(kinds.items()):
            link = nodes / str(node) / "io_links" / str(number)
            link.mkdir()
            (link / "properties").write_text(f"type {kind}\nnode_from {node}\nnode_to {to}\n")
    return folder


@pytest.mark.parametrize(
    ("gpus", "gfx", "links"),
    [(MI250X, "gfx90a", 3), (MI300A, "gfx942", 3), (MI300X, "gfx942", 7), (MI355X, "gfx950", 7)],
)
def test_each_gpu_is_found_with_its_architecture_and_links(tmp_path, gpus, gfx, links):
    cpus = () if gpus is MI300A else (0, 1)  # whose CPUs are on the same node as its GPU
    found = read_topology(shown(tmp_path, gpus, cpus))
    assert [gpu.name for gpu in found.gpus] == [gfx] * len(gpus)
    assert {gpu.nvlinks for gpu in found.gpus} == {links}
    linked = [pair for pair, path in found.paths.items() if path == "XGMI"]
    assert len(linked) == len(gpus) * links // 2
    assert len(found.paths) == len(gpus) * (len(gpus) - 1) // 2


def test_dies_of_mi250x_have_their_addresses_and_numa_nodes(tmp_path):
    shown(tmp_path, MI250X)
    for place, numa in (("0000:c1:00.0", 3), ("0000:d9:00.0", 1)):
        device = tmp_path / "bus" / "pci" / "devices" / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(str(numa))
    found = read_topology(tmp_path)
    assert [gpu.place for gpu in found.gpus][:2] == ["0000:c1:00.0", "0000:c6:00.0"]
    assert (found.gpus[0].numa, found.gpus[6].numa) == (3, 1)
    assert (found.paths["0-1"], found.paths["0-3"]) == ("XGMI", "PCIe")
    assert found.driver == ""
    (tmp_path / "module" / "amdgpu").mkdir(parents=True)
    (tmp_path / "module" / "amdgpu" / "version").write_text("6.14.5\n")
    assert read_topology(tmp_path).driver == "6.14.5"


def test_a_node_without_gpus_of_amd_has_none(tmp_path):
    assert amd_gpus(tmp_path) == []
    assert amd_gpus(shown(tmp_path, {})) == []


def test_a_link_that_is_down_is_named_as_amd_calls_it(tmp_path):
    from tests.unit.probe.test_doctor_findings import Links, find_problems, world

    found = read_topology(shown(tmp_path, MI300X))
    worn = dataclasses.replace(found.gpus[3], nvlinks=6)
    gpus = (*found.gpus[:3], worn, *found.gpus[4:])
    ranks = world((0, {"topology": dataclasses.replace(found, gpus=gpus)}))
    texts = [finding.text for finding in find_problems(ranks, Links((), ()))]
    assert "n0: GPU 3 has only 6 of 7 XGMI links up" in texts
