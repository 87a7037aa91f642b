"""parallel.layout=auto: the fastest layout that fits, from what was measured of ranks and links.

    measured.json (or a named cluster) -> Compute, Network -> candidates, the fastest first
    -> planned one after the other until one fits -> Choice

A run measures its own ranks and runs the ``plan`` command; on a login node a cluster is named.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_tune.autotune.candidates import Candidate, legal_layouts, predict_candidates
from hpc_tune.autotune.measured import (
    Measurements,
    compute_from_data_sheet,
    measurements_from_data_sheet,
)
from hpc_tune.config.constraints import allows_expert, allows_tensor
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.model.experts import require_shardable_experts
from hpc_tune.plan.hardware import CLUSTERS, Cluster, Machine
from hpc_tune.plan.memory_model import surely_fits, upper_bound_bytes
from hpc_tune.plan.network import Network
from hpc_tune.plan.report import MemoryPlan, make_plan
from hpc_tune.plan.resolve import resolve, with_layout
from hpc_tune.plan.shape import open_shape, planned_dtype
from hpc_tune.plan.step_time import StepTime, StepWork, step_time
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, measure, static_bytes
from hpc_tune.units import format_bytes

MAX_SHOWN = 5


@dataclass(frozen=True)
class Choice:
    """What was chosen: ``rows`` are the fastest, ``refused`` faster ones that do not fit.

    ``simple`` is what would run without auto, ``alone`` one rank, where it has the memory.
    """

    rows: list[Candidate]
    refused: list[Candidate]
    simple: Candidate | None
    alone: Candidate | None
    num_ranks: int

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.rows[0]


def choose_for_command(
    config: RunConfig, machine: Machine, measured_file: str | None, cluster_name: str | None
) -> tuple[Choice, Machine, RunConfig]:
    """Choose for the command line; return also the machine of the ranks that are used, and the
    configuration with the layout.

    Raises:
        ConfigError: as ``search_layout``; or if neither a file nor a known cluster is named.
    """
    if cluster_name is not None and cluster_name not in CLUSTERS:
        raise ConfigError(f"--hardware {cluster_name}: expected {', '.join(CLUSTERS)}")
    cluster = CLUSTERS[cluster_name] if cluster_name else None
    if measured_file is not None:
        measured = Measurements.read(Path(measured_file))
    elif cluster is not None:
        measured = measurements_from_data_sheet(cluster, machine.nodes, machine.ranks_per_node)
    else:
        raise ConfigError(
            f"parallel=auto: how fast are the links there? --hardware {_cluster_names()}, or "
            "--measured FILE with what `python -m hpc_tune doctor --json` printed on those nodes"
        )
    choice = search_layout(config, _restrict_machine(machine, measured.nodes), measured, cluster)
    used = _restrict_machine(machine, [measured.nodes[rank] for rank in choice.best.ranks])
    parallel = with_layout(config.parallel, choice.best.layout)
    return choice, used, config.model_copy(update={"parallel": parallel})


def search_layout(
    config: RunConfig, machine: Machine, measured: Measurements, cluster: Cluster | None = None
) -> Choice:
    """Return the fastest layout that fits ``machine``, and the next ones.

    The data sheets of ``cluster`` tell how fast ranks compute where ``measured`` does not.

    Raises:
        ConfigError: if no layout is legal, or none fits. DataError: as ``make_plan``.
    """
    asked, seq_len, num_ranks = config.parallel, config.data.seq_len, len(measured.nodes)
    dtype = planned_dtype(config.model.dtype, machine.device_bytes is not None)
    with open_shape(config.model.path, dtype, config.tune, config.train.seed) as shape:
        built = shape.build()
        size = measure(built.module, config.optim.is_8bit)
    compute = measured.compute
    if compute is None and cluster is not None:
        recomputes = asked.recompute == "full"
        compute = compute_from_data_sheet(cluster, size, built.config, seq_len, recomputes)
    if compute is None:
        raise ConfigError(
            f"how fast ranks compute is not known: name a cluster, --hardware {_cluster_names()}"
        )
    work = StepWork(size, built.config, config.batch.global_size, seq_len, dtype.itemsize)
    network = Network.measured(measured.links, measured.nodes)
    with_tensor = allows_tensor(config.tune, config.train)
    may_deal = allows_expert(asked, config.train)
    num_experts = require_shardable_experts(built.module, asked.expert) if may_deal else 1
    layouts = legal_layouts(asked, built.config, num_ranks, with_tensor, num_experts)
    if built.tokens and built.tied:  # the head reads their rows too: train/model.py
        layouts = [layout for layout in layouts if layout.tensor == layout.pipeline == 1]
    legal = predict_candidates(layouts, asked, config.batch, work, machine, compute, network)

    def plan_of(candidate: Candidate) -> MemoryPlan:
        parallel = with_layout(asked, candidate.layout)
        used = _restrict_machine(machine, [measured.nodes[rank] for rank in candidate.ranks])
        return make_plan(config.model_copy(update={"parallel": parallel}), used)

    def with_rows(candidate: Candidate, rows: int) -> Candidate:
        settings = asked.model_copy(update={"reshard": candidate.reshard})
        where = (candidate.layout, candidate.ranks, settings, rows)
        time = step_time(work, *where, compute, network)
        return replace(candidate, micro_rows=rows, time=time)

    may_split = config.batch.micro_size == "auto"
    search = _Search(work, machine, num_ranks, plan_of, with_rows if may_split else None)
    rows, refused = search.fastest_that_fit(legal)
    layout = resolve(asked, size, built.config, machine, num_ranks).layout
    simple = next((c for c in legal if c.layout == layout), None)
    alone = next((c for c in legal if c.layout.size == 1), None)
    return Choice(rows, refused, simple, alone, num_ranks)


def as_lines(choice: Choice) -> list[str]:
    """Return the table for a person: the five fastest, and why the first is."""
    best, simple, alone = choice.best, choice.simple, choice.alone
    head = f"auto    {'layout':<54}{'ranks':>6}{'memory':>12}{'step':>12}{'comm':>7}"
    lines = [
        head,
        *(_format_row(row, "<- this one" if row is best else "") for row in choice.rows),
    ]
    shown = list(choice.rows)
    for other, note in ((simple, "what memory alone would choose"), (alone, "")):
        if other is not None and all(row.layout != other.layout for row in shown):
            lines.append(_format_row(other, note))
            shown.append(other)
    lines += [_format_row(row, "does not fit") for row in choice.refused]
    reasons = []
    if simple and alone and simple.time.seconds > alone.time.seconds:
        reasons.append(f"without auto all {choice.num_ranks} ranks would be slower than one")
    if len(choice.rows) > 1:
        reasons.append(_explain(best, choice.rows[1]))
    if best.layout.size < choice.num_ranks:
        whole = next((row for row in shown if row.layout.size == choice.num_ranks), None)
        more = f": all {choice.num_ranks} would take {_format_time(whole)}" if whole else ""
        reasons.append(f"{choice.num_ranks - best.layout.size} ranks stay idle{more}")
    return lines + [f"        {text}" for text in reasons]


def as_json(choice: Choice) -> str:
    """Return what a run needs of it; see ``from_json``."""
    best = choice.best
    tree: dict[str, Any] = {
        "layout": asdict(best.layout),
        "ranks": best.ranks,
        "reshard": best.reshard,
        "micro_rows": best.micro_rows,
        "step_s": best.time.seconds,
        "comm_s": best.time.comm_s,
        "comm_share": best.time.comm_share,
        "lines": as_lines(choice),
    }
    return json.dumps(tree)


def from_json(text: str) -> tuple[Candidate, list[str]]:
    """Return the best candidate and the table from what ``as_json`` has written."""
    tree: dict[str, Any] = json.loads(text)
    layout, time = Layout(**tree["layout"]), StepTime(tree["step_s"], tree["comm_s"])
    best = Candidate(layout, tuple(tree["ranks"]), tree["reshard"], tree["micro_rows"], time)
    return best, tree["lines"]


@dataclass(frozen=True)
class _PlannedCandidate:
    """What a step of a layout takes beside weights, gradients and optimizer state.

    ``advice``: what would make it fit.
    """

    candidate: Candidate
    rest_bytes: int
    advice: Sequence[str]

    def min_bytes(self, other: Candidate, size: ModelSize) -> int:
        """Return the bytes that ``other`` takes at least; 0 if nothing can be said.

        What a step keeps is divided by no more than the tensor and pipeline axes. Weights that are
        gathered are some of it.
        """
        own, its = self.candidate.layout, other.layout
        holds_more = own.shard > 1 and (its.shard == 1 or self.candidate.reshard != other.reshard)
        if holds_more or own.expert != its.expert:
            return 0
        cut = its.tensor * its.pipeline / (own.tensor * own.pipeline)
        return static_bytes(size, its) + int(self.rest_bytes / max(1.0, cut))


@dataclass
class _Search:
    """Plans candidates, the fastest first, until one fits; learns from each plan of the others.

    ``plan_of`` takes half a minute for a 70B model. ``with_rows`` times a candidate with smaller
    micro-batches; None where their size is set.
    """

    work: StepWork
    machine: Machine
    num_ranks: int
    plan_of: Callable[[Candidate], MemoryPlan]
    with_rows: Callable[[Candidate, int], Candidate] | None
    planned: list[_PlannedCandidate] = field(default_factory=list)

    def fastest_that_fit(
        self, legal: Sequence[Candidate]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Return the fastest of ``legal`` that fit, and faster ones that do not.

        Raises:
            ConfigError: if none fits.
        """
        rows: list[Candidate] = []
        refused: list[Candidate] = []
        for candidate in legal:
            best = min((self._preference(row) for row in rows if row.fits), default=math.inf)
            if self._preference(candidate) < best:
                weighed = self._with_memory(candidate)
                (rows if weighed.fits else refused).append(weighed)
            elif len(rows) < MAX_SHOWN:
                state = format_bytes(static_bytes(self.work.size, candidate.layout))
                rows.append(replace(candidate, memory=f"> {state}"))
        if not rows:
            raise ConfigError(self._why_nothing_fits(len(legal)))
        return sorted(rows, key=self._preference), refused

    def _preference(self, candidate: Candidate) -> float:
        return candidate.preference(self.num_ranks)

    def _with_memory(self, candidate: Candidate) -> Candidate:
        """Return it with its memory, by a bound where that is enough, else by a plan."""
        work, machine, layout = self.work, self.machine, candidate.layout
        room = machine.bytes_per_rank
        tokens = candidate.micro_rows * work.seq_len
        most = upper_bound_bytes(work.size, layout, work.model, tokens, machine)
        if layout.expert == 1 and surely_fits(most, machine):  # of tokens that are sent are copies
            return replace(candidate, memory=f"< {format_bytes(most)}", fits=True)
        least = max((p.min_bytes(candidate, work.size) for p in self.planned), default=0)
        if least > room:
            return replace(candidate, memory=f"> {format_bytes(least)}", fits=False)
        log.info("auto    planning %s", candidate)
        plan = self.plan_of(candidate)
        steady = next(phase for phase in plan.phases if phase.name == "steady")
        num_bytes = steady.device_bytes if machine.device_bytes else steady.rank_bytes
        rest_bytes = num_bytes - static_bytes(work.size, layout)
        self.planned.append(_PlannedCandidate(candidate, rest_bytes, plan.advice))
        fitting = plan.tokens_that_fit // work.seq_len
        if self.with_rows and 0 < fitting < candidate.micro_rows:
            candidate = self.with_rows(candidate, 1 << (fitting.bit_length() - 1))
        return replace(candidate, memory=format_bytes(num_bytes), fits=plan.fits)

    def _why_nothing_fits(self, num_legal: int) -> str:
        room = format_bytes(self.machine.bytes_per_rank)
        if self.planned:
            size = self.work.size
            best = min(self.planned, key=lambda p: p.min_bytes(p.candidate, size))
            least = format_bytes(best.min_bytes(best.candidate, size))
            return (
                f"parallel.layout=auto: none of {num_legal} layouts fits; the smallest need that "
                f"was found is {least} of {room} per rank, with {best.candidate}. "
                f"What would help there:\n  - " + "\n  - ".join(best.advice)
            )
        return (
            f"parallel.layout=auto: no layout of up to {self.machine.world_size} ranks is "
            f"possible: the axes that are set do not suit the model, or its state is more than "
            f"{room} per rank in each of them"
        )


def _restrict_machine(machine: Machine, nodes: Sequence[int]) -> Machine:
    """Return the machine as ranks on these nodes see it."""
    counts = Counter(nodes)
    return replace(machine, nodes=len(counts), ranks_per_node=max(counts.values()))


def _format_row(row: Candidate, note: str) -> str:
    text = f"        {row!s:<54}{row.layout.size:>6}{row.memory:>12}{_format_time(row):>12}"
    return f"{text}{row.time.comm_share:>7.0%}  {note}".rstrip()


def _format_time(row: Candidate) -> str:
    return f"{row.time.seconds:.3g} s"


def _explain(best: Candidate, other: Candidate) -> str:
    more_s = other.time.seconds - best.time.seconds
    if more_s < 0.01 * best.time.seconds:
        return f"{other} is as fast, and less simple"
    waits_s = other.time.comm_s - best.time.comm_s
    what = "waits for messages" if waits_s > more_s / 2 else "computes"
    return f"{other} {what} {max(waits_s, more_s - waits_s):.3g} s longer per step"


def _cluster_names() -> str:
    return "|".join(CLUSTERS)
