"""Pipeline parallelism: decoder blocks spread over ranks, which send activations to each other.

    split_into_stages   the meta model -> this rank's stages (arXiv:1806.03377, arXiv:2104.04473)
    connect_stages      the groups of neighbors, each with its connection made
    schedule_passes     (pure) the order of forward and backward passes of one rank
    Pipeline            runs that order; receives are posted ahead of the passes that need them

A rank has one stage (1F1B) or several (interleaved 1F1B): stage s is on rank s mod P. Every rank of
the axis has the same micro-batches, so it knows the shapes that it will receive, even ragged ones.
Each directed pair of neighbors has its own process group: the messages within each stay in order,
and no pair waits for another.

Shapes: B rows, T tokens, D hidden.
"""

import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_tune.batch import Batch
from hpc_tune.engine.activation_checkpoint import disable_dispatch_modes
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.mesh import mirror_group_creation, wait_until_connected
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.loss import LossModel, find_decoder
from hpc_tune.step.layout import DIRECTIONS, Direction, Layout, PipelinePass, schedule_passes
from hpc_tune.step.plan import StepPlan

# How many passes ahead receives are posted. On a GPU a receive is a kernel that waits on several of
# its processors until data arrive, beside the passes that were queued before.
LOOKAHEAD = {"cpu": 2, "cuda": 0}


@disable_dispatch_modes  # a plan's fake tensors cannot be deep-copied
def split_into_stages(built: BuiltModel, plan: StepPlan, rank: int) -> list[BuiltModel]:
    """Return the stages of pipeline rank ``rank``, in order.

    Parameters keep their names, but an embedding that is tied to the head has the head's name on
    the last stage.

    Raises:
        ConfigError: if a stage, of any rank, has nothing to train.
    """
    blocks = plan.stages
    _require_trained_stages(built, blocks)
    return [
        _extract_stage(built, blocks[stage], stage == 0, stage == len(blocks) - 1)
        for stage in range(rank, len(blocks), plan.layout.pipeline)
    ]


def _require_trained_stages(built: BuiltModel, blocks: Sequence[range]) -> None:
    """Refuse stages without a trained weight, through which no gradient would flow."""
    modules = [*find_blocks(built.module), built.module.causal_lm().get_output_embeddings()]
    head = len(modules) - 1
    is_trained = [any(p.requires_grad for p in module.parameters()) for module in modules]
    for stage, span in enumerate(blocks):
        numbers = [*span, head] if stage == len(blocks) - 1 else span
        if not any(is_trained[number] for number in numbers):
            raise ConfigError(
                f"tune.targets={built.tune.targets} leaves pipeline stage {stage + 1} of "
                f"{len(blocks)} (decoder blocks {span.start} to {span.stop - 1}) without anything "
                "to train; add layers of those blocks to tune.targets, or use parallel.shard"
            )


def _extract_stage(
    built: BuiltModel, block_range: range, is_first: bool, is_last: bool
) -> BuiltModel:
    module = copy.deepcopy(built.module)
    module.is_first_stage, module.is_last_stage = is_first, is_last
    blocks = find_blocks(module)
    for number in range(len(blocks)):
        if number not in block_range:
            del blocks._modules[str(number)]
    lm = module.causal_lm()
    base_names, saved_names = dict(built.base_names), dict(built.saved_names)
    if not is_first:
        embedding = lm.get_input_embeddings().weight
        name = next(n for n, p in module.named_parameters() if p is embedding)
        lm.set_input_embeddings(nn.Identity())
        if hasattr(find_decoder(lm), "embedding_multiplier"):
            find_decoder(lm).embedding_multiplier = 1.0  # the first stage has applied it
        if built.tied_name and is_last:
            # The same weight has the head's name now.
            head = next(n for n, p in module.named_parameters() if p is embedding)
            base_names[head] = base_names[name]
            if name in saved_names:
                saved_names[head] = saved_names[name]
    if not is_last:
        *_, norm = built.config.base_model_pp_plan
        setattr(find_decoder(lm), norm, nn.Identity())
        lm.set_output_embeddings(nn.Identity())
    return dataclasses.replace(built, module=module, base_names=base_names, saved_names=saved_names)


