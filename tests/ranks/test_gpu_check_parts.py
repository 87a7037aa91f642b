"""tools/gpu_check.py from beginning to end at toy size: every part, on a machine without a GPU."""

import json
import subprocess
import sys

import pytest

from tests.support.ranks import HANG_S, ROOT, rank_environment


@pytest.mark.full
@pytest.mark.timeout(700)
def test_every_part_passes_on_a_cpu(tmp_path):
    program = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu"]
    words = ["--minutes", "30", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*program, *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=rank_environment(2),
        cwd=tmp_path,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out" / "gpu-check.json").read_text(encoding="utf-8"))
    parts = {part["name"]: part for part in told["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == {
        **{"doctor": "passed", "tests": "skipped", "losses": "passed", "speed": "passed"},
        **{"trainer": "passed", "qlora": "passed", "saves": "passed", "ladder": "passed"},
    }
    found = {
        name: {one["name"]: one for one in part["figures"] if one["status"] == "passed"}
        for name, part in parts.items()
    }
    plain = [one for one in found["losses"].values() if "fp32" in one["name"]]
    assert len(plain) == 7
    assert all(one["gap"] < 1e-5 for one in plain)
    assert found["speed"]["bf16"]["tokens_per_s"] > 0
    assert set(found["qlora"]) > {"1 blocks", "2 blocks"}
    assert found["trainer"]["bf16, Trainer with peft"]["hpc_tune_over_it"] > 0
    for save in ("a save in the background", "a save for which training waits"):
        assert found["saves"][save]["save_bytes"] > 0
    rungs = [rung.partition(": ")[2] for rung in found["ladder"]["60% of the peak"]["rungs"]]
    names = ["trim", "shrink_buffers", "save_in_pieces", *["split_micro_batches"] * 2]
    assert rungs == [*names, "recompute", "move_optimizer"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "gpu-check.json",
        "gpu-check.log",
    ], "what the parts wrote is gone"
