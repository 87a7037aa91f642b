"""The memory forecast that a run makes before it loads anything, compared later with measurements.

    an arithmetic upper bound far below the limit -> it fits
    else the plan command, in a separate process -> refused if it does not fit, unless --force

The plan traces the model in its own interpreter: some seconds, and under 1 GB on the first node.
"""

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_tune.cluster.launchers import explain_command_failure
from hpc_tune.config.section import flatten_settings
from hpc_tune.errors import ConfigError, MemoryBudgetError, ResumableStop
from hpc_tune.log import log
from hpc_tune.memory.host import PLAN_PROCESS_BYTES, find_host_limit, free_host_bytes
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS, Phase
from hpc_tune.plan.hardware import Machine, run_plan
from hpc_tune.plan.memory_model import PhaseMemory, fits_without_plan, max_step_bytes
from hpc_tune.plan.report import MemoryPlan, phase_fits, plan_from_json
from hpc_tune.plan.resolve import ResolvedLayout, min_micro_rows
from hpc_tune.rundir.json_lines import STARTING_CONFIG
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.units import format_bytes, list_some
from hpc_tune.world.comm import Comm

_PLAN_LIMIT_S = 300.0
_MAX_SIGNAL_DELAY_S = 0.5


@dataclass(frozen=True)
class MemoryForecast:
    """The plan of a run from ``plan --json``, and the verdict in words.

    ``plan`` is None if an upper bound shows that the run fits, or if planning fails.
    """

    plan: MemoryPlan | None
    verdict: str


def preflight(
    job: Job, model: Model, resolved_layout: ResolvedLayout, force: bool
) -> MemoryForecast:
    """Return the memory forecast of this run. Collective.

    Raises:
        MemoryBudgetError: if a phase does not fit, unless ``force`` is set.
        ResumableStop: if the run was asked to stop while planning.
    """
    config, comm, machine = model.config, job.setup_comm, resolved_layout.machine
    tokens = min_micro_rows(config.batch) * config.data.seq_len
    max_bytes = max_step_bytes(
        model.size, resolved_layout.layout, model.built.config, tokens, machine
    )
    room_bytes = machine.bytes_per_rank
    if fits_without_plan(max_bytes, machine):
        note = " with micro-batches of one row" if config.batch.micro_size == "auto" else ""
        verdict = (
            f"fits{note}: at most {format_bytes(max_bytes)} of {format_bytes(room_bytes)} per rank"
        )
        return MemoryForecast(None, verdict)
    # The other ranks wait for the plan.
    limit_s = min(_PLAN_LIMIT_S, config.run.timeout / 2)
    on_gpu = comm.device.type == "cuda"
    arguments = ["--masked"] if on_gpu and model.choose_kernels(comm.device).mask_reason else []
    plan = comm.run_on_rank_0(
        "planning", lambda: _run_plan_command(job, machine, arguments, limit_s)
    )
    if plan is None:
        return MemoryForecast(None, "not planned; see the warning above")
    job.monitor.expect_usage(plan.steady_phase.node_bytes(machine))
    if plan.fits:
        return MemoryForecast(plan, _describe_fit(plan))
    bad_phases = [p for p in plan.phases if not phase_fits(p, machine) and not p.optional]
    text = "this run does not fit into memory:\n" + "\n".join(
        f"  - {line}" for phase in bad_phases for line in _describe_shortage(phase, machine)
    )
    advice = "\n".join(f"  - {line}" for line in plan.advice)
    text += f"\nWhat would help:\n{advice}"
    if not force:
        raise MemoryBudgetError(f"{text}\nUse --force to start it anyway.")
    if comm.is_rank_0:
        log.warning("%s", text)
    return MemoryForecast(plan, "does not fit by the plan; started with --force")


def _describe_shortage(phase: PhaseMemory, machine: Machine) -> Iterator[str]:
    """Yield a line for each kind of memory that a phase needs more of than there is."""
    activity = {Phase.STEADY: "a step", Phase.LOAD: "loading"}.get(phase.name, phase.name)
    needed_bytes, limit_bytes = phase.device_bytes, machine.device_bytes
    if limit_bytes is not None and not DEVICE_LIMITS.allows(needed_bytes, limit_bytes):
        yield (
            f"{activity} needs {format_bytes(needed_bytes)} of each device's memory; there are "
            f"{format_bytes(limit_bytes)}"
        )
    needed_bytes, limit_bytes = phase.node_bytes(machine), machine.host_bytes
    if not HOST_LIMITS.allows(needed_bytes, limit_bytes):
        yield (
            f"{activity} needs {format_bytes(needed_bytes)} of host memory per node; there are "
            f"{format_bytes(limit_bytes)}"
        )


