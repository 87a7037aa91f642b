"""The ``pbs`` section of the configuration: what a job asks PBS Pro or OpenPBS for.

Source: qsub(1B) and pbs_resources(7B) of OpenPBS.
"""

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from hpc_tune.config.scheduler import MEMORY, JobConfig

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


def _walltime(text: str) -> str:
    walltime_s(text)
    return text


def _pbs_memory(text: str | None) -> str | None:
    """Refuse what qsub does, and a number without a unit, which are bytes."""
    match = MEMORY.fullmatch(text) if text is not None else None
    if text is not None and (match is None or match[2] is None or not int(match[1])):
        raise ValueError("PBS takes a whole number with kb, mb, gb or tb after it, such as 700gb")
    return text


def _chunk(text: str | None) -> str | None:
    if text and not _CHUNK.fullmatch(text):
        raise ValueError(
            "expected resources of one node, such as ncpus=64:ngpus=4:system=polaris; their number "
            "is pbs.nodes"
        )
    return text


def _pbs_options(options: list[str]) -> list[str]:
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

    queue: str | None = Field(None, description="The queue. Unset: the server's default.")
    filesystems: str | None = Field(
        None,
        description="The file systems that the job uses, where a site asks for them (-l "
        "filesystems), such as home:eagle. Unset: the site is not told.",
    )
    place: str = Field(
        "scatter",
        description="How PBS places the nodes' resources (-l place): scatter takes one node for "
        "each of pbs.nodes; scatter:excl shares it with nobody.",
    )
    chunk: Annotated[str | None, AfterValidator(_chunk)] = Field(
        None,
        description="What PBS gives of each node, in its own words: ncpus=64:ngpus=4:"
        "system=polaris. Empty: nothing is said, where a site gives whole nodes. Unset: ncpus, "
        "mpiprocs, ngpus and mem of the settings here, which otherwise set the ranks alone.",
    )
    memory: Annotated[str | None, AfterValidator(_pbs_memory)] = Field(
        None,
        description="Host memory of each node as PBS writes it, such as 480gb; the plan command "
        "tells how much. Unset: the queue's default, or all of it.",
    )
    walltime: Annotated[str, AfterValidator(_walltime)] = Field(
        "01:00:00",
        description="The time limit of one job, HH:MM:SS; the run resumes in the next job. Short "
        "jobs wait less in the queue and start more often.",
    )
    options: Annotated[list[str], AfterValidator(_pbs_options)] = Field(
        [],
        description="More options of qsub, as a site may require: ['-k doe', '-P project', "
        "'-m ae', '-l singularity=True', '-W group_list=mine']. Unset: none.",
    )
    output: str | None = Field(
        None,
        description="The folder for what jobs print, a file JOB.OU of each. Unset: "
        "NAME.oNUMBER, in the folder from which the job was submitted.",
    )
    launch: str = Field(
        "",
        description="The command that starts the ranks, such as 'mpirun -np 8 --map-by ppr:4:node' "
        "of Open MPI. Empty: mpiexec with -n and --ppn, as PALS, MPICH and Intel MPI take them.",
    )

    @property
    def limit_s(self) -> float:
        """The seconds of the time limit."""
        return walltime_s(self.walltime)
