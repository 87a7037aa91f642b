"""One training step of a configuration on a world that is not there, and the bytes it takes.

    shape -> meta model -> the real engine over a fake process group, all tensors fake
          -> one train_step -> what was alive at the worst moment

No weight is read and no number is computed: a 70B model on 16 ranks needs two cores and under 1 GB.
Tensors pretend to be on a CPU, because FSDP2 wants streams of a device that exists; attention and
loss thus take their CPU kernels, whose saved tensors have the sizes of the fused GPU ones. Bytes
are those asked for: an allocator's rounding and fragmentation come on top.

The fake process group is the process's default group, so this needs an interpreter of its own:

    python -m hpc_tune.plan.trace configs/llama3_70b_lora.yaml --world 16 model.path=shape:llama3-70b
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hpc_tune.batch import Batch
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.native import NativeEngine
from hpc_tune.errors import HpcTuneError
from hpc_tune.model.build import BuiltModel, build
from hpc_tune.model.shapes import shape_directory
from hpc_tune.plan.account import measure
from hpc_tune.plan.choose import choose_layout

DEVICE = torch.device("cpu")
DEVICE_BYTES = 80 << 30  # of the ranks, where the layout is left to choose
QUICK_LAYERS = (2, 4)


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """Bytes on the rank that needs most, in one training step.

    ``activation_bytes`` is what the worst moment has above the other four: saved and recomputed
    activations, gathered weights, logits, temporary values. ``peak_bytes`` is the sum of the five.
    ``trace_s`` is how long tracing took.
    """

    layout: str
    world_size: int
    rank: int
    num_layers: int
    weight_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    trace_s: float


def trace_step(
    config: RunConfig,
    world_size: int,
    shape_dir: Path,
    micro_rows: int,
    seq_len: int,
    rank: int = 0,
) -> TraceReport:
    """Trace forward, backward and optimizer of one step as ``rank`` of ``world_size`` ranks.

    ``shape_dir`` holds a config.json; its weights, if there are any, are not looked at. Each
    micro-batch has ``micro_rows`` rows of ``seq_len`` tokens, packed if data.packing says so, and
    every token carries loss: the most that a batch can ask for.

    Raises:
        ConfigError: if the layout does not fit the world or the model.
        DataError: if config.json is none of a causal LM.
    """
    began_s = time.perf_counter()
    dtype = torch.float32 if config.model.dtype == "fp32" else torch.bfloat16
    built = build(shape_dir, dtype, config.tune, config.train.seed, weights=False)
    layout, _ = choose_layout(config.parallel, world_size, measure(built.module), DEVICE_BYTES)
    memory = _Memory(config.data.packing)
    with _fake_world(rank, world_size), FakeTensorMode(allow_non_fake_inputs=True), memory.watch():
        engine = NativeEngine(built, layout, DEVICE, config.optim, config.parallel)
        batches = _batches(config, layout, micro_rows, seq_len)
        tokens = sum(b.num_loss_tokens for b in batches) * layout.replicate * layout.shard
        engine.train_step(batches, tokens, config.optim.lr)
    kinds = _bytes_by_kind(built, engine, config.tune.method == "full")
    return TraceReport(
        str(layout),
        world_size,
        rank,
        built.config.num_hidden_layers,
        *kinds,
        activation_bytes=memory.peak_bytes - sum(kinds),
        peak_bytes=memory.peak_bytes,
        trace_s=time.perf_counter() - began_s,
    )


def trace_quickly(
    config: RunConfig,
    world_size: int,
    shape_dir: Path,
    micro_rows: int,
    seq_len: int,
    rank: int = 0,
) -> TraceReport:
    """Trace two and four decoder blocks and extend each figure by a straight line per block.

    It takes seconds whatever the depth. Arguments and errors are those of ``trace_step``.
    """
    began_s = time.perf_counter()
    shape = json.loads((shape_dir / "config.json").read_text(encoding="utf-8"))
    num_layers = shape["num_hidden_layers"]
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for few in QUICK_LAYERS:
            text = json.dumps({**shape, "num_hidden_layers": few})
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            reports.append(trace_step(config, world_size, Path(folder), micro_rows, seq_len, rank))
    low, high = (dataclasses.asdict(report) for report in reports)
    steps = (num_layers - QUICK_LAYERS[0]) / (QUICK_LAYERS[1] - QUICK_LAYERS[0])
    extended = {
        name: round(low[name] + steps * (high[name] - low[name]))
        for name in low
        if name.endswith("_bytes")
    }
    return dataclasses.replace(
        reports[0], **extended, num_layers=num_layers, trace_s=time.perf_counter() - began_s
    )


def _batches(config: RunConfig, layout: Layout, micro_rows: int, seq_len: int) -> list[Batch]:
    """Make the micro-batches that show the worst moment.

    With full fine-tuning a second one finds the first one's unsharded gradients in its way.
    """
    rows = -(-config.batch.global_size // (layout.replicate * layout.shard))
    count = min(2 if config.tune.method == "full" else 1, -(-rows // micro_rows))
    made = []
    for _ in range(count):
        tokens_BT, labels_BT, positions_BT = (
            torch.zeros(micro_rows, seq_len, dtype=torch.int64) for _ in range(3)
        )
        num = micro_rows * seq_len
        made.append(Batch(tokens_BT, labels_BT, positions_BT, num, num, 0))
    return made


def _bytes_by_kind(
    built: BuiltModel, engine: NativeEngine, full: bool
) -> tuple[int, int, int, int]:
    """Return the bytes of weights, adapters, gradients and optimizer state on this rank."""
    held = [p for p in built.module.parameters() if p.device.type != "meta"]
    trained = [p for p in held if p.requires_grad]
    optimizers = [v for v in vars(engine).values() if isinstance(v, torch.optim.Optimizer)]
    moments = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    return (
        _stored_bytes(held if full else [p for p in held if not p.requires_grad]),
        0 if full else _stored_bytes(trained),
        _stored_bytes(p.grad for p in trained if p.grad is not None),
        _stored_bytes(moments),
    )


def _stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the storages on this rank, each once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[id(storage)] = storage
    return sum(storage.nbytes() for storage in storages.values())


@contextlib.contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Make the default process group one whose collectives return at once and move nothing."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 - teaches fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        # A mesh looks its own rank up in a tensor of ranks.
        with (
            _replaced(dist, "init_device_mesh", _with_real_tensors(dist.init_device_mesh)),
            _replaced(DeviceMesh, "__init__", _with_real_tensors(DeviceMesh.__init__)),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Memory(TorchDispatchMode):
    """Adds up the live storages of fake tensors, and answers questions about their values."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._packed = packed
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """See every fake tensor that is made, resized and freed in this context."""
        resize = torch.UntypedStorage.resize_

        # FSDP2 frees and refills gathered weights in this way, which no dispatch sees.
        def tracked(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if id(storage) in self._sizes:
                self._change(id(storage), num_bytes)

        with _replaced(torch.UntypedStorage, "resize_", tracked), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._answer(args[0])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _answer(self, tensor: torch.Tensor) -> Any:
        """The value of a tensor that has none: transformers asks if a row is one document."""
        if tensor.dtype == torch.bool:
            return not self._packed
        return 1.0 if tensor.is_floating_point() else 1

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._change(key, storage.nbytes())

    def _change(self, key: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes - self._sizes[key]
        self._sizes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def main() -> int:
    """Trace a configuration file and print the report as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hpc_tune.plan.trace", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two and four blocks, extended")
    arguments = parser.parse_intermixed_args()
    trace = trace_quickly if arguments.quick else trace_step
    try:
        config = load_config(arguments.config, arguments.overrides)
        report = trace(
            config,
            arguments.world,
            shape_directory(config.model.path),
            1 if config.batch.micro_size == "auto" else config.batch.micro_size,
            config.data.seq_len,
            arguments.rank,
        )
    except HpcTuneError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
