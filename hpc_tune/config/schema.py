"""The configuration: each field with its unit, the reason for its default and its trade-off.

The values are frozen. ``constraints.check_config`` refuses a setting that cannot take effect; it is
never ignored.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_tune.config.data import DataConfig
from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.rope import RopeScaling
from hpc_tune.config.scheduler import JobConfig, PbsConfig, SlurmConfig
from hpc_tune.config.section import (
    Bytes,
    MemoryBytes,
    PositiveInt,
    ProfiledSteps,
    Seconds,
    Section,
    setting,
)
from hpc_tune.config.tune import TuneConfig

STAGING_BYTES = 256 << 20  # checkpoint.staging_bytes=auto on CPUs
_YAML_SWITCH = {True: "on", False: "off"}  # YAML 1.1 reads a plain on and off as booleans


class ModelConfig(Section):
    """Which model is tuned."""

    path: str = setting(
        "builtin:tiny",
        "free",
        "A Hugging Face model directory (config.json, safetensors, tokenizer), or "
        "OWNER/NAME or OWNER/NAME@REVISION in the hub's cache (HF_HUB_CACHE, or hub in "
        "HF_HOME); nothing is downloaded: compute nodes have no internet. builtin:tiny: "
        "a small Llama-shaped model with a byte tokenizer, which needs no download.",
        path="model",
        aliases="model model_name_or_path model_name base_model model_id checkpoint_dir",
    )
    dtype: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        "warn",
        "The dtype of base weights and arithmetic. bf16 takes half the memory of fp32 "
        "and is faster on GPUs, with 2 to 3 digits instead of 7. auto: bf16 on a GPU that "
        "supports it, fp32 on a CPU. Trained weights and their optimizer state are in "
        "tune.param_dtype.",
        aliases="bf16 fp16 bfloat16 float16 torch_dtype",
    )
    rope_scaling: RopeScaling = setting(
        None,
        "same",
        "How rotary positions are stretched to texts longer than the model was trained with, by "
        "the keys of transformers' config.json: rope_type is yarn (arXiv:2309.00071), linear, "
        "dynamic, llama3 or longrope, and it determines the other keys, such as {rope_type: yarn, "
        "factor: 4, original_max_position_embeddings: 32768}. It replaces what config.json says, "
        "and exports contain it. Unset: as config.json says.",
        aliases="rope_parameters overrides_of_model_config.rope_scaling",
    )


class BatchConfig(Section):
    """How much data one optimizer step learns from."""

    global_size: PositiveInt = setting(
        64,
        "same",
        "Rows of data.seq_len tokens per optimizer step, over all ranks. It alone "
        "decides what a step learns from; gradient accumulation follows from it, whatever the "
        "number of ranks. 64 is a common choice; more rows give a less noisy gradient and fewer "
        "steps per epoch.",
        aliases="batch_size gradient_accumulation_steps train_batch_size",
    )
    micro_size: PositiveInt | Literal["auto"] = setting(
        "auto",
        "free",
        "Rows per forward pass on one rank. It changes memory and speed, not the "
        "gradient. auto: the largest that fits into memory, which is the fastest.",
        aliases="micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    )


class MemoryConfig(Section):
    """The memory governor."""

    governor: Annotated[
        Literal["on", "observe", "off"],
        BeforeValidator(lambda v: _YAML_SWITCH[v] if isinstance(v, bool) else v),
    ] = setting(
        "on",
        "free",
        "on: act before the host runs out of memory and when a device does, first with what "
        "costs nothing, such as freeing caches, then with smaller micro-batches, recomputed "
        "activations, and last with a checkpoint and a stop; observe: only measure memory and "
        "report it; off: do not measure.",
    )
    host_limit: MemoryBytes | None = setting(
        None,
        "free",
        "Bytes of host memory that this job may use on a node, such as 64GiB. Unset: "
        "the limit of the job's cgroup, or else of the machine.",
    )


def _require_distinct_names(names: str | None) -> str | None:
    interfaces = [name.strip() for name in (names or "").split(",")]
    if duplicates := sorted({name for name in interfaces if interfaces.count(name) > 1}):
        raise ValueError(f"named more than once: {', '.join(duplicates)}; name each interface once")
    return names


class TrainConfig(Section):
    """How long the run trains, and how."""

    max_steps: PositiveInt | None = setting(
        None,
        "free",
        "Optimizer steps of the run. Unset: as many as train.epochs takes.",
        aliases="steps max_steps_per_epoch",
    )
    epochs: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "free",
        "Passes over the data, if max_steps is unset. If both are unset: one. Many passes "
        "overfit, which the held-out loss shows.",
        replaces="train.max_steps",
        aliases="num_epochs num_train_epochs",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = setting(
        0,
        "same",
        "The seed of the order of samples, of new adapters and of dropout; the order "
        "is the same on any number of ranks.",
        aliases="data_seed",
    )
    deterministic: bool = setting(
        False,
        "free",
        "Use only kernels that give the same bits each time: slower on GPUs, free on "
        "CPUs. false: the fastest ones, whose last digits may differ from run to run.",
        aliases="full_determinism",
    )
    tf32: bool = setting(
        True,
        "free",
        "On GPUs that support it (compute capability 8.0 or later), run the matmuls "
        "of an fp32 model in TF32: faster, with 3 digits of each factor instead of 7. Weights "
        "and sums stay in fp32. false, or train.deterministic=true: all digits, to compare with a "
        "run on CPUs.",
    )
    compile: bool | Literal["auto"] = setting(
        "auto",
        "free",
        "Compile one decoder block with torch.compile and reuse it for all: faster "
        "steps on GPUs after a minute of compiling; on CPUs hpc_tune's own layers may be as fast. "
        "It needs a C++ compiler. The losses are the same; tune.dropout draws other numbers, and "
        "on GPUs needs a torch before 2.13. auto: on GPUs, if all other settings allow it, the "
        "run has more than 50 steps, and a small compiled model of the same kind gives the losses "
        "and gradients of an uncompiled one; else the start of the run says why not.",
        aliases="torch_compile",
    )
    float8: bool = setting(
        False,
        "free",
        "Run the matmuls with base weights in float8 inside the decoder blocks: faster, with "
        "about two digits in each product. It needs a GPU of compute capability 8.9 or later, "
        "or AMD's MI300 or later, train.compile=true and pip install 'hpc_tune[float8]'.",
    )
    eval_every_steps: PositiveInt | None = setting(
        None,
        "free",
        "Optimizer steps between evaluations on the held-out data. Unset: only at the "
        "start and at the end, which costs the least time.",
        aliases="eval_steps run_val_every_n_steps eval_strategy",
    )
    eval_rows: PositiveInt | None = setting(
        None,
        "free",
        "Rows of held-out data in each evaluation; fewer rows are faster and give a noisier "
        "loss. Unset: all.",
    )
    stop_after_evals: PositiveInt | None = setting(
        None,
        "free",
        "Stop the run after this many evaluations in a row whose held-out loss is not below "
        "the lowest so far, including that at the start. This saves steps that overfit, and the "
        "run ends before optim.schedule has lowered the rate; with checkpoint.keep_best the best "
        "checkpoint is kept. Unset: all steps are done.",
        aliases="early_stopping_patience early_stopping_steps",
    )
    time_limit: Seconds | None = setting(
        None,
        "free",
        "The time, in seconds or as 3.5h, within which the run saves a checkpoint and "
        "stops with exit code 75. Unset: no limit; under Slurm the run knows when the job ends "
        "without it.",
    )
    profile: ProfiledSteps | None = setting(
        None,
        "free",
        "STEP:COUNT: write torch profiler traces of COUNT optimizer steps of each "
        "rank, from STEP on, and a table of where their time went, into profile/ of the run "
        "directory. The profiled steps are slower, the losses the same. Unset: none.",
    )

    @property
    def compiles(self) -> bool:
        """Whether decoder blocks are compiled; False while train.compile is still auto."""
        return self.compile is True

    @property
    def profiled_steps(self) -> range:
        """The optimizer steps, counted from 1, that profile names."""
        if self.profile is None:
            return range(0)
        first, count = map(int, self.profile.split(":"))
        return range(first, first + count)


class CheckpointConfig(Section):
    """When checkpoints are written, how many are kept, and from which one a run resumes."""

    every_steps: PositiveInt | None = setting(
        None,
        "free",
        "Optimizer steps between checkpoints. Unset: every_minutes alone decides, "
        "since steps may take a second or an hour.",
        aliases="save_steps save_every_n_steps",
    )
    every_minutes: Annotated[float, Field(gt=0)] | Literal["auto"] | None = setting(
        30.0,
        "free",
        "Minutes between checkpoints: what a crash can cost. Fewer minutes cost more writing. "
        "After each start, the first checkpoint comes within 5 minutes. auto: 5 to 120, by what "
        "saves and failures of this run have cost so far; null: only every_steps decides.",
    )
    keep: PositiveInt = setting(
        2,
        "free",
        "How many of the newest checkpoints are kept; older ones are removed after a "
        "save. With 2 there is another one if the newest turns out to be damaged; each takes disk "
        "space.",
        aliases="save_total_limit keep_last_n_checkpoints",
    )
    keep_every: PositiveInt | None = setting(
        None,
        "free",
        "Also keep the checkpoints whose step is a multiple of this number. Unset: none, "
        "which saves disk space.",
    )
    keep_best: bool = setting(
        False,
        "free",
        "Also keep the checkpoint with the lowest held-out loss (with several held-out "
        "sources, their mean) among those saved right after an evaluation; it takes the disk "
        "space of one more.",
        aliases="load_best_model_at_end",
    )
    background: bool = setting(
        True,
        "free",
        "Write checkpoints while training continues: only the next update of the "
        "weights waits, until they have been read. false: training waits until the checkpoint is "
        "committed.",
    )
    staging_bytes: Bytes | Literal["auto"] = setting(
        "auto",
        "free",
        "Bytes of host memory per rank for copies of what is not yet written when the "
        "next update is due. With more memory the update waits less; on a GPU it waits for "
        "nothing but the copies if they hold all that the rank writes, in pinned memory that is "
        "kept for the next save while there is room. auto: on a GPU enough for all, if the memory "
        "governor finds room for it; else 256 MiB.",
    )
    required: bool = setting(
        True,
        "free",
        "true: a checkpoint that cannot be written ends the run, before more work is lost. "
        "false: it is a warning, and training continues.",
    )
    resume: str = setting(
        "auto",
        "free",
        "auto: resume from the newest valid checkpoint of the run directory, "
        "or start afresh if there is none; none: start afresh, refused if there are "
        "checkpoints; else the path of a checkpoint to start from. In all cases, rerunning the "
        "same command resumes from what the run itself has saved.",
        path="file",
        aliases="resume_from_checkpoint auto_resume_from_checkpoints",
    )


class RunSettings(Section):
    """Where the run writes, and how its ranks reach each other."""

    dir: str = setting(
        "runs/default",
        "free",
        "The run directory, for checkpoints, metrics and the report, on a file system "
        "that all nodes share.",
        path="file",
        aliases="output_dir",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "free",
        "Where the model is computed; cuda: GPUs of NVIDIA or AMD. auto: cuda if torch "
        "finds a GPU, else cpu, which is refused if the job was granted GPUs.",
        aliases="use_cpu",
    )
    threads: PositiveInt | Literal["auto"] = setting(
        "auto",
        "free",
        "CPU threads per rank. auto: the rank's share of the cores it may run on; with "
        "more, ranks compete for cores.",
    )
    interface: Annotated[
        str | None,
        BeforeValidator(lambda v: ",".join(map(str, v)) if isinstance(v, list) else v),
        AfterValidator(_require_distinct_names),
    ] = setting(
        None,
        "free",
        "The network interface to prefer for rendezvous and CPU collectives, such as "
        "ib0, or several, such as [hsn0, hsn1]: then the first one, and all of them for NCCL if "
        "it uses TCP. Unset: the one that leads to rank 0's host; set it if that one is slow.",
    )
    timeout: Seconds = setting(
        1800.0,
        "free",
        "Seconds after which the job ends if a rank does not join a collective, or neither "
        "reads nor computes while the others wait for it. The rank is named, and the backends' "
        "own limit is a minute later. A suspended job continues afterwards. Half an hour is "
        "longer than slow file systems take; a lower value ends a job that hangs sooner.",
        aliases="ddp_timeout",
    )
    start_timeout: Seconds | Literal["auto"] = setting(
        "auto",
        "free",
        "Seconds that each part of the start may take before the job ends: all ranks have "
        "started, they have met, and their devices are connected; auto: 300 plus 0.2 per rank. "
        "Imports between the first two parts are not counted, since thousands of ranks take "
        "minutes to read them from a parallel file system; run.timeout limits them.",
    )
    host_timeout: Annotated[Seconds, Field(ge=4)] = setting(
        20.0,
        "free",
        "Seconds of silence after which another host counts as down or cut off and the "
        "job ends, to be started again; slow or busy ranks do not count. Networks recover from "
        "small faults in a few seconds; raise it if yours takes longer.",
    )
    compile_cache: str | None = setting(
        None,
        "free",
        "The folder for code compiled with train.compile=true, which the next start "
        "reuses; jobs of one model may share it. Unset: compile-cache/ in the run directory.",
        path="file",
    )
    name: str | None = setting(
        None,
        "free",
        "The run's name in reports, trackers and model cards. Unset: the run directory's name.",
        aliases="run_name wandb_name",
    )
    tags: list[str] = setting(
        [], "free", "Tags to find the run by in trackers, such as [lora, first-try]."
    )
    notes: str | None = setting(
        None,
        "free",
        "What the run is for, in a sentence or more; trackers and model cards keep it.",
    )
    report: bool = setting(
        True,
        "free",
        "Write report.html at the end, in a separate process that takes a few "
        "seconds. false: none; the report command writes it at any time.",
    )
    tensorboard: bool = setting(
        True,
        "free",
        "Write metrics for TensorBoard into tensorboard/ of the run directory. false: "
        "only if run.trackers has tensorboard.",
    )
    trackers: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow", "trackio"]],
        BeforeValidator(lambda v: re.split(r"\s*,\s*", v.strip()) if isinstance(v, str) else v),
    ] = setting(
        [],
        "free",
        "Where metrics go besides metrics.jsonl, such as [wandb, mlflow]: each tracker writes to "
        "a folder of its name in the run directory, or as its variables say (WANDB_MODE=online; "
        "MLFLOW_TRACKING_URI; TRACKIO_SPACE_ID). All but tensorboard need an extra of their name, "
        "such as pip install 'hpc_tune[wandb]'. A tracker that fails is reported once and dropped.",
        aliases="report_to use_wandb wandb_project use_mlflow",
    )


class RunConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    tune: TuneConfig = TuneConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunSettings = RunSettings()
    slurm: SlurmConfig = SlurmConfig()
    pbs: PbsConfig = PbsConfig()

    @property
    def job(self) -> JobConfig:
        """The section of the job: ``pbs`` if only that one is given, else ``slurm``."""
        return self.pbs if self.pbs.is_given and not self.slurm.is_given else self.slurm

    def with_changes(self, changes: Mapping[str, Any]) -> "RunConfig":
        """Return a copy with other values, by full names such as ``train.seed``."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        parts = {s: getattr(self, s).model_copy(update=v) for s, v in sections.items()}
        return self.model_copy(update=parts)
