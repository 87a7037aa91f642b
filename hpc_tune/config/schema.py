"""The configuration: each field with its unit, the reason for its default and its trade-off.

The values are frozen. A setting that cannot take effect is refused by ``constraints.check``, never
ignored.
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
from hpc_tune.config.section import Bytes, Memory, PositiveInt, Seconds, Section, Steps, setting
from hpc_tune.config.tune import TuneConfig

STAGING_BYTES = 256 << 20  # checkpoint.staging_bytes=auto on CPUs
_YAML_SWITCH = {True: "on", False: "off"}  # YAML 1.1 reads a plain on and off as booleans


class ModelConfig(Section):
    """Which model is tuned."""

    path: str = setting(
        "builtin:tiny",
        "free",
        "A Hugging Face model directory (config.json, safetensors, tokenizer), or "
        "OWNER/NAME or OWNER/NAME@REVISION of what is in the hub's cache (HF_HUB_CACHE, or hub in "
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
        "has it, fp32 on a CPU. Trained weights and their optimizer state have tune.param_dtype.",
        aliases="bf16 fp16 bfloat16 float16 torch_dtype",
    )
    rope_scaling: RopeScaling = setting(
        None,
        "same",
        "How rotary positions are stretched to texts longer than the model was trained with, by "
        "the keys of transformers' config.json: rope_type is yarn (arXiv:2309.00071), linear, "
        "dynamic, llama3 or longrope, and the others follow from it, such as {rope_type: yarn, "
        "factor: 4, original_max_position_embeddings: 32768}. It takes the place of what "
        "config.json says; the exports have it. Unset: as config.json says.",
        aliases="rope_parameters overrides_of_model_config.rope_scaling",
    )


class BatchConfig(Section):
    """How much is learned from in one optimizer step."""

    global_size: PositiveInt = setting(
        64,
        "same",
        "Rows of data.seq_len tokens per optimizer step, over all ranks. It alone "
        "decides what a step learns from; gradient accumulation follows from it, whatever the "
        "number of ranks. 64 is a common choice; more give a less noisy gradient and fewer steps "
        "per epoch.",
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
        "on: act before the host runs out of memory and when a device does, from what "
        "costs nothing, such as freeing caches, to smaller micro-batches, recomputed activations "
        "and at last a checkpoint and a stop; observe: only measure memory and report it; off: do "
        "not measure.",
    )
    host_limit: Memory | None = setting(
        None,
        "free",
        "Bytes of host memory that this job may use on a node, such as 64GiB. Unset: "
        "what the cgroup of the job, or else the machine, grants.",
    )


def _require_distinct(names: str | None) -> str | None:
    given = [name.strip() for name in (names or "").split(",")]
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice; name each interface once")
    return names


class TrainConfig(Section):
    """How long and in which way."""

    max_steps: PositiveInt | None = setting(
        None,
        "free",
        "Optimizer steps of the run. Unset: as many as train.epochs takes.",
        aliases="steps max_steps_per_epoch",
    )
    epochs: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "free",
        "Passes over the data, where max_steps is unset. Unset too: one; many passes "
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
        "On GPUs that have it (compute capability 8.0 or later), multiply the matrices "
        "of a model in fp32 as TF32: faster, with 3 digits of each factor instead of 7. Weights "
        "and sums stay in fp32. false, or train.deterministic=true: all digits, to compare with a "
        "run on CPUs.",
    )
    compile: bool | Literal["auto"] = setting(
        "auto",
        "free",
        "Compile one decoder block with torch.compile and reuse it for all: faster "
        "steps on GPUs after a minute of compiling; on CPUs hpc_tune's own layers may be as fast. "
        "It needs a C++ compiler. The losses are the same; tune.dropout draws other numbers, and "
        "on GPUs needs a torch before 2.13. auto: on GPUs, if all other settings go with it, the "
        "run has more than 50 steps and a small model of the same kind has the losses and "
        "gradients of one that is not compiled; else the start says why not.",
        aliases="torch_compile",
    )
    float8: bool = setting(
        False,
        "free",
        "Multiply the base's matrices in float8 inside of the decoder blocks: faster, "
        "with about two digits in each product. It needs a GPU of compute capability 8.9 or later, "
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
        "Rows of held-out data in each evaluation; fewer are faster and give a noisier "
        "loss. Unset: all.",
    )
    stop_after_evals: PositiveInt | None = setting(
        None,
        "free",
        "Evaluations on the held-out data, that of the start included, after which the "
        "run is done if none of them was below the lowest loss before. It saves steps that "
        "overfit, and ends before optim.schedule has lowered the rate; with checkpoint.keep_best "
        "the best checkpoint stays. Unset: all steps are done.",
        aliases="early_stopping_patience early_stopping_steps",
    )
    time_limit: Seconds | None = setting(
        None,
        "free",
        "The time, in seconds or as 3.5h, within which the run saves a checkpoint and "
        "stops with exit code 75. Unset: no limit; under Slurm the end of the job is known "
        "without it.",
    )
    profile: Steps | None = setting(
        None,
        "free",
        "STEP:COUNT: write torch profiler traces of COUNT optimizer steps of each "
        "rank, from STEP on, and a table of where their time went, into profile/ of the run "
        "directory. The profiled steps are slower, the losses the same. Unset: none.",
    )

    @property
    def compiles(self) -> bool:
        """Whether decoder blocks are compiled: not before it is decided where auto decides."""
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
        "Minutes between checkpoints: what a crash can cost. Fewer cost more writing. "
        "The first of a start comes after 5 minutes at most. auto: 5 to 120, by what saves and "
        "failures of this run have cost so far; null: checkpoints by every_steps alone.",
    )
    keep: PositiveInt = setting(
        2,
        "free",
        "How many of the newest checkpoints are kept; older ones are removed after a "
        "save. With 2 there is another where the newest turns out to be damaged; each takes disk "
        "space.",
        aliases="save_total_limit keep_last_n_checkpoints",
    )
    keep_every: PositiveInt | None = setting(
        None,
        "free",
        "Checkpoints of steps that this number divides are kept too. Unset: none, "
        "which saves disk space.",
    )
    keep_best: bool = setting(
        False,
        "free",
        "Keep the checkpoint with the lowest held-out loss too (of several held-out "
        "sources their mean), of those saved right after an evaluation; it takes the disk space "
        "of one more.",
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
        "next update is due. With more of it the update waits less; on a GPU it waits for copies "
        "alone if they hold all that the rank writes, in pinned memory that stays for the next "
        "save while there is room. auto: on a GPU all of that, where the memory governor finds "
        "room for it; else 256 MiB.",
    )
    required: bool = setting(
        True,
        "free",
        "A checkpoint that cannot be written ends the run, before more work is lost. "
        "false: it is a warning, and training continues.",
    )
    resume: str = setting(
        "auto",
        "free",
        "auto: resume from the newest checkpoint of the run directory that verifies, "
        "or start afresh where there is none; none: start afresh, refused where there are "
        "checkpoints; else the path of a checkpoint to start from. Whichever it is, rerunning the "
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
        "finds a GPU, else cpu, but refused where the job was granted GPUs.",
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
        AfterValidator(_require_distinct),
    ] = setting(
        None,
        "free",
        "The network interface to prefer for rendezvous and CPU collectives, such as "
        "ib0, or several, as [hsn0, hsn1]: of these the first, and all for NCCL, where it sends by "
        "TCP. Unset: the one that leads to rank 0's host; set it where that is slow.",
    )
    timeout: Seconds = setting(
        1800.0,
        "free",
        "Seconds after which a collective that a rank does not join ends the job, and "
        "so does a rank that neither reads nor computes while the others wait for it. The rank is "
        "named, and the backends' own limit is a minute later. A job that is suspended goes on "
        "afterwards. Half an hour is longer than slow file systems take; less of it ends a job "
        "that hangs sooner.",
        aliases="ddp_timeout",
    )
    start_timeout: Seconds | Literal["auto"] = setting(
        "auto",
        "free",
        "Seconds that each part of the start may take before the job ends: that all "
        "ranks are there, that they have met and that their devices are connected; auto: 300, and "
        "0.2 per rank. What the ranks import between the first two is not counted, since thousands "
        "of them read it for minutes from a parallel file system; run.timeout ends that.",
    )
    host_timeout: Annotated[Seconds, Field(ge=4)] = setting(
        20.0,
        "free",
        "Seconds of silence after which another host counts as down or cut off and the "
        "job ends, to be started again; slow or busy ranks do not count. Networks recover from "
        "small faults in a few seconds; raise it where yours takes longer.",
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
        [],
        "free",
        "Words to find the run by, in trackers, such as [lora, first-try].",
    )
    notes: str | None = setting(
        None,
        "free",
        "What the run is for, in a sentence or more; trackers and model cards keep it.",
    )
    report: bool = setting(
        True,
        "free",
        "Write report.html at the end, in a process of its own that takes some "
        "seconds. false: none; the report command writes it at any time.",
    )
    tensorboard: bool = setting(
        True,
        "free",
        "Write metrics for TensorBoard into tensorboard/ of the run directory. false: "
        "not, unless run.trackers has tensorboard.",
    )
    trackers: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow", "trackio"]],
        BeforeValidator(lambda v: re.split(r"\s*,\s*", v.strip()) if isinstance(v, str) else v),
    ] = setting(
        [],
        "free",
        "Where metrics go besides metrics.jsonl, such as [wandb, mlflow]: each into a "
        "folder of its name in the run directory, or where its variables say (WANDB_MODE=online; "
        "MLFLOW_TRACKING_URI; TRACKIO_SPACE_ID). All but tensorboard need an extra of their name, "
        "such as pip install 'hpc_tune[wandb]'. One that fails is reported once and left out.",
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
        """The section of the job: ``pbs`` where it is given alone."""
        return self.pbs if self.pbs.is_given and not self.slurm.is_given else self.slurm

    def with_changes(self, changes: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration with other values, by whole names such as ``train.seed``."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        parts = {s: getattr(self, s).model_copy(update=v) for s, v in sections.items()}
        return self.model_copy(update=parts)
