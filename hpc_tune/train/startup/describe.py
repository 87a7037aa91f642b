"""What a run logs about itself before training: a line per part, warnings, the start event."""

import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.schedulers import find_job
from hpc_tune.config.load import mask_secrets
from hpc_tune.config.optim import auto_lr
from hpc_tune.config.schema import CheckpointConfig, DataConfig, OptimConfig, TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.files import join_paths
from hpc_tune.data.order import compute_progress
from hpc_tune.data.packed_rows import count_tokens
from hpc_tune.engine.adamw import learning_rate, with_scaled_lr
from hpc_tune.log import log
from hpc_tune.model.experts import OTHER_PARTS, active_expert_share, num_experts_per_token
from hpc_tune.model.float8 import explain_missing_float8_matmuls
from hpc_tune.model.kernels import multiplies_in_tf32
from hpc_tune.plan.resolve import ResolvedLayout
from hpc_tune.probe import fabric
from hpc_tune.probe.facts import find_nccl
from hpc_tune.probe.software import git_commit, package_versions
from hpc_tune.probe.topology import find_network_cards
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.sources import OpenSource
from hpc_tune.train.startup.preflight import MemoryForecast
from hpc_tune.units import format_count, format_quantity
from hpc_tune.world.affinity import SYS
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import (
    ALLOC_CONF_VARIABLES,
    GpuArchitecture,
    cpu_has_bf16,
    find_architecture,
    read_allocator_settings,
    unread_alloc_conf_warning,
)

_MIN_UPDATES_PER_EPOCH = 5
_QUANTIZE_S_PER_VALUE = 100e-9  # of one core, per trained value and step (2.5 GHz)


def log_start(
    job: Job, model: Model, resolved_layout: ResolvedLayout, forecast: MemoryForecast, data: Data
) -> None:
    """Log the model, method, data, layout, memory, batch and learning rate, a line each, and write
    them to events.jsonl with everything that a bug report needs (kind ``start``).

    If parallel=auto chose among the ranks that joined, also log the remaining world.
    """
    if not job.setup_comm.is_rank_0:
        return
    config, comm, layout = model.config, job.setup_comm, resolved_layout.layout
    rows, total_steps = config.batch.global_size, data.total_steps
    lines: dict[str, Any] = {
        "world": _describe_world(comm),
        "model": f"{config.model.path}: {format_count(model.size.num_parameters)} parameters, "
        + describe_arithmetic(config.train, model.built.dtype, find_architecture(comm.device)),
        "method": describe_method(config.tune, model.size),
        **({"experts": line} if (line := describe_experts(model.size, model.built.config)) else {}),
        "data": _describe_data(config.data, data),
        **_describe_evals(data, config.checkpoint.keep_best),
        "layout": f"{layout}: {resolved_layout.reason}",
        "memory": forecast.verdict + describe_allocator(comm.device, os.environ),
        "kernels": str(model.choose_kernels(comm.device))
        + describe_float8_base(model, comm.device),
        "batch": _describe_batch(rows, layout, data),
        "rate": describe_learning_rate(config.optim, config.tune, rows, total_steps),
    }
    sources = compute_progress(data.mixture.phases, data.loader.total_rows) if data.mixture else []
    for name, text in lines.items():
        if name != "world" or job.candidate is not None:
            log.info("%-7s %s", name, text)
        for source in sources if name == "data" else ():
            log.info("source  %s", source)
    job.events.write(
        "start",
        **lines,
        size=comm.world.size,
        num_nodes=comm.world.num_nodes,
        total_steps=total_steps,
        command=[sys.executable, "-m", "hpc_tune", *map(mask_secrets, sys.argv[1:])],
        launcher=comm.world.launcher,
        folder=os.getcwd(),
        **_batch_job_fields(os.environ),
        hardware=_describe_hardware(comm),
        links=job.candidate.links if job.candidate is not None else "",
        hosts=dict(Counter(peer.hostname for peer in comm.roster)),
        counts=_count_data(data),
        remarks=data.counters.remarks(),
        mixture=[asdict(source) for source in sources],
        versions=package_versions(),
        commit=git_commit(),
    )
    for warning in _list_warnings(comm, model, layout, data):
        log.warning("%s", warning)
    log.info("files   %s", config.run.dir)


