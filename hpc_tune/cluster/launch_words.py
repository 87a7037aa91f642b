"""The command of a launcher, rewritten to start ranks on some nodes only (pure, but for asking).

srun                 --no-kill --nodes --ntasks --nodelist
mpirun of any kind   -np, and a hostfile in place of its own list of hosts
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpc_tune.cluster.protocol import Environ

LauncherKind = Literal["srun", "openmpi", "hydra", "pals"]
_VERSION_LIMIT_S = 20.0
_MPIRUNS = ("mpirun", "mpiexec", "prterun", "orterun")
_VERSION_SIGNS: tuple[tuple[str, LauncherKind], ...] = (
    (r"Open MPI|OpenRTE|Open RTE|prte", "openmpi"),
    (r"HYDRA|Intel\(R\) MPI", "hydra"),
    (r"PALS", "pals"),
)
_NUM_RANKS_OPTIONS = ("-np", "--np", "-n", "--n", "-c")
_HOSTFILE_OPTIONS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_HOST_LIST_OPTIONS = ("--host", "-host", "-H", "-hosts", "--hosts", "--hostlist")
_SRUN_NODE_OPTIONS = ("-N", "--nodes", "-n", "--ntasks", "-w", "--nodelist", "-x", "--exclude")
_PER_NODE = "--ntasks-per-node"
_DAEMONS = ("prted", "orted", "hydra_bstrap_proxy", "hydra_pmi_proxy")
_TWO_VALUE_OPTIONS = ("mca", "prtemca", "pmixmca", "gmca", "genv", "env")


def find_launcher_kind(command: str) -> LauncherKind | None:
    """Return what kind of launcher a command is; mpirun is asked for its version."""
    name = Path(command).name
    if name == "srun":
        return "srun"
    if not name.startswith(_MPIRUNS):
        return None
    try:
        done = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_VERSION_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout + done.stderr
    return next(
        (kind for sign, kind in _VERSION_SIGNS if re.search(sign, said, re.IGNORECASE)), None
    )


def read_hosts(words: Sequence[str], environ: Environ) -> dict[str, int | None]:
    """Return the hosts that mpirun's options list, or PBS, and the ranks of each if they say so."""
    lines: list[str] = []
    if file := _option_value(words, _HOSTFILE_OPTIONS) or environ.get("PBS_NODEFILE"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
    elif listed := _option_value(words, _HOST_LIST_OPTIONS):
        lines = listed.split(",")
    hosts: dict[str, int | None] = {}
    for line in lines:
        found = re.match(r"\s*([^\s:#]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?", line)
        if found:
            count = found[2] or found[3]
            hosts[found[1]] = int(count) if count else None
    return hosts


def read_num_ranks(words: Sequence[str], kind: LauncherKind) -> int | None:
    """Return how many ranks a launcher's options ask for, if they say so."""
    text = _option_value(words, ("-n", "--ntasks") if kind == "srun" else _NUM_RANKS_OPTIONS)
    return int(text) if text is not None and text.isdigit() else None


def read_ranks_per_node(words: Sequence[str]) -> int | None:
    """Return the ranks per node that srun's or PALS's options ask for, if they say so."""
    text = _option_value(words, (_PER_NODE, "--ppn", "-ppn"))
    return int(text) if text is not None and text.isdigit() else None


def add_no_kill(words: Sequence[str]) -> list[str]:
    """Return srun's command with --no-kill: Slurm does not kill its tasks on the nodes that live.

    It would, and name each of them as killed, when one node fails.
    """
    return (
        [*words]
        if {"-k", "--no-kill"} & {*_launcher_words(words)}
        else [words[0], "--no-kill", *words[1:]]
    )


def add_step_name(words: Sequence[str], name: str) -> tuple[list[str], set[str]]:
    """Return the command with a name for the step that srun makes, and the names of its steps.

    A name of the user's own stays. mpirun's daemons are a step too, and a script of the site's may
    call srun with some of these words.
    """
    if Path(words[0]).name != "srun":
        return [*words], {*_DAEMONS, *(Path(word).name for word in words)}
    if (given := _option_value(words, ("-J", "--job-name"))) is not None:
        return [*words], {given}
    return [words[0], f"--job-name={name}", *words[1:]], {name}


def restrict_to_nodes(
    words: Sequence[str], kind: LauncherKind, ranks: Mapping[str, int], hostfile: Path
) -> list[str]:
    """Return the command for ``ranks`` of each node, in this order; mpirun reads ``hostfile``."""
    number = sum(ranks.values())
    if kind == "srun":
        own = [f"--nodes={len(ranks)}", f"--ntasks={number}", f"--nodelist={','.join(ranks)}"]
        return [words[0], *own, *_strip_options(words, _SRUN_NODE_OPTIONS)]
    rest = _strip_options(words, (*_NUM_RANKS_OPTIONS, *_HOSTFILE_OPTIONS, *_HOST_LIST_OPTIONS))
    hosts = {"openmpi": "--hostfile", "hydra": "-f", "pals": "--hostfile"}[kind]
    return [words[0], hosts, str(hostfile), "-n", str(number), *rest]


def format_hostfile(kind: LauncherKind, ranks: Mapping[str, int]) -> str:
    """Return the text of the file that names the hosts of mpirun."""
    line = {"openmpi": "{} slots={}", "hydra": "{}:{}"}.get(kind, "{}")
    return "".join(line.format(node, count) + "\n" for node, count in ranks.items())


def _launcher_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the launcher's own words: those before the program that it starts.

    The program is the first word that can be no option's value, or the one behind a flag.
    """
    values = 0
    for word in words[1:]:
        if word.startswith("-") and values < 2:
            values = 0 if "=" in word else 2 if word.lstrip("-") in _TWO_VALUE_OPTIONS else 1
        elif values == 0:
            return
        else:
            values -= 1
        yield word


def _option_value(words: Sequence[str], names: Sequence[str]) -> str | None:
    own = list(_launcher_words(words))
    for place, word in enumerate(own):
        name, has_value, value = word.partition("=")
        if name in names and has_value:
            return value
        if word in names:
            return own[place + 1] if place + 1 < len(own) else None
        if (glued := re.fullmatch(r"(-[nNwx])(\d\S*)", word)) and glued[1] in names:
            return glued[2]
    return None


def _strip_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    own, kept, skip = list(_launcher_words(words)), [], False
    for word in own:
        is_glued = re.fullmatch(r"(-[nNwx])\d\S*", word)
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names and not (is_glued and is_glued[1] in names):
            kept.append(word)
    return [*kept, *words[1 + len(own) :]]
