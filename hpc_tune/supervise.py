"""Supervise a run in a batch job: start it, forward signals, and decide what to do when it ends.

    the ranks end -> decide_next_step (pure) -> done | start again here | requeue the job | give up

A launcher's exit code is not reliable: ``outcome.json`` tells how a run ended, and the newest
checkpoint how far it got. Nodes that are lost or faulty are left out (cluster/nodes.py). Every
start is one line of ``starts.jsonl`` in the run directory, which outlives the job: a run that keeps
crashing at the same step is given up, even across requeues.
"""

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from pydantic import TypeAdapter

from hpc_tune.cluster.launchers import explain_command_failure
from hpc_tune.cluster.nodes import JobNodes, LauncherOutputParser, find_lost_hosts
from hpc_tune.cluster.schedulers import find_job, find_job_end_s, read_exit_margin_s
from hpc_tune.cluster.slurm import SLURM
from hpc_tune.config.load import mask_secrets
from hpc_tune.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_USER_ERROR,
    CheckpointError,
    ConfigError,
    find_remedy,
)
from hpc_tune.log import log, warn_unreadable
from hpc_tune.rundir import facts, outcome, owner
from hpc_tune.rundir.json_lines import STARTS_FILE
from hpc_tune.rundir.outcome import run_report_command

MAX_CRASHES = 2  # in a row without a newer checkpoint
# After each stop for lack of memory, the next start takes one more of the governor's actions.
MAX_MEMORY_RESTARTS = 8
MAX_REQUEUES = 3  # in a row without a newer checkpoint
MIN_JOB_TIME_LEFT_S = 120.0  # with less time left, a start is not worth it
# How long a launcher may keep running after outcome.json is written. After a failure ranks end
# sooner, while srun waits for minutes for the ranks of a lost node.
_LINGER_S, _FAILED_LAUNCHER_LINGER_S = 60.0, 15.0
# Ranks may outlive a killed launcher, and a shared file system may show files late.
_OUTCOME_WAIT_S = 5.0
# How long before the end of the job the ranks are asked to stop, if no scheduler has done it and
# the script sets no other time. A run that needs longer to save stops earlier by itself.
_STOP_REQUEST_MARGIN_S = 60.0
# How long before the end of the job the ranks are killed, to requeue it in time.
_KILL_MARGIN_S = 15.0
_POLL_S = 0.2
_LAST_OUTPUT_WAIT_S = 2.0  # to read the last output of a launcher
_REQUEUE_LIMIT_S = 30.0
_PREEMPTION = "preemption"
_SENT_BY_LAUNCHER_SUFFIX = " to the ranks alone"
_REFUSED_STATUS = "refused"  # before the run directory was locked
# Exit codes after a signal: while the ranks import, or before their first line of Python, as
# reported for a child process or by a shell.
_EARLY_EXIT_CODES = (EXIT_RESUMABLE, -signal.SIGUSR1, 128 + signal.SIGUSR1)
_EXTERNAL_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")  # sent by a person, or by a closed terminal
_PR_SET_PDEATHSIG = 1
NextStep = Literal["done", "again", "requeue", "give up"]


@dataclass(frozen=True)
class StartRecord:
    """One start of the ranks, and how it ended.

    ``from_step`` and ``to_step``: steps of the newest checkpoint before and after. ``asked``: it
    was asked to stop, because the job's time is over or another job takes its nodes. ``nodes``:
    nodes of the ranks, if known; ``left_out``: nodes that were not used, and why; ``missing``: how
    many nodes fewer than requested it had. ``lost_nodes``: it ended because nodes were lost, or the
    ranks of one were killed repeatedly. ``error``: the type of the error that a rank reported.
    """

    from_step: int
    to_step: int
    status: str
    reason: str
    exit_code: int
    asked: bool
    job: str | None
    nodes: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    missing: int = 0
    lost_nodes: bool = False
    error: str = ""


