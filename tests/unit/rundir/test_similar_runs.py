"""What is said of a path that is no run."""

import pytest

from hpc_tune import cli
from hpc_tune.rundir.json_lines import RESOLVED_CONFIG


@pytest.fixture
def runs(tmp_path):
    for name in ("taste", "small"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / RESOLVED_CONFIG).write_text("")
    return tmp_path / "runs"


COMMANDS = [
    ["report"],
    ["watch"],
    ["inspect"],
    ["export", "--to", "adapter"],
    ["generate", "--prompt", "x", "--run"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_run_mistyped_and_a_folder_of_runs_are_told_which_runs_there_are(command, runs, capsys):
    assert cli.main([*command, str(runs / "smal")]) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {runs}/small?\n")
    assert cli.main([*command, str(runs)]) == 2
    said = capsys.readouterr().err
    assert "; the newest runs in it: " in said
    assert f"{runs}/taste" in said
    assert cli.main([*command, str(runs.parent / "elsewhere")]) == 2
    assert "did you mean" not in capsys.readouterr().err
