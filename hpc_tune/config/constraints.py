"""Settings that are each valid and cannot be together, or would do nothing."""

from hpc_tune.config.schema import RunConfig, is_prepared


def check(config: RunConfig) -> list[str]:
    """Return what is wrong with a configuration whose fields are each valid."""
    problems = _zero_problems(config)
    if config.parallel.layout == "auto" and config.parallel.zero_stage is not None:
        problems.append(
            f"parallel.layout=auto with parallel.zero_stage={config.parallel.zero_stage}: "
            "DeepSpeed lays out by itself; leave one of them out"
        )
    stages = config.parallel.stages_per_rank
    if stages > 1 and (config.parallel.pipeline or 1) == 1:
        problems.append(
            f"parallel.stages_per_rank={stages} has no effect without parallel.pipeline > 1"
        )
    if config.parallel.reduce_dtype != "fp32" and config.tune.method != "full":
        problems.append(
            f"parallel.reduce_dtype={config.parallel.reduce_dtype} has no effect without "
            "tune.method=full: adapters' gradients are added up in fp32"
        )
    if (config.parallel.tensor or 1) > 1 and config.tune.method == "dora":
        problems.append(
            "tune.method=dora with parallel.tensor > 1: its norms span the split weights; "
            "use lora, or parallel.shard"
        )
    if (config.parallel.tensor or 1) > 1 and config.tune.method == "qlora":
        problems.append(
            "tune.method=qlora with parallel.tensor > 1: packed 4-bit weights are not split along "
            "heads; use parallel.shard or parallel.pipeline, or tune.method=lora"
        )
    problems += _float8_problems(config) if config.train.float8 else []
    if config.train.compile and (config.parallel.tensor or 1) > 1:
        problems.append(
            "train.compile=true with parallel.tensor > 1 is not available in hpc_tune yet; "
            "use one of them"
        )
    if config.tune.method == "full" and config.tune.dropout:
        problems.append("tune.dropout has no effect with tune.method=full; leave it out")
    if config.tune.method == "full" and config.tune.init_from:
        problems.append(
            "tune.init_from names an adapter and tune.method=full has none; name the weights to "
            "begin with in model.path"
        )
    if config.optim.warmup_steps is not None and config.optim.warmup_ratio is not None:
        problems.append(
            f"optim.warmup_steps={config.optim.warmup_steps} and optim.warmup_ratio="
            f"{config.optim.warmup_ratio:g} say the same twice; leave one of them out"
        )
    if config.optim.batch_scaling != "sqrt" and config.optim.reference_batch is None:
        problems.append(
            f"optim.batch_scaling={config.optim.batch_scaling} has no effect without "
            "optim.reference_batch"
        )
    return problems + _data_problems(config)


def _data_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the data's settings."""
    data, problems = config.data, []
    has_eval = bool(data.eval_path or data.eval_fraction)
    if config.train.eval_every_steps and not has_eval:
        problems.append("train.eval_every_steps needs data.eval_path or data.eval_fraction")
    if data.eval_path and data.eval_fraction:
        problems.append(
            f"data.eval_fraction={data.eval_fraction:g} and data.eval_path={data.eval_path} both "
            "say what is held out; leave one of them out (data.eval_path=null)"
        )
    if is_prepared(data.path) and data.eval_fraction:
        problems.append(
            f"data.eval_fraction={data.eval_fraction:g} splits raw data, and {data.path} is "
            "prepared; give it to `prepare`, which writes two files, and set data.eval_path"
        )
    is_raw = any(path and not is_prepared(path) for path in (data.path, data.eval_path))
    for name, value in (("columns", data.columns), ("bad_rows", data.bad_rows != "refuse")):
        if value and not is_raw:
            problems.append(f"data.{name} has no effect on prepared data; leave it out")
    return problems


