"""The energy counters of a node, by trees that look like /sys and a driver that looks like NVML."""

import sys
import threading
from types import SimpleNamespace

import pytest

from hpc_tune.probe import gpu_state
from hpc_tune.probe.gpu_state import (
    EnergyCounter,
    EnergyMeter,
    find_energy_counters,
    joules_between,
)

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
    meter = EnergyMeter(find_energy_counters(gpus, folder), clock)
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
    assert (parts["CPUs"].joules, parts["CPUs"].num_counted) == (2 + 5, 2)
    assert parts["memory"].joules == 1


def test_a_counter_that_begins_again_goes_on(tmp_path, no_driver):
    file = zone(tmp_path, "intel-rapl:0", "package-0", WRAP - 1_500_000)
    parts = measured(tmp_path, lambda: file.write_text("500000"))
    assert parts["CPUs"].joules == pytest.approx(2.0)


def test_a_thread_reads_counters_that_begin_again_between_begin_and_end(
    tmp_path, no_driver, monkeypatch
):
    monkeypatch.setattr(gpu_state, "COUNTER_READ_INTERVAL_S", 0.01)
    used = iter([90.0, 30.0, 60.0, 0.0])  # twice beyond 100
    all_read = threading.Event()
    clock = Clock()

    def read():
        clock.now_s += 0.09
        value = next(used, None)
        if value is None:
            all_read.set()
        return value or 0.0

    meter = EnergyMeter([EnergyCounter("CPUs", "a package", read, wrap_j=100.0)], clock)
    assert all_read.wait(20)
    assert meter.end()["CPUs"].joules == pytest.approx(40 + 30 + 40)


@pytest.mark.parametrize(
    ("before", "now", "gap_s", "wrap", "joules"),
    [
        (10.0, 15.0, 1e6, None, 5.0),
        (15.0, 10.0, 10.0, None, "went backwards"),
        (250_000.0, 100.0, 60.0, 262_000.0, 12_100.0),
        (1_000.0, 0.0, 60.0, 262_000.0, "went backwards"),  # 261 kJ in a minute are 4 kW
        (1_000.0, 2_000.0, 263.0, 262_000.0, "wrapped around unnoticed"),
    ],
)
def test_two_readings_tell_what_was_spent_or_that_they_do_not(before, now, gap_s, wrap, joules):
    counter = EnergyCounter("CPUs", "x", wrap_j=wrap)
    if isinstance(joules, str):
        with pytest.raises(ValueError, match=joules):
            joules_between(counter, before, now, gap_s)
    else:
        assert joules_between(counter, before, now, gap_s) == joules


def test_a_node_without_counters_says_so(tmp_path, no_driver):
    parts = measured(tmp_path, lambda: None)
    assert parts.keys() == {"CPUs"}
    assert parts["CPUs"].num_counted == 0
    reason = f"{tmp_path}/class/powercap: the kernel shows no RAPL counter there"
    assert parts["CPUs"].reason == reason


def test_a_counter_that_only_root_may_read_is_not_known():
    def read():
        raise PermissionError(13, "Permission denied")

    part = EnergyMeter([EnergyCounter("CPUs", "energy_uj", read)]).end()["CPUs"]
    assert (part.num_counted, part.total, part.reason) == (0, 1, "energy_uj: Permission denied")


