import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_tune.errors import WorldError
from hpc_tune.world import bootstrap, json_channel, rendezvous
from hpc_tune.world.affinity import to_cpu_ranges
from hpc_tune.world.discover import World
from hpc_tune.world.json_channel import StarChannel, candidate_ports
from hpc_tune.world.rendezvous import Address, candidate_addresses, choose_endpoint, local_addresses


def world_of(rank, size, num_nodes=1):
    """Return the world of one rank, ranks on nodes in blocks."""
    per_node = size // num_nodes
    return World(
        rank, size, rank % per_node, per_node, rank // per_node, num_nodes, f"n{rank}", "test"
    )


class ThreadChannel:
    """An all-gather among threads of this process."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=120)
        self._values = [None] * size

    def of(self, rank):
        outer = self

        class One:
            def all_gather(self, value):
                outer._values[rank] = value
                outer._barrier.wait()
                values = list(outer._values)
                outer._barrier.wait()
                return values

            def close(self):
                pass

        return One()


def on_threads(size, function):
    """Return function(rank) of all ranks, or the exception it raised."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, rank) for rank in range(size)]
        return [f.exception() or f.result() for f in futures]


ADDRESSES = [
    Address("lo", "127.0.0.1"),
    Address("docker0", "172.17.0.1"),
    Address("eth0", "fd00::2"),
    Address("eth0", "10.0.0.1"),
    Address("eth0", "127.0.1.1"),
    Address("eth0", "169.254.3.4"),
    Address("ib0", "10.9.0.1"),
    Address("hsn0", "10.8.0.1"),
]


def test_across_nodes_fast_names_come_first_and_loopback_never():
    ips = [a.ip for a in candidate_addresses(ADDRESSES, 2, None)]
    assert ips == ["10.9.0.1", "10.8.0.1", "10.0.0.1", "fd00::2", "172.17.0.1"]


def test_the_named_interface_comes_first():
    ips = [a.ip for a in candidate_addresses(ADDRESSES, 2, "eth0")]
    assert ips == ["10.0.0.1", "fd00::2", "10.9.0.1", "10.8.0.1", "172.17.0.1"]


def test_of_several_named_interfaces_the_first_comes_first():
    ips = [a.ip for a in candidate_addresses(ADDRESSES, 2, "docker0, eth0")]
    assert ips == ["172.17.0.1", "10.0.0.1", "fd00::2", "10.9.0.1", "10.8.0.1"]


@pytest.mark.parametrize(
    ("interface", "num_nodes", "gloo", "nccl"),
    [
        ("hsn1,hsn0, hsn7", 2, "hsn1", "=hsn1,hsn0"),
        ("hsn0", 2, "hsn0", "=hsn0"),
        (None, 2, "eth0", "=eth0"),
        ("hsn7", 2, "eth0", "=eth0"),
        (None, 1, "lo", None),
    ],
)
def test_nccl_is_given_all_interfaces_that_are_named(interface, num_nodes, gloo, nccl, monkeypatch):
    there = [Address(name, "10.0.0.1") for name in ("lo", "eth0", "hsn0", "hsn1")]
    monkeypatch.setattr(bootstrap, "local_addresses", lambda: there)
    monkeypatch.setattr(bootstrap, "find_interface_to", lambda ip: "eth0")
    monkeypatch.setattr(os, "environ", {})
    world = dataclasses.replace(world_of(0, 2), num_nodes=num_nodes)
    bootstrap._set_interface(world, "127.0.0.1", interface)
    wanted = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    assert os.environ == {name: value for name, value in wanted.items() if value}


def test_on_one_node_loopback_comes_first():
    assert candidate_addresses(ADDRESSES, 1, None)[0].ip == "127.0.0.1"


def test_this_host_has_loopback_and_its_interfaces_are_named_by_the_kernel():
    found = local_addresses()
    assert Address("lo", "127.0.0.1") in found
    assert {a.interface for a in found} <= {name for _, name in socket.if_nameindex()}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_alias_belongs_to_its_interface_and_link_local_addresses_are_left_out():
    adding = "ip link set lo up; ip addr add 10.9.0.1/24 dev lo label lo:1; "
    adding += "ip addr add fd00::2/64 dev lo; ip addr add fe80::3/64 dev lo; "
    program = "from hpc_tune.world.rendezvous import local_addresses\n"
    program += "print(*(f'{a.interface}={a.ip}' for a in local_addresses()))"
    command = ["unshare", "--net", "sh", "-c", adding + '"$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    expected = ["lo=10.9.0.1", "lo=127.0.0.1", "lo=::1", "lo=fd00::2"]
    assert sorted(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        ([["", ""], ["", ""]], 0),
        ([["", ""], ["refused", ""]], 1),
        ([["", "refused"], ["refused", ""]], None),
        ([[], []], None),
    ],
)
def test_the_first_address_that_every_node_reached_is_chosen(seen, chosen):
    reports = [{"host": f"n{i}", "seen": s} for i, s in enumerate(seen)]
    assert choose_endpoint(reports, len(seen[0])) == chosen


