"""What only a device can show of a run on it: copies, bytes that are really freed, its limit."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from hpc_tune.batch import costliest_batch
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import MemoryConfig
from hpc_tune.errors import ResumableStop
from hpc_tune.faults import NO_FAULTS
from hpc_tune.memory.device import is_out_of_memory
from hpc_tune.memory.policy import Action
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.train.exit import MemoryShortageHandler, ResumePoint, make_monitor
from hpc_tune.world.bootstrap import bootstrap, shutdown
from tests.support.ranks import ROOT, rank_environment, run_ranks
from tests.support.training import SMALL, losses, rows, worst_gap

sys.path.insert(0, str(ROOT / "tools"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIB = 1 << 20


@pytest.fixture(scope="module")
def comm():
    comm = bootstrap(load_config(None, ["run.device=cuda"]).run)
    yield comm
    shutdown(comm)


def test_a_single_rank_has_a_group_of_nccl_that_is_bound_to_its_device(comm):
    ones = torch.ones(3, device=comm.device)
    dist.all_reduce(ones)
    assert ones.tolist() == [1.0] * 3
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(comm.device).name() == "nccl"
    assert group.bound_device_id == comm.device


def test_a_batch_is_copied_while_the_host_goes_on(comm):
    batch = costliest_batch(4, 512)
    batch.to(comm.device)  # memory is pinned
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = batch.to(comm.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in ("tokens_BT", "labels_BT", "positions_BT"):
        assert getattr(copied, name).device == comm.device
        assert torch.equal(getattr(copied, name).cpu(), getattr(batch, name))


def test_moving_the_optimizers_state_frees_its_bytes_and_says_so(comm, tmp_path):
    from bench_steps import prepare

    write_tiny_model(tmp_path / "tiny")
    words = [f"model.path={tmp_path / 'tiny'}", "tune.method=full", "data.seq_len=128"]
    config = load_config(None, [*words, "batch.micro_size=2", "batch.global_size=2"])
    steps = prepare(config, comm)
    lever, moments = (
        steps.engine.memory_actions[Action.MOVE_OPTIMIZER],
        2 * steps.size.trained_bytes,
    )

    def allocated():
        for _ in range(2):
            steps.step(config, comm.device)
        return torch.cuda.memory_allocated(comm.device)

    on_device = allocated()
    assert lever.apply_times(1) == "optimizer state is on the host"
    moved = torch.cuda.memory_allocated(comm.device)
    assert on_device - moved > 0.9 * moments
    assert on_device - allocated() > 0.9 * moments, "a step brings back nothing that stays"
    assert lever.apply_times(0) == "optimizer state is on the device"
    assert allocated() == pytest.approx(on_device, abs=0.1 * moments)


def test_an_allocation_beyond_the_limit_is_a_reason_to_leave_and_no_crash(comm, tmp_path):
    total = torch.cuda.mem_get_info(comm.device)[1]
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved(comm.device) + 64 * MIB) / total
    torch.cuda.set_per_process_memory_fraction(share, comm.device)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(256 * MIB, dtype=torch.uint8, device=comm.device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, comm.device)
    assert is_out_of_memory(caught.value)
    monitor = make_monitor(MemoryConfig(), comm, tmp_path, NO_FAULTS)
    leaving = MemoryShortageHandler(comm, monitor, tmp_path, ResumePoint(3)).cause_of(caught.value)
    monitor.close()
    assert isinstance(leaving, ResumableStop)
    assert leaving.step == 3
    assert "device memory of rank 0" in leaving.reason
    assert torch.ones(2, device=comm.device).sum().item() == 2


def test_a_run_on_one_gpu_stops_and_resumes_with_the_same_losses(tmp_path):
    common = [*SMALL, "data.path=builtin:pydocs:heldout", "run.device=cuda", "tune.method=lora"]
    common += ["batch.micro_size=4", f"data.cache={tmp_path / 'data'}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    jobs = [
        {"overrides": [*common, f"run.dir={whole}"]},
        {"overrides": [*common, f"run.dir={parts}"], "stop_after": 4},
        {"overrides": [*common, f"run.dir={parts}"]},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    program = [sys.executable, "-m", "tests.support.many_runs"]
    files = [str(tmp_path / "jobs.json"), str(tmp_path / "codes")]
    done = run_ranks([*program, *files, "0"], rank_environment(1), 80.0)
    assert (tmp_path / "codes").read_text().split() == ["0", "75", "0"], done.stderr
    assert (
        worst_gap(losses(whole), losses(parts)) < 5e-3
    )  # bf16, kernels that are not deterministic
    assert all(num > 0 for num in rows(whole, "device_bytes").values())
    assert (whole / "export" / "adapter" / "adapter_model.safetensors").is_file()
