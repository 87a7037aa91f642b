"""Turn launched processes into a working world: one call at each rank's start, one at a clean end.

    discover -> cores and threads -> torch -> rendezvous -> device -> check of devices
    -> cores near the device -> process groups -> Comm

torch is imported here and not earlier: MPI must be loaded first, and the threads that torch starts
inherit the rank's cores.
"""

import contextlib
import gc
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_tune.cluster.launchers import find_launcher
from hpc_tune.cluster.protocol import UNKNOWN_LAUNCHER, Launcher, LaunchInfo
from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import EXIT_FAILED, WorldError
from hpc_tune.log import log
from hpc_tune.world import affinity, liveness, processes
from hpc_tune.world.affinity import SYS, read_numa_node_cpus
from hpc_tune.world.comm import Comm, Peer, StoreKeys, all_gather
from hpc_tune.world.device import (
    DeviceReport,
    VisibleGpus,
    check_devices,
    enable_expandable_segments,
    find_visible_gpus,
    gather_visible_gpus,
    hidden_gpus_warning,
    numa_nodes_by_rank,
    pick_device,
)
from hpc_tune.world.discover import (
    World,
    assign_node_indices,
    discover,
    local_world_fields,
    make_host_key,
)
from hpc_tune.world.failure import (
    FAILURE_KEY,
    end_world,
    end_world_on_uncaught_error,
    rank_label,
    watch_launcher,
)
from hpc_tune.world.json_channel import Channel, MpiChannel, SoloChannel, StarChannel, StoreChannel
from hpc_tune.world.liveness import time_limit
from hpc_tune.world.nccl import NcclWatch, disable_nccl_error_handling
from hpc_tune.world.rendezvous import (
    find_interface_to,
    local_addresses,
    rendezvous,
    split_interfaces,
)
from hpc_tune.world.watch import EndWorld, HostWatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

_START_HINT = (
    "check for ranks that failed to start, or for a network that the nodes do not share; "
    "run.start_timeout=SECONDS waits longer"
)
_CONNECT_HINT = (
    "NCCL's network does not work between these nodes: NCCL_DEBUG=INFO shows which interface it "
    "uses, NCCL_SOCKET_IFNAME or run.interface=NAME selects another"
)
_GLOO_IDLE_LIMIT_S = 5.0
_GLOO_THREAD = "pt_gloo_runloop"


def bootstrap(
    settings: RunSettings, on_failure: EndWorld = end_world, refuses_unused_gpus: bool = True
) -> Comm:
    """Form the world and return this rank's part in it; collective over all ranks.

    ``on_failure`` ends the world when a thread finds another host down or cut off;
    ``refuses_unused_gpus``: refuse ranks that see none of the GPUs granted to them.

    Raises:
        WorldError: if the ranks, their network or their devices are not what the launcher promised.
        ConfigError: if a rank may open too few files.
    """
    end_world_on_uncaught_error(None)
    processes.require_min_files(files := processes.raise_file_limit())
    launcher, info = find_launcher(os.environ)
    label = rank_label(None)
    # An unknown launcher may end before its ranks, as ssh does.
    if info.launcher not in ("single", UNKNOWN_LAUNCHER):
        watch_launcher(label)
    limit_s = liveness.start_limit_s(settings.start_timeout, info.size or 1)
    with time_limit("all ranks to start", limit_s, _START_HINT, label):
        world, mpi_comm = discover()
        if world.rank == 0:  # now, since the world may not form with too few files
            _log_warnings([processes.file_shortage_warning(files, world.size)])
        channel = _open_channel(world, mpi_comm, launcher, info, settings)
        world = _fill_in_nodes(world, channel)
        cores = _gather_core_masks(world, channel)
        share, threads, note = _set_cores(world, cores, settings)
    limit_s = liveness.start_limit_s(settings.start_timeout, world.size)
    enable_expandable_segments(os.environ, settings.device)
    _import_torch(channel, max(limit_s, settings.timeout), label)
    with time_limit("all ranks to meet", limit_s, _START_HINT, label):
        store, address, nonce, store_warning = _open_store(world, channel, settings)
        exchange = channel or StoreChannel(store, world)
        device, warning, gpu_nodes = _choose_device(
            world, exchange, settings, info, refuses_unused_gpus
        )
        exchange.close()
        if gpu_nodes:
            share, threads, _ = _set_cores(world, cores, settings, gpu_nodes)
    _set_torch_threads(threads)
    cpu_group = init_groups(world, device, store, settings.timeout, limit_s, warning)
    facts = _rank_facts(world, share, threads, [share.warning, note, store_warning])
    with time_limit("all ranks to describe themselves", limit_s, _START_HINT, label):
        all_facts = all_gather(facts, cpu_group)
    comm = Comm(
        world=world,
        device=device,
        cpu_group=cpu_group,
        roster=tuple(f["peer"] for f in all_facts),
        store=store,
        nonce=nonce,
        threads=threads,
        startup_limit_s=limit_s,
        sees_local_pids=len({f["pids"] for f in all_facts if f["peer"].node == world.node}) == 1,
    )
    end_world_on_uncaught_error(comm)
    comm = _start_watches(comm, address, settings, on_failure)
    _log_world(comm, all_facts, warning)
    return comm


