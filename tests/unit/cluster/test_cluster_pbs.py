"""PBS: the batch script that ``submit`` writes, how it submits the next job, and who is asked."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpc_tune import cli
from hpc_tune.cluster.pbs import PBS, render
from hpc_tune.cluster.schedulers import choose_section, read_exit_margin_s
from hpc_tune.config.load import load_config
from hpc_tune.config.scheduler import PbsConfig, SlurmConfig
from hpc_tune.errors import ConfigError

WHOLE = PbsConfig(
    account="physics",
    queue="capacity",
    nodes=4,
    spare_nodes=1,
    gpus_per_node=4,
    cpus_per_task=8,
    memory="480gb",
    walltime="12:30:00",
    leave_before="10m",
    filesystems="home:eagle",
    place="scatter:excl",
    job_name="a-run",
    output="logs",
    modules=["conda"],
    env_file="site env.sh",
    venv="/home/me/.venv",
    image="/soft/torch.sif",
    binds=["/eagle"],
    options=["-k doe", "-m ae", "-lsingularity=True"],
)


def test_all_that_is_set_stands_in_the_script(tmp_path):
    words = ["--config", "a.yaml", "train.seed=3"]
    lines = render(WHOLE, words, tmp_path, {"SCRATCH": "/eagle/my own"}).splitlines()
    assert lines == [
        "#!/bin/bash -l",
        "#PBS -A physics",
        "#PBS -q capacity",
        "#PBS -l select=5:ncpus=32:mpiprocs=4:ngpus=4:mem=480gb",
        "#PBS -l place=scatter:excl",
        "#PBS -l walltime=12:30:00",
        "#PBS -l filesystems=home:eagle",
        "#PBS -N a-run",
        f"#PBS -o {tmp_path}/logs/",
        "#PBS -j oe",
        "#PBS -r y",
        "#PBS -k doe",
        "#PBS -m ae",
        "#PBS -lsingularity=True",
        "set -eo pipefail",
        f"cd {tmp_path}",
        "export SCRATCH='/eagle/my own'",
        "module load conda",
        "source './site env.sh'",
        "source /home/me/.venv/bin/activate",
        "export HPC_TUNE_JOB_SCRIPT=$0 HPC_TUNE_LEAVE_BEFORE=600",
        "walltime=$(qstat -f \"$PBS_JOBID\" | sed -n 's/^ *Resource_List.walltime = //p') || true",
        'IFS=: read -r hours minutes seconds <<<"${walltime:-12:30:00}"',
        "export HPC_TUNE_JOB_END=$(($(date +%s) + 10#$hours * 3600 + 10#$minutes * 60 + "
        "10#$seconds))",
        "exec python -m hpc_tune supervise --launch 'mpiexec -n 16 --ppn 4 apptainer exec --nv "
        f"--bind {tmp_path}:{tmp_path},/eagle:/eagle /soft/torch.sif' --python python "
        "--config a.yaml train.seed=3",
    ]


def test_what_is_not_set_does_not(tmp_path):
    text = render(PbsConfig(), [], tmp_path, {})
    assert "#PBS -l select=1:ncpus=1:mpiprocs=1\n" in text
    for word in ("-A", "-q", "-o", "filesystems", "ngpus", "mem=", "module", "--python", "None"):
        assert f" {word}" not in text


@pytest.mark.parametrize(
    ("chunk", "select"), [("ncpus=64:system=polaris", "2:ncpus=64:system=polaris"), ("", "2")]
)
def test_a_site_may_want_other_words_for_a_node(tmp_path, chunk, select):
    text = render(PbsConfig(nodes=2, gpus_per_node=4, chunk=chunk), [], tmp_path, {})
    assert f"#PBS -l select={select}\n" in text
    assert "--launch 'mpiexec -n 8 --ppn 4'" in text


def test_another_launcher_stands_in_the_place_of_mpiexec(tmp_path):
    text = render(PbsConfig(launch="mpirun -np 4 --map-by ppr:2:node"), [], tmp_path, {})
    assert "--launch 'mpirun -np 4 --map-by ppr:2:node'" in text


@pytest.mark.parametrize(
    ("walltime", "clock"), [("3600", "01:00:00"), ("90:30", "01:30:30"), ("168:00:00", "168:00:00")]
)
def test_a_walltime_is_read_as_pbs_reads_it(tmp_path, walltime, clock):
    text = render(PbsConfig(walltime=walltime), [], tmp_path, {})
    assert f"-l walltime={walltime}\n" in text
    assert f"${{walltime:-{clock}}}" in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("pbs.walltime=4h", "pbs.walltime='4h': PBS takes HH:MM:SS"),
        ("pbs.walltime=240", "is 4m00s to PBS, and the run stops pbs.leave_before=5m00s before"),
        ("pbs.memory=480", "pbs.memory='480': PBS takes a whole number with kb, mb, gb or tb"),
        ("pbs.chunk=2:ncpus=4", "expected resources of one node, such as ncpus=64"),
        ("pbs.min_nodes=2", "pbs.min_nodes=2 exceeds pbs.nodes=1: expected at most"),
        ("pbs.queue='a b'", "pbs.queue='a b': a line of #PBS takes letters"),
        ("pbs.image=t.sqsh", "t.sqsh is an image for Pyxis, which needs srun; found pbs.launch="),
        ("pbs.modules=[-x]", "pbs.modules=['-x']: expected names"),
        ("pbs.project=x", "pass other qsub options by pbs.options=['-X VALUE']"),
        ("parallel.shard=8", "and the pbs section asks for 1 (pbs.nodes=1 of 1); for example pbs."),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_says_what_was_expected(capsys, setting, said):
    assert cli.main(["submit", "--dry-run", "--scheduler", "pbs", setting]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-A mine", "use pbs.account"),
        ("-qdebug", "use pbs.queue"),
        ("-l walltime=1:00:00", "use pbs.walltime"),
        ("-l singularity=True,filesystems=home", "use pbs.filesystems"),
        ("-J 0-3", "a job array is not supported"),
        ("-W depend=afterok:7", "each job waits for the one before it"),
        ("-V", "is not a qsub option with its value"),
        ("--export=ALL", "is not a qsub option with its value"),
        ("-k doe\n#PBS -u root", "is not a qsub option with its value"),
    ],
)
def test_an_option_that_contradicts_the_script_is_refused(option, said):
    with pytest.raises(ValidationError, match=said):
        PbsConfig(options=[option])


@pytest.mark.parametrize("field", ["account", "queue", "place", "filesystems", "job_name"])
@pytest.mark.parametrize("text", ["x -u root", "x\n#PBS -u root", "$(id)", "`id`", "x;id", "#"])
def test_no_setting_can_bring_another_directive_into_the_script(tmp_path, field, text):
    with pytest.raises(ConfigError, match=f"pbs.{field}="):
        render(PbsConfig(**{field: text}), [], tmp_path, {})


@pytest.fixture(scope="module")
def printing(tmp_path_factory):
    """A folder with a python that prints its arguments."""
    folder = tmp_path_factory.mktemp("quoting")
    program = folder / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$SCRATCH" "$@"\n')
    program.chmod(0o755)
    return folder


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(TEXT), TEXT)
def test_every_argument_and_variable_comes_through_the_shell(printing, arguments, value):
    script = render(PbsConfig(), arguments, printing, {"SCRATCH": value})
    env = {"PATH": f"{printing}:{os.environ['PATH']}", "PBS_JOBID": "7"}
    done = subprocess.run(["bash"], input=script.encode(), env=env, capture_output=True, check=True)
    shown = done.stdout.decode().split("\0")
    assert (shown[0], shown[6:-1]) == (value, arguments)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that puts programs on a PATH that has no other; its file of what they got."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.chdir(tmp_path)

    def has(**scripts):
        for name, script in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
            (programs / name).chmod(0o755)
        return tmp_path / "given"

    return has


QSUB = '[ "$1" = --version ] && echo pbs_version = 23.06.06 && exit\ncat >given; echo 7.head'
SBATCH = "cat >given; echo 8"


def test_the_scheduler_is_that_of_the_host_or_that_whose_section_is_given(host, capsys):
    given_to = host(qsub=QSUB)
    assert cli.main(["submit", "run.dir=r"]) == 0
    said = capsys.readouterr()
    assert "submitted job 7.head, run directory r; qstat 7.head shows its state" in said.out
    assert "no pbs setting is given" in said.err
    assert "#PBS -j oe\n" in given_to.read_text()
    host(sbatch=SBATCH)
    assert cli.main(["submit"]) == 2
    said = capsys.readouterr().err
    assert "this host has sbatch and qsub, and the configuration has neither a slurm" in said
    assert "--scheduler slurm or --scheduler pbs" in said
    for words, number in (
        (["pbs.nodes=2"], "7.head"),
        (["slurm.nodes=2"], "8"),
        (["--scheduler", "slurm"], "8"),
        (["--scheduler", "pbs", "slurm.nodes=2"], "7.head"),
    ):
        assert cli.main(["submit", *words]) == 0
        assert f"submitted job {number}," in capsys.readouterr().out
    assert cli.main(["submit", "pbs.nodes=2", "slurm.nodes=2"]) == 2
    assert "has a slurm and a pbs section" in capsys.readouterr().err


def test_a_section_for_each_of_two_clusters_is_taken_where_its_scheduler_is(host, capsys):
    both = ["pbs.nodes=2", "slurm.nodes=3"]
    assert cli.main(["submit", "--dry-run", *both]) == 2
    assert "this host has neither sbatch nor qsub" in capsys.readouterr().err
    host(qsub=QSUB)
    assert cli.main(["submit", "--dry-run", *both]) == 0
    assert "#PBS -l select=2:" in capsys.readouterr().out


def test_without_qsub_the_script_can_be_looked_at_alone(host, capsys):
    assert cli.main(["submit", "pbs.nodes=2", "--dry-run"]) == 0
    assert cli.main(["submit", "pbs.nodes=2"]) == 2
    assert "qsub is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("qsub", "said"),
    [
        ("echo Version: 6.1.3 >&2", "it says 'Version: 6.1.3'. Torque and Grid Engine are not"),
        ("exit 1", "it says 'nothing'"),
    ],
)
def test_the_qsub_of_another_scheduler_is_refused_by_name(host, capsys, qsub, said):
    host(qsub=qsub)
    assert cli.main(["submit", "pbs.nodes=2"]) == 2
    assert said in capsys.readouterr().err


def test_what_qsub_says_against_a_job_is_told(host, capsys):
    refuses = "qsub: Resource: filesystems is required to be set."
    host(qsub=f"[ $# -gt 0 ] && echo pbs_version && exit\necho {refuses} >&2; exit 1")
    assert cli.main(["submit", "pbs.nodes=2"]) == 2
    assert f"qsub refused: {refuses}" in capsys.readouterr().err


def test_variables_that_the_configuration_names_come_into_the_job(capsys, tmp_path, monkeypatch):
    values = {"SCRATCH": "/eagle/me", "PROJ": "p", "HF_HOME": "/hub", "HOME": "/h", "OTHER": "x"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    text = (
        "run: {dir: $SCRATCH/a}  # not $OTHER\ndata: {cache: '${oc.env:PROJ}/b'}\npbs: {nodes: 2}"
    )
    (tmp_path / "a.yaml").write_text(text)
    words = ["--config", f"{tmp_path}/a.yaml", "checkpoint.resume=$HOME/run"]
    assert cli.main(["submit", "--dry-run", *words]) == 0
    exported = [line for line in capsys.readouterr().out.splitlines() if line.startswith("export ")]
    assert exported[:3] == ["export PROJ=p", "export SCRATCH=/eagle/me", "export HF_HOME=/hub"]
    assert exported[3].startswith("export HPC_TUNE_JOB_SCRIPT")


def test_the_folder_of_the_output_is_made_before_the_job_needs_it(host, capsys, tmp_path):
    host(qsub=QSUB)
    assert cli.main(["submit", "pbs.output=logs/a"]) == 0
    assert (tmp_path / "logs" / "a").is_dir()
    assert f"#PBS -o {tmp_path}/logs/a/\n" in (tmp_path / "given").read_text()
    (tmp_path / "file").touch()
    assert cli.main(["submit", "pbs.output=file"]) == 2
    assert "pbs.output=file: its folder cannot be made (" in capsys.readouterr().err


SHOWN = """\
Job Id: 7.head
    queue = small
    Account_Name = physics
    Resource_List.filesystems = home:eagle
    Resource_List.ncpus = 64
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=32:mpiprocs=4:n
\tgpus=4
    Resource_List.walltime = 02:00:00
