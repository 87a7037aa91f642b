"""The kernels of a training step, recorded on fake CUDA tensors without a GPU or any values.

    torch's operations -> Kernel(what it does, flops, bytes read and written, stream), in order
                       -> with waits of streams for each other, and of the host

Each operation except views is one kernel. Its kind follows from the code that called it, and in the
backward pass from the forward operation whose gradient it computes: autograd numbers both.
"""

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

MAX_RANK = 256  # a matmul with a side of at most this length is an adapter's
# The kind of a file's operations; the innermost listed frame decides.
_FILES = {
    "varlen_attention.py": "attention",
    "packed_attention.py": "attention",
    "tiled_attention.py": "attention",
    "loss.py": "loss",
    "objective.py": "loss",
    "lora_linear.py": "adapters",
    "grouped_experts.py": "experts' rows",
    "grouped_matmul.py": "experts' rows",
    "expert_parallel.py": "experts' rows",
    "quantized_base.py": "dequantization",
    "float8.py": "casts",
    "gradients.py": "update",
    "adamw.py": "update",
    "native.py": "update",
}
# By parts of a function's qualified name; includes our functions in faster_layers.py.
_FUNCTIONS = (
    ("_RmsNormFunction.", "norms"),
    ("_rms_norm_forward", "norms"),
    ("_SwiGluFunction.", "gated product"),
    ("_swiglu_forward", "gated product"),
    ("RMSNorm.", "norms"),
    ("apply_rotary_pos_emb", "rotary"),
    ("rotate_half", "rotary"),
    ("RotaryEmbedding.", "rotary"),
    ("SparseMoeBlock.", "experts' rows"),
    ("TopKRouter.", "experts' rows"),
    ("MLP.", "gated product"),
    ("SiLU", "gated product"),
    ("DecoderLayer.", "sums"),
    ("Attention.", "attention"),
    ("matmul_with_hp_or_float8_args", "casts"),
    ("Float8Linear.", "casts"),
    ("hp_tensor_to_float8", "casts"),
    ("DoraLinearLayer.", "adapters"),
    ("lora.layer", "adapters"),
    ("MatMul4Bit", "dequantization"),
    ("Embedding.", "embedding"),
)
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "linear")
_ATTENTION = ("_varlen_attn", "_flash_attention_forward", "_scaled_dot_product")
# These neither read nor write anything on the device.
_FREE_OPS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"),
    *("lift_fresh", "is_pinned", "_local_scalar_dense", "device", "set_", "record_stream"),
    *("resize_", "_unsafe_view", "view", "as_strided", "_reshape_alias", "is_same_size"),
)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# Functions of the loss, which are compiled as decoder blocks are.
_COMPILED_FUNCTIONS = ("write_fusible_exponentials", "cross_entropies")
_UNFUSIBLE_OPS = ("embedding", "sort", "topk", "nonzero", "index_put", "scatter")


@dataclass
class Kernel:
    """One kernel. ``reads`` and ``writes``: bytes by the number of a storage.

    ``message``: bytes that this rank sends in a collective; ``waits_for_it``: the issuing stream
    waits until it is done. ``in_block``: it belongs to a decoder block or the loss, which are
    compiled.
    """

    name: str
    kind: str
    dtype: torch.dtype
    flops: float
    reads: dict[int, int]
    writes: dict[int, int]
    stream: int
    backward: bool
    in_block: bool
    fusible: bool
    message: float = 0.0
    waits_for_it: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Steps:
    """What was recorded: kernels and waits in order, and bytes that the forward passes kept.

    An event is a ``Kernel``, or ("wait", stream, other stream), ("record", number, stream),
    ("wait event", stream, number), ("wait messages", stream, 0) or ("host", what, 0).
    """

    events: list[Any] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    kept_bytes: int = 0
    micro_tokens: int = 0


