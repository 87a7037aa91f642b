"""The energy counters of a node, by trees that look like /sys and a driver that looks like NVML."""

import sys
import threading

import pytest

from hpc_tune.probe import energy
from hpc_tune.probe.energy import Counter, NodeMeter, counters_of_node, joules_between

WRAP = 262_143_328_850  # microjoules, as Intel's packages have it


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Driver:
    """Two GPUs, of which the second has no counter."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self):
        self.millijoules = 5_000_000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address):
        return address

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle != "0000:17:00.0":
            raise self.NVMLError("Not Supported")
        return self.millijoules


def zone(folder, name, kind, used=0, wrap=WRAP):
    path = folder / "class" / "powercap" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{kind}\n")
    (path / "max_energy_range_uj").write_text(f"{wrap}\n")
    (path / "energy_uj").write_text(f"{used}\n")
    return path / "energy_uj"


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def measured(folder, change, gpus=(), seconds=10.0):
    """What the parts of a node took between two readings, with ``change`` between them."""
    clock = Clock()
    meter = NodeMeter(counters_of_node(gpus, folder), clock)
    change()
    clock.now_s = seconds
    return meter.end()


def test_packages_and_their_memory_count_and_zones_within_them_do_not(tmp_path, no_driver):
    files = [
        zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:0:1", "dram", 0),
        zone(tmp_path, "intel-rapl:1", "package-1", 2_000_000),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
    ]

    def change():
        for file, used in zip(files, (3, 9, 1, 7, 9), strict=True):
            file.write_text(f"{used * 1_000_000}\n")

    parts = measured(tmp_path, change)
    assert parts.keys() == {"CPUs", "memory"}
    assert (parts["CPUs"].joules, parts["CPUs"].counted) == (2 + 5, 2)
    assert parts["memory"].joules == 1


def test_a_counter_that_begins_again_goes_on(tmp_path, no_driver):
    file = zone(tmp_path, "intel-rapl:0", "package-0", WRAP - 1_500_000)
    parts = measured(tmp_path, lambda: file.write_text("500000"))
    assert parts["CPUs"].joules == pytest.approx(2.0)


def test_a_thread_reads_counters_that_begin_again_between_begin_and_end(
    tmp_path, no_driver, monkeypatch
):
    monkeypatch.setattr(energy, "READ_EVERY_S", 0.01)
    used = iter([90.0, 30.0, 60.0, 0.0])  # twice beyond 100
    all_read = threading.Event()
    clock = Clock()

    def read():
        clock.now_s += 0.09
        value = next(used, None)
        if value is None:
            all_read.set()
        return value or 0.0

    meter = NodeMeter([Counter("CPUs", "a package", read, wrap_j=100.0)], clock)
    assert all_read.wait(20)
    assert meter.end()["CPUs"].joules == pytest.approx(40 + 30 + 40)


@pytest.mark.parametrize(
    ("before", "now", "gap_s", "wrap", "joules"),
    [
        (10.0, 15.0, 1e6, None, 5.0),
        (15.0, 10.0, 10.0, None, "went backwards"),
        (250_000.0, 100.0, 60.0, 262_000.0, 12_100.0),
        (1_000.0, 0.0, 60.0, 262_000.0, "went backwards"),  # 261 kJ in a minute are 4 kW
        (1_000.0, 2_000.0, 263.0, 262_000.0, "begun again unseen"),
    ],
)
def test_two_readings_tell_what_was_spent_or_that_they_do_not(before, now, gap_s, wrap, joules):
    counter = Counter("CPUs", "x", wrap_j=wrap)
    if isinstance(joules, str):
        with pytest.raises(ValueError, match=joules):
            joules_between(counter, before, now, gap_s)
    else:
        assert joules_between(counter, before, now, gap_s) == joules


def test_a_node_without_counters_says_so(tmp_path, no_driver):
    parts = measured(tmp_path, lambda: None)
    assert parts.keys() == {"CPUs"}
    assert parts["CPUs"].counted == 0
    assert parts["CPUs"].why == f"{tmp_path}/class/powercap: the kernel shows no RAPL counter there"


def test_a_counter_that_only_root_may_read_is_not_known():
    def read():
        raise PermissionError(13, "Permission denied")

    part = NodeMeter([Counter("CPUs", "energy_uj", read)]).end()["CPUs"]
    assert (part.counted, part.total, part.why) == (0, 1, "energy_uj: Permission denied")


@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj"])
def test_a_counter_that_cannot_be_read_is_not_known(tmp_path, no_driver, name):
    file = zone(tmp_path, "intel-rapl:0", "package-0").with_name(name)
    file.unlink()
    file.mkdir()
    part = measured(tmp_path, lambda: None)["CPUs"]
    assert (part.counted, part.total) == (0, 1)
    assert part.why.endswith(": Is a directory")


@pytest.mark.parametrize(
    ("millijoules", "joules", "why"),
    [
        (5_250_000, 250.0, ""),
        (1_000, 0.0, "its counter went backwards"),
        (5_000_000, 0.0, "its counter stood still"),
    ],
)
def test_gpus_by_the_driver(tmp_path, monkeypatch, millijoules, joules, why):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    gpus = ["0000:17:00.0", "0000:18:00.0"]
    part = measured(tmp_path, lambda: setattr(driver, "millijoules", millijoules), gpus)["GPUs"]
    assert (part.joules, part.counted, part.total) == (joules, joules > 0, 2)
    assert part.why == (
        f"GPU 0000:17:00.0: {why}"
        if why
        else "GPU 0000:18:00.0: NVIDIA's driver says Not Supported"
    )


def test_a_gpu_without_nvidias_driver_by_the_kernel(tmp_path, no_driver):
    file = tmp_path / "bus" / "pci" / "devices" / "0000:c1:00.0" / "hwmon" / "hwmon4"
    file.mkdir(parents=True)
    (file := file / "energy1_input").write_text("1000000\n")
    gpus = ["0000:c1:00.0", "0000:c6:00.0", ""]
    part = measured(tmp_path, lambda: file.write_text("31000000\n"), gpus)["GPUs"]
    assert (part.joules, part.counted, part.total) == (30.0, 1, 3)
    assert part.why.startswith("GPU 0000:c6:00.0: neither NVIDIA's driver nor")


def test_the_whole_node_by_crays_counter(tmp_path, no_driver):
    file = tmp_path / "cray" / "pm_counters" / "energy"
    file.parent.mkdir(parents=True)
    file.write_text("7461634 J 1700000000000000 us\n")
    change = lambda: file.write_text("7462634 J 1700000010000000 us\n")  # noqa: E731
    assert measured(tmp_path, change)["node"].joules == 1000
