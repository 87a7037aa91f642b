"""Checks across settings: combinations that conflict, and settings that would have no effect."""

from collections.abc import Iterator

from hpc_tune.config.data import (
    DataConfig,
    check_source_names,
    check_sources,
    check_template_names,
    is_prepared,
)
from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.scheduler import JobConfig
from hpc_tune.config.schema import RunConfig, TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.units import format_seconds

_MAX_UNCOMPILED_STEPS = 50  # a run of so few steps would not gain from train.compile=auto


def check_config(config: RunConfig) -> list[str]:
    """Return the problems of a configuration whose fields are valid individually."""
    parallel, tune, train = config.parallel, config.tune, config.train
    stage = parallel.zero_stage
    return [
        *(_check_zero(parallel, stage, tune, train) if stage else _check_without_zero(parallel)),
        *_check_offload_path(parallel),
        *_check_parallel(parallel, tune.method),
        *_check_long_row_settings(parallel, tune, train, config.run.device),
        *(_find_expert_parallel_conflicts(parallel, train) if parallel.expert > 1 else ()),
        *(_find_context_parallel_conflicts(parallel, train) if parallel.context > 1 else ()),
        *(_find_tensor_parallel_conflicts(tune, train) if (parallel.tensor or 1) > 1 else ()),
        *_check_float8(train, tune.method, config.model.dtype, config.run.device),
        *_find_float8_conflicts(train, tune),
        *_find_compile_conflicts(train, tune),
        *_check_objective(tune, config.data),
        *_check_tune(tune),
        *_check_optim(config.optim, tune.method),
        *(_find_adamw_8bit_conflicts(parallel) if config.optim.is_8bit else ()),
        *_check_data(config.data, train),
        *_check_time_limit(config.slurm),
        *_check_time_limit(config.pbs),
    ]


def find_compile_obstacle(
    parallel: ParallelConfig, tune: TuneConfig, train: TrainConfig, is_mixture_of_experts: bool
) -> str:
    """Return why the settings keep train.compile=auto from compiling on a GPU, or ""."""
    if train.compile != "auto":
        return f"train.compile={str(train.compile).lower()}"
    if is_mixture_of_experts:
        return "routers cannot be watched in a compiled block"
    if train.max_steps is not None and train.max_steps <= _MAX_UNCOMPILED_STEPS:
        return f"{train.max_steps} steps do not earn back a minute of compiling"

    def list_problems(train: TrainConfig) -> list[str]:
        conflicts = [*_find_compile_conflicts(train, tune)]
        conflicts += _check_long_row_settings(parallel, tune, train, "cuda")
        if (parallel.tensor or 1) > 1:
            conflicts += _find_tensor_parallel_conflicts(tune, train)
        if parallel.zero_stage == 3:
            conflicts += _check_zero_3(tune, train.compiles)
        return conflicts

    eager_problems = list_problems(train)
    compiled_train = train.model_copy(update={"compile": True})
    obstacles = [p for p in list_problems(compiled_train) if p not in eager_problems]
    if parallel.context > 1:
        obstacles.append(f"parallel.context={parallel.context} sends messages within blocks")
    return next(iter(obstacles), "")


