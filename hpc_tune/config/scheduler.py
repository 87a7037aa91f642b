"""What a job requests from a cluster: settings of all schedulers, ``slurm`` and ``pbs``."""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from hpc_tune.config.section import PositiveInt, Seconds, Section, setting

_SLURM_TIME_PATTERN = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_MEMORY_PATTERN = re.compile(r"(\d+)([KMGT]B?)?", re.ASCII | re.IGNORECASE)
_MIN_UNITLESS_MEGABYTES = 1000


def slurm_time_to_seconds(text: str) -> float | None:
    """Return the seconds of a time limit in Slurm's notation; ``None``: no limit.

    Raises:
        ValueError: if sbatch would refuse it.
    """
    if text.lower() in ("unlimited", "infinite"):
        return None
    match = _SLURM_TIME_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("Slurm takes MINUTES, HH:MM:SS or DAYS-HH:MM:SS, such as 04:00:00")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None or parts[2] is not None:  # the first part is hours
        return float((((days or 0) * 24 + first) * 60 + second) * 60 + third)
    return float(first * 60 + second)


def _check_slurm_time(text: str) -> str:
    slurm_time_to_seconds(text)
    return text


def _check_slurm_memory(text: str | None) -> str | None:
    """Refuse what sbatch refuses, and a number that probably lacks its unit."""
    match = _MEMORY_PATTERN.fullmatch(text) if text is not None else None
    if text is not None and match is None:
        raise ValueError("Slurm takes a whole number with K, M, G or T after it, such as 700G")
    if match and match[2] is None and 0 < int(match[1]) < _MIN_UNITLESS_MEGABYTES:
        raise ValueError(f"Slurm reads {text} as {text} MB; write the unit, such as {text}G")
    return text


# Options of sbatch that would contradict the script, and what to use instead.
_SBATCH_OPTION_SETTINGS = {
    "account": "slurm.account", "A": "slurm.account", "partition": "slurm.partition",
    "p": "slurm.partition", "qos": "slurm.qos", "q": "slurm.qos", "nodes": "slurm.nodes",
    "N": "slurm.nodes", "ntasks-per-node": "slurm.tasks_per_node", "cpus-per-task":
    "slurm.cpus_per_task", "c": "slurm.cpus_per_task", "gpus-per-node": "slurm.gpus_per_node",
    "mem": "slurm.memory", "time": "slurm.time", "t": "slurm.time", "job-name": "slurm.job_name",
    "J": "slurm.job_name", "output": "slurm.output", "o": "slurm.output", "signal":
    "slurm.leave_before", "ntasks": "slurm.nodes and slurm.tasks_per_node", "n":
    "slurm.nodes and slurm.tasks_per_node", "array": "slurm/sweep.sh, which gives each task a "
    "run.dir of its own", "a": "slurm/sweep.sh, which gives each task a run.dir of its own",
}  # fmt: skip
_SBATCH_OPTION_PATTERN = re.compile(
    r"-([A-Za-z])[\w@%+=:,./\[\]|&*()-]*|--([a-z][a-z-]*)(=[\w@%+=:,./\[\]|&*()-]+)?"
)


def _check_sbatch_options(options: list[str]) -> list[str]:
    for option in options:
        match = _SBATCH_OPTION_PATTERN.fullmatch(option)
        if match is None:
            raise ValueError(
                f"{option!r} is not an sbatch option in one word, such as --constraint=gpu"
            )
        if replacement := _SBATCH_OPTION_SETTINGS.get(match[1] or match[2]):
            raise ValueError(f"{option} is set by another name here: use {replacement}")
    return options


def asks_for_gpus(options: Sequence[str]) -> bool:
    """Return whether the sbatch options request GPUs, as some sites require."""
    return any(re.match(r"--(gres=gpu|gpus|gpus-per-task)\b|-G", option) for option in options)


