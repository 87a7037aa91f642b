"""DeepSpeed's configuration, its NVMe folder, and the environment variables that it reads."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_tune.cluster import launchers
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.mesh import world_group
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.log import log
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.layers import find_blocks, is_vector
from hpc_tune.model.weights import adapted_layer
from hpc_tune.step.size import STATE_COPIES
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import all_gather
from hpc_tune.world.liveness import time_limit

BUCKET_VALUES = 1 << 24  # gradients reduced at once: 64 MiB of fp32
SUB_GROUP_VALUES = 10**8  # updated at once by the optimizer of stage 3: 0.4 GB of fp32


def deepspeed_config(
    built: BuiltModel, optim: OptimConfig, parallel: ParallelConfig, device: torch.device
) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    parameters = list(built.module.parameters())
    block_size = max(sum(p.numel() for p in b.parameters()) for b in find_blocks(built.module))
    # Vectors and adapters stay gathered between steps: they would need many small messages.
    named_params = list(built.module.named_parameters())
    adapter_sizes = [p.numel() for n, p in named_params if adapted_layer(n)]
    gathered_sizes = adapter_sizes + [p.numel() for n, p in named_params if is_vector(n, p)]
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        "reduce_bucket_size": BUCKET_VALUES,
        "allgather_bucket_size": BUCKET_VALUES,
        "sub_group_size": SUB_GROUP_VALUES,
        "memory_efficient_linear": False,  # it would replace torch's linear for the whole process
        # What is gathered at a time: the block in use, and the next one in advance.
        "stage3_prefetch_bucket_size": block_size,
        "stage3_max_live_parameters": 2 * block_size,
        "stage3_max_reuse_distance": block_size,
        "stage3_param_persistence_threshold": max(gathered_sizes, default=0),
    }
    common: dict[str, Any] = {"pin_memory": device.type == "cuda"}
    if (folder := swap_folder(parallel)) is not None:
        common["nvme_path"] = str(folder)
    if parallel.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": parallel.offload_optimizer, **common}
    if parallel.offload_params != "none":
        largest = max(p.numel() for p in parameters)
        num_matrices = sum(p.dim() > 1 for p in find_blocks(built.module)[0].parameters())
        zero["offload_param"] = {
            "device": parallel.offload_params,
            **common,
            # Buffers in pinned memory, each as large as the largest partition of a weight: for the
            # matrices of the block in use and the next one, the embedding and the head.
            "buffer_count": 2 * num_matrices + 2,
            "buffer_size": -(-largest // dist.get_world_size()),
            # Trained values that stay in host memory: those of adapters.
            "max_in_cpu": sum(adapter_sizes),
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by train_step
        "gradient_clipping": optim.clip_norm,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no compiler
        "zero_optimization": zero,
    }


def swap_folder(parallel: ParallelConfig) -> Path | None:
    """Return the folder for this rank's tensors on NVMe, or None without offload to NVMe."""
    if parallel.offload_path is None:
        return None
    return Path(parallel.offload_path) / "hpc_tune-zero" / f"rank-{dist.get_rank():05d}"