def test_all_ranks_meet_at_one_listener_and_the_others_are_closed():
    channel = ThreadChannel(4)
    meetings = on_threads(
        4, lambda rank: rendezvous.rendezvous(world_of(rank, 4), channel.of(rank), None)
    )
    assert {(m.ip, m.port, m.nonce) for m in meetings} == {
        (meetings[0].ip, meetings[0].port, meetings[0].nonce)
    }
    assert meetings[0].ip == "127.0.0.1"
    assert [m.listener is not None for m in meetings] == [True, False, False, False]
    assert meetings[0].listener.getsockname() == (meetings[0].ip, meetings[0].port)
    meetings[0].listener.close()


def test_two_nodes_with_loopback_alone_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(
        rendezvous,
        "local_addresses",
        lambda: [Address("lo", "127.0.0.1"), Address("x", "127.0.1.1")],
    )
    channel = ThreadChannel(2)
    errors = on_threads(
        2, lambda rank: rendezvous.rendezvous(world_of(rank, 2, 2), channel.of(rank), None)
    )
    assert [type(e) for e in errors] == [WorldError] * 2
    assert "found 127.0.0.1 (lo), 127.0.1.1 (x). Loopback cannot be used across nodes" in str(
        errors[1]
    )


def test_an_unknown_interface_is_an_error_that_lists_those_there_are():
    channel = ThreadChannel(2)
    errors = on_threads(
        2, lambda rank: rendezvous.rendezvous(world_of(rank, 2), channel.of(rank), "ib7")
    )
    assert "run.interface=ib7 does not exist on n0, where rank 0 is; it has" in str(errors[1])


def test_an_address_that_a_stranger_answers_is_passed_over(monkeypatch):
    """Every docker0 is 172.17.0.1: the second node would reach itself."""
    real = rendezvous._probe_endpoint

    def attempt(ip, port, nonce):
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            if ip == "127.0.0.1" and port == places[0]:
                reached = stranger.getsockname()[1]

                def answer():
                    with stranger.accept()[0] as peer:
                        peer.recv(100)
                        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n")

                threading.Thread(target=answer, daemon=True).start()
                return real(ip, reached, nonce)
        return real(ip, port, nonce)

    places = []
    original = rendezvous._offer_endpoints

    def offer(world, interface):
        made, listeners = original(world, interface)
        places.append(made["endpoints"][0]["port"])
        return made, listeners

    monkeypatch.setattr(
        rendezvous,
        "local_addresses",
        lambda: [Address("a", "127.0.0.1"), Address("b", "127.0.0.2")],
    )
    monkeypatch.setattr(rendezvous, "_offer_endpoints", offer)
    monkeypatch.setattr(rendezvous, "_probe_endpoint", attempt)
    channel = ThreadChannel(2)
    meetings = on_threads(
        2, lambda rank: rendezvous.rendezvous(world_of(rank, 2), channel.of(rank), "a")
    )
    assert [m.ip for m in meetings] == ["127.0.0.2"] * 2
    assert "run.interface=a was not reached from every node; using b" in meetings[0].warning
    meetings[0].listener.close()


def test_unreachable_addresses_are_named_with_who_could_not_reach_them(monkeypatch):
    monkeypatch.setattr(rendezvous, "_probe_endpoint", lambda ip, port, nonce: "no route")
    channel = ThreadChannel(2)
    errors = on_threads(
        2, lambda rank: rendezvous.rendezvous(world_of(rank, 2), channel.of(rank), None)
    )
    assert "127.0.0.1 (lo): not reached from n0 (no route)" in str(errors[1])
    assert "run.interface" in str(errors[0])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_star_gathers_from_all_ranks_many_times(size):
    def rank(rank):
        star = StarChannel(world_of(rank, size), ["127.0.0.1"], f"gather/{size}", 20)
        told = [star.all_gather([rank, i]) for i in range(3)]
        star.close()
        return told

    expected = [[[rank, i] for rank in range(size)] for i in range(3)]
    assert on_threads(size, rank) == [expected] * size


