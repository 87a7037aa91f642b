"""The doctor command: whether nodes, network and software are ready for a run.

before the process group: cores, a loopback master -> bootstrap
-> links, matmuls, facts of all ranks -> findings
-> a table for people, or JSON for programs; exit code 1 if something would break a run
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from hpc_tune.cluster.launchers import OPENMPI_NAME, check_torchrun_master
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_DONE, EXIT_FAILED
from hpc_tune.log import configure_logging
from hpc_tune.probe.fabric import NcclLibrary
from hpc_tune.probe.facts import LaunchCores, RankFacts, collect_facts
from hpc_tune.probe.findings import Finding, find_problems
from hpc_tune.probe.links import Link, Links, format_rate, measure_links
from hpc_tune.probe.matmuls import MatmulResult, describe_gpu_state, format_flops, measure_matmuls
from hpc_tune.probe.topology import Topology
from hpc_tune.units import format_bytes, format_quantity
from hpc_tune.world.affinity import to_cpu_ranges, widest_cpu_mask
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.processes import list_ancestors

# -- The doctor's report: lines for people, a tree for programs.


_RED, _YELLOW, _GREEN, _RESET_COLOR = "\033[31m", "\033[33m", "\033[32m", "\033[0m"
_MAX_LATENCY_BOUND_BYTES = 1 << 16  # up to this size latency dominates, and the rate says nothing


def make_report_dict(
    ranks: Sequence[RankFacts], links: Links, findings: Sequence[Finding]
) -> dict[str, object]:
    """Return the whole report as a tree for JSON."""
    return {
        "ranks": [asdict(rank) for rank in ranks],
        "links": asdict(links),
        "findings": [asdict(finding) for finding in findings],
    }


def doctor_lines(
    ranks: Sequence[RankFacts], links: Links, findings: Sequence[Finding], uses_colors: bool
) -> list[str]:
    """Return the report as lines for people."""
    lines = _software_lines(ranks[0], len(ranks))
    for node in dict.fromkeys(rank.node for rank in ranks):
        lines += _node_lines([rank for rank in ranks if rank.node == node])
    lines += _link_lines(ranks, links)
    marks = {"error": (_RED, "ERROR"), "warning": (_YELLOW, "warning")}
    for finding in findings:
        color, word = marks[finding.level]
        mark = f"{color}{word}{_RESET_COLOR}" if uses_colors else word
        lines.append(f"{mark}  {finding.text}")
    if not findings:
        text = "no problems found: a run can start"
        lines.append(f"{_GREEN}{text}{_RESET_COLOR}" if uses_colors else text)
    return lines


def _software_lines(first_rank: RankFacts, num_ranks: int) -> list[str]:
    packages = " ".join(f"{name} {version}" for name, version in first_rank.versions.items())
    lines = [f"software  {packages}"]
    mpi = f" and {first_rank.mpi}: both say" if first_rank.mpi else ":"
    lines.append(f"launcher  {first_rank.launcher}{mpi} {format_quantity(num_ranks, 'rank')}")
    cuda = (
        f"torch is built for CUDA {first_rank.cuda}"
        if first_rank.cuda
        else "torch is built without CUDA"
    )
    if first_rank.rocm:
        cuda = f"torch is built for ROCm {first_rank.rocm}"
    driver = first_rank.topology.driver if first_rank.topology else ""
    if first_rank.topology and driver:
        cuda += f", the driver is {driver}"
        cuda += (
            f" and has {first_rank.topology.driver_cuda}" if first_rank.topology.driver_cuda else ""
        )
    lines.append(f"cuda      {cuda}{f'; NCCL {first_rank.nccl}' if first_rank.nccl else ''}")
    if first_rank.library is not None:
        lines.append(_library_line(first_rank.library))
    if first_rank.compiled is not None:
        ops = ", ".join(first_rank.compiled.ops) or "nothing"
        missing = " and ".join(first_rank.compiled.missing_tools)
        note = f"{missing} missing for the rest" if missing else "the rest can be, at first use"
        lines.append(f"deepspeed {ops} compiled; {note}")
    return lines


def _library_line(library: NcclLibrary) -> str:
    files = ", ".join(library.libraries) or "inside torch"
    settings = " ".join(f"{name}={value}" for name, value in library.settings.items())
    parts = [
        f"{library.name.lower()}      {library.version} loaded, {files}",
        f"torch is built for {library.built}" if library.built != library.version else "",
        f"network plugin {library.plugin or 'none'}",
        f"libfabric {library.libfabric}" if library.libfabric else "",
        settings,
    ]
    return "; ".join(filter(None, parts))


def _node_lines(node_ranks: Sequence[RankFacts]) -> list[str]:
    first = node_ranks[0]
    lock_limit = "unlimited" if first.memlock_bytes is None else format_bytes(first.memlock_bytes)
    lines = [
        f"node {first.node}    {first.hostname}: {format_quantity(len(node_ranks), 'rank')}; "
        f"host memory {format_bytes(first.host_used_bytes)} of "
        f"{format_bytes(first.host_limit_bytes)} ({first.host_limit_source}); "
        f"/dev/shm {format_bytes(first.shm_free_bytes)} free; "
        f"lockable {lock_limit}; {first.open_files or 'any number of'} open files"
    ]
    for rank in node_ranks:
        numa = ",".join(map(str, rank.numa_nodes)) or "?"
        device = rank.device
        if rank.device_bytes:
            gpu_numa = "?" if rank.device_numa is None else rank.device_numa
            device += f" {format_bytes(rank.device_bytes)} {rank.device_uuid} (NUMA {gpu_numa})"
        all_cpus = f" of {_format_cpus(rank.cpus)}" if rank.taken not in ((), rank.cpus) else ""
        lines.append(
            f"  rank {rank.rank:<4} {device}; CPUs "
            f"{_format_cpus(rank.taken or rank.cpus)}{all_cpus} "
            f"(NUMA {numa}), {format_quantity(rank.threads, 'thread')}"
        )
        if rank.products is not None:
            lines.append(f"            {_matmul_text(rank.products)}")
    lines += _topology_lines(first.topology) if first.topology else []
    for folder in first.folders:
        if not folder.error:
            free, speed = format_bytes(folder.free_bytes), format_rate(folder.bytes_per_s)
            lines.append(f"  {folder.role} {folder.path}: {free} free, {speed} written")
    return lines


def _matmul_text(result: MatmulResult) -> str:
    if result.error:
        return f"cannot multiply matrices: {result.error}"
    ratio = result.slowest_s / result.median_s
    text = f"{format_flops(result.flops_per_s)} in {result.dtype}, "
    text += f"the slowest matmul {ratio:.2f} x the median time"
    if result.is_wrong:
        text += ", WRONG results"
    state = describe_gpu_state(result)
    return f"{text}; {state}" if state else text


def _topology_lines(topology: Topology) -> list[str]:
    lines = []
    for path in sorted(set(topology.paths.values())):
        pairs = [pair for pair, pair_path in topology.paths.items() if pair_path == path]
        pair_names = "all pairs" if len(pairs) == len(topology.paths) else ", ".join(pairs)
        lines.append(f"  GPUs      {path}: {pair_names}")
    for card in topology.cards:
        facts = [card.state, card.rate, "" if card.numa is None else f"NUMA {card.numa}"]
        gpus = f"behind a switch with GPU {', '.join(map(str, card.near))}" if card.near else ""
        kind = f" ({card.kind})" if card.kind != "InfiniBand" else ""
        lines.append(f"  network   {card.name}{kind}: {', '.join(filter(None, [*facts, gpus]))}")
    return lines


def _link_lines(ranks: Sequence[RankFacts], links: Links) -> list[str]:
    lines = []
    kinds: dict[str, list[Link]] = {}
    for pair in links.pairs:
        kinds.setdefault(_link_kind(ranks, pair), []).append(pair)
    for kind, pairs in sorted(kinds.items(), reverse=True):
        latency = statistics.median(pair.latency_s for pair in pairs)
        rates = [pair.bytes_per_s for pair in pairs]
        slowest = f" (slowest {format_rate(min(rates))})" if len(pairs) > 1 else ""
        lines.append(
            f"links     {kind}, {format_quantity(len(pairs), 'pair')}: "
            f"{format_rate(statistics.median(rates))}"
            f"{slowest}, {latency * 1e6:.0f} us"
        )
    for collective in links.collectives:
        time_text = f"{collective.seconds * 1e3:.2f} ms"
        if collective.num_bytes > _MAX_LATENCY_BOUND_BYTES:
            time_text += f", bus {format_rate(collective.bytes_per_s)}"
        size = format_bytes(collective.num_bytes)
        lines.append(f"links     {collective.name} of {size}: {time_text}")
    if links.skipped:
        lines.append(
            f"links     {format_quantity(links.skipped, 'pair')} not measured: out of time "
            "(--links)"
        )
    return lines


def _link_kind(ranks: Sequence[RankFacts], pair: Link) -> str:
    """Return the kind of a link; within a node, with the path between the two GPUs."""
    node_ranks = [rank for rank in ranks if rank.node == pair.nodes[0]]
    if pair.kind != "same node" or node_ranks[0].topology is None:
        return pair.kind
    index = {gpu.uuid: number for number, gpu in enumerate(node_ranks[0].topology.gpus)}
    gpu, other = sorted(index.get(ranks[rank].device_uuid, -1) for rank in pair.ranks)
    path = node_ranks[0].topology.paths.get(f"{gpu}-{other}")
    return f"{pair.kind} ({path})" if path else pair.kind


def _format_cpus(cpus: Sequence[int]) -> str:
    """Format CPUs as ranges, such as ``"0-3,8"``."""
    ranges = to_cpu_ranges(frozenset(cpus))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


# -- The doctor command.


# The whole command should take less than a minute on two nodes of eight ranks, on any cores; each
# further node adds a round of pairs.
_LINK_TEST_S, _LINK_TEST_S_PER_NODE = 10.0, 0.5


def run_doctor(
    config: RunConfig,
    prints_json: bool,
    links_s: float | None = None,
    matmuls_s: float | None = None,
) -> int:
    """Check the world that this process is a rank of; rank 0 prints the report. Collective.

    ``links_s`` bounds the time to measure pairs of ranks; ``matmuls_s`` is the time for which all
    ranks multiply matrices.

    Raises:
        WorldError: if the ranks cannot connect; the message says what is wrong.
    """
    cores = LaunchCores(tuple(sorted(os.sched_getaffinity(0))), len(widest_cpu_mask()))
    check_torchrun_master(os.environ)
    with _redirect_stdout_to_stderr():
        # GPUs that no rank uses are reported as a finding, with all others.
        comm = bootstrap(config.run, refuses_unused_gpus=False)
        configure_logging(comm.world.rank)
        folders = {"run.dir": Path(config.run.dir)}
        if config.data.cache:
            folders["data.cache"] = Path(config.data.cache)
        folders["the temporary folder"] = Path(os.environ.get("TMPDIR", "/tmp"))
        if links_s is None:
            links_s = _LINK_TEST_S + _LINK_TEST_S_PER_NODE * comm.world.num_nodes
        links = measure_links(comm, links_s)
        matmuls = measure_matmuls(comm, matmuls_s)
        # After the first communicator: NCCL loads its plugin, if any, when it creates one.
        facts = collect_facts(comm, cores, folders, config.memory.host_limit, config.run.device)
        ranks = comm.gather(replace(facts, products=matmuls))
    findings = find_problems(ranks, links)
    if comm.is_rank_0:
        if prints_json:
            print(json.dumps(make_report_dict(ranks, links, findings), indent=1))
        else:
            uses_colors = is_stdout_terminal(comm.world.launcher) and not os.environ.get("NO_COLOR")
            print("\n".join(doctor_lines(ranks, links, findings, uses_colors)))
        sys.stdout.flush()
    shutdown(comm)
    has_errors = any(finding.level == "error" for finding in findings)
    return EXIT_FAILED if has_errors else EXIT_DONE


@contextmanager
def _redirect_stdout_to_stderr() -> Iterator[None]:
    """Redirect what libraries print to stdout to stderr, so that stdout has only the report.

    In torch 2.9 gloo prints a line for each group of each rank.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def is_stdout_terminal(launcher: str) -> bool:
    """Return whether stdout ends at a terminal.

    Open MPI gives each rank a terminal of its own, even if mpirun's own output goes elsewhere.
    Under Open MPI, the stdout of the first ancestor process with a different one decides.
    """
    if not sys.stdout.isatty() or launcher != OPENMPI_NAME:
        return sys.stdout.isatty()
    try:
        own_output = os.readlink("/proc/self/fd/1")
        outputs = (os.readlink(f"/proc/{pid}/fd/1") for pid, _ in list_ancestors())
        visible = next((output for output in outputs if output != own_output), "")
    except OSError:
        return False
    return visible.startswith(("/dev/pts/", "/dev/tty"))
