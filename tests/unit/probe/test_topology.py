"""What sits where in a node, from a driver and a kernel that are written down here.

No part of it was read on a machine with GPUs: the driver is a stand-in with the names of
nvidia-ml-py, which are held against the real package where it is installed.
"""

import sys
from types import SimpleNamespace

import pytest

from hpc_tune.probe.topology import NO_NVML, Topology, read_topology

# A node of two switches: each has two GPUs and one network card behind it.
PCI = {
    "0000:17:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0",
    "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:01.0/0000:18:00.0",
    "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:02.0/0000:19:00.0",
    "0000:97:00.0": "pci0000:95/0000:95:01.0/0000:96:00.0/0000:97:00.0",
    "0000:99:00.0": "pci0000:95/0000:95:01.0/0000:96:02.0/0000:99:00.0",
}
GPUS = ("0000:17:00.0", "0000:18:00.0", "0000:97:00.0")
CARDS = {"mlx5_0": "0000:19:00.0", "mlx5_1": "0000:99:00.0"}


@pytest.fixture
def kernel(tmp_path):
    """Its folder of devices."""
    devices = tmp_path / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    for place, path in PCI.items():
        (tmp_path / "devices" / path).mkdir(parents=True)
        (devices / place).symlink_to(tmp_path / "devices" / path)
        (devices / place / "numa_node").write_text("0\n" if place < "0000:90" else "1\n")
    for name, place in CARDS.items():
        port = tmp_path / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port.parents[1] / "device").symlink_to(devices / place)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return tmp_path


class Driver:
    """Stands for nvidia-ml-py: GPUs 0 and 1 have an NVLink, 2 is alone; each has two of four up."""

    NVML_NVLINK_MAX_LINKS = 4
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    class NVMLError(Exception):
        """As all its errors."""

    def nvmlInit(self):
        self.is_up = True

    def nvmlShutdown(self):
        self.is_up = False

    def nvmlDeviceGetCount(self):
        return len(GPUS) + 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == len(GPUS):
            raise self.NVMLError("No Permission")
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle):
        return b"H100"

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000{GPUS[handle]}".upper())

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link == 3:
            raise self.NVMLError("Invalid Argument")
        return int(link < 2)

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0 if {one, other} == {0, 1} else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50

    def nvmlSystemGetCudaDriverVersion(self):
        return 12040

    def nvmlSystemGetDriverVersion(self):
        return "550.54"


def test_gpus_cards_and_how_they_meet(kernel, monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = read_topology(kernel)
    assert [(gpu.uuid, gpu.place, gpu.numa, gpu.nvlinks) for gpu in found.gpus] == [
        ("0abc", "0000:17:00.0", 0, 2),
        ("1abc", "0000:18:00.0", 0, 2),
        ("2abc", "0000:97:00.0", 1, 2),
    ]
    assert found.paths == {"0-1": "NVLink", "0-2": "SYS", "1-2": "SYS"}
    assert [(c.name, c.state, c.rate, c.numa, c.near) for c in found.cards] == [
        ("mlx5_0", "ACTIVE", "400 Gb/sec", 0, (0, 1)),
        ("mlx5_1", "ACTIVE", "400 Gb/sec", 1, (2,)),
    ]
    assert (found.driver, found.driver_cuda) == ("550.54", "12.4")
    assert not driver.is_up


@pytest.mark.parametrize(
    ("refuse", "gpus", "paths", "driver"),
    [
        ("nvmlDeviceGetCount", 0, 0, ""),
        ("nvmlDeviceGetPciInfo", 0, 0, "550.54"),
        ("nvmlDeviceGetUUID", 0, 0, "550.54"),
        ("nvmlDeviceGetNvLinkState", 3, 3, "550.54"),
        ("nvmlDeviceGetTopologyCommonAncestor", 3, 3, "550.54"),
        ("nvmlSystemGetDriverVersion", 3, 3, ""),
        ("nvmlSystemGetCudaDriverVersion", 3, 3, "550.54"),
        ("nvmlShutdown", 3, 3, "550.54"),
    ],
)
def test_what_the_driver_refuses_is_left_out_and_noted(
    kernel, monkeypatch, refuse, gpus, paths, driver
):
    """As for a slice of a GPU, a virtual one, or where a site forbids it."""

    def fail(*asked):
        raise Driver.NVMLError("Not Supported")

    stand_in = Driver()
    setattr(stand_in, refuse, fail)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    found = read_topology(kernel)
    assert (len(found.gpus), len(found.paths), found.driver) == (gpus, paths, driver)
    noted = {"No Permission"} if refuse != "nvmlDeviceGetCount" else set()
    quiet = ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor", "nvmlShutdown")
    assert set(found.driver_error.split("; ")) == noted | (
        set() if refuse in quiet else {"Not Supported"}
    )


def test_cards_of_other_networks_are_told_with_their_rate(tmp_path):
    cards = {"cxi0": "cxi", "cxi1": "cxi", "rdmap0": "infiniband", "mlx5_0": "infiniband"}
    for number, (name, group) in enumerate(cards.items()):
        device = tmp_path / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        card = tmp_path / "class" / group / name
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
        for port, state in (("1", "1: DOWN"), ("2", "4: ACTIVE")):
            if group == "infiniband":
                (card / "ports" / port).mkdir(parents=True)
                (card / "ports" / port / "state").write_text(f"{state}\n")
                (card / "ports" / port / "rate").write_text(f"{port}00 Gb/sec (4X EDR)\n")
                (card / "ports" / port / "link_layer").write_text("Ethernet\n")
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "devices" / "0000:02:00.0" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    (tmp_path / "devices" / "0000:00:00.0" / "net" / "hsn0").mkdir(parents=True)
    for name, speed in {
        "hsn0": "400000",
        "eth0": "25000",
        "eth1": "-1",
        "docker0": "10000",
    }.items():
        net = tmp_path / "class" / "net" / name
        net.mkdir(parents=True)
        (net / "speed").write_text(f"{speed}\n")
        if name != "docker0":  # that one is no device
            (net / "device").symlink_to(tmp_path / "devices" / "0000:00:00.0")
    found = read_topology(tmp_path)
    assert [(card.name, card.kind, card.state, card.rate) for card in found.cards] == [
        ("mlx5_0", "RoCE", "ACTIVE", "200 Gb/sec"),
        ("rdmap0", "EFA", "ACTIVE", "200 Gb/sec"),
        ("cxi0", "Slingshot", "", "400 Gb/sec"),
        ("cxi1", "Slingshot", "", "200 Gb/sec"),
    ]
    assert found.ethernet == {"eth0": 25000, "hsn0": 400000}


def test_without_a_driver_or_its_package_the_cards_are_told(kernel, monkeypatch, tmp_path):
    def fail():
        raise Driver.NVMLError("Driver Not Loaded")

    driver = Driver()
    driver.nvmlInit = fail
    for module in (driver, None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        found = read_topology(kernel)
        assert (found.gpus, found.paths, found.driver) == ((), {}, "")
        assert [card.name for card in found.cards] == list(CARDS)
    assert read_topology(tmp_path / "nothing") == Topology(driver_error=NO_NVML)


def test_the_stand_in_has_the_names_of_the_real_package():
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in dir(Driver) if name.lower().startswith("nvml")]
    assert len(names) > 10
    assert not [name for name in names if not hasattr(real, name)]
