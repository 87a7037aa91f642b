"""What a GPU does at one moment: its clock, temperature and power, and what keeps its clock down.

NVIDIA's driver tells (nvidia-ml-py, where it is installed), else the kernel's hwmon, which AMD's
driver fills. What is not told is None.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.world.numa import SYS

# nvmlClocksEventReasons; that it has nothing to do (1) is no reason.
_THROTTLE_REASONS = {
    0x2: "clocks that were set by hand",
    0x4: "its power limit",
    0x8: "the hardware's slowdown",
    0x10: "the clocks of other GPUs that it keeps step with",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power brake of the node",
    0x100: "clocks of the display",
}
# hwmon's files, and what their numbers are divided by. Of power there is one of two.
_HWMON = (
    ("sm_mhz", "freq1_input", 1e6),
    ("celsius", "temp1_input", 1e3),
    ("watts", "power1_average", 1e6),
    ("watts", "power1_input", 1e6),
    ("limit_watts", "power1_cap", 1e6),
)


@dataclass(frozen=True)
class GpuState:
    """One moment: the clock of its multiprocessors, temperature, and power beside its limit.

    ``held_back``: what keeps the clock below its highest, by the driver.
    """

    sm_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    held_back: tuple[str, ...] = ()


def open_nvml() -> Any:
    """Return NVIDIA's library, ready to be asked; None where there is none."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return None
    return nvml


def make_state_reader(address: str, folder: Path = SYS) -> Callable[[], GpuState | None]:
    """Return what reads the state of the GPU with this PCI address; that is None if nobody tells.

    ``folder`` is where the kernel shows its devices.
    """
    nvml = open_nvml() if address else None
    if nvml is not None:
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
        except nvml.NVMLError:  # a slice of a GPU, or a virtual one
            pass
        else:
            return lambda: _read_driver(nvml, handle)
    files = sorted(folder.glob(f"bus/pci/devices/{address}/hwmon/hwmon*")) if address else []
    return lambda: _read_kernel(files[0]) if files else None


def _read_driver(nvml: Any, handle: Any) -> GpuState:
    def asked(ask: Callable[..., Any], *about: Any, unit: float = 1.0) -> float | None:
        try:
            return float(ask(handle, *about)) / unit
        except nvml.NVMLError:
            return None

    reasons = int(asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0)
    return GpuState(
        sm_mhz=asked(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        celsius=asked(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        watts=asked(nvml.nvmlDeviceGetPowerUsage, unit=1e3),
        limit_watts=asked(nvml.nvmlDeviceGetEnforcedPowerLimit, unit=1e3),
        held_back=tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit),
    )


def _read_kernel(folder: Path) -> GpuState:
    return GpuState(**dict(_read_hwmon(folder)))


def _read_hwmon(folder: Path) -> Iterator[tuple[str, Any]]:
    for name, file, unit in _HWMON:
        try:
            yield name, int((folder / file).read_text()) / unit
        except (OSError, ValueError):
            continue
