"""Launchers: find the one that started this process, rewrite its command to start ranks on some
nodes only, and run commands of hpc_tune that are not ranks.
"""

import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Literal

from hpc_tune.cluster import protocol, slurm
from hpc_tune.cluster.protocol import (
    LIBMPI_OF_MPICH,
    LIBMPI_OF_OPEN_MPI,
    TORCH_VARIABLES,
    Environ,
    Launcher,
    LaunchInfo,
    read_launch_info,
)
from hpc_tune.cluster.slurm import STEP_NUM_TASKS_VARIABLE, is_srun_step
from hpc_tune.errors import WorldError

# -- Open MPI's mpirun, and PRRTE's prun, which starts the ranks for it.


OPENMPI_NAME = "openmpi"
OPENMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
# MPI busy-waits; ranks that share a core must yield it to make progress.
OPENMPI_YIELD_WHEN_IDLE = ("OMPI_MCA_mpi_yield_when_idle", "1")


def _read_openmpi_info(environ: Environ) -> LaunchInfo | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the index of the node.
    return read_launch_info(
        environ,
        OPENMPI_NAME,
        LIBMPI_OF_OPEN_MPI,
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=OPENMPI_LOCAL_RANK,
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _read_prun_info(environ: Environ) -> LaunchInfo | None:
    """PMIX_RANK is all that prun sets; srun sets it too."""
    if "PMIX_RANK" not in environ or is_srun_step(environ):
        return None
    return read_launch_info(environ, "pmix", LIBMPI_OF_OPEN_MPI, rank="PMIX_RANK")


def _is_unusable_under_openmpi(library_version: str) -> bool:
    """MPICH 5 ends with "unsupported PMI version PMIx"; an older one starts each rank alone."""
    version = re.match(r"MPICH Version:\s*(\d+)", library_version)
    return version is not None and int(version[1]) >= 5


OPENMPI = Launcher(
    _read_openmpi_info,
    variable_prefixes=("OMPI_", "PMIX_", "PRTE_"),
    process_prefixes=("mpirun", "mpiexec", "prterun", "prted", "orted"),
    library_folder_variable="OMPI_LIBDIR_LOC",
    cannot_run_mpi=_is_unusable_under_openmpi,
)
PRUN = Launcher(
    _read_prun_info, variable_prefixes=("PMIX_", "PRTE_"), process_prefixes=("prterun", "prted")
)


# -- Hydra, the mpirun of MPICH, Intel MPI and MVAPICH.


# Sites set it in a module; but mpi4py is not linked with the library that Cray MPICH then needs, so
# MPI_Init aborts ("GPU_SUPPORT_ENABLED is requested, but GTL library is not linked").
GPU_AWARE_VARIABLE = "MPICH_GPU_SUPPORT_ENABLED"


def disable_gpu_aware_mpi(environ: MutableMapping[str, str]) -> str | None:
    """Disable GPU support in Cray MPICH, since only NCCL sends from GPUs here; return a message.

    The message is None if it was not enabled. Next to NCCL it can also hang forever. Call this
    before MPI is imported.
    """
    if environ.get(GPU_AWARE_VARIABLE, "0") == "0":
        return None
    old_value, environ[GPU_AWARE_VARIABLE] = environ[GPU_AWARE_VARIABLE], "0"
    return f"{GPU_AWARE_VARIABLE}=0 instead of {old_value}: MPI sends nothing from GPUs here"


def _read_hydra_info(environ: Environ) -> LaunchInfo | None:
    # If srun started the proxies, the step's variables describe these; srun sets PMI_RANK too.
    if "PMI_RANK" not in environ:
        return None
    if "MPI_LOCALNRANKS" not in environ and is_srun_step(environ):
        return None
    is_intel = any(key.startswith(("I_MPI_HYDRA", "I_MPI_INFO")) for key in environ)
    return read_launch_info(
        environ,
        "intelmpi" if is_intel else "mpich",
        LIBMPI_OF_MPICH,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    )


def _read_mvapich_info(environ: Environ) -> LaunchInfo | None:
    if "MV2_COMM_WORLD_SIZE" not in environ:
        return None
    return read_launch_info(
        environ,
        "mvapich",
        LIBMPI_OF_MPICH,
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    )


_HYDRA_PROCESSES = ("mpirun", "mpiexec", "hydra")
HYDRA = Launcher(
    _read_hydra_info,
    variable_prefixes=("PMI_", "HYDRA_", "MPI_LOCAL"),
    process_prefixes=_HYDRA_PROCESSES,
)
MVAPICH = Launcher(
    _read_mvapich_info, variable_prefixes=("MV2_",), process_prefixes=_HYDRA_PROCESSES
)


# -- Flux's ``flux run``, and IBM's jsrun.
#
# Flux sets these variables for each task, whatever PMI the job has, but not in batch scripts and
# shells (https://flux-framework.readthedocs.io/projects/flux-core/, flux-environment(7)).


def _read_flux_info(environ: Environ) -> LaunchInfo | None:
    if "FLUX_TASK_RANK" not in environ:
        return None
    # Flux's own PMI is that of MPICH and Cray MPICH; -o pmi=pmix is for Open MPI.
    libmpi = LIBMPI_OF_OPEN_MPI if "PMIX_RANK" in environ else LIBMPI_OF_MPICH
    names = {"rank": "FLUX_TASK_RANK", "size": "FLUX_JOB_SIZE", "num_nodes": "FLUX_JOB_NNODES"}
    return read_launch_info(environ, "flux", libmpi, **names, local_rank="FLUX_TASK_LOCAL_ID")


def _read_jsrun_info(environ: Environ) -> LaunchInfo | None:
    if "JSM_NAMESPACE_RANK" not in environ:
        return None
    names = ("rank", "size", "local_rank", "local_size")
    return read_launch_info(
        environ,
        "jsrun",
        "libmpi_ibm.so.3",
        **{name: f"JSM_NAMESPACE_{name.upper()}" for name in names},
    )


FLUX = Launcher(
    _read_flux_info,
    variable_prefixes=("FLUX_",),
    process_prefixes=("flux-shell", "flux-broker"),
    advice="With Open MPI, start with flux run -o pmi=pmix.",
)
JSRUN = Launcher(_read_jsrun_info, variable_prefixes=("JSM_",), process_prefixes=("jsrun", "jsmd"))


# -- PALS, the launcher of HPE Cray systems.


def _read_pals_info(environ: Environ) -> LaunchInfo | None:
    if "PALS_RANKID" not in environ:
        return None
    # srun --mpi=cray_shasta sets the rank but not the size.
    is_srun = "PMI_SIZE" not in environ and is_srun_step(environ)
    return read_launch_info(
        environ,
        "pals",
        LIBMPI_OF_MPICH,
        rank="PALS_RANKID",
        size=STEP_NUM_TASKS_VARIABLE if is_srun else "PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    )


PALS = Launcher(_read_pals_info, variable_prefixes=("PALS_",), process_prefixes=("pals",))


# -- torchrun, which runs a store for its ranks and pins none of them.


_NODE_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def _read_torchrun_info(environ: Environ) -> LaunchInfo | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return read_launch_info(
        environ,
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
    )


TORCHRUN = Launcher(
    _read_torchrun_info,
    variable_prefixes=("TORCHELASTIC_", *TORCH_VARIABLES, *_NODE_VARIABLES),
    has_store=True,
)


def check_torchrun_master(environ: Environ) -> None:
    """Refuse a torchrun on several nodes whose master address is loopback, each node's own.

    Raises:
        WorldError: if so, as the nodes could never connect; or if the address cannot be resolved.
    """
    name, nodes = environ.get("MASTER_ADDR", ""), environ.get("GROUP_WORLD_SIZE", "1")
    if not name or nodes in ("", "1"):
        return
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except (OSError, UnicodeError) as error:  # a part of the name may be too long for IDNA
        raise WorldError(f"MASTER_ADDR={name} cannot be resolved: {error}") from None
    if ipaddress.ip_address(address).is_loopback:
        raise WorldError(
            f"MASTER_ADDR={name} is {address}, each node's own address, on {nodes} nodes: give "
            "torchrun --master-addr the address of the first node's network"
        )


# -- Which launcher has started this process.


# The first that recognizes the process is its launcher. Inner launchers come first: torchrun runs
# under srun, mpirun under sbatch or over daemons that srun has started.
LAUNCHERS = (
    TORCHRUN,
    OPENMPI,
    MVAPICH,
    PALS,
    JSRUN,
    FLUX,
    HYDRA,
    slurm.SRUN,
    PRUN,
    protocol.TORCH_VARIABLES_LAUNCHER,
    protocol.SINGLE_PROCESS,
)
VARIABLE_PREFIXES = tuple(prefix for launcher in LAUNCHERS for prefix in launcher.variable_prefixes)
PROCESS_PREFIXES = tuple(name for launcher in LAUNCHERS for name in launcher.process_prefixes)


def find_launcher(environ: Environ) -> tuple[Launcher, LaunchInfo]:
    """Return the launcher of this process and what its variables say (pure).

    Raises:
        WorldError: if they are invalid.
    """
    infos = ((launcher, launcher.read_info(environ)) for launcher in LAUNCHERS)
    return next((launcher, info) for launcher, info in infos if info is not None)


def find_launch_info(environ: Environ) -> LaunchInfo:
    """Return what the launcher's variables say (pure)."""
    return find_launcher(environ)[1]


def rank_hint(environ: Environ = os.environ) -> int:
    """Return this process's rank from the launcher's variables alone, 0 if they are invalid."""
    try:
        return find_launch_info(environ).rank or 0
    except WorldError:
        return 0


def world_size_hint(environ: Environ = os.environ) -> int:
    """Return the number of ranks from the launcher's variables alone, 1 if they do not say."""
    try:
        return find_launch_info(environ).size or 1
    except WorldError:
        return 1


def environ_without_launcher() -> dict[str, str]:
    """Return the environment without the launchers' variables, for a process that is not a rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(VARIABLE_PREFIXES)}


# -- Rewrite a launcher's command to start ranks on some nodes only (pure except for --version).
#
# srun                 --no-kill --nodes --ntasks --nodelist
# mpirun of any kind   -np, and a hostfile in place of its own list of hosts


LauncherKind = Literal["srun", "openmpi", "hydra", "pals"]
_VERSION_LIMIT_S = 20.0
_MPIRUNS = ("mpirun", "mpiexec", "prterun", "orterun")
_VERSION_PATTERNS: tuple[tuple[str, LauncherKind], ...] = (
    (r"Open MPI|OpenRTE|Open RTE|prte", "openmpi"),
    (r"HYDRA|Intel\(R\) MPI", "hydra"),
    (r"PALS", "pals"),
)
_NUM_RANKS_OPTIONS = ("-np", "--np", "-n", "--n", "-c")
_HOSTFILE_OPTIONS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_HOST_LIST_OPTIONS = ("--host", "-host", "-H", "-hosts", "--hosts", "--hostlist")
_SRUN_NODE_OPTIONS = ("-N", "--nodes", "-n", "--ntasks", "-w", "--nodelist", "-x", "--exclude")
_TASKS_PER_NODE_OPTION = "--ntasks-per-node"
_DAEMONS = ("prted", "orted", "hydra_bstrap_proxy", "hydra_pmi_proxy")
_TWO_VALUE_OPTIONS = ("mca", "prtemca", "pmixmca", "gmca", "genv", "env")
# Options without a value, of srun (whose short ones may be joined), Open MPI, Hydra and PALS. An
# optional value is joined by "=". Not in it: -H, -q and -s, which take a value with some launchers.
_FLAG = re.compile(
    "-[EIKOQXZkluv]+|--?("
    "label|unbuffered|verbose|quiet|overlap|exact|exclusive|overcommit|oversubscribe|contiguous|pty|"
    "preserve-env|hold|no-kill|disable-status|no-allocate|kill-on-bad-exit|immediate|multi-prog|"
    "spread-job|use-min-nodes|reboot|whole|propagate|bcast|resv-ports|external|"
    "allow-run-as-root|tag-output|timestamp-output|report-bindings|display-map|display-allocation|"
    "nolocal|nooversubscribe|use-hwthread-cpus|debug-daemons|leave-session-attached|noprefix|novm|"
    "enable-recovery|continuous|"
    "prepend-rank|ordered-output|print-all-exitcodes|print-rank-map|info|genvall|genvnone|envall|"
    "envnone|line-buffer|no-transfer|no-abort-on-failure)"
)


def find_launcher_kind(command: str) -> LauncherKind | None:
    """Return what kind of launcher a command is; mpirun is asked for its version."""
    name = Path(command).name
    if name == "srun":
        return "srun"
    if not name.startswith(_MPIRUNS):
        return None
    try:
        result = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_VERSION_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    output = result.stdout + result.stderr
    return next(
        (kind for sign, kind in _VERSION_PATTERNS if re.search(sign, output, re.IGNORECASE)), None
    )


def read_hosts(words: Sequence[str], environ: Environ) -> dict[str, int | None]:
    """Return the hosts that mpirun's options or PBS list, and the ranks of each host if given."""
    lines: list[str] = []
    if file := _option_value(words, _HOSTFILE_OPTIONS) or environ.get("PBS_NODEFILE"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
    elif host_list := _option_value(words, _HOST_LIST_OPTIONS):
        lines = host_list.split(",")
    hosts: dict[str, int | None] = {}
    for line in lines:
        match = re.match(r"\s*([^\s:#]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?", line)
        if match:
            count = match[2] or match[3]
            hosts[match[1]] = int(count) if count else None
    return hosts


def read_num_ranks(words: Sequence[str], kind: LauncherKind) -> int | None:
    """Return how many ranks a launcher's options ask for, if they say so."""
    text = _option_value(words, ("-n", "--ntasks") if kind == "srun" else _NUM_RANKS_OPTIONS)
    return int(text) if text is not None and text.isdigit() else None


def read_ranks_per_node(words: Sequence[str]) -> int | None:
    """Return the ranks per node that srun's or PALS's options ask for, if they say so."""
    text = _option_value(words, (_TASKS_PER_NODE_OPTION, "--ppn", "-ppn"))
    return int(text) if text is not None and text.isdigit() else None


def add_no_kill_option(words: Sequence[str]) -> list[str]:
    """Return srun's command with --no-kill, so that its tasks survive the failure of another node.

    Otherwise Slurm would kill them all, and report each of them as killed.
    """
    if {"-k", "--no-kill"} & {*_launcher_words(words)}:
        return [*words]
    return [words[0], "--no-kill", *words[1:]]


def add_step_name(words: Sequence[str], name: str) -> tuple[list[str], set[str]]:
    """Return the command, if srun's with a step name, and the names that its steps may have.

    A name that the user has set stays. Other commands stay as they are: mpirun starts its daemons
    as a step too, and a site's own script may call srun with some of these words.
    """
    if Path(words[0]).name != "srun":
        return [*words], {*_DAEMONS, *(Path(word).name for word in words)}
    if (given_name := _option_value(words, ("-J", "--job-name"))) is not None:
        return [*words], {given_name}
    return [words[0], f"--job-name={name}", *words[1:]], {name}


def restrict_to_nodes(
    words: Sequence[str], kind: LauncherKind, num_ranks_by_node: Mapping[str, int], hostfile: Path
) -> list[str]:
    """Return the command for ``num_ranks_by_node``, in this order; mpirun reads ``hostfile``."""
    num_ranks = sum(num_ranks_by_node.values())
    if kind == "srun":
        options = [
            f"--nodes={len(num_ranks_by_node)}",
            f"--ntasks={num_ranks}",
            f"--nodelist={','.join(num_ranks_by_node)}",
        ]
        return [words[0], *options, *_strip_options(words, _SRUN_NODE_OPTIONS)]
    args = _strip_options(words, (*_NUM_RANKS_OPTIONS, *_HOSTFILE_OPTIONS, *_HOST_LIST_OPTIONS))
    hostfile_option = {"openmpi": "--hostfile", "hydra": "-f", "pals": "--hostfile"}[kind]
    return [words[0], hostfile_option, str(hostfile), "-n", str(num_ranks), *args]


def format_hostfile(kind: LauncherKind, num_ranks_by_node: Mapping[str, int]) -> str:
    """Return the text of mpirun's hostfile."""
    line = {"openmpi": "{} slots={}", "hydra": "{}:{}"}.get(kind, "{}")
    return "".join(line.format(node, count) + "\n" for node, count in num_ranks_by_node.items())


def _launcher_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the launcher's own words: those before the program that it starts.

    A word after an option that is not a ``_FLAG`` counts as its value.
    """
    values = 0
    for word in words[1:]:
        if word.startswith("-") and values < 2:
            values = _count_values(word)
        elif values == 0:
            return
        else:
            values -= 1
        yield word


def _count_values(option: str) -> int:
    if option.lstrip("-") in _TWO_VALUE_OPTIONS:
        return 2
    is_joined = "=" in option or re.fullmatch(r"-[A-Za-z]\d\S*", option)
    return 0 if is_joined or _FLAG.fullmatch(option) else 1


def _option_value(words: Sequence[str], option_names: Sequence[str]) -> str | None:
    launcher_words = list(_launcher_words(words))
    for position, word in enumerate(launcher_words):
        name, has_value, value = word.partition("=")
        if name in option_names and has_value:
            return value
        if word in option_names:
            return launcher_words[position + 1] if position + 1 < len(launcher_words) else None
        if (match := re.fullmatch(r"(-[nNwx])(\d\S*)", word)) and match[1] in option_names:
            return match[2]
    return None


def _strip_options(words: Sequence[str], option_names: Sequence[str]) -> list[str]:
    launcher_words, kept_words, skip = list(_launcher_words(words)), [], False
    for word in launcher_words:
        is_glued = re.fullmatch(r"(-[nNwx])\d\S*", word)
        if skip:
            skip = False
        elif word in option_names:
            skip = True
        elif word.partition("=")[0] not in option_names and not (
            is_glued and is_glued[1] in option_names
        ):
            kept_words.append(word)
    return [*kept_words, *words[1 + len(launcher_words) :]]


# -- A command of hpc_tune in its own process, which is not a rank.


def run_hpc_tune_command(
    words: Iterable[str], limit_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m hpc_tune`` with ``words``; return its exit code and what it has printed.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    command = [sys.executable, "-m", "hpc_tune", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=limit_s,
        env=environ_without_launcher(),
    )


def explain_command_failure(error: Exception) -> str:
    """Return in words why a command failed, without the command itself."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode < 0:
            return f"it was ended by {signal.Signals(-error.returncode).name}"
        return f"it ended with exit code {error.returncode}"
    return str(error)
