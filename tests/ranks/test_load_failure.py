"""A rank that fails while the model is loaded ends the job at once, whatever the layout."""

import re
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file

from hpc_tune.model.builtin import write_tiny_model
from tests.support.ranks import HANG_S, mpirun
from tests.support.training import SMALL, outcome

# In which a rank would wait for its neighbors before it learns that one has failed.
TIMEOUT_S = 45
MODEL = "/proc/self/cwd/tiny"  # of each rank's own folder
LAYOUTS = {
    "replicate": ["parallel.replicate=2"],
    "shard, dora": ["parallel.shard=2", "tune.method=dora"],
    "shard, full": ["parallel.shard=2", "tune.method=full"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2"],
    "pipeline, full": ["parallel.pipeline=2", "tune.method=full"],
    "zero 1": ["parallel.zero_stage=1"],
    "zero 3": ["parallel.zero_stage=3"],
}
ALWAYS = ("zero 3",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders with a model of the same name: one is whole, the other cut off."""
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    write_tiny_model(whole / "tiny")
    shutil.copytree(whole / "tiny", cut / "tiny")
    weights = cut / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    return whole, cut


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.full) for x in LAYOUTS]
)
def test_a_rank_whose_weights_are_cut_off_ends_the_job_at_once_in_its_own_words(
    layout, folders, tmp_path
):
    if "zero" in layout:
        pytest.importorskip("deepspeed")
    whole, cut = folders
    words = ["-m", "tests.support.failing_load", "1", str(cut), *SMALL, *LAYOUTS[layout]]
    words += [f"run.dir={tmp_path}", f"model.path={MODEL}", f"run.timeout={TIMEOUT_S}"]
    began_s = time.monotonic()
    done = mpirun(2, [*words, "data.path=builtin:pydocs:heldout"], timeout=HANG_S, cwd=whole)
    print(f"{layout}: {time.monotonic() - began_s:.1f} s\n{done.stderr}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = re.findall(r"^error on rank (\d+) on \S+: (.*)", done.stderr, flags=re.MULTILINE)
    assert [rank for rank, _ in said] == ["1"]
    assert re.match(rf"{MODEL}/model.safetensors: .* cannot be read", said[0][1]), said
    ended = outcome(tmp_path)
    assert (ended["status"], ended["reason"]) == ("failed", said[0][1])
    assert (ended["rank"], ended["exit_code"]) == (1, 2)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_that_is_nan_is_named_by_a_rank_that_holds_it(layout, folders, tmp_path):
    if "zero" in layout:
        pytest.importorskip("deepspeed")
    shutil.copytree(folders[0] / "tiny", tmp_path / "tiny")
    file, name = tmp_path / "tiny" / "model.safetensors", "model.layers.3.mlp.down_proj.weight"
    weights = load_file(file)
    place = [n - 1 for n in weights[name].shape]
    weights[name][-1, -1] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    words = ["-m", "hpc_tune", *SMALL, *LAYOUTS[layout], f"run.dir={tmp_path / 'run'}"]
    words += [f"model.path={tmp_path / 'tiny'}", "data.path=builtin:pydocs:heldout"]
    done = mpirun(2, words, timeout=HANG_S)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = re.findall(r"^error on rank \d+ on \S+: (.*)", done.stderr, flags=re.MULTILINE)
    assert len(said) == 1
    assert said[0].startswith(f"{file}: {name} has nan at {place}, expected finite numbers"), said
