"""Which errors of torch show that another rank is gone, and which are a rank's own; who reports."""

import os
import subprocess
import sys

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from hpc_tune.errors import WorldError
from hpc_tune.world.comm import Peer
from hpc_tune.world.failure import _describe_failure, ended_ranks_error, is_broken_connection

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
REMOTE = (
    NCCL + "remote process exited or there was a network error, NCCL version 2.28.9\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer n1<45001>"
)
SYSTEM = (
    NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error."
)
INTERNAL = (
    NCCL + "internal error - please report this issue to the NCCL developers, NCCL version 2.28.9\n"
    "ncclInternalError: Internal check failed.\nLast error:\nNET/IB: Got completion from peer n1 "
    "with status=12 opcode=0 len=0 vendor err 129 (Send)"
)
WATCHDOG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=712, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600027 milliseconds before timing out."
)
ABORTED = "NCCL communicator was aborted on rank 3.  Original reason for failure was: " + WATCHDOG
CUDA = (
    NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of "
    "memory'"
)
USAGE = (
    NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
)
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer "
    "[10.0.0.2]:33445"
)
LATE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:119] Timed out waiting "
    "1800000ms for recv operation to complete"
)


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (DistBackendError(REMOTE), True),
        (DistBackendError(SYSTEM), True),
        (DistBackendError(INTERNAL), True),
        (DistBackendError(ABORTED), True),
        (DistBackendError(WATCHDOG), True),
        (RuntimeError(REMOTE), True),  # of DeepSpeed's and a compiled step's own raising
        (RuntimeError(SYSTEM), True),
        (RuntimeError(INTERNAL), True),
        (RuntimeError(ABORTED), True),
        (RuntimeError(WATCHDOG), True),
        (DistBackendError(CUDA), False),
        (DistBackendError(USAGE), False),
        (RuntimeError(GLOO), True),
        (RuntimeError(LATE), True),
        (DistNetworkError("The client socket has failed to connect to [n0]:29500"), True),
        (DistStoreError("wait timeout after 1800000ms, keys: /default_pg/0//cuda//0"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("connection closed by peer"), False),
        (WorldError("rank 1 timed out"), False),
    ],
)
def test_a_broken_connection_is_told_from_a_fault_of_the_rank_itself(error, is_broken):
    assert is_broken_connection(error) is is_broken


@pytest.mark.parametrize(
    ("words", "is_late"),
    [(LATE, True), (WATCHDOG, True), (ABORTED, True), (REMOTE, False), (GLOO, False)],
)
def test_what_took_too_long_says_that_a_rank_did_not_answer(words, is_late):
    said = _describe_failure("rank 0 on n0", DistBackendError(words), None)
    assert ("had no answer from another rank within run.timeout" in said.reason) is is_late
    assert "\n" not in said.reason
    assert said.details.endswith(words)


ROSTER = tuple(Peer(rank, rank // 2, f"n{rank // 2 + 1}", 100 + rank) for rank in range(6))


@pytest.mark.parametrize(
    ("gone", "said", "hosts"),
    [
        ([2, 3], "host n2 (ranks 2, 3) is gone", ["n2"]),
        ([3], "rank 3 (pid 103 on host n2) is gone", []),
        ([1, 2, 3], "rank 1 (pid 101 on host n1), host n2 (ranks 2, 3) are gone", ["n2"]),
    ],
)
def test_who_is_gone_is_named_by_host_where_a_whole_one_is(gone, said, hosts):
    error = ended_ranks_error([ROSTER[rank] for rank in gone], ROSTER, "training step 61")
    assert str(error) == f"{said} while training step 61"
    assert error.facts == {"lost_hosts": hosts, "lost_ranks": gone}


def test_the_only_host_is_not_gone():
    error = ended_ranks_error(ROSTER[:2], ROSTER[:2], "training step 61")
    assert str(error).startswith("rank 0 (pid 100 on host n1), rank 1 (pid 101 on host n1) are")


def test_many_that_are_gone_stay_one_line():
    roster = [Peer(rank, rank // 64, f"n{rank // 64}", rank) for rank in range(256)]
    assert "host n1 (ranks 64-127) is gone" in str(ended_ranks_error(roster[64:128], roster, "x"))
    said = str(ended_ranks_error(roster[:20], roster, "x"))
    assert "rank 7 (pid 7 on host n0), and 12 more are gone" in said


# What a rank does that has lost the store: ``sys.argv[1]`` is the folder of marks.
LATE_RANK = """
import sys
from pathlib import Path
from types import SimpleNamespace
from hpc_tune.world import failure

failure._REPORT_MARKER_FOLDER = Path(sys.argv[1])
nonce, node, reports = sys.argv[2], int(sys.argv[3]), sys.argv[4:]
comm = SimpleNamespace(nonce=nonce, watch=None, world=SimpleNamespace(size=4, node=node))
print(failure._is_first_on_host(comm))
if reports:
    failure.announce_exit(comm, 1)
"""


def is_first(folder, nonce, node, reports):
    argv = [sys.executable, "-c", LATE_RANK, str(folder), nonce, node, *["reports"] * reports]
    return subprocess.check_output(argv, text=True, timeout=120).strip() == "True"


def test_one_rank_of_a_host_reports_even_if_another_fails_after_it_has_exited(tmp_path):
    old, fresh = tmp_path / "hpc_tune-reported-old-0", tmp_path / "hpc_tune-reported-fresh-0"
    other = tmp_path / "other"
    for file in (old, fresh, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (0, 0))
    nonce = f"{os.getpid()}-{tmp_path.name}"
    assert is_first(tmp_path, nonce, "1", reports=False)  # it dies before it has reported
    assert is_first(tmp_path, nonce, "1", reports=True)
    assert not is_first(tmp_path, nonce, "1", reports=True)
    assert is_first(tmp_path, nonce, "2", reports=False)
    assert is_first(tmp_path, f"{nonce}-next", "1", reports=False)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()