@dataclass
class _ForwardState:
    """What a backward pass needs from its forward pass."""

    hidden_in: torch.Tensor | None
    out: torch.Tensor


Edges = dict[tuple[int, Direction], dist.ProcessGroup]


def connect_stages(layout: Layout, is_ring: bool, device: torch.device) -> Edges:
    """Make a group for each direction of each of this rank's edges, and connect it. Collective.

    A group's key is the rank that sends forward on the edge, and the group's direction; interleaved
    stages form a ring. In a round each rank has at most one neighbor, so ranks cannot wait in a
    circle; a rank without one only mirrors the creation. All pipelines have the same rounds.

    One message connects a pair: at the first one, NCCL holds either rank until the other has
    called, and receives that are posted ahead of their sends would wait for that forever. It is
    sent before the next group is made.
    """
    me = dist.get_rank()
    members = layout.group_of(me, "pipeline")
    ring = list(zip(members, [*members[1:], members[0]], strict=True))
    rounds = [ring[:-1:2], ring[1:-1:2], ring[-1:] if is_ring else []]
    edges: Edges = {}
    for direction, pairs in itertools.product(DIRECTIONS, filter(None, rounds)):
        pair = next((pair for pair in pairs if me in pair), None)
        if pair is None:
            mirror_group_creation(pairs[0])
            continue
        group = dist.new_group([*pair], use_local_synchronization=True)
        edges[pair[0], direction] = group
        source, target = pair if direction == "forward" else reversed(pair)
        message = torch.zeros(1, device=device)
        if me == source:
            dist.send(message, target, group)
        else:
            dist.recv(message, source, group)
        wait_until_connected(device)
    return edges


