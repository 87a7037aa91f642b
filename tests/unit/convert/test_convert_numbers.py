"""Numbers mean the same however people write them: 0.0001, 1e-4, 1.0e-4, "1e-4"."""

from decimal import Decimal

import pytest
import yaml

from hpc_tune.convert import convert as command
from tests.support.converting import (
    AXOLOTL_LORA,
    AXOLOTL_QLORA,
    FACTORY_LORA,
    TUNE_LORA,
    on_four_ranks,
    settings,
)

LOWEST = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
WSD = {
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.1},
}
RESTARTS = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}
HELD_OUT = {"val_size": 0.05, "eval_steps": 20, "early_stopping_steps": 3}


def as_text(value):
    """Return numbers as YAML 1.1 reads 1e-4 and 8e+0: as text."""
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{Decimal(repr(value)).normalize():e}" if is_number else value


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        *((FACTORY_LORA, changes) for changes in (LOWEST, WSD, RESTARTS, HELD_OUT)),
        (FACTORY_LORA, {"max_steps": -1, "num_train_epochs": 3, "save_steps": 0.1}),
        (FACTORY_LORA, {"neftune_noise_alpha": 0, "lora_dropout": 0.0, "val_size": 0}),
        (FACTORY_LORA, {"stage": "dpo", "pref_beta": 0.2, "pref_ftx": 0.5}),
        (TUNE_LORA, {"max_steps_per_epoch": 100, "optimizer__betas": [0.9, 1e-3]}),
        (
            AXOLOTL_LORA,
            {"early_stopping_patience": 2, "profiler_steps": 2, "profiler_steps_start": 5},
        ),
        (AXOLOTL_QLORA, {"lr_scheduler_kwargs": {"min_lr_rate": 1e-1}}),
    ],
)
def test_numbers_that_are_text_to_yaml_give_the_same_settings(text, changes):
    tree = yaml.safe_load(text)
    numbers = {key: value for key, value in tree.items()} | changes
    assert on_four_ranks(text, as_text(numbers)) == on_four_ranks(text, numbers)


def test_a_config_that_writes_1e_5_ends_at_the_rate_that_it_says(tmp_path):
    file = tmp_path / "theirs.yaml"
    body = FACTORY_LORA.replace("1.0e-4", "1e-4").replace(
        "lr_scheduler_type: cosine",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}",
    )
    file.write_text(body)
    came = settings(command.convert_config(command.read_yaml(file), 1))
    assert came["optim.lr"] == 1e-4
    assert came["optim.min_lr_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["1e5", 20261128, "2026-11-28"])
def test_a_name_that_looks_like_a_number_stays_a_name(name):
    tree = yaml.safe_load(f"{FACTORY_LORA}\nrun_name: {name}\n")
    assert settings(command.convert_config(tree, 1))["run.name"] == str(name)


def test_steps_with_a_point_are_steps_and_end_the_run():
    came = on_four_ranks(FACTORY_LORA, {"max_steps": 200.0})
    assert came["train.max_steps"] == 200
    assert "train.epochs" not in came


def test_the_report_shows_a_number_as_it_was_written():
    tree = yaml.safe_load(FACTORY_LORA.replace("1.0e-4", "1e-4"))
    mapped_keys = "\n".join(map(str, command.convert_config(tree, 1).mapped_keys))
    assert "learning_rate = 1e-4 -> optim.lr = 0.0001" in mapped_keys


def test_null_in_a_list_is_no_layer_called_none():
    came = on_four_ranks(FACTORY_LORA, {"lora_target": ["q_proj", None]})
    assert came["tune.targets"] == ["q_proj"]


def test_names_of_files_that_look_like_numbers_stay_names_in_a_list_too():
    dataset = {"path": "json", "data_files": ["0042", "1e3", None], "type": "chat_template"}
    came = on_four_ranks(AXOLOTL_LORA, {"datasets": [dataset]})
    assert came["data.path"] == ["0042", "1e3"]
