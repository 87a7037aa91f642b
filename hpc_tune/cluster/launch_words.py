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

Kind = Literal["srun", "openmpi", "hydra", "pals"]
_ASK_S = 20.0
_MPIRUNS = ("mpirun", "mpiexec", "prterun", "orterun")
_VERSIONS: tuple[tuple[str, Kind], ...] = (
    (r"Open MPI|OpenRTE|Open RTE|prte", "openmpi"),
    (r"HYDRA|Intel\(R\) MPI", "hydra"),
    (r"PALS", "pals"),
)
_NUMBER = ("-np", "--np", "-n", "--n", "-c")
_FILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_LIST = ("--host", "-host", "-H", "-hosts", "--hosts", "--hostlist")
_OF_SRUN = ("-N", "--nodes", "-n", "--ntasks", "-w", "--nodelist", "-x", "--exclude")
_PER_NODE = "--ntasks-per-node"
_DAEMONS = ("prted", "orted", "hydra_bstrap_proxy", "hydra_pmi_proxy")
_TAKE_TWO = ("mca", "prtemca", "pmixmca", "gmca", "genv", "env")


def kind_of(command: str) -> Kind | None:
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
            timeout=_ASK_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout + done.stderr
    return next((kind for sign, kind in _VERSIONS if re.search(sign, said, re.IGNORECASE)), None)


def hosts_in(words: Sequence[str], environ: Environ) -> dict[str, int | None]:
    """Return the hosts that mpirun's options list, or PBS, and the ranks of each if they say so."""
    lines: list[str] = []
    if file := _value(words, _FILE) or environ.get("PBS_NODEFILE"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
    elif listed := _value(words, _LIST):
        lines = listed.split(",")
    hosts: dict[str, int | None] = {}
    for line in lines:
        found = re.match(r"\s*([^\s:#]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?", line)
        if found:
            count = found[2] or found[3]
            hosts[found[1]] = int(count) if count else None
    return hosts


def number_of_ranks(words: Sequence[str], kind: Kind) -> int | None:
    """Return how many ranks a launcher's options ask for, if they say so."""
    text = _value(words, ("-n", "--ntasks") if kind == "srun" else _NUMBER)
    return int(text) if text is not None and text.isdigit() else None


def ranks_of_each_node(words: Sequence[str]) -> int | None:
    """Return the ranks per node that srun's or PALS's options ask for, if they say so."""
    text = _value(words, (_PER_NODE, "--ppn", "-ppn"))
    return int(text) if text is not None and text.isdigit() else None


def without_kill(words: Sequence[str]) -> list[str]:
    """Return srun's command with --no-kill: Slurm does not kill its tasks on the nodes that live.

    It would, and name each of them as killed, when one node fails.
    """
    return (
        [*words]
        if {"-k", "--no-kill"} & {*_options(words)}
        else [words[0], "--no-kill", *words[1:]]
    )


def with_step_names(words: Sequence[str], name: str) -> tuple[list[str], set[str]]:
    """Return the command with a name for the step that srun makes, and the names of its steps.

    A name of the user's own stays. mpirun's daemons are a step too, and a script of the site's may
    call srun with some of these words.
    """
    if Path(words[0]).name != "srun":
        return [*words], {*_DAEMONS, *(Path(word).name for word in words)}
    if (given := _value(words, ("-J", "--job-name"))) is not None:
        return [*words], {given}
    return [words[0], f"--job-name={name}", *words[1:]], {name}


def on_nodes(
    words: Sequence[str], kind: Kind, ranks: Mapping[str, int], hostfile: Path
) -> list[str]:
    """Return the command for ``ranks`` of each node, in this order; mpirun reads ``hostfile``."""
    number = sum(ranks.values())
    if kind == "srun":
        own = [f"--nodes={len(ranks)}", f"--ntasks={number}", f"--nodelist={','.join(ranks)}"]
        return [words[0], *own, *_stripped(words, _OF_SRUN)]
    rest = _stripped(words, (*_NUMBER, *_FILE, *_LIST))
    hosts = {"openmpi": "--hostfile", "hydra": "-f", "pals": "--hostfile"}[kind]
    return [words[0], hosts, str(hostfile), "-n", str(number), *rest]


def hostfile_of(kind: Kind, ranks: Mapping[str, int]) -> str:
    """Return the text of the file that names the hosts of mpirun."""
    line = {"openmpi": "{} slots={}", "hydra": "{}:{}"}.get(kind, "{}")
    return "".join(line.format(node, count) + "\n" for node, count in ranks.items())


def _options(words: Sequence[str]) -> Iterator[str]:
    """Yield the launcher's own words: those before the program that it starts.

    The program is the first word that can be no option's value, or the one behind a flag.
    """
    values = 0
    for word in words[1:]:
        if word.startswith("-") and values < 2:
            values = 0 if "=" in word else 2 if word.lstrip("-") in _TAKE_TWO else 1
        elif values == 0:
            return
        else:
            values -= 1
        yield word


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    own = list(_options(words))
    for place, word in enumerate(own):
        name, has_value, value = word.partition("=")
        if name in names and has_value:
            return value
        if word in names:
            return own[place + 1] if place + 1 < len(own) else None
        if (glued := re.fullmatch(r"(-[nNwx])(\d\S*)", word)) and glued[1] in names:
            return glued[2]
    return None


def _stripped(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the words behind the first without the options ``names`` and their values."""
    own, kept, skip = list(_options(words)), [], False
    for word in own:
        is_glued = re.fullmatch(r"(-[nNwx])\d\S*", word)
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names and not (is_glued and is_glued[1] in names):
            kept.append(word)
    return [*kept, *words[1 + len(own) :]]