_START_ADAPTER = TypeAdapter(StartRecord)


def decide_next_step(
    starts: Sequence[StartRecord],
    remaining_s: float | None,
    can_requeue: bool,
    num_spare_nodes: int = 0,
    node_shortage: str | None = None,
) -> tuple[NextStep, str]:
    """Return what to do after the last of ``starts``, and why.

    ``remaining_s`` is the time left to the job, None without a limit. ``num_spare_nodes``: the
    number of spare nodes that the job had; ``node_shortage``: why it cannot continue with the
    remaining nodes.
    """
    last = starts[-1]
    if last.status == "done":
        return "done", "all steps are done"
    if last.exit_code == EXIT_USER_ERROR and last.missing and can_requeue:
        return "requeue", f"cannot run on {last.missing} fewer nodes: {last.reason}"
    if last.exit_code == EXIT_USER_ERROR:
        return "give up", f"restarting would not help: {last.reason}"
    if last.reason in ("STOP file", *_EXTERNAL_SIGNALS):
        return "give up", f"it was asked to stop ({last.reason})"
    stuck_starts = _starts_without_progress(starts)
    # An error that the user must fix is not a crash, such as a run directory that is in use.
    failures = [start for start in stuck_starts if start.status == "failed" and not start.asked]
    crashes = sum(start.exit_code != EXIT_USER_ERROR and not start.lost_nodes for start in failures)
    # Each spare node may have replaced a faulty one, so it allows one more crash.
    if crashes >= MAX_CRASHES + num_spare_nodes:
        return "give up", f"{crashes} crashes in a row made no progress beyond step {last.to_step}"
    if len(stuck_starts) >= MAX_MEMORY_RESTARTS:
        return "give up", f"{len(stuck_starts)} starts made no progress beyond step {last.to_step}"
    if not last.asked and (remaining_s is None or remaining_s > MIN_JOB_TIME_LEFT_S):
        if node_shortage is None:
            return "again", last.reason
        return "requeue" if can_requeue else "give up", node_shortage
    if not can_requeue:
        return "give up", "time limit reached, and nothing can requeue this job: submit it again"
    jobs = sum(start.asked for start in stuck_starts)
    if jobs >= MAX_REQUEUES:
        reason = f"{jobs} jobs made no progress beyond step {last.to_step}: request more time"
        return "give up", reason
    return "requeue", _PREEMPTION if last.reason == _PREEMPTION else "time limit reached"


def _starts_without_progress(starts: Sequence[StartRecord]) -> list[StartRecord]:
    """Return the last starts that saved no newer checkpoint, the newest first."""
    return list(takewhile(lambda start: start.to_step <= start.from_step, reversed(starts)))


def classify_ending(
    outcome_fields: Mapping[str, Any], launcher: str, launcher_exit_code: int, blames_nodes: bool
) -> tuple[str, str, int, str]:
    """Return status, reason, exit code and error type of a start (pure).

    ``outcome_fields``: what its ranks reported (``outcome.read_valid_outcome``). If that is empty,
    the result follows from the launcher's exit code. ``blames_nodes``: the launcher names nodes
    that are lost or whose ranks died.
    """
    if launcher_exit_code == EXIT_USER_ERROR and outcome_fields.get("exit_code") != EXIT_USER_ERROR:
        # The ranks have written nothing; any outcome belongs to another job.
        return (
            _REFUSED_STATUS,
            "the start was refused, see the message above",
            launcher_exit_code,
            "",
        )
    failure_code = launcher_exit_code if launcher_exit_code > 0 else EXIT_FAILED
    if outcome_fields:
        return (
            outcome_fields["status"],
            outcome_fields["reason"],
            outcome_fields["exit_code"],
            str(outcome_fields.get("error", "")),
        )
    is_early = launcher_exit_code in _EARLY_EXIT_CODES
    if is_early and not blames_nodes:
        return "stopped", "a signal while it started", failure_code, ""
    reason = f"{launcher} exited with code {launcher_exit_code}, and there is no outcome.json"
    # If the launcher accuses a node, it has itself ended the other ranks by that signal.
    return "failed", reason, EXIT_FAILED if is_early else failure_code, ""


