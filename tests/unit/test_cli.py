"""Which processes run a command."""

import pytest

from hpc_tune import cli


@pytest.fixture
def as_rank(monkeypatch):
    """Set what mpirun sets for a rank of two."""

    def start(rank):
        for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2)):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))

    return start


def test_a_command_for_one_process_is_run_by_rank_0_alone(as_rank, capsys):
    as_rank(1)
    assert cli.main(["inspect", "nowhere"]) == 0
    assert capsys.readouterr() == ("", "")
    as_rank(0)
    assert cli.main(["inspect", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "inspect needs one process: only rank 0 runs it" in said
    assert "nowhere: neither a run directory" in said


def test_several_supervisors_are_refused(as_rank, capsys):
    as_rank(0)
    assert cli.main(["supervise", "--launch", "mpirun -np 2"]) == 2
    assert "start it once, without a launcher" in capsys.readouterr().err


def test_a_launcher_that_is_not_there_is_named(capsys, tmp_path):
    words = ["supervise", "--launch", "nowhere -np 2", f"run.dir={tmp_path}/run"]
    assert cli.main(words) == 2
    assert "--launch nowhere: there is no such command" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
