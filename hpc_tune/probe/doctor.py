"""The doctor command: whether nodes, network and software are ready for a run.

before the world: cores, a loopback master -> bootstrap
-> links, products of matrices, facts of all ranks -> findings
-> a table for people, or JSON for programs; exit code 1 if something would break a run
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from hpc_tune.cluster import openmpi
from hpc_tune.cluster.torchrun import check_torchrun_master
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_DONE, EXIT_FAILED
from hpc_tune.log import configure
from hpc_tune.probe.facts import LaunchCores, collect_facts
from hpc_tune.probe.findings import find_problems
from hpc_tune.probe.links import measure_links
from hpc_tune.probe.products import measure_matmuls
from hpc_tune.probe.table import report_dict, report_lines
from hpc_tune.world.affinity import reachable_cpus
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.processes import ancestors

# All of it is to take less than a minute on two nodes of eight, whatever the cores; each further
# node is one more round of pairs.
_LINKS_S, _LINKS_S_PER_NODE = 10.0, 0.5


def run_doctor(
    config: RunConfig,
    as_json: bool,
    links_s: float | None = None,
    products_s: float | None = None,
) -> int:
    """Check the world that this process is a rank of; rank 0 prints the report. Collective.

    ``links_s`` bounds how long pairs of ranks are measured; for ``products_s`` all ranks multiply
    matrices.

    Raises:
        WorldError: if the ranks cannot connect; the message says what is wrong.
    """
    cores = LaunchCores(tuple(sorted(os.sched_getaffinity(0))), len(reachable_cpus()))
    check_torchrun_master(os.environ)
    # GPUs that no rank uses are a finding here, with all others.
    comm = bootstrap(config.run, refuses_unused=False)
    configure(comm.world.rank)
    folders = {"run.dir": Path(config.run.dir)}
    if config.data.cache:
        folders["data.cache"] = Path(config.data.cache)
    folders["the temporary folder"] = Path(os.environ.get("TMPDIR", "/tmp"))
    if links_s is None:
        links_s = _LINKS_S + _LINKS_S_PER_NODE * comm.world.num_nodes
    links = measure_links(comm, links_s)
    products = measure_matmuls(comm, products_s)
    # After the first communicator: by then NCCL has loaded its plugin, or has not.
    facts = collect_facts(comm, cores, folders, config.memory.host_limit, config.run.device)
    ranks = comm.gather(replace(facts, products=products))
    findings = find_problems(ranks, links)
    if comm.is_rank_0:
        if as_json:
            print(json.dumps(report_dict(ranks, links, findings), indent=1))
        else:
            colours = is_terminal(comm.world.launcher) and not os.environ.get("NO_COLOR")
            print("\n".join(report_lines(ranks, links, findings, colours)))
        sys.stdout.flush()
    shutdown(comm)
    broken = any(finding.level == "error" for finding in findings)
    return EXIT_FAILED if broken else EXIT_DONE


def is_terminal(launcher: str) -> bool:
    """Tell whether a person sees what is printed here.

    Open MPI gives each rank a terminal of its own, wherever mpirun itself prints to: there the
    output of the first parent process with another one counts.
    """
    if not sys.stdout.isatty() or launcher != openmpi.OPENMPI_NAME:
        return sys.stdout.isatty()
    try:
        own = os.readlink("/proc/self/fd/1")
        outputs = (os.readlink(f"/proc/{pid}/fd/1") for pid, _ in ancestors())
        visible = next((output for output in outputs if output != own), "")
    except OSError:
        return False
    return visible.startswith(("/dev/pts/", "/dev/tty"))
