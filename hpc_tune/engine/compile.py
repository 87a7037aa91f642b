"""torch.compile of decoder blocks, one graph for all blocks of a class, and of the loss.

    block.forward, checkpointed or not -> torch.compile

Blocks are compiled instead of the whole model: a block's hooks (in which FSDP2 gathers weights)
stay outside, and the time to compile does not grow with depth. The starts of documents are an
argument of the graph, so attention within documents is part of it.

Shapes: B rows, T tokens, D hidden, N documents, L tokens of the longest one.
"""

import hashlib
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_tune.errors import ConfigError
from hpc_tune.log import LOG_ON_RANK_0_ONLY, log
from hpc_tune.memory.host import COMPILE_WORKER_BYTES
from hpc_tune.memory.policy import COMPILE_MEMORY_SHARE
from hpc_tune.model.loss import (
    LogitsKernels,
    LossModel,
    cross_entropies,
    write_fusible_exponentials,
)
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.varlen_attention import DocumentStarts
from hpc_tune.packages import parse_release

Forward = Callable[..., Any]
# One graph each for: training and evaluation, one row and several, with and without a mask, and
# each kind of block in a model that mixes several. torch gives up at 8.
MAX_GRAPHS = 64
# From here on inductor's one-dimensional GPU kernels, and only those, draw four numbers at a time
# as if their offsets were contiguous, and another kernel that draws them again gets others.
_FIRST_TORCH_WITH_DROPOUT_BUG = (2, 13)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile the ``forward`` of decoder blocks, after ``checkpoint_blocks`` has replaced it."""
    compiled_forwards: dict[Forward, Forward] = {}
    for block in blocks:
        bound_forward: Any = block.forward
        forward = bound_forward.__func__
        if forward not in compiled_forwards:
            compiled_forwards[forward] = _compile_forward(forward)
        block.forward = types.MethodType(compiled_forwards[forward], block)


def compile_loss(module: LossModel) -> None:
    """Compile what ``module`` computes from logits: one pass over them instead of eight."""
    module.logits_kernels = LogitsKernels(
        _compile_for_any_length(write_fusible_exponentials),
        _compile_for_any_length(cross_entropies),
    )


def _compile_for_any_length(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors whose first dimension is a number of tokens."""
    compiled = torch.compile(function)

    def run_compiled(*tensors: torch.Tensor) -> Any:
        if len(tensors[0]) < 2:  # torch would compile another graph for size 1
            return function(*tensors)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return run_compiled


def prepare_compiler(
    cache: Path,
    node: int,
    device: torch.device,
    threads: int,
    host_bytes: int,
    dropout: float = 0.0,
) -> None:
    """Set up torch.compile for this rank, before anything is compiled.

    The ranks of node number ``node`` share a folder below ``cache``, which the next start reuses on
    whichever machine is node number ``node`` then. ``host_bytes`` is the rank's share of the host's
    memory; it and the rank's threads limit the compile workers (stock torch starts 32 per rank).
    ``dropout`` is the dropout rate in the blocks.

    Raises:
        ConfigError: if there is no working C++ compiler, or no Triton for a GPU, or ``cache``
            cannot be written, or torch's compiled dropout is wrong here.
    """
    from torch._inductor import config

    require_compiler(device, dropout)
    folder = (cache / f"node-{node}-{_hash_cpu_features()}").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.compile_cache: {folder} cannot be made: {error.strerror or error}; name a folder "
            "that this job may write to"
        ) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    if device.type == "cpu":
        log.warning(
            "train.compile=true may gain nothing on CPUs: hpc_tune's own layers were as fast where "
            "both were measured, and need no compiling; compare tokens/s with train.compile=false",
            extra=LOG_ON_RANK_0_ONLY,
        )
    workers = num_compile_workers(threads, host_bytes)
    config.compile_threads = workers
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._dynamo.reset()
    log.info(
        "compiling one decoder block, reused for all others (%d workers, cache %s)", workers, folder
    )