def _describe_fit(plan: MemoryPlan) -> str:
    machine, device = plan.machine, plan.machine.device_bytes
    fullest = max(plan.phases, key=lambda phase: phase.node_bytes(machine))
    on_node = format_bytes(fullest.node_bytes(machine))
    text = f"fits: {on_node} of {format_bytes(machine.host_bytes)} on a node ({fullest.name})"
    if device:
        fullest = max(plan.phases, key=lambda phase: phase.device_bytes)
        text += f", {format_bytes(fullest.device_bytes)} of {format_bytes(device)} on a device"
        text += f" ({fullest.name})"
    return text


def record_memory_peaks(job: Job, forecast: MemoryForecast) -> None:
    """Write an event with the peak of any rank in each phase, and the planned bytes. Collective."""
    peak_bytes: dict[Phase, int] = {}
    for peaks in job.setup_comm.gather(job.monitor.peaks):
        for phase, num_bytes in peaks.items():
            peak_bytes[phase] = max(peak_bytes.get(phase, 0), num_bytes)
    phases_of_plan = forecast.plan.phases if forecast.plan else []
    planned_bytes = {p.name: p.rank_bytes + p.first_bytes for p in phases_of_plan}
    phases = {
        phase: {"rank_bytes": num_bytes, "planned": planned_bytes.get(phase)}
        for phase, num_bytes in peak_bytes.items()
    }
    job.events.write("memory", phases=phases)


def _run_plan_command(
    job: Job, machine: Machine, arguments: Sequence[str], limit_s: float
) -> MemoryPlan | None:
    """Run the plan command on the run's own configuration; None if it fails or lacks memory.

    Raises:
        ResumableStop: if the run was asked to stop meanwhile, since the signal ends the plan, too.
    """
    limit = find_host_limit()
    available_bytes = free_host_bytes(limit)
    if available_bytes < PLAN_PROCESS_BYTES:
        log.warning(
            "memory  not planned: planning takes %s, but only %s of %s are left",
            *map(format_bytes, (PLAN_PROCESS_BYTES, available_bytes, limit.num_bytes)),
        )
        return None
    log.info("memory  planning what each phase takes")
    stderr = ""
    try:
        result = run_plan(job.dir / STARTING_CONFIG, machine, arguments, limit_s)
        stderr = result.stderr.strip()
        if result.returncode < 0:
            result.check_returncode()
        return plan_from_json(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        # The signal may reach the plan before this process.
        time.sleep(_MAX_SIGNAL_DELAY_S)
        if reason := job.stop.reason():
            words = f"stopped while planning ({reason})"
            raise ResumableStop(reason, job.resume_point.step, explanation=words) from None
        is_killed = isinstance(error, subprocess.CalledProcessError)
        failure = (
            stderr.splitlines()[-1] if stderr and not is_killed else explain_command_failure(error)
        )
        log.warning("memory  not planned, the run continues without: %s", failure)
        return None


# -- All ranks train with the same settings, or none does.


# The path of the local disk may differ between nodes.
_NODE_LOCAL_SETTINGS = {"parallel.offload_path"}
_LIST_LIMIT = 5


def require_same_rank_settings(comm: Comm, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every rank's settings, a dumped configuration, with rank 0's. Collective.

    Settings differ if a rank has another environment or working directory, or another copy of the
    configuration file on its node.

    Raises:
        ConfigError: on rank 0, naming the fields that differ, their values and their ranks;
            ``RemoteError`` on the others.
    """
    own_settings = {
        name: value
        for name, value in flatten_settings(settings).items()
        if name not in _NODE_LOCAL_SETTINGS
    }
    expected = comm.broadcast(own_settings)
    differences = {name: value for name, value in own_settings.items() if value != expected[name]}
    if not comm.sum([bool(differences)])[0]:
        return
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, differing in enumerate(comm.gather(differences)):
        for name, value in differing.items():
            ranks_of[name, str(value)].append(rank)
    lines = [
        f"{name}={value} on {_format_ranks(ranks)}, {expected[name]} on rank 0"
        for (name, value), ranks in ranks_of.items()
    ]
    error = ConfigError(
        f"the ranks have different settings: {'; '.join(lines[:_LIST_LIMIT])}. Give all nodes the "
        "same file, arguments and environment"
    )
    comm.agree_on_error(error if comm.is_rank_0 else None, "comparing the settings")


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_some(ranks, _LIST_LIMIT)}"
