"""parallel.layout=auto: the fastest layout that fits, from measurements of ranks and links.

    measured.json (or a named cluster) -> ComputeTimes, Network -> candidates, the fastest first
    -> planned one after the other until one fits -> LayoutChoice

A run measures its own ranks and runs the ``plan`` command; on a login node, name a cluster instead.
"""

import json
import math
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from hpc_tune.autotune.candidates import (
    Candidate,
    legal_layouts,
    predict_candidates,
    ring_order,
    row_sharing_layouts,
)
from hpc_tune.autotune.microbenchmark import BlockModels, measure_compute
from hpc_tune.config.constraints import (
    allows_context_parallel,
    allows_expert_parallel,
    allows_tensor_parallel,
)
from hpc_tune.config.load import write_resolved_config
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.context_parallel import try_parallelizing_attention
from hpc_tune.errors import ConfigError
from hpc_tune.log import log
from hpc_tune.memory.host import find_host_limit, trim_heap
from hpc_tune.model.build import resolve_dtype
from hpc_tune.model.builtin import BUILTIN_TINY_MODEL
from hpc_tune.model.config_json import refuse_weightless_shape
from hpc_tune.model.experts import require_shardable_experts
from hpc_tune.model.language import read_language_config
from hpc_tune.plan.hardware import CLUSTERS, Cluster, Machine, detect_machine, run_plan
from hpc_tune.plan.memory_model import fits_without_plan, max_step_bytes
from hpc_tune.plan.report import MemoryPlan, make_plan
from hpc_tune.plan.resolve import min_micro_rows, open_shape, planned_dtype, resolve, with_layout
from hpc_tune.plan.step_time import ComputeTimes, Network, StepTime, StepWork, step_time
from hpc_tune.probe.links import Link, Links, describe_links, measure_collectives, measure_pairs
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, flops_per_token, measure_model_size, static_bytes
from hpc_tune.units import format_bytes
from hpc_tune.world.bootstrap import regroup
from hpc_tune.world.comm import Comm

# -- Measurements of links and ranks, or values from the data sheets of a named cluster.
#
# a run's measurement, `doctor --json`, or a cluster's data sheets -> Measurements, ComputeTimes

_LINKS_ADAPTER, _COMPUTE_ADAPTER = TypeAdapter(Links), TypeAdapter(ComputeTimes | None)
_SYNC_S = 50e-6
_ACHIEVED_FLOPS_FRACTION = 0.4  # of a data sheet's flops that training reaches


@dataclass(frozen=True)
class Measurements:
    """The node of each rank, the links between them, and how fast they compute, if known."""

    nodes: tuple[int, ...]
    links: Links
    compute: ComputeTimes | None = None

    def to_json(self) -> str:
        """Return the measurements as JSON for ``plan --measured``."""
        ranks = [{"node": node} for node in self.nodes]
        compute = asdict(self.compute) if self.compute else None
        return json.dumps({"ranks": ranks, "links": asdict(self.links), "compute": compute})

    def positions_in_link_order(self, ranks: Sequence[int]) -> list[int]:
        """Return the positions of these ranks in the order of ``links``."""
        order = self.links.order
        return list(ranks) if order is None else [order.index(rank) for rank in ranks]

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Read the measurements of a run, or the output of ``doctor --json``.

        Raises:
            ConfigError: if the file cannot be read or holds neither.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            links = _LINKS_ADAPTER.validate_python(tree["links"])
            compute = _COMPUTE_ADAPTER.validate_python(tree.get("compute"))
            nodes = tuple(int(rank["node"]) for rank in tree["ranks"])
            if not nodes or (len(nodes) > 1 and not links.pairs):
                raise ValueError(f"it has {len(nodes)} ranks and {len(links.pairs)} pairs")
            return cls(nodes, links, compute)
        except ValidationError as error:
            [problem, *_] = error.errors(include_url=False)
            key = ".".join(map(str, problem["loc"]))
            raise ConfigError(
                f"--measured {path}: expected the output of `doctor --json`: {key}: "
                f"{problem['msg']}, found {problem['input']!r:.80}"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"--measured {path}: expected the output of `doctor --json`: {error!r}"
            ) from None


