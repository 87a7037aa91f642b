"""The energy that a run's nodes consume while it trains; one rank of each node reads counters.

start of training -> the counters of each node (probe/gpu_state.py) -> end of training
-> summed over the nodes -> an event, and a line of the log (rundir/facts.py)
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from hpc_tune.cluster.schedulers import granted_cpus
from hpc_tune.log import log
from hpc_tune.probe.gpu_state import (
    CPUS,
    GPUS,
    MEMORY,
    NODE,
    EnergyCounter,
    EnergyMeter,
    PartEnergy,
    find_energy_counters,
)
from hpc_tune.rundir.facts import ENERGY_EVENT, WHOLE_NODES, read_energy, sum_energy
from hpc_tune.train.job import Job
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import pci_address

EnergyByPart = Mapping[str, PartEnergy]


class RunEnergyMeter:
    """Measures energy from its creation until ``end``."""

    def __init__(
        self,
        job: Job,
        find_counters: Callable[[Sequence[str]], list[EnergyCounter]] = find_energy_counters,
    ) -> None:
        """Begin to measure. Collective."""
        self._job, comm = job, job.setup_comm
        gpus = _gpu_addresses_of_node(comm)
        self._meter = None if gpus is None else EnergyMeter(find_counters(gpus))
        self._began_s = time.monotonic()

    def end(self, step: int, tokens: int) -> None:
        """Record the energy used up to ``step``, for the ``tokens`` of this start. Collective.

        After several starts, the line in the log sums all starts that recorded their energy.
        """
        node_energy: tuple[dict[str, tuple[Any, ...]], bool] | None = None
        if self._meter is not None:
            parts = {part: astuple(energy) for part, energy in self._meter.end().items()}
            node_energy = parts, _has_all_cpus()
        rows = [row for row in self._job.setup_comm.gather(node_energy) if row is not None]
        if not self._job.setup_comm.is_rank_0:
            return
        nodes = [{name: PartEnergy(*part) for name, part in parts.items()} for parts, _ in rows]
        fields = sum_node_energy(nodes, are_exclusive=all(has_all for _, has_all in rows))
        fields |= {"tokens": tokens, "seconds": round(time.monotonic() - self._began_s, 3)}
        self._job.events.write(ENERGY_EVENT, step, **fields)
        this_start = sum_energy([{"kind": ENERGY_EVENT, "step": step, **fields}])
        energy = read_energy(self._job.dir) or this_start
        assert energy is not None
        log.info("energy  %s", energy.full_text)


def _gpu_addresses_of_node(comm: Comm) -> list[str] | None:
    """Return the PCI addresses of the GPUs of this node's ranks to its first rank, else None.

    Collective. A GPU that several ranks have slices of is listed once.
    """
    address = None
    if comm.device.type == "cuda":
        address = pci_address(torch.cuda.get_device_properties(comm.device))
    node = comm.world.node
    ranks = [(rank, a) for rank, (n, a) in enumerate(comm.gather((node, address))) if n == node]
    if ranks[0][0] != comm.world.rank:
        return None
    return list(dict.fromkeys(a for _, a in ranks if a is not None))


def _has_all_cpus() -> bool:
    return (granted_cpus(os.environ) or 0) >= (os.cpu_count() or 1)


def sum_node_energy(nodes: Sequence[EnergyByPart], are_exclusive: bool) -> dict[str, Any]:
    """Return the event's fields for all nodes together (pure).

    A node's energy is its own counter's value if there is one, else the sum of its parts. CPUs and
    memory of a node are included only if all of their counters could be read, GPUs one by one.
    ``are_exclusive``: no other job has CPUs on these nodes.
    """
    total_j, joules = 0.0, dict.fromkeys((WHOLE_NODES, GPUS, CPUS, MEMORY), 0.0)
    num_whole = num_known = 0
    for parts in nodes:
        node = parts.get(NODE, PartEnergy())
        parts_j = {
            name: _measured_energy_j(name, parts[name])
            for name in (GPUS, CPUS, MEMORY)
            if name in parts
        }
        for name, part_j in parts_j.items():
            joules[name] += part_j
        if node.num_counted:
            num_whole, joules[WHOLE_NODES] = num_whole + 1, joules[WHOLE_NODES] + node.joules
        num_known += bool(node.num_counted or any(parts_j.values()))
        total_j += node.joules if node.num_counted else sum(parts_j.values())
    may_include_others = num_whole > 0 or joules[CPUS] > 0 or joules[MEMORY] > 0
    return {
        "total_j": total_j if num_known else None,
        "joules": {name: value for name, value in joules.items() if value},
        "nodes": len(nodes),
        "nodes_as_a_whole": num_whole,
        "missing": _describe_missing_energy(
            [parts for parts in nodes if not _has_counter(parts, NODE)], len(nodes)
        ),
        "has_others": may_include_others and not are_exclusive,
    }


def _has_counter(parts: EnergyByPart, name: str) -> bool:
    return name in parts and parts[name].num_counted > 0


def _measured_energy_j(name: str, part: PartEnergy) -> float:
    return part.joules if name == GPUS or part.num_counted == part.total else 0.0


def _describe_missing_energy(nodes: Sequence[EnergyByPart], num_nodes: int) -> list[str]:
    """Return what is missing for nodes without a counter of the whole node, and why."""
    descriptions = []
    for name in (GPUS, CPUS, MEMORY, NODE):
        incomplete_parts = [
            parts[name]
            for parts in nodes
            if name in parts and parts[name].num_counted < parts[name].total
        ]
        if not incomplete_parts:
            continue
        share = f" of {len(incomplete_parts)} of {num_nodes} nodes" if num_nodes > 1 else ""
        subject = f"{name}{share}"
        if name == GPUS:
            total = sum(parts[GPUS].total for parts in nodes if GPUS in parts)
            subject = f"{sum(p.total - p.num_counted for p in incomplete_parts)} of {total} GPUs"
        elif name == NODE:
            subject = f"the whole node{share}"
        descriptions.append(f"{subject} ({incomplete_parts[0].reason})")
    return descriptions
