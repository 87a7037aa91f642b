"""Communication before torch.distributed exists: one operation, an all-gather of JSON values.

It uses MPI's COMM_WORLD if there is one, or torchrun's store once torch is imported; otherwise the
ranks connect to rank 0 at the launcher's meeting point. Values travel as JSON, never as pickles.
"""

import contextlib
import errno
import hashlib
import ipaddress
import itertools
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hpc_tune.errors import WorldError
from hpc_tune.world.discover import World

if TYPE_CHECKING:
    from torch.distributed import Store

NUM_CANDIDATE_PORTS = 16
_FIRST_PORT, _LAST_PORT = 20000, 32000  # below Linux's ephemeral range, which starts at 32768
_LOOPBACK = ("127.0.0.1", "::1")
# Other hosts may know this host by an address on another network than its own name resolves to.
_ALL_INTERFACES, _WIDEN_AFTER_S = ("0.0.0.0", "::"), 5.0
_POLL_S = 0.05  # between checks whether all ranks have connected
_HELLO_LIMIT_S = 2.0
_MAX_MESSAGE_BYTES = 256 * 2**20


class Channel(Protocol):
    """Connects all ranks of the world."""

    def all_gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's JSON value, by rank; collective.

        ``limit_s`` replaces the channel's own limit on waiting for a rank, if it has one.
        """
        ...

    def close(self) -> None:
        """Release the channel's connections."""
        ...


class SoloChannel:
    """The channel of a world of one."""

    def all_gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return the value alone."""
        return [value]

    def close(self) -> None:
        """Do nothing."""


class MpiChannel:
    """Speaks over MPI's COMM_WORLD."""

    def __init__(self, mpi_comm: Any) -> None:
        """Take an mpi4py communicator of all ranks."""
        self._mpi_comm = mpi_comm

    def all_gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank."""
        return [json.loads(text) for text in self._mpi_comm.allgather(json.dumps(value))]

    def close(self) -> None:
        """Do nothing: MPI ends with the process."""


class StoreChannel:
    """Speaks over torch's store, for ranks whose launcher runs one."""

    def __init__(self, store: "Store", world: World) -> None:
        """Take a store that all ranks share."""
        self._store, self._world, self._number = store, world, 0

    def all_gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank."""
        self._number += 1
        keys = [f"hpc_tune/all_gather/{self._number}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(value))
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def close(self) -> None:
        """Do nothing: the store stays."""


class StarChannel:
    """A star of TCP connections around rank 0, for ranks without MPI."""

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        token: str,
        limit_s: float,
        ports: Sequence[int] | None = None,
    ) -> None:
        """Connect all ranks to rank 0 at one of ``addresses``; ``token`` identifies the job.

        Raises:
            WorldError: if not all ranks have met after ``limit_s`` seconds.
        """
        self._world, self._token = world, hashlib.sha256(token.encode()).hexdigest()
        self._peers: dict[int, socket.socket] = {}
        ports = ports if ports is not None else candidate_ports(token)
        deadline_s = time.monotonic() + limit_s
        if world.rank == 0:
            hosts = _LOOPBACK if world.num_nodes == 1 else _own_addresses(addresses)
            self._accept_all_peers(hosts, ports, deadline_s, limit_s)
        else:
            self._peers[0] = self._connect(addresses, ports, deadline_s, limit_s)

    def all_gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank; ``limit_s`` replaces the star's own limit."""
        if limit_s is not None:
            old_limits_s = {rank: peer.gettimeout() for rank, peer in self._peers.items()}
            for peer in self._peers.values():
                peer.settimeout(limit_s)
            try:
                return self.all_gather(value)
            finally:
                for rank, peer in self._peers.items():
                    peer.settimeout(old_limits_s[rank])
        if self._world.rank:
            _send(self._peers[0], value)
            values: list[Any] = _receive(self._peers[0])
            return values
        values = [value]
        values += [_receive(self._peers[rank]) for rank in range(1, self._world.size)]
        message = _encode_message(values)  # once, not for each of thousands of ranks
        for rank in range(1, self._world.size):
            self._peers[rank].sendall(message)
        return values

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _accept_all_peers(
        self, hosts: Sequence[str], ports: Sequence[int], deadline_s: float, limit_s: float
    ) -> None:
        with contextlib.ExitStack() as open_sockets:
            listeners = [open_sockets.enter_context(s) for s in _listen(hosts, ports)]
            widen_s = time.monotonic() + _WIDEN_AFTER_S if self._world.num_nodes > 1 else deadline_s
            while len(self._peers) < self._world.size - 1:
                if time.monotonic() > deadline_s:
                    missing = [r for r in range(1, self._world.size) if r not in self._peers]
                    raise WorldError(
                        f"rank 0 on {self._world.hostname} waited {limit_s:.0f} s on port "
                        f"{listeners[0].getsockname()[1]} and these ranks never connected: "
                        f"{missing[:16]}; look at their output, and check whether a firewall "
                        "blocks that port between the nodes"
                    )
                if time.monotonic() > widen_s:
                    widen_s = deadline_s
                    open_sockets.close()  # a port cannot be bound to one address and to all
                    listeners = [
                        open_sockets.enter_context(s) for s in _listen(_ALL_INTERFACES, ports)
                    ]
                ready, _, _ = select.select(listeners, [], [], _POLL_S)
                for listener in ready:
                    peer, _ = listener.accept()
                    # A silent client that is no rank must not keep the ranks waiting.
                    threading.Thread(
                        target=self._accept_peer, args=(peer, limit_s), daemon=True
                    ).start()

    def _accept_peer(self, peer: socket.socket, limit_s: float) -> None:
        """Keep the connection if a rank of this job is at its other end."""
        peer.settimeout(_HELLO_LIMIT_S)
        try:
            hello = _receive(peer)
            if hello.get("token") == self._token:
                _send(peer, {"token": self._token})
                peer.settimeout(limit_s)
                _receive(peer)  # fails if the rank has given up; it will connect again
                self._peers[int(hello["rank"])] = peer
                return
        except (OSError, ValueError, AttributeError, WorldError):
            pass
        peer.close()

    def _connect(
        self, addresses: Sequence[str], ports: Sequence[int], deadline_s: float, limit_s: float
    ) -> socket.socket:
        cause = "no attempt"
        while time.monotonic() < deadline_s:
            for address in addresses:
                try:
                    # Once per round, not per port: a name that does not resolve can take seconds.
                    ips = _resolve(address)
                except OSError as error:
                    cause = f"{address}: {error}"
                    continue
                for ip, port in itertools.product(ips, ports):
                    try:
                        return self._handshake(str(ip), port, limit_s)
                    except (OSError, ValueError, AttributeError, WorldError) as error:
                        cause = f"{address} ({ip}) port {port}: {error}"
            time.sleep(0.2)
        raise WorldError(
            f"{self._world.label} could not reach rank 0 at "
            f"{', '.join(addresses)} (ports {ports[0]}-{ports[-1]}) within {limit_s:.0f} s; last: "
            f"{cause}. Check that the compute nodes may connect to each other, or start with mpirun"
        )

    def _handshake(self, ip: str, port: int, limit_s: float) -> socket.socket:
        """Return a connection to rank 0 of this job, or raise if it is not there."""
        peer = socket.create_connection((ip, port), timeout=_HELLO_LIMIT_S)
        try:
            _send(peer, {"token": self._token, "rank": self._world.rank})
            if _receive(peer).get("token") != self._token:
                raise WorldError("another job answers there")
            _send(peer, "met")
        except BaseException:
            peer.close()
            raise
        peer.settimeout(limit_s)
        return peer


