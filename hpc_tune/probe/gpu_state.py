"""The state of a GPU: clock, temperature, power, what throttles its clock; energy counters.

Read from NVIDIA's driver (through nvidia-ml-py, if installed), else from the kernel's hwmon, which
AMD's driver fills. Values that are not available are None.
"""

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_tune.errors import first_line
from hpc_tune.world.affinity import SYS

# nvmlClocksEventReasons; idle (1) is not counted as a reason.
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
# hwmon's files and the divisors of their numbers. Only one of the two power files exists.
_HWMON_FILES = (
    ("sm_mhz", "freq1_input", 1e6),
    ("celsius", "temp1_input", 1e3),
    ("watts", "power1_average", 1e6),
    ("watts", "power1_input", 1e6),
    ("limit_watts", "power1_cap", 1e6),
)


@dataclass(frozen=True)
class GpuState:
    """One reading: the clock of the multiprocessors, temperature, power and its limit.

    ``held_back``: what keeps the clock below its maximum, according to the driver.
    """

    sm_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    held_back: tuple[str, ...] = ()


def open_nvml() -> Any:
    """Return NVIDIA's library, initialized; None if it or the driver is missing."""
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
    """Return a function that reads the state of the GPU at a PCI address, or returns None.

    ``folder`` is where the kernel shows its devices.
    """
    nvml = open_nvml() if address else None
    if nvml is not None:
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
        except nvml.NVMLError:  # a slice of a GPU, or a virtual one
            pass
        else:
            return lambda: _read_nvml_state(nvml, handle)
    files = sorted(folder.glob(f"bus/pci/devices/{address}/hwmon/hwmon*")) if address else []
    return lambda: GpuState(**dict(_read_hwmon(files[0]))) if files else None


def _read_nvml_state(nvml: Any, handle: Any) -> GpuState:
    def query(getter: Callable[..., Any], *arguments: Any, unit: float = 1.0) -> float | None:
        try:
            return float(getter(handle, *arguments)) / unit
        except nvml.NVMLError:
            return None

    reasons = int(query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0)
    return GpuState(
        sm_mhz=query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        celsius=query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        watts=query(nvml.nvmlDeviceGetPowerUsage, unit=1e3),
        limit_watts=query(nvml.nvmlDeviceGetEnforcedPowerLimit, unit=1e3),
        held_back=tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit),
    )


def _read_hwmon(folder: Path) -> Iterator[tuple[str, Any]]:
    for name, file, unit in _HWMON_FILES:
        try:
            yield name, int((folder / file).read_text()) / unit
        except (OSError, ValueError):
            continue


# -- AMD's library for its GPUs (amdsmi, a part of ROCm), if it can be imported.
#
#     energy_accumulator x counter_resolution = microjoules since the driver was loaded
#
# On a card with two dies, such as an MI250X, the first die's counter covers both and the second's
# stands still. Source: https://rocm.docs.amd.com/projects/amdsmi/en/latest/reference/.


def open_amd_smi(folder: Path) -> Any:
    """Return the library, initialized; None if it or AMD's driver is missing.

    ``folder`` is where the kernel shows its devices.
    """
    if not (folder / "class" / "kfd").is_dir():
        return None
    try:
        # If it does not find its own shared library, it prints that and then fails in various ways.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except (ImportError, OSError, KeyError, AttributeError):
        return None
    try:
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except amdsmi.AmdSmiException:
        return None
    return amdsmi


def make_energy_reader(amdsmi: Any, address: str) -> Callable[[], float]:
    """Return a function that reads the energy counter, in joules, of the GPU at this PCI address.

    Raises:
        AmdSmiException: if that GPU has no counter.
    """
    handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address)

    def joules() -> float:
        fields = amdsmi.amdsmi_get_energy_count(handle)
        # ROCm 6.3 and older name this field "power".
        count = fields["energy_accumulator"] if "energy_accumulator" in fields else fields["power"]
        return float(count) * float(fields["counter_resolution"]) / 1e6

    joules()
    return joules


