"""parallel.layout=auto at the start of a run: measure, ask the plan, say why, compare afterwards.

links + a decoder block, measured on all ranks -> the plan command, on the first -> a layout,
and which ranks take its positions -> at the end of the run: what a step took, against that
"""

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_tune.autotune.candidates import Candidate, ring_order
from hpc_tune.autotune.measured import Measurements
from hpc_tune.autotune.microbenchmark import BlockModels, measure_compute
from hpc_tune.autotune.search import from_json
from hpc_tune.config.constraints import allows_tensor
from hpc_tune.config.load import write_resolved
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.memory.host import find_limit, trim_heap
from hpc_tune.model.build import compute_dtype
from hpc_tune.model.builtin import BUILTIN_TINY
from hpc_tune.model.language import read_language_config
from hpc_tune.model.shapes import refuse_shape
from hpc_tune.plan.hardware import Machine, detect_machine
from hpc_tune.plan.network import Network
from hpc_tune.plan.process import run_plan
from hpc_tune.plan.resolve import min_micro_rows
from hpc_tune.plan.shape import open_shape
from hpc_tune.probe.links import describe_links, measure_collectives, measure_pairs
from hpc_tune.world.comm import Comm
from hpc_tune.world.regroup import regroup

LINKS_TIME_S = 10.0


def choose_ranks(config: RunConfig, world: Comm) -> tuple[Candidate, Comm | None]:
    """Measure and choose; return it with this rank's part in that world, or None outside of it.

    Collective; ``world``'s process groups may be gone afterwards.

    Raises:
        ConfigError: if no layout is possible or fits. DataError: if the model cannot be used.
    """
    path, comm = config.model.path, world.with_step_timeout()  # no rank may work for hours here
    refuse_shape(path)
    if path != BUILTIN_TINY:
        comm.run_and_agree("reading the model's shape", lambda: read_language_config(Path(path)))
    log.info("auto    measuring links and a decoder block")
    machine = detect_machine(comm, find_limit(config.memory.host_limit).num_bytes)
    measured, ordered = measure_world(config, comm, machine)
    write_settings, limit_s = partial(write_resolved, config), config.run.timeout / 2
    best, lines = choose_on_rank_0(measured, write_settings, ordered, machine, limit_s)
    for line in lines:
        log.info("%s", line)
    best = replace(best, links=describe_links(measured.links))
    return best, regroup(ordered, measured.positions(best.ranks), config.run.timeout)


def measure_world(config: RunConfig, comm: Comm, machine: Machine) -> tuple[Measurements, Comm]:
    """Measure links and compute, in some ten seconds. Collective.

    Returns a comm of all ranks, in an order that has no slow link in its ring if that can be:
    collectives and gathering say more there.

    Raises:
        ConfigError: if the model's blocks are too large for that.
    """
    nodes = tuple(peer.node for peer in comm.roster)
    links = measure_pairs(comm, LINKS_TIME_S)
    order = ring_order(Network.measured(links, nodes))
    ordered = regroup(comm, order, config.run.timeout)
    assert ordered is not None, "all ranks are in it"
    ordered = ordered.with_step_timeout()
    links = replace(links, collectives=measure_collectives(ordered), order=order)
    network, seq_len = Network.measured(links, nodes), config.data.seq_len
    dtype = compute_dtype(config.model.dtype, ordered.device)
    with open_shape(config.model.path, dtype, config.tune, config.train.seed) as shape:
        sections = (config.parallel, config.optim)
        models = BlockModels(shape, *sections, seq_len, ordered, machine.bytes_per_rank)
        rows, with_tensor = min_micro_rows(config.batch), allows_tensor(config.tune, config.train)
        compute = measure_compute(models, rows, network, order, with_tensor)
    trim_heap()
    if comm.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    return Measurements(nodes, links, compute), ordered


def choose_on_rank_0(
    measured: Measurements,
    write_settings: Callable[[Path], None],
    comm: Comm,
    machine: Machine,
    limit_s: float,
) -> tuple[Candidate, list[str]]:
    """Choose on the first rank; return also the table that says why. Collective.

    ``write_settings`` writes the configuration file. The others wait for up to ``limit_s``.

    Raises:
        ConfigError: if no layout is possible or fits.
    """

    def ask() -> str:
        with tempfile.TemporaryDirectory() as folder:
            file, settings = Path(folder) / "measured.json", Path(folder) / "config.yaml"
            file.write_text(measured.to_json(), encoding="utf-8")
            write_settings(settings)
            try:
                done = run_plan(settings, machine, ["--measured", str(file)], limit_s)
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"parallel.layout=auto: not chosen within {limit_s:.0f} s (half of "
                    "run.timeout); set the axes, as `plan parallel=auto` prints them on a login "
                    "node"
                ) from None
        if done.returncode:
            message = done.stderr.strip().removeprefix("hpc_tune: ")
            default = f"parallel.layout=auto: the plan ended with {done.returncode}"
            raise ConfigError(message or default)
        return done.stdout

    return from_json(comm.on_rank_0("choosing the layout", ask))


def compare_step(chosen: Candidate, steps_s: Iterable[float]) -> dict[str, Any]:
    """Return the prediction beside the median of what steps took, but for the first."""
    steps_s, predicted_s = list(steps_s), chosen.time.seconds
    measured_s = statistics.median(steps_s[1:]) if len(steps_s) > 1 else None
    off = None if measured_s is None else measured_s / predicted_s - 1
    if off is not None:
        log.info(
            "auto    a step took %.3g s, predicted were %.3g s (%+.0f%%)",
            measured_s,
            predicted_s,
            100 * off,
        )
    return {
        "layout": str(chosen.layout),
        "ranks": list(chosen.ranks),
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "off": off,
        "predicted_comm_share": chosen.time.comm_share,
    }