def require_compiler(device: torch.device, dropout: float = 0.0) -> None:
    """Check that blocks with this ``dropout`` rate can be compiled for a device.

    Raises:
        ConfigError: if there is no working C++ compiler, or no Triton for a GPU, or torch's
            compiled dropout is wrong here.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    _refuse_wrong_dropout(device, dropout)
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = os.environ.get("CXX", "g++")
        raise ConfigError(
            f"train.compile=true needs a C++ compiler, and {compiler} does not work here; "
            "load a compiler module (module load gcc), name one in CXX, or set train.compile=false"
        ) from None
    if device.type == "cuda" and not has_triton():
        raise ConfigError(
            "train.compile=true needs Triton on a GPU, and this torch has none; install a build of "
            "torch that includes Triton, or set train.compile=false"
        )


def _refuse_wrong_dropout(device: torch.device, dropout: float) -> None:
    major, minor = _FIRST_TORCH_WITH_DROPOUT_BUG
    if (
        dropout
        and device.type == "cuda"
        and parse_release(torch.__version__) >= _FIRST_TORCH_WITH_DROPOUT_BUG
    ):
        raise ConfigError(
            f"train.compile=true with tune.dropout={dropout:g} is not possible on a GPU with torch "
            f"{torch.__version__}: since {major}.{minor} compiled dropout repeats values of a "
            "mask, and the backward pass may draw another mask than the forward pass; set "
            "tune.dropout=0 or train.compile=false, or install torch 2.11 or 2.12"
        )


@contextmanager
def compiling_in_process(folder: Path) -> Iterator[None]:
    """Within a block, compile in this process only, and keep the results in ``folder``."""
    from torch._inductor import config

    paths = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    old_values, num_threads = {name: os.environ.get(name) for name in paths}, config.compile_threads
    os.environ |= {name: str(path) for name, path in paths.items()}
    config.compile_threads = 1
    try:
        yield
    finally:
        torch._dynamo.reset()
        config.compile_threads = num_threads
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def num_compile_workers(threads: int, host_bytes: int) -> int:
    """Return how many compile workers a rank may have; with one, it compiles in its own process."""
    return max(1, min(threads, int(COMPILE_MEMORY_SHARE * host_bytes) // COMPILE_WORKER_BYTES))


def _compile_forward(forward: Forward) -> Forward:
    def forward_within_documents(
        self: nn.Module,
        starts_N: torch.Tensor | None,
        max_length_L: torch.Tensor | None,
        hidden_BTD: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if starts_N is None or max_length_L is None:
            return forward(self, hidden_BTD, *args, **kwargs)
        num_rows, num_tokens, _ = hidden_BTD.shape
        starts = DocumentStarts(starts_N, num_rows, num_tokens, max_length_L.shape[0])
        with batch_context.use_batch(MicroBatch(starts=starts)):
            return forward(self, hidden_BTD, *args, **kwargs)

    compiled = torch.compile(forward_within_documents)

    def run_compiled(self: nn.Module, hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_BTD.shape[1] == 1:
            # The empty batch: torch would compile another graph for size 1.
            return forward(self, hidden_BTD, *args, **kwargs)
        if torch.is_grad_enabled() and not hidden_BTD.requires_grad:
            # After a frozen embedding, the first block alone would be compiled without a gradient
            # for its input, which doubles the time to compile.
            hidden_BTD = hidden_BTD.detach().requires_grad_()
        _mark_dynamic_lengths(hidden_BTD, args, kwargs)
        return compiled(self, *_document_starts(), hidden_BTD, *args, **kwargs)

    return run_compiled


def _document_starts() -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return where documents begin, and a tensor as long as the longest; None, None if unknown.

    A plain number would be compiled in as a constant, and another number would need another graph.
    The tensor has one value in memory.
    """
    if (starts := batch_context.batch.starts) is None:
        return None, None
    both = starts.starts_N, starts.starts_N[:1].expand(starts.max_length)
    for tensor in both:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return both


def _mark_dynamic_lengths(*values: Any) -> None:
    """Mark rows and tokens as dynamic, so that ragged lengths share one graph.

    compile(dynamic=True) is not enough: where T equals D, it takes both for one fixed size.
    """
    for tensor in torch.utils._pytree.tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            # Hidden states, positions and rotary tables begin with B, T; a mask is B1TT.
            for dim in (0, 1) if tensor.dim() <= 3 else (0, 2, 3):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _hash_cpu_features() -> str:
    """Return a hash of this processor's features, for which kernels are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    features.append(torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:8]
