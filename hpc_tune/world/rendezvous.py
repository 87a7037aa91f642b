"""Rendezvous: find an address of rank 0 that every node has proved to reach.

    rank 0 binds port 0 on each candidate address -> sends them to all ranks
    -> one process per node tries each -> the first one reached from every node is kept,
    and its socket becomes the store's listener

No port is guessed, nothing listens on more than one interface, and loopback is refused with more
than one node.
"""

import contextlib
import hashlib
import ipaddress
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from hpc_tune.errors import WorldError
from hpc_tune.units import list_some
from hpc_tune.world.discover import World
from hpc_tune.world.json_channel import Channel

PROBE_TIMEOUT_S = 3.0
FAST_INTERFACE_PREFIXES = ("hsn", "ib", "hfi", "opa")
VIRTUAL_INTERFACE_PREFIXES = ("docker", "virbr", "veth", "br-", "cni", "podman", "lxc")


@dataclass(frozen=True)
class Address:
    """One address of an interface of this host."""

    interface: str
    ip: str


@dataclass(frozen=True)
class Endpoint:
    """The chosen address; rank 0 also holds the listening socket, the others ``None``."""

    ip: str
    port: int
    nonce: str
    listener: socket.socket | None
    warning: str | None


def rendezvous(world: World, channel: Channel, interface: str | None) -> Endpoint:
    """Return an address of rank 0 that every node reaches; collective over ``channel``.

    Raises:
        WorldError: on every rank, if there is no such address; it names each address and the hosts
        that could not reach it.
    """
    offer: dict[str, Any] = {}
    listeners: list[socket.socket] = []
    if world.rank == 0:
        offer, listeners = _offer_endpoints(world, interface)
    offer = channel.all_gather(offer)[0]
    if "error" in offer:
        raise WorldError(offer["error"])
    nonce, endpoints = offer["nonce"], offer["endpoints"]
    responder = _Responder(listeners, nonce) if listeners else None
    reasons = _probe_endpoints(endpoints, nonce) if world.local_rank == 0 else None
    reports = [
        {"host": host, "seen": reasons}
        for host, reasons in channel.all_gather([world.hostname, reasons])
        if reasons is not None
    ]
    if responder is not None:
        responder.stop()
    # Otherwise a fast rank's store client would reach the responder of a slow rank 0 and fail.
    channel.all_gather(None)
    choice = choose_endpoint(reports, len(endpoints))
    for index, listener in enumerate(listeners):
        if index != choice:
            listener.close()
    if choice is None:
        raise WorldError(_unreachable_message(endpoints, reports))
    warning = None
    if interface and endpoints[choice]["interface"] not in split_interfaces(interface):
        warning = (
            f"run.interface={interface} was not reached from every node; using "
            f"{endpoints[choice]['interface']} ({endpoints[choice]['ip']})"
        )
    own_socket = listeners[choice] if listeners else None
    return Endpoint(endpoints[choice]["ip"], endpoints[choice]["port"], nonce, own_socket, warning)


def choose_endpoint(reports: Sequence[dict[str, Any]], num_endpoints: int) -> int | None:
    """Return the first endpoint that all reports reached; ``seen`` has "" or a reason for each."""
    for index in range(num_endpoints):
        if all(report["seen"][index] == "" for report in reports):
            return index
    return None


def split_interfaces(interface: str | None) -> list[str]:
    """Return the names in run.interface, which may list several."""
    return [name.strip() for name in (interface or "").split(",") if name.strip()]


def candidate_addresses(
    addresses: Sequence[Address], num_nodes: int, interface: str | None
) -> list[Address]:
    """Return the addresses worth trying, best first (pure).

    Named interfaces come first; then loopback on a single node; then interfaces with the names of
    fast fabrics, the rest, and container bridges last. Link-local addresses are left out, as is
    loopback with several nodes (all of 127/8, including Debian's 127.0.1.1).
    """

    preferred_names = split_interfaces(interface)

    def preference_key(address: Address) -> tuple[int, int]:
        ip = ipaddress.ip_address(address.ip)
        if address.interface in preferred_names:
            kind = preferred_names.index(address.interface) - len(preferred_names)
        elif ip.is_loopback:
            kind = 1
        elif address.interface.startswith(FAST_INTERFACE_PREFIXES):
            kind = 2
        else:
            kind = 4 if address.interface.startswith(VIRTUAL_INTERFACE_PREFIXES) else 3
        return kind, ip.version

    usable = []
    for address in addresses:
        ip = ipaddress.ip_address(address.ip)
        if not ip.is_link_local and (num_nodes == 1 or not ip.is_loopback):
            usable.append(address)
    return sorted(usable, key=preference_key)


