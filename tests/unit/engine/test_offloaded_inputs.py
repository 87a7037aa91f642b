"""Inputs of recomputed blocks on the host: the same bits, each copied once there and once back."""

from types import SimpleNamespace

import torch
from torch import nn

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import TrainConfig
from hpc_tune.engine.activation_checkpoint import OffloadedInputs, checkpoint_blocks
from hpc_tune.faults import Faults
from hpc_tune.memory.policy import Action

NUM_BLOCKS, SHAPE = 5, (2, 16, 32)
INPUT_BYTES = 2 * 16 * 32 * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x_BTD):
        return x_BTD + self.outer(torch.tanh(self.inner(x_BTD)))


def make(is_on=True, row_tokens=0, reserved=None, **others):
    reserved = [] if reserved is None else reserved
    return OffloadedInputs(
        SimpleNamespace(
            device=torch.device("cpu"),
            parallel=ParallelConfig(offload_activations=is_on),
            train=TrainConfig(**others),
            faults=Faults(offloads_without_gpu=True),
            reserve=reserved.append,
            row_tokens=row_tokens,
        )
    )


def blocks_with(inputs):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    checkpoint_blocks(blocks, "full", inputs.saving_context)
    return blocks


def forward(blocks, seed, shape=SHAPE):
    torch.manual_seed(seed)
    x_BTD = torch.randn(shape, requires_grad=True)
    out_BTD = x_BTD
    for block in blocks:
        out_BTD = block(out_BTD)
    return x_BTD, out_BTD.square().sum()


def gradients(inputs, steps=1, micros=1, shape=SHAPE):
    """Return the gradients of steps, whose micro-batches are all in flight, as in a pipeline."""
    blocks, found = blocks_with(inputs), []
    for step in range(steps):
        passes = [forward(blocks, step * micros + n, shape) for n in range(micros)]
        for x_BTD, loss in passes:
            loss.backward()
            found.append(x_BTD.grad)
    return found + [p.grad for block in blocks for p in block.parameters()]


def test_gradients_are_the_same_bits_and_buffers_are_used_again():
    wanted = gradients(make(is_on=False), steps=3)
    inputs = make()
    assert all(map(torch.equal, gradients(inputs, steps=3), wanted))
    assert inputs.buffer_bytes == NUM_BLOCKS * INPUT_BYTES


def test_micro_batches_in_flight_have_buffers_of_their_own():
    wanted = gradients(make(is_on=False), steps=2, micros=3)
    inputs = make()
    assert all(map(torch.equal, gradients(inputs, steps=2, micros=3), wanted))
    assert inputs.buffer_bytes == 3 * NUM_BLOCKS * INPUT_BYTES


def test_each_input_is_copied_once_and_comes_back_one_block_ahead():
    inputs, copies = make(), []
    plain = inputs._copy

    def noting(to, source):
        [part], [place] = source, to  # a power of two is in one block
        copies.append((part.data_ptr(), place.data_ptr(), place.nbytes))
        return plain(to, source)

    inputs._copy = noting
    blocks = blocks_with(inputs)
    ran = []
    for number, block in enumerate(blocks):
        block.inner.register_forward_pre_hook(lambda *_, n=number: ran.append((n, len(copies))))
    _, loss = forward(blocks, 0)
    assert [num for _, num in ran] == [1, 2, 3, 4, 5]
    del ran[:]
    loss.backward()
    assert [num_bytes for *_, num_bytes in copies] == [INPUT_BYTES] * 2 * NUM_BLOCKS
    there, back = copies[:NUM_BLOCKS], copies[NUM_BLOCKS:]
    assert [source for source, *_ in back] == [to for _, to, _ in reversed(there)]
    # Before the last block runs again, its input and that of the one before have been asked for.
    assert ran == [(4, 7), (3, 8), (2, 9), (1, 10), (0, 10)]


def test_a_buffer_is_of_blocks_that_are_not_rounded_up_and_is_reserved_first():
    """3 x 2^k bytes are two blocks; torch would pin 4 x 2^k for one."""
    wanted = gradients(make(is_on=False), steps=2, shape=(2, 24, 32))
    inputs = make(reserved=(reserved := []))
    assert all(map(torch.equal, gradients(inputs, steps=2, shape=(2, 24, 32)), wanted))
    assert inputs.buffer_bytes == NUM_BLOCKS * INPUT_BYTES * 3 // 2
    assert reserved == NUM_BLOCKS * [INPUT_BYTES, INPUT_BYTES // 2]


def test_inputs_of_odd_sizes_come_back_whole():
    wanted = gradients(make(is_on=False), micros=2, shape=(1, 7, 32))
    assert all(map(torch.equal, gradients(make(), micros=2, shape=(1, 7, 32)), wanted))


def test_a_pass_brings_back_no_input_of_another():
    """Each micro-batch goes through a stage of its own, as in a pipeline of interleaved ones."""
    inputs, returning = make(), []
    blocks = [[*blocks_with(inputs)] for _ in range(2)]
    stages = [nn.Sequential(*stage) for stage in blocks]
    for stage in stages:
        inputs.reset_at_each_pass(stage)
    torch.manual_seed(1)
    losses = [stage(torch.randn(SHAPE, requires_grad=True)).sum() for stage in stages]
    plain = inputs._begin_copy_back

    def noting(moved):
        returning.append(moved)
        plain(moved)

    inputs._begin_copy_back = noting
    losses[1].backward(retain_graph=True)
    assert len(set(returning)) == NUM_BLOCKS
    losses[0].backward()
    assert len(set(returning)) == 2 * NUM_BLOCKS


def test_what_broke_off_gives_its_buffers_back():
    inputs = make()
    blocks = blocks_with(inputs)
    _, loss = forward(blocks, 0)
    del loss, _
    inputs.wait_for_copies()
    assert all(map(torch.equal, gradients(inputs), gradients(make(is_on=False))))
    assert inputs.buffer_bytes == NUM_BLOCKS * INPUT_BYTES


def test_a_trace_counts_buffers_and_has_none():
    inputs = make()
    inputs.is_dry_run = True
    gradients(inputs)
    assert inputs.buffer_bytes == NUM_BLOCKS * INPUT_BYTES


def test_the_lever_is_for_long_rows_that_are_not_moved_yet():
    assert make(is_on=False, row_tokens=512).memory_actions() == {}
    assert make(row_tokens=1 << 15).memory_actions() == {}
    assert make(is_on=False, row_tokens=1 << 15, compile=True).memory_actions() == {}
    inputs = make(is_on=False, row_tokens=1 << 15)
    lever = inputs.memory_actions()[Action.OFFLOAD_ACTIVATIONS]
    assert "host" in lever.apply_times(1)
    wanted = gradients(make(is_on=False))
    assert all(map(torch.equal, gradients(inputs), wanted))
    assert inputs.buffer_bytes == NUM_BLOCKS * INPUT_BYTES
    assert "device" in lever.apply_times(0)
    assert all(map(torch.equal, gradients(inputs), wanted))
    assert inputs.buffer_bytes == 0