def _rank_facts(
    world: World, assignment: affinity.CoreAssignment, threads: int, notes: list[str | None]
) -> dict[str, Any]:
    """Return what each rank tells the others about itself once the groups exist."""
    return {
        "peer": Peer(world.rank, world.node, world.hostname, os.getpid()),
        "cores": (assignment.num_cores, threads, assignment.num_sharing_ranks),
        "notes": notes,
        "pids": _pid_namespace(),
    }


def _start_watches(comm: Comm, address: str, settings: RunSettings, on_failure: EndWorld) -> Comm:
    if needs_host_watch(comm.world, comm.device):
        comm = replace(comm, watch=HostWatch(comm, address, settings.host_timeout, on_failure))
    if comm.device.type == "cuda" and comm.world.size > 1:
        comm = replace(comm, nccl=NcclWatch(comm, settings.timeout, on_failure))
    return comm


def needs_host_watch(world: World, device: "torch.device") -> bool:
    """Whether the ranks need connections through which they learn that another rank has ended.

    Within a node gloo notices it by itself. A GPU waits for a dead rank until run.timeout, unless
    the launcher ends the other ranks, which srun, ssh and flux do not do by default.
    """
    return world.num_nodes > 1 or (world.size > 1 and device.type != "cpu")


def _log_world(comm: Comm, rank_facts: list[dict[str, Any]], warning: str | None) -> None:
    from hpc_tune.torch_versions import untested_torch_warning

    if not comm.is_rank_0:
        return
    description = affinity.describe_cores([f["cores"] for f in rank_facts], comm.world.num_nodes)
    log.info("world   %s, via %s, %s", description, comm.world.launcher, comm.device.type)
    _log_warnings([untested_torch_warning(), *(note for f in rank_facts for note in f["notes"])])
    _log_warnings([warning])


def _log_warnings(texts: list[str | None]) -> None:
    """Log each warning once, with the number of ranks that have it."""
    for text, count in Counter(filter(None, texts)).items():
        log.warning("%s%s", text, f" (on {count} ranks)" if count > 1 else "")


def shutdown(comm: Comm) -> None:
    """End the world cleanly after success on every rank; MPI is finalized at process exit."""
    import torch.distributed as dist

    hint = "see what the other ranks are still doing"
    with time_limit("all ranks to finish", liveness.SHUTDOWN_LIMIT_S, hint, comm.world.label):
        dist.barrier(group=comm.cpu_group)
        if comm.watch is not None:
            comm.watch.close()
        if comm.nccl is not None:
            comm.nccl.close()
        dist.destroy_process_group()
        gc.collect()  # an engine is part of reference cycles and holds groups
        wait_for_idle_gloo()
    sys.excepthook = sys.__excepthook__


def wait_for_idle_gloo() -> None:
    """Wait up to 5 s until gloo's threads are idle, also those of groups that torch still holds.

    A thread frees the tensors of a collective a moment after all ranks have their result. If Python
    is shutting down by then, that aborts the process (pytorch PR 179291).
    """
    until_s, num_calm = time.monotonic() + _GLOO_IDLE_LIMIT_S, 0
    while num_calm < 3 and time.monotonic() < until_s:
        time.sleep(0.002)  # lets threads that wait for the interpreter run
        states = [_thread_state(_GLOO_THREAD, task) for task in Path("/proc/self/task").iterdir()]
        num_calm = num_calm + 1 if set(states) <= {None, "S"} else 0


