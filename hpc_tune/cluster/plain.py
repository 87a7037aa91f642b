"""Ranks that have torch's own variables and nothing else, and one process alone.

deepspeed's launcher, a Kubernetes PyTorchJob and a loop over ssh start such ranks.
"""

import re

from hpc_tune.cluster.protocol import Claim, Environ, Launcher, MeetingPoint, read_claim
from hpc_tune.errors import WorldError

UNKNOWN = "an unknown launcher"
TORCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SINGLE = Claim("single", rank=0, size=1, local_rank=0, local_size=1, node=0, num_nodes=1)


def _claim(environ: Environ) -> Claim | None:
    """Return a claim without nodes: each such launcher has other names for them, or none."""
    if "RANK" not in environ and environ.get("WORLD_SIZE", "") in ("", "1"):
        return None
    claim = read_claim(environ, UNKNOWN, rank="RANK", size="WORLD_SIZE")
    if claim.size == 1 and claim.rank in (0, None):
        return None
    if missing := [name for name in TORCH_NAMES if not environ.get(name)]:
        given = ", ".join(f"{name}={environ[name]}" for name in TORCH_NAMES if environ.get(name))
        raise WorldError(
            f"the environment has {given}, but not {', '.join(missing)}: a launcher sets "
            f"{', '.join(TORCH_NAMES)} for each rank. Set them, start with mpirun, srun or "
            "torchrun, or unset them all for a single process"
        )
    if not re.fullmatch(r"[0-9]{1,5}", environ["MASTER_PORT"]):
        raise WorldError(f"MASTER_PORT={environ['MASTER_PORT']!r} is not a port number")
    return claim


def _meeting_point(environ: Environ, claim: Claim) -> MeetingPoint:
    port = int(environ["MASTER_PORT"])
    # Not the address: for rank 0 it is often localhost.
    return MeetingPoint([environ["MASTER_ADDR"]], f"{claim.size} ranks at {port}", [port])


PLAIN = Launcher(_claim, prefixes=TORCH_NAMES, meeting_point=_meeting_point)
SINGLE = Launcher(lambda environ: _SINGLE)
