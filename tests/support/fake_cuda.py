"""A fake CUDA device: its tensors hold no values, and whatever would wait for it is recorded.

torch's FakeTensorMode tracks shapes, dtypes and devices of tensors, and refuses what mixes devices
or depends on values. ``fake_cuda.cpp`` adds what autograd needs of CUDA; it must be loaded before
torch is imported. Streams, events and pinned memory have stand-ins here.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NATIVE = Path(__file__).with_suffix(".cpp")
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "fake_cuda"
NOTES = ("waits", "races", "unrecorded", "late", "copies")


def load_native() -> None:
    """Load the library that answers for CUDA in torch's C++; torch must not be imported yet."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_dir = Path(spec.origin).parent
    library = _compiled(torch_dir)
    ctypes.CDLL(str(torch_dir / "lib" / "libtorch_cpu.so"))
    ctypes.CDLL(str(library))


def _compiled(torch_dir: Path) -> Path:
    """Return the library; it is compiled once for each source, torch version and command."""
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_dir / 'include'}"]
    command += [str(NATIVE), f"-L{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu"]
    key = hashlib.sha256(NATIVE.read_bytes())
    key.update(repr([importlib.metadata.version("torch"), command]).encode())
    library = CACHE / f"{key.hexdigest()[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")  # another process may compile it too
        subprocess.run([*command, "-o", str(own)], check=True)
        own.replace(library)
    return library