def _thread_state(name: str, task: Path) -> str | None:
    """Return the state of a thread, such as S (waiting), if it has this name."""
    try:  # psutil gives neither name nor state of threads
        stat = (task / "stat").read_text()
    except OSError:
        return None
    thread, _, fields = stat.partition("(")[2].rpartition(")")
    return fields.split()[0] if thread == name else None


def _import_torch(channel: Channel | None, limit_s: float, label: str) -> None:
    """Import torch on all ranks; it takes minutes if thousands read it from one file system.

    The next time limit begins once all ranks have torch; with a store, which needs torch, each
    rank's limit begins after its own import.
    """
    hint = "the file system with the Python packages is slow, or does not answer on some node"
    with time_limit("all ranks to import torch", limit_s, hint, label):
        import torch  # noqa: F401

        if channel is not None:
            channel.all_gather(None, limit_s)


def _set_torch_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _open_channel(
    world: World, mpi_comm: Any, launcher: Launcher, info: LaunchInfo, settings: RunSettings
) -> Channel | None:
    """Return the channel that ranks use before torch; ``None`` with a store, which needs torch."""
    if mpi_comm is not None:
        return MpiChannel(mpi_comm)
    if launcher.has_store:
        return None
    if world.size == 1:
        return SoloChannel()
    if launcher.rendezvous_endpoint is None:
        raise WorldError(
            f"{info.launcher} starts several ranks, which cannot connect without MPI; "
            "install mpi4py (tools/install.py --mpi), or start them with srun or torchrun"
        )
    point = launcher.rendezvous_endpoint(os.environ, info)
    limit_s = 0.8 * liveness.start_limit_s(settings.start_timeout, world.size)
    return StarChannel(world, point.addresses, point.token, limit_s, point.ports)


def _fill_in_nodes(world: World, channel: Channel | None) -> World:
    """Return ``world`` with the node fields that an unknown launcher did not set."""
    if world.launcher != UNKNOWN_LAUNCHER or channel is None:
        return world
    hosts = channel.all_gather(make_host_key())
    nodes = assign_node_indices(hosts, hosts, [None] * world.size)
    return replace(world, **local_world_fields(world.rank, nodes))


def _gather_core_masks(
    world: World, channel: Channel | None
) -> tuple[list[affinity.CpuMask], affinity.CpuMask]:
    """Return the masks of this node's ranks, and the CPUs that this rank could widen its own to."""
    own_mask = frozenset(os.sched_getaffinity(0))
    masks = [own_mask] * world.local_size  # torchrun pins nothing, so its ranks have equal masks
    if channel is not None:
        rows = channel.all_gather([world.node, world.local_rank, affinity.to_cpu_ranges(own_mask)])
        local_rows = sorted((local, runs) for node, local, runs in rows if node == world.node)
        masks = [affinity.from_cpu_ranges(runs) for _, runs in local_rows]
    return masks, affinity.widest_cpu_mask()


def _set_cores(
    world: World,
    core_masks: tuple[list[affinity.CpuMask], affinity.CpuMask],
    settings: RunSettings,
    gpu_nodes: Sequence[affinity.NumaNode | None] = (),
) -> tuple[affinity.CoreAssignment, int, str | None]:
    masks, reachable = core_masks
    share = affinity.assign_cores(
        masks, reachable, world.local_rank, affinity.physical_core, gpu_nodes
    )
    if world.size == 1 and world.launcher == "single":
        mask = masks[world.local_rank]
        share = affinity.CoreAssignment(mask, share.num_cores, share.threads, pin=False)
    threads = share.threads if settings.threads == "auto" else settings.threads
    old_mask = frozenset(os.sched_getaffinity(0))
    note = affinity.apply_core_assignment(share, threads)
    if gpu_nodes and share.pin:
        affinity.repin_threads_with_mask(old_mask, share.cpus)
    return share, threads, note


def _choose_device(
    world: World,
    channel: Channel,
    settings: RunSettings,
    info: LaunchInfo,
    refuses_unused_gpus: bool = True,
) -> "tuple[torch.device, str | None, list[affinity.NumaNode | None]]":
    """Return this rank's device, a warning if any, and the NUMA nodes of the node's ranks' GPUs.

    Raises:
        WorldError: on every rank, if the ranks' devices do not fit together.
    """
    request, own_gpus = settings.device, find_visible_gpus(settings.device)
    visible_gpus = gather_visible_gpus(world, own_gpus, channel)
    if request == "auto" and own_gpus == VisibleGpus() and not refuses_unused_gpus:
        request = "cpu"
    device, report = pick_device(request, world, visible_gpus)
    reports = [DeviceReport.from_json(row) for row in channel.all_gather(asdict(report))]
    warning = check_devices(reports, info.launcher != "single") or hidden_gpus_warning(reports)
    nodes = numa_nodes_by_rank(visible_gpus) if device.type == "cuda" else []
    gpu_nodes = [
        None if n is None else affinity.NumaNode(n, read_numa_node_cpus(SYS, n)) for n in nodes
    ]
    return device, warning, gpu_nodes if any(gpu_nodes) else []


