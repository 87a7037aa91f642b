"""All-reduces that overlap with the backward pass: which pieces, in which order."""

import pytest
import torch
from torch import nn

from hpc_tune.engine import gradients
from hpc_tune.engine.gradients import Bucket, OverlappedAllReduce

SIZES = (3, 5, 2, 6, 1)  # at 8 values per piece: the last three, the first two


class Begun:
    """Stands for the messages of one rank: notes what was begun and when all was waited for."""

    def __init__(self):
        self.pieces, self.ends = [], []

    def begin_all_reduce(self, tensor, group):
        self.pieces.append(tensor)
        return len(self.pieces)

    def finish(self, works):
        self.ends.append(list(works))


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(gradients, "GRADIENT_BUCKET_BYTES", 32)
    flat, position, parameters = torch.zeros(sum(SIZES)), 0, []
    for size in SIZES:
        parameter = nn.Parameter(torch.ones(size))
        parameter.grad = flat[position : position + size]
        position += size
        parameters.append(parameter)
    messages = Begun()
    sums = OverlappedAllReduce(Bucket(flat, None, 2, False, parameters), object(), messages)
    return sums, parameters, flat, messages


def backward(parameters):
    for parameter in parameters:
        parameter.sum().backward()


def test_the_pieces_are_the_whole_bucket_from_its_end(watched):
    sums, parameters, flat, messages = watched
    sums.begin()
    backward(reversed(parameters))
    assert [len(piece) for piece in messages.pieces] == [9, 8]
    messages.pieces[0].fill_(1.0)
    messages.pieces[1].fill_(2.0)
    assert flat.tolist() == [2.0] * 8 + [1.0] * 9


def test_a_piece_begins_when_its_last_gradient_is_done(watched):
    sums, parameters, _, messages = watched
    sums.begin()
    backward(parameters[3:])
    assert not messages.pieces
    backward(parameters[2:3])
    assert len(messages.pieces) == 1


def test_the_order_is_the_same_whatever_is_done_first(watched):
    sums, parameters, flat, messages = watched
    sums.begin()
    backward(parameters)  # the second piece is done before the first
    sums.finish()
    assert [piece.data_ptr() for piece in messages.pieces] == [flat[8:].data_ptr(), flat.data_ptr()]
    assert messages.ends == [[1, 2]]


@pytest.mark.parametrize("num_done", [0, 2, 3])
def test_what_no_backward_pass_finishes_begins_at_the_end(watched, num_done):
    sums, parameters, _, messages = watched
    if num_done:
        sums.begin()
        backward(parameters[len(SIZES) - num_done :])
    sums.finish()
    assert [len(piece) for piece in messages.pieces] == [9, 8]


def test_only_the_last_backward_pass_of_a_step_sends(watched):
    sums, parameters, _, messages = watched
    for step in (1, 2):
        backward(parameters)  # a micro-batch before the last
        assert len(messages.pieces) == 2 * (step - 1)
        sums.begin()
        backward(parameters)
        sums.finish()
        assert len(messages.pieces) == 2 * step
