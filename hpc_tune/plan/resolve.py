"""The layout of a model on a machine: the one place that decides what the settings leave open.

    parallel settings, model, machine -> choose_layout -> check_layout -> choose_reshard
    -> ResolvedLayout

Also the number of rows of a micro-batch, which follows from the layout.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_tune.config.constraints import find_row_piece_conflicts
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import BatchConfig, ModelConfig, TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.row_pieces import has_mlps
from hpc_tune.errors import ConfigError
from hpc_tune.memory.policy import MODEL_STATE_MEMORY_SHARE
from hpc_tune.model.build import DTYPES, BuiltModel, build
from hpc_tune.model.builtin import BUILTIN_TINY_MODEL, write_tiny_model
from hpc_tune.model.config_json import (
    find_nearest_model_shape,
    model_shape_names,
    resolve_model_directory,
)
from hpc_tune.model.language import explain_too_long_texts, read_config, read_language_config
from hpc_tune.model.stock_reference import LAYER_COUNT_FIELDS
from hpc_tune.plan.hardware import Machine
from hpc_tune.step.layout import (
    Layout,
    MeshCoordinates,
    format_choices,
    list_divisors,
    pipeline_problems,
    row_sharing_problems,
)
from hpc_tune.step.plan import uses_fsdp
from hpc_tune.step.size import ModelSize, static_bytes
from hpc_tune.step.slices import gathers_keys, num_local_query_heads, slicing_problems
from hpc_tune.units import format_bytes

MIN_ROW_PIECE_TOKENS = 4096  # the least tokens of a piece of a row if row_pieces is "auto"


@dataclass(frozen=True)
class ResolvedLayout:
    """The layout, the reason for it in words, and the settings with nothing left to choose.

    ``parallel`` has the axes of ``layout`` (except with ZeRO) and a decided reshard.
    ``coordinates`` are this rank's. ``machine`` is the one it was resolved for.
    """

    layout: Layout
    reason: str
    coordinates: MeshCoordinates
    parallel: ParallelConfig
    machine: Machine


def resolve(
    requested_parallel: ParallelConfig,
    size: ModelSize,
    model: Any,
    machine: Machine,
    world_size: int | None = None,
    rank: int = 0,
) -> ResolvedLayout:
    """Decide what ``requested_parallel`` leaves open; the same on every rank.

    ``model`` is the transformers config. ``world_size``: if nodes have different numbers of ranks,
    it differs from the machine's.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size, or the model cannot
            be laid out like that.
    """
    world_size = world_size or machine.world_size
    bytes_per_rank = machine.bytes_per_rank
    per_node = machine.ranks_per_node if machine.world_size == world_size else 1
    layout, reason = choose_layout(requested_parallel, world_size, size, bytes_per_rank, per_node)
    check_layout(layout, requested_parallel, model)
    reshard = choose_reshard(requested_parallel, size, layout, bytes_per_rank)
    parallel = requested_parallel.model_copy(update={"reshard": reshard})
    if parallel.zero_stage is None:
        parallel = with_layout(parallel, layout)
    return ResolvedLayout(layout, reason, layout.coordinates(rank), parallel, machine)


def choose_layout(
    parallel: ParallelConfig,
    world_size: int,
    size: ModelSize,
    bytes_per_rank: int,
    ranks_per_node: int = 1,
) -> tuple[Layout, str]:
    """Return the layout for this world and the reason in words.

    With DeepSpeed, all ranks shard at ZeRO stage 3 and replicate at the others. Else axes that are
    set are kept; tensor and pipeline are 1 unless set; if one of replicate and shard is unset, it
    takes the remaining ranks. If both are unset, all ranks replicate if the model fits into
    ``MODEL_STATE_MEMORY_SHARE`` of ``bytes_per_rank``; else each node holds a sharded copy if one
    fits, so that weights are gathered over its fast links only (``ranks_per_node``: 1 if nodes
    differ); else all ranks shard.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size.
    """
    if parallel.zero_stage is not None:
        num_shards = world_size if parallel.zero_stage == 3 else 1
        layout = Layout(world_size // num_shards, num_shards, context=parallel.context)
        return layout, f"DeepSpeed ZeRO {parallel.zero_stage}, as configured"
    if not parallel.fits_ranks(world_size):
        raise ConfigError(_describe_mismatch(parallel, world_size))
    tensor, pipeline = parallel.tensor or 1, parallel.pipeline or 1
    replicate, shard = parallel.replicate, parallel.shard
    num_left = world_size // parallel.ranks_needed
    if replicate is not None or shard is not None:
        axes = (replicate or num_left, shard or num_left, tensor, pipeline)
        layout = Layout(*axes, parallel.expert, parallel.context)
        return layout, f"as configured, {format_bytes(static_bytes(size, layout))} per rank"
    unsharded = Layout(num_left, 1, tensor, pipeline, context=parallel.context)
    needed_bytes, limit_bytes = (
        static_bytes(size, unsharded),
        int(bytes_per_rank * MODEL_STATE_MEMORY_SHARE),
    )
    sizes = f"{format_bytes(needed_bytes)} of {format_bytes(limit_bytes)}"
    if needed_bytes <= limit_bytes:
        return unsharded, f"each rank can hold its part of the model ({sizes})"
    if num_left == 1:
        return unsharded, f"the model does not fit, and no rank is left to split it over ({sizes})"
    node_ranks = ranks_per_node // tensor  # the pipeline axis lies outside the shard axis
    if 1 < node_ranks < num_left and num_left % node_ranks == 0:
        hybrid = replace(unsharded, replicate=num_left // node_ranks, shard=node_ranks)
        if (needed_bytes := static_bytes(size, hybrid)) <= limit_bytes:
            sizes = f"{format_bytes(needed_bytes)} of {format_bytes(limit_bytes)}"
            return hybrid, f"the ranks of a node can hold the model together ({sizes} each)"
    return replace(unsharded, replicate=1, shard=num_left), f"no rank can hold the model ({sizes})"


def with_layout(parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """Return the settings with every axis as in ``layout``."""
    return parallel.model_copy(update={**asdict(layout), "layout": "simple"})


def choose_reshard(
    parallel: ParallelConfig, size: ModelSize, layout: Layout, bytes_per_rank: int
) -> str:
    """Return parallel.reshard with ``auto`` decided.

    It is "step" if a whole copy fits into ``MODEL_STATE_MEMORY_SHARE`` of ``bytes_per_rank``.
    """
    if parallel.reshard != "auto":
        return parallel.reshard
    unsharded = Layout(layout.num_weight_ranks, 1, layout.tensor, layout.pipeline)
    return (
        "step"
        if static_bytes(size, unsharded) <= bytes_per_rank * MODEL_STATE_MEMORY_SHARE
        else "block"
    )


def check_layout(layout: Layout, parallel: ParallelConfig, model: Any) -> None:
    """Check a layout against the shape of a model, before any weight is read.

    ``model`` is the transformers config.

    Raises:
        ConfigError: lists everything that is impossible, and what would work.
    """
    if problems := layout_problems(layout, parallel, model):
        raise ConfigError(
            "this model cannot be laid out like that:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def layout_problems(layout: Layout, parallel: ParallelConfig, model: Any) -> list[str]:
    """Return the reasons, in words, why a model cannot have this layout; empty if it can."""
    problems = []
    if layout.tensor > 1:
        problems += slicing_problems(model, layout.tensor)
    if layout.pipeline > 1:
        _, num_blocks = _find_num_blocks(model)
        problems += pipeline_problems(model, num_blocks, layout.pipeline, parallel.stages_per_rank)
    if layout.context > 1:
        problems += row_sharing_problems(model, layout)
    return problems


def resolve_row_pieces(
    parallel: ParallelConfig,
    tune: TuneConfig,
    train: TrainConfig,
    row_tokens: int,
    model: nn.Module,
) -> ParallelConfig:
    """Return the settings with row_pieces decided; ``train`` tells whether blocks are compiled.

    Pieces have at least MIN_ROW_PIECE_TOKENS tokens if ``model`` has MLPs that can be cut and no
    other setting conflicts. Without recompute=full, pieces would cost another forward pass of the
    MLPs: then only the user or the governor sets them.
    """
    if parallel.row_pieces != "auto":
        return parallel
    num_pieces = 1
    conflicts = find_row_piece_conflicts(parallel, tune, train)
    if parallel.recompute == "full" and not any(conflicts) and has_mlps(model):
        num_pieces = max(1, row_tokens // (MIN_ROW_PIECE_TOKENS * parallel.context))
    return parallel.model_copy(update={"row_pieces": num_pieces})


def list_useless_settings(
    layout: Layout, parallel: ParallelConfig, has_gpus: bool = True
) -> list[str]:
    """Describe the settings that have no effect in a layout on this kind of device."""
    useless = []
    if parallel.offload_activations and not has_gpus:
        useless.append(
            "parallel.offload_activations=true has no effect on CPUs, whose memory is the host's"
        )
    if uses_fsdp(layout.shard, parallel):
        return useless
    return useless + [
        f"parallel.{name}={value} has no effect where nothing is sharded ({layout})"
        for name, value in parallel.changed_shard_settings.items()
    ]


def kv_gathering_warnings(config: Any, layout: Layout) -> list[str]:
    """Warn that ranks gather keys if their number does not divide the heads; usually empty."""
    if not gathers_keys(config, layout):
        return []
    heads = num_local_query_heads(config, layout)
    choices = [n for n in list_divisors(heads) if n > 1 and layout.num_weight_ranks % n == 0]
    suggestion = f"; {format_choices(choices)} would exchange heads" if choices else ""
    return [
        f"parallel.context={layout.context} does not divide the {heads} attention heads of a rank: "
        f"in each layer every rank gathers the keys and values of whole rows{suggestion}"
    ]


def rows_per_rank(batch: BatchConfig, layout: Layout) -> int:
    """Return the rows of a step on the rank that has most."""
    return layout.rows_per_rank(batch.global_size)


def min_micro_rows(batch: BatchConfig) -> int:
    """Return the rows of a micro-batch that must fit into memory; 1 for ``auto``."""
    return 1 if batch.micro_size == "auto" else batch.micro_size


def max_micro_rows(batch: BatchConfig, layout: Layout) -> int:
    """Return the rows of a micro-batch that a run tries if memory allows it."""
    if batch.micro_size != "auto":
        return batch.micro_size
    rows = rows_per_rank(batch, layout)
    # Stages work on different micro-batches at once; four micro-batches per stage keep most busy.
    return rows if layout.pipeline == 1 else max(1, rows // (4 * layout.pipeline))


def _describe_mismatch(parallel: ParallelConfig, world_size: int) -> str:
    axes, start = parallel.axes, f"start {parallel.rank_count_text}"
    settings = ", ".join(f"parallel.{axis}={size}" for axis, size in axes.items())
    product = (parallel.tensor or 1) * (parallel.pipeline or 1)
    if world_size % product:
        changes = [f"parallel.{a}={n}" for a, n in axes.items() if a in ("tensor", "pipeline")]
        advice = f"{start}, or change {' and '.join(changes)}"
    else:
        advice = f"{start}, {_suggest_axes(parallel, world_size // product)}"
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{settings} on {ranks}: expected replicate x shard x tensor x pipeline = "
        f"{world_size}; {advice}"
    )


def _suggest_axes(parallel: ParallelConfig, num_ranks: int) -> str:
    """Suggest replicate and shard, whose product is ``num_ranks``; the set values do not fit."""
    set_axes = {name: getattr(parallel, name) for name in ("replicate", "shard")}
    set_axes = {name: size for name, size in set_axes.items() if size is not None}
    if len(set_axes) == 1:
        ((name, _),) = set_axes.items()
        sizes = [str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        return f"or set parallel.{name} to {' or '.join(sizes)}, or leave it out (=null)"
    other_axis = {"replicate": "shard", "shard": "replicate"}
    options = [
        f"parallel.{other_axis[name]}={num_ranks // size} with parallel.{name}={size}"
        for name, size in reversed(set_axes.items())
        if num_ranks % size == 0
    ]
    options += ["neither (both =null): they are then chosen to fit memory"]
    return f"or set {', or '.join(options)}"


# -- A model of which only config.json is known, built without reading any weights.


@dataclass(frozen=True)
class ModelShape:
    """What a model is built from: ``directory`` holds a config.json; weights are not looked at."""

    directory: Path
    dtype: torch.dtype
    tune: TuneConfig
    seed: int
    rope_scaling: Mapping[str, Any] | None = None

    def build(self) -> BuiltModel:
        """Build the model on the meta device."""
        arguments = (self.directory, self.dtype, self.tune, self.seed)
        return build(*arguments, reads_weights=False, rope_scaling=self.rope_scaling)

    @property
    def num_blocks(self) -> int:
        """The number of decoder blocks."""
        return _find_num_blocks(read_language_config(self.directory))[1]

    def with_blocks(self, num_blocks: int, directory: Path) -> "ModelShape":
        """Return the same model with ``num_blocks`` blocks; ``directory`` gets its config.json.

        Lists with an entry per block, such as attention types, are repeated or cut.
        """
        config = read_config(self.directory)
        text = config.get_text_config()
        json_config: dict[str, Any] = json.loads(
            (self.directory / "config.json").read_text("utf-8")
        )
        sections = [name for name in config.sub_configs if getattr(config, name, None) is text]
        part = next(
            (json_config[n] for n in sections if isinstance(json_config.get(n), dict)), json_config
        )
        name, old_num_blocks = _find_num_blocks(text)
        if not name:  # published files may spell the list of kinds as a string
            fields = text.to_dict()
            part |= {
                n: v for n, v in fields.items() if isinstance(v, list) and len(v) == old_num_blocks
            }
        for key, value in list(part.items()):
            if key in LAYER_COUNT_FIELDS:  # another name of the same number
                del part[key]
            elif isinstance(value, list) and len(value) == old_num_blocks:
                part[key] = [value[n % old_num_blocks] for n in range(num_blocks)]
        if name:
            part[name] = num_blocks
        (directory / "config.json").write_text(json.dumps(json_config), encoding="utf-8")
        return replace(self, directory=directory)


def explain_too_long_rows(model: ModelConfig, seq_len: int) -> Iterator[str]:
    """Yield why rows are too long for the model's positions, if they are."""
    scaling, texts = model.rope_scaling, f"data.seq_len={seq_len} tokens"
    with open_shape(model.path, torch.float32, TuneConfig(), 0, scaling) as shape:
        config = read_language_config(shape.directory, scaling)
        if too_long := explain_too_long_texts(config, shape.directory, scaling, seq_len, texts):
            yield too_long


