"""parallel.layout=auto at the start of a run: measure, ask the plan, say why, check it afterwards.

links + a decoder block, measured on all ranks -> the plan command, on the first -> a layout,
and which ranks take its positions -> at the end of the run: what a step took, against that
"""

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_tune.config.load import write_resolved
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.memory.host import find_limit, give_back
from hpc_tune.model.builtin import BUILTIN_TINY
from hpc_tune.model.language import read_shape
from hpc_tune.model.shapes import refuse_shape
from hpc_tune.plan.candidates import ring_order
from hpc_tune.plan.measured import Measured
from hpc_tune.plan.memory_model import Machine
from hpc_tune.plan.process import run_plan
from hpc_tune.plan.search import with_layout
from hpc_tune.plan.step_time import Network
from hpc_tune.probe.links import measure_collectives, measure_pairs
from hpc_tune.train.calibration import measure_compute
from hpc_tune.world.comm import Comm
from hpc_tune.world.regroup import regroup

LINKS_S = 10.0


@dataclass(frozen=True)
class Chosen:
    """The layout, the ranks that take its positions in order, and the predicted step.

    ``lines``: the table that says why.
    """

    layout: Layout
    ranks: tuple[int, ...]
    step_s: float
    comm_share: float
    lines: tuple[str, ...]

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the configuration with every axis set."""
        parallel = with_layout(config.parallel, self.layout)
        return config.model_copy(update={"parallel": parallel})

    def compare(self, steps_s: Iterable[float]) -> dict[str, Any]:
        """Return the prediction beside the median of what steps took, but for the first."""
        steps_s = list(steps_s)
        measured_s = statistics.median(steps_s[1:]) if len(steps_s) > 1 else None
        off = None if measured_s is None else measured_s / self.step_s - 1
        if off is not None:
            log.info(
                "auto    a step took %.3g s, predicted were %.3g s (%+.0f%%)",
                *(measured_s, self.step_s, 100 * off),
            )
        return {
            "layout": str(self.layout),
            "ranks": list(self.ranks),
            "predicted_step_s": self.step_s,
            "measured_step_s": measured_s,
            "off": off,
            "predicted_comm_share": self.comm_share,
        }


def choose_ranks(config: RunConfig, world: Comm) -> tuple[Chosen, Comm | None]:
    """Measure and choose; return it with this rank's part in that world, or None outside of it.

    Collective; ``world``'s process groups may be gone afterwards.

    Raises:
        ConfigError: if no layout is possible or fits. DataError: if the model cannot be used.
    """
    path, comm = config.model.path, world.in_training()  # no rank may work for hours here
    refuse_shape(path)
    if path != BUILTIN_TINY:
        comm.together("reading the model's shape", lambda: read_shape(Path(path)))
    log.info("auto    measuring links and a decoder block")
    machine = machine_of(config, comm)
    measured, ordered = take_measures(config, comm, machine)
    chosen = choose_from(measured, config, ordered, machine)
    return chosen, regroup(ordered, measured.places(chosen.ranks), config.run.timeout)


def machine_of(config: RunConfig, comm: Comm) -> Machine:
    """Return the machine as the plan knows it; of nodes that differ the least. Collective."""
    host, device = find_limit(config.memory.host_limit).num_bytes, _device_bytes(comm)
    least = comm.max([-host, -device])
    ranks = int(comm.max([comm.world.local_size])[0])
    host, device = (-int(number) for number in least)
    return Machine(comm.world.num_nodes, ranks, device or None, host)


def take_measures(config: RunConfig, comm: Comm, machine: Machine) -> tuple[Measured, Comm]:
    """Measure links and compute, in some ten seconds. Collective.

    Returns a comm of all ranks, in an order that has no slow link in its ring if that can be:
    collectives and gathering say more there.

    Raises:
        ConfigError: if the model's blocks are too large for that.
    """
    room = machine.device_bytes or machine.host_bytes // machine.ranks_per_node
    nodes = tuple(peer.node for peer in comm.roster)
    links = measure_pairs(comm, LINKS_S)
    order = ring_order(Network.measured(links, nodes))
    ordered = regroup(comm, order, config.run.timeout)
    assert ordered is not None, "all ranks are in it"
    ordered = ordered.in_training()
    links = replace(links, collectives=measure_collectives(ordered), order=order)
    compute = measure_compute(config, ordered, room, Network.measured(links, nodes), order)
    give_back()
    if comm.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    return Measured(nodes, links, compute), ordered


def choose_from(measured: Measured, config: RunConfig, comm: Comm, machine: Machine) -> Chosen:
    """Choose on the first rank. Collective.

    Raises:
        ConfigError: if no layout is possible or fits.
    """
    limit_s = config.run.timeout / 2  # the others wait for it
    told = comm.on_rank_0("choosing the layout", lambda: _ask(config, measured, machine, limit_s))
    for line in told["lines"]:
        log.info("%s", line)
    return Chosen(
        Layout(**told["layout"]),
        tuple(told["ranks"]),
        told["step_s"],
        told["comm_share"],
        tuple(told["lines"]),
    )


def _device_bytes(comm: Comm) -> int:
    if comm.device.type == "cpu":
        return 0
    import torch

    total: int = torch.cuda.get_device_properties(comm.device).total_memory
    return total


def _ask(config: RunConfig, measured: Measured, machine: Machine, limit_s: float) -> dict[str, Any]:
    """Run the plan command; the trace of a step needs an interpreter to itself."""
    with tempfile.TemporaryDirectory() as folder:
        file, settings = Path(folder) / "measured.json", Path(folder) / "config.yaml"
        file.write_text(measured.to_json(), encoding="utf-8")
        write_resolved(config, settings)
        words = ["--measured", file, "--device-memory", machine.device_bytes or 0]
        words += ["--host-memory", machine.host_bytes]
        try:
            done = run_plan(settings, map(str, words), limit_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"parallel.layout=auto: not chosen within {limit_s:.0f} s (half of run.timeout); "
                "set the axes, as `plan parallel=auto` tells them on a login node"
            ) from None
    if done.returncode:
        said = done.stderr.strip().removeprefix("hpc_tune: ")
        raise ConfigError(said or f"parallel.layout=auto: the plan ended with {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told
