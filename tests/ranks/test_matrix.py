"""Architectures trained in each method and layout beside stock transformers, peft and AdamW."""

import json

import pytest
from transformers import AutoConfig

from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.stock_reference import write_small_model
from tests.support.ranks import HANG_S, ROOT, python, rank_environment, run_ranks
from tests.support.training import SMALL, launch_runs, losses

# As python tools/matrix.py, but for the imports of its ranks.
MATRIX = """
import json, sys
sys.path.insert(0, "tools")
import matrix
matrix.PYTHON = json.loads(sys.argv[1])
sys.exit(matrix.main(sys.argv[2:]))
"""


def table_of(*words, limit_s=HANG_S):
    """Return {(architecture, method): cells} and all that was printed."""
    argv = [*python(), "-c", MATRIX, json.dumps(python()), *words]
    done = run_ranks(argv, rank_environment(1), limit_s, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [line[2:-2].split(" | ") for line in done.stdout.splitlines() if "| " in line]
    return {(row[0], row[2]): row[3:] for row in rows[1:]}, done.stdout


def test_a_sample_of_architectures_has_the_losses_of_stock_tools_in_every_layout():
    table, shown = table_of("--only", "lfm2", "bert", "--methods", "lora")
    assert set(table) == {("lfm2", "lora")}
    one, shard, tensor, pipeline, zero3, *experts = table["lfm2", "lora"]
    assert max(map(float, (one, shard, zero3))) < 1e-5
    assert (tensor, pipeline, *experts) == ("-", "-", "", "")
    assert "**packed** (lfm2): three documents in one row have the loss" in shown
    assert "**in all** (bert): " in shown


@pytest.mark.full
def test_a_mixture_has_the_losses_of_stock_tools_with_adapters_on_attention_and_on_experts():
    table, _ = table_of("--only", "mixtral", "--methods", "lora", "experts")
    assert set(table) == {("mixtral", "lora"), ("mixtral", "experts")}
    for cells in table.values():
        of_mixture = [cell for cell in cells if cell != "-"]
        assert len(of_mixture) == 7
        assert max(map(float, of_mixture)) < 1e-5


@pytest.mark.full
def test_experts_that_call_a_layer_as_often_as_tokens_want_do_not_hold_up_zero_3():
    table, _ = table_of("--only", "longcat_flash", "--methods", "full", "--layouts", "zero3")
    assert float(table["longcat_flash", "full"][4]) < 1e-4


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_no_architecture_is_trained_wrong_or_crashes():
    # docs/models.md has all methods: python tools/matrix.py --out docs/models.md
    table, _ = table_of("--methods", "lora", "full", limit_s=5000)
    assert len({name for name, _ in table}) >= 60


@pytest.mark.full
def test_a_run_that_cannot_pack_says_so_trains_row_by_row_and_goes_on(tmp_path):
    model = tmp_path / "lfm2"
    write_tiny_model(model)
    (model / "model.safetensors").unlink()
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    write_small_model(AutoConfig.for_model("lfm2", **layers), model)
    words = [*SMALL, f"model.path={model}", "data.path=builtin:pydocs:heldout"]
    words += ["batch.global_size=2", "train.max_steps=4"]
    words += ["checkpoint.every_steps=2", "tune.method=lora", f"run.dir={tmp_path / 'run'}"]
    jobs = [{"overrides": words, "stop_after": 2}, {"overrides": words}]
    stopped, ended = launch_runs(2, jobs, tmp_path)
    assert (stopped.code, ended.code) == (75, 0), stopped.output + ended.output
    for one in (stopped, ended):
        assert "data.packing is off, one document per row" in one.output
        assert "[rank 1]" not in one.output  # what all ranks have is said once
        assert "of a row" in one.output or "in one row" in one.output
    assert "resumed from" in ended.output
    alone = [*words, "data.packing=false", f"run.dir={tmp_path / 'alone'}"]
    (said,) = launch_runs(2, [{"overrides": alone}], tmp_path)
    assert said.code == 0, said.output
    assert "data.packing is off" not in said.output
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
