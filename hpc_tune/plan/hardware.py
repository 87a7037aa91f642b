"""The hardware of a run: nodes and their memory, and data sheet figures of GPUs and links."""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_tune.cluster.launchers import run_hpc_tune_command
from hpc_tune.config.scheduler import JobConfig
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

# Assumed for a node if neither the arguments nor the job section say.
_USUAL_RANKS_PER_NODE, USUAL_DEVICE_BYTES, USUAL_HOST_BYTES = 8, 80 << 30, 512 << 30

# Dense bf16 flops per second from the vendors' data sheets, by the name the driver gives.
_PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI355X": 2517e12,
    "MI350X": 2307e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 981e12,
    "MI250X": 191.5e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in flops per second; None if it is not in the table."""
    return next((peak for name, peak in _PEAK_BF16_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class Machine:
    """Nodes and their memory. ``device_bytes``: memory of each rank's GPU; None: ranks on CPUs."""

    nodes: int
    ranks_per_node: int
    device_bytes: int | None
    host_bytes: int
    cores_per_rank: int = 8

    @property
    def world_size(self) -> int:
        """The number of ranks, given that every node has the same number."""
        return self.nodes * self.ranks_per_node

    @property
    def host_bytes_per_rank(self) -> int:
        """A rank's share of its node's memory."""
        return self.host_bytes // self.ranks_per_node

    @property
    def bytes_per_rank(self) -> int:
        """Memory for a rank's tensors: its GPU's, or on CPUs its share of the node's."""
        return self.device_bytes or self.host_bytes_per_rank


def requested_machine(
    job: JobConfig,
    nodes: int | None,
    ranks_per_node: int | None,
    device_bytes: int | None,
    host_bytes: int | None,
    uses_cpus: bool,
) -> tuple[Machine, list[str]]:
    """Return the requested machine and a description of each assumption made for it.

    The arguments come first, then the job section if there is one, then the usual values of a node.
    ``uses_cpus``: ranks without GPUs, whatever the rest says.
    """
    assumptions, has_section = [], job.is_given
    if nodes is None:
        nodes = job.nodes
    if ranks_per_node is None and has_section:
        uses_cpus = uses_cpus or (job.gpus_per_node == 0 and device_bytes is None)
        ranks_per_node = job.ranks_per_node
    elif ranks_per_node is None:
        ranks_per_node = _USUAL_RANKS_PER_NODE
        assumptions.append(f"{_USUAL_RANKS_PER_NODE} ranks per node (--gpus-per-node)")
    if device_bytes is None and not uses_cpus:
        device_bytes = USUAL_DEVICE_BYTES
        assumptions.append(f"{format_bytes(USUAL_DEVICE_BYTES)} per GPU (--device-memory)")
    if host_bytes is None:
        host_bytes = job.memory_bytes
    if host_bytes is None:
        host_bytes = USUAL_HOST_BYTES
        assumptions.append(f"{format_bytes(USUAL_HOST_BYTES)} per node (--host-memory)")
    device_bytes = None if uses_cpus else device_bytes
    return Machine(nodes, ranks_per_node, device_bytes, host_bytes), assumptions


def detect_machine(comm: Comm, host_bytes: int) -> Machine:
    """Return the machine that the ranks run on. Collective.

    Where nodes differ: the smallest memory of any, and the most ranks. ``host_bytes``: what this
    job may use of this rank's node.
    """
    device_bytes = 0
    if comm.device.type == "cuda":
        import torch

        device_bytes = torch.cuda.get_device_properties(comm.device).total_memory
    least_host, least_device, ranks = comm.max([-host_bytes, -device_bytes, comm.world.local_size])
    nodes = comm.world.num_nodes
    return Machine(nodes, int(ranks), int(-least_device) or None, int(-least_host))


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster by its data sheets: flops per second of a GPU, bytes per second of a link.

    ``intra_node_*``: inside a node; ``inter_node_*``: between nodes, per network card.
    ``cards_per_node``: network cards of a node. ``host_bytes_per_s``: between a GPU and its node's
    memory.
    """

    flops: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    cards_per_node: int
    host_bytes_per_s: float
    intra_node_latency_s: float = 10e-6
    inter_node_latency_s: float = 20e-6


# From the vendors' data sheets: one direction of NVLink or PCIe, and one network card. Rates to the
# host are 80% of 16 lanes of PCIe 5.0 (H100, 64 GB/s) or 4.0 (32 GB/s).
CLUSTERS = {
    "h100-ib400": Cluster(_PEAK_BF16_FLOPS["H100"], 370e9, 48e9, 8, 51e9),
    "a100-ib200": Cluster(_PEAK_BF16_FLOPS["A100"], 240e9, 24e9, 4, 25e9),
    "l40s-pcie-ethernet": Cluster(_PEAK_BF16_FLOPS["L40S"], 20e9, 2.9e9, 1, 25e9),
    "a100-pcie-10g": Cluster(
        _PEAK_BF16_FLOPS["A100"], 20e9, 1.1e9, 1, 25e9, inter_node_latency_s=60e-6
    ),
}


# -- The plan command in its own process, because the trace of a step needs its own interpreter.


def run_plan(
    config: Path, machine: Machine, arguments: Iterable[str], limit_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run ``plan --json`` on a configuration file, in a process without a launcher's variables.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or does not finish in time.
    """
    words = ["plan", "--json", "--config", str(config), "--nodes", str(machine.nodes)]
    words += ["--gpus-per-node", str(machine.ranks_per_node)]
    words += ["--device-memory", str(machine.device_bytes or 0)]
    words += ["--host-memory", str(machine.host_bytes), *arguments]
    return run_hpc_tune_command(words, limit_s)
