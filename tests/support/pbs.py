"""Stands for PBS where none can be installed: qsub, qstat and qrerun for jobs on this host.

It does what the manual of OpenPBS says of these: a job gets PBS_* variables and what ``-v`` lists
(a name alone: the value that qsub itself has), and nothing else of the submitter's environment; it
starts in the home directory; options of the command line go before those of the script; at its
walltime it gets SIGTERM, and SIGKILL a little later.

    python -m tests.support.pbs qsub|qstat|qrerun|run ARGUMENTS    (the state is in $STUB_PBS)
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("qsub", "qstat", "qrerun")
KILL_DELAY_S = 5.0
# What a login sets; for root Open MPI's consent, too.
_LOGIN = ("PATH", "HOME", "LANG", "STUB_PBS", "PYTHONPATH", "OMPI_", "PRTE_")


def install(folder: Path) -> dict[str, str]:
    """Put the programs into ``folder`` and return the variables with which they are found."""
    for name in PROGRAMS:
        program = folder / name
        words = [sys.executable, "-m", "tests.support.pbs", name]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "STUB_PBS": str(folder)}


def jobs(folder: Path) -> list[dict]:
    """Return the jobs in the order of their submission; ``exit`` is None while one is there."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.job"))]


def qsub(*words: str) -> None:
    """Submit: ``qsub [-l RESOURCES] [-q QUEUE] [-A ACCOUNT] [-v LIST] SCRIPT``."""
    *options, script = words
    text = Path(script).read_text()
    told = [*re.findall(r"^#PBS +(-\S+) +(.*?) *(?:#.*)?$", text, re.MULTILINE)]
    told += zip(options[::2], options[1::2], strict=True)
    walltime, select, queue, account, variables = "", "", "", "", {}
    for option, value in told:
        if option == "-l":
            resources = dict(item.partition("=")[::2] for item in value.split(","))
            walltime, select = (
                resources.get("walltime", walltime),
                resources.get("select", select),
            )
        elif option in ("-q", "-A"):
            queue, account = (value, account) if option == "-q" else (queue, value)
        elif option == "-v":
            for item in value.split(","):
                name, given, text = item.partition("=")
                variables[name] = text if given else os.environ[name]
    folder = Path(os.environ["STUB_PBS"])
    number = f"{len(jobs(folder)):03d}.stub"
    job = {"number": number, "script": str(Path(script).absolute()), "walltime": walltime}
    job |= {"folder": os.getcwd(), "variables": variables, "runs": 0, "exit": None, "pid": None}
    job |= {"select": select, "queue": queue, "account": account}
    _write(folder, job)
    _start(folder, number)
    print(number)


def qstat(*words: str) -> None:
    """Show a job: ``qstat -f NUMBER``."""
    job = json.loads((Path(os.environ["STUB_PBS"]) / f"{words[-1]}.job").read_text())
    print(f"Job Id: {job['number']}\n    job_state = R\n    queue = routed-{job['queue']}")
    print(f"    Account_Name = {job['account']}\n    Resource_List.place = scatter")
    half = len(job["select"]) // 2  # as it wraps what is long
    print(f"    Resource_List.select = {job['select'][:half]}\n\t{job['select'][half:]}")
    print(f"    Resource_List.walltime = {job['walltime']}")


def qrerun(number: str) -> None:
    """End a running job and start it again."""
    job = json.loads((Path(os.environ["STUB_PBS"]) / f"{number}.job").read_text())
    os.kill(job["pid"], signal.SIGUSR1)


def run(number: str) -> None:
    """Be the daemon of one job until it has ended."""
    folder = Path(os.environ["STUB_PBS"])
    reruns: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: reruns.append(1))
    while True:
        job = json.loads((folder / f"{number}.job").read_text())
        job |= {"runs": job["runs"] + 1, "pid": os.getpid()}
        _write(folder, job)
        hours, minutes, seconds = map(int, job["walltime"].split(":"))
        end_s = time.monotonic() + hours * 3600 + minutes * 60 + seconds
        nodes = folder / f"{number}.nodes"
        nodes.write_text(f"{socket.gethostname()}\n" * 4)
        variables = {k: v for k, v in os.environ.items() if k.startswith(_LOGIN)}
        variables |= {"PBS_JOBID": number, "PBS_O_WORKDIR": job["folder"]}
        variables |= {"PBS_NODEFILE": str(nodes), "PBS_O_QUEUE": job["queue"], **job["variables"]}
        with (folder / f"{number}.out").open("a") as output:
            process = subprocess.Popen(
                ["bash", job["script"]],
                env=variables,
                cwd=Path.home(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        while process.poll() is None and time.monotonic() < end_s and not reruns:
            time.sleep(0.1)
        _end(process)
        if not reruns:
            break
        reruns.clear()
    _write(folder, job | {"exit": process.returncode})


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
