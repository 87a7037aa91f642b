"""NCCL's rules on top of gloo: what would hang on GPUs ends here after seconds, and says why.

    python -m tests.support.nccl_rules JOBS.json RESULTS FIRST     (as runs_at_levels.py)
    python -m tests.support.nccl_rules COMMAND ...                 (as hpc_tune)

The default process group and those made from it keep these rules (torch's ProcessGroupNCCL.cpp and
NCCL's own source); the control group stays gloo:

- A communicator is made by the first operation on it. That call holds the host until every rank of
  the communicator has called.
- ``HPC_TUNE_TEST_NCCL_MODE=lazy`` (the default): collectives, barriers and batches of messages use
  the group's communicator; a message outside a batch uses one of its two ranks alone. ``eager`` (a
  device was given to ``init_process_group``): the group's communicator is made with the group, by a
  split of the world's in which all ranks of the world take part; messages use it too.
- The first message between two ranks of a communicator holds both hosts until both ranks have
  called, since the connection is made then.
- The operations of a communicator run one after another in the order of the calls, and a send ends
  when it is received. A batch is one operation.
- No group has a single rank: its communicator would take memory and time, and send nothing.
- Control traffic on such a group, or data of an engine on the control group, is an error.

``wait`` holds the host, whereas NCCL's holds the stream. A program that makes another rank wait for
a call that comes after such a ``wait`` fails here too, though it would continue on a GPU.
"""

import contextlib
import dataclasses
import functools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hpc_tune.cli import main
from hpc_tune.engine import mesh, pipeline_parallel
from hpc_tune.faults import NO_FAULTS
from hpc_tune.world.comm import Comm
from tests.support import many_runs
from tests.support.runs_at_levels import at_levels

NAME, CONTROL = "nccl_rules", "control_plane"
MODE, LIMIT = "HPC_TUNE_TEST_NCCL_MODE", "HPC_TUNE_TEST_NCCL_LIMIT_S"
LIMIT_S = float(os.environ.get(LIMIT, "120"))
_POLL_S = 0.001
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


class RuleError(RuntimeError):
    """A call on which NCCL would hang, or which it would refuse."""


def _calls() -> str:
    """Return the calls of this program that led here, the innermost last."""
    here = [f for f in traceback.extract_stack() if f.filename != __file__]
    ours = [f"{f.filename.rpartition('hpc_tune/')[2]}:{f.lineno} {f.name}" for f in here]
    return " > ".join(ours[-5:])


