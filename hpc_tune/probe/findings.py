"""Find what is wrong with a cluster, from all ranks' facts and the measured links (pure)."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Literal

from hpc_tune.memory.host import MIN_RANK_BYTES
from hpc_tune.packages import parse_release
from hpc_tune.probe import fabric
from hpc_tune.probe.fabric import PLUGIN_NETWORKS, NcclLibrary
from hpc_tune.probe.facts import RankFacts
from hpc_tune.probe.links import Links, describe_slow_links, format_rate
from hpc_tune.probe.matmuls import MatmulResult, describe_gpu_state, format_flops
from hpc_tune.probe.topology import NO_NVML
from hpc_tune.units import format_bytes, format_quantity, format_seconds, list_some
from hpc_tune.world.processes import files_needed

# Per rank: NCCL's and MPI's segments.
SHM_BYTES_PER_RANK = 32 << 20
# RDMA locks the memory it sends from; without a network card or a GPU only little is locked.
RDMA_LOCKED_BYTES, MIN_LOCKED_BYTES = 1 << 30, 1 << 20
MIN_FREE_DISK_BYTES = 1 << 30
_SLOW_DISK_BYTES_PER_S = 20e6
# Clocks synchronized over a network differ by milliseconds; file systems store time in seconds.
_MAX_CLOCK_OFFSET_S = 2.0
# Fraction of the median speed of the same model. Other processes of a node take CPU time.
_SLOW_GPU_SHARE, _SLOW_CPU_SHARE = 0.9, 0.5
# Below a card's rate divided by this, messages go by TCP: RDMA comes close to the rate.
_TCP_RATE_DIVISOR = 3
_DISABLING_VALUES = {"NCCL_NET": "socket", "NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class Finding:
    """Something that breaks a run (error), or slows it down or breaks it later (warning)."""

    level: Literal["error", "warning"]
    text: str


def find_problems(ranks: Sequence[RankFacts], links: Links) -> list[Finding]:
    """Return all findings, errors first; ``ranks`` are of the whole world, by rank."""
    findings = [
        *_check_versions(ranks),
        *_check_devices(ranks),
        *_check_matmuls(ranks),
        *_check_attention(ranks),
        *_check_network_cards(ranks),
        *_check_cores(ranks),
        *_check_limits(ranks),
        *_check_memory(ranks),
        *_check_folders(ranks),
        *_check_clocks(ranks),
        *_check_driver(ranks),
        *_check_nccl(ranks),
        *(Finding("warning", f"slow link, {line}") for line in describe_slow_links(links.pairs)),
        *_check_network(ranks, links),
        *_check_fabric(ranks),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def _check_versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    versions = [{**rank.versions, "MPI": rank.mpi, "NCCL": rank.nccl} for rank in ranks]
    for package in dict.fromkeys(name for packages in versions for name in packages):
        hosts: dict[str, set[str]] = defaultdict(set)
        for rank, packages in zip(ranks, versions, strict=True):
            hosts[packages.get(package) or "none"].add(rank.hostname)
        if len(hosts) > 1:
            summary = "; ".join(
                f"{version} on {_join_names(names)}" for version, names in sorted(hosts.items())
            )
            level: Literal["error", "warning"] = (
                "error" if package in ("hpc_tune", "torch", "NCCL") else "warning"
            )
            yield Finding(level, f"{package} differs: {summary}. Use one environment for all nodes")
    for text in dict.fromkeys(rank.hidden for rank in ranks if rank.hidden):
        names = _join_names(
            [group[0].hostname for group in _group_by_node(ranks) if group[0].hidden == text]
        )
        yield Finding("warning", f"{names}: {text}")
    for group in _group_by_node(ranks):
        built_ops = group[0].compiled
        if built_ops is not None and not built_ops.ops and built_ops.missing_tools:
            yield Finding(
                "warning",
                f"{group[0].hostname}: deepspeed has no compiled ops, and there is no "
                f"{' and no '.join(built_ops.missing_tools)} to compile them at their first use; "
                "parallel.zero_stage with offload needs them",
            )


def _check_devices(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for group in _group_by_node(ranks):
        first, topology = group[0], group[0].topology
        gpus = topology.gpus if topology else ()
        if first.unused is not None:
            yield Finding("error" if first.unused.is_error else "warning", first.unused.text)
        maximum = max((gpu.nvlinks for gpu in gpus), default=0)
        weak = [f"GPU {i} has only {g.nvlinks}" for i, g in enumerate(gpus) if g.nvlinks < maximum]
        if weak:
            yield Finding(
                "warning", f"{first.hostname}: {_join_names(weak)} of {maximum} {gpus[0].link}s up"
            )


def _check_attention(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    hosts: dict[str, list[str]] = defaultdict(list)
    for rank in ranks:
        if rank.lacks_attention:
            hosts[rank.lacks_attention].append(rank.hostname)
    for package, on in hosts.items():
        yield Finding(
            "warning",
            f"{_join_names(set(on))}: attention is torch's own; {package}, built for this torch, "
            "takes about half the time and is used if it is installed. Runs do not need it",
        )


def _check_matmuls(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield ranks whose matmuls fail, are wrong, or are slower than those of the same model."""
    model_rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    shared_nodes = [g[0].node for g in _group_by_node(ranks) if _do_ranks_share_cores(g)]
    results = [(rank, rank.products) for rank in ranks if rank.products is not None]
    for rank, result in results:
        if result.flops_per_s and (rank.device_bytes or rank.node not in shared_nodes):
            model_rates[result.model, result.dtype].append(result.flops_per_s)
    for rank, result in results:
        name = f"{rank.hostname}: {_describe_processor(ranks, rank)}"
        advice = (
            f"Leave {rank.hostname} out of the job (in Slurm --exclude) and report it to the site"
        )
        if result.error:
            yield Finding("error", f"{name} cannot multiply matrices: {result.error}")
            continue
        if result.is_wrong:
            yield Finding(
                "error", f"{name} computes wrongly: {_describe_wrong_matmuls(result)}. {advice}"
            )
        rates = model_rates.get((result.model, result.dtype), [])
        usual = median_high(rates or [0.0])
        min_share = _SLOW_GPU_SHARE if rank.device_bytes else _SLOW_CPU_SHARE
        if (
            rank.node in shared_nodes
            and not rank.device_bytes
            or result.flops_per_s >= min_share * usual
        ):
            continue
        state = describe_gpu_state(result)
        yield Finding(
            "warning",
            f"{name} multiplies matrices at {format_flops(result.flops_per_s)} in {result.dtype}, "
            f"{1 - result.flops_per_s / usual:.0%} below the median of all {len(rates)} of its "
            f"model, {format_flops(usual)}{f' ({state})' if state else ''}: all ranks wait for the "
            f"slowest. {advice}",
        )


