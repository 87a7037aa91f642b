"""What is trained beside adapters: one loss in every layout, and the predicted bytes."""

import pytest

from tests.support.training import SMALL, losses, many_runs, rows, worst_gap
from tests.support.untied import write_untied

LAYOUTS = {
    "replicate": ["parallel.replicate=2"],
    "shard": ["parallel.shard=2"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
    "zero 2": ["parallel.zero_stage=2"],
    "zero 3": ["parallel.zero_stage=3"],
}
SAMPLE, OTHERS = ("shard", "tensor", "zero 3"), ("replicate", "pipeline", "zero 2")
OPTIONS = {
    "modules": "tune.modules_to_save=[embed_tokens,lm_head,norm]",
    "tokens": "tune.trainable_tokens=[40,99,258]",
    "patterns": "tune.rank_pattern={layers.0.mlp.*: 8, q_proj: 2}",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "names"),
    [
        pytest.param("modules", SAMPLE, id="modules, a sample"),
        pytest.param("modules", OTHERS, id="modules, the others"),
        *(
            pytest.param(option, tuple(LAYOUTS), id=option)
            for option in OPTIONS
            if option != "modules"
        ),
    ],
)
def test_layouts_change_no_loss_and_send_the_predicted_bytes(option, names, tmp_path):
    model = write_untied(tmp_path / "untied")
    words = [*SMALL, f"model.path={model}", "data.path=builtin:pydocs:heldout", OPTIONS[option]]
    words += ["batch.global_size=4", "train.max_steps=4"]
    words += ["optim.lr=1e-3", "tune.rank=4"]
    jobs = [{"overrides": [*words, f"run.dir={tmp_path / 'alone'}", "batch.micro_size=4"]}]
    assert many_runs(1, jobs, tmp_path) == [0]
    jobs = [{"overrides": [*words, f"run.dir={tmp_path / k}", *LAYOUTS[k]]} for k in names]
    assert many_runs(2, jobs, tmp_path, timeout=600.0) == [0] * len(names)
    for name in names:
        assert worst_gap(losses(tmp_path / name), losses(tmp_path / "alone")) < 1e-5, name
        sent, expected = (rows(tmp_path / name, f"{k}_bytes") for k in ("sent", "expected"))
        for kind in sent[2] if "zero" not in name else ():
            assert sent[2][kind] == pytest.approx(expected[2][kind], rel=0.02), (name, kind)
    # A checkpoint of one layout goes on in another.
    resumed = [*words, f"run.dir={tmp_path / 'resumed'}"]
    stopped = [{"overrides": [*resumed, "parallel.tensor=2"], "stop_after": 2}]
    assert many_runs(2, stopped, tmp_path) == [75]
    assert many_runs(2, [{"overrides": [*resumed, "parallel.pipeline=2"]}], tmp_path) == [0]
    assert worst_gap(losses(tmp_path / "resumed"), losses(tmp_path / "alone")) < 1e-5
