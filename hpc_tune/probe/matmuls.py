"""Measure how fast each rank multiplies matrices while all others do, and check the results.

    allocate, warm up -> all ranks begin together -> batches of matmuls until the time is over,
    each followed by a matmul whose exact result is known -> MatmulResult, of one rank

All GPUs of a node are busy at once, which reveals limits of power and cooling. The timed matrices
are random, since GPUs draw less power for regular values. There are two checks: each element of the
exact matmul is a small integer, in any order of summation; and, where the library promises it, the
same matmul has the same bits each time. On CPUs each rank multiplies with one thread: threads that
share cores wait for each other, so their times mean nothing.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hpc_tune.errors import first_line
from hpc_tune.probe.gpu_state import GpuState, make_state_reader
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import find_architecture, pci_address
from hpc_tune.world.liveness import time_limit

if TYPE_CHECKING:
    import torch

    Multiply = Callable[..., Any]  # torch.mm
    Mark = float | torch.cuda.Event


GPU_TEST_S, CPU_TEST_S = 2.0, 0.5
# On a GPU in bf16: 4 matrices of 128 MiB, and 1.5 ms per matmul on an H100.
_GPU_MATRIX_SIZE, _CPU_MATRIX_SIZE = 8192, 768
_GPU_EXACT_MATRIX_SIZE, _CPU_EXACT_MATRIX_SIZE = 2048, 256
_BATCH_S, _MAX_BATCH_MATMULS = 0.05, 200
_NUM_WARM_UPS = 3
_EXACT_DOT_PRODUCT = 5  # of s.t in ``exact_matrices``


@dataclass(frozen=True)
class MatmulResult:
    """The matmuls of one rank: square matrices of ``size`` in ``dtype``.

    ``flops_per_s``: from ``median_s``, the median time of the second half of all matmuls.
    ``slowest_s``: the time of the slowest. Of ``num_checked`` exact matmuls ``num_wrong`` had a
    wrong value; ``num_differing`` times the timed matmul had other bits than the first. ``model``:
    of the processor. ``idle`` and ``loaded``: the GPU before, and at the end while it was still
    multiplying. ``error``: why it could not multiply.
    """

    model: str = ""
    dtype: str = ""
    size: int = 0
    flops_per_s: float = 0.0
    median_s: float = 0.0
    slowest_s: float = 0.0
    num_checked: int = 0
    num_wrong: int = 0
    num_differing: int = 0
    idle: GpuState | None = None
    loaded: GpuState | None = None
    error: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a result was wrong."""
        return self.num_wrong + self.num_differing > 0


def measure_matmuls(
    comm: Comm, seconds: float | None = None, multiply: "Multiply | None" = None
) -> MatmulResult | None:
    """Multiply for about ``seconds`` on all ranks at once; return None if they are 0. Collective.

    The default of ``seconds`` is GPU_TEST_S on GPUs and CPU_TEST_S on CPUs.
    """
    if seconds == 0:
        return None
    uses_gpu = comm.device.type == "cuda"
    seconds = seconds or (GPU_TEST_S if uses_gpu else CPU_TEST_S)
    read_state, model = (
        _gpu_state_reader_and_model(comm.device) if uses_gpu else (lambda: None, _cpu_model())
    )
    result, work = MatmulResult(model=model), None
    rank_label = comm.world.label
    limits = (liveness.START_LIMIT_S, f"the {comm.device.type} does not answer", rank_label)
    # A CUDA error, such as too little memory, is a finding; the other ranks continue.
    with _limit_cpu_to_one_thread(uses_gpu), time_limit("a matrix multiplication", *limits):
        try:
            work = MatmulBenchmark(comm.device, multiply)
            work.warm_up()
        except RuntimeError as error:
            result = replace(result, error=first_line(error))
    comm.barrier("all ranks to multiply matrices", liveness.START_LIMIT_S)
    if work is None or result.error:
        return result
    with _limit_cpu_to_one_thread(uses_gpu), time_limit("matrix multiplications", *limits):
        try:
            return replace(time_matmuls(work, seconds, read_state), model=model)
        except RuntimeError as error:
            return replace(result, error=first_line(error))


