"""What is put around a decoder block before it is sharded: recompute, and compilation.

    block.forward -> (checkpoint) -> (torch.compile, one for all blocks of a class)

Only ``forward`` is replaced: the hooks of a block (FSDP2 gathers in them) stay outside of what is
compiled, and parameter names stay as they are. Shapes: B rows, T tokens, D hidden.
"""

import functools
import hashlib
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.memory.policy import Action
from hpc_tune.model.attention import DOCUMENTS
from hpc_tune.model.dropout import ROWS
from hpc_tune.model.gated import use_lean_gates
from hpc_tune.model.loss import LossModel
from hpc_tune.model.low_rank import use_low_rank_products

Forward = Callable[..., Any]
# What selective recompute keeps: results that cost a matrix product to make again. Names, because
# the 4-bit products are known to torch only where bitsandbytes has been imported. Batched products
# are missing: they are the T x T scores of attention that is not fused, the largest of all.
_PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1, "aten._scaled_mm.default": 0}
_KEPT = frozenset(
    (
        *(
            f"aten._scaled_dot_product_{kind}_attention{where}.default"
            for kind, where in (
                ("flash", ""),
                ("flash", "_for_cpu"),
                ("efficient", ""),
                ("cudnn", ""),
                ("fused", "_overrideable"),
            )
        ),
        "bitsandbytes.gemm_4bit.default",
    )
)
# The widest blocks are 8 x wider inside than outside (Gemma); adapters go from 16 to 4096 and more.
LEAST_INNER = 8
# A compile worker is a Python with torch plus one run of the C++ or Triton compiler.
WORKER_BYTES = 1 << 30
WORKERS_SHARE = 8  # an eighth of a rank's host memory may go to compile workers
# One graph each for: training and evaluation, one row and several, with and without a mask, and
# for each kind of block that a model mixes. torch gives up at 8.
MOST_GRAPHS = 64


def use_own_layers(module: LossModel, blocks: Sequence[nn.Module], compile_blocks: bool) -> None:
    """Let layers do what they do in fewer passes and with less that is kept."""
    use_low_rank_products(blocks)
    if not compile_blocks:  # a compiler weighs by itself what to keep
        use_lean_gates(blocks)
    module.within_documents &= not compile_blocks


def wrap_blocks(
    blocks: Sequence[nn.Module],
    recompute: Literal["none", "selective", "full"],
    compile_blocks: bool,
) -> None:
    """Replace the ``forward`` of decoder blocks; blocks of one class share one compiled code.

    recompute=full keeps a block's input alone, selective the results of its matrix products and of
    attention too; the rest is computed again in the backward pass, to the same bits.
    """
    if recompute == "none" and not compile_blocks:
        return
    made: dict[Forward, Forward] = {}
    for block in blocks:
        plain = type(block).forward
        if plain not in made:
            forward = _recomputed(plain, recompute)
            made[plain] = _compiled(forward) if compile_blocks else forward
        block.forward = types.MethodType(made[plain], block)


class Recompute:
    """Switches recompute on between two steps, for the governor; not of compiled blocks."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        recompute: Literal["none", "selective", "full"],
        compiled: bool,
    ) -> None:
        """Know the blocks and how ``wrap_blocks`` was called for them."""
        self._blocks, self._configured, self._compiled = blocks, recompute, compiled

    def levers(self) -> set[Action]:
        """Return RECOMPUTE where it gives something."""
        can = self._configured != "full" and not self._compiled
        return {Action.RECOMPUTE} if can else set()

    def apply(self, action: Action, on: bool) -> str:
        """Recompute all of each block, or as configured."""
        assert action in self.levers()
        recompute = "full" if on else self._configured
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        wrap_blocks(self._blocks, recompute, compile_blocks=False)
        return f"activations are recomputed: {recompute}"


def prepare_compiler(
    cache: Path, node: int, device: torch.device, threads: int, host_bytes: int
) -> None:
    """Set up torch.compile for this rank, before anything is compiled.

    The ranks of node number ``node`` share a folder below ``cache``, which the next start reuses on
    whichever machine is node number ``node`` then. ``host_bytes`` is the rank's share of the host's
    memory: its workers are capped by that and by its threads (stock torch starts 32 per rank).

    Raises:
        ConfigError: if there is no working C++ compiler, or no Triton for a GPU, or ``cache``
            cannot be written.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        asked = os.environ.get("CXX", "g++")
        raise ConfigError(
            f"train.compile=true needs a C++ compiler, and {asked} is not one that works here; "
            "load a compiler module (module load gcc), name one in CXX, or set train.compile=false"
        ) from None
    if device.type == "cuda" and not has_triton():
        raise ConfigError(
            "train.compile=true needs Triton on a GPU, and this torch has none; install the torch "
            "that comes with it, or set train.compile=false"
        )
    folder = (cache / f"node-{node}-{_processor()}").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.compile_cache: {folder} cannot be made: {error.strerror or error}; name a folder "
            "that this job may write to"
        ) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    workers = num_workers(threads, host_bytes)
    config.compile_threads = workers
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.reset()
    log.info("compile one decoder block for all, %d workers, cache %s", workers, folder)


def num_workers(threads: int, host_bytes: int) -> int:
    """Return how many compile workers a rank may have; with one it compiles in its own process."""
    return max(1, min(threads, host_bytes // WORKERS_SHARE // WORKER_BYTES))


def outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its tensor operations out of sight of torch's dispatch modes, such
    as selective recompute, which counts those of a block, or FakeTensorMode.
    """

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def _recomputed(forward: Forward, recompute: Literal["none", "selective", "full"]) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False}
    match recompute:
        case "none":
            return forward
        case "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        again = DOCUMENTS.remembering(ROWS.remembering(forward))
        return checkpoint(again, self, *args, **options, **kwargs)

    return recomputed


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (name := str(operator)) in _KEPT
    if (first := _PRODUCTS.get(name)) is not None:
        kept = _is_worth_keeping(*args[first : first + 2])
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_worth_keeping(one_MK: torch.Tensor, other_KN: torch.Tensor) -> bool:
    """Tell whether a product takes many flops (K) for each of its values (N per row).

    An adapter's second product takes as few as its rank, for as many values as the base's: kept,
    those alone would make selective larger than none.
    """
    return LEAST_INNER * other_KN.shape[0] >= other_KN.shape[1]


def _compiled(forward: Forward) -> Forward:
    compiled = torch.compile(forward)

    def run(self: nn.Module, hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_BTD.shape[1] == 1:
            # The empty batch: torch would compile a size of one apart.
            return forward(self, hidden_BTD, *args, **kwargs)
        if torch.is_grad_enabled() and not hidden_BTD.requires_grad:
            # Behind a frozen embedding the first block alone would be compiled without the gradient
            # of its input, which doubles the time to compile.
            hidden_BTD = hidden_BTD.detach().requires_grad_()
        _mark_lengths(hidden_BTD, args, kwargs)
        return compiled(self, hidden_BTD, *args, **kwargs)

    return run


def _mark_lengths(*values: Any) -> None:
    """Tell torch that rows and tokens vary, so that ragged lengths are one graph.

    compile(dynamic=True) is not enough: where T equals D it takes both for one fixed size.
    """
    for tensor in torch.utils._pytree.tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            # Hidden states, positions and rotary tables begin with B, T; a mask is B1TT.
            for dim in (0, 1) if tensor.dim() <= 3 else (0, 2, 3):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _processor() -> str:
    """Return a short name of what this processor can do: kernels are made for it alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    said.append(torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:8]