def check_job(job: JobConfig, parallel: ParallelConfig, device: str) -> list[str]:
    """Return why a layout does not fit the ranks of the job that is to be submitted, if so."""
    ranks = job.nodes * job.ranks_per_node
    if parallel.fits_ranks(ranks):
        num_weight_ranks = ranks // ((parallel.tensor or 1) * (parallel.pipeline or 1))
        if num_weight_ranks % parallel.context == 0:
            return []
        return [
            f"parallel.context={parallel.context} must divide the number of ranks of replicate x "
            f"shard, and the {job.section} section asks for {num_weight_ranks} of these "
            f"({job.section}.nodes={job.nodes} of {job.ranks_per_node} ranks)"
        ]
    num_needed = parallel.ranks_needed
    axes = " x ".join(f"parallel.{axis}={size}" for axis, size in parallel.axes.items())
    verb = "needs" if len(parallel.axes) == 1 else "need"
    per_node = job.ranks_per_node if job.ranks_per_node > 1 else min(num_needed, 8)
    setting = f"{job.section}.gpus_per_node={per_node}"
    if device == "cpu" or (job.tasks_per_node and not job.gpus_per_node):
        setting = f"{job.section}.tasks_per_node={per_node}"
    return [
        f"{axes} {verb} {parallel.rank_count_text}, and the {job.section} section asks for {ranks} "
        f"({job.section}.nodes={job.nodes} of {job.ranks_per_node}); for example "
        f"{job.section}.nodes={-(-num_needed // per_node)} {setting}"
    ]