def _do_ranks_share_cores(node_ranks: Sequence[RankFacts]) -> bool:
    """Whether ranks of a node compute on the same cores, which is a separate finding."""
    cpus = [cpu for rank in node_ranks for cpu in rank.taken or rank.cpus]
    return len(cpus) != len(set(cpus))


def _describe_processor(ranks: Sequence[RankFacts], rank: RankFacts) -> str:
    """Name the processor of a rank; a GPU by the driver's index, if known."""
    if not rank.device_bytes:
        return f"rank {rank.rank} on CPUs {_join_names([*map(str, rank.taken or rank.cpus)])}"
    topology = next((r.topology for r in ranks if r.node == rank.node and r.topology), None)
    uuids = [gpu.uuid for gpu in topology.gpus] if topology else []
    number = f"GPU {uuids.index(rank.device_uuid)}" if rank.device_uuid in uuids else "the GPU"
    ids = [rank.device, rank.device_place, rank.device_uuid]
    return f"{number} of rank {rank.rank} ({', '.join(filter(None, ids))})"


def _describe_wrong_matmuls(result: MatmulResult) -> str:
    parts = []
    if result.num_wrong:
        parts.append(
            f"{result.num_wrong} of {result.num_checked} matmuls of small integers "
            "had a wrong value"
        )
    if result.num_differing:
        parts.append(
            f"the same matmul gave other bits {result.num_differing} of {result.num_checked} times"
        )
    return ", ".join(parts)