class Supervisor:
    """Starts the ranks of one run until ``decide_next_step`` ends it."""

    def __init__(
        self,
        launch: Sequence[str],
        arguments: Sequence[str],
        run_dir: Path,
        requeue_command: Sequence[str] | None = None,
        writes_report: bool = True,
        environ: Mapping[str, str] = os.environ,
        nodes: JobNodes | None = None,
    ) -> None:
        """Prepare the command ``launch -m hpc_tune train arguments``.

        ``launch``: srun or mpirun with options, and a Python. ``requeue_command``: the command that
        puts the job back into its queue; by default the scheduler's own, if any. ``writes_report``:
        write report.html after a start that did not finish. ``nodes``: the nodes of the job; by
        default those that the options of ``launch`` list.
        """
        self._argv = [*launch, "-m", "hpc_tune", "train", *arguments]
        self._arguments = list(arguments)
        self._nodes = nodes or JobNodes(launch, {})
        self._writes_report = writes_report
        self._run_dir, self._requeue_command = run_dir, list(requeue_command or [])
        self._job = job = find_job(environ)
        if job is not None and not self._requeue_command:
            self._requeue_command = list(job.scheduler.requeue_command(job.id))
        self._job_end_s = find_job_end_s(environ, asks_scheduler=True)
        self._exit_margin_s = read_exit_margin_s(environ, _STOP_REQUEST_MARGIN_S)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._stop_signal: int | None = None

    def run(self) -> int:
        """Start the ranks until the run is done, requeued or given up; return the job's exit code.

        Raises:
            ConfigError: if there is no such launcher.
        """
        if shutil.which(self._argv[0]) is None:
            raise ConfigError(
                f"--launch {self._argv[0]}: there is no such command; expected one that starts the "
                "ranks, such as srun or 'mpirun -np 16'. Load the module that has it, or give its "
                "full path"
            )
        for number in (signal.SIGUSR1, *(signal.Signals[name] for name in _EXTERNAL_SIGNALS)):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, self._on_signal)
        starts = _read_starts(self._run_dir)
        lost_start = _read_unfinished_start(self._run_dir)
        while True:
            if lost_start is not None and owner.has_run_ended(self._run_dir):
                starts.append(_record_unfinished_start(self._run_dir, lost_start))
                lost_start = None
            start = self._run_once()
            if start.status == _REFUSED_STATUS:
                log.error("given up: %s. Nothing was changed", start.reason)
                return EXIT_USER_ERROR
            if lost_start is not None:  # only now is it certain that the lost start had ended
                starts.append(_record_unfinished_start(self._run_dir, lost_start))
                lost_start = None
            starts.append(start)
            _append_start(self._run_dir, start)
            next_step, reason = self._decide_next_step(starts)
            log.info("%s", self._describe_decision(start, next_step, reason))
            if (
                self._writes_report
                and next_step in ("again", "give up")
                and self._stop_signal is None
            ):
                run_report_command(self._run_dir)
            match next_step:
                case "done":
                    return EXIT_DONE
                case "requeue":
                    return self._requeue_job()
                case "give up":
                    return start.exit_code or EXIT_FAILED
            if self._stop_signal is not None:
                return EXIT_RESUMABLE

    def _decide_next_step(self, starts: Sequence[StartRecord]) -> tuple[NextStep, str]:
        left_s = None
        if self._job_end_s is not None:  # until a minute after the ranks would be asked to stop
            left_s = self._job_end_s - time.time() - (self._exit_margin_s - _STOP_REQUEST_MARGIN_S)
        nodes = self._nodes
        return decide_next_step(
            starts,
            left_s,
            bool(self._requeue_command),
            nodes.num_spares,
            nodes.explain_node_shortage(),
        )

    def _describe_decision(self, last: StartRecord, next_step: NextStep, reason: str) -> str:
        if next_step != "give up" or last.reason not in _EXTERNAL_SIGNALS:
            # The advice to rerun is dropped, since supervise does that itself.
            reason = reason.partition(". Rerun the same command")[0]
            word = "starting again, because" if next_step == "again" else f"{next_step}:"
            return f"step {last.to_step}: {word} {reason}"
        # Slurm also sends such a signal before it requeues a job, or when the first node fails.
        progress = f"step {last.to_step} is saved" if last.to_step else "nothing is saved yet"
        if self._job is None:
            return f"{progress}; it was ended from outside ({last.reason})"
        scheduler = "Slurm" if self._job.scheduler is SLURM else "the scheduler"
        ending = f"{progress}; the job was ended from outside ({last.reason})"
        return f"{ending}. If {scheduler} requeues it, it resumes from there"

    def _run_once(self) -> StartRecord:
        """Run the ranks once, and return how the start ended."""
        old_stamp, from_step = _outcome_stamp(self._run_dir), _newest_checkpoint_step(self._run_dir)
        command, left_out = self._nodes.command(), dict(self._nodes.left_out)
        self._argv = [*command.words, "-m", "hpc_tune", "train", *self._arguments]
        self._argv += command.settings
        if command.summary:
            log.warning("%s: the global batch and the losses stay the same", command.summary)
        log.info("from step %d: %s", from_step, shlex.join(map(mask_secrets, self._argv)))
        node_fields = {
            "nodes": [*command.nodes],
            "left_out": left_out,
            "missing": command.num_missing_nodes,
        }
        job_id = None if self._job is None else self._job.id
        if owner.has_run_ended(self._run_dir):  # otherwise this start will be refused
            owner.write_start_file(self._run_dir, from_step=from_step, job=job_id, **node_fields)
            try:
                code, lines = self._launch(command.environment, old_stamp)
            finally:
                owner.remove_start_file(self._run_dir)
        else:
            code, lines = self._launch(command.environment, old_stamp)
        # A node on which Python is not found also exits with this code.
        may_be_sick = code == EXIT_USER_ERROR and _outcome_stamp(self._run_dir) == old_stamp
        if has_lost_nodes := may_be_sick and self._exclude_nodes(command.nodes, {}, True):
            code = EXIT_FAILED
        new_outcome = self._read_new_outcome(old_stamp)
        blames_nodes = bool(lines.find_suspects(False))
        status, reason, exit_code, error = classify_ending(
            new_outcome, self._argv[0], code, blames_nodes
        )
        if status == _REFUSED_STATUS and (user := owner.find_owner(self._run_dir)) is not None:
            reason = f"run.dir={self._run_dir} is in use by {user}"
        reason = self._end_reason(status, reason)
        end_of_job = ("SIGUSR1", "time limit", _PREEMPTION)
        asked_to_stop = self._stop_signal == signal.SIGUSR1 or reason in end_of_job
        newest_step = _newest_checkpoint_step(self._run_dir)
        start = StartRecord(
            *(from_step, newest_step, status, reason, exit_code, asked_to_stop, job_id),
            nodes=command.nodes,
            left_out=left_out,
            missing=command.num_missing_nodes,
            lost_nodes=has_lost_nodes,
            error=error,
        )
        has_failed = status == "failed" or reason.endswith(_SENT_BY_LAUNCHER_SUFFIX)
        if (
            has_lost_nodes
            or not has_failed
            or asked_to_stop
            or exit_code == EXIT_USER_ERROR
            or self._stop_signal is not None
        ):
            return start
        return replace(start, lost_nodes=self._exclude_suspects(start, new_outcome, lines))

    def _read_new_outcome(self, old_stamp: object) -> dict[str, Any]:
        """Return the outcome that the ranks have written, empty if they have not."""
        until_s = time.time() + _OUTCOME_WAIT_S
        while _outcome_stamp(self._run_dir) == old_stamp and time.time() < until_s:
            time.sleep(_POLL_S)
        is_new = _outcome_stamp(self._run_dir) != old_stamp
        return (outcome.read_valid_outcome(self._run_dir) if is_new else None) or {}

    def _exclude_suspects(
        self,
        start: StartRecord,
        outcome_fields: Mapping[str, Any],
        launcher_output: LauncherOutputParser,
    ) -> bool:
        """Leave out nodes that the launcher or the outcome accuses; see ``_exclude_nodes``."""
        has_report = bool(outcome_fields)
        suspects = find_lost_hosts(outcome_fields) | launcher_output.find_suspects(has_report)
        if outcome.has_run_out_of_memory(outcome.read_heartbeats(self._run_dir)):
            suspects = {}  # no node is to blame: the next start uses less memory
        has_progressed = start.to_step > start.from_step
        has_cause = start.error == CheckpointError.__name__
        certain_suspects = launcher_output.find_certain_suspects(has_report)
        return self._exclude_nodes(
            start.nodes, suspects, has_progressed, has_cause, certain_suspects
        )

    def _launch(
        self, added_environment: Mapping[str, str], old_stamp: object
    ) -> tuple[int, LauncherOutputParser]:
        """Run the launcher to its end; return its exit code, and its messages about nodes."""
        lines = LauncherOutputParser()
        # In its own session, so that it can be killed as a whole; a terminal's Ctrl-C comes only
        # to this process.
        self._launcher = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self._nodes.can_choose_nodes else None,
            env={**os.environ, **added_environment},
            start_new_session=True,
            preexec_fn=_make_parent_death_hook(),
        )
        reader = lines.copy(self._launcher.stderr) if self._launcher.stderr is not None else None
        if self._stop_signal is not None:
            self._ask_ranks_to_stop()  # the signal came before the launcher was running
        code = self._wait_for_launcher(self._launcher, old_stamp)
        if reader is not None:
            reader.join(_LAST_OUTPUT_WAIT_S)
        self._nodes.end_steps()
        return code, lines

    def _exclude_nodes(
        self,
        nodes: Sequence[str],
        suspects: Mapping[str, str],
        has_progressed: bool,
        has_cause: bool = False,
        certain_suspects: Collection[str] = (),
    ) -> bool:
        """Leave out faulty nodes after a start on ``nodes``; return whether only they are to blame.

        See ``JobNodes.exclude_faulty_nodes``.
        """
        excluded_nodes, has_lost_nodes = self._nodes.exclude_faulty_nodes(
            nodes, suspects, has_progressed, has_cause, certain_suspects
        )
        facts.report_excluded_nodes(self._run_dir, excluded_nodes)
        return has_lost_nodes

    def _end_reason(self, status: str, reason: str) -> str:
        """Return why the ranks ended; a signal is told apart by its sender."""
        if (
            self._stop_signal is not None
            and signal.Signals(self._stop_signal).name in _EXTERNAL_SIGNALS
        ):
            return signal.Signals(self._stop_signal).name
        job = self._job
        if status != "done" and job is not None and job.scheduler.is_preempted(job.id):
            return _PREEMPTION
        # A launcher that has lost a rank ends the others by such a signal; no user sent it.
        return f"{reason}{_SENT_BY_LAUNCHER_SUFFIX}" if reason in _EXTERNAL_SIGNALS else reason

    def _wait_for_launcher(self, child: "subprocess.Popen[bytes]", old_stamp: object) -> int:
        """Wait for the launcher, but for a limited time once outcome.json is written."""
        ended_s, linger_s = None, 0.0
        while (code := child.poll()) is None:
            time.sleep(_POLL_S)
            now_s = time.time()
            # None: a starting run has removed the last outcome.json.
            if ended_s is None and _outcome_stamp(self._run_dir) not in (None, old_stamp):
                ended_s, linger_s = now_s, self._launcher_linger_s()
            left_s = None if self._job_end_s is None else self._job_end_s - now_s
            if left_s is not None and left_s < self._exit_margin_s and self._stop_signal is None:
                log.info("the job ends in %.0f s: asking its ranks to stop", left_s)
                self._on_signal(signal.SIGUSR1)
            lingers = ended_s is not None and now_s - ended_s > linger_s
            is_over = left_s is not None and left_s < _KILL_MARGIN_S
            if lingers or is_over:
                reason = "the job's time limit is reached" if is_over else "its ranks have exited"
                log.warning("killed %s: %s", self._argv[0], reason)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                return child.wait()
        return code

    def _launcher_linger_s(self) -> float:
        has_failed = (outcome.read_outcome(self._run_dir) or {}).get("status") == "failed"
        return min(_LINGER_S, _FAILED_LAUNCHER_LINGER_S) if has_failed else _LINGER_S

    def _on_signal(self, signal_number: int, frame: FrameType | None = None) -> None:
        self._stop_signal = signal_number
        self._ask_ranks_to_stop()

    def _ask_ranks_to_stop(self) -> None:
        """Ask the ranks to save and stop, by SIGUSR1, which every launcher forwards to them."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGUSR1)

    def _requeue_job(self) -> int:
        try:
            subprocess.run(self._requeue_command, check=True, timeout=_REQUEUE_LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            log.error(
                "the job cannot be requeued (%s): submit it again", explain_command_failure(error)
            )
        return EXIT_RESUMABLE


def _make_parent_death_hook() -> Callable[[], object]:
    """Return a function that makes the kernel send SIGUSR1 to the launcher if this process dies.

    The ranks then save and stop; otherwise they would continue unsupervised.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))


