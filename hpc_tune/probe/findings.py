"""What is wrong with a cluster, from the facts of all ranks and the measured links (pure)."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_tune.probe.facts import RankFacts
from hpc_tune.probe.links import Links, outliers, rate
from hpc_tune.units import format_bytes

# Per rank: NCCL's and MPI's segments.
SHM_BYTES = 32 << 20
# RDMA registers what it sends; without a network card or a GPU only small things are locked.
LOCKED_BYTES, LEAST_LOCKED_BYTES = 1 << 30, 1 << 20
# Each rank holds a connection to each other in about four groups, and its files.
FILES, FILES_PER_RANK = 256, 4
DISK_BYTES = 1 << 30
HOST_BYTES_PER_RANK = 1 << 30
_SLOW_DISK = 20e6


@dataclass(frozen=True)
class Finding:
    """Something that breaks a run (error), or makes it slow or fail later (warning)."""

    level: Literal["error", "warning"]
    text: str


def find_problems(ranks: Sequence[RankFacts], links: Links) -> list[Finding]:
    """Return all findings, errors first; ``ranks`` are of the whole world, by rank."""
    findings = [
        *_versions(ranks),
        *_devices(ranks),
        *_cards(ranks),
        *_cores(ranks),
        *_limits(ranks),
        *_memory(ranks),
        *_folders(ranks),
        *(Finding("warning", f"slow link, {line}") for line in outliers(links.pairs)),
        *_network(ranks, links),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    versions = [{**rank.versions, "MPI": rank.mpi, "NCCL": rank.nccl} for rank in ranks]
    for package in dict.fromkeys(name for packages in versions for name in packages):
        hosts: dict[str, set[str]] = defaultdict(set)
        for rank, packages in zip(ranks, versions, strict=True):
            hosts[packages.get(package) or "none"].add(rank.hostname)
        if len(hosts) > 1:
            shown = "; ".join(f"{version} on {_some(on)}" for version, on in sorted(hosts.items()))
            level: Literal["error", "warning"] = (
                "error" if package in ("hpc_tune", "torch", "NCCL") else "warning"
            )
            yield Finding(level, f"{package} differs: {shown}. Use one environment for all nodes")
    for here in _by_node(ranks):
        compiled = here[0].compiled
        if compiled is not None and not compiled.ops and compiled.missing_tools:
            yield Finding(
                "warning",
                f"{here[0].hostname}: deepspeed has no compiled ops, and there is no "
                f"{' and no '.join(compiled.missing_tools)} to compile them at their first use; "
                "parallel.zero_stage with offload needs them",
            )


def _devices(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for here in _by_node(ranks):
        first, topology = here[0], here[0].topology
        gpus = topology.gpus if topology else ()
        if topology and gpus and first.device_wanted != "cpu" and not first.device_bytes:
            torch = first.versions.get("torch", "")
            built = f"is built for CUDA {first.cuda}" if first.cuda else "is built without CUDA"
            yield Finding(
                "error",
                f"{first.hostname} has {len(gpus)} GPUs that no rank uses: torch {torch} {built}, "
                f"the driver {topology.driver} has CUDA {topology.driver_cuda}. Install a torch "
                "that fits, look at CUDA_VISIBLE_DEVICES, or set run.device=cpu",
            )
        most = max((gpu.nvlinks for gpu in gpus), default=0)
        weak = [f"GPU {i} has {g.nvlinks}" for i, g in enumerate(gpus) if g.nvlinks < most]
        if weak:
            yield Finding(
                "warning", f"{first.hostname}: of {most} NVLinks {_some(weak)} that are up"
            )


def _cards(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield cards that differ from those of the other nodes; unused ports are down everywhere."""
    cards = [
        (rank.hostname, card) for rank in ranks if rank.topology for card in rank.topology.cards
    ]
    for name in dict.fromkeys(card.name for _, card in cards):
        alike = [(host, card) for host, card in cards if card.name == name]
        usual, count = Counter((card.state, card.rate) for _, card in alike).most_common(1)[0]
        for host, card in alike:
            if (card.state, card.rate) != usual and count > 1:
                yield Finding(
                    "warning",
                    f"{host}: network card {name} is {card.state} at {card.rate}, on {count} "
                    f"other nodes {usual[0]} at {usual[1]}",
                )


