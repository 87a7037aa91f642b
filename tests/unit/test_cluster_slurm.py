"""Slurm: the batch script that ``submit`` writes, and the lists of nodes that srun gives."""

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_tune import cli
from hpc_tune.cluster.slurm import expand_nodelist, render
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.errors import ConfigError

WHOLE = SlurmConfig(
    account="physics",
    partition="gpu",
    qos="long",
    nodes=2,
    gpus_per_node=8,
    cpus_per_task=7,
    memory="700G",
    time="12:00:00",
    leave_before="10m",
    job_name="a-run",
    output="logs/%x-%j.out",
    modules=["python/3.11", "openmpi"],
    env_file="site env.sh",
    venv="/home/me/my venv",
    container="apptainer exec --nv 'my image.sif'",
    launch="srun --mpi=pmix",
)


def test_all_that_is_set_stands_in_the_script(tmp_path):
    lines = render(WHOLE, ["--config", "a.yaml", "train.seed=3"], tmp_path / "my run").splitlines()
    assert lines == [
        "#!/bin/bash",
        "#SBATCH --account=physics",
        "#SBATCH --partition=gpu",
        "#SBATCH --qos=long",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=7",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --mem=700G",
        "#SBATCH --time=12:00:00",
        "#SBATCH --job-name=a-run",
        "#SBATCH --output=logs/%x-%j.out",
        "#SBATCH --signal=B:USR1@600",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        "set -eo pipefail",
        f"cd '{tmp_path}/my run'",
        "module load python/3.11 openmpi",
        "source './site env.sh'",
        "source '/home/me/my venv/bin/activate'",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not know otherwise",
        "exec python -m hpc_tune supervise --launch 'srun --mpi=pmix apptainer exec --nv "
        "'\"'\"'my image.sif'\"'\"'' --python python --config a.yaml train.seed=3",
    ]


def test_spare_nodes_are_asked_for_besides(tmp_path):
    text = render(SlurmConfig(nodes=4, spare_nodes=1), [], tmp_path)
    assert "#SBATCH --nodes=5\n" in text
    with pytest.raises(ConfigError, match="slurm.min_nodes=5 of slurm.nodes=4"):
        render(SlurmConfig(nodes=4, spare_nodes=1, min_nodes=5), [], tmp_path)


def test_what_is_not_set_does_not(tmp_path):
    text = render(SlurmConfig(), [], tmp_path)
    for word in ("--account", "--gpus", "--mem", "module", "source", "--python", "None"):
        assert word not in text


@pytest.fixture(scope="module")
def printing(tmp_path_factory):
    """A folder with a python that prints its arguments."""
    folder = tmp_path_factory.mktemp("quoting")
    program = folder / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    return folder


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_every_argument_comes_through_the_shell(printing, arguments):
    script = render(SlurmConfig(), arguments, printing)
    env = {"PATH": f"{printing}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(["bash"], input=script.encode(), env=env, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[5:-1] == arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("account", "a b"),
        ("partition", "gpu\n#SBATCH --uid=0"),
        ("job_name", "1:00 #"),
        ("qos", "'"),
    ],
)
def test_what_a_line_of_sbatch_cannot_hold_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"slurm.{name}="):
        render(SlurmConfig(**{name: value}), [], tmp_path)


def test_a_dry_run_prints_and_submits_nothing(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["submit", "--dry-run", "slurm.nodes=3", "train.seed=7"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n" in shown
    assert shown.endswith("slurm.nodes=3 train.seed=7\n")
    assert cli.main(["submit"]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_an_environment_that_is_not_there_is_warned_of_before_the_job_waits(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "sbatch").write_text("#!/bin/sh\ncat >/dev/null; echo 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "here" / "bin").mkdir(parents=True)
    (tmp_path / "here" / "bin" / "activate").write_text("")
    assert cli.main(["submit", f"slurm.venv={tmp_path}/here"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["submit", f"slurm.venv={tmp_path}/mine"]) == 0
    said = capsys.readouterr()
    assert f"there is no {tmp_path}/mine/bin/activate on this host" in said.err
    assert "submitted job 7" in said.out


def test_a_job_gets_all_files_of_settings_in_their_order(capsys, tmp_path):
    for name in ("site", "mine"):
        (tmp_path / f"{name}.yaml").write_text(f"run: {{dir: {name}}}\n")
    named = [word for name in ("site", "mine") for word in ("--config", f"{tmp_path}/{name}.yaml")]
    assert cli.main(["submit", "--dry-run", *named, "train.seed=7"]) == 0
    assert capsys.readouterr().out.endswith(f" {' '.join(named)} train.seed=7\n")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("node[008-010],gpu-a", ["node008", "node009", "node010", "gpu-a"]),
        ("r[1-2]c[0-1]x,login", ["r1c0x", "r1c1x", "r2c0x", "r2c1x", "login"]),
    ],
)
def test_slurms_node_lists_are_expanded(text, hosts):
    assert expand_nodelist(text) == hosts