def measurements_from_data_sheet(
    cluster: Cluster, num_nodes: int, ranks_per_node: int
) -> Measurements:
    """Return the measurements to expect from a cluster's data sheets, without compute."""
    ranks = tuple(rank // ranks_per_node for rank in range(num_nodes * ranks_per_node))
    pairs = []
    if ranks_per_node > 1:
        speed = cluster.intra_node_latency_s, cluster.intra_node_bytes_per_s
        pairs.append(Link((0, 1), (0, 0), *speed))
    if num_nodes > 1:
        speed = cluster.inter_node_latency_s, cluster.inter_node_bytes_per_s
        pairs.append(Link((0, ranks_per_node), (0, 1), *speed))
    return Measurements(ranks, Links(tuple(pairs), (), 0, cluster.cards_per_node))


def compute_from_data_sheet(
    cluster: Cluster, size: ModelSize, model: Any, seq_len: int, recompute: bool
) -> ComputeTimes:
    """Return how fast a cluster's ranks compute, at ``_ACHIEVED_FLOPS_FRACTION`` of its flops."""
    head_flops = (6 if size.is_fully_trained else 4) * model.vocab_size * model.hidden_size
    token_flops = flops_per_token(size, model, seq_len)
    block_flops = (token_flops - head_flops) / size.blocks(model) * (4 / 3 if recompute else 1)
    flops_per_s = _ACHIEVED_FLOPS_FRACTION * cluster.flops
    # AdamW reads and writes about 28 bytes per value; devices with a petaflop/s move 3 TB/s.
    memory_s = 300 / cluster.flops  # per byte
    return ComputeTimes(
        block_s=block_flops / flops_per_s,
        head_s=head_flops / flops_per_s,
        update_s=28 * memory_s,
        unshard_s=3 * memory_s,
        sync_s=_SYNC_S,
        overlaps=True,
        host_copy_s=1 / cluster.host_bytes_per_s,
    )


# -- The search for the fastest layout that fits.


MAX_SHOWN_LAYOUTS = 5
_CLUSTER_NAMES = "|".join(CLUSTERS)


@dataclass(frozen=True)
class LayoutChoice:
    """The result. ``rows``: the fastest that fits, then slower ones. ``unfit_rows``: faster ones.

    ``layout_without_auto``: what would run without auto. ``single_rank``: one rank alone. Each is
    None if not allowed, or if weights, gradients and optimizer state exceed a rank's memory.
    ``sharing_reason``: why ranks share rows although the settings do not ask for it.
    """

    rows: list[Candidate]
    unfit_rows: list[Candidate]
    layout_without_auto: Candidate | None
    single_rank: Candidate | None
    num_ranks: int
    sharing_reason: str = ""

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.rows[0]


def choose_layout_for_command(
    config: RunConfig, machine: Machine, measured_file: str | None, cluster_name: str | None
) -> tuple[LayoutChoice, Machine, RunConfig]:
    """Choose a layout for the command line; also return the machine, restricted to the ranks that
    are used, and the configuration with the layout.

    Raises:
        ConfigError, DataError: as ``search_layout`` and ``Measurements.read``. ConfigError: if
        neither a file nor a known cluster is named.
    """
    if cluster_name is not None and cluster_name not in CLUSTERS:
        raise ConfigError(f"--hardware {cluster_name}: expected {', '.join(CLUSTERS)}")
    cluster = CLUSTERS[cluster_name] if cluster_name else None
    if measured_file is not None:
        measurements = Measurements.read(Path(measured_file))
    elif cluster is not None:
        measurements = measurements_from_data_sheet(cluster, machine.nodes, machine.ranks_per_node)
    else:
        raise ConfigError(
            f"parallel=auto: link speeds are not known: give --hardware {_CLUSTER_NAMES}, or "
            "--measured FILE with the output of `python -m hpc_tune doctor --json` on those nodes"
        )
    measured_machine = _restrict_machine(machine, measurements.nodes)
    choice = search_layout(config, measured_machine, measurements, cluster)
    used = _restrict_machine(machine, [measurements.nodes[rank] for rank in choice.best.ranks])
    parallel = with_layout(config.parallel, choice.best.layout)
    return choice, used, config.model_copy(update={"parallel": parallel})


def search_layout(
    config: RunConfig, machine: Machine, measurements: Measurements, cluster: Cluster | None = None
) -> LayoutChoice:
    """Return the fastest layout that fits ``machine``, and the next ones.

    ``cluster``: its data sheets say how fast ranks compute if ``measurements`` do not.

    Raises:
        ConfigError: if no layout is legal or fits, or neither says how fast ranks compute.
        DataError: as ``make_plan``.
    """
    parallel, seq_len, num_ranks = config.parallel, config.data.seq_len, len(measurements.nodes)
    dtype = planned_dtype(config.model.dtype, machine.device_bytes is not None)
    model, seed = config.model, config.train.seed
    with open_shape(model.path, dtype, config.tune, seed, model.rope_scaling) as shape:
        built = shape.build()
        size = measure_model_size(built.module, config.optim.is_8bit)
    compute = measurements.compute
    recomputes = parallel.recompute == "full"
    if compute is None and cluster is not None:
        compute = compute_from_data_sheet(cluster, size, built.config, seq_len, recomputes)
    if compute is None:
        raise ConfigError(
            f"how fast ranks compute is not known: name a cluster by --hardware {_CLUSTER_NAMES}"
        )
    work = StepWork(size, built.config, config.batch.global_size, seq_len, dtype.itemsize)
    network = Network.from_links(measurements.links, measurements.nodes)
    allow_tensor = allows_tensor_parallel(config.tune, config.train)
    may_shard = allows_expert_parallel(parallel, config.train)
    num_experts = require_shardable_experts(built.module, parallel.expert) if may_shard else 1
    layouts = legal_layouts(parallel, built.config, num_ranks, allow_tensor, num_experts)
    if built.tokens and built.tied_name:  # the head reads their rows too: train/model.py
        layouts = [layout for layout in layouts if layout.tensor == layout.pipeline == 1]
    may_share = parallel.context == 1 and allows_context_parallel(parallel, config.train)
    variants: tuple[list[Layout], list[Layout]] = ([], [])
    if may_share := may_share and try_parallelizing_attention(built.module):
        near_ranks = machine.ranks_per_node if machine.ranks_per_node > 1 else num_ranks
        variants = row_sharing_layouts(layouts, built.config, work.global_rows, near_ranks)
    common_arguments = parallel, config.batch, work, machine, compute, network
    legal = predict_candidates(layouts + variants[0], *common_arguments)

    def plan_memory(candidate: Candidate) -> MemoryPlan:
        update = {"parallel": with_layout(parallel, candidate.layout)}
        used = _restrict_machine(machine, [measurements.nodes[rank] for rank in candidate.ranks])
        return make_plan(config.model_copy(update=update), used)

    def with_micro_rows(candidate: Candidate, rows: int) -> Candidate:
        settings = parallel.model_copy(update={"reshard": candidate.reshard})
        time = step_time(work, candidate.layout, candidate.ranks, settings, rows, compute, network)
        return replace(candidate, micro_rows=rows, time=time)

    rows_of = with_micro_rows if config.batch.micro_size == "auto" else None
    search = _LayoutSearch(work, machine, num_ranks, parallel, plan_memory, rows_of)
    predict_more = partial(predict_candidates, variants[1], *common_arguments)
    rows, unfit_rows = search.select_fastest_candidates(legal, predict_more)
    layout = resolve(parallel, size, built.config, machine, num_ranks).layout
    default = next((c for c in legal if c.layout == layout), None)
    single_rank = next((c for c in legal if c.layout.size == 1), None)
    sharing_reason = _explain_row_sharing(rows[0].layout, work.global_rows) if may_share else ""
    return LayoutChoice(rows, unfit_rows, default, single_rank, num_ranks, sharing_reason)


def _explain_row_sharing(best: Layout, num_rows: int) -> str:
    if best.context == 1:
        return ""
    if num_rows < best.num_weight_ranks:
        return f"ranks share rows: a step has {num_rows} for {best.num_weight_ranks} ranks"
    return f"{best.context} ranks share each row: no layout fits in which each has whole ones"


def choice_lines(choice: LayoutChoice) -> list[str]:
    """Return the table to print: the five fastest layouts, and why the first one is chosen."""
    best, default, single_rank = choice.best, choice.layout_without_auto, choice.single_rank
    head = f"auto    {'layout':<54}{'ranks':>6}{'memory':>12}{'step':>12}{'comm':>7}"
    lines = [head, *(_format_row(row, "<- this one" if row is best else "") for row in choice.rows)]
    shown_rows = list(choice.rows)
    for candidate, note in ((default, "what memory alone would choose"), (single_rank, "")):
        if candidate is not None and all(row.layout != candidate.layout for row in shown_rows):
            lines.append(_format_row(candidate, note))
            shown_rows.append(candidate)
    lines += [_format_row(row, "does not fit") for row in choice.unfit_rows[:MAX_SHOWN_LAYOUTS]]
    if (num_hidden := len(choice.unfit_rows) - MAX_SHOWN_LAYOUTS) > 0:
        lines.append(f"        and {num_hidden} more, none of which fits")
    reasons = [choice.sharing_reason] if choice.sharing_reason else []
    if default and single_rank and default.time.seconds > single_rank.time.seconds:
        reasons.append(f"without auto all {choice.num_ranks} ranks would be slower than one")
    if len(choice.rows) > 1:
        reasons.append(_explain_difference(best, choice.rows[1]))
    if best.layout.size < choice.num_ranks:
        full_row = next((row for row in shown_rows if row.layout.size == choice.num_ranks), None)
        clause = f": all {choice.num_ranks} would take {_format_time(full_row)}" if full_row else ""
        reasons.append(f"{choice.num_ranks - best.layout.size} ranks stay idle{clause}")
    return lines + [f"        {text}" for text in reasons]


def choice_to_json(choice: LayoutChoice) -> str:
    """Return the parts of the choice that a run needs; see ``choice_from_json``."""
    best = choice.best
    tree: dict[str, Any] = {
        "layout": asdict(best.layout),
        "ranks": best.ranks,
        "reshard": best.reshard,
        "micro_rows": best.micro_rows,
        "step_s": best.time.seconds,
        "comm_s": best.time.comm_s,
        "comm_share": best.time.comm_share,
        "lines": choice_lines(choice),
    }
    return json.dumps(tree)


def choice_from_json(text: str) -> tuple[Candidate, list[str]]:
    """Return the best candidate and the table from the output of ``choice_to_json``."""
    tree: dict[str, Any] = json.loads(text)
    layout, time = Layout(**tree["layout"]), StepTime(tree["step_s"], tree["comm_s"])
    best = Candidate(layout, tuple(tree["ranks"]), tree["reshard"], tree["micro_rows"], time)
    return best, tree["lines"]


@dataclass(frozen=True)
class _PlannedCandidate:
    """A planned layout. ``non_static_bytes``: the memory of a step besides weights, gradients and
    optimizer state. ``advice``: what would make it fit.
    """

    candidate: Candidate
    non_static_bytes: int
    advice: Sequence[str]

    def lower_bound_bytes(self, other: Candidate, size: ModelSize) -> int:
        """Return a lower bound on the bytes that ``other`` takes; 0 if there is none.

        The rest of a step is divided by at most the tensor, pipeline and context axes. It includes
        gathered weights.
        """
        layout, other_layout = self.candidate.layout, other.layout
        holds_more = layout.shard > 1 and (
            other_layout.shard == 1 or self.candidate.reshard != other.reshard
        )
        if holds_more or layout.expert != other_layout.expert:
            return 0
        axes = ("tensor", "pipeline", "context")
        split_ratio = other_layout.group_size(axes) / layout.group_size(axes)
        return static_bytes(size, other_layout) + int(self.non_static_bytes / max(1.0, split_ratio))


@dataclass
class _LayoutSearch:
    """Plans candidates, the fastest first, until one fits; each plan bounds the memory of others.

    ``plan_memory`` takes half a minute for a 70B model. ``with_micro_rows`` predicts a candidate's
    time with smaller micro-batches; None if their size is set.
    """

    work: StepWork
    machine: Machine
    num_ranks: int
    parallel: ParallelConfig
    plan_memory: Callable[[Candidate], MemoryPlan]
    with_micro_rows: Callable[[Candidate, int], Candidate] | None
    plans: list[_PlannedCandidate] = field(default_factory=list)

    def select_fastest_candidates(
        self, legal: Sequence[Candidate], predict_more: Callable[[], Sequence[Candidate]]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Return the fastest candidate that fits and slower ones, and faster ones that do not fit.

        Slower ones are not planned: they may not fit. If none fits, the candidates that
        ``predict_more`` returns are tried too.

        Raises:
            ConfigError: if no candidate fits.
        """
        rows, unfit_rows = self._split_by_fit(legal)
        if not rows:
            more_candidates = predict_more()
            legal = [*legal, *more_candidates]
            rows, more_unfit = self._split_by_fit(more_candidates)
            unfit_rows += more_unfit
        if not rows:
            raise ConfigError(self._explain_no_fit(len(legal)))
        return sorted(rows, key=self._penalized_s), unfit_rows

    def _split_by_fit(self, legal: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        rows: list[Candidate] = []
        unfit_rows: list[Candidate] = []
        for candidate in legal:
            best = min((self._penalized_s(row) for row in rows if row.fits), default=math.inf)
            if self._penalized_s(candidate) < best:
                predicted_row = self._predict_memory(candidate)
                (rows if predicted_row.fits else unfit_rows).append(predicted_row)
            elif len(rows) < MAX_SHOWN_LAYOUTS:
                state = format_bytes(static_bytes(self.work.size, candidate.layout))
                rows.append(replace(candidate, memory=f"> {state}"))
        return rows, unfit_rows

    def _penalized_s(self, candidate: Candidate) -> float:
        return candidate.penalized_s(self.num_ranks)

    def _predict_memory(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its memory, from a bound if that suffices, else from a plan."""
        work, machine, layout = self.work, self.machine, candidate.layout
        room = machine.bytes_per_rank
        tokens = -(-candidate.micro_rows * work.seq_len // layout.context)
        upper = max_step_bytes(work.size, layout, work.model, tokens, machine)
        # With sharded experts, sent tokens are copied too.
        if layout.expert == 1 and fits_without_plan(upper, machine):
            return replace(candidate, memory=f"< {format_bytes(upper)}", fits=True)
        lower = max((p.lower_bound_bytes(candidate, work.size) for p in self.plans), default=0)
        if lower > room:
            return replace(candidate, memory=f"> {format_bytes(lower)}", fits=False)
        log.info("auto    planning %s", candidate)
        plan = self.plan_memory(candidate)
        steady = plan.steady_phase
        num_bytes = steady.device_bytes if machine.device_bytes else steady.rank_bytes
        non_static_bytes = num_bytes - static_bytes(work.size, layout)
        self.plans.append(_PlannedCandidate(candidate, non_static_bytes, plan.advice))
        fitting_rows = plan.tokens_that_fit // work.seq_len
        if self.with_micro_rows and 0 < fitting_rows < candidate.micro_rows:
            candidate = self.with_micro_rows(candidate, 1 << (fitting_rows.bit_length() - 1))
        return replace(candidate, memory=format_bytes(num_bytes), fits=plan.fits)

    def _explain_no_fit(self, num_legal: int) -> str:
        room = format_bytes(self.machine.bytes_per_rank)
        if self.plans:
            size = self.work.size
            best = min(self.plans, key=lambda p: p.lower_bound_bytes(p.candidate, size))
            smallest_need = format_bytes(best.lower_bound_bytes(best.candidate, size))
            return (
                f"parallel.layout=auto: none of {num_legal} layouts fits; the smallest need that "
                f"was found is {smallest_need} of {room} per rank, with {best.candidate}. "
                f"What would help there:\n  - " + "\n  - ".join(best.advice)
            )
        parallel = self.parallel
        axes = parallel.axes | {"expert": parallel.expert, "context": parallel.context}
        sizes = " ".join(f"parallel.{axis}={ranks}" for axis, ranks in axes.items() if ranks > 1)
        reasons = "divides no such number of ranks, does not suit the model, or "
        reasons = f"{sizes} {reasons}" if sizes else ""
        return (
            f"parallel.layout=auto: no layout of up to {self.machine.world_size} ranks is "
            f"possible: {reasons}the model's state is more than {room} per rank in each of them"
        )


def _restrict_machine(machine: Machine, nodes: Sequence[int]) -> Machine:
    """Return the machine, restricted to these ranks; ``nodes`` has the node of each."""
    counts = Counter(nodes)
    return replace(machine, nodes=len(counts), ranks_per_node=max(counts.values()))


def _format_row(row: Candidate, note: str) -> str:
    text = f"        {row!s:<54}{row.layout.size:>6}{row.memory:>12}{_format_time(row):>12}"
    return f"{text}{row.time.comm_share:>7.0%}  {note}".rstrip()


def _format_time(row: Candidate) -> str:
    return f"{row.time.seconds:.3g} s"


def _explain_difference(best: Candidate, other: Candidate) -> str:
    extra_s = other.time.seconds - best.time.seconds
    if extra_s < 0.01 * best.time.seconds:
        return f"{other} is as fast, but less simple"
    extra_comm_s = other.time.comm_s - best.time.comm_s
    activity = "waits for messages" if extra_comm_s > extra_s / 2 else "computes"
    return f"{other} {activity} {max(extra_comm_s, extra_s - extra_comm_s):.3g} s longer per step"


# -- parallel.layout=auto in a run: measure, run the plan command, log why, compare afterwards.
#
# links + a decoder block, measured on all ranks -> the plan command, on the first -> a layout,
# and the ranks that take its positions -> at the end of the run: measured against predicted step


LINK_MEASURING_LIMIT_S = 10.0


def measure_and_choose_layout(config: RunConfig, world: Comm) -> tuple[Candidate, Comm | None]:
    """Measure and choose a layout; return it with this rank's comm, None if the rank is left out.

    Collective; ``world``'s process groups may be destroyed afterwards.

    Raises:
        ConfigError: if no layout is possible or fits. DataError: if the model cannot be used.
    """
    path, comm = config.model.path, world.with_step_timeout()  # no rank may work for hours here
    refuse_weightless_shape(path)
    if path != BUILTIN_TINY_MODEL:
        comm.run_and_agree("reading the model's shape", lambda: read_language_config(Path(path)))
    log.info("auto    measuring links and a decoder block")
    machine = detect_machine(comm, find_host_limit(config.memory.host_limit).num_bytes)
    measurements, ring = measure_world(config, comm, machine)
    write_settings, limit_s = partial(write_resolved_config, config), config.run.timeout / 2
    best, lines = choose_layout_on_rank_0(measurements, write_settings, ring, machine, limit_s)
    for line in lines:
        log.info("%s", line)
    best = replace(best, links=describe_links(measurements.links))
    return best, regroup(ring, measurements.positions_in_link_order(best.ranks), config.run.timeout)


def measure_world(config: RunConfig, comm: Comm, machine: Machine) -> tuple[Measurements, Comm]:
    """Measure links and compute, in about ten seconds. Collective.

    Also return a comm of all ranks in an order whose ring avoids slow links if possible, which
    makes the measurements of collectives and gathering more meaningful.

    Raises:
        ConfigError: if the model's blocks are too large to measure.
    """
    nodes = tuple(peer.node for peer in comm.roster)
    links = measure_pairs(comm, LINK_MEASURING_LIMIT_S)
    order = ring_order(Network.from_links(links, nodes))
    ring_comm = regroup(comm, order, config.run.timeout)
    assert ring_comm is not None, "all ranks are in it"
    ring_comm = ring_comm.with_step_timeout()
    links = replace(links, collectives=measure_collectives(ring_comm), order=order)
    network = Network.from_links(links, nodes)
    dtype = resolve_dtype(config.model.dtype, ring_comm.device)
    model, seed = config.model, config.train.seed
    with open_shape(model.path, dtype, config.tune, seed, model.rope_scaling) as shape:
        seq_len, room = config.data.seq_len, machine.bytes_per_rank
        models = BlockModels(shape, config.parallel, config.optim, seq_len, ring_comm, room)
        rows = min_micro_rows(config.batch)
        allow_tensor_parallel = allows_tensor_parallel(config.tune, config.train)
        compute = measure_compute(models, rows, network, order, allow_tensor_parallel)
    trim_heap()
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()
    return Measurements(nodes, links, compute), ring_comm


def choose_layout_on_rank_0(
    measurements: Measurements,
    write_settings: Callable[[Path], None],
    comm: Comm,
    machine: Machine,
    limit_s: float,
) -> tuple[Candidate, list[str]]:
    """Choose the layout on rank 0; also return the table that says why. Collective.

    ``write_settings`` writes the configuration file. The choice may take up to ``limit_s``.

    Raises:
        ConfigError: if no layout is possible or fits, or the choice takes longer.
    """

    def run_plan_command() -> str:
        with tempfile.TemporaryDirectory() as folder:
            file, settings = Path(folder) / "measured.json", Path(folder) / "config.yaml"
            file.write_text(measurements.to_json(), encoding="utf-8")
            write_settings(settings)
            try:
                result = run_plan(settings, machine, ["--measured", str(file)], limit_s)
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"parallel.layout=auto: not chosen within {limit_s:.0f} s (half of "
                    "run.timeout); set the axes, as `plan parallel=auto` prints them on a login "
                    "node"
                ) from None
        if result.returncode:
            message = result.stderr.strip().removeprefix("hpc_tune: ")
            default = f"parallel.layout=auto: the plan command ended with {result.returncode}"
            raise ConfigError(message or default)
        return result.stdout

    return choice_from_json(comm.run_on_rank_0("choosing the layout", run_plan_command))


def compare_step_times(candidate: Candidate, steps_s: Iterable[float]) -> dict[str, Any]:
    """Return the predicted step time and the median of the measured ones without the first."""
    steps_s, predicted_s = list(steps_s), candidate.time.seconds
    measured_s = statistics.median(steps_s[1:]) if len(steps_s) > 1 else None
    relative_error = None if measured_s is None else measured_s / predicted_s - 1
    if relative_error is not None:
        log.info(
            "auto    a step took %.3g s, the prediction was %.3g s (%+.0f%%)",
            measured_s,
            predicted_s,
            100 * relative_error,
        )
    return {
        "layout": str(candidate.layout),
        "ranks": list(candidate.ranks),
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "off": relative_error,
        "predicted_comm_share": candidate.time.comm_share,
    }
