"""Builds a run's model on the meta device, checks what it supports, and resolves its layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.engine.adamw_8bit import require_torchao
from hpc_tune.engine.row_pieces import has_mlps
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.log import LOG_ON_RANK_0_ONLY, log
from hpc_tune.model import grouped_matmul
from hpc_tune.model.adapters import ALL_LINEAR_TARGET
from hpc_tune.model.balance import list_routers
from hpc_tune.model.build import BuiltModel, build, resolve_dtype
from hpc_tune.model.builtin import BUILTIN_TINY_MODEL, write_tiny_model
from hpc_tune.model.config_json import config_enables_router_loss, refuse_weightless_shape
from hpc_tune.model.experts import is_mixture_of_experts, require_shardable_experts
from hpc_tune.model.kernels import Kernels, choose_model_kernels, explain_expert_loop
from hpc_tune.model.language import explain_too_long_texts, read_config
from hpc_tune.model.layers import find_unreplaceable_linears
from hpc_tune.model.load import use_init_adapter
from hpc_tune.model.quantized_base import unpacked_stack_bytes
from hpc_tune.model.rotary import has_length_dependent_scaling
from hpc_tune.model.weights import ADAPTER_FILE
from hpc_tune.plan.hardware import detect_machine
from hpc_tune.plan.resolve import (
    ResolvedLayout,
    kv_gathering_warnings,
    list_useless_settings,
    resolve,
    resolve_row_pieces,
)
from hpc_tune.step.size import ModelSize, measure_model_size
from hpc_tune.train.job import Job
from hpc_tune.train.startup.architecture_check import (
    ArchitectureCheck,
    check_architecture_cached,
    wildcard_name,
)
from hpc_tune.train.startup.compile_trial import resolve_auto_compile
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

_MAX_MASKED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Model:
    """The model on the meta device, its size, and the settings it supports.

    ``config`` has data.packing off if the model cannot keep packed documents apart.
    ``weights_fingerprint`` distinguishes weights of the same shapes (model/weights.py).
    """

    built: BuiltModel
    size: ModelSize
    config: RunConfig
    weights_fingerprint: str = ""

    def choose_kernels(self, device: torch.device) -> Kernels:
        """Return the kernels that compute the decoder blocks on ``device``."""
        built, module = self.built, self.built.module
        needs_mask = not module.uses_document_attention or module.needs_mask
        reason = f"{built.config.model_type} models need it" if needs_mask else ""
        tune, train = self.config.tune, self.config.train
        kernels = choose_model_kernels(built.config, built.dtype, train.compiles, device, reason)
        slow_reason = ""
        if is_mixture_of_experts(built.module) and device.type == "cuda":
            slow_reason = grouped_matmul.grouped_kernel_fault(device, built.dtype)
            slow_reason = slow_reason or explain_expert_loop(built.dtype, device)
        return replace(
            kernels, lora=None if tune.method == "full" else "own", expert_loop_reason=slow_reason
        )

    def refuse_too_long_masked_rows(self, device: torch.device) -> None:
        """Refuse rows so long that a GPU would silently read their masks at wrong offsets.

        torch's memory-efficient attention computes the offset of a token's mask in 32 bits.
        """
        seq_len, cap = self.config.data.seq_len, _MAX_MASKED_TOKENS
        if (
            device.type == "cuda"
            and seq_len > cap
            and (why := self.choose_kernels(device).mask_reason)
        ):
            raise ConfigError(
                f"data.seq_len={seq_len}: attention has a mask of tokens x tokens here ({why}), "
                f"and torch's attention on GPUs is wrong if it has more than {cap} x {cap}; set "
                f"data.seq_len to at most {cap}"
            )


def build_model(job: Job, is_fresh: bool) -> Model:
    """Build the model on the meta device. Collective. The adapter tune.init_from is used if the run
    ``is_fresh``, or if the adapter is the reference.

    Raises:
        ConfigError: if the model does not support the settings.
        DataError: if this kind of model would be trained incorrectly.
    """
    config, comm = job.config, job.setup_comm
    model_dir = prepare_model_dir(config.model.path, comm, job.dir)
    dtype = resolve_dtype(config.model.dtype, comm.device)

    def make_built_model() -> BuiltModel:
        if config.optim.is_8bit:
            require_torchao()
        built = build(
            *(model_dir, dtype, config.tune, config.train.seed),
            rope_scaling=config.model.rope_scaling,
        )
        start = config.tune.init_from
        is_first = is_fresh or config.tune.has_reference  # the initial adapter is the reference
        built = replace(built, seq_len=config.data.seq_len)
        return use_init_adapter(built, Path(start)) if start and is_first else built

    built = comm.run_and_agree("building the model", make_built_model)
    _log_ignored_parts(built)
    if config.tune.form != "pairs":
        _log_fit_of_positions(
            built, config.data.seq_len, f"data.seq_len={config.data.seq_len} tokens"
        )
    kind = built.config.model_type
    proof = comm.run_on_rank_0(
        "trying the architecture",
        lambda: check_architecture_cached(
            read_config(built.directory, built.rope_scaling), config.tune
        ),
    )
    if proof.loss:
        raise DataError(
            f"{config.model.path}: a {kind} model would be trained incorrectly: {proof.loss}"
        )
    _require_supported_settings(proof, kind, config.parallel, config.tune)
    _require_trained_targets(built, proof)
    _refuse_split_tied_embedding(built, config.parallel)
    if proof.attention or (proof.kernel and comm.device.type == "cuda"):
        built.module.uses_document_attention = False
    if config.data.packing and proof.packing:
        log.warning(
            "data.packing is off, one document per row, since for a %s model %s",
            *(kind, proof.packing),
            extra=LOG_ON_RANK_0_ONLY,
        )
        data = config.data.model_copy(update={"packing": False})
        config = config.model_copy(update={"data": data})
    sample = comm.run_on_rank_0("looking at the model's weights", lambda: built.weights_fingerprint)
    config = config.model_copy(update={"train": resolve_auto_compile(job, built)})
    built = _with_router_watch(built, proof, config.train.compiles)
    model = Model(built, measure_model_size(built.module, config.optim.is_8bit), config, sample)
    model.refuse_too_long_masked_rows(comm.device)
    return model


def with_scaled_positions(model: Model, sources: Sequence[TokenStore], comm: Comm) -> Model:
    """Return the model with its positions scaled for the longest text in the training data.

    Only for pairs, whose rows hold two texts; any other text may be as long as a row. Collective.
    """
    if model.config.tune.form != "pairs":
        return model
    longest = comm.run_on_rank_0(
        "looking at the pairs", lambda: max(store.longest_side_tokens() for store in sources)
    )
    _log_fit_of_positions(
        model.built, longest, f"{longest} tokens, the longest answer with its prompt,"
    )
    return replace(model, built=replace(model.built, seq_len=longest))


def _log_fit_of_positions(built: BuiltModel, max_tokens: int, text_description: str) -> None:
    """Log how a model's positions fit texts of ``max_tokens``, named by ``text_description``."""
    too_long = explain_too_long_texts(
        built.config, built.directory, built.rope_scaling, max_tokens, text_description
    )
    if too_long:
        log.warning("%s", too_long, extra=LOG_ON_RANK_0_ONLY)
    if has_length_dependent_scaling(built.config):
        log.info("rotary positions are scaled for texts of %s", text_description)