@contextlib.contextmanager
def _limit_cpu_to_one_thread(uses_gpu: bool) -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(threads if uses_gpu else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class MatmulBenchmark:
    """The matrices of a device, batches of matmuls on it, and how many were wrong."""

    def __init__(self, device: "torch.device", multiply: "Multiply | None" = None) -> None:
        """Allocate the matrices; ``multiply`` replaces ``torch.mm``."""
        import torch

        self.multiply = multiply or torch.mm
        self.device, self.uses_gpu = device, device.type == "cuda"
        self.dtype, is_deterministic = _dtype_and_determinism(device)
        self.size = _GPU_MATRIX_SIZE if self.uses_gpu else _CPU_MATRIX_SIZE
        options: dict[str, Any] = {"dtype": self.dtype, "device": device}
        self._left, self._right = (torch.randn(self.size, self.size, **options) for _ in range(2))
        self._out = torch.empty_like(self._left)
        self._first_out = torch.empty_like(self._left) if is_deterministic else None
        self._exact_matrices = exact_matrices(
            _GPU_EXACT_MATRIX_SIZE if self.uses_gpu else _CPU_EXACT_MATRIX_SIZE, **options
        )
        self._exact_out = torch.empty_like(self._exact_matrices[-1])
        self._wrong_counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._matmuls_per_batch = 1

    def warm_up(self) -> None:
        """Load the kernels, keep the first result, and choose the number of matmuls of a batch."""
        self._compare_output()
        marks = [self._record_event()]
        for _ in range(_NUM_WARM_UPS):
            self.multiply(self._left, self._right, out=self._out)
            marks.append(self._record_event())
        self.wait(marks[-1])
        if self._first_out is not None:
            self._first_out.copy_(self._out)
        one_s = max(self.measure_seconds(marks)[-1], 1e-6)
        self._matmuls_per_batch = max(1, min(_MAX_BATCH_MATMULS, round(_BATCH_S / one_s)))
        self._wrong_counts.zero_()

    def start_batch(self) -> "list[Mark]":
        """Start a batch and the check after it; return the marks before and after each matmul."""
        marks = [self._record_event()]
        for _ in range(self._matmuls_per_batch):
            self.multiply(self._left, self._right, out=self._out)
            marks.append(self._record_event())
        self._compare_output()
        return marks

    def wait(self, timestamp: "Mark") -> None:
        """Wait until the device has reached ``timestamp``."""
        if not isinstance(timestamp, float):
            timestamp.synchronize()

    def measure_seconds(self, timestamps: "Sequence[Mark]") -> list[float]:
        """Return the seconds of each matmul of a finished batch."""
        return [_seconds_between(*p) for p in zip(timestamps[:-1], timestamps[1:], strict=True)]

    def count_wrong_results(self) -> tuple[int, int]:
        """Return how many exact matmuls were wrong, and how many repeated ones differed."""
        num_wrong, num_differing = self._wrong_counts.tolist()
        return num_wrong, num_differing

    def _compare_output(self) -> None:
        """Compare results; the counts stay on the device, so that the host does not wait here."""
        left, right, expected = self._exact_matrices
        self.multiply(left, right, out=self._exact_out)
        self._wrong_counts[0] += (self._exact_out != expected).any()
        if self._first_out is not None:
            self._wrong_counts[1] += (self._out != self._first_out).any()

    def _record_event(self) -> "Mark":
        if not self.uses_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_matmuls(
    work: MatmulBenchmark, seconds: float, read_state: Callable[[], GpuState | None]
) -> MatmulResult:
    """Multiply for about ``seconds``, with one batch queued behind the one that is waited for."""
    idle_state = read_state()
    until_s = time.monotonic() + seconds
    batches = [work.start_batch(), work.start_batch()]
    while time.monotonic() < until_s:
        work.wait(batches[-2][-1])
        batches.append(work.start_batch())
    work.wait(batches[-2][-1])
    loaded_state = read_state()
    work.wait(batches[-1][-1])
    times_s = [one_s for marks in batches for one_s in work.measure_seconds(marks)]
    num_wrong, num_differing = work.count_wrong_results()
    median_s = median(times_s[len(times_s) // 2 :])
    return MatmulResult(
        dtype=_dtype_name(work.dtype),
        size=work.size,
        flops_per_s=2 * work.size**3 / median_s,
        median_s=median_s,
        slowest_s=max(times_s),
        num_checked=len(batches),
        num_wrong=num_wrong,
        num_differing=num_differing,
        idle=idle_state,
        loaded=loaded_state,
    )


def exact_matrices(
    size: int, dtype: "torch.dtype", device: "torch.device"
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Return two matrices and their product, all of integers that every dtype holds exactly.

    ``size`` is a multiple of 64. The matrices have rank one, u s' and t v': each element of the
    product is u_i v_j (s.t). Terms of s.t that are 32 apart cancel, except for one pair, so that
    partial sums are small too, in any order of summation.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def random_integers(maximum: int, num: int) -> "torch.Tensor":
        magnitudes = torch.randint(1, maximum + 1, (num,), generator=generator)
        return magnitudes * (2 * torch.randint(0, 2, (num,), generator=generator) - 1)

    s, t = (random_integers(15, size // 2).view(-1, 1, 32) for _ in range(2))
    s, t = torch.cat([s, s], 1).flatten(), torch.cat([t, -t], 1).flatten()
    s[31], s[63], t[31], t[63] = 1, 1, 2, _EXACT_DOT_PRODUCT - 2
    u, v = random_integers(3, size), random_integers(3, size)
    matrices = (torch.outer(u, s), torch.outer(t, v), _EXACT_DOT_PRODUCT * torch.outer(u, v))
    left, right, product = (matrix.to(device=device, dtype=dtype) for matrix in matrices)
    return left, right, product


def format_flops(flops_per_s: float) -> str:
    """Format a rate, such as ``"712 TFLOP/s"``."""
    unit, size = ("TFLOP/s", 1e12) if flops_per_s >= 1e12 else ("GFLOP/s", 1e9)
    value = flops_per_s / size
    return f"{value:.{0 if value >= 100 else 1}f} {unit}"


def describe_gpu_state(result: MatmulResult) -> str:
    """Describe the GPU's state while it multiplied: clock, temperature, power."""
    loaded, idle = result.loaded, result.idle
    if loaded is None:
        return ""
    parts = []
    if loaded.sm_mhz is not None:
        idle_text = f"{idle.sm_mhz:.0f} -> " if idle and idle.sm_mhz is not None else ""
        parts.append(f"SM clock {idle_text}{loaded.sm_mhz:.0f} MHz")
    if loaded.celsius is not None:
        idle_text = f"{idle.celsius:.0f} -> " if idle and idle.celsius is not None else ""
        parts.append(f"{idle_text}{loaded.celsius:.0f} C")
    if loaded.watts is not None:
        limit_text = f" of {loaded.limit_watts:.0f}" if loaded.limit_watts is not None else ""
        parts.append(f"{loaded.watts:.0f}{limit_text} W")
    if loaded.held_back:
        parts.append(f"held back by {' and '.join(loaded.held_back)}")
    return ", ".join(parts)


def _seconds_between(begin: "Mark", end: "Mark") -> float:
    if isinstance(begin, float):
        assert isinstance(end, float), "marks of two devices"
        return end - begin
    assert not isinstance(end, float), "marks of two devices"
    return begin.elapsed_time(end) / 1e3


def _dtype_and_determinism(device: "torch.device") -> "tuple[torch.dtype, bool]":
    """Return the dtype that a device computes in, and whether its matmuls are deterministic."""
    import torch

    architecture = find_architecture(device)
    if architecture is None:
        return torch.float32, False
    if architecture.has_bf16:
        return torch.bfloat16, architecture.has_deterministic_matmul
    dtype = torch.float16 if architecture.has_fp16 else torch.float32
    return dtype, architecture.has_deterministic_matmul


def _dtype_name(dtype: "torch.dtype") -> str:
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."), "fp32")


def _gpu_state_reader_and_model(
    device: "torch.device",
) -> tuple[Callable[[], GpuState | None], str]:
    import torch

    gpu: Any = torch.cuda.get_device_properties(device)
    return make_state_reader(pci_address(gpu)), gpu.name


def _cpu_model() -> str:
    """Return the kernel's name of the CPU; "" on architectures without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((ln.partition(": ")[2] for ln in lines if ln.startswith("model name")), "")