def _open_store(
    world: World, channel: Channel | None, settings: RunSettings
) -> "tuple[Store, str, str, str | None]":
    """Return the store that all ranks share, the address of rank 0, a nonce, and a warning."""
    import torch.distributed as dist

    limit = timedelta(seconds=liveness.start_limit_s(settings.start_timeout, world.size))
    if channel is None:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        if world.rank == 0:
            StoreKeys(store, "nonce").set(os.urandom(16).hex())
        nonce = StoreKeys(store, "nonce").get()
        address = os.environ.get("MASTER_ADDR", "")
        _set_interface(world, address, settings.interface)
        return store, address, nonce, None
    if world.size == 1:
        _set_interface(world, "127.0.0.1", settings.interface)
        return dist.HashStore(), "127.0.0.1", os.urandom(16).hex(), None
    meeting = rendezvous(world, channel, settings.interface)
    _set_interface(world, meeting.ip, settings.interface)
    store = dist.TCPStore(
        meeting.ip,
        meeting.port,
        world.size,
        is_master=meeting.listener is not None,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=meeting.listener.detach() if meeting.listener is not None else None,
    )
    return store, meeting.ip, meeting.nonce, meeting.warning


def _set_interface(world: World, address: str, interface: str | None) -> None:
    """Make gloo and NCCL use the interface to the other ranks, unless the user has set one."""
    names = {a.interface for a in local_addresses()}
    interfaces = [name for name in split_interfaces(interface) if name in names]
    if not interfaces and world.num_nodes == 1 and "lo" in names:
        interfaces = ["lo"]
    elif not interfaces:
        with contextlib.suppress(OSError):
            egress_name = find_interface_to(str(socket.getaddrinfo(address, None)[0][4][0]))
            interfaces = [egress_name] if egress_name is not None else []
    if not interfaces:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[0])
    if world.num_nodes > 1:
        # "=" means no prefix match. Over TCP, NCCL uses all named interfaces; over a plugin, none.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={','.join(interfaces)}")


def init_groups(
    world: World,
    device: "torch.device",
    store: "Store",
    timeout_s: float,
    startup_limit_s: float,
    warning: str | None = None,
) -> "ProcessGroup":
    """Make the default group for the device and return the gloo group for control traffic.

    The default group is used once: this connects all GPUs before anything else asks for some of
    them, and shows if NCCL does not work on the network. All of it may take ``startup_limit_s``
    seconds; ``warning``, about devices, may explain a failure. The group's collectives time out
    later than ``StallWatch``, which knows who is missing.
    """
    label = world.label
    hint = _START_HINT if device.type == "cpu" else _CONNECT_HINT
    hint = hint if warning is None else f"{warning}. Or {hint}"
    with time_limit("the devices of all ranks to connect", startup_limit_s, hint, label):
        group = _create_groups(world, device, store, timeout_s)
        _connect_devices(world, device, hint)
    return group


def _create_groups(
    world: World, device: "torch.device", store: "Store", timeout_s: float
) -> "ProcessGroup":
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    limit = timedelta(seconds=timeout_s + liveness.TORCH_TIMEOUT_MARGIN_S)
    # Otherwise later groups, of a mesh or a library, would have a timeout of half an hour.
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit
    if device.type == "cuda":
        disable_nccl_error_handling(os.environ)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("hpc_tune", store),
            rank=world.rank,
            world_size=world.size,
            timeout=limit,
            # Creates NCCL's communicators together with their groups, not at first use.
            device_id=device if device.type == "cuda" else None,
        )
        return dist.new_group(
            backend="gloo", timeout=timedelta(seconds=max(timeout_s, liveness.CONTROL_TIMEOUT_S))
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"{world.label} could not join the process group over "
            f"interface {os.environ.get('GLOO_SOCKET_IFNAME', 'unknown')}: {error}. Name the "
            "network that connects the nodes with run.interface=NAME"
        ) from error