"""


def test_the_next_job_waits_for_this_one_and_asks_for_the_same(host, tmp_path, monkeypatch):
    (tmp_path / "7.head.SC").touch()
    (tmp_path / "shown").write_text(SHOWN)
    monkeypatch.setenv("PBS_O_QUEUE", "prod")
    assert PBS.requeue_command("7.head") == [], "a script of the user's own has --requeue"
    monkeypatch.setenv("HPC_TUNE_JOB_SCRIPT", str(tmp_path / "7.head.SC"))
    host(qsub=QSUB, qstat=f'[ "$*" = "-f 7.head" ] && cat {tmp_path}/shown')
    assert PBS.requeue_command("7.head") == [
        *("qsub", "-W", "depend=afterany:7.head", "-q", "prod", "-A", "physics"),
        *("-l", "walltime=02:00:00", "-l", "select=2:ncpus=32:mpiprocs=4:ngpus=4"),
        *("-l", "place=scatter", "-l", "filesystems=home:eagle", f"{tmp_path}/7.head.SC"),
    ]
    host(qstat="exit 1")  # the directives of the script say all of it, too
    assert PBS.requeue_command("7.head")[3:] == ["-q", "prod", f"{tmp_path}/7.head.SC"]


def test_a_job_that_cannot_submit_the_next_one_says_so_at_its_start(host, monkeypatch, caplog):
    monkeypatch.setenv("HPC_TUNE_JOB_SCRIPT", "/bin/sh")
    assert PBS.requeue_command("7.head") == []
    assert "qsub is not on PATH here: the next job cannot be submitted" in caplog.text
    host(qsub=QSUB)
    monkeypatch.setenv("HPC_TUNE_JOB_SCRIPT", "-bash")
    assert PBS.requeue_command("7.head") == []
    assert "-bash is not a file" in caplog.text


def test_supervise_takes_the_section_of_the_job_that_it_is_in():
    slurm_config, pbs_config = SlurmConfig(spare_nodes=1), PbsConfig(spare_nodes=2)
    in_pbs, in_slurm = {"PBS_JOBID": "7.head"}, {"SLURM_JOB_ID": "7"}
    assert choose_section(slurm_config, pbs_config, in_pbs) is pbs_config
    assert choose_section(slurm_config, pbs_config, in_slurm) is slurm_config
    assert choose_section(slurm_config, PbsConfig(), in_pbs) is slurm_config, "as it was"
    assert choose_section(SlurmConfig(), pbs_config, {}) is pbs_config


def test_the_script_says_how_long_before_its_end_ranks_are_asked():
    assert read_exit_margin_s({}, 60.0) == 60.0
    assert read_exit_margin_s({"HPC_TUNE_LEAVE_BEFORE": "300"}, 60.0) == 300.0
    assert read_exit_margin_s({"HPC_TUNE_LEAVE_BEFORE": "0"}, 60.0) == 60.0


def test_a_plan_is_made_for_the_nodes_of_the_pbs_section(tmp_path):
    (tmp_path / "a.yaml").write_text("pbs: {nodes: 2, gpus_per_node: 4, walltime: 12:00:00}\n")
    config = load_config(str(Path(tmp_path / "a.yaml")))
    assert (config.job.section, config.job.nodes, config.pbs.walltime) == ("pbs", 2, "12:00:00")
    assert PbsConfig(memory="480gb").memory_bytes == 480 << 30
