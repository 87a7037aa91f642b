"""Nodes that a run goes on without: told in its events, for the report, and in the log."""

import time
from collections.abc import Mapping
from pathlib import Path

from hpc_tune.log import log
from hpc_tune.rundir.json_lines import EVENTS, Events


def report_excluded_nodes(run_dir: Path, left_out: Mapping[str, str]) -> None:
    """Tell which nodes are left out after a failed start, and why."""
    has_events = (run_dir / EVENTS).is_file()  # not of a start that came to nothing
    events = Events(run_dir / EVENTS if has_events else None)
    for node, why in left_out.items():
        message = f"node {node} is left out from now on: {why}"
        log.warning("%s", message)
        events.write("left_out", node=node, message=message, began_s=time.time())
    events.close()