def _connect_devices(world: World, device: "torch.device", hint: str) -> None:
    """Run a small all-reduce on the default group. Collective."""
    import torch
    import torch.distributed as dist

    try:
        probe = torch.zeros(1, device=device)
        dist.all_reduce(probe)
        probe.tolist()  # a device's error shows only when the result is read
    except RuntimeError as error:
        label = world.label
        raise WorldError(f"{label} on {device} could not connect: {error}. {hint}") from error


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"hidden from {os.getpid()}"


# -- A smaller or reordered world, made of the ranks of an existing one.
#
#     ranks measured -> regroup -> the chosen ranks: a Comm as if launched this way
#                              -> the others: wait_as_idle_rank until the run has ended
#
# The first rank of the launcher always takes part: it holds the store, through which the ranks left
# out learn that the run has ended.


_POLL_S = 1.0
_EXIT_LIMIT_S = 10.0


def regroup(comm: Comm, ranks: Sequence[int], timeout_s: float) -> Comm | None:
    """Return this rank's Comm in a world of ``ranks``, in this order, or None if it is left out.

    Collective over all ranks. ``comm``'s process groups no longer exist afterwards, unless
    ``ranks`` changes nothing. ``timeout_s`` is run.timeout.

    Raises:
        WorldError: if ``ranks`` leaves out the rank that holds the store.
    """
    import torch.distributed as dist

    if comm.store_rank not in ranks:
        raise WorldError(f"rank {comm.store_rank} holds the store and cannot be left out")
    if list(ranks) == list(range(comm.world.size)):
        return comm
    comm.barrier("all ranks to know the layout", timeout_s)
    dist.destroy_process_group()
    gc.collect()
    wait_for_idle_gloo()
    if comm.world.rank not in ranks:
        return None
    roster = _renumber_roster(comm, ranks)
    rank = list(ranks).index(comm.world.rank)
    node_ranks = [peer.rank for peer in roster if peer.node == roster[rank].node]
    world = replace(
        comm.world,
        rank=rank,
        size=len(ranks),
        local_rank=node_ranks.index(rank),
        local_size=len(node_ranks),
        node=roster[rank].node,
        num_nodes=len({peer.node for peer in roster}),
    )
    num = comm.num_regroups + 1
    store = dist.PrefixStore(f"hpc_tune/regrouped/{num}", comm.store)
    group = init_groups(world, comm.device, store, timeout_s, comm.startup_limit_s)
    comm = replace(
        comm,
        world=world,
        cpu_group=group,
        roster=roster,
        num_regroups=num,
        store_rank=list(ranks).index(comm.store_rank),
    )
    if comm.watch is not None:
        comm.watch.renumber(comm, ranks)
    if comm.nccl is not None:
        comm.nccl.renumber(comm)
    end_world_on_uncaught_error(comm)
    return comm


def wait_as_idle_rank(comm: Comm) -> int:
    """Wait for the run's end and return its exit code; ``comm`` is the one before ``regroup``."""
    exit_code_keys, code = StoreKeys(comm.store, "ended"), None
    while code is None:
        time.sleep(_POLL_S)
        try:
            if exit_code_keys.is_set():
                code = int(exit_code_keys.get())
                StoreKeys(comm.store, "left").add(1)
            elif StoreKeys(comm.store, FAILURE_KEY).is_set():
                code = EXIT_FAILED
        except RuntimeError:  # the store is gone with its rank
            code = EXIT_FAILED
    if comm.watch is not None:
        comm.watch.close()
    return code


def release_idle_ranks(store: "Store", num_idle: int, exit_code: int) -> None:
    """Tell ``num_idle`` ranks that the run has ended, and wait until they know."""
    if not num_idle:
        return
    StoreKeys(store, "ended").set(exit_code)
    departures, until_s = StoreKeys(store, "left"), time.monotonic() + _EXIT_LIMIT_S
    while departures.add(0) < num_idle and time.monotonic() < until_s:
        time.sleep(0.1)


def _renumber_roster(comm: Comm, ranks: Sequence[int]) -> tuple[Peer, ...]:
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes.setdefault(comm.roster[rank].node, len(nodes))
    return tuple(
        replace(comm.roster[old], rank=new, node=nodes[comm.roster[old].node])
        for new, old in enumerate(ranks)
    )