def test_what_all_ranks_are_told_is_written_down_once_and_is_short(monkeypatch):
    """Written once for each of 4,096 ranks of 128 CPUs, the start took minutes."""
    written, message = [], json_channel._encode_message
    monkeypatch.setattr(
        json_channel, "_encode_message", lambda value: written.append(value) or message(value)
    )

    def rank(rank):
        star = StarChannel(world_of(rank, 5), ["127.0.0.1"], "once", 20)
        star.all_gather([rank])
        star.close()

    on_threads(5, rank)
    assert written.count([[rank] for rank in range(5)]) == 1
    cpus = to_cpu_ranges(frozenset(range(128)))
    told = [[rank // 8, rank % 8, cpus] for rank in range(4096)]
    assert len(message(told)) < 128 * 1024


def test_what_takes_longer_than_the_start_has_its_own_limit():
    """The import of torch, behind which all ranks meet."""

    def meet(rank, token, limit_s):
        star = StarChannel(world_of(rank, 2), ["127.0.0.1"], token, 1)
        try:
            if rank:
                time.sleep(2)
            found = star.all_gather(rank, limit_s)
            assert {peer.gettimeout() for peer in star._peers.values()} == {1}
            return found
        finally:
            star.close()

    assert on_threads(2, lambda rank: meet(rank, "longer", 30)) == [[0, 1], [0, 1]]
    first, _ = on_threads(2, lambda rank: meet(rank, "as the start", None))
    assert isinstance(first, WorldError)


def test_candidate_ports_are_different_ones_of_the_range():
    """Below those that the kernel gives to clients, and above those of services."""
    for job in map(str, range(200)):
        ports = candidate_ports(job)
        assert len({*ports}) == json_channel.NUM_CANDIDATE_PORTS
        assert all(json_channel._FIRST_PORT <= port <= json_channel._LAST_PORT for port in ports)


def test_two_jobs_that_share_candidate_ports_do_not_mix():
    ports = candidate_ports("shared")

    def rank(index):
        job, number = divmod(index, 2)
        star = StarChannel(world_of(number, 2), ["127.0.0.1"], f"job {job}", 20, ports)
        told = star.all_gather(f"job {job} rank {number}")
        star.close()
        return told

    told = on_threads(4, rank)
    assert told == [[f"job {i // 2} rank 0", f"job {i // 2} rank 1"] for i in range(4)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_star_meets_by_either_version_of_ip(address):
    if ":" in address and not json_channel._is_own_address("::1"):
        pytest.skip("this host has no IPv6")

    def rank(rank):
        star = StarChannel(world_of(rank, 2), [address], f"by {address}", 20)
        told = star.all_gather(rank)
        star.close()
        return told

    assert on_threads(2, rank) == [[0, 1]] * 2


def test_a_host_is_found_by_an_address_that_its_own_name_does_not_stand_for(monkeypatch):
    monkeypatch.setattr(json_channel, "_own_addresses", lambda addresses: ["127.0.0.2"])
    monkeypatch.setattr(json_channel, "_WIDEN_AFTER_S", 0.3)

    def rank(rank):
        star = StarChannel(world_of(rank, 2, num_nodes=2), ["127.0.0.1"], "elsewhere", 20)
        told = star.all_gather(rank)
        star.close()
        return told

    assert on_threads(2, rank) == [[0, 1]] * 2


def test_a_port_that_is_taken_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(WorldError, match="found no free port"):
            StarChannel(world_of(0, 2), ["127.0.0.1"], "taken", 20, [port])


def test_ranks_that_never_come_are_named():
    with pytest.raises(WorldError, match=r"these ranks never connected: \[1, 2\]"):
        StarChannel(world_of(0, 3), ["127.0.0.1"], "lonely", 0.1)


def test_a_missing_rank_0_is_named_with_what_was_tried():
    with pytest.raises(WorldError, match=r"rank 1 on n1 could not reach rank 0 at 127.0.0.1"):
        StarChannel(world_of(1, 3), ["127.0.0.1"], "headless", 0.1)


def test_strangers_that_say_nothing_keep_no_rank_from_the_star():
    """A port scan, or a monitor that only looks whether somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = threading.Event()

    def rank(rank):
        if rank:
            listening.wait(60)
        star = StarChannel(world_of(rank, 2), ["127.0.0.1"], "watched", 60, [port])
        told = star.all_gather(rank)
        star.close()
        return told

    def strangers():
        found = []
        while len(found) < 4:
            with contextlib.suppress(ConnectionRefusedError):
                found.append(socket.create_connection(("127.0.0.1", port)))
        listening.set()
        return found

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(rank, number) for number in (0, 1)]
        silent = pool.submit(strangers)
        assert [one.result() for one in ranks] == [[0, 1], [0, 1]]
    for stranger in silent.result():
        stranger.close()


def test_a_stranger_that_says_nothing_keeps_no_node_from_rank_0s_address():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    answering = rendezvous._Responder([listener], "nonce")
    with listener, socket.create_connection(("127.0.0.1", port)):
        assert rendezvous._probe_endpoint("127.0.0.1", port, "nonce") == ""
        answering.stop()
