"""Pinned memory on a CUDA device that is not there, as torch's allocator would make it.

That rounds each request up to a power of two and keeps what is freed (``fake_cuda.py``).
"""

import json
from pathlib import Path

import pytest

from hpc_tune.model.tensor_sources import PIECE_BYTES
from tests.support.fake_cuda_marks import needs_fake_cuda
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

ROOT = Path(__file__).parents[3]
pytestmark = needs_fake_cuda


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the program says."""
    folder = tmp_path_factory.mktemp("pinned")
    words = [*python(cold=True), "-m", "tests.support.fake_cuda_pinned", str(folder)]
    done = run_ranks(words, rank_environment(1), HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_offloaded_weights_share_blocks_and_fsdp_keeps_them(told):
    """It would pin each part anew that is not pinned, or has another size."""
    params = told["params"]
    assert params["each"] > 1.9 * params["tensors"]
    assert params["tensors"] <= params["loaded"] < 1.01 * params["tensors"]
    assert params["are_pinned"]


def test_a_plan_counts_the_pinned_blocks_of_offloaded_weights_and_gradients(told):
    """Gradients are FSDP2's, each in a block of its own; batches take a few kilobytes."""
    params = told["params"]
    gradients = params["stepped"] - params["loaded"]
    assert params["each"] <= gradients < params["each"] + 65536
    assert params["planned"] == pytest.approx(params["stepped"], abs=65536)


def test_moments_that_are_moved_share_blocks_and_are_given_back(told):
    moments = told["moments"]
    assert moments["each"] > 1.9 * moments["tensors"]
    assert moments["tensors"] <= moments["moved"] < 1.01 * moments["tensors"]
    assert moments["are_pinned"]
    assert moments["undone"] == 0


def test_saves_use_the_blocks_of_the_first_until_they_are_given_back(told):
    """They are before the fourth save and before the fifth, of which nothing is kept."""
    saves, of_one = told["saves"], 3 * PIECE_BYTES
    assert saves["made"] == [3, 0, 0, 3, 3]
    assert saves["held"] == [of_one, of_one, of_one, of_one, 0]
    assert saves["released"] == 0
