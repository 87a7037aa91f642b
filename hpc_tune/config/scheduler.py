"""What a job asks a cluster for: what all schedulers have, and the ``slurm`` section."""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from hpc_tune.config.section import PositiveInt, Seconds, Section, setting

_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
MEMORY = re.compile(r"(\d+)([KMGT]B?)?", re.ASCII | re.IGNORECASE)
_MIN_MEGABYTES = 1000


def time_limit_s(text: str) -> float | None:
    """Return the seconds of a time limit as Slurm writes it; ``None``: without a limit.

    Raises:
        ValueError: if sbatch would refuse it.
    """
    if text.lower() in ("unlimited", "infinite"):
        return None
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError("Slurm takes MINUTES, HH:MM:SS or DAYS-HH:MM:SS, such as 04:00:00")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None or parts[2] is not None:  # the first are hours
        return float((((days or 0) * 24 + first) * 60 + second) * 60 + third)
    return float(first * 60 + second)


def _check_time(text: str) -> str:
    time_limit_s(text)
    return text


def _check_memory(text: str | None) -> str | None:
    """Refuse what sbatch does, and a number that has lost its unit."""
    match = MEMORY.fullmatch(text) if text is not None else None
    if text is not None and match is None:
        raise ValueError("Slurm takes a whole number with K, M, G or T after it, such as 700G")
    if match and match[2] is None and 0 < int(match[1]) < _MIN_MEGABYTES:
        raise ValueError(f"Slurm reads {text} as {text} MB; write the unit, such as {text}G")
    return text