class Pipeline:
    """Runs the stages of one rank, in step with the other ranks of the pipeline axis."""

    def __init__(
        self,
        stages: Sequence[LossModel],
        layout: Layout,
        edges: Edges,
        device: torch.device,
        hidden_size: int,
        dtype: torch.dtype,
        collectives: CountedCollectives,
    ) -> None:
        """Take this rank's stages; ``dtype`` is that of the activations as they are sent."""
        self._stages, self._device, self._edges = stages, device, edges
        self._rank, self._num_ranks = layout.coordinates(dist.get_rank()).pipeline, layout.pipeline
        self._hidden_size, self._dtype = hidden_size, dtype
        members = layout.group_of(dist.get_rank(), "pipeline")
        self._previous = members[self._rank - 1]
        self._next = members[(self._rank + 1) % self._num_ranks]
        self._unfinished_sends: deque[tuple[Any, torch.Tensor]] = deque()
        self._collectives, self._lookahead = collectives, LOOKAHEAD[device.type]

    def train(
        self,
        batches: Sequence[Batch],
        forward: Callable[[int, Batch, torch.Tensor | None], torch.Tensor],
        backward: Callable[[int, bool, torch.Tensor, torch.Tensor | None], None],
    ) -> None:
        """Run all micro-batches forward and backward.

        ``forward(chunk, batch, hidden_BTD)`` returns a stage's output or, on the last stage, the
        objective's sums; ``backward(chunk, is_last, output, gradient)`` propagates from there.
        ``is_last``: true for the chunk's last micro-batch; ``gradient``: None on the last stage.
        """
        passes = schedule_passes(self._rank, self._num_ranks, len(self._stages), len(batches))
        inputs = self._make_input_receiver(passes, batches)
        last_passes = {p.chunk: p for p in passes if p.kind == "backward"}
        in_flight: dict[tuple[int, int], _ForwardState] = {}
        for number, step in enumerate(passes):
            inputs.post_receives(number + self._lookahead)
            pass_input = inputs.take(number)
            key = step.chunk, step.micro_batch
            if step.kind == "forward":
                if pass_input is not None:
                    pass_input.requires_grad_()
                out = forward(step.chunk, batches[step.micro_batch], pass_input)
                in_flight[key] = _ForwardState(pass_input, out)
                if not self._is_last(step.chunk):
                    self._send(out.detach(), "forward")
            else:
                state = in_flight.pop(key)
                backward(step.chunk, step == last_passes[step.chunk], state.out, pass_input)
                if state.hidden_in is not None:
                    grad = state.hidden_in.grad
                    assert grad is not None, "a stage must pass a gradient on"
                    self._send(grad, "backward")
        self._finish_sending()

    def evaluate(
        self,
        batches: Sequence[Batch],
        forward: Callable[[int, Batch, torch.Tensor | None], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run micro-batches forward; return the objective's sums, on the last stage's rank."""
        passes = [
            p
            for p in schedule_passes(self._rank, self._num_ranks, len(self._stages), len(batches))
            if p.kind == "forward"
        ]
        inputs = self._make_input_receiver(passes, batches)
        sums = []
        for number, step in enumerate(passes):
            inputs.post_receives(number + self._lookahead)
            out = forward(step.chunk, batches[step.micro_batch], inputs.take(number))
            if self._is_last(step.chunk):
                sums.append(out)
            else:
                self._send(out, "forward")
        self._finish_sending()
        return sums

    def _is_first(self, chunk: int) -> bool:
        return self._rank == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self._rank == self._num_ranks - 1 and chunk == len(self._stages) - 1

    def _make_input_receiver(
        self, passes: Sequence[PipelinePass], batches: Sequence[Batch]
    ) -> "_InputReceiver":
        expected_inputs: list[tuple[Direction, tuple[int, ...]] | None] = []
        for step in passes:
            is_forward, chunk = step.kind == "forward", step.chunk
            receives_none = self._is_first(chunk) if is_forward else self._is_last(chunk)
            shape = (*batches[step.micro_batch].tokens_BT.shape, self._hidden_size)
            expected_inputs.append(None if receives_none else (step.kind, shape))
        return _InputReceiver(expected_inputs, self._receive, self._collectives)

    def _receive(self, direction: Direction, shape: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        source = self._previous if direction == "forward" else self._next
        edge = self._previous if direction == "forward" else dist.get_rank()
        return dist.irecv(buffer, source, self._edges[edge, direction]), buffer

    def _send(self, tensor: torch.Tensor, direction: Direction) -> None:
        message = tensor.to(self._dtype).contiguous()
        target = self._next if direction == "forward" else self._previous
        edge = dist.get_rank() if direction == "forward" else self._previous
        work = self._collectives.begin_send(message, target, self._edges[edge, direction])
        self._unfinished_sends.append((work, message))
        while self._unfinished_sends and self._unfinished_sends[0][0].is_completed():
            self._unfinished_sends.popleft()

    def _finish_sending(self) -> None:
        with self._collectives.counted("send", 0):
            while self._unfinished_sends:
                self._unfinished_sends.popleft()[0].wait()


class _InputReceiver:
    """Receives the inputs of passes in their order, some passes ahead."""

    def __init__(
        self,
        expected_inputs: Sequence[tuple[Direction, tuple[int, ...]] | None],
        receive: Callable[[Direction, tuple[int, ...]], tuple[Any, torch.Tensor]],
        collectives: CountedCollectives,
    ) -> None:
        self._expected_inputs, self._receive, self._collectives = (
            expected_inputs,
            receive,
            collectives,
        )
        self._posted_receives: dict[int, tuple[Any, torch.Tensor]] = {}
        self._next = 0

    def post_receives(self, last_step: int) -> None:
        for step in range(self._next, min(last_step + 1, len(self._expected_inputs))):
            if (expected_input := self._expected_inputs[step]) is not None:
                self._posted_receives[step] = self._receive(*expected_input)
            self._next = step + 1

    def take(self, step: int) -> torch.Tensor | None:
        """Wait for the input of a pass and return it; None if the stage needs none."""
        if step not in self._posted_receives:
            return None
        work, buffer = self._posted_receives.pop(step)
        with self._collectives.counted("send", 0):
            work.wait()
        return buffer