def _outcome_stamp(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes when outcome.json is rewritten, without comparing clocks."""
    try:
        stat = (run_dir / outcome.OUTCOME_FILE).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _newest_checkpoint_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    names = [path.name.removeprefix("step-") for path in run_dir.glob("checkpoints/step-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _read_starts(run_dir: Path) -> list[StartRecord]:
    """Return the starts in starts.jsonl; lines that are cut short or of other types are skipped."""
    try:
        lines = (run_dir / STARTS_FILE).read_bytes().splitlines()
    except OSError as error:
        warn_unreadable(run_dir / STARTS_FILE, error)
        return []
    starts = []
    for line in lines:
        with contextlib.suppress(ValueError):
            starts.append(_START_ADAPTER.validate_json(line))
    return starts


def _read_unfinished_start(run_dir: Path) -> StartRecord | None:
    """Return a start whose supervise died with it, with as much of its ending as is known."""
    if (start := owner.read_unfinished_start(run_dir)) is None:
        return None
    status, reason, exit_code = owner.find_start_ending(run_dir, start)
    fields = {"from_step": 0, "job": None, "asked": False, **start.fields}
    fields |= {"to_step": _newest_checkpoint_step(run_dir), "status": status, "reason": reason}
    fields |= {"exit_code": exit_code, "lost_nodes": exit_code == EXIT_FAILED}
    try:
        return _START_ADAPTER.validate_python(fields)
    except ValueError:  # of another version
        return None


def _record_unfinished_start(run_dir: Path, start: StartRecord) -> StartRecord:
    log.info("the previous start ended at step %d: %s", start.to_step, start.reason)
    _append_start(run_dir, start)
    owner.remove_start_file(run_dir)
    return start


def _append_start(run_dir: Path, start: StartRecord) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): this start will not be counted by later jobs",
            STARTS_FILE,
            f"{error}{find_remedy(error)}",
        )
