"""What a GPU tells of itself, by a driver that looks like NVML and a tree that looks like /sys."""

import sys

import pytest

from hpc_tune.probe.gpu_state import GpuState, make_state_reader, open_nvml

PLACE = "0000:17:00.0"


class Driver:
    """One GPU that is hot."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address):
        if address != PLACE:
            raise self.NVMLError("Not Found")
        return address

    def nvmlDeviceGetClockInfo(self, handle, which):
        return {1: 1005}[which]

    def nvmlDeviceGetTemperature(self, handle, which):
        return {0: 91}[which]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 420_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x1 | 0x4 | 0x20


def test_the_driver_tells_clock_temperature_power_and_what_holds_it_back(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    told = make_state_reader(PLACE, tmp_path)()
    assert told == GpuState(1005.0, 91.0, 420.4, 700.0, ("its power limit", "its temperature"))


@pytest.mark.parametrize(
    ("refuse", "left_out"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_mhz": None}),
        ("nvmlDeviceGetTemperature", {"celsius": None}),
        ("nvmlDeviceGetPowerUsage", {"watts": None}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"limit_watts": None}),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", {"held_back": ()}),
    ],
)
def test_what_the_driver_refuses_is_left_out(monkeypatch, tmp_path, refuse, left_out):
    driver = Driver()

    def fail(*asked):
        raise Driver.NVMLError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", driver)
    whole = make_state_reader(PLACE, tmp_path)()
    setattr(driver, refuse, fail)
    assert vars(make_state_reader(PLACE, tmp_path)()) == vars(whole) | left_out


@pytest.mark.parametrize("module", [None, Driver()])
def test_the_kernel_tells_of_a_gpu_that_the_driver_does_not_know(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    folder = tmp_path / "bus" / "pci" / "devices" / "0000:c1:00.0" / "hwmon" / "hwmon4"
    folder.mkdir(parents=True)
    read = make_state_reader("0000:c1:00.0", tmp_path)
    assert read() == GpuState()
    numbers = {"freq1_input": 1_700_000_000, "temp1_input": 54_000, "power1_average": 480_000_000}
    for name, number in {**numbers, "power1_cap": 560_000_000}.items():
        (folder / name).write_text(f"{number}\n")
    assert read() == GpuState(1700.0, 54.0, 480.0, 560.0)
    assert make_state_reader("0000:c6:00.0", tmp_path)() is None
    assert make_state_reader("", tmp_path)() is None


def test_without_a_driver_there_is_none(monkeypatch):
    def fail():
        raise Driver.NVMLError("Driver Not Loaded")

    driver = Driver()
    monkeypatch.setattr(driver, "nvmlInit", fail)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert open_nvml() is None
    assert make_state_reader(PLACE)() is None


def test_the_stand_in_has_the_names_of_the_real_package():
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert [
        name for name in vars(Driver) if "vml" in name.lower() and not hasattr(real, name)
    ] == []
    assert (real.NVML_CLOCK_SM, real.NVML_TEMPERATURE_GPU) == (1, 0)