# -- The energy counters of a node, and what they count between two readings.
#
# GPUs: NVIDIA's driver (nvidia-ml-py, if installed) or AMD's library (amdsmi), else the kernel's
# hwmon. CPUs and their memory: the kernel's RAPL, which only root may read at many sites. The whole
# node: HPE Cray's pm_counters. Nothing is estimated: without a counter the energy is unknown, and
# the reason is given.


GPUS, CPUS, MEMORY, NODE = "GPUs", "CPUs", "memory", "node"
# RAPL's counters wrap around after some minutes of full load (65 kJ on AMD, 262 kJ on Intel).
COUNTER_READ_INTERVAL_S = 30.0
# More than a package draws: a larger difference of two readings is not trusted.
MAX_PACKAGE_WATTS = 1000.0
_NO_RAPL_REASON = "the kernel shows no RAPL counter there"
_NO_GPU_COUNTER_REASON = (
    "neither its maker's driver nor the kernel's hwmon has an energy counter for it"
)
_BACKWARDS_COUNTER_REASON = "its counter went backwards"
_MISSED_WRAP_REASON = "its counter may have wrapped around unnoticed"
_STALLED_COUNTER_REASON = "its counter stood still"


@dataclass(frozen=True)
class EnergyCounter:
    """One counter. ``read`` returns joules since some start; if it is missing, ``reason`` says why.

    ``wrap_j``: where it wraps around to 0; None if it does not.
    """

    part: str
    name: str
    read: Callable[[], float] | None = None
    wrap_j: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class PartEnergy:
    """Energy of one part of a node, from ``num_counted`` of its ``total`` counters.

    ``reason``: why the first of the other counters is missing.
    """

    joules: float = 0.0
    num_counted: int = 0
    total: int = 0
    reason: str = ""


def joules_between(counter: EnergyCounter, before_j: float, now_j: float, gap_s: float) -> float:
    """Return the joules between two readings that are ``gap_s`` apart (pure).

    Raises:
        ValueError: if it is unknown: the counter was reset, or may have wrapped around unnoticed.
    """
    spent_j = now_j - before_j
    if counter.wrap_j is None:
        if spent_j < 0:
            raise ValueError(_BACKWARDS_COUNTER_REASON)
        return spent_j
    if gap_s * MAX_PACKAGE_WATTS > counter.wrap_j:
        raise ValueError(_MISSED_WRAP_REASON)
    if spent_j < 0:
        spent_j += counter.wrap_j
    if not 0 <= spent_j <= MAX_PACKAGE_WATTS * (gap_s + 1.0):
        raise ValueError(_BACKWARDS_COUNTER_REASON)
    return spent_j


@dataclass
class _CounterTotal:
    """A counter's newest reading and total up to then; ``reason``: the reason if it is unknown."""

    counter: EnergyCounter
    reason: str = ""
    joules: float = 0.0
    newest_j: float | None = None
    newest_s: float = 0.0

    def read(self, now_s: float) -> None:
        if self.reason or self.counter.read is None:
            self.reason = self.reason or self.counter.reason
            return
        try:
            now_j = self.counter.read()
            if self.newest_j is not None:
                gap_s = now_s - self.newest_s
                self.joules += joules_between(self.counter, self.newest_j, now_j, gap_s)
            self.newest_j, self.newest_s = now_j, now_s
        except OSError as error:
            self.reason = error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 - NVMLError is no OSError; its module is optional
            self.reason = first_line(error)


