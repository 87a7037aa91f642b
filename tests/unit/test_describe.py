"""What a run says before it begins."""

import pytest

from hpc_tune.config.load import load_config
from hpc_tune.train.describe import few_steps


@pytest.mark.parametrize(
    ("total_steps", "rows_per_epoch", "warmup", "words"),
    [
        (1, 40, 0, ["an epoch is 40 rows, 1 updates"]),
        (3, 130, 100, ["an epoch is 130 rows, 3 updates", "ends at 3e-05 and never reaches"]),
        (60, 40, 10, []),
        (40, 2200, 10, []),
        (40, 2200, 40, ["optim.warmup_steps=40 in a run of 40 steps"]),
    ],
)
def test_too_few_updates_are_told_of(total_steps, rows_per_epoch, warmup, words):
    settings = ["batch.global_size=64", f"optim.warmup_steps={warmup}", "optim.lr=1e-3"]
    told = list(few_steps(load_config(None, settings), total_steps, rows_per_epoch))
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))