def local_addresses() -> list[Address]:
    """Return the addresses of this host's interfaces, without IPv6 link-local addresses."""
    return [
        Address(name.partition(":")[0], address.address)  # an alias such as eth0:1 belongs to eth0
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]


def find_interface_to(ip: str) -> str | None:
    """Return the name of the interface whose address this host uses to speak to ``ip``."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, 9))  # sends nothing: only asks the routing table
            own_ip = probe.getsockname()[0]
    except OSError:
        return None
    return next((a.interface for a in local_addresses() if a.ip == own_ip), None)


def _offer_endpoints(
    world: World, interface: str | None
) -> tuple[dict[str, Any], list[socket.socket]]:
    addresses = local_addresses()
    names = sorted({address.interface for address in addresses})
    if interface and not {*split_interfaces(interface)} & {*names}:
        listing = ", ".join(names)
        return {
            "error": f"run.interface={interface} does not exist on {world.hostname}, where rank 0 "
            f"is; it has {listing}"
        }, []
    endpoints, listeners = [], []
    for address in candidate_addresses(addresses, world.num_nodes, interface):
        family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
        try:
            listener = socket.create_server((address.ip, 0), family=family, backlog=4096)
        except OSError:
            continue
        listeners.append(listener)
        port = listener.getsockname()[1]
        endpoints.append({"interface": address.interface, "ip": address.ip, "port": port})
    if not endpoints:
        listing = ", ".join(f"{a.ip} ({a.interface})" for a in addresses) or "none"
        return {
            "error": f"{world.hostname}, where rank 0 is, has no address that {world.num_nodes} "
            f"nodes could use; found {listing}. Loopback cannot be used across nodes; bring up a "
            "network interface"
        }, []
    return {"nonce": secrets.token_hex(16), "endpoints": endpoints}, listeners


class _Responder:
    """Answers the probes of the nodes on rank 0's listening sockets, until stopped."""

    def __init__(self, listeners: Sequence[socket.socket], nonce: str) -> None:
        self._listeners, self._nonce = listeners, nonce
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for waiting in (*self._listeners, self._wake_read):
                selector.register(waiting, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake_read in ready:
                    return
                for listener in ready:
                    with contextlib.suppress(OSError):
                        peer, _ = listener.accept()  # type: ignore[union-attr]
                        # A silent client that is no node must not keep the nodes waiting.
                        threading.Thread(
                            target=self._answer_probe, args=(peer,), daemon=True
                        ).start()

    def _answer_probe(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(PROBE_TIMEOUT_S)
            if _read_line(peer) == _probe_token(self._nonce, "ask"):
                peer.sendall(_probe_token(self._nonce, "answer"))

    def stop(self) -> None:
        self._wake_write.sendall(b"x")
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()


def _probe_endpoints(endpoints: Sequence[dict[str, Any]], nonce: str) -> list[str]:
    """Return "" or the reason of failure for each endpoint; all are tried in parallel."""
    reasons = ["no answer"] * len(endpoints)

    def probe_endpoint(index: int) -> None:
        reasons[index] = _probe_endpoint(endpoints[index]["ip"], endpoints[index]["port"], nonce)

    threads = [threading.Thread(target=probe_endpoint, args=(i,)) for i in range(len(endpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reasons


def _probe_endpoint(ip: str, port: int, nonce: str) -> str:
    try:
        with socket.create_connection((ip, port), timeout=PROBE_TIMEOUT_S) as peer:
            peer.sendall(_probe_token(nonce, "ask"))
            # Another host can have the same address: every docker0 is 172.17.0.1.
            if _read_line(peer) != _probe_token(nonce, "answer"):
                return "someone else answers there"
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _probe_token(nonce: str, side: str) -> bytes:
    return hashlib.sha256(f"hpc_tune {side} {nonce}".encode()).hexdigest().encode() + b"\n"


def _read_line(peer: socket.socket) -> bytes:
    data = b""
    while len(data) < 65 and (piece := peer.recv(65 - len(data))):
        data += piece
    return data


def _unreachable_message(
    endpoints: Sequence[dict[str, Any]], reports: Sequence[dict[str, Any]]
) -> str:
    lines = []
    for index, endpoint in enumerate(endpoints):
        failures = [(r["host"], r["seen"][index]) for r in reports if r["seen"][index]]
        hosts = list_some((f"{host} ({reason})" for host, reason in failures), 8)
        lines.append(f"  {endpoint['ip']} ({endpoint['interface']}): not reached from {hosts}")
    return (
        f"no address of {reports[0]['host']}, where rank 0 is, can be reached from every node:\n"
        + "\n".join(lines)
        + "\nName the network that connects the nodes with run.interface=NAME, or let them "
        "connect to each other"
    )