def _cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for here in _by_node(ranks):
        host, reachable = here[0].hostname, here[0].num_reachable
        together, fair = {cpu for rank in here for cpu in rank.cpus}, reachable // len(here)
        fix = "start with mpirun --bind-to none, or srun --cpus-per-task"
        if len(here) > 1 and len(together) < min(len(here), reachable):
            yield Finding(
                "warning",
                f"the launcher pinned all {len(here)} ranks of {host} to {_cpus(len(together))} of "
                f"{reachable}: {fix}",
            )
        elif reachable < len(here):
            yield Finding("warning", f"{host}: {len(here)} ranks share {_cpus(reachable)}")
        elif len(here) > 1 and 2 * len(together) // len(here) < fair:
            yield Finding(
                "warning",
                f"the ranks of {host} have {_cpus(len(together))} of {reachable} together: {fix}",
            )
        for rank in here:
            if rank.device_numa is not None and rank.numa_nodes not in ((), (rank.device_numa,)):
                yield Finding(
                    "warning",
                    f"rank {rank.rank} on {rank.hostname} runs on NUMA node "
                    f"{', '.join(map(str, rank.numa_nodes))}, its GPU is at {rank.device_numa}",
                )


def _limits(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    num_nodes, files = len(_by_node(ranks)), FILES + FILES_PER_RANK * len(ranks)
    for here in _by_node(ranks):
        host, first = here[0].hostname, here[0]
        has_cards = bool(first.topology and first.topology.cards)
        needs = LOCKED_BYTES if has_cards or first.device_bytes else LEAST_LOCKED_BYTES
        if first.memlock_bytes is not None and first.memlock_bytes < needs:
            breaks = has_cards and num_nodes > 1
            yield Finding(
                "error" if breaks else "warning",
                f"{host}: a process may lock {format_bytes(first.memlock_bytes)} of memory (ulimit "
                "-l); RDMA and pinned memory need it unlimited. In Slurm: "
                "PropagateResourceLimitsExcept=MEMLOCK, or ask the administrators",
            )
        if first.open_files is not None and first.open_files < files:
            yield Finding(
                "error",
                f"{host}: a process may open {first.open_files} files, {len(ranks)} ranks need "
                f"about {files}: ulimit -n {max(files, 4096)} in the job script",
            )
        if first.shm_free_bytes < SHM_BYTES * len(here):
            yield Finding(
                "error",
                f"{host}: /dev/shm has {format_bytes(first.shm_free_bytes)} of "
                f"{format_bytes(first.shm_bytes)} free, {len(here)} ranks need "
                f"{format_bytes(SHM_BYTES * len(here))}: remove what earlier jobs left there, or "
                "give the container more (--shm-size)",
            )


def _memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for here in _by_node(ranks):
        first = here[0]
        least, had = HOST_BYTES_PER_RANK * len(here), first.host_limit_bytes
        if had < least:
            yield Finding(
                "warning",
                f"{first.hostname}: {format_bytes(had)} of host memory ({first.host_limit_source}) "
                f"for {len(here)} ranks; their libraries alone take about half a GB each",
            )


def _folders(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        for folder in rank.folders:
            where = f"{folder.role} {folder.path} on {rank.hostname}"
            if folder.error:
                yield Finding("error", f"{where} cannot be written: {folder.error}")
            elif folder.free_bytes < DISK_BYTES:
                yield Finding(
                    "warning", f"{where} has {format_bytes(folder.free_bytes)} left on its disk"
                )
            elif folder.bytes_per_s < _SLOW_DISK:
                yield Finding("warning", f"{where} is slow: {rate(folder.bytes_per_s)} written")


def _network(ranks: Sequence[RankFacts], links: Links) -> Iterator[Finding]:
    across = [pair.bytes_per_s for pair in links.pairs if pair.kind == "across nodes"]
    cards = {card.name for rank in ranks if rank.topology for card in rank.topology.cards}
    # The slowest InfiniBand that clusters still have, FDR, carries 6.8 GB/s.
    if across and cards and ranks[0].nccl and max(across) < 3e9:
        yield Finding(
            "warning",
            f"across nodes {rate(max(across))} although there is {_some(cards)}: NCCL has fallen "
            "back to sockets. NCCL_DEBUG=INFO says why; look at NCCL_IB_HCA, and for the site's "
            "plugin (aws-ofi-nccl)",
        )


def _by_node(ranks: Sequence[RankFacts]) -> list[list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node].append(rank)
    return list(nodes.values())


def _cpus(number: int) -> str:
    return "1 CPU" if number == 1 else f"{number} CPUs"


def _some(names: Sequence[str] | set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