def _check_network_cards(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield cards whose state differs from the other nodes'; unused ports are down on all nodes."""
    cards = [
        (rank.hostname, card) for rank in ranks if rank.topology for card in rank.topology.cards
    ]
    for name in dict.fromkeys(card.name for _, card in cards):
        peers = [(host, card) for host, card in cards if card.name == name]
        usual, count = Counter((card.state, card.rate) for _, card in peers).most_common(1)[0]
        for host, card in peers:
            if (card.state, card.rate) != usual and count > 1:
                yield Finding(
                    "warning",
                    f"{host}: network card {name} is {card.state} at {card.rate}, on {count} "
                    f"other nodes {usual[0]} at {usual[1]}",
                )


def _check_cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for group in _group_by_node(ranks):
        host, reachable = group[0].hostname, group[0].num_reachable
        all_cpus, share = {cpu for rank in group for cpu in rank.cpus}, reachable // len(group)
        pinned_to = format_quantity(len(all_cpus), "CPU")
        fix = "start with mpirun --bind-to none, or srun --cpus-per-task"
        if len(group) > 1 and len(all_cpus) < min(len(group), reachable):
            yield Finding(
                "warning",
                f"the launcher pinned all {len(group)} ranks of {host} to {pinned_to} of "
                f"{reachable}: {fix}",
            )
        elif reachable < len(group):
            yield Finding(
                "warning", f"{host}: {len(group)} ranks share {format_quantity(reachable, 'CPU')}"
            )
        elif len(group) > 1 and 2 * len(all_cpus) // len(group) < share:
            yield Finding(
                "warning", f"the ranks of {host} have {pinned_to} of {reachable} together: {fix}"
            )
        for rank in group:
            numa = rank.device_numa
            if numa is not None and rank.numa_nodes and numa not in rank.numa_nodes:
                yield Finding(
                    "warning",
                    f"rank {rank.rank} on {rank.hostname} runs on NUMA node "
                    f"{', '.join(map(str, rank.numa_nodes))}, its GPU is at {numa}",
                )


def _check_limits(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    num_nodes, files = len(_group_by_node(ranks)), files_needed(len(ranks))
    for group in _group_by_node(ranks):
        host, first = group[0].hostname, group[0]
        has_cards = bool(first.topology and first.topology.cards)
        min_bytes = RDMA_LOCKED_BYTES if has_cards or first.device_bytes else MIN_LOCKED_BYTES
        if first.memlock_bytes is not None and first.memlock_bytes < min_bytes:
            is_fatal = has_cards and num_nodes > 1
            yield Finding(
                "error" if is_fatal else "warning",
                f"{host}: a process may lock {format_bytes(first.memlock_bytes)} of memory (ulimit "
                "-l); RDMA and pinned memory need it unlimited. In Slurm: "
                "PropagateResourceLimitsExcept=MEMLOCK, or ask the administrators",
            )
        if first.open_files is not None and first.open_files < files:
            yield Finding(
                "error",
                f"{host}: a process may open {first.open_files} files, {len(ranks)} ranks need "
                f"about {files}; runs raise the soft limit to the hard one, and that is too low: "
                f"ulimit -Hn {max(files, 4096)} before the launcher, or ask the administrators",
            )
        if first.shm_free_bytes < SHM_BYTES_PER_RANK * len(group):
            yield Finding(
                "error",
                f"{host}: /dev/shm has {format_bytes(first.shm_free_bytes)} of "
                f"{format_bytes(first.shm_bytes)} free, {len(group)} ranks need "
                f"{format_bytes(SHM_BYTES_PER_RANK * len(group))}: remove what earlier jobs left "
                "there, or give the container more (--shm-size)",
            )


def _check_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for group in _group_by_node(ranks):
        first = group[0]
        min_bytes, had = MIN_RANK_BYTES * len(group), first.host_limit_bytes
        if had < min_bytes:
            yield Finding(
                "warning",
                f"{first.hostname}: {format_bytes(had)} of host memory ({first.host_limit_source}) "
                f"for {len(group)} ranks; their libraries alone take about half a GB each",
            )


def _check_folders(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        for folder in rank.folders:
            label = f"{folder.role} {folder.path} on {rank.hostname}"
            if folder.error:
                yield Finding("error", f"{label} cannot be written: {folder.error}")
            elif folder.free_bytes < MIN_FREE_DISK_BYTES:
                yield Finding(
                    "warning", f"{label} has {format_bytes(folder.free_bytes)} left on its disk"
                )
            elif folder.bytes_per_s < _SLOW_DISK_BYTES_PER_S:
                yield Finding(
                    "warning", f"{label} is slow: {format_rate(folder.bytes_per_s)} written"
                )


def _check_nccl(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield problems of the loaded NCCL; the same problem on several nodes is one finding."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for rank in ranks:
        if rank.library is None:
            continue
        files, version, built = rank.library.libraries, rank.library.version, rank.library.built
        if len(files) > 1:
            hosts[
                f"{rank.library.name} is loaded twice ({', '.join(files)}): take one out of "
                "LD_PRELOAD or LD_LIBRARY_PATH"
            ].append(rank.hostname)
        elif parse_release(version) < parse_release(built):
            hosts[
                f"torch is built for {rank.library.name} {built}, and {version} is loaded from "
                f"{', '.join(files)}: functions that it lacks fail when called. Take it out of "
                "LD_PRELOAD and LD_LIBRARY_PATH, or load the site's newer one"
            ].append(rank.hostname)
    for text, names in hosts.items():
        yield Finding("warning", f"{_join_names(names)}: {text}")


def _check_clocks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    clocks = [(group[0].hostname, group[0].clock_s) for group in _group_by_node(ranks)]
    known_clocks = [(host, clock_s) for host, clock_s in clocks if clock_s is not None]
    median_s = median_low([clock_s for _, clock_s in known_clocks]) if known_clocks else 0.0
    peers = "the other node's" if len(known_clocks) == 2 else "the others'"
    for host, clock_s in known_clocks:
        offset_s = clock_s - median_s
        if abs(offset_s) > _MAX_CLOCK_OFFSET_S:
            yield Finding(
                "warning",
                f"{host}: its clock is {format_seconds(abs(offset_s))} "
                f"{'ahead of' if offset_s > 0 else 'behind'} {peers}: the job's end is read from "
                "rank 0's clock. Synchronize the nodes' clocks (chronyc tracking, timedatectl)",
            )


def _check_driver(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield errors of NVIDIA's management library on nodes whose ranks compute on its GPUs."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for rank in ranks:
        if rank.topology and rank.topology.driver_error and rank.device_bytes and rank.cuda:
            hosts[rank.topology.driver_error].append(rank.hostname)
    for error, on in hosts.items():
        if error == NO_NVML:
            yield Finding(
                "warning",
                f"{_join_names(on)}: {error}, so the links between GPUs are unknown: python -m pip "
                "install nvidia-ml-py. Runs do not need it",
            )
            continue
        yield Finding(
            "warning",
            f"{_join_names(on)}: the driver's management library refuses ({error}), as it may for "
            "slices of a GPU (MIG), for virtual ones, or by the site's choice: the links between "
            "GPUs are unknown. Runs do not need it",
        )


def _check_network(ranks: Sequence[RankFacts], links: Links) -> Iterator[Finding]:
    """Yield why messages between nodes go by TCP although there is a faster network."""
    rates = [pair.bytes_per_s for pair in links.pairs if pair.kind == "across nodes"]
    if len(_group_by_node(ranks)) == 1 or not ranks[0].nccl:
        return
    name, kind, gbits = _fastest_network_card(ranks)
    reason = _describe_missing_plugin(ranks)
    if rates and 8 * max(rates) < gbits * 1e9 / _TCP_RATE_DIVISOR:
        yield Finding(
            "warning",
            f"across nodes {format_rate(max(rates))}, where {kind} {name} is {gbits:g} Gb/s "
            f"({format_rate(gbits * 1e9 / 8)}): {reason or _slow_network_reason(ranks, kind)}",
        )
    elif reason:
        yield Finding("warning", reason)


def _check_fabric(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield variables of the network in use that are harmful or differ from what sites set."""
    if len(_group_by_node(ranks)) == 1:
        return
    hosts: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for rank in ranks:
        if rank.topology is None or rank.library is None or not rank.library.plugin:
            continue  # the rank sends by TCP, or needs no libfabric
        kind = next((card.kind for card in rank.topology.cards), "")
        library = rank.library
        for harm in fabric.find_harmful_settings(
            kind, library.name, library.version, library.settings
        ):
            hosts[harm].append(rank.hostname)
        if variables := fabric.find_deviating_variables(kind, library.name, library.settings):
            settings = library.settings
            values = [f"{v.name}={settings[v.name]}" for v in variables if v.name in settings]
            text = f"{kind} sites set variables that are {'different' if values else 'unset'} here"
            text += f" ({', '.join(values)})" if values else ""
            text += f": export {' '.join(f'{v.name}={v.value}' for v in variables)}"
            hosts[False, text].append(rank.hostname)
    for (is_sure, text), names in hosts.items():
        yield Finding("error" if is_sure else "warning", f"{_join_names(names)}: {text}")


def _fastest_network_card(ranks: Sequence[RankFacts]) -> tuple[str, str, float]:
    """Return name, kind and Gb/s of the fastest card; without cards, of the Ethernet in use.

    A pair of ranks uses one card. Cards that are down do not count.
    """
    first = ranks[0].topology
    cards = [
        (float(card.rate.split()[0]), card)
        for rank in ranks
        if rank.topology
        for card in rank.topology.cards
        if card.state in ("", "ACTIVE") and re.match(r"[0-9.]+ ", card.rate)
    ]
    if cards:
        gbits, card = max(cards, key=lambda pair: pair[0])
        return card.name, card.kind, gbits
    setting = ranks[0].library.settings.get("NCCL_SOCKET_IFNAME", "") if ranks[0].library else ""
    name = setting.removeprefix("=")
    return name, "Ethernet", first.ethernet.get(name, 0) / 1000 if first else 0.0


def _describe_missing_plugin(ranks: Sequence[RankFacts]) -> str:
    """Describe which nodes lack the plugin that their network needs, and why; "" if none do."""
    lacking = [
        (rank.hostname, card.kind, rank.library)
        for rank in ranks
        if rank.topology and rank.library and not rank.library.plugin
        for card in rank.topology.cards[:1]
        if card.kind in PLUGIN_NETWORKS
    ]
    if not lacking:
        return ""
    _, kind, library = lacking[0]
    hosts = _join_names([host for host, _, _ in lacking])
    text = f"{library.name} has no network plugin on {hosts} and sends by TCP over {kind}. "
    if setting := _disabling_setting(library, "NCCL_NET", "NCCL_NET_PLUGIN"):
        return f"{text}{setting} switches it off: unset it"
    if library.plugin_file:
        note = "" if library.libfabric else ", which needs libfabric.so, and that is not found"
        return (
            f"{text}It did not load {library.plugin_file}{note}: NCCL_DEBUG=INFO says why; a "
            "plugin is built for CUDA or for ROCm, and for a range of versions"
        )
    plugin = "aws-ofi-rccl" if library.name == "RCCL" else "aws-ofi-nccl"
    file = f"lib{library.name.lower()}-net.so"
    return (
        f"{text}Load the site's module of {plugin}, so that {file} is in LD_LIBRARY_PATH, with "
        "libfabric; bind both into a container"
    )


def _slow_network_reason(ranks: Sequence[RankFacts], kind: str) -> str:
    library = ranks[0].library
    if kind == "Ethernet":
        return (
            "one TCP connection does not fill a fast Ethernet; NCCL_SOCKET_NTHREADS=4 and "
            "NCCL_NSOCKS_PERTHREAD=4 use more"
        )
    if library is not None and (setting := _disabling_setting(library, *_DISABLING_VALUES)):
        return f"{setting} sends by TCP: unset it"
    return (
        "NCCL has probably fallen back to TCP. NCCL_DEBUG=INFO says which network it uses and why; "
        "look at NCCL_IB_HCA, at the limit of locked memory, whether a container has "
        "/dev/infiniband, and for the site's plugin"
    )


def _disabling_setting(library: NcclLibrary, *names: str) -> str:
    pairs = [(name, library.settings.get(name, "")) for name in names]
    return next(
        (f"{name}={value}" for name, value in pairs if value.lower() == _DISABLING_VALUES[name]), ""
    )


def _group_by_node(ranks: Sequence[RankFacts]) -> list[list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node].append(rank)
    return list(nodes.values())


def _join_names(names: Sequence[str] | set[str]) -> str:
    return list_some(sorted(names), 4)