class Recorder(TorchDispatchMode):
    """Records what runs inside a block; ``watch`` comes from ``tests.support.fake_cuda``."""

    def __init__(self, watch: Any, documents: Iterable[int]) -> None:
        super().__init__()
        self.steps, self._watch = Steps(), watch
        self._documents = list(documents)
        self._storages: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._num_storages = 0
        self._kinds: dict[int, tuple[str, bool]] = {}
        self._streams: dict[int, int] = {}
        self._held: list[Any] = []
        self._in_backward = False
        self._at_start = 0

    def begin(self) -> None:
        """Forget what was recorded."""
        self.steps, self._at_start = Steps(), self.live_bytes()

    def finish(self) -> Steps:
        """Return what was recorded."""
        self.steps.alive = set(self._live)
        return self.steps

    def live_bytes(self) -> int:
        """Return the bytes of all tensors on the device."""
        return sum(self._live.values())

    def note(self, what: str, *values: Any) -> None:
        """Record a wait; the fake device and collectives call it."""
        self.steps.events.append((what, *(self._number_of(v) for v in values)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN_TYPES for kind in types):
            return NotImplemented  # called again with the inner tensors
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is not None and not self._in_backward:
            self._in_backward = True
            kept = self.live_bytes() - self._at_start
            self.steps.kept_bytes = max(self.steps.kept_bytes, kept)
        elif node is None:
            self._in_backward = False
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if node is None:
            number = torch._C._autograd._get_sequence_nr() - 1
            if number not in self._kinds:
                self._kinds[number] = _place()
        if name in _FREE_OPS or func.is_view or name.startswith("sym_"):
            return out
        self._record(func, name, node, args, kwargs, out)
        return out

    def _record(self, func: Any, name: str, node: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = zip(func._schema.arguments, [*args], strict=False)
        named = {a.name: a for a in func._schema.arguments}
        pairs = [*given, *((named[key], value) for key, value in kwargs.items() if key in named)]
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for argument, value in pairs:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            only_written = argument.is_out or name in ("copy_", "zero_", "fill_")
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
                    continue
                if is_written:
                    self._add(writes, tensor)
                if not (is_written and only_written):
                    self._add(reads, tensor)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._add(writes, tensor)
        if not reads and not writes:
            return
        self._narrow(name, args, out, reads)
        kind, in_block = self._kind_of(func, name, node, args, out)
        self.steps.events.append(
            Kernel(
                name,
                kind,
                _dtype_and_determinism(args, out),
                self._flops(func, name, args, kwargs, out),
                reads,
                writes,
                self._number_of(self._watch.stream),
                node is not None,
                in_block,
                _is_fusible(func, name, in_block),
                *_message_of(func, args, kwargs),
            )
        )

    def _narrow(self, name: str, args: Any, out: Any, reads: dict[int, int]) -> None:
        """Count only the rows that are read from a table."""
        if name in ("embedding", "index_select", "gather", "index"):
            table = args[0] if isinstance(args[0], torch.Tensor) else args[1]
            number = self._number_of_storage(table)
            rows = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            reads[number] = min(reads.get(number, 0), sum(t.nbytes for t in rows))

    def _kind_of(self, func: Any, name: str, node: Any, args: Any, out: Any) -> tuple[str, bool]:
        if func.namespace == "c10d":
            return "messages", False
        kind, in_block = _place()
        if node is not None and (forward := self._kinds.get(node._sequence_nr())):
            in_block = in_block or forward[1]
            kind = kind or forward[0]
            if name == "add" and node.name() not in ("AddBackward0",):
                kind = "sums"  # of two gradients of one tensor
        if name in ("all_gather_copy_in", "split_with_sizes_copy"):
            return "copies of gathered weights", False
        if name.startswith(_ATTENTION):
            return "attention", in_block
        if name in _PRODUCTS or "gemm_4bit" in name:
            return _product_kind(name, args, kind), in_block
        if "dequantize" in name:
            return "dequantization", in_block
        if name == "_to_copy" and kind in ("adapters", "", "dequantization"):
            return "casts", in_block
        return kind or "other", in_block

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
        if name.startswith("_varlen_attn") or "_flash_attention" in name:
            is_backward = "backward" in name
            query = args[1] if is_backward else args[0]
            tokens, heads, values = query.shape
            pairs = sum(length * (length + 1) / 2 for length in self._documents)
            own = tokens / sum(self._documents)  # below 1 if ranks gather keys
            return (10 if is_backward else 4) * own * pairs * heads * values
        if "gemm_4bit" in name:  # it dequantizes a weight and multiplies by it
            return 2.0 * out.numel() * args[0].shape[-1]
        if name == "_grouped_mm":
            a, b = args[0], args[1]
            if a.dim() == 2 and b.dim() == 2:
                return 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
            return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]
        if name == "addmm_":
            func = torch.ops.aten.addmm.default
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
            return float(formula(*args, **kwargs, out_val=out))
        return 0.0

    def _add(self, bytes_by_storage: dict[int, int], tensor: torch.Tensor) -> None:
        size = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size *= length if stride else 1
        number = self._number_of_storage(tensor)
        bytes_by_storage[number] = max(bytes_by_storage.get(number, 0), size * tensor.itemsize)

    def _number_of_storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._num_storages += 1
            number = self._storages[key] = self._num_storages
            self._live[number] = storage.nbytes()
            weakref.finalize(storage, self._forget, key, number)
        return self._storages[key]

    def _forget(self, key: int, number: int) -> None:
        self._storages.pop(key, None)
        self._live.pop(number, None)

    def _number_of(self, thing: Any) -> Any:
        """Return the number of a stream or of an event."""
        if isinstance(thing, (int, str)):
            return thing
        if id(thing) not in self._streams:
            self._held.append(thing)  # so that its id stays unique
            self._streams[id(thing)] = len(self._streams)
        return self._streams[id(thing)]


class FusedRMSNorm(torch.autograd.Function):
    """F.rms_norm as on a GPU: one kernel per pass, where fake tensors would decompose it.

    Values do not matter here.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Read x and write as many bytes."""
        ctx.save_for_backward(x, weight)
        return torch.mul(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Read x and the gradient, and write as many bytes as x has."""
        x, weight = ctx.saved_tensors
        grad_weight = grad.sum(0).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return torch.addcmul(grad, x, weight), grad_weight


def _is_fusible(func: Any, name: str, in_block: bool) -> bool:
    if not in_block or func.namespace not in ("aten", "prims"):
        return False
    is_large = name in _PRODUCTS or name.startswith(_ATTENTION) or "grouped" in name
    return not is_large and not name.startswith(_UNFUSIBLE_OPS)


def _dtype_and_determinism(args: Any, out: Any) -> torch.dtype:
    tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_cuda]
    floats = [t.dtype for t in tensors if t.is_floating_point() and t.dim() >= 2]
    made = [t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return (floats or made or [torch.float32])[0]


def _product_kind(name: str, args: Any, kind: str) -> str:
    matrices = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.dim() >= 2]
    is_thin = name != "_scaled_mm" and any(
        side <= MAX_RANK for t in matrices for side in t.shape[-2:]
    )
    if (kind == "attention" and name == "bmm") or "4bit" in name:
        return "attention" if name == "bmm" else "base products"
    return "adapters" if is_thin else "base products"


def _message_of(func: Any, args: Any, kwargs: Any) -> tuple[float, bool]:
    """Return the bytes that a rank sends (ring algorithms), and whether its stream waits."""
    if func.namespace != "c10d":
        return 0.0, True
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    group = next(v for n, v in values.items() if n == "process_group")
    size = dist.ProcessGroup.unbox(group).size()
    tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    whole = max(t.nbytes for t in tensors)
    times = 2 if "allreduce" in func._schema.name else 1
    is_async = any(values.get(n) for n in ("asyncOp", "async_op"))
    return times * (size - 1) / size * whole, not is_async


def _place() -> tuple[str, bool]:
    """Return what the running code computes, and whether a decoder block or the loss calls it."""
    kind, in_block = "", False
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if not kind:
            file = code.co_filename.rsplit("/", 1)[-1]
            if "hpc_tune" in code.co_filename:
                kind = _FILES.get(file, "")
            if not kind and "Recorder" not in code.co_qualname:
                name = code.co_qualname
                if "peft/tuners/lora" in code.co_filename:
                    name += " lora.layer"
                kind = next((kind for part, kind in _FUNCTIONS if part in name), "")
        if code.co_name in _COMPILED_FUNCTIONS or "DecoderLayer.forward" in code.co_qualname:
            in_block = True
            break
        frame = frame.f_back
    return kind, in_block