def _check_without_zero(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.engine == "deepspeed":
        yield "parallel.engine=deepspeed needs parallel.zero_stage=1, 2 or 3"
    requirement = "needs parallel.zero_stage (the DeepSpeed engine)"
    if parallel.offload_params == "nvme":
        yield f"parallel.offload_params=nvme {requirement}"
    if parallel.offload_optimizer != "none":
        yield f"parallel.offload_optimizer={parallel.offload_optimizer} {requirement}"


def _find_expert_parallel_conflicts(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a problem for each setting that conflicts with parallel.expert > 1."""
    conflicts = {
        "parallel.zero_stage": parallel.zero_stage is not None,
        "parallel.tensor": (parallel.tensor or 1) > 1,
        "parallel.offload_params": parallel.offload_params != "none",
        "train.compile": train.compiles,
    }
    for name in (name for name, is_set in conflicts.items() if is_set):
        yield f"parallel.expert > 1 with {name} is not available; leave one of them out"


def _find_context_parallel_conflicts(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a problem for each setting that conflicts with rows shared by several ranks."""
    option = f"parallel.context={parallel.context}"
    if train.compiles:
        yield (
            f"{option} with train.compile=true is not available: the compiled blocks would contain "
            "communication between ranks; leave one of them out"
        )
    replicate, shard = parallel.replicate, parallel.shard
    if replicate and shard and replicate * shard % parallel.context:
        yield (
            f"{option} must divide the number of ranks of parallel.replicate x parallel.shard, "
            f"which is {replicate} x {shard}; make one of the two a multiple of it"
        )


def _check_zero(
    parallel: ParallelConfig, stage: int, tune: TuneConfig, train: TrainConfig
) -> Iterator[str]:
    if parallel.engine == "native":
        yield (
            f"parallel.zero_stage={stage} is DeepSpeed's; use parallel.engine=deepspeed, or "
            "leave zero_stage out"
        )
    if parallel.layout == "auto":
        yield (
            f"parallel.layout=auto with parallel.zero_stage={stage}: DeepSpeed chooses its own "
            "layout; leave one of them out"
        )
    for axis, min_ranks in {"replicate": 1, "shard": 1, "tensor": 2, "pipeline": 2}.items():
        if (ranks := getattr(parallel, axis) or 0) >= min_ranks:
            yield (
                f"parallel.{axis}={ranks} with parallel.zero_stage={stage}: ZeRO splits over all "
                f"ranks; leave {axis} out"
            )
    for name, value in parallel.changed_shard_settings.items():
        yield f"parallel.{name}={value} has no effect with parallel.zero_stage; leave it out"
    if train.float8:
        yield "train.float8=true with parallel.zero_stage is not available; use parallel.shard"
    if tune.param_dtype != "fp32":
        yield (
            "tune.param_dtype=bf16 with parallel.zero_stage: ZeRO keeps trained weights in "
            "fp32; leave one of them out"
        )
    yield from (
        _check_zero_3(tune, train.compiles) if stage == 3 else _check_zero_1_and_2(parallel, stage)
    )


def _check_zero_3(tune: TuneConfig, is_compiled: bool) -> Iterator[str]:
    if tune.method == "dora":
        yield (
            "tune.method=dora with parallel.zero_stage=3: DoRA needs whole base weights for "
            "their norms; use zero_stage 1 or 2"
        )
    if tune.method == "qlora":
        yield (
            "tune.method=qlora with parallel.zero_stage=3: DeepSpeed would split the packed "
            "4-bit codes; use zero_stage 1 or 2, or parallel.shard"
        )
    if tune.base_dtype:
        yield (
            f"tune.base_dtype={tune.base_dtype} with parallel.zero_stage=3: DeepSpeed would split "
            "the rows of packed bytes; use zero_stage 1 or 2, or parallel.shard"
        )
    if is_compiled:
        yield (
            "train.compile=true with parallel.zero_stage=3: DeepSpeed gathers weights inside "
            "of the blocks that would be compiled; use zero_stage 1 or 2, or parallel.shard"
        )


def _check_zero_1_and_2(parallel: ParallelConfig, stage: int) -> Iterator[str]:
    if parallel.offload_params != "none":
        yield (
            f"parallel.offload_params={parallel.offload_params} needs parallel.zero_stage=3: "
            f"stage {stage} keeps all weights on each device"
        )
    if parallel.offload_optimizer == "nvme":
        yield "parallel.offload_optimizer=nvme needs parallel.zero_stage=3; use cpu"


def _check_offload_path(parallel: ParallelConfig) -> Iterator[str]:
    offloads = ("offload_params", "offload_optimizer")
    on_nvme = [name for name in offloads if getattr(parallel, name) == "nvme"]
    if on_nvme and parallel.zero_stage is not None and parallel.offload_path is None:
        yield (
            f"parallel.{on_nvme[0]}=nvme needs parallel.offload_path, a folder on a disk of the "
            "node itself"
        )
    if parallel.offload_path is not None and not on_nvme:
        yield (
            "parallel.offload_path has no effect without parallel.offload_params=nvme or "
            "parallel.offload_optimizer=nvme"
        )


def _check_parallel(parallel: ParallelConfig, method: str) -> Iterator[str]:
    shard = parallel.shard or (parallel.expert if parallel.layout == "auto" else 1)
    if shard % parallel.expert:
        yield (
            f"parallel.expert={parallel.expert} splits experts over ranks of parallel.shard, which "
            f"is {parallel.shard or 'unset'}; set that to {parallel.expert} or a multiple of it"
        )
    if parallel.stages_per_rank > 1 and (parallel.pipeline or 1) == 1:
        yield (
            f"parallel.stages_per_rank={parallel.stages_per_rank} has no effect without "
            "parallel.pipeline > 1"
        )
    if parallel.reduce_dtype != "fp32" and method != "full":
        yield (
            f"parallel.reduce_dtype={parallel.reduce_dtype} has no effect without "
            "tune.method=full: adapters' gradients are added up in fp32"
        )


def _check_long_row_settings(
    parallel: ParallelConfig, tune: TuneConfig, train: TrainConfig, device: str
) -> Iterator[str]:
    if parallel.row_pieces != "auto" and parallel.row_pieces > 1:
        yield from find_row_piece_conflicts(parallel, tune, train)
    if not parallel.offload_activations:
        return
    if parallel.recompute != "full":
        yield (
            "parallel.offload_activations=true moves the inputs of recomputed blocks, so it needs "
            f"parallel.recompute=full, found {parallel.recompute}"
        )
    if train.compiles:
        yield (
            "train.compile=true with parallel.offload_activations=true is not available: a "
            "compiled graph keeps its own inputs; use one of them"
        )
    if device == "cpu":
        yield (
            "parallel.offload_activations=true has no effect with run.device=cpu, whose memory is "
            "the host's; leave it out"
        )


def find_row_piece_conflicts(
    parallel: ParallelConfig, tune: TuneConfig, train: TrainConfig
) -> Iterator[str]:
    """Yield a problem for each setting that conflicts with parallel.row_pieces > 1."""
    if train.compiles:
        yield (
            "train.compile=true with parallel.row_pieces > 1 is not available: a compiled graph "
            "computes whole rows; use one of them"
        )
    if parallel.zero_stage == 3:
        yield (
            "parallel.row_pieces > 1 with parallel.zero_stage=3: DeepSpeed would gather each "
            "layer's weights again for each piece; use zero_stage 1 or 2, or parallel.shard"
        )
    if tune.dropout:
        yield (
            f"tune.dropout={tune.dropout:g} with parallel.row_pieces > 1: dropout masks are drawn "
            "for whole rows; leave one of them out"
        )


def _find_tensor_parallel_conflicts(tune: TuneConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a problem for each setting that conflicts with parallel.tensor > 1."""
    if tune.method == "dora":
        yield (
            "tune.method=dora with parallel.tensor > 1: its norms span the split weights; "
            "use lora, or parallel.shard"
        )
    if tune.method == "qlora":
        yield (
            "tune.method=qlora with parallel.tensor > 1: packed 4-bit weights are not split along "
            "heads; use parallel.shard or parallel.pipeline, or tune.method=lora"
        )
    if tune.base_dtype:
        yield (
            f"tune.base_dtype={tune.base_dtype} with parallel.tensor > 1: packed rows are not "
            "split along heads; use parallel.shard or parallel.pipeline, or leave base_dtype out"
        )
    if train.compiles:
        yield (
            "train.compile=true with parallel.tensor > 1 is not available in hpc_tune yet; "
            "use one of them"
        )
    if train.float8:
        yield "train.float8=true with parallel.tensor > 1 is not available; use one of them"


def allows_tensor_parallel(tune: TuneConfig, train: TrainConfig) -> bool:
    """Return whether these settings are compatible with parallel.tensor > 1."""
    return not any(_find_tensor_parallel_conflicts(tune, train))


def allows_expert_parallel(parallel: ParallelConfig, train: TrainConfig) -> bool:
    """Return whether these settings are compatible with parallel.expert > 1."""
    return not any(_find_expert_parallel_conflicts(parallel, train))


def allows_context_parallel(parallel: ParallelConfig, train: TrainConfig) -> bool:
    """Return whether these settings allow parallel.context > 1 where it divides the ranks."""
    unset_parallel = parallel.model_copy(update={"replicate": None, "shard": None})
    return not any(_find_context_parallel_conflicts(unset_parallel, train))


def _check_float8(train: TrainConfig, method: str, dtype: str, device: str) -> Iterator[str]:
    if not train.float8:
        return
    if not train.compiles:
        yield (
            "train.float8=true without train.compile=true is slower than bf16, since its casts are "
            "not fused; set train.compile=true"
        )
    if method in ("dora", "qlora"):
        yield (
            f"train.float8=true with tune.method={method}: this method multiplies by more than "
            "plain weights; use lora or full"
        )
    if device == "cpu":
        yield "train.float8=true needs a GPU, but run.device=cpu; use train.float8=false"
    if dtype == "fp32":
        yield "train.float8=true with model.dtype=fp32; use bf16 or auto"


def _find_float8_conflicts(train: TrainConfig, tune: TuneConfig) -> Iterator[str]:
    if train.float8 and tune.modules_to_save:
        yield (
            "train.float8=true with tune.modules_to_save: these are trained in tune.param_dtype; "
            "leave one of them out"
        )
    if train.float8 and tune.base_dtype:
        yield (
            f"train.float8=true with tune.base_dtype={tune.base_dtype}: the frozen base is "
            "multiplied in float8 already; leave train.float8 out"
        )


def _find_compile_conflicts(train: TrainConfig, tune: TuneConfig) -> Iterator[str]:
    for name, value in tune.router_loss_factors.items() if train.compiles else ():
        yield (
            f"{name}={value:g} with train.compile=true is not available: routers cannot be watched "
            "in a compiled block; use one of them"
        )


def _check_objective(tune: TuneConfig, data: DataConfig) -> Iterator[str]:
    for name, value in tune.unused_coefficients.items():
        yield (
            f"tune.{name}={value:g} has no effect with tune.objective={tune.objective}; leave it "
            "out"
        )
    if tune.objective == "sft":
        return
    if data.loss_on == "all":
        yield (
            f"data.loss_on=all with tune.objective={tune.objective}: preferences compare "
            "answers; leave it out"
        )
    noise = {"dropout": tune.dropout, "neftune_alpha": tune.neftune_alpha or 0.0}
    for name, value in noise.items() if tune.has_reference else ():
        if value:
            yield (
                f"tune.{name}={value:g} with tune.objective={tune.objective}: the model is "
                "compared with its own start, computed without noise; leave it out"
            )


def _check_tune(tune: TuneConfig) -> Iterator[str]:
    if tune.base_dtype and tune.method == "qlora":
        yield (
            f"tune.base_dtype={tune.base_dtype} with tune.method=qlora, whose base is in 4 bits; "
            "use tune.method=lora or dora, or leave base_dtype out"
        )
    if tune.base_dtype and tune.method == "full":
        yield (
            f"tune.base_dtype={tune.base_dtype} has no effect with tune.method=full, which has no "
            "frozen base; leave it out"
        )
    if tune.method != "full":
        if not tune.targets:
            yield "tune.targets=[] names no layer; name some, or leave it out for all linear layers"
        return
    for name in (
        *("dropout", "modules_to_save", "trainable_tokens", "rank_pattern", "alpha_pattern"),
        *("expert_rank", "rslora", "targets"),
    ):
        if getattr(tune, name) != TuneConfig.model_fields[name].default:
            yield f"tune.{name} has no effect with tune.method=full; leave it out"
    if tune.init_from:
        yield (
            "tune.init_from names an adapter, but tune.method=full has none; name the weights to "
            "start from in model.path"
        )


def _check_optim(optim: OptimConfig, method: str) -> Iterator[str]:
    if optim.lora_b_ratio != 1 and method == "full":
        yield (
            f"optim.lora_b_ratio={optim.lora_b_ratio:g} has no effect with tune.method=full; leave "
            "it out"
        )
    if optim.warmup_steps is not None and optim.warmup_ratio is not None:
        yield (
            f"optim.warmup_steps={optim.warmup_steps} and optim.warmup_ratio="
            f"{optim.warmup_ratio:g} both set the warmup; leave one of them out"
        )
    for name, schedule in (("decay_ratio", "wsd"), ("restarts", "cosine_with_restarts")):
        if (value := getattr(optim, name)) is not None and optim.schedule != schedule:
            yield f"optim.{name}={value:g} has no effect without optim.schedule={schedule}"
    if (optim.decay_ratio or 0) + (optim.warmup_ratio or 0) > 1:
        yield (
            f"optim.warmup_ratio={optim.warmup_ratio:g} and optim.decay_ratio="
            f"{optim.decay_ratio:g} add up to more than all steps; lower one of them"
        )
    if optim.batch_scaling != "sqrt" and optim.reference_batch is None:
        yield (
            f"optim.batch_scaling={optim.batch_scaling} has no effect without optim.reference_batch"
        )


def _find_adamw_8bit_conflicts(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a problem for each setting that conflicts with optim.name=adamw_8bit."""
    if parallel.zero_stage is not None:
        yield (
            f"optim.name=adamw_8bit with parallel.zero_stage={parallel.zero_stage}: ZeRO keeps its "
            "own state in fp32; use parallel.shard, or optim.name=adamw"
        )
    if parallel.zero_stage is None and parallel.offload_params == "cpu":
        yield (
            "optim.name=adamw_8bit with parallel.offload_params=cpu: a CPU takes about 100 times "
            "as long to quantize as to update; leave one of them out"
        )


def _check_data(data: DataConfig, train: TrainConfig) -> Iterator[str]:
    if not data.has_held_out_data:
        for name in ("eval_every_steps", "stop_after_evals"):
            if getattr(train, name) is not None:
                yield (
                    f"train.{name} needs data.eval_path, data.eval_fraction or data.eval_sources"
                )
    if train.stop_after_evals is not None and train.eval_every_steps is None:
        yield f"train.stop_after_evals={train.stop_after_evals} needs train.eval_every_steps"
    yield from _check_sources(data)
    yield from _check_held_out_data(data)
    yield from check_template_names(data)
    paths = [data.path, data.eval_path, *(source.path for source in data.sources or [])]
    paths += [source.path for source in data.eval_sources or []]
    if all(is_prepared(path) for path in paths if path):
        for name, is_set in (("columns", data.columns), ("bad_rows", data.bad_rows != "refuse")):
            if is_set:
                yield f"data.{name} has no effect on prepared data; leave it out"


def _check_sources(data: DataConfig) -> Iterator[str]:
    for name, path in (("path", data.path), ("eval_path", data.eval_path)):
        if path == []:
            yield f"data.{name} is an empty list; name at least one file"
    if data.sources is None:
        if data.path is None:
            yield "data.path=null, and there are no data.sources: name the data to train on"
    elif data.path is not None:
        yield (
            f"data.path={data.path} and data.sources both name the training data; leave one of "
            "them out (data.path=null)"
        )
    if data.sources is not None:
        yield from check_sources(data.sources)
    if data.eval_sources is not None:
        yield from check_source_names("data.eval_sources", data.eval_sources)
    for name in ("sources", "eval_sources"):
        for source in getattr(data, name) or []:
            if is_prepared(source.path) and source.columns:
                yield (
                    f"data.{name}: columns of {source.label} has no effect on prepared data; "
                    "leave it out"
                )
    if data.new_mixture and not any(source.weight for source in data.sources or []):
        yield "data.new_mixture=true has no effect without weights in data.sources; leave it out"


def _check_held_out_data(data: DataConfig) -> Iterator[str]:
    if data.eval_sources is not None and not data.eval_sources:
        yield "data.eval_sources is an empty list; name at least one source, or leave it out"
    settings = {
        f"data.eval_path={data.eval_path}": data.eval_path,
        f"data.eval_fraction={data.eval_fraction:g}": data.eval_fraction,
        "data.eval_sources": data.eval_sources,
    }
    names = [setting for setting, is_set in settings.items() if is_set]
    if len(names) > 1:
        yield (
            f"{' and '.join(reversed(names))} {'both' if len(names) == 2 else 'all'} say what is "
            "held out; leave one of them out (data.eval_path=null)"
        )
    for path in (data.path, *(source.path for source in data.sources or [])):
        if is_prepared(path) and data.eval_fraction:
            yield (
                f"data.eval_fraction={data.eval_fraction:g} splits raw data, and {path} is "
                "prepared; give it to `prepare`, which writes two files, and set data.eval_path"
                f"{' or data.eval_sources' if data.sources else ''}"
            )


def _check_time_limit(job: JobConfig) -> Iterator[str]:
    time_limit_s, name = job.time_limit_s, f"{job.section}.{job.time_field}"
    if time_limit_s is not None and time_limit_s <= job.leave_before:
        yield (
            f"{name}={getattr(job, job.time_field)} is {format_seconds(time_limit_s)} to "
            f"{job.scheduler}, and the run stops {job.section}.leave_before="
            f"{format_seconds(job.leave_before)} before that; write hours as HH:MM:SS, or lower "
            f"{job.section}.leave_before"
        )