@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj"])
def test_a_counter_that_cannot_be_read_is_not_known(tmp_path, no_driver, name):
    file = zone(tmp_path, "intel-rapl:0", "package-0").with_name(name)
    file.unlink()
    file.mkdir()
    part = measured(tmp_path, lambda: None)["CPUs"]
    assert (part.num_counted, part.total) == (0, 1)
    assert part.reason.endswith(": Is a directory")


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
    assert (part.joules, part.num_counted, part.total) == (joules, joules > 0, 2)
    assert part.reason == (
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
    assert (part.joules, part.num_counted, part.total) == (30.0, 1, 3)
    assert part.reason.startswith("GPU 0000:c6:00.0: neither its maker's driver nor")


class AmdSmi:
    """Stands for amdsmi, as ROCm 6.4 and later have it: three GPUs, the last without a counter."""

    AmdSmiException = type("AmdSmiException", (Exception,), {})
    AmdSmiInitFlags = SimpleNamespace(INIT_AMD_GPUS=2)

    def __init__(self, name="energy_accumulator", fails=False):
        self.name, self.fails = name, fails
        self.counts = {"0000:c1:00.0": 10**9, "0000:c2:00.0": 0}

    def amdsmi_init(self, flag):
        if self.fails:
            raise self.AmdSmiException("Driver not loaded")

    def amdsmi_get_processor_handle_from_bdf(self, address):
        return address

    def amdsmi_get_energy_count(self, handle):
        if handle not in self.counts:
            raise self.AmdSmiException("Error code: 2\nNot supported")
        return {self.name: self.counts[handle], "counter_resolution": 15.3, "timestamp": 1}


AMD = ["0000:c1:00.0", "0000:c2:00.0", "0000:c6:00.0"]


@pytest.fixture
def amd(tmp_path, no_driver):
    """A node with AMD's driver; the kernel has counters of the first and the last GPU."""
    (tmp_path / "class" / "kfd").mkdir(parents=True)
    for address in AMD[::2]:
        folder = tmp_path / "bus" / "pci" / "devices" / address / "hwmon" / "hwmon4"
        folder.mkdir(parents=True)
        (folder / "energy1_input").write_text("1000000\n")
    return tmp_path


def kernel_counts(folder, joules):
    for file in folder.glob("bus/pci/devices/*/hwmon/hwmon4/energy1_input"):
        file.write_text(f"{1_000_000 + joules * 1_000_000}\n")


@pytest.mark.parametrize("name", ["energy_accumulator", "power"])
def test_amds_gpus_by_its_library_and_else_by_the_kernel(amd, monkeypatch, name):
    """Of a card with two dies the first counts for both."""
    library = AmdSmi(name)
    monkeypatch.setitem(sys.modules, "amdsmi", library)

    def change():
        library.counts[AMD[0]] += 2_000_000
        kernel_counts(amd, 7)

    part = measured(amd, change, AMD)["GPUs"]
    assert part.joules == pytest.approx(2_000_000 * 15.3e-6 + 7)
    assert (part.num_counted, part.total) == (2, 3)
    assert part.reason == "GPU 0000:c2:00.0: its counter stood still"


def test_a_gpu_of_which_amds_library_and_the_kernel_tell_nothing_says_why(amd, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", AmdSmi())
    part = measured(amd, lambda: None, ["0000:c9:00.0"])["GPUs"]
    assert part.reason == "GPU 0000:c9:00.0: AMD's library says Error code: 2"


@pytest.mark.parametrize("module", [None, AmdSmi(fails=True)])
def test_without_amds_library_the_kernel_tells(amd, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    part = measured(amd, lambda: kernel_counts(amd, 5), AMD)["GPUs"]
    assert (part.joules, part.num_counted, part.total) == (10.0, 2, 3)


def test_an_amdsmi_that_lacks_its_own_library_is_none_and_prints_nothing(amd, monkeypatch, capsys):
    """As the package of PyPI does without ROCm."""
    (package := amd / "packages" / "amdsmi").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    part = measured(amd, lambda: kernel_counts(amd, 5), AMD)["GPUs"]
    assert part.num_counted == 2
    assert capsys.readouterr().out == ""


def test_amds_library_is_not_asked_where_its_driver_is_not(tmp_path, no_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", library := AmdSmi())
    library.amdsmi_init = lambda flag: pytest.fail("it was asked")
    part = measured(tmp_path, lambda: None, AMD)["GPUs"]
    assert (part.num_counted, part.total) == (0, 3)


def test_the_whole_node_by_crays_counter(tmp_path, no_driver):
    file = tmp_path / "cray" / "pm_counters" / "energy"
    file.parent.mkdir(parents=True)
    file.write_text("7461634 J 1700000000000000 us\n")
    change = lambda: file.write_text("7462634 J 1700000010000000 us\n")  # noqa: E731
    assert measured(tmp_path, change)["node"].joules == 1000