@contextlib.contextmanager
def fake_cuda() -> Iterator[Any]:
    """Provide ``torch.device("cuda")`` within a block; yield the ``Watch``."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    class Watch(TorchDispatchMode):
        """Records where the host waits for the device, and what is used before it is ready.

        ``waits`` are the places in hpc_tune; ``races`` the places that use what another stream
        writes without waiting for it; ``copies`` the bytes copied to the device by dtype; ``late``
        the copies of batches that the computing stream makes itself; and ``unrecorded`` the uses of
        a batch's tensors that were not announced by ``record_stream``.
        """

        def __init__(self) -> None:
            super().__init__()
            self.stream = self.default = Stream(self)
            self.waits: list[str] = []
            self.races: list[str] = []
            self.unrecorded: list[str] = []
            self.late: list[str] = []
            self.copies: Counter[str] = Counter()
            self.now = self.waited_at = 0  # the number of an operation
            self.told = lambda *_: None  # called at each wait: what, who, for whom
            self.pinned = _HostAllocator()
            self._pinned = _Storages()
            self._of_streams = _Storages()
            self._recorded = _Storages()

        def begin(self) -> None:
            """Forget what was noted."""
            for name in NOTES:
                getattr(self, name).clear()

        def wait(self, what: str) -> None:
            """Record that the host waits until the device has done all its work."""
            self.waits.append(f"{what} in {_place()}")
            self.told("host", what, 0)
            self.waited_at = self.now

        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return self._pinned.get(tensor) is not None

        def _pin(self, tensor: torch.Tensor) -> None:
            if not self.is_pinned(tensor):
                self._pinned.add(tensor, True)
                self.pinned.allocate(tensor)

        def record(self, tensor: torch.Tensor, stream: Any) -> None:
            self._recorded.add(tensor, stream)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # called again with the local tensors
            kwargs, self.now = dict(kwargs or {}), self.now + 1
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self._check_uses(tensors)
            if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
                if args[0].is_cuda:
                    self.wait("a value is read")
                return 1
            if func is aten.is_pinned.default:
                return self.is_pinned(args[0])
            pins = kwargs.pop("pin_memory", False)
            if func is aten._pin_memory.default:
                out, pins = aten.empty_like.default(args[0]), True
                out.constant = None  # the fake device keeps no values, not even a scalar
            else:
                out = func(*args, **kwargs)
            if pins:
                self._pin(out)
            if func is aten._to_copy.default:
                self._check_copy(args[0], out, kwargs.get("non_blocking", False), True)
            elif func is aten.copy_.default:
                blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                self._check_copy(args[1], args[0], not blocks, False)
            if self.stream is not self.default:
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                        self._of_streams.add(leaf, (self.stream, self.now, _place()))
            return out

        def _check_copy(
            self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool, pins_target: bool
        ) -> None:
            kinds = source.device.type, target.device.type
            if kinds == ("cpu", "cuda"):
                self.copies[str(source.dtype)] += source.nbytes
                if self.stream is self.default and (place := _place()).startswith("batch.py"):
                    self.late.append(place)
                if not (non_blocking and self.is_pinned(source)):
                    self.wait("pageable or blocking memory is copied to the device")
            if kinds == ("cuda", "cpu"):
                if non_blocking and pins_target:
                    self._pin(target)  # as torch does
                elif not (non_blocking and self.is_pinned(target)):
                    self.wait("a tensor is copied to the host")

        def _check_uses(self, tensors: list[torch.Tensor]) -> None:
            for tensor in tensors:
                if tensor.device.type != "cuda" or self.stream is not self.default:
                    continue
                if (written := self._of_streams.get(tensor)) is None:
                    continue
                stream, number, place = written
                if self.default.seen.get(stream, -1) < number:
                    self.races.append(f"{place} is used in {_place()}")
                if place.startswith("batch.py") and self._recorded.get(tensor) is not self.default:
                    self.unrecorded.append(_place())

    class Stream:
        def __init__(self, watch: Any, *_: Any, **__: Any) -> None:
            self._watch = watch
            self.seen: dict[Any, int] = {}

        def wait_stream(self, other: Any) -> None:
            self._watch.told("wait", self, other)
            self.seen[other] = self._watch.now

        def wait_event(self, event: Any) -> None:
            self._watch.told("wait event", self, event)
            self.seen[event.stream] = max(self.seen.get(event.stream, -1), event.at)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            self._watch.wait("a stream is waited for")

        def is_capturing(self) -> bool:
            return False

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = -1
            self.stream: Any = None

        def record(self, stream: Any = None) -> Any:
            self.at, self.stream = watch.now, stream or watch.stream
            watch.told("record", self, self.stream)
            return self

        def wait(self, stream: Any = None) -> None:
            (stream or watch.stream).wait_event(self)

        def synchronize(self) -> None:
            watch.wait("an event is waited for")

        def elapsed_time(self, later: Any) -> float:
            if later.at > watch.waited_at:
                raise RuntimeError("CUDA error: device not ready")  # cudaErrorNotReady
            return 0.0

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, watch.stream = watch.stream, stream or watch.stream
        try:
            yield
        finally:
            watch.stream = before

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            watch.wait("values are read")
        return [1] * tensor.numel()

    def made(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        out = real_tensor(*args, **options)
        if device is None or torch.device(device).type == "cpu":
            return out
        return out.to(device)  # as torch does with Python values

    watch = Watch()
    real_tensor = torch.tensor
    nothing = lambda *_, **__: None  # noqa: E731
    changes = [
        *((torch.cuda, name, lambda *_: True) for name in ("is_available", "is_initialized")),
        *((torch.cuda, name, lambda *_: 0) for name in ("current_device", "memory_allocated")),
        (torch.cuda, "is_current_stream_capturing", lambda *_: False),
        (torch.cuda, "is_bf16_supported", lambda **_: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        *((torch.cuda, name, nothing) for name in ("_lazy_init", "manual_seed_all", "set_device")),
        (torch.cuda, "synchronize", lambda *_: watch.wait("the device is waited for")),
        # The state of the generator, which is on the host.
        (torch.cuda, "get_rng_state", lambda *_: real_tensor([0], dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", nothing),
        (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "Stream", lambda *_, **__: Stream(watch)),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "current_stream", lambda *_: watch.stream),
        (torch.accelerator, "current_stream", lambda *_: watch.stream),
        (FakeTensor, "tolist", tolist),
        (torch.Tensor, "record_stream", lambda tensor, stream: watch.record(tensor, stream)),
        (torch, "tensor", made),
        (torch._C, "_host_emptyCache", watch.pinned.empty_cache),
    ]
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in changes]
    for owner, name, changed in changes:
        setattr(owner, name, changed)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            yield watch
    finally:
        for owner, name, old in before:
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class _HostAllocator:
    """torch's pinned memory: each request gets a power-of-two block, which is cached when freed."""

    def __init__(self) -> None:
        self.num_bytes = self.num_made = 0
        self._free: Counter[int] = Counter()  # blocks by bytes

    def allocate(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        size = 1
        while size < storage.nbytes():
            size *= 2
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.num_bytes, self.num_made = self.num_bytes + size, self.num_made + 1
        weakref.finalize(storage, self._free.update, {size: 1})

    def empty_cache(self) -> None:
        self.num_bytes -= sum(size * num for size, num in self._free.items())
        self._free.clear()


class _Storages:
    """What is known about the storages of tensors, for as long as they exist."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def add(self, tensor: Any, value: Any) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            weakref.finalize(storage, self._known.pop, id(storage), None)
        self._known[id(storage)] = value

    def get(self, tensor: Any) -> Any:
        return self._known.get(id(tensor.untyped_storage()))


def _place() -> str:
    """Return the innermost running function of hpc_tune, or of torch if none called it."""
    frame: FrameType | None = sys._getframe(2)
    first = ""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if (house := next((p for p in file.parents if p.name == "hpc_tune"), None)) is not None:
            return f"{file.relative_to(house)} {frame.f_code.co_name}"
        if not first and file.parent.name not in ("support", "_dynamo"):
            first = f"{file.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return first
