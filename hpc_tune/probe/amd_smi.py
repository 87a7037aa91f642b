"""AMD's library for its GPUs (amdsmi, which ROCm brings), where it can be imported.

    energy_accumulator x counter_resolution = microjoules since the driver was loaded

Of a card with two dies, such as an MI250X, the counter of the first is for both and that of the
second stands still. Source: https://rocm.docs.amd.com/projects/amdsmi/en/latest/reference/.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_amd_smi(folder: Path) -> Any:
    """Return the library, ready to be asked; None where it or AMD's driver is not there.

    ``folder`` is where the kernel shows its devices.
    """
    if not (folder / "class" / "kfd").is_dir():
        return None
    try:
        # It prints that it cannot find its own library, and then fails by what it lacks.
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
    """Return what reads the joules of the GPU with this PCI address.

    Raises:
        AmdSmiException: if that GPU has no counter.
    """
    handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address)

    def joules() -> float:
        told = amdsmi.amdsmi_get_energy_count(handle)
        # ROCm 6.3 and older call it power.
        count = told["energy_accumulator"] if "energy_accumulator" in told else told["power"]
        return float(count) * float(told["counter_resolution"]) / 1e6

    joules()
    return joules
