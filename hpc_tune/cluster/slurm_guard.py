"""Requeues a Slurm job whose first node is lost.

With --no-kill Slurm only takes the node out of the job. If it has gone with all its processes, the
job then holds the other nodes until its time limit, without a batch script; if its daemon lives,
the job has failed. So a small step on another node looks, and asks for what Slurm does otherwise.
"""

import os
import subprocess
from collections.abc import Sequence

from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.slurm_nodes import GUARD_STEP, OVERLAP_VARIABLES

GUARD_CHECK_EVERY_S = 60
# A job that its user has ended is left alone: its state has another reason.
_GUARD_SCRIPT = """\
first=$1 job=$2
check() {
    shown=$(scontrol show job "$job") || return 1
    case "$shown" in
    *JobState=RUNNING*) ;;
    *Reason=JobLaunchFailure* | *Reason=NodeFail* | *Reason=NodeDown*) ;;
    *) return 1 ;;
    esac
    nodes=$(printf '%s\\n' "$shown" | sed -n 's/^ *NodeList=//p')
    [ -n "$nodes" ] || return 1
    scontrol show hostnames "$nodes" | grep -qx "$first" && return 1
    scontrol requeue "$job"
}
trap 'check; exit' TERM
while :; do
    sleep "$3" &
    wait $!
    check && exit
done
"""


class RequeueGuard:
    """Keeps one such step alive."""

    def __init__(self, job_id: str, environ: Environ) -> None:
        """Take the job of ``environ``, in whose batch script this process runs."""
        self._job_id, self._first = job_id, environ.get("SLURMD_NODENAME", "")
        self._child: subprocess.Popen[bytes] | None = None
        self._node = ""

    def keep(self, nodes: Sequence[str]) -> None:
        """Start the step on one of ``nodes`` unless it runs there."""
        others = [node for node in nodes if node != self._first]
        runs = self._child is not None and self._child.poll() is None and self._node in others
        if runs or not others or self._first not in nodes:
            return
        self._node = others[0]
        words = ["srun", "--no-kill", f"--job-name={GUARD_STEP}", "--nodes=1", "--ntasks=1"]
        words += [f"--nodelist={self._node}", "--mpi=none", "--quiet"]
        words += [
            "sh",
            "-c",
            _GUARD_SCRIPT,
            GUARD_STEP,
            self._first,
            self._job_id,
            str(GUARD_CHECK_EVERY_S),
        ]
        try:
            self._child = subprocess.Popen(
                words,
                env={**os.environ, **OVERLAP_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # without srun there is no step at all
            self._child = None