def _callers() -> Iterator[str]:
    """Yield the calling files of the package, relative to its folder, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        head, found, name = frame.f_code.co_filename.rpartition(f"{os.sep}hpc_tune{os.sep}")
        if found and not head.endswith("site-packages"):
            yield name
        frame = frame.f_back


def _meet(store: Any, what: str, ranks: Sequence[int], me: int) -> None:
    """Hold the host until all ``ranks`` have called this."""
    store.set(f"{what}/{me}", "")
    until_s = time.monotonic() + LIMIT_S
    missing = [rank for rank in ranks if rank != me]
    while missing:
        missing = [rank for rank in missing if not store.check([f"{what}/{rank}"])]
        if missing and time.monotonic() > until_s:
            came = [rank for rank in ranks if rank not in missing]
            raise RuleError(
                f"rank {me} waits in {what}: ranks {came} have called, {missing} have not, after "
                f"{LIMIT_S:.0f} s; called from {_calls()}"
            )
        time.sleep(_POLL_S if missing else 0)


class RuledWork(dist._Work):
    """One operation; ``wait`` holds the host until it is over."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._calls = what, _calls()
        self.over, self.error = threading.Event(), None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.over.wait(LIMIT_S):
            raise RuleError(f"{self._what} is not over after {LIMIT_S:.0f} s: {self._calls}")
        if self.error is not None:
            raise RuleError(f"{self._what}: {self.error}; called from {self._calls}")
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Communicator:
    """Runs operations one after another, in the order of the calls; made by all of its ranks."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], me: int) -> None:
        """Meet the others; ``ranks`` are those of the world."""
        _meet(store, f"the making of communicator {name}", ranks, me)
        self.name, self._ranks, self._store, self._me = name, list(ranks), store, me
        inner = dist.PrefixStore(f"{name}/", store)
        own = self._ranks.index(me)
        limit = timedelta(seconds=LIMIT_S)
        gloo = dist.ProcessGroupGloo(inner, own, len(ranks), limit)
        self._group = ProcessGroup(inner, own, len(ranks))
        self._group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._connected: set[int] = set()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream {name}", daemon=True)
        self._thread.start()

    def collective(self, name: str, *args: Any, **kwargs: Any) -> RuledWork:
        call = functools.partial(getattr(self._group, name), *args, **kwargs)
        return self._append(name, lambda: call().wait())

    def messages(self, ops: Sequence[tuple[str, list[torch.Tensor], int, int]]) -> RuledWork:
        """Send and receive as one operation; an op is (send or recv, tensors, world rank, tag)."""
        peers = sorted({peer for _, _, peer, _ in ops} - self._connected)
        pairs = [sorted((self._me, peer)) for peer in peers]
        for low, high in pairs:  # announce all first, as one group call does
            self._store.set(self._pair(low, high) + f"/{self._me}", "")
        for pair in pairs:
            _meet(self._store, self._pair(*pair), pair, self._me)
        self._connected |= set(peers)
        names = ", ".join(f"{kind} {peer}" for kind, _, peer, _ in ops)
        return self._append(names, lambda: self._exchange(ops))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(5.0)

    def _pair(self, low: int, high: int) -> str:
        return f"the first message between ranks {low} and {high} on communicator {self.name}"

    def _exchange(self, ops: Sequence[tuple[str, list[torch.Tensor], int, int]]) -> None:
        # A send ends when its receiver has it and says so on a second tag.
        answers = {"send": "recv", "recv": "send"}
        words = [(answers[kind], [torch.zeros(1)], peer, tag) for kind, _, peer, tag in ops]
        for second, moves in ((0, ops), (1, words)):
            started = [
                getattr(self._group, kind)(tensors, self._ranks.index(peer), 2 * tag + second)
                for kind, tensors, peer, tag in moves
            ]
            for work in started:
                work.wait()

    def _append(self, name: str, call: Callable[[], Any]) -> RuledWork:
        work = RuledWork(f"rank {self._me}: {name} on communicator {self.name}")
        self._calls.put((work, call))
        return work

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            work, call = item
            try:
                with torch.no_grad():  # as in the calling pass; grad mode is per thread
                    call()
            except RuntimeError as error:
                work.error = error
            work.over.set()
            del item, work, call


class _NamedGroup(ProcessGroup):
    """A process group in Python, which keeps its name itself: torch keeps it in a backend."""

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name


class RuledGroup(_NamedGroup):
    """A process group of the data plane; ``ranks`` are those of the world."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], me: int, eager: bool) -> None:
        super().__init__(list(ranks).index(me), len(ranks))
        self._store, self._name, self._ranks, self._me = store, name, list(ranks), me
        self._eager, self._communicators = eager, {}
        self._batch: list[tuple[str, list[torch.Tensor], int, int]] | None = None
        if eager:
            self._communicator(self._ranks)

    def getBackendName(self) -> str:
        return NAME

    @property
    def supports_splitting(self) -> bool:
        return False

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> RuledWork:
        return self._message("send", tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> RuledWork:
        return self._message("recv", tensors, source, tag)

    @contextlib.contextmanager
    def batch(self) -> Iterator[list[RuledWork]]:
        """Make the messages of a block one operation; its work is added to the yielded list."""
        self._batch, works = [], []
        yield works
        ops, self._batch = self._batch, None
        works.append(self._communicator(self._ranks).messages(ops))

    def collective(self, name: str, *args: Any, **kwargs: Any) -> RuledWork:
        self._check_caller()
        return self._communicator(self._ranks).collective(name, *args, **kwargs)

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()

    def abort(self) -> None:
        self.shutdown()

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._check_caller()
        op = (kind, tensors, self._ranks[peer], tag)
        if self._batch is not None:
            self._batch.append(op)
            return None
        ranks = self._ranks if self._eager else sorted((self._me, self._ranks[peer]))
        return self._communicator(ranks, is_pair=not self._eager).messages([op])

    def _communicator(self, ranks: Sequence[int], is_pair: bool = False) -> Communicator:
        key = (tuple(ranks), is_pair)
        if key not in self._communicators:
            kind = "pair" if is_pair else "all"
            name = f"{self._name} ({kind} of {list(ranks)})"
            self._communicators[key] = Communicator(self._store, name, ranks, self._me)
        return self._communicators[key]

    def _check_caller(self) -> None:
        callers = dict.fromkeys(_callers())
        caller, above, *_ = *callers, "", ""
        # An engine may gather objects over its own group: torch sends them as tensors.
        if caller == "world/comm.py" and not above.startswith("engine/"):
            raise RuleError(f"{above} sends control traffic over the device's group: {_calls()}")


class ControlGroup(_NamedGroup):
    """A gloo group that engines must not use."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def getBackendName(self) -> str:
        return "gloo"

    def collective(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if (caller := next(_callers(), "")).startswith("engine/"):
            raise RuleError(f"{caller} sends its data over the control group: {_calls()}")
        return getattr(self._group, name)(*args, **kwargs)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.collective(name, *args, **kwargs)


for _name in _COLLECTIVES:
    if hasattr(ProcessGroup, _name):
        setattr(RuledGroup, _name, _forward(_name))
        setattr(ControlGroup, _name, _forward(_name))


def install(eager: bool) -> None:
    """Apply the rules to every world of this process."""
    made: dict[str, Any] = {"splits": 0}
    real_aside = mesh.mirror_group_creation
    real_init, real_new, real_batch = (
        dist.init_process_group,
        dist.new_group,
        dist.batch_isend_irecv,
    )

    def data_group(options: Any, _: Any) -> RuledGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = f"group {options.group_id}"
        return RuledGroup(options.store, name, ranks, ranks[options.group_rank], eager)

    def control_group(options: Any, _: Any) -> ControlGroup:
        rank, size = options.group_rank, options.group_size
        inner = ProcessGroup(options.store, rank, size)
        gloo = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        inner._set_default_backend(ProcessGroup.BackendType.GLOO)
        inner._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        return ControlGroup(inner)

    dist.Backend.register_backend(NAME, data_group, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(CONTROL, control_group, extended_api=True, devices=["cpu"])

    def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
        real_init(NAME, **kwargs)
        made["splits"] = 0
        made["step"] = real_new(backend=CONTROL, timeout=kwargs["timeout"])

    def new_group(ranks: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "gloo":
            return real_new(ranks, **kwargs | {"backend": CONTROL})
        me, by_few = dist.get_rank(), kwargs.get("use_local_synchronization")
        if ranks is not None and len(ranks) == 1 and dist.get_world_size() > 1:
            raise RuleError(f"a communicator of rank {me} alone: {_calls()}")
        if eager and (ranks is None or me in ranks or not by_few):
            meet_for_split()
        return real_new(ranks, **kwargs)

    def meet_for_split() -> None:
        """Split the world's communicator, which all of its ranks do together."""
        made["splits"] += 1
        store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
        what = f"split {made['splits']} of the world's communicator"
        _meet(store, what, range(dist.get_world_size()), me)

    def stand_aside(ranks: Sequence[int]) -> None:
        if eager:
            meet_for_split()
        real_aside(ranks)

    def batch_isend_irecv(ops: Sequence[Any]) -> list[Any]:
        group = ops[0].group or dist.group.WORLD
        if not isinstance(group, RuledGroup):
            return real_batch(ops)
        with group.batch() as works:  # torch's own asks such a group for a backend from 2.14 on
            for op in ops:
                op.op(op.tensor, op.peer, group=op.group, tag=op.tag)
        return works

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
        module.batch_isend_irecv = batch_isend_irecv

    for part in (mesh, pipeline_parallel):
        part.mirror_group_creation = stand_aside

    def with_step_timeout(self: Comm) -> Comm:
        return dataclasses.replace(self, cpu_group=made["step"])

    Comm.with_step_timeout = with_step_timeout  # type: ignore[method-assign]


def is_eager() -> bool:
    return os.environ.get(MODE) == "eager"


def do(job: dict[str, Any]) -> int:
    return many_runs.train(job, at_levels(job) if "levels" in job else NO_FAULTS)


if __name__ == "__main__":
    install(is_eager())
    if sys.argv[1].endswith(".json"):
        many_runs.main(do)
    else:
        sys.exit(main())