def node_swap_bytes(built: BuiltModel, parallel: ParallelConfig) -> int:
    """Return the bytes that the ranks of this host will keep on NVMe. Collective."""
    total = 0
    for p in built.module.parameters():
        if parallel.offload_params == "nvme":
            total += p.numel() * p.element_size()
        if parallel.offload_optimizer == "nvme" and p.requires_grad:
            total += p.numel() * STATE_COPIES * 4  # in fp32
    host = socket.gethostname()
    rank_shares = all_gather((host, total // dist.get_world_size()), world_group())
    return sum(num_bytes for rank_host, num_bytes in rank_shares if rank_host == host)


def make_swap_folder(parallel: ParallelConfig, node_bytes: int) -> Path | None:
    """Make this rank's folder on NVMe, empty, if one is needed.

    Raises:
        ConfigError: if it cannot be made or has no room for ``node_bytes``.
    """
    folder = swap_folder(parallel)
    if folder is None:
        return None
    root = Path(parallel.offload_path or "")
    if not root.is_dir():
        raise ConfigError(
            f"parallel.offload_path={root}: no such folder on {socket.gethostname()}; name one on "
            "a disk of the node itself"
        )
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"parallel.offload_path={root} cannot be used: {error}") from None
    if free_bytes < node_bytes:
        raise ConfigError(
            f"parallel.offload_path={root}: {format_bytes(free_bytes)} are free on "
            f"{socket.gethostname()}, but its ranks need {format_bytes(node_bytes)}; use more "
            "nodes or another folder, or offload to cpu"
        )
    return folder


@contextmanager
def setting_local_rank(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to the index of this rank's device, and hide Open MPI's variable in the block.

    DeepSpeed reads the index only from LOCAL_RANK, even at every forward pass of stage 3: it stays
    set. At its start, DeepSpeed requires that Open MPI's variable, which may differ, is equal.
    """
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    mpi_local_rank = os.environ.pop(launchers.OPENMPI_LOCAL_RANK, None)
    try:
        yield
    finally:
        if mpi_local_rank is not None:
            os.environ[launchers.OPENMPI_LOCAL_RANK] = mpi_local_rank


# -- DeepSpeed's libraries for NVMe: each compiled at its first use, under a lock file of torch.
#
# torch's extension loader waits for that file without a timeout, and a compiler that is killed (a
# canceled job, a failed node) leaves it behind: every later run would wait forever.


ASYNC_IO_LOAD_LIMIT_S = 1200.0  # for each; a slow node compiles async_io in ten minutes
COMPILER_DEAD_AFTER_S = 300.0  # a compiler at work writes a file in one or two minutes


def load_async_io(process_name: str) -> None:
    """Load DeepSpeed's async_io and pin_memory, which it uses, compiling them if needed.

    Ends the world if one takes longer than ``ASYNC_IO_LOAD_LIMIT_S``. ``process_name`` is named in
    messages.

    Raises:
        ConfigError: if one cannot be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
    from torch.utils.cpp_extension import _get_build_directory

    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):  # the order in which DeepSpeed loads
        library = f"DeepSpeed's {builder.name}"
        folder = Path(_get_build_directory(builder.name, False))
        log.info("loading %s; its first use compiles it, which takes minutes: %s", library, folder)
        hint = f"if no other job is compiling it, remove {folder}"
        try:
            with time_limit(library, ASYNC_IO_LOAD_LIMIT_S, hint, process_name):
                wait_for_compiler(folder / "lock")
                builder.load(verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            raise ConfigError(
                f"offload to nvme: {library} cannot be built "
                f"({first_line(error)}); DeepSpeed needs a C++ compiler, ninja and the headers "
                "of libaio (Debian: libaio-dev, Red Hat: libaio-devel); or offload to cpu"
            ) from None


def wait_for_compiler(
    lock: Path, dead_after_s: float = COMPILER_DEAD_AFTER_S, poll_interval_s: float = 0.5
) -> None:
    """Return once ``lock`` is gone; remove it if its compiler was killed.

    The compiler counts as killed if nothing in its folder was written for ``dead_after_s`` seconds.
    Several ranks may remove the lock: before DeepSpeed makes a new one, it tries its compiler.
    """
    while lock.exists():
        if _seconds_since_last_write(lock.parent) > dead_after_s:
            log.warning("a killed compiler left %s behind; removing it", lock)
            lock.unlink(missing_ok=True)
            return
        time.sleep(poll_interval_s)


def _seconds_since_last_write(folder: Path) -> float:
    """Return the seconds since a file in ``folder`` was last written."""
    last_write_s = 0.0
    for path in folder.iterdir():
        try:
            last_write_s = max(last_write_s, path.stat().st_mtime)
        except FileNotFoundError:  # a file of the compiler, gone meanwhile
            continue
    return time.time() - last_write_s
