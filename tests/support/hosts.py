"""Several hosts on one machine: network and hostname namespaces, and an agent in ssh's place."""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Hosts:
    """The names of the hosts, the script that runs a command on one, and their hostfile."""

    names: tuple[str, ...]
    agent: Path
    hostfile: Path
    network: str

    def on(self, index: int, *argv: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        return [str(self.agent), self.names[index], *argv]

    def cut(self, index: int) -> None:
        """Cut a host off: its processes keep running, but no packet gets in or out."""
        _ip(f"link set {_outer(self.names[index])} down")

    def mend(self, index: int) -> None:
        """Connect a host again."""
        _ip(f"link set {_outer(self.names[index])} up")


@contextlib.contextmanager
def hosts(
    num: int, folder: Path, rate: str | None = None, dead_first: bool = False
) -> Iterator[Hosts]:
    """Make hosts with an eth0 each on one network; skip the test if that is not allowed.

    ``rate``, such as ``100mbit``, limits what each host sends and what it receives. With
    ``dead_first`` each has an interface eno1 before eth0, which is up but has no cable.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = f"{os.getpid() % 10000}"
    network = f"10.{64 + os.getpid() % 60}.{os.getpid() // 60 % 250}"
    names = tuple(f"ht{tag}n{i}" for i in range(num))
    bridge = f"hb{tag}"
    table = folder / "hosts"
    lines = [f"{network}.{i + 1} {name}" for i, name in enumerate(names)]
    table.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{name} slots=8\n" for name in names))
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        for i, name in enumerate(names):
            outer = _outer(name)
            _ip(f"netns add {name}")
            if dead_first:
                _ip(f"-n {name} link add eno1 type veth peer name eno1p")
                _ip(f"-n {name} addr add 10.250.2.{i + 1}/24 dev eno1")
                _ip(f"-n {name} link set eno1 up")
            _ip(f"link add {outer} type veth peer name eth0 netns {name}")
            _ip(f"link set {outer} master {bridge} up")
            _ip(f"-n {name} addr add {network}.{i + 1}/24 dev eth0")
            for link in ("lo", "eth0"):
                _ip(f"-n {name} link set {link} up")
            if rate is not None:
                shape = f"root tbf rate {rate} burst 128kb latency 50ms"
                _run(f"tc -n {name} qdisc add dev eth0 {shape}")
                _run(f"tc qdisc add dev {outer} {shape}")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names, bridge)
        said = getattr(error, "stderr", b"").decode().strip()
        pytest.skip(f"network namespaces are not available: {error} {said}")
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        # Like ssh: options, then the host, then the words of one shell command.
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1; shift\n"
        f"exec ip netns exec $host unshare --uts --mount /bin/sh -c "
        f"'hostname '$host'; mount --bind {shlex.quote(str(table))} /etc/hosts; "
        'exec /bin/sh -c "$*"\' sh "$@"\n'
    )
    agent.chmod(0o755)
    try:
        yield Hosts(names, agent, hostfile, f"{network}.0/24")
    finally:
        _remove(names, bridge)


def _outer(name: str) -> str:
    """Return the name of the machine's end of a host's link."""
    return name.replace("ht", "hv")


def add_stray(host: str, interface: str, address: str) -> None:
    """Give a host an interface that leads nowhere."""
    _ip(f"-n {host} link add {interface} type veth peer name {interface}p")
    _ip(f"-n {host} addr add {address} dev {interface}")
    for link in (interface, f"{interface}p"):
        _ip(f"-n {host} link set {link} up")


def _remove(names: tuple[str, ...], bridge: str) -> None:
    for name in names:
        # The links of a deleted namespace disappear only some time later.
        subprocess.run(["ip", "link", "del", _outer(name)], capture_output=True)
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True)
