"""How many bytes the checkpoint of an adapter takes."""

import pytest
from safetensors.torch import load_file

from hpc_tune.checkpoint.locate import describe_checkpoints
from hpc_tune.checkpoint.store import Store
from hpc_tune.units import format_bytes
from tests.support.training import SMALL, many_runs

LAYOUTS = ("shard=2", "pipeline=2", "zero_stage=3")


@pytest.mark.full
def test_a_checkpoint_is_the_adapter_and_its_optimizer_state(tmp_path):
    settings = [*SMALL, "tune.method=lora", "tune.rank=64", "train.max_steps=1"]
    jobs = [
        {"overrides": [*settings, f"parallel.{layout}", f"run.dir={tmp_path / layout}"]}
        for layout in LAYOUTS
    ]
    assert many_runs(2, jobs, tmp_path) == [0] * len(jobs)
    for layout in LAYOUTS:
        newest = Store(tmp_path / layout / "checkpoints", keep=1).latest_checkpoint()
        adapter = load_file(newest / "adapter" / "adapter_model.safetensors")
        needed = 3 * sum(tensor.nbytes for tensor in adapter.values())  # AdamW's two, in fp32
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        print(f"{layout}: {size / needed:.3f} of {needed} bytes")
        assert needed < size < 1.1 * needed
        lines, _ = describe_checkpoints(newest, check_bytes=False)
        assert f"  {format_bytes(size)}  " in lines[-1], "inspect counts the adapter too"