def _log_ignored_parts(built: BuiltModel) -> None:
    if built.dropout:
        log.warning(
            "the model's own dropout and noise are off (%s in its config.json): they would differ "
            "with the number of ranks; tune.dropout is for adapters",
            ", ".join(f"{name}={value:g}" for name, value in sorted(built.dropout.items())),
            extra=LOG_ON_RANK_0_ONLY,
        )
    if config_enables_router_loss(built.directory) and not built.tune.router_loss_factors:
        log.warning(
            "config.json asks for a loss of the routers (output_router_logits), as left there by "
            "tools that train with one; hpc_tune instead reads tune.router_aux_loss, which is not "
            "set: no such loss is used",
            extra=LOG_ON_RANK_0_ONLY,
        )
    special = sorted({path.rpartition(".")[2] for path in find_unreplaceable_linears(built.module)})
    notes = ["have no adapters"] if ALL_LINEAR_TARGET in built.tune.targets else []
    notes += [f"are not in {packing}"] if (packing := built.tune.base_format) else []
    if special and notes and built.tune.method != "full":
        log.info(
            "%s %s: the model does not call them as linear layers",
            *(", ".join(special), " and ".join(notes)),
        )
    if built.unused_parts:
        log.info("ignored in the model's files: %s", ", ".join(built.unused_parts))


