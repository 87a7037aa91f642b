"""Architectures trained in each method and layout beside stock transformers, peft and AdamW."""

import subprocess
import sys

import pytest

from tests.support.ranks import HANG_S, ROOT, rank_environment

MATRIX = ROOT / "tools" / "matrix.py"


def table_of(*words, limit_s=HANG_S):
    """Return {(architecture, method): cells} and all that was printed."""
    done = subprocess.run(
        [sys.executable, str(MATRIX), *words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=rank_environment(1),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "| " in line]
    return {(row[0], row[2]): row[3:] for row in rows[1:]}, done.stdout


def test_a_sample_of_architectures_has_the_losses_of_stock_tools_in_every_layout():
    table, shown = table_of("--only", "qwen3", "lfm2", "mixtral", "--methods", "lora")
    assert set(table) == {("qwen3", "lora"), ("lfm2", "lora")}
    assert all(float(cell) < 1e-5 for cell in table["qwen3", "lora"])
    one, shard, tensor, pipeline, zero3 = table["lfm2", "lora"]
    assert max(map(float, (one, shard, zero3))) < 1e-5
    assert (tensor, pipeline) == ("-", "-")
    assert "lfm2, packed: three documents in one row have the loss" in shown
    assert "**mixtral** is refused: " in shown


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_no_architecture_is_trained_wrong_or_crashes():
    table, _ = table_of(limit_s=5000)
    assert len({name for name, _ in table}) >= 60
