"""What the end of a run says."""

import shlex
from pathlib import Path

from hpc_tune.train.run import command_to_try_model


def test_the_command_that_a_run_proposes_works_where_its_folder_has_spaces_and_brackets():
    words = shlex.split(command_to_try_model(Path("runs/my first [v1]")))
    assert words[3:6] == ["generate", "--run", "runs/my first [v1]"]
