"""Each rank's own work in ranks.jsonl."""

import json

import pytest

from hpc_tune.rundir.json_lines import RANKS_FILE
from hpc_tune.train.metrics import RankWorkWriter


def lines_of(folder):
    return [json.loads(line) for line in (folder / RANKS_FILE).read_text().splitlines()]


@pytest.mark.parametrize(("total_steps", "lines"), [(7, 7), (200, 200), (399, 399), (100_000, 200)])
def test_the_work_of_each_rank_is_written_a_few_hundred_times_at_most(tmp_path, total_steps, lines):
    work = RankWorkWriter(2, tmp_path, 0, total_steps)
    for step in range(1, total_steps + 1):
        work.add(step, [2.0, 9.0])
    work.close()
    assert len(lines_of(tmp_path)) == lines
    assert lines_of(tmp_path)[-1] == {"step": total_steps, "work_s": [2.0, 9.0]}


def test_a_line_has_the_mean_of_the_steps_since_the_line_before(tmp_path):
    work = RankWorkWriter(2, tmp_path, 0, 400)  # every second step
    for step, work_s in enumerate([1.0, 2.0, 3.0, 5.0], start=1):
        work.add(step, [work_s, 0.0])
    assert [line["work_s"][0] for line in lines_of(tmp_path)] == [1.5, 4.0]


def test_a_resumed_run_keeps_what_it_does_not_repeat(tmp_path):
    (tmp_path / RANKS_FILE).write_text(
        '{"step": 1, "work_s": [1, 1]}\n{"step": 2, "work_s": [1, 1]}\n'
    )
    RankWorkWriter(2, tmp_path, 1, 10).close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1]


def test_a_world_of_one_and_ranks_that_write_nothing_have_no_file(tmp_path):
    RankWorkWriter(1, tmp_path, 0, 10).add(1, [1.0])
    RankWorkWriter(2, None, 0, 10).add(1, [1.0, 1.0])
    assert not (tmp_path / RANKS_FILE).exists()