def _require_supported_settings(
    check: ArchitectureCheck, model_type: str, parallel: ParallelConfig, tune: TuneConfig
) -> None:
    """Refuse a layout or a method for which the trial of the architecture failed."""
    for setting, size, fault, remedy in (
        ("pipeline", parallel.pipeline, check.pipeline, "use parallel.shard"),
        ("tensor", parallel.tensor, check.tensor, "use parallel.shard"),
        ("context", parallel.context, check.context, "leave it out"),
    ):
        if (size or 1) > 1 and fault:
            raise ConfigError(
                f"parallel.{setting}={size}: a {model_type} model would be trained incorrectly: "
                f"{fault}; {remedy}"
            )
    if check.adapters and tune.base_format:
        option, remedy = "tune.method=qlora", "use tune.method=lora"
        if tune.base_dtype:
            option, remedy = f"tune.base_dtype={tune.base_dtype}", "leave it out"
        raise ConfigError(
            f"{option}: a {model_type} model's base cannot be in {tune.base_format}: "
            f"{check.adapters}; {remedy}"
        )
    if check.adapters:
        raise ConfigError(
            f"tune.method={tune.method} with tune.targets={tune.targets}: a {model_type} model "
            f"cannot have such adapters: {check.adapters}; use other targets, or tune.method=full"
        )


def _require_trained_targets(built: BuiltModel, check: ArchitectureCheck) -> None:
    """Refuse named targets whose adapters get no gradient; warn of other parts without one."""
    part_names = {wildcard_name(saved_name) for saved_name in built.saved_names.values()}
    untrained = [part for part in check.untrained.splitlines() if part in part_names]
    if not untrained:
        return
    tune, kind = built.tune, built.config.model_type
    if tune.method == "full":
        text = "these tensors get no gradient and stay as they are: %s"
        log.warning(text, ", ".join(untrained), extra=LOG_ON_RANK_0_ONLY)
        return
    targets = [] if isinstance(tune.targets, str) else tune.targets
    names = [t for t in targets if any(f".{part}".endswith(f".{t}") for part in untrained)]
    note = (
        f"adapters on {', '.join(untrained)} get no gradient: a {kind} model does not call these "
        "layers, or only reads their weights"
    )
    if names:
        raise ConfigError(f"tune.targets={tune.targets}: {note}; leave {', '.join(names)} out")
    log.warning("tune.targets=%s: %s; they stay zero", tune.targets, note, extra=LOG_ON_RANK_0_ONLY)


def _with_router_watch(
    built: BuiltModel, check: ArchitectureCheck, is_compiled: bool
) -> BuiltModel:
    """Return the model with its routers and their score function, if they can be watched.

    Warn if they cannot, and of experts that a packed base leaves unpacked.

    Raises:
        ConfigError: if router losses are set, but the routers cannot be watched.
    """
    kind, losses = built.config.model_type, built.tune.router_loss_factors
    _warn_unpacked_experts(built)
    if not is_mixture_of_experts(built.module):
        why = f"a {kind} model has no experts"
    elif not check.score:
        why = f"hpc_tune does not understand how the routers of a {kind} model choose experts"
    elif is_compiled:
        why = "train.compile=true: routers cannot be watched in a compiled block"
    else:
        routers = list_routers(built.module)
        return replace(built, routers=routers, router_score=check.score)
    if losses:
        raise ConfigError(
            f"{' and '.join(f'{name}={value:g}' for name, value in losses.items())}: {why}; leave "
            f"{'it' if len(losses) == 1 else 'them'} out"
        )
    if is_mixture_of_experts(built.module):
        log.warning("the tokens of each expert are not counted: %s", why, extra=LOG_ON_RANK_0_ONLY)
    return built


