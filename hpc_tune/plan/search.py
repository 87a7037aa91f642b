"""parallel.layout=auto: the fastest layout that fits, from what was measured of ranks and links.

    measured.json (or a named machine) -> Compute, Network -> candidates, the fastest first
    -> planned one after the other until one fits -> Choice

A run measures for itself and asks the ``plan`` command; on a login node a machine is named.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.plan.candidates import Candidate, candidates, choose_layout, preference
from hpc_tune.plan.measured import HARDWARE, Hardware, Measured
from hpc_tune.plan.memory_model import PROCESS_BYTES, SURE_SHARE, Machine, most_bytes
from hpc_tune.plan.model_size import ModelSize, measure, static_bytes
from hpc_tune.plan.report import answer, built_from, shape_of
from hpc_tune.plan.step_time import Compute, Network, StepWork, step_time
from hpc_tune.units import format_bytes

SHOWN = 5


@dataclass(frozen=True)
class Row:
    """A line of the table; ``memory`` of the rank that needs most.

    ``fits`` is None where it was not asked: what is slower is not planned.
    """

    candidate: Candidate
    memory: str
    fits: bool | None


@dataclass(frozen=True)
class Choice:
    """What was chosen: ``rows`` are the fastest, ``refused`` faster ones that do not fit.

    ``naive`` is what would run without auto, ``alone`` one rank, where it has the memory.
    """

    rows: list[Row]
    refused: list[Row]
    naive: Candidate | None
    alone: Candidate | None
    num_ranks: int

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.rows[0].candidate


def choose_for(
    config: RunConfig, machine: Machine, measured_file: str | None, hardware: str | None
) -> tuple[Choice, Machine, RunConfig]:
    """Choose for the command line; return also the machine of the ranks that are used, and the
    configuration with the layout.

    Raises:
        ConfigError: as ``choose``; or if neither a file nor a known machine is named.
    """
    if hardware is not None and hardware not in HARDWARE:
        raise ConfigError(f"--hardware {hardware}: expected {', '.join(HARDWARE)}")
    kind = HARDWARE[hardware] if hardware else None
    if measured_file is not None:
        measured = Measured.read(Path(measured_file))
    elif kind is not None:
        measured = kind.measured(machine.nodes, machine.ranks_per_node)
    else:
        raise ConfigError(
            f"parallel=auto: how fast are the links there? --hardware {_names()}, or --measured "
            "FILE with what `python -m hpc_tune doctor --json` printed on those nodes"
        )
    choice = choose(config, _of_ranks(machine, measured.nodes), measured, kind)
    used = _of_ranks(machine, [measured.nodes[rank] for rank in choice.best.ranks])
    parallel = with_layout(config.parallel, choice.best.layout)
    return choice, used, config.model_copy(update={"parallel": parallel})


def choose(
    config: RunConfig, machine: Machine, measured: Measured, hardware: Hardware | None = None
) -> Choice:
    """Return the fastest layout that fits ``machine``, and the next ones.

    ``hardware`` tells how fast ranks compute where ``measured`` does not.

    Raises:
        ConfigError: if no layout is legal, or none fits. DataError: as ``answer``.
    """
    with shape_of(config.model.path) as shape_dir:
        built = built_from(config, shape_dir)
        size = measure(built.module)
        recomputes = config.parallel.recompute == "full"
        compute = measured.compute
        if compute is None and hardware is not None:
            compute = hardware.compute(size, built.config, config.data.seq_len, recomputes)
        if compute is None:
            raise ConfigError(
                f"how fast ranks compute is not known: name a machine, --hardware {_names()}"
            )
        work = StepWork(
            size, built.config, config.batch.global_size, config.data.seq_len, built.dtype.itemsize
        )
        network = Network.measured(measured.links, measured.nodes)
        room = machine.device_bytes or machine.host_bytes // machine.ranks_per_node
        process_bytes = 0 if machine.device_bytes else PROCESS_BYTES
        found = candidates(config, work, room, compute, network, process_bytes)
        num_ranks = len(measured.nodes)

        def preferred(row: Row) -> float:
            return preference(row.candidate, num_ranks)

        rows: list[Row] = []
        refused: list[Row] = []
        planned: list[_Planned] = []
        for one in found:
            best = min((preferred(r) for r in rows if r.fits), default=math.inf)
            if preference(one, num_ranks) < best:
                row = _row(config, one, machine, measured.nodes, work, room, planned)
                if row.candidate.micro_rows != one.micro_rows:
                    row = _with_time(row, config, work, compute, network)
                (rows if row.fits else refused).append(row)
            elif len(rows) < SHOWN:
                state = format_bytes(static_bytes(size, one.layout))
                rows.append(Row(one, f"> {state}", None))
        if not rows:
            raise ConfigError(_nothing(machine, len(found), planned, size))
        rows.sort(key=preferred)
        layout, _ = choose_layout(config.parallel, num_ranks, size, room, machine.ranks_per_node)
        naive = next((one for one in found if one.layout == layout), None)
        alone = next((one for one in found if one.layout.size == 1), None)
    return Choice(rows, refused, naive, alone, num_ranks)


def as_lines(choice: Choice) -> list[str]:
    """Return the table for a person: the five fastest, and why the first is."""
    best, naive, alone = choice.best, choice.naive, choice.alone
    head = f"auto    {'layout':<54}{'ranks':>6}{'memory':>12}{'step':>12}{'comm':>7}"
    lines = [
        head,
        *(_line(row, "<- this one" if row.candidate is best else "") for row in choice.rows),
    ]
    shown = [row.candidate for row in choice.rows]
    for one, note in ((naive, "what memory alone would choose"), (alone, "")):
        if one is not None and one not in shown:
            lines.append(_line(Row(one, "", None), note))
            shown.append(one)
    lines += [_line(row, "does not fit") for row in choice.refused]
    said = []
    if naive and alone and naive.time.seconds > alone.time.seconds:
        said.append(f"without auto all {choice.num_ranks} ranks would be slower than one")
    if len(choice.rows) > 1:
        said.append(_reason(best, choice.rows[1].candidate))
    if best.layout.size < choice.num_ranks:
        whole = next((one for one in shown if one.layout.size == choice.num_ranks), None)
        more = f": all {choice.num_ranks} would take {_time(whole)}" if whole else ""
        said.append(f"{choice.num_ranks - best.layout.size} ranks stay idle{more}")
    return lines + [f"        {text}" for text in said]


def as_json(choice: Choice) -> str:
    """Return what a run needs of it."""
    best = choice.best
    told: dict[str, Any] = {
        "layout": asdict(best.layout),
        "ranks": best.ranks,
        "step_s": best.time.seconds,
        "comm_share": best.time.comm_share,
        "lines": as_lines(choice),
    }
    return json.dumps(told)


def with_layout(parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """Return the settings with every axis as in ``layout``, and nothing left to choose."""
    return parallel.model_copy(update={**asdict(layout), "layout": "simple"})


@dataclass(frozen=True)
class _Planned:
    """What a layout was found to take in a step beside weights, gradients and optimizer state.

    ``advice``: what would make it fit.
    """

    candidate: Candidate
    rest_bytes: int
    advice: Sequence[str]

    def at_least(self, other: Candidate, size: ModelSize) -> int:
        """Return the bytes that ``other`` takes at least; 0 if nothing can be said.

        What a step keeps is divided by no more than the tensor and pipeline axes. Weights that are
        gathered are some of it.
        """
        mine, its = self.candidate.layout, other.layout
        holds_more = mine.shard > 1 and (its.shard == 1 or self.candidate.reshard != other.reshard)
        if holds_more:
            return 0
        cut = its.tensor * its.pipeline / (mine.tensor * mine.pipeline)
        return static_bytes(size, its) + int(self.rest_bytes / max(1.0, cut))


def _row(
    config: RunConfig,
    one: Candidate,
    machine: Machine,
    nodes: Sequence[int],
    work: StepWork,
    room: int,
    planned: list[_Planned],
) -> Row:
    """Say what memory a candidate takes, by a bound where that is enough, else by a plan.

    ``planned`` are those before it.
    """
    tokens = one.micro_rows * work.seq_len
    most = most_bytes(work.size, one.layout, work.config, tokens, bool(machine.device_bytes))
    if most < SURE_SHARE * room:
        return Row(one, f"< {format_bytes(most)}", True)
    least = max((other.at_least(one, work.size) for other in planned), default=0)
    if least > room:
        return Row(one, f"> {format_bytes(least)}", False)
    smaller = _of_ranks(machine, [nodes[rank] for rank in one.ranks])
    chosen = config.model_copy(update={"parallel": with_layout(config.parallel, one.layout)})
    log.info("auto    planning %s", one)
    found = answer(chosen, smaller)
    steady = next(phase for phase in found.phases if phase.name == "steady")
    num_bytes = steady.device_bytes if machine.device_bytes else steady.rank_bytes
    rest_bytes = num_bytes - static_bytes(work.size, one.layout)
    planned.append(_Planned(one, rest_bytes, found.advice))
    fitting = found.tokens_that_fit // work.seq_len
    if config.batch.micro_size == "auto" and 0 < fitting < one.micro_rows:
        one = dataclasses.replace(one, micro_rows=1 << (fitting.bit_length() - 1))
    return Row(one, format_bytes(num_bytes), found.fits)


def _of_ranks(machine: Machine, nodes: Sequence[int]) -> Machine:
    """Return the machine as ranks on these nodes see it."""
    counts = Counter(nodes)
    return dataclasses.replace(machine, nodes=len(counts), ranks_per_node=max(counts.values()))


def _with_time(
    row: Row, config: RunConfig, work: StepWork, compute: Compute, network: Network
) -> Row:
    one = row.candidate
    parallel = config.parallel.model_copy(update={"reshard": one.reshard})
    time = step_time(work, one.layout, one.ranks, parallel, one.micro_rows, compute, network)
    return dataclasses.replace(row, candidate=dataclasses.replace(one, time=time))


def _line(row: Row, note: str) -> str:
    one = row.candidate
    text = f"        {one!s:<54}{one.layout.size:>6}{row.memory:>12}{_time(one):>12}"
    return f"{text}{one.time.comm_share:>7.0%}  {note}".rstrip()


def _time(one: Candidate) -> str:
    return f"{one.time.seconds:.3g} s"


def _reason(best: Candidate, other: Candidate) -> str:
    more_s = other.time.seconds - best.time.seconds
    if more_s < 0.01 * best.time.seconds:
        return f"{other} is as fast, and less simple"
    waits_s = other.time.comm_s - best.time.comm_s
    what = "waits for messages" if waits_s > more_s / 2 else "computes"
    return f"{other} {what} {max(waits_s, more_s - waits_s):.3g} s longer per step"


def _nothing(
    machine: Machine,
    num_found: int,
    planned: Sequence[_Planned],
    size: ModelSize,
) -> str:
    room = machine.device_bytes or machine.host_bytes // machine.ranks_per_node
    if planned:
        best = min(planned, key=lambda one: one.at_least(one.candidate, size))
        least = format_bytes(best.at_least(best.candidate, size))
        return (
            f"parallel.layout=auto: none of {num_found} layouts fits; the least that a rank's "
            f"steps were found to take is {least} of {format_bytes(room)}, with {best.candidate}. "
            f"What would help there:\n  - " + "\n  - ".join(best.advice)
        )
    return (
        f"parallel.layout=auto: no layout of up to {machine.world_size} ranks is possible: the "
        f"axes that are set do not suit the model, or its state is more than {format_bytes(room)} "
        "per rank in each of them"
    )


def _names() -> str:
    return "|".join(HARDWARE)
