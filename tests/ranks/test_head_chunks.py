"""A head that is trained is called for chunks of tokens, of which ranks have more or fewer."""

import pytest

from tests.support.training import SMALL, launch_runs, losses, many_runs, worst_gap
from tests.support.untied import write_untied

pytest.importorskip("deepspeed")

LAYOUTS = {
    "zero 3": ["parallel.zero_stage=3"],
    "zero 3 x context": ["parallel.zero_stage=3", "parallel.context=2"],
    "shard": ["parallel.shard=2"],
}
METHODS = {
    "tied": ["tune.method=full"],
    "untied": ["tune.method=full"],
    "adapters": ["tune.method=lora", "tune.modules_to_save=[lm_head]"],
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_other_numbers_of_chunks_have_the_losses_of_one_rank(layout, tmp_path):
    model = write_untied(tmp_path)

    def job(name, *more):
        words = [*SMALL, "train.max_steps=3", f"run.dir={tmp_path / name}", *more]
        return words if name.startswith("tied") else [*words, f"model.path={model}"]

    alone = [{"overrides": job(name, *words)} for name, words in METHODS.items()]
    assert many_runs(1, alone, tmp_path) == [0] * len(alone)
    jobs = [
        {"overrides": job(f"{name} cut", *words, *LAYOUTS[layout])}
        for name, words in METHODS.items()
    ]
    ended = launch_runs(2, jobs, tmp_path, 300.0, "tests.support.small_head_chunks")
    assert [(one.code, one.output[-2000:]) for one in ended if one.code] == []
    for name in METHODS:
        assert worst_gap(losses(tmp_path / f"{name} cut"), losses(tmp_path / name)) < 1e-6