def candidate_ports(token: str) -> list[int]:
    """Return the ports on which rank 0 of the job with this token may listen."""
    start = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    span = _LAST_PORT - _FIRST_PORT - NUM_CANDIDATE_PORTS
    return [_FIRST_PORT + start % span + i for i in range(NUM_CANDIDATE_PORTS)]


def _own_addresses(addresses: Sequence[str]) -> list[str]:
    """Return the ``addresses`` that this host's interfaces have, except loopback.

    If there are none, return all interfaces: a host's own name may resolve to loopback on the host
    itself, as on Debian.
    """
    own_ips: list[str] = []
    for address in addresses:
        with contextlib.suppress(OSError):
            for ip in _resolve(address):
                if (
                    not ipaddress.ip_address(ip).is_loopback
                    and _is_own_address(ip)
                    and ip not in own_ips
                ):
                    own_ips.append(ip)
    return own_ips or list(_ALL_INTERFACES)


def _resolve(address: str) -> list[str]:
    """Return the addresses of a host, of either IP version."""
    entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_own_address(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((ip, 0))
        return True
    return False


def _listen(hosts: Sequence[str], ports: Sequence[int]) -> list[socket.socket]:
    """Return sockets that listen on the ``hosts`` that this host has, of either IP version.

    Raises:
        WorldError: if no port is free.
    """
    listeners = []
    for host in hosts:
        family, busy = socket.AF_INET6 if ":" in host else socket.AF_INET, False
        for port in ports:
            try:
                # An IPv6 socket accepts IPv6 only.
                listeners.append(socket.create_server((host, port), family=family, backlog=1024))
                break
            except OSError as error:
                busy = error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        else:
            if busy or (host is hosts[-1] and not listeners):
                raise WorldError(
                    f"rank 0 found no free port among {ports[0]}-{ports[-1]}; stop what listens "
                    "there, or start with mpirun"
                )
    return listeners


def _send(peer: socket.socket, value: Any) -> None:
    peer.sendall(_encode_message(value))


def _encode_message(value: Any) -> bytes:
    payload = json.dumps(value).encode()
    return struct.pack("!I", len(payload)) + payload


def _receive(peer: socket.socket) -> Any:
    (size,) = struct.unpack("!I", _read_exactly(peer, 4))
    if size > _MAX_MESSAGE_BYTES:
        raise WorldError("an unknown client sent data to the rendezvous port")
    return json.loads(_read_exactly(peer, size))


def _read_exactly(peer: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            piece = peer.recv(num_bytes - len(data))
        except TimeoutError as error:
            raise WorldError("a rank did not answer in time") from error
        if not piece:
            raise WorldError("a rank closed its connection")
        data += piece
    return bytes(data)