def _list_warnings(comm: Comm, model: Model, layout: Layout, data: Data) -> Iterator[str]:
    config, rows = model.config, model.config.batch.global_size
    yield from warn_slow_bf16(comm.device, model.built.dtype)
    yield from warn_gpu_setup(comm, os.environ)
    yield from warn_idle_ranks(rows, layout)
    epoch_rows = data.loader.num_rows_per_epoch
    yield from warn_few_steps(config.train, config.optim, rows, data.total_steps, epoch_rows)
    yield from warn_best_weights_not_saved(config.train, config.checkpoint)
    yield from warn_useless_8bit_optimizer(config.optim, model.size, comm.device)


def _batch_job_fields(environ: Environ) -> dict[str, Any]:
    job = find_job(environ)
    return {} if job is None else {"job": job.id, "scheduler": job.scheduler.name}


def warn_slow_bf16(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield a warning where a CPU has to emulate the dtype."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not cpu_has_bf16():
        yield (
            "model.dtype=bf16: this CPU has no bf16 instructions (AVX512-BF16, AMX): a step may "
            "take tens of times as long as with model.dtype=fp32"
        )


def warn_idle_ranks(rows: int, layout: Layout) -> Iterator[str]:
    """Yield a warning where a step has fewer rows than there are ranks to share them."""
    groups, each = layout.data_parallel_size, layout.size // layout.data_parallel_size
    if rows < groups:
        yield (
            f"{format_quantity(rows, 'row')} for {layout.size} ranks: "
            f"{(groups - rows) * each} ranks have nothing to do. Use {rows * each} ranks or "
            f"batch.global_size={groups}"
        )


def warn_best_weights_not_saved(train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a warning where a run that stops early does not keep its best weights."""
    if (num_evals := train.stop_after_evals) is None:
        return
    text = f"train.stop_after_evals={num_evals}"
    if not checkpoint.keep_best:
        yield (
            f"{text} ends the run after its best weights, which are not kept: "
            "set checkpoint.keep_best=true"
        )
    elif (train.eval_every_steps or 0) % (checkpoint.every_steps or math.inf):
        yield (
            f"{text} with checkpoint.keep_best=true keeps only the best of checkpoints saved right "
            f"after an evaluation: set checkpoint.every_steps={train.eval_every_steps}"
        )


def warn_useless_8bit_optimizer(
    optim: OptimConfig, size: ModelSize, device: torch.device
) -> Iterator[str]:
    """Yield a warning if optimizer moments in 8 bits have no benefit, or are slow."""
    if optim.is_8bit and not size.moment_savings_bytes:
        yield (
            "optim.name=adamw_8bit has no effect: no trained tensor has 4,096 values; leave it out"
        )
    elif optim.is_8bit and device.type == "cpu":
        yield (
            "optim.name=adamw_8bit on CPUs, which have no fast way to quantize: about "
            f"{_QUANTIZE_S_PER_VALUE * size.num_trained:.2g} s of one core in each step for "
            f"{format_count(size.num_trained)} trained values; use optim.name=adamw if it fits"
        )


def warn_few_steps(
    train: TrainConfig, optim: OptimConfig, rows: int, total_steps: int, rows_per_epoch: int
) -> Iterator[str]:
    """Yield warnings if train.epochs is not used, or if a run is too short for its batch of
    ``rows`` or for its warm-up.
    """
    if train.epochs is not None and train.max_steps is not None:
        yield (
            f"train.epochs={train.epochs:g} is not used: train.max_steps={train.max_steps} is "
            "set and takes precedence; remove one of them"
        )
    if rows_per_epoch < _MIN_UPDATES_PER_EPOCH * rows and total_steps < 10 * _MIN_UPDATES_PER_EPOCH:
        yield (
            f"an epoch is {rows_per_epoch} rows, {math.ceil(rows_per_epoch / rows)} updates, and "
            f"the run has {total_steps}: too few for batch.global_size={rows}; use a smaller "
            "batch.global_size or more train.epochs"
        )
    warmup = optim.warmup_steps or 0
    if warmup >= total_steps and warmup > 1:
        last = learning_rate(optim, total_steps - 1, total_steps)
        low_text = f"{last:.2g}, not {optim.peak_lr:g}"
        rate = f"{optim.peak_lr:g} in the last step alone" if warmup == total_steps else low_text
        yield (
            f"the run ends during warm-up (optim.warmup_steps={warmup} in a run of {total_steps} "
            f"steps): the rate reaches {rate}; use fewer"
        )


def describe_learning_rate(
    optim: OptimConfig, tune: TuneConfig, rows: int, total_steps: int
) -> str:
    """Return the peak learning rate, where it comes from, its warm-up and its schedule."""
    peak = with_scaled_lr(optim, rows).peak_lr
    if (reference := optim.reference_batch) is not None:
        origin = f"optim.lr={optim.peak_lr:.3g} is for {reference} rows per step "
        origin += f"({optim.batch_scaling})"
    elif optim.lr == auto_lr(tune):
        target = "all weights" if tune.method == "full" else "adapters"
        origin = f"optim.lr, as auto sets it for {target}"
        origin += "" if tune.objective == "sft" else f" and {tune.objective}"
    else:
        origin = "optim.lr"
    warmup = optim.num_warmup_steps(total_steps)
    warmup_text = f"{warmup} of {total_steps} steps of warm-up, then " if warmup else ""
    falls = f", whose last {optim.num_decay_steps(total_steps)} steps fall"
    details = optim.schedule + (falls if optim.schedule == "wsd" else "")
    details += f"; LoRA's B at {optim.lora_b_ratio:g} times that" if optim.lora_b_ratio != 1 else ""
    details += "; moments in 8 bits" if optim.is_8bit else ""
    return f"{peak:.3g} ({origin}): {warmup_text}{details}"


def describe_arithmetic(
    train: TrainConfig, dtype: torch.dtype, architecture: GpuArchitecture | None
) -> str:
    """Describe the model's dtype, and the precision of a GPU's matmuls if it is another."""
    name = str(dtype).removeprefix("torch.")
    is_less = multiplies_in_tf32(train, dtype, architecture)
    return f"{name}, multiplied in TF32 (train.tf32=true)" if is_less else name


def describe_float8_base(model: Model, device: torch.device) -> str:
    """Describe the dtype of a float8 base's matmuls, and why it is not float8 if so; else ""."""
    if not model.config.tune.base_dtype:
        return ""
    dtype = model.built.dtype
    reason = explain_missing_float8_matmuls(device, dtype)
    return f"; the base is multiplied in {f'{str(dtype)[6:]}: {reason}' if reason else 'float8'}"


def describe_allocator(device: torch.device, environ: Mapping[str, str]) -> str:
    """Describe the settings of the GPU memory allocator, to be appended to the forecast."""
    settings = [f"{name}={environ[name]}" for name in ALLOC_CONF_VARIABLES if name in environ]
    return f"; {settings[0]}" if device.type == "cuda" and settings else ""


def warn_gpu_setup(comm: Comm, environ: Environ) -> list[str]:
    """Return warnings about slow GPU networking, and allocator settings that were not read."""
    if comm.device.type != "cuda":
        return []
    return [
        *warn_slow_network(comm, environ),
        *filter(None, [unread_alloc_conf_warning(environ, read_allocator_settings())]),
    ]


def warn_slow_network(comm: Comm, environ: Environ, folder: Path = SYS) -> list[str]:
    """Return a warning if NCCL uses TCP although rank 0's node has a faster network."""
    if comm.device.type != "cuda" or comm.world.num_nodes == 1:
        return []
    kinds, library = [card.kind for card in find_network_cards(folder)], find_nccl()
    names = environ.get("NCCL_SOCKET_IFNAME", "")
    return [*filter(None, [fabric.tcp_warning(kinds, library.name, library.plugin, names)])]


def _describe_world(comm: Comm) -> str:
    world = comm.world
    ranks, nodes = format_quantity(world.size, "rank"), format_quantity(world.num_nodes, "node")
    return f"{ranks} on {nodes}, via {world.launcher}, {comm.device.type}"


def describe_method(tune: TuneConfig, size: ModelSize) -> str:
    """Return the method with its settings, and how many parameters it trains of each kind."""
    is_full = tune.method == "full"
    vectors = "magnitudes" if tune.method == "dora" else "norms and biases"
    vectors += " and norms" if tune.method == "dora" and tune.modules_to_save else ""
    parts = {
        "blocks": "blocks" if is_full else "adapters",
        "embedding": "embeddings",
        "end": "head",
    }
    kinds: Counter[str] = Counter()
    for weights in size.weights:
        if weights.is_trained:
            kinds[vectors if weights.is_vector else parts[weights.part]] += weights.num_values
    adapter = "" if is_full else f" r={tune.rank} alpha={tune.alpha:g}"
    adapter += " by pattern" if tune.rank_pattern or tune.alpha_pattern else ""
    adapter += " rslora" if tune.rslora else ""
    adapter += f" neftune={tune.neftune_alpha:g}" if tune.neftune_alpha else ""
    adapter += f" on a base in {tune.base_format}" if tune.base_format else ""
    share = "" if is_full else f" ({size.num_trained / size.num_parameters:.2%})"
    detail = ", ".join(f"{format_count(num)} in {kind}" for kind, num in kinds.most_common() if num)
    text = f"{tune.method}{adapter}: {format_count(size.num_trained)} trained{share}, {detail}"
    if is_full and (tune.rank, tune.alpha) != (TuneConfig().rank, TuneConfig().alpha):
        text += "; tune.rank and tune.alpha have no effect"
    return text


def describe_experts(size: ModelSize, model: Any) -> str:
    """Describe how many experts a token uses, and which parts of a mixture are trained.

    "" for a dense model.
    """
    counts: Counter[str] = Counter()
    for weights in size.weights:
        if weights.kind:
            counts[weights.kind] += weights.num_values if weights.is_trained else 0
    parts = [
        f"{kind}: {format_count(num) + ' trained' if num else 'frozen'}"
        for kind, num in sorted(counts.items(), key=lambda item: (item[0] == OTHER_PARTS, item[0]))
    ]
    num_chosen = num_experts_per_token(model)
    fraction = f"{num_chosen} of {round(num_chosen / active_expert_share(model))}"
    return f"{fraction} for a token; {', '.join(parts)}" if parts else ""


def _describe_data(config: DataConfig, data: Data) -> str:
    loader = data.loader
    sources = f"{len(data.sources)} sources" if config.path is None else join_paths(config.path)
    return (
        f"{sources}: {format_count(_num_documents(data.sources))} documents in "
        f"{format_count(loader.num_rows_per_epoch)} rows of {config.seq_len} tokens, "
        f"{100 * loader.padding:.1f}% padding"
    )


def _num_documents(sources: Sequence[OpenSource]) -> int:
    return sum(source.limit or source.store.num_documents for source in sources)


def _describe_evals(data: Data, keeps_best: bool) -> dict[str, str]:
    """Describe the held-out loss if it is the mean of several sources, else return nothing."""
    if len(data.held_out) < 2:
        return {}
    names = ", ".join(source.name for source in data.held_out)
    best = ", by which the best checkpoint is chosen" if keeps_best else ""
    return {"evals": f"of {names}; the held-out loss is their mean{best}"}


def _describe_batch(rows: int, layout: Layout, data: Data) -> str:
    ranks = layout.data_parallel_size
    epochs = data.loader.total_rows / data.loader.num_rows_per_epoch
    fewest, remainder = divmod(rows, ranks)
    shares = f"{fewest} each"
    if remainder:
        shares = f"{remainder} of them {'has' if remainder == 1 else 'have'} {fewest + 1}"
        shares += f", the others {fewest} and wait" if fewest else ", the others none"
    noun = "rank" if ranks == layout.size else "group"
    noun += "s" if ranks > 1 else ""
    noun += "" if ranks == layout.size else " of ranks"
    return (
        f"{rows} rows per step over {ranks} {noun}: {shares}; "
        f"{math.ceil(data.loader.num_rows_per_epoch / rows)} updates per epoch, "
        f"{data.total_steps} steps = {epochs:.2f} epochs"
    )


def _describe_hardware(comm: Comm) -> str:
    if comm.device.type == "cuda":
        return torch.cuda.get_device_name(comm.device)
    threads = format_quantity(torch.get_num_threads(), "thread")
    return f"{platform.machine()} CPU, {threads} per rank"


def _count_data(data: Data) -> dict[str, float]:
    """Return counts of the data; of a source with a limit, only the part that is used."""
    counters, loader = data.counters, data.loader
    counts: dict[str, float] = {k: v for k, v in vars(counters).items() if isinstance(v, int)}
    counts |= {"dropped": sum(counters.dropped.values()), "rows": loader.num_rows_per_epoch}
    token_counts = [count_tokens(source.store, source.limit) for source in data.sources]
    tokens, loss_tokens = map(sum, zip(*token_counts, strict=True))
    counts |= {"tokens": tokens, "loss_tokens": loss_tokens}
    counts["documents"] = _num_documents(data.sources)
    if data.held_out:
        counts["held_out_documents"] = _num_documents(data.held_out)
    return counts | {"padding": round(loader.padding, 6)}
