"""The configuration tree: every field with its unit, its default's reason and its trade-off in
prose.

The values are frozen. A field that this version cannot honour is refused by ``load.check``, never
ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.config.section import Bytes, PositiveInt, Seconds, Section, Steps

_YAML_SWITCH = {True: "on", False: "off"}  # YAML 1.1 reads a plain on and off as booleans
_FIELDS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion",
    "response", "text", "system", "history", "tools", "weight", "train", "loss", "loss_mask",
)  # fmt: skip


def _with_values(columns: Any) -> Any:
    """Refuse ``{NAME:prompt}``, which YAML reads as one name without a value."""
    if isinstance(columns, dict) and (bare := [k for k, v in columns.items() if v is None]):
        raise ValueError(f"{bare[0]} has no value; put a space after the colon: {{NAME: prompt}}")
    return columns


def _fields_of_rows(columns: dict[str, str]) -> dict[str, str]:
    """Check what the columns of data are to be read as."""
    for name, field in columns.items():
        if field not in _FIELDS:
            raise ValueError(f"{name}: {field} is not one of {', '.join(_FIELDS)}")
    if len(set(columns.values())) < len(columns):
        raise ValueError("two columns are to be read as the same field")
    return columns


class ModelConfig(Section):
    """Which model is tuned."""

    path: str = Field(
        "builtin:tiny",
        description="A Hugging Face model directory (config.json, safetensors, tokenizer), or "
        "builtin:tiny, a small Llama-shaped model with a byte tokenizer that needs no download. "
        "Names of a hub are not downloaded: compute nodes have no internet.",
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="The dtype of weights and arithmetic. auto: bf16 on a GPU that has it, fp32 "
        "on a CPU. Adapters and their optimizer state stay in fp32 whatever this says.",
    )


class TuneConfig(Section):
    """Which weights are trained."""

    method: Literal["lora", "dora", "qlora", "full"] = Field(
        "lora",
        description="lora: low-rank adapters on a frozen base (arXiv:2106.09685); dora: lora plus "
        "a learned magnitude (arXiv:2402.09353), slower and often a little better; qlora: lora on "
        "a 4-bit base (NF4, arXiv:2305.14314), an eighth of fp32's memory and slower, which needs "
        "pip install 'hpc_tune[qlora]'; full: all weights.",
    )
    rank: PositiveInt = Field(
        16, description="The rank of the adapters; memory and flops of the adapter grow with it."
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0,
        description="The adapter's output is scaled by alpha / rank; twice the rank is the common "
        "choice.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Dropout on the adapter's input. 0 is fastest and right for one or two epochs.",
    )
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="Names of the linear layers that get adapters, such as [q_proj, v_proj]; "
        "all-linear is every one but the output head.",
    )
    init_from: str | None = Field(
        None,
        description="A folder with an adapter that peft or the Hugging Face Trainer saved, of the "
        "same rank, alpha and targets, to begin with instead of a new one.",
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="The dtype of trained weights, their gradients and optimizer state. bf16 is "
        "half of it, and small updates are lost in rounding: for where fp32 does not fit.",
    )


class DataConfig(Section):
    """What the model is trained on."""

    path: str | list[str] = Field(
        "builtin:pydocs",
        description="A prepared .h5 file, or raw data: .json, .jsonl, .csv, .parquet, .arrow, .txt "
        "or .md, a folder of one of these kinds, a pattern such as data/*.jsonl, or a list of "
        "these. Raw data is prepared first, into data.cache. builtin:pydocs: question and "
        "docstring pairs of this Python.",
    )
    eval_path: str | list[str] | None = Field(
        None,
        description="Held-out data in the same forms. builtin:pydocs:heldout is the held-out part "
        "of pydocs.",
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="The share of data.path's documents that is held out, where there is no "
        "data.eval_path. A hash of its content decides for each: the same ones in each run, on "
        "any number of ranks, and duplicates on one side.",
    )
    columns: Annotated[
        dict[str, str], BeforeValidator(_with_values), AfterValidator(_fields_of_rows)
    ] = Field(
        {},
        description="Names in the data and the fields that they are read as, such as "
        "{problem: prompt, solution: completion}. question and answer, query and response, "
        "context and system_prompt are known without it.",
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        "refuse",
        description="refuse: the first row that cannot be used ends the preparation, with its "
        "place and the reason; skip: they are left out, counted and said.",
    )
    seq_len: PositiveInt = Field(
        1024,
        description="Tokens per row. A longer document is cut here, and counted; memory grows "
        "with it.",
    )
    packing: bool = Field(
        True,
        description="Put several documents into one row, apart in attention and positions: the "
        "same gradient with less padding. false: one document per row. Where a model cannot keep "
        "documents apart it is switched off, which is said.",
    )
    loss_on: Literal["answers", "all"] = Field(
        "answers",
        description="answers: only what the assistant says is learned; all: the prompts too.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja file that replaces the tokenizer's chat template; needed where it "
        "has none.",
    )
    cache: str | None = Field(
        None,
        description="The folder for files prepared from raw data; default: data/ in the run "
        "directory.",
    )


def is_prepared(path: str | list[str] | None) -> bool:
    """Say whether a path names one file that ``prepare`` wrote."""
    return isinstance(path, str) and path.endswith((".h5", ".hdf5"))


class BatchConfig(Section):
    """How much is learned from in one optimizer step."""

    global_size: PositiveInt = Field(
        64,
        description="Rows of data.seq_len per optimizer step over all ranks. It alone decides "
        "what is learned; accumulation follows from it, whatever the number of ranks.",
    )
    micro_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Rows per forward pass on one rank. It changes memory and speed, not the "
        "gradient. auto: the largest that fits.",
    )


class MemoryConfig(Section):
    """The memory governor."""

    governor: Annotated[
        Literal["on", "observe", "off"],
        BeforeValidator(lambda v: _YAML_SWITCH[v] if isinstance(v, bool) else v),
    ] = Field(
        "on",
        description="on: act before memory ends the run, from giving back what is free to smaller "
        "micro-batches, recomputing, and leaving with a checkpoint; observe: sample host and "
        "device memory and report; off: do not even look.",
    )
    host_limit: Bytes | None = Field(
        None,
        description="Bytes of host memory this job may use on a node, where less than the "
        "machine's limit.",
    )


class TrainConfig(Section):
    """How long and in which way."""

    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps; unset: as many as train.epochs asks."
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Passes over the data, where max_steps is unset; unset too: one."
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Seeds order, adapters and dropout."
    )
    deterministic: bool = Field(
        False,
        description="Only kernels that give the same bits each time; slower on GPUs, free on CPUs.",
    )
    compile: bool = Field(
        False,
        description="torch.compile of one decoder block, reused for all: faster steps after a "
        "minute of compiling. It needs a C++ compiler. The losses are the same; tune.dropout draws "
        "other numbers.",
    )
    float8: bool = Field(
        False,
        description="float8 matrix products of the base inside of the decoder blocks, on GPUs that "
        "have them (compute capability 8.9 and later); it needs train.compile=true and "
        "pip install 'hpc_tune[float8]'. Faster, with about two digits in each product.",
    )
    eval_every_steps: PositiveInt | None = Field(
        None,
        description="Evaluate on data.eval_path after every so many steps; it is done at the end "
        "in any case.",
    )
    eval_rows: PositiveInt | None = Field(
        None, description="Evaluate on only so many rows; unset: all."
    )
    time_limit: Seconds | None = Field(
        None,
        description="Checkpoint and leave with exit code 75 before so long has passed; under "
        "Slurm the job's own end time is known and needs no setting.",
    )
    profile: Steps | None = Field(
        None,
        description="STEP:COUNT: torch profiler traces of COUNT optimizer steps, the first of them "
        "STEP, of each rank, and a table of where their time went, in profile/ of the run "
        "directory. The profiled steps are slower, the losses the same.",
    )

    @property
    def profiled_steps(self) -> range:
        """The optimizer steps, counted from 1, that profile names."""
        if self.profile is None:
            return range(0)
        first, count = map(int, self.profile.split(":"))
        return range(first, first + count)


class CheckpointConfig(Section):
    """When checkpoints are written, how many stay, and from where a run goes on."""

    every_steps: PositiveInt | None = Field(
        None, description="Save after every so many optimizer steps."
    )
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        30.0, description="Save when so many minutes have passed since the last save."
    )
    keep: PositiveInt = Field(
        2, description="Newest checkpoints that stay; older ones are removed after a save."
    )
    keep_every: PositiveInt | None = Field(
        None, description="Checkpoints of steps that this divides stay too."
    )
    keep_best: bool = Field(
        False,
        description="The checkpoint with the lowest held-out loss stays too, of those saved right "
        "after an evaluation.",
    )
    background: bool = Field(
        True,
        description="Write while training goes on: only the update of the weights waits until "
        "they are read. false: training waits until the checkpoint is committed.",
    )
    staging_bytes: Bytes = Field(
        256 << 20,
        description="Host memory per rank for copies of what is still to be written when the next "
        "update is due.",
    )
    required: bool = Field(
        True,
        description="A checkpoint that cannot be written ends the run; false: a warning, and "
        "training goes on.",
    )
    resume: str = Field(
        "auto",
        description="auto: the newest checkpoint of the run directory that verifies, or a fresh "
        "start; none: start afresh, refused where checkpoints exist; else the path of a "
        "checkpoint. The same command again goes on from what it has saved itself.",
    )


class RunSettings(Section):
    """Where the run lives and what it tells."""

    dir: str = Field(
        "runs/default", description="The run directory, on a file system that all nodes share."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is one, else cpu."
    )
    threads: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="CPU threads per rank; auto: the rank's share of the cores it may run on.",
    )
    interface: str | None = Field(
        None,
        description="The network interface to prefer for rendezvous and CPU collectives, such as "
        "ib0.",
    )
    timeout: Seconds = Field(
        1800.0,
        description="Seconds after which a collective that a rank does not join ends the job, and "
        "so does a rank that neither reads nor computes while the others wait for it.",
    )
    host_timeout: Seconds = Field(
        20.0,
        ge=4.0,
        description="Seconds of silence after which another host counts as down or cut off and the "
        "job ends, to be started again; slow or busy ranks do not count. Networks heal from small "
        "faults in a few seconds; raise it where yours takes longer.",
    )
    compile_cache: str | None = Field(
        None,
        description="The folder for compiled code where train.compile=true, which the next start "
        "reuses; default: compile-cache/ in the run directory. Jobs of one model may share it.",
    )
    name: str | None = Field(
        None, description="What reports and W&B call the run; default: the run directory's name."
    )
    tags: list[str] = Field(
        [], description="Words to find the run by, in reports and W&B, such as [lora, first-try]."
    )
    report: bool = Field(
        True,
        description="Write report.html at the end, in some seconds and a process of its own; the "
        "report command does it at any time.",
    )
    tensorboard: bool = Field(True, description="Write tensorboard/ in the run directory.")
    wandb: bool = Field(
        False,
        description="Log to Weights & Biases too: into wandb/ of the run directory, for `wandb "
        "sync` where there is a network; with WANDB_MODE=online in the environment at once. Needs "
        "pip install 'hpc_tune[wandb]'.",
    )


class RunConfig(Section):
    """One run, whole."""

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