# Options of sbatch that would contradict the script, and what to use instead.
_OWN_OPTIONS = {
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
_OPTION = re.compile(
    r"-([A-Za-z])[\w@%+=:,./\[\]|&*()-]*|--([a-z][a-z-]*)(=[\w@%+=:,./\[\]|&*()-]+)?"
)


def _check_options(options: list[str]) -> list[str]:
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ValueError(
                f"{option!r} is no option of sbatch in one word, such as --constraint=gpu"
            )
        if instead := _OWN_OPTIONS.get(match[1] or match[2]):
            raise ValueError(f"{option} is set by another name here: use {instead}")
    return options


def asks_for_gpus(options: Sequence[str]) -> bool:
    """Return whether options of sbatch ask for GPUs, where a site wants that in its own way."""
    return any(re.match(r"--(gres=gpu|gpus|gpus-per-task)\b|-G", option) for option in options)


class JobConfig(Section):
    """What a job has under every scheduler; each has a section of its own."""

    section: ClassVar[str]
    scheduler: ClassVar[str]
    time_field: ClassVar[str]  # that of the time limit

    account: str | None = setting(
        None,
        "free",
        "The account that pays. Unset: the user's own.",
    )
    nodes: PositiveInt = setting(
        1,
        "free",
        "Nodes of the job.",
    )
    spare_nodes: Annotated[int, Field(ge=0)] = setting(
        0,
        "free",
        "Further nodes of the job: they wait, and each takes the place of a node "
        "that is lost or faulty. supervise obeys it under other launchers too.",
    )
    min_nodes: PositiveInt = setting(
        1,
        "free",
        "With fewer nodes left than that, the job is queued again instead of going on "
        "with fewer ranks (the losses are the same). supervise obeys it everywhere.",
    )
    gpus_per_node: Annotated[int, Field(ge=0)] = setting(
        0,
        "free",
        "GPUs of each node, one rank each. 0: ranks on CPUs.",
    )
    tasks_per_node: PositiveInt | None = setting(
        None,
        "free",
        "Ranks of each node. Unset: one per GPU, or one.",
    )
    cpus_per_task: PositiveInt = setting(
        1,
        "free",
        "Cores of each rank; more of them prepare data faster, and train on CPUs.",
    )
    memory: str | None = None
    leave_before: Seconds = setting(
        300.0,
        "free",
        "Seconds before the time limit at which the run saves a checkpoint and stops, "
        "to be queued again. Set more where a save takes minutes.",
    )
    output: str | None = None
    job_name: str = setting(
        "hpc_tune",
        "free",
        "The job's name in the queue.",
    )
    modules: list[str] = setting(
        [],
        "free",
        "Modules to load, such as [python, openmpi].",
    )
    env_file: str | None = setting(
        None,
        "free",
        "A shell file to source before the run. Unset: none.",
        path="file",
    )
    venv: str | None = setting(
        None,
        "free",
        "The virtual environment in which hpc_tune is installed, if any.",
        path="file",
    )
    container: str = setting(
        "",
        "free",
        "The command before python that runs it in a container, such as "
        "'apptainer exec --nv image.sif'. Where image is set: only its first words, if they are "
        "not 'apptainer exec'. Empty: no container.",
    )
    image: str = setting(
        "",
        "free",
        "The image that the ranks run in: a .sif or a folder, by Apptainer.",
    )
    binds: list[str] = setting(
        [],
        "free",
        "Folders that the image shows besides the one in which the job runs, such as "
        "[/scratch/me, '/opt/cray/libfabric:/opt/libfabric'].",
    )
    gpu_maker: Literal["nvidia", "amd"] = setting(
        "nvidia",
        "free",
        "Whose GPUs Apptainer shows to the image: --nv or --rocm.",
    )
    container_python: str = setting(
        "python",
        "free",
        "The Python in the container, such as that of an environment over the image's: "
        "/scratch/me/.venv/bin/python.",
    )

    @property
    def is_given(self) -> bool:
        """Whether the configuration says anything of it."""
        return self != type(self)()

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of host memory of each node; None where it is not said, or all of them."""
        match = MEMORY.fullmatch(self.memory or "0")
        if match is None or not int(match[1]):
            return None
        return int(match[1]) << {"K": 10, "M": 20, "G": 30, "T": 40}[(match[2] or "M")[0].upper()]

    @property
    def limit_s(self) -> float | None:
        """The seconds of the time limit; None: without one."""
        raise NotImplementedError


class SlurmConfig(JobConfig):
    """What ``submit`` asks Slurm for; a run itself uses none of it."""

    section: ClassVar[str] = "slurm"
    scheduler: ClassVar[str] = "Slurm"
    time_field: ClassVar[str] = "time"

    partition: str | None = setting(
        None,
        "free",
        "The partition. Unset: the cluster's default.",
    )
    qos: str | None = setting(
        None,
        "free",
        "The quality of service. Unset: the default.",
    )
    memory: Annotated[str | None, AfterValidator(_check_memory)] = setting(
        None,
        "free",
        "Host memory of each node as Slurm writes it, such as 700G; the plan command "
        "tells how much. Unset: the partition's default, which can be small.",
    )
    time: Annotated[str, AfterValidator(_check_time)] = setting(
        "01:00:00",
        "free",
        "The time limit of one job as Slurm writes it; the run resumes in the next "
        "job. Short jobs wait less in the queue and start more often.",
    )
    options: Annotated[list[str], AfterValidator(_check_options)] = setting(
        [],
        "free",
        "More options of sbatch, as a site may require: [--constraint=gpu, "
        "--gres=gpu:4, --licenses=scratch, --reservation=course, --exclusive, "
        "--mail-type=END]. With --gres=gpu:N, or --gpus, gpus_per_node sets the ranks of each "
        "node alone. Unset: none.",
    )
    output: str = setting(
        "%x-%j.out",
        "free",
        "The file for what the job prints; Slurm fills in %x and %j.",
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
    def limit_s(self) -> float | None:
        """The seconds of the time limit; None: without one."""
        return time_limit_s(self.time)


# -- The ``pbs`` section of the configuration: what a job asks PBS Pro or OpenPBS for.
#
# Source: qsub(1B) and pbs_resources(7B) of OpenPBS.


_PBS_CLOCK = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+)", re.ASCII)
_VALUE = r"[\w@%+=:,./\[\]|&*^()-]+"
_PBS_OPTION = re.compile(rf"-([A-Za-z]) *({_VALUE})", re.ASCII)
_CHUNK = re.compile(r"[A-Za-z]\w*=[\w@%+,./-]+(?::[A-Za-z]\w*=[\w@%+,./-]+)*", re.ASCII)
# Options of qsub that would contradict the script, and what to use instead.
_PBS_OWN_OPTIONS = {
    "A": "pbs.account", "q": "pbs.queue", "N": "pbs.job_name", "o": "pbs.output",
    "e": "pbs.output, which has both", "j": "pbs.output, which has both",
    "J": "one configuration for each run: a job array is not supported",
    "I": "qsub itself for an interactive job",
    "v": "pbs.env_file", "V": "pbs.env_file",
    "r": "nothing: a job that lost its node is to be run again",
    "S": "nothing: the script is one of bash",
    "C": "nothing: directives begin with #PBS", "z": "nothing: the job's number is needed",
}  # fmt: skip
_OWN_RESOURCES = {
    "walltime": "pbs.walltime", "select": "pbs.nodes and pbs.chunk", "place": "pbs.place",
    "filesystems": "pbs.filesystems", "nodes": "pbs.nodes", "ncpus": "pbs.cpus_per_task",
    "ngpus": "pbs.gpus_per_node", "mem": "pbs.memory", "mpiprocs": "pbs.tasks_per_node",
}  # fmt: skip


def walltime_s(text: str) -> float:
    """Return the seconds of a walltime as PBS writes it.

    Raises:
        ValueError: if qsub would refuse it.
    """
    match = _PBS_CLOCK.fullmatch(text)
    if match is None:
        raise ValueError("PBS takes HH:MM:SS, such as 04:00:00, MM:SS, or seconds")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float((hours * 60 + minutes) * 60 + seconds)


def _check_walltime(text: str) -> str:
    walltime_s(text)
    return text


def _check_pbs_memory(text: str | None) -> str | None:
    """Refuse what qsub does, and a number without a unit, which are bytes."""
    match = MEMORY.fullmatch(text) if text is not None else None
    if text is not None and (match is None or match[2] is None or not int(match[1])):
        raise ValueError("PBS takes a whole number with kb, mb, gb or tb after it, such as 700gb")
    return text


def _check_chunk(text: str | None) -> str | None:
    if text and not _CHUNK.fullmatch(text):
        raise ValueError(
            "expected resources of one node, such as ncpus=64:ngpus=4:system=polaris; their number "
            "is pbs.nodes"
        )
    return text


def _check_pbs_options(options: list[str]) -> list[str]:
    for option in options:
        match = _PBS_OPTION.fullmatch(option)
        if match is None:
            raise ValueError(f"{option!r} is no option of qsub with its value, such as '-k doe'")
        instead = _PBS_OWN_OPTIONS.get(match[1])
        names = [part.partition("=")[0] for part in match[2].split(",")]
        if match[1] == "l":
            instead = next((_OWN_RESOURCES[n] for n in names if n in _OWN_RESOURCES), None)
        if match[1] == "W" and "depend" in names:
            instead = "nothing: each job waits for the one before it"
        if instead:
            raise ValueError(f"{option} is set by another name here: use {instead}")
    return options


class PbsConfig(JobConfig):
    """What ``submit`` asks PBS Pro or OpenPBS for; a run itself uses none of it."""

    section: ClassVar[str] = "pbs"
    scheduler: ClassVar[str] = "PBS"
    time_field: ClassVar[str] = "walltime"

    queue: str | None = setting(
        None,
        "free",
        "The queue. Unset: the server's default.",
    )
    filesystems: str | None = setting(
        None,
        "free",
        "The file systems that the job uses, where a site asks for them (-l "
        "filesystems), such as home:eagle. Unset: the site is not told.",
    )
    place: str = setting(
        "scatter",
        "free",
        "How PBS places the nodes' resources (-l place): scatter takes one node for "
        "each of pbs.nodes; scatter:excl shares it with nobody.",
    )
    chunk: Annotated[str | None, AfterValidator(_check_chunk)] = setting(
        None,
        "free",
        "What PBS gives of each node, in its own words: ncpus=64:ngpus=4:"
        "system=polaris. Empty: nothing is said, where a site gives whole nodes. Unset: ncpus, "
        "mpiprocs, ngpus and mem of the settings here, which otherwise set the ranks alone.",
    )
    memory: Annotated[str | None, AfterValidator(_check_pbs_memory)] = setting(
        None,
        "free",
        "Host memory of each node as PBS writes it, such as 480gb; the plan command "
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
        "The folder for what jobs print, a file JOB.OU of each. Unset: "
        "NAME.oNUMBER, in the folder from which the job was submitted.",
    )
    launch: str = setting(
        "",
        "free",
        "The command that starts the ranks, such as 'mpirun -np 8 --map-by ppr:4:node' "
        "of Open MPI. Empty: mpiexec with -n and --ppn, as PALS, MPICH and Intel MPI take them.",
    )

    @property
    def limit_s(self) -> float:
        """The seconds of the time limit."""
        return walltime_s(self.walltime)
