"""One command that says whether the cluster is as a run needs it, before the run does.

before the world: cores, a loopback master -> bootstrap -> facts of all ranks, links -> findings
-> a table for people, or JSON for programs; exit code 1 if something would break a run
"""

import ipaddress
import json
import os
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_DONE, EXIT_FAILED, WorldError
from hpc_tune.log import configure
from hpc_tune.probe.facts import RankFacts, gather
from hpc_tune.probe.findings import Finding, find
from hpc_tune.probe.links import Links, measure, rate
from hpc_tune.units import format_bytes
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.collective import gather_objects

_RED, _YELLOW, _GREEN, _PLAIN = "\033[31m", "\033[33m", "\033[32m", "\033[0m"


def run_doctor(config: RunConfig, as_json: bool, links_s: float) -> int:
    """Look at the world that this process is a rank of; rank 0 prints. Collective.

    Raises:
        WorldError: if there is no world to look at; the message says what is wrong.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    check_master(os.environ)
    session = bootstrap(config.run)
    configure(session.world.rank)
    folders = {"run.dir": Path(config.run.dir)}
    folders["data.cache"] = Path(config.data.cache or config.run.dir)
    folders["the temporary folder"] = Path(os.environ.get("TMPDIR", "/tmp"))
    ranks = gather_objects(session, gather(session, cpus, folders, config.memory.host_limit))
    links = measure(session, links_s)
    found = find(ranks, links)
    if session.world.rank == 0:
        if as_json:
            print(json.dumps(as_dict(ranks, links, found), indent=1))
        else:
            colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            print("\n".join(as_lines(ranks, links, found, colours)))
        sys.stdout.flush()
    shutdown(session)
    broken = any(finding.level == "error" for finding in found)
    return EXIT_FAILED if broken else EXIT_DONE


def check_master(environ: Mapping[str, str]) -> None:
    """Refuse a torchrun of several nodes whose master address is each node's own.

    Raises:
        WorldError: since no two nodes would ever meet.
    """
    name, nodes = environ.get("MASTER_ADDR", ""), environ.get("GROUP_WORLD_SIZE", "1")
    if not name or nodes in ("", "1"):
        return
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        raise WorldError(f"MASTER_ADDR={name} cannot be resolved: {error}") from None
    if ipaddress.ip_address(address).is_loopback:
        raise WorldError(
            f"MASTER_ADDR={name} is {address}, each node's own address, on {nodes} nodes: give "
            "torchrun --master-addr the address of the first node's network"
        )


def as_dict(
    ranks: Sequence[RankFacts], links: Links, found: Sequence[Finding]
) -> dict[str, object]:
    """Return everything, for JSON."""
    return {
        "ranks": [asdict(rank) for rank in ranks],
        "links": asdict(links),
        "findings": [asdict(finding) for finding in found],
    }


def as_lines(
    ranks: Sequence[RankFacts], links: Links, found: Sequence[Finding], colours: bool
) -> list[str]:
    """Return the report for people."""
    first = ranks[0]
    shown = " ".join(f"{name} {version}" for name, version in first.versions.items())
    lines = [f"software  {shown}"]
    lines.append(f"launcher  {first.launcher}{f', {first.mpi}' if first.mpi else ''}")
    for node in dict.fromkeys(rank.node for rank in ranks):
        lines += _node_lines([rank for rank in ranks if rank.node == node])
    lines += _link_lines(links)
    marks = {"error": (_RED, "ERROR"), "warning": (_YELLOW, "warning")}
    for finding in found:
        colour, word = marks[finding.level]
        mark = f"{colour}{word}{_PLAIN}" if colours else word
        lines.append(f"{mark}  {finding.text}")
    if not found:
        text = "nothing is in the way of a run"
        lines.append(f"{_GREEN}{text}{_PLAIN}" if colours else text)
    return lines


def _node_lines(here: Sequence[RankFacts]) -> list[str]:
    first = here[0]
    locked = "unlimited" if first.memlock_bytes is None else format_bytes(first.memlock_bytes)
    lines = [
        f"node {first.node}    {first.hostname}: {len(here)} ranks; host memory "
        f"{format_bytes(first.host_used_bytes)} of {format_bytes(first.host_limit_bytes)} "
        f"({first.host_limit_source}); /dev/shm {format_bytes(first.shm_free_bytes)} free; "
        f"lockable {locked}; {first.open_files or 'any number of'} open files"
    ]
    for rank in here:
        numa = ",".join(map(str, rank.numa_nodes)) or "?"
        device = rank.device
        if rank.device_bytes:
            device += f" {format_bytes(rank.device_bytes)}"
        lines.append(
            f"  rank {rank.rank:<4} {device}; CPUs {_ranges(rank.cpus)} (NUMA {numa}), "
            f"{rank.threads} threads"
        )
    for folder in first.folders:
        if not folder.error:
            free, speed = format_bytes(folder.free_bytes), rate(folder.bytes_per_s)
            lines.append(f"  {folder.role} {folder.path}: {free} free, {speed} written")
    return lines


def _link_lines(links: Links) -> list[str]:
    lines = []
    for kind in ("same node", "across nodes"):
        alike = [pair for pair in links.pairs if pair.kind == kind]
        if alike:
            latency = statistics.median(pair.latency_s for pair in alike)
            rates = [pair.bytes_per_s for pair in alike]
            lines.append(
                f"links     {kind}, {len(alike)} pairs: {rate(statistics.median(rates))} (slowest "
                f"{rate(min(rates))}), {latency * 1e6:.0f} us"
            )
    for one in links.collectives:
        lines.append(
            f"links     {one.name} of {format_bytes(one.num_bytes)}: {one.seconds * 1e3:.2f} ms, "
            f"bus {rate(one.bytes_per_s)}"
        )
    if links.skipped:
        lines.append(f"links     {links.skipped} pairs not measured for want of time")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Return such as ``"0-3,8"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