class JobConfig(Section):
    """The settings of a job under every scheduler; each scheduler has a section of its own."""

    section: ClassVar[str]
    scheduler: ClassVar[str]
    time_field: ClassVar[str]  # the setting of the time limit

    account: str | None = setting(None, "free", "The account that pays. Unset: the user's own.")
    nodes: PositiveInt = setting(1, "free", "Nodes of the job.")
    spare_nodes: Annotated[int, Field(ge=0)] = setting(
        0,
        "free",
        "Extra nodes of the job: they wait, and each can replace a node "
        "that is lost or faulty. supervise uses it under other launchers too.",
    )
    min_nodes: PositiveInt = setting(
        1,
        "free",
        "With fewer nodes left than this, the job is queued again instead of continuing "
        "with fewer ranks (the losses are the same). supervise uses it everywhere.",
    )
    gpus_per_node: Annotated[int, Field(ge=0)] = setting(
        0, "free", "GPUs of each node, one rank each. 0: ranks on CPUs."
    )
    tasks_per_node: PositiveInt | None = setting(
        None, "free", "Ranks of each node. Unset: one per GPU, or one."
    )
    cpus_per_task: PositiveInt = setting(
        1, "free", "Cores of each rank; more of them prepare data faster, and train on CPUs."
    )
    memory: str | None = None
    leave_before: Seconds = setting(
        300.0,
        "free",
        "Seconds before the time limit at which the run saves a checkpoint and stops, "
        "to be queued again. Set more if a save takes minutes.",
    )
    output: str | None = None
    job_name: str = setting("hpc_tune", "free", "The job's name in the queue.")
    modules: list[str] = setting([], "free", "Modules to load, such as [python, openmpi].")
    env_file: str | None = setting(
        None, "free", "A shell file to source before the run. Unset: none.", path="file"
    )
    venv: str | None = setting(
        None, "free", "The virtual environment in which hpc_tune is installed, if any.", path="file"
    )
    container: str = setting(
        "",
        "free",
        "The command before python that runs it in a container, such as "
        "'apptainer exec --nv image.sif'. If image is set: only its first words, if they are "
        "not 'apptainer exec'. Empty: no container.",
    )
    image: str = setting(
        "", "free", "The image that the ranks run in: a .sif or a folder, by Apptainer."
    )
    binds: list[str] = setting(
        [],
        "free",
        "Folders to mount in the image besides the one in which the job runs, such as "
        "[/scratch/me, '/opt/cray/libfabric:/opt/libfabric'].",
    )
    gpu_maker: Literal["nvidia", "amd"] = setting(
        "nvidia",
        "free",
        "The maker of the GPUs that Apptainer passes to the image: --nv or --rocm.",
    )
    container_python: str = setting(
        "python",
        "free",
        "The Python in the container, such as one of an environment that extends the image's: "
        "/scratch/me/.venv/bin/python.",
    )

    @property
    def is_given(self) -> bool:
        """Whether the configuration sets anything in this section."""
        return self != type(self)()

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of host memory per node; None if unset, or if all of it is requested (0)."""
        match = _MEMORY_PATTERN.fullmatch(self.memory or "0")
        if match is None or not int(match[1]):
            return None
        return int(match[1]) << {"K": 10, "M": 20, "G": 30, "T": 40}[(match[2] or "M")[0].upper()]

    @property
    def time_limit_s(self) -> float | None:
        """The seconds of the time limit; None: no limit."""
        raise NotImplementedError


class SlurmConfig(JobConfig):
    """What ``submit`` requests from Slurm; a run itself uses none of it."""

    section: ClassVar[str] = "slurm"
    scheduler: ClassVar[str] = "Slurm"
    time_field: ClassVar[str] = "time"

    partition: str | None = setting(None, "free", "The partition. Unset: the cluster's default.")
    qos: str | None = setting(None, "free", "The quality of service. Unset: the default.")
    memory: Annotated[str | None, AfterValidator(_check_slurm_memory)] = setting(
        None,
        "free",
        "Host memory of each node in Slurm's notation, such as 700G; the plan command "
        "tells how much. Unset: the partition's default, which can be small.",
    )
    time: Annotated[str, AfterValidator(_check_slurm_time)] = setting(
        "01:00:00",
        "free",
        "The time limit of one job in Slurm's notation; the run resumes in the next "
        "job. Short jobs wait less in the queue and start more often.",
    )
    options: Annotated[list[str], AfterValidator(_check_sbatch_options)] = setting(
        [],
        "free",
        "More options of sbatch, as a site may require: [--constraint=gpu, "
        "--gres=gpu:4, --licenses=scratch, --reservation=course, --exclusive, "
        "--mail-type=END]. With --gres=gpu:N or --gpus, gpus_per_node only sets the ranks per "
        "node. Unset: none.",
    )
    output: str = setting(
        "%x-%j.out", "free", "The file for what the job prints; Slurm fills in %x and %j."
    )
    image: str = setting(
        "",
        "free",
        "The image that the ranks run in: a .sif or a folder by Apptainer; a .sqsh, "
        "docker://... or HOST#NAME:TAG by Pyxis; a .toml is an EDF file of CSCS (srun "
        "--environment). Empty: none.",
    )
    launch: str = setting(
        "srun --kill-on-bad-exit=1",
        "free",
        "The command that starts the ranks: srun, or 'mpirun -np 16' where srun and "
        "the site's MPI do not work together.",
    )

    @property
    def time_limit_s(self) -> float | None:
        """The seconds of the time limit; None: no limit."""
        return slurm_time_to_seconds(self.time)


# -- The ``pbs`` section of the configuration: what a job requests from PBS Pro or OpenPBS.
#
# Source: qsub(1B) and pbs_resources(7B) of OpenPBS.


_PBS_TIME_PATTERN = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+)", re.ASCII)
_PBS_VALUE_PATTERN = r"[\w@%+=:,./\[\]|&*^()-]+"
_PBS_OPTION_PATTERN = re.compile(rf"-([A-Za-z]) *({_PBS_VALUE_PATTERN})", re.ASCII)
_PBS_CHUNK_PATTERN = re.compile(r"[A-Za-z]\w*=[\w@%+,./-]+(?::[A-Za-z]\w*=[\w@%+,./-]+)*", re.ASCII)
# Options of qsub that would contradict the script, and what to use instead.
_PBS_OPTION_SETTINGS = {
    "A": "pbs.account", "q": "pbs.queue", "N": "pbs.job_name", "o": "pbs.output",
    "e": "pbs.output, which has both", "j": "pbs.output, which has both",
    "J": "one configuration for each run: a job array is not supported",
    "I": "qsub itself for an interactive job",
    "v": "pbs.env_file", "V": "pbs.env_file",
    "r": "nothing: a job that lost its node is to be run again",
    "S": "nothing: the script is one of bash",
    "C": "nothing: directives begin with #PBS", "z": "nothing: the job's number is needed",
}  # fmt: skip
_PBS_RESOURCE_SETTINGS = {
    "walltime": "pbs.walltime", "select": "pbs.nodes and pbs.chunk", "place": "pbs.place",
    "filesystems": "pbs.filesystems", "nodes": "pbs.nodes", "ncpus": "pbs.cpus_per_task",
    "ngpus": "pbs.gpus_per_node", "mem": "pbs.memory", "mpiprocs": "pbs.tasks_per_node",
}  # fmt: skip


def pbs_time_to_seconds(text: str) -> float:
    """Return the seconds of a walltime in PBS's notation.

    Raises:
        ValueError: if qsub would refuse it.
    """
    match = _PBS_TIME_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("PBS takes HH:MM:SS, such as 04:00:00, MM:SS, or seconds")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float((hours * 60 + minutes) * 60 + seconds)


def _check_walltime(text: str) -> str:
    pbs_time_to_seconds(text)
    return text


def _check_pbs_memory(text: str | None) -> str | None:
    """Refuse what qsub refuses, and a number without a unit, which would mean bytes."""
    match = _MEMORY_PATTERN.fullmatch(text) if text is not None else None
    if text is not None and (match is None or match[2] is None or not int(match[1])):
        raise ValueError("PBS takes a whole number with kb, mb, gb or tb after it, such as 700gb")
    return text


def _check_chunk(text: str | None) -> str | None:
    if text and not _PBS_CHUNK_PATTERN.fullmatch(text):
        raise ValueError(
            "expected resources of one node, such as ncpus=64:ngpus=4:system=polaris; the number "
            "of nodes is pbs.nodes"
        )
    return text


def _check_pbs_options(options: list[str]) -> list[str]:
    for option in options:
        match = _PBS_OPTION_PATTERN.fullmatch(option)
        if match is None:
            raise ValueError(f"{option!r} is not a qsub option with its value, such as '-k doe'")
        replacement = _PBS_OPTION_SETTINGS.get(match[1])
        names = [part.partition("=")[0] for part in match[2].split(",")]
        if match[1] == "l":
            replacement = next(
                (_PBS_RESOURCE_SETTINGS[n] for n in names if n in _PBS_RESOURCE_SETTINGS), None
            )
        if match[1] == "W" and "depend" in names:
            replacement = "nothing: each job waits for the one before it"
        if replacement:
            raise ValueError(f"{option} is set by another name here: use {replacement}")
    return options


class PbsConfig(JobConfig):
    """What ``submit`` requests from PBS Pro or OpenPBS; a run itself uses none of it."""

    section: ClassVar[str] = "pbs"
    scheduler: ClassVar[str] = "PBS"
    time_field: ClassVar[str] = "walltime"

    queue: str | None = setting(None, "free", "The queue. Unset: the server's default.")
    filesystems: str | None = setting(
        None,
        "free",
        "The file systems that the job uses, if the site requires them (-l "
        "filesystems), such as home:eagle. Unset: none are named.",
    )
    place: str = setting(
        "scatter",
        "free",
        "How PBS places the nodes' resources (-l place): scatter takes one node for "
        "each of pbs.nodes; scatter:excl shares it with no other job.",
    )
    chunk: Annotated[str | None, AfterValidator(_check_chunk)] = setting(
        None,
        "free",
        "The resources of each node as PBS writes them: ncpus=64:ngpus=4:"
        "system=polaris. Empty: none are named, for sites that give whole nodes. Unset: ncpus, "
        "mpiprocs, ngpus and mem follow from the settings here. If chunk is set, these settings "
        "only determine the ranks.",
    )
    memory: Annotated[str | None, AfterValidator(_check_pbs_memory)] = setting(
        None,
        "free",
        "Host memory of each node in PBS's notation, such as 480gb; the plan command "
        "tells how much. Unset: the queue's default, or all of it.",
    )
    walltime: Annotated[str, AfterValidator(_check_walltime)] = setting(
        "01:00:00",
        "free",
        "The time limit of one job, HH:MM:SS; the run resumes in the next job. Short "
        "jobs wait less in the queue and start more often.",
    )
    options: Annotated[list[str], AfterValidator(_check_pbs_options)] = setting(
        [],
        "free",
        "More options of qsub, as a site may require: ['-k doe', '-P project', "
        "'-m ae', '-l singularity=True', '-W group_list=mine']. Unset: none.",
    )
    output: str | None = setting(
        None,
        "free",
        "The folder for the output of jobs, a file JOB.OU for each. Unset: "
        "NAME.oNUMBER, in the folder from which the job was submitted.",
    )
    launch: str = setting(
        "",
        "free",
        "The command that starts the ranks, such as 'mpirun -np 8 --map-by ppr:4:node' "
        "of Open MPI. Empty: mpiexec with -n and --ppn, as PALS, MPICH and Intel MPI take them.",
    )

    @property
    def time_limit_s(self) -> float:
        """The seconds of the time limit."""
        return pbs_time_to_seconds(self.walltime)
