"""Stands for PBS where none can be installed: qsub, qstat and qrerun for jobs on this host.

It follows the manual and the source of OpenPBS. A job gets PBS_* variables and what ``-v`` lists (a
name alone: with its value in qsub's environment), and nothing else of the submitter's environment.
It starts in the home directory, in a login shell that reads the path of qsub's copy of the script.
Options on the command line override those of the script, whose directives end at its first command.
At its walltime a job gets SIGTERM, and SIGKILL a little later. A job that depends on another one
waits for its end.

    python -m tests.support.pbs qsub|qstat|qrerun|run ARGUMENTS    (the state is in $STUB_PBS)
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("qsub", "qstat", "qrerun")
KILL_DELAY_S = 5.0
# What a login sets, and for root Open MPI's permission.
_LOGIN = ("LANG", "STUB_PBS", "PYTHONPATH", "OMPI_", "PRTE_")
_OPTIONS = "AqNojrlWvkmMP"  # those that take a value
_LISTS = ("l", "W")  # of name=value


def install(folder: Path) -> dict[str, str]:
    """Put the programs into ``folder`` and return the variables with which they are found."""
    for name in PROGRAMS:
        program = folder / name
        words = [sys.executable, "-m", "tests.support.pbs", name]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    # As /etc/profile.d/pbs.sh and the user's own file do on a real host.
    (folder / ".bash_profile").write_text(f"export PATH={shlex.quote(path)}\n")
    return {"PATH": path, "STUB_PBS": str(folder)}


def jobs(folder: Path) -> list[dict]:
    """Return the jobs in the order of their submission; ``exit`` is None until one has ended."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.job"))]


def qsub(*words: str) -> None:
    """Submit a script, or standard input if none is named."""
    if words == ("--version",):
        print("pbs_version = 23.06.06")
        return
    asked, rest = _parsed(list(words))
    script = rest[0] if rest else "STDIN"
    text = Path(script).read_text() if rest else sys.stdin.read()
    for line in _directives(text):
        of_script, more = _parsed(shlex.split(line))
        if more:
            sys.exit(f"qsub: illegal -- {more}")
        asked = of_script | asked
    folder = Path(os.environ["STUB_PBS"])
    number = f"{len(jobs(folder)):03d}.stub"
    (folder / f"{number}.SC").write_text(text)
    (folder / f"{number}.SC").chmod(0o700)
    variables = {}
    for item in filter(None, asked.pop("v", "").split(",")):
        name, given, value = item.partition("=")
        variables[name] = value if given else os.environ[name]
    job = {"number": number, "script": script, "asked": asked, "variables": variables}
    job |= {"folder": os.getcwd(), "runs": 0, "exit": None, "pid": None}
    job |= {"walltime": asked["l walltime"], "select": asked.get("l select", "")}
    job |= {"queue": asked.get("q", ""), "account": asked.get("A", "")}
    _write(folder, job)
    _start(folder, number)
    print(number)


def _directives(text: str) -> list[str]:
    """Return the options of #PBS lines up to the first command, as qsub reads them."""
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#PBS "):
            lines.append(line.removeprefix("#PBS "))
    return lines


def _parsed(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by letter, those of lists as ``"l walltime"``, and the other words."""
    asked: dict[str, str] = {}
    while words and words[0].startswith("-"):
        option = words.pop(0)
        letter, value = option[1], option[2:] or (words.pop(0) if words else "")
        if letter not in _OPTIONS or not value:
            sys.exit(f"qsub: invalid option -- '{letter}'")
        if letter in _LISTS:
            pairs = [item.partition("=")[::2] for item in value.split(",")]
            if any(not name or not given for name, given in pairs):
                sys.exit(f"qsub: illegal -{letter} value")
            asked |= {f"{letter} {name}": given for name, given in pairs}
        else:
            asked[letter] = value
    return asked, words


def qstat(*words: str) -> None:
    """Show a job: ``qstat -f NUMBER``."""
    job = json.loads((Path(os.environ["STUB_PBS"]) / f"{words[-1]}.job").read_text())
    print(f"Job Id: {job['number']}\n    job_state = R\n    queue = routed-{job['queue']}")
    print(f"    Account_Name = {job['account']}\n    Join_Path = oe")
    for name, value in job["asked"].items():
        if name.startswith("l "):
            half = len(value) // 2 if len(value) > 12 else len(value)  # qstat wraps long values
            wrapped = f"{value[:half]}\n\t{value[half:]}" if value[half:] else value
            print(f"    Resource_List.{name[2:]} = {wrapped}")
    print("    Resource_List.nodect = 1")


def qrerun(number: str) -> None:
    """End a running job and start it again."""
    job = json.loads((Path(os.environ["STUB_PBS"]) / f"{number}.job").read_text())
    os.kill(job["pid"], signal.SIGUSR1)


def run(number: str) -> None:
    """Be the daemon of one job until it has ended."""
    folder = Path(os.environ["STUB_PBS"])
    reruns: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: reruns.append(1))
    _wait_for_others(folder, json.loads((folder / f"{number}.job").read_text()))
    while True:
        job = json.loads((folder / f"{number}.job").read_text())
        job |= {"runs": job["runs"] + 1, "pid": os.getpid()}
        _write(folder, job)
        end_s = time.monotonic() + _seconds(job["walltime"])
        process = _begin(folder, job)
        while process.poll() is None and time.monotonic() < end_s and not reruns:
            time.sleep(0.1)
        _end(process)
        if not reruns:
            break
        reruns.clear()
    _write(folder, job | {"exit": process.returncode})


def _seconds(walltime: str) -> int:
    parts = [0, 0, *map(int, walltime.split(":"))][-3:]
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def _wait_for_others(folder: Path, job: dict) -> None:
    kind, *others = job["asked"].get("W depend", "afterany").split(":")
    assert kind == "afterany", kind
    while any(json.loads((folder / f"{o}.job").read_text())["exit"] is None for o in others):
        time.sleep(0.1)


def _begin(folder: Path, job: dict) -> "subprocess.Popen[bytes]":
    """Start the script as MOM does: its path is the input of a login shell."""
    number = job["number"]
    nodes = folder / f"{number}.nodes"
    nodes.write_text(f"{socket.gethostname()}\n" * 4)
    variables = {k: v for k, v in os.environ.items() if k.startswith(_LOGIN)}
    variables |= {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    variables |= {"PBS_JOBID": number, "PBS_O_WORKDIR": job["folder"]}
    variables |= {"PBS_NODEFILE": str(nodes), "PBS_O_QUEUE": job["queue"], **job["variables"]}
    with (folder / f"{number}.out").open("a") as output:
        process = subprocess.Popen(
            ["bash", "-l"],
            env=variables,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(f"{folder / number}.SC\n".encode())
    process.stdin.close()
    return process


def _start(folder: Path, number: str) -> None:
    with (folder / f"{number}.log").open("w") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.pbs", "run", number],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_DELAY_S)


def _write(folder: Path, job: dict) -> None:
    file = folder / f"{job['number']}.job"
    file.with_suffix(".new").write_text(json.dumps(job))
    file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    {"qsub": qsub, "qstat": qstat, "qrerun": qrerun, "run": run}[sys.argv[1]](*sys.argv[2:])
