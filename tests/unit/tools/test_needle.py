import json
import sys

import pytest
import torch

from hpc_tune.model.builtin import write_tiny_model
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import needle  # noqa: E402


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("length", "digits"), [(128, 2), (600, 4)])
def test_each_row_has_the_fact_at_its_depth_and_asks_for_it_at_the_end(tmp_path, length, digits):
    needle.write_rows(tmp_path, length, rows=50, held_out=10, digits=digits)
    learned = rows_of(tmp_path / "train.jsonl")
    asked = {depth: rows_of(tmp_path / f"depth-{depth:03}.jsonl") for depth in needle.DEPTHS}
    assert [len(learned), *map(len, asked.values())] == [50, *[10] * 5]
    for row in [*learned, *(row for rows in asked.values() for row in rows)]:
        prompt, key = row["prompt"], row["completion"].removeprefix("The pass key is ")[:-1]
        assert (prompt.count("The pass key is "), len(key)) == (1, digits)
        assert f"{row['completion']} Remember it. {key} is the pass key." in prompt
        assert prompt.endswith("What is the pass key?")
        assert length - 45 <= len(prompt) == row["length"] <= length
    places = {d: {row["prompt"].index("The pass key") for row in rows} for d, rows in asked.items()}
    assert places[0] == {0}
    assert max(places[25]) < min(places[75])
    assert all(row["prompt"].endswith(". What is the pass key?") for row in asked[100])
    numbers = {row["completion"] for row in learned}
    assert not numbers & {row["completion"] for rows in asked.values() for row in rows}


def test_a_model_that_has_learned_nothing_knows_no_number(tmp_path, capsys, monkeypatch):
    write_tiny_model(tmp_path / "model")
    needle.write_rows(tmp_path / "rows", 100, rows=1, held_out=2, digits=2)
    torch.manual_seed(0)
    monkeypatch.setattr(
        "sys.argv", ["needle", "score", *map(str, (tmp_path / "model", tmp_path / "rows"))]
    )
    needle.main()
    said = capsys.readouterr().out.splitlines()
    assert said == [f"depth {depth:3}%: 0 of 2 right" for depth in needle.DEPTHS]