def _find_num_blocks(config: Any) -> tuple[str, int]:
    """Return the config key of a language model's number of blocks, and that number.

    ``num_layers`` counts blocks; ``num_hidden_layers`` may be twice that (LongCat's blocks have two
    layers), and transformers before 5.18 stores it too. The key is "" if the number is only the
    length of a list (Nemotron-H's kinds of blocks).
    """
    fields = config.to_dict()
    for name in ("num_layers", *LAYER_COUNT_FIELDS):
        if isinstance(fields.get(name), int):
            return name, fields[name]
    return "", config.num_hidden_layers


def planned_dtype(name: str, uses_gpu: bool) -> torch.dtype:
    """Return the dtype that ``model.dtype`` is planned with: auto is bf16 on a GPU, else fp32."""
    return DTYPES[("bf16" if uses_gpu else "fp32") if name == "auto" else name]


@contextlib.contextmanager
def open_shape(
    path: str,
    dtype: torch.dtype,
    tune: TuneConfig,
    seed: int,
    rope_scaling: Mapping[str, Any] | None = None,
) -> Iterator[ModelShape]:
    """Yield the shape of ``model.path``; builtin:tiny is written to a temporary directory.

    Raises:
        ConfigError: if there is no such shape.
    """
    if path != BUILTIN_TINY_MODEL:
        directory = resolve_model_directory(path)
        if not directory.is_dir():
            raise ConfigError(
                f"model.path={path}: no such directory here. A plan needs only its config.json; "
                f"without it, plan a similar published model: "
                f"model.path={find_nearest_model_shape(path)} "
                f"(known: {', '.join(model_shape_names())})"
            )
        yield ModelShape(directory, dtype, tune, seed, rope_scaling)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "tiny")
        yield ModelShape(Path(folder) / "tiny", dtype, tune, seed, rope_scaling)
