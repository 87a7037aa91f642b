import dataclasses

import pytest

from hpc_tune.rundir.json_lines import StepMetrics
from hpc_tune.train import metrics
from hpc_tune.train.metrics import MetricsWriter

STEP = StepMetrics(
    **{field.name: None for field in dataclasses.fields(StepMetrics)}
    | {"loss": 1.0, "tokens_per_s": 10.0, "step_s": 2.0, "sent_bytes": {}, "expected_bytes": {}}
    | {"most_work_s": 0.5, "least_work_s": 0.4, "slowest_rank": 3}
)


@pytest.mark.parametrize(
    ("comm_s", "advise", "num"), [(1.5, True, 1), (0.9, True, 0), (1.5, False, 0)]
)
def test_messages_that_take_most_of_a_step_are_said_once(
    tmp_path, monkeypatch, comm_s, advise, num
):
    said = []
    monkeypatch.setattr(metrics.log, "warning", lambda text, *values: said.append(text % values))
    told = MetricsWriter(tmp_path, 5, 0, warns_of_comm_time=advise)
    for step in range(1, 6):
        told.record_step(dataclasses.replace(STEP, step=step, comm_s=comm_s))
    told.close()
    assert len(said) == num
    assert all("75% of a step goes to messages: parallel=auto" in text for text in said)
    assert list(told.steps_s) == [2.0] * 5


@pytest.mark.parametrize(("slowest_s", "said"), [(0.5, "75% in messages"), (1.9, "waiting for")])
def test_a_slow_rank_is_not_taken_for_slow_messages(tmp_path, caplog, slowest_s, said):
    told = MetricsWriter(tmp_path, 5, 0, warns_of_comm_time=True)
    with caplog.at_level("INFO", logger="hpc_tune"):
        for step in (1, 2):
            told.record_step(
                dataclasses.replace(STEP, step=step, comm_s=1.5, most_work_s=slowest_s)
            )
    told.close()
    assert said in caplog.text
    assert ("75% waiting for rank 3" in caplog.text) == (slowest_s == 1.9)
    assert ("goes to messages" in caplog.text) == (slowest_s == 0.5)
