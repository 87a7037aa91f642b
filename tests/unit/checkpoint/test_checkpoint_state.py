import json
from dataclasses import replace

import pytest

from hpc_tune.checkpoint.state import RunState, check_resume
from hpc_tune.config.load import setting_metadata
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import CheckpointError, ConfigError

# Every other value a field can have that is not its default.
# Another value, with which it would be another run.
REFUSED = {
    "tune.objective": "dpo",
    "tune.beta": 0.5,
    "tune.gamma": 0.5,
    "tune.sft_weight": 0.5,
    "tune.label_smoothing": 0.1,
    "tune.desirable_weight": 0.5,
    "tune.undesirable_weight": 0.5,
    "tune.method": "full",
    "tune.rank": 8,
    "tune.alpha": 1.0,
    "tune.rank_pattern": {"q_proj": 8},
    "tune.expert_rank": 4,
    "tune.alpha_pattern": {"q_proj": 8.0},
    "tune.rslora": True,
    "tune.dropout": 0.5,
    "tune.targets": ["q_proj"],
    "tune.modules_to_save": ["norm"],
    "tune.trainable_tokens": [5],
    "data.seq_len": 7,
    "data.packing": False,
    "batch.global_size": 3,
    "train.seed": 9,
    "model.rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
# Settings with which the run goes on, and differs from an uninterrupted one.
WARNED = {
    "model.dtype": "bf16",
    "tune.base_dtype": "fp8",
    "tune.param_dtype": "bf16",
    "tune.neftune_alpha": 5.0,
    "tune.router_aux_loss": 0.1,
    "tune.router_z_loss": 0.1,
    "optim.name": "adamw_8bit",
    "optim.lr": 1.0,
    "optim.reference_batch": 32,
    "optim.batch_scaling": "linear",
    "optim.lora_b_ratio": 16.0,
    "optim.schedule": "linear",
    "optim.decay_ratio": 0.2,
    "optim.restarts": 3,
    "optim.warmup_steps": 5,
    "optim.warmup_ratio": 0.5,
    "optim.min_lr_ratio": 0.5,
    "optim.beta1": 0.5,
    "optim.beta2": 0.5,
    "optim.eps": 1e-3,
    "optim.weight_decay": 0.1,
    "optim.clip_norm": 0.5,
}
OTHER = REFUSED | WARNED


def state(config=None, **changes):
    values = {
        "step": 10,
        "total_steps": 40,
        "model_identity": "abc",
        "loader": {"row": 3},
        "layout": {"replicate": 2, "shard": 1},
        "micro_size": 4,
        "config": (config or RunConfig()).model_dump(),
    }
    return RunState(**{**values, **changes})


def warnings_of(saved, config, identity, total_steps):
    return check_resume(saved, config.model_dump(), identity, total_steps)


def with_field(name, value):
    part, _, field = name.partition(".")
    return RunConfig.model_validate({part: {field: value}})


def test_every_setting_says_what_a_resume_may_change():
    """Settings that are neither refused nor warned of may change without a word."""
    kinds = {name: metadata.resume for name, metadata in setting_metadata().items()}
    assert {name for name, kind in kinds.items() if kind == "same"} == REFUSED.keys()
    assert {name for name, kind in kinds.items() if kind == "warn"} == WARNED.keys()


def test_the_same_configuration_goes_on_without_a_word():
    assert warnings_of(state(), RunConfig(), "abc", 40) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_makes_another_run_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}: .* in the checkpoint, .* now"):
        warnings_of(state(), with_field(name, OTHER[name]), "abc", 40)


def test_a_setting_that_an_earlier_version_did_not_have_was_its_default():
    saved = state()
    del saved.config["tune"]["rslora"]
    assert warnings_of(saved, RunConfig(), "abc", 40) == []
    with pytest.raises(ConfigError, match=r"tune\.rslora: False in the checkpoint, True now"):
        warnings_of(saved, with_field("tune.rslora", True), "abc", 40)


def test_the_same_targets_in_another_order_are_the_same():
    before, again, fewer = (
        with_field("tune.targets", targets)
        for targets in (["q_proj", "v_proj"], ["v_proj", "q_proj", "v_proj"], ["v_proj"])
    )
    assert warnings_of(state(before), again, "abc", 40) == []
    with pytest.raises(ConfigError, match=r"tune\.targets: .* in the checkpoint, .* now"):
        warnings_of(state(before), fewer, "abc", 40)


@pytest.mark.parametrize("name", WARNED)
def test_a_change_of_course_warns_with_both_values(name):
    part, _, field = name.partition(".")
    before = RunConfig().model_dump()[part][field]
    assert warnings_of(state(), with_field(name, OTHER[name]), "abc", 40) == [
        f"{name}: {before} in the checkpoint, {OTHER[name]} now"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch.micro_size", 2),
        ("parallel.shard", 4),
        ("run.dir", "/elsewhere"),
        ("parallel.recompute", "full"),
        ("run.device", "cpu"),
        ("checkpoint.keep", 9),
    ],
)
def test_where_and_how_it_runs_is_free(name, value):
    assert warnings_of(state(), with_field(name, value), "abc", 40) == []


def test_another_length_warns_since_the_learning_rate_follows_it():
    [warning] = warnings_of(state(), RunConfig(), "abc", 50)
    assert "50 steps now and had 40" in warning


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"model\.path: it is not the checkpoint's model"):
        warnings_of(state(), RunConfig(), "xyz", 40)


def test_another_model_of_the_same_shapes_is_refused_where_both_samples_are_known():
    dump = RunConfig().model_dump()
    known = state(model_sample="a")
    with pytest.raises(ConfigError, match=r"model\.path: it has other weights than the checkpoint"):
        check_resume(known, dump, "abc", 40, "b")
    for saved, sample in ((known, "a"), (known, ""), (state(), "b")):
        assert check_resume(saved, dump, "abc", 40, sample) == []


def test_all_differences_are_listed_at_once_with_what_to_do():
    config = RunConfig.model_validate({"tune": {"rank": 1}, "train": {"seed": 2}})
    with pytest.raises(ConfigError) as caught:
        warnings_of(state(), config, "xyz", 40)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == [
        "  - model.path",
        "  - tune.rank",
        "  - train.seed",
    ]
    assert lines[-1] == "Use the old values, or another run.dir."


def test_a_state_survives_the_manifest():
    config = RunConfig.model_validate({"tune": {"targets": ["q_proj"], "alpha": 0.1}})
    saved = state(config)
    back = RunState.from_json(json.loads(json.dumps(saved.to_json())), "there")
    assert back == saved
    assert warnings_of(back, config, "abc", 40) == []


@pytest.mark.parametrize("change", [{"surprise": 1}, {"step": None}], ids=["unknown", "missing"])
def test_a_state_of_another_shape_is_refused_with_its_place(change):
    values = {**state().to_json(), **change}
    if values["step"] is None:
        del values["step"]
    with pytest.raises(CheckpointError, match="there: its state cannot be used"):
        RunState.from_json(values, "there")


def test_settings_that_are_no_more_are_left_out_of_a_saved_configuration_and_said(caplog):
    config = with_field("train.seed", 7).model_dump()
    config["run"]["wandb"] = False
    assert replace(state(), config=config).run_config("there").train.seed == 7
    assert "there: removed settings are ignored: run.wandb" in caplog.text
