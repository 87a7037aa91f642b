"""What several of the unit tests share."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose by more threads, on a busy machine most of all."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
