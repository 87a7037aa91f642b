"""Which nodes do not start a process any more."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpc_tune.log import log

PROBE_LIMIT_S = 20.0
_END_LIMIT_S = 3.0
_MAX_PARALLEL = 32


def find_silent_nodes(
    nodes: Sequence[str],
    command: Callable[[str], Sequence[str]],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Start a process on each of ``nodes``; return those where that fails, and why.

    ``command`` returns what starts it, ``environment`` is added to its own. Where it fails on all
    nodes, the command is at fault and nothing is known.
    """
    if not nodes:
        return {}
    added = {**os.environ, **environment}
    with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        whys = pool.map(lambda node: _why_silent(command(node), added), nodes)
    found = {node: why for node, why in zip(nodes, whys, strict=True) if why}
    if len(found) == len(nodes):
        log.warning("no node could be probed (%s), so none is left out for that", found[nodes[0]])
        return {}
    return found


def _why_silent(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"a probe failed: {error}"
    try:
        _, said = process.communicate(timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        _end_process(process)
        return f"a probe had no answer in {PROBE_LIMIT_S:.0f} s"
    if process.returncode == 0:
        return ""
    told = next((line.strip() for line in said.splitlines() if re.search(r"\w", line)), "")
    return f"a probe failed: {told or f'exit code {process.returncode}'}"


def _end_process(process: "subprocess.Popen[str]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_LIMIT_S)
            return