def _warn_unpacked_experts(built: BuiltModel) -> None:
    packing = built.tune.base_format
    if packing and (unpacked_bytes := unpacked_stack_bytes(built.module)):
        log.warning(
            "the routed experts of a %s model, %s, are not in %s: the model computes them with "
            "its own code",
            built.config.model_type,
            format_bytes(unpacked_bytes),
            packing,
            extra=LOG_ON_RANK_0_ONLY,
        )


def _refuse_split_tied_embedding(built: BuiltModel, parallel: ParallelConfig) -> None:
    """Refuse layouts in which a rank has a tied output head without the trained rows it needs."""
    axis_sizes = {name: getattr(parallel, name) or 1 for name in ("tensor", "pipeline")}
    options = [f"parallel.{name}={size}" for name, size in axis_sizes.items() if size > 1]
    options += ["parallel.zero_stage=3"] if parallel.zero_stage == 3 else []
    if options and built.tokens and built.tied_name:
        raise ConfigError(
            f"tune.trainable_tokens with {' and '.join(options)}: the output head of this model is "
            "its embedding, and reads the trained rows as well, but not every rank has these rows; "
            "use parallel.shard or replicate, or zero_stage 1 or 2"
        )


def prepare_model_dir(path: str, comm: Comm, run_dir: Path) -> Path:
    """Return the model's directory; builtin:tiny is written into the run directory first."""
    refuse_weightless_shape(path)
    if path != BUILTIN_TINY_MODEL:
        _refuse_adapter(Path(path))
        return Path(path)
    directory = run_dir / "builtin-tiny"
    comm.run_on_rank_0("writing builtin:tiny", lambda: write_tiny_model(directory))
    return directory


def _refuse_adapter(directory: Path) -> None:
    """Refuse a model folder that also holds an adapter, which transformers would apply."""
    if (directory / ADAPTER_FILE).is_file() and (directory / "adapter_config.json").is_file():
        raise DataError(
            f"model.path={directory}: an adapter is in the folder too ({ADAPTER_FILE}), which "
            "transformers applies to the model that it loads. Move adapter_config.json and "
            f"{ADAPTER_FILE} elsewhere to train without the adapter, or merge it with peft"
        )


def resolve_layout(job: Job, model: Model) -> ResolvedLayout:
    """Resolve the layout for the machine that the ranks run on. Collective.

    Raises:
        ConfigError: if the product of the axes that are set is not the world size, or the model
            does not support the layout.
    """
    config, comm = model.config, job.setup_comm
    sections, module = (config.parallel, config.tune, config.train), model.built.module
    parallel = resolve_row_pieces(*sections, config.data.seq_len, module)
    machine = detect_machine(comm, job.monitor.limit.num_bytes)
    resolved = resolve(
        parallel, model.size, model.built.config, machine, comm.world.size, comm.world.rank
    )
    require_shardable_experts(module, resolved.layout.expert)
    if comm.is_rank_0:
        on_gpu = comm.device.type == "cuda"
        useless = list_useless_settings(resolved.layout, parallel, on_gpu)
        for warning in (*useless, *kv_gathering_warnings(model.built.config, resolved.layout)):
            log.warning(warning)
        if resolved.parallel.row_pieces != 1 and has_mlps(module):
            log.info("MLPs are computed in %s pieces of a row", resolved.parallel.row_pieces)
    if job.candidate is None:
        return resolved
    seconds = job.candidate.time.seconds
    return replace(resolved, reason=f"the shortest step by prediction, {seconds:.3g} s")