@dataclass
class EnergyMeter:
    """Adds up what the counters of this node count from the creation of the meter on.

    If one of them may wrap around within minutes, a thread reads all of them regularly.
    """

    counters: Sequence[EnergyCounter]
    clock: Callable[[], float] = time.monotonic
    _counter_totals: list[_CounterTotal] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end_event: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._counter_totals = [_CounterTotal(counter) for counter in self.counters]
        self.read()
        if any(t.counter.wrap_j is not None and not t.reason for t in self._counter_totals):
            threading.Thread(target=self._keep_reading, name="energy", daemon=True).start()

    def read(self) -> None:
        """Read all counters."""
        with self._lock:
            for total in self._counter_totals:
                total.read(self.clock())

    def end(self) -> dict[str, PartEnergy]:
        """Read a last time and return the energy of each part of the node."""
        self._end_event.set()
        self.read()
        with self._lock:
            for total in self._counter_totals:
                if not total.reason and total.joules == 0:
                    total.reason = _STALLED_COUNTER_REASON
        parts = dict.fromkeys(total.counter.part for total in self._counter_totals)
        return {part: self._part_energy(part) for part in parts}

    def _part_energy(self, part: str) -> PartEnergy:
        totals = [total for total in self._counter_totals if total.counter.part == part]
        joules = [total.joules for total in totals if not total.reason]
        reason = next(
            (f"{total.counter.name}: {total.reason}" for total in totals if total.reason), ""
        )
        return PartEnergy(sum(joules), len(joules), len(totals), reason)

    def _keep_reading(self) -> None:
        while not self._end_event.wait(COUNTER_READ_INTERVAL_S):
            self.read()


def find_energy_counters(gpus: Sequence[str], folder: Path = SYS) -> list[EnergyCounter]:
    """Return the counters of this node and of ``gpus``, given by their PCI addresses.

    ``folder`` is where the kernel shows its devices.
    """
    nvml, amdsmi = (open_nvml(), open_amd_smi(folder)) if gpus else (None, None)
    counters = [_gpu_counter(nvml, amdsmi, address, folder) for address in gpus]
    powercap = folder / "class" / "powercap"
    counters += list(_rapl_counters(powercap)) or [
        EnergyCounter(CPUS, str(powercap), reason=_NO_RAPL_REASON)
    ]
    node = folder / "cray" / "pm_counters" / "energy"
    if node.exists():  # its lines: 123 J 1700000000000000 us
        counters.append(EnergyCounter(NODE, str(node), lambda: float(node.read_text().split()[0])))
    return counters


def _gpu_counter(nvml: Any, amdsmi: Any, address: str, folder: Path) -> EnergyCounter:
    """Return the counter of one GPU: of the whole GPU, even if a rank has only a slice of it."""
    reason, name = _NO_GPU_COUNTER_REASON, f"GPU {address or 'without a PCI address'}"
    if nvml is not None and address:
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            reason = f"NVIDIA's driver says {error}"
        else:

            def read_driver_joules() -> float:
                return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

            return EnergyCounter(GPUS, name, read_driver_joules)
    if amdsmi is not None and address:
        try:
            return EnergyCounter(GPUS, name, make_energy_reader(amdsmi, address))
        except amdsmi.AmdSmiException as error:
            reason = f"AMD's library says {first_line(error)}"
    device = folder / "bus" / "pci" / "devices" / address
    for file in sorted(device.glob("hwmon/hwmon*/energy1_input")) if address else ():
        return EnergyCounter(GPUS, name, _make_microjoule_reader(file))
    return EnergyCounter(GPUS, name, reason=reason)


def _rapl_counters(folder: Path) -> Iterator[EnergyCounter]:
    """Yield the counters of CPU packages and their memory; other zones are parts of these."""
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            kind = (zone / "name").read_text().strip()
            part = CPUS if kind.startswith("package") else MEMORY if kind == "dram" else None
            if part is None:
                continue
            wrap_j = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError) as error:
            yield EnergyCounter(
                CPUS, str(zone), reason=getattr(error, "strerror", None) or str(error)
            )
            continue
        file = zone / "energy_uj"
        yield EnergyCounter(part, str(file), _make_microjoule_reader(file), wrap_j)


def _make_microjoule_reader(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text()) / 1e6
