import dataclasses

import pytest

from hpc_tune.train import metrics
from hpc_tune.train.metrics import Metrics, StepMetrics

STEP = StepMetrics(
    **{field.name: None for field in dataclasses.fields(StepMetrics)}
    | {"loss": 1.0, "tokens_per_s": 10.0, "step_s": 2.0, "sent_bytes": {}, "expected_bytes": {}},
)


@pytest.mark.parametrize(
    ("comm_s", "advise", "num"), [(1.5, True, 1), (0.9, True, 0), (1.5, False, 0)]
)
def test_messages_that_take_most_of_a_step_are_said_once(
    tmp_path, monkeypatch, comm_s, advise, num
):
    said = []
    monkeypatch.setattr(metrics.log, "warning", lambda text, *values: said.append(text % values))
    told = Metrics(tmp_path, 5, 0, advise=advise)
    for step in range(1, 6):
        told.step(dataclasses.replace(STEP, step=step, comm_s=comm_s))
    told.close()
    assert len(said) == num
    assert all("75% of a step goes to messages: parallel=auto" in text for text in said)
    assert list(told.steps_s) == [2.0] * 5
