"""The report at the end of a run, drawn by the report command in a process of its own.

It imports nothing large: the supervisor of a job uses it too.
"""

import shlex
import subprocess
from pathlib import Path

from hpc_tune.cluster.launchers import run_command, why_command_failed
from hpc_tune.log import log
from hpc_tune.memory.host import REPORT_BYTES, find_limit, spare_bytes
from hpc_tune.rundir.json_lines import METRICS
from hpc_tune.rundir.owner import RESOLVED_CONFIG
from hpc_tune.units import format_bytes

_MEMORY_PER_BYTE = 4  # of metrics.jsonl, on top of the process
_LIMIT_S = 60.0


def run_report_command(run_dir: Path) -> None:
    """Write report.html; if that fails, log how to write it later: it must not end the run.

    Nothing is written, and nothing said, where no run has begun.
    """
    if not (run_dir / RESOLVED_CONFIG).is_file():
        return
    later = f"python -m hpc_tune report {shlex.quote(str(run_dir))}"
    left = spare_bytes(find_limit())
    if left < REPORT_BYTES + _MEMORY_PER_BYTE * _metrics_bytes(run_dir):
        log.warning("no report: %s of memory left; write it with: %s", format_bytes(left), later)
        return
    try:
        done = run_command(["report", "--no-job-energy", str(run_dir)], _LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no report (%s); write it with: %s", why_command_failed(error), later)
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        log.warning("no report: %s; write it with: %s", reason.removeprefix("hpc_tune: "), later)
        return
    log.info("report  %s", done.stdout.strip())


def _metrics_bytes(run_dir: Path) -> int:
    try:
        return (run_dir / METRICS).stat().st_size
    except OSError:
        return 0