def _float8_problems(config: RunConfig) -> list[str]:
    """Return why float8 cannot be, as far as the configuration tells."""
    problems = []
    if config.run.device == "cpu":
        problems.append("train.float8=true needs a GPU, and run.device=cpu; use train.float8=false")
    if config.model.dtype == "fp32":
        problems.append("train.float8=true with model.dtype=fp32; use bf16 or auto")
    if not config.train.compile:
        problems.append(
            "train.float8=true without train.compile=true is slower than bf16, since its casts are "
            "not fused; set train.compile=true"
        )
    if config.tune.method in ("dora", "qlora"):
        problems.append(
            f"train.float8=true with tune.method={config.tune.method}: its products are not plain "
            "ones; use lora or full"
        )
    if (config.parallel.tensor or 1) > 1:
        problems.append("train.float8=true with parallel.tensor > 1 is not available; use one")
    return problems


def _zero_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the DeepSpeed engine's settings."""
    parallel, stage = config.parallel, config.parallel.zero_stage
    offloads = {
        "offload_params": parallel.offload_params,
        "offload_optimizer": parallel.offload_optimizer,
    }
    on_nvme = [name for name, place in offloads.items() if place == "nvme"]
    problems = []
    if stage is None:
        if parallel.engine == "deepspeed":
            problems.append("parallel.engine=deepspeed needs parallel.zero_stage=1, 2 or 3")
        problems += [
            f"parallel.{name}={place} needs parallel.zero_stage (the DeepSpeed engine)"
            for name, place in offloads.items()
            if place == "nvme" or (place == "cpu" and name == "offload_optimizer")
        ]
    else:
        if parallel.engine == "native":
            problems.append(
                f"parallel.zero_stage={stage} is DeepSpeed's; use parallel.engine=deepspeed, or "
                "leave zero_stage out"
            )
        problems += [
            f"parallel.{axis}={value} with parallel.zero_stage={stage}: ZeRO splits over all "
            f"ranks; leave {axis} out"
            for axis in ("replicate", "shard", "tensor", "pipeline")
            if (value := getattr(parallel, axis)) is not None
            and (axis in ("replicate", "shard") or value > 1)
        ]
        problems += [
            f"parallel.{name}={value} has no effect with parallel.zero_stage; leave it out"
            for name, default in (
                ("reshard", "auto"),
                ("blocks_per_unit", 1),
                ("reduce_dtype", "fp32"),
            )
            if (value := getattr(parallel, name)) != default
        ]
        if config.tune.method == "dora" and stage == 3:
            problems.append(
                "tune.method=dora with parallel.zero_stage=3: DoRA needs whole base weights for "
                "their norms; use zero_stage 1 or 2"
            )
        if config.tune.method == "qlora" and stage == 3:
            problems.append(
                "tune.method=qlora with parallel.zero_stage=3: DeepSpeed would split the packed "
                "4-bit codes; use zero_stage 1 or 2, or parallel.shard"
            )
        if config.train.compile and stage == 3:
            problems.append(
                "train.compile=true with parallel.zero_stage=3: DeepSpeed gathers weights inside "
                "of the blocks that would be compiled; use zero_stage 1 or 2, or parallel.shard"
            )
        if config.train.float8:
            problems.append(
                "train.float8=true with parallel.zero_stage is not available; use parallel.shard"
            )
        if config.tune.param_dtype != "fp32":
            problems.append(
                "tune.param_dtype=bf16 with parallel.zero_stage: ZeRO keeps trained weights in "
                "fp32; leave one of them out"
            )
        if parallel.offload_params != "none" and stage < 3:
            problems.append(
                f"parallel.offload_params={parallel.offload_params} needs parallel.zero_stage=3: "
                f"stage {stage} keeps all weights on each device"
            )
        if parallel.offload_optimizer == "nvme" and stage < 3:
            problems.append("parallel.offload_optimizer=nvme needs parallel.zero_stage=3; use cpu")
    if on_nvme and stage is not None and parallel.offload_path is None:
        problems.append(
            f"parallel.{on_nvme[0]}=nvme needs parallel.offload_path, a folder on a disk of the "
            "node itself"
        )
    if parallel.offload_path is not None and not on_nvme:
        problems.append(
            "parallel.offload_path has no effect without parallel.offload_params=nvme or "
            "parallel.offload_optimizer=nvme"
        )
    return problems
