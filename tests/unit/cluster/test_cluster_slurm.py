"""Slurm: the batch script that ``submit`` writes, and the lists of nodes that srun gives."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

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
    options=["--constraint=a100&ib", "--exclusive", "-w=n[1-4]"],
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
        "#SBATCH --constraint=a100&ib",
        "#SBATCH --exclusive",
        "#SBATCH -w=n[1-4]",
        "set -eo pipefail",
        f"cd '{tmp_path}/my run'",
        "module load python/3.11 openmpi",
        "source './site env.sh'",
        "source '/home/me/my venv/bin/activate'",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit --cpus-per-task",
        "export SLURM_EXPORT_ENV=ALL  # else --export=NONE hides all of this from the ranks",
        "exec python -m hpc_tune supervise --launch 'srun --mpi=pmix apptainer exec --nv "
        "'\"'\"'my image.sif'\"'\"'' --python python --config a.yaml train.seed=3",
    ]


def test_spare_nodes_are_asked_for_besides(tmp_path):
    text = render(SlurmConfig(nodes=4, spare_nodes=1), [], tmp_path)
    assert "#SBATCH --nodes=5\n" in text
    with pytest.raises(ConfigError, match="slurm.min_nodes=5 exceeds slurm.nodes=4"):
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


def test_gpus_that_a_site_wants_asked_for_otherwise_are_asked_for_once(tmp_path):
    settings = SlurmConfig(gpus_per_node=4, options=["--gres=gpu:4"])
    script = render(settings, [], tmp_path)
    assert "#SBATCH --gres=gpu:4\n" in script
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "--gpus-per-node" not in script


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--nodes=3", "use slurm.nodes"),
        ("-N3", "use slurm.nodes"),
        ("--array=0-3", "slurm/sweep.sh"),
        ("constraint=gpu", "is not an sbatch option"),
        ("--comment=a b", "is not an sbatch option"),
        ("--mail-user=me@x\n#SBATCH --uid=0", "is not an sbatch option"),
    ],
)
def test_an_option_that_contradicts_the_script_is_refused(option, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        SlurmConfig(options=[option])


def test_an_option_of_sbatch_that_is_no_setting_is_told_where_it_belongs(capsys):
    assert cli.main(["submit", "--dry-run", "slurm.mail_user=me@site"]) == 2
    assert "slurm.options=[--mail-user=...]" in capsys.readouterr().err


def test_a_dry_run_prints_and_submits_nothing(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["submit", "--dry-run", "slurm.nodes=3", "train.seed=7"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n" in shown
    assert shown.endswith("slurm.nodes=3 train.seed=7\n")
    assert cli.main(["submit"]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An sbatch that takes every script; its file has the variables that it was given."""
    (tmp_path / "sbatch").write_text(
        f"#!/bin/sh\ncat >{tmp_path}/script; env >{tmp_path}/given; echo 7\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "from").mkdir()
    monkeypatch.chdir(tmp_path / "from")
    return tmp_path / "given"


def test_a_script_has_the_bytes_of_the_folder_whatever_they_are(tmp_path, monkeypatch, sbatch):
    folder = os.fsencode(tmp_path) + b"/gr\xf6sse"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    assert cli.main(["submit", "run.name=für"]) == 0
    script = (tmp_path / "script").read_bytes()
    assert folder in script
    assert "run.name=für".encode() in script


def test_an_environment_that_is_not_there_is_warned_of_before_the_job_waits(
    capsys, tmp_path, sbatch
):
    (tmp_path / "here" / "bin").mkdir(parents=True)
    (tmp_path / "here" / "bin" / "activate").write_text("")
    assert cli.main(["submit", f"slurm.venv={tmp_path}/here"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["submit", f"slurm.venv={tmp_path}/mine"]) == 0
    said = capsys.readouterr()
    assert f"there is no {tmp_path}/mine/bin/activate on this host" in said.err
    assert "submitted job 7" in said.out


def test_a_job_submitted_from_inside_of_another_gets_none_of_its_variables(
    capsys, sbatch, monkeypatch
):
    of_the_job = {
        "SLURM_JOB_ID": "5", "SLURM_MEM_PER_CPU": "4000", "SLURM_CPU_BIND": "quiet",
        "SRUN_CPUS_PER_TASK": "2", "PMI_FD": "9", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    of_the_user = {"SLURM_CONF": "/etc/s.conf", "SLURM_CLUSTERS": "big", "OMPI_MCA_pml": "ucx"}
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in (of_the_user | {"SLURM_CPU_BIND": "none"}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["submit", "slurm.nodes=2"]) == 0
    assert "SLURM_CPU_BIND=none\n" in sbatch.read_text()  # no job: it is the user's own
    assert capsys.readouterr().err == ""
    for name, value in of_the_job.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["submit"]) == 0
    given = dict(line.split("=", 1) for line in sbatch.read_text().splitlines() if "=" in line)
    assert not given.keys() & of_the_job.keys()
    assert given.items() >= of_the_user.items()
    assert (
        "this shell is in job 5; the new job does not get its 6 variables"
        in capsys.readouterr().err
    )


def test_the_folder_of_the_output_is_made_before_slurm_needs_it(capsys, tmp_path, sbatch):
    assert cli.main(["submit", "slurm.output=logs/a/%x-%j.out"]) == 0
    assert (tmp_path / "from" / "logs" / "a").is_dir()
    assert capsys.readouterr().err == ""
    assert cli.main(["submit", "slurm.output=logs/%j/out"]) == 0
    assert "Slurm makes no folders" in capsys.readouterr().err
    (tmp_path / "from" / "file").touch()
    sbatch.unlink()
    assert cli.main(["submit", "slurm.output=file/%j.out"]) == 2
    assert "its folder cannot be made (" in capsys.readouterr().err
    assert not sbatch.exists()


def test_a_folder_of_the_output_that_the_locale_cannot_spell_is_refused(
    capsys, monkeypatch, sbatch
):
    def mkdir(folder, **_):
        str(folder).encode("ascii")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert cli.main(["submit", "slurm.output=größe/%j.out"]) == 2
    assert "its folder cannot be made ('ascii' codec" in capsys.readouterr().err


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
