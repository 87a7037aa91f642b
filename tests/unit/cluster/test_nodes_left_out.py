"""Which nodes a job goes on with after a failure, with stand-ins for Slurm's programs."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from hpc_tune.cluster import slurm
from hpc_tune.cluster.launchers import read_hosts, restrict_to_nodes
from hpc_tune.cluster.nodes import JobNodes, LauncherOutputParser, find_lost_hosts
from hpc_tune.config.parallel import ParallelConfig, fit_layout
from hpc_tune.config.scheduler import SlurmConfig

KILLED = """\
srun: error: n2: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-26T18:50:14 ***
srun: error: n1: tasks 0-1: Terminated
srun: error: n3: tasks 4-5: Killed
"""
NODE_FAILED = """\
srun: error: Node failure on n2
srun: error: n1: tasks 0-1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
"""
PRRTE = """\
prterun noticed that process rank 1 with PID 6 on node h2 exited on signal 9 (Killed).
"""
PRRTE_LOST = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-h1-7@0,0] on node h1
  Remote daemon: [prterun-h1-7@0,1] on node h2
"""


@pytest.mark.parametrize(
    ("text", "has_report", "names"),
    [
        (KILLED, True, ["n2"]),
        (NODE_FAILED, True, ["n2"]),
        (PRRTE, True, ["h2"]),
        (PRRTE_LOST, True, ["h2"]),
        ("srun: error: gpu[03,05]: tasks 4-7: Bus error", True, ["gpu03", "gpu05"]),
        ("srun: error: n2: tasks 2-3: Exited with exit code 9", False, ["n2"]),
        # The run has told why, and which node is at fault: none.
        ("srun: error: n2: tasks 2-3: Exited with exit code 1", True, []),
        ("srun: error: n2: tasks 2-3: Exited with exit code 75", False, []),
        ("srun: error: n2: task 2: Out Of Memory", False, []),
        ("step 20  loss 1.2  a text about tasks 4-7: Killed", False, []),
    ],
)
def test_the_launcher_names_the_victim_and_not_the_bystanders(text, has_report, names):
    lines = LauncherOutputParser()
    for line in text.splitlines():
        lines.read(line)
    assert list(lines.find_suspects(has_report)) == names


def test_the_report_of_a_failed_run_names_hosts():
    assert list(find_lost_hosts({"lost_hosts": ["n3"], "reason": "x"})) == ["n3"]
    reason = "host n2 (ranks 2, 3) has not answered in 20 s (run.host_timeout): it is down"
    assert list(find_lost_hosts({"reason": reason})) == ["n2"]
    assert list(find_lost_hosts({"reason": "rank 1 (pid 7 on host n4) is gone"})) == ["n4"]
    assert find_lost_hosts({"reason": "KeyError: 'host'"}) == {}


@pytest.mark.parametrize(
    ("axes", "num_ranks", "expected"),
    [
        ({}, 7, {}),
        ({"zero_stage": 3}, 7, {}),
        ({"replicate": 2, "shard": 8}, 8, {"replicate": 1}),
        ({"replicate": 2, "shard": 8}, 16, {}),
        ({"replicate": 2, "shard": 16}, 24, {"shard": 12}),
        ({"replicate": 1, "shard": 32}, 24, {"shard": 24}),
        ({"shard": 16}, 8, {"shard": 8}),
        ({"shard": 16, "expert": 8}, 24, {"shard": 8}),
        ({"replicate": 1, "shard": 32, "expert": 8}, 24, {"shard": 24}),
        ({"replicate": 1, "shard": 16, "expert": 8}, 12, {"shard": 12, "expert": 4}),
        ({"shard": 8, "expert": 8}, 6, {"shard": 6, "expert": 2}),
        ({"expert": 4}, 6, {"expert": 2}),  # the other axes are chosen
        ({"expert": 4, "replicate": 4}, 12, {"replicate": 3}),
        ({"replicate": 4}, 24, {}),
        ({"replicate": 4}, 6, {"replicate": 3}),
        ({"tensor": 4, "replicate": 2}, 4, {"replicate": 1}),
        ({"tensor": 4, "pipeline": 2}, 12, None),
        ({"tensor": 4}, 2, None),
    ],
)
def test_the_largest_layout_that_divides_fewer_ranks(axes, num_ranks, expected):
    parallel = ParallelConfig(**axes)
    found = fit_layout(parallel, num_ranks)
    assert found == expected
    if found:
        new = parallel.model_copy(update=found)
        sizes = [new.replicate, new.shard, new.tensor, new.pipeline]
        product = 1
        for size in sizes:
            product *= size or 1
        assert num_ranks % product == 0
        assert None in sizes[:2] or product == num_ranks
        assert new.shard is None or new.shard % new.expert == 0


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        (
            "srun --kill-on-bad-exit=1 -N 3 -n6 --cpu-bind none --nodelist=n1,n2,n3 python",
            "srun",
            "srun --nodes=2 --ntasks=4 --nodelist=n1,n3 --kill-on-bad-exit=1 --cpu-bind none "
            "python",
        ),
        (
            "srun --mpi=pmix -w n1 apptainer exec -w image python",
            "srun",
            "srun --nodes=2 --ntasks=4 --nodelist=n1,n3 --mpi=pmix apptainer exec -w image python",
        ),
        (
            "mpirun --mca btl tcp --hostfile all -np 6 --bind-to none python",
            "openmpi",
            "mpirun --hostfile F -n 4 --mca btl tcp --bind-to none python",
        ),
        (
            "mpirun -launcher ssh -hosts n1:2,n2:2,n3:2 -iface eth0 -np 6 python",
            "hydra",
            "mpirun -f F -n 4 -launcher ssh -iface eth0 python",
        ),
        ("mpiexec -n 6 --ppn 2 python", "pals", "mpiexec --hostfile F -n 4 --ppn 2 python"),
        # A flag has no value, so the program after it, and its options, are not the launcher's.
        (
            "srun -lu --overlap numactl -N 0 python -n 3",
            "srun",
            "srun --nodes=2 --ntasks=4 --nodelist=n1,n3 -lu --overlap numactl -N 0 python -n 3",
        ),
        (
            "srun -n6 numactl -N 0 python",
            "srun",
            "srun --nodes=2 --ntasks=4 --nodelist=n1,n3 numactl -N 0 python",
        ),
        (
            "mpirun -np 6 --oversubscribe numactl -H -f x python",
            "openmpi",
            "mpirun --hostfile F -n 4 --oversubscribe numactl -H -f x python",
        ),
    ],
)
def test_a_launcher_is_told_its_nodes_in_place_of_its_own(words, kind, expected):
    found = restrict_to_nodes(words.split(), kind, {"n1": 2, "n3": 2}, "F")
    assert found == expected.split()


def test_hosts_are_read_as_mpirun_and_pbs_write_them(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"n1 slots=4\n# n9, f\xfcr Tests\nn2:2\n\nn3.site.org\nn3.site.org\n")
    expected = {"n1": 4, "n2": 2, "n3.site.org": None}
    assert read_hosts(["mpirun", "--hostfile", str(file), "-np", "6", "python"], {}) == expected
    assert read_hosts(["mpirun", "-np", "6", "python"], {"PBS_NODEFILE": str(file)}) == expected
    assert read_hosts(["mpirun", "--host", "n1:4,n2", "python"], {}) == {"n1": 4, "n2": None}
    assert read_hosts(["mpirun", "-np", "6", "python"], {}) == {}


class Cluster:
    """Slurm's programs, which say what a test has written, and srun, which can refuse nodes."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.states = dict.fromkeys(("n1", "n2", "n3"), "mixed")
        self.mute, self.nodes = [], "n[1-3]"
        self.write()
        answers = {
            "scontrol": 'echo "   NodeList=$(cat nodes)"',
            "sinfo": "cat states",
            "squeue": "cat steps 2>/dev/null",
            "scancel": 'echo "$@" >> cancelled; rm -f steps',
            "srun": 'case "$*" in *guard*) echo "$@" >> guards; exec sleep 3;; esac\n'
            'for node in $(cat mute); do case "$*" in *=$node" "*) exit 1;; esac; done',
        }
        for name, does in answers.items():
            program = folder / name
            program.write_text(f"#!/bin/sh\ncd {folder}\n{does}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.environ = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_TASKS_PER_NODE": "2(x3)",
            "SLURMD_NODENAME": "n1",
        }

    def write(self):
        (self.folder / "nodes").write_text(self.nodes)
        (self.folder / "mute").write_text("\n".join(self.mute))
        lines = [f"{name} {state}" for name, state in self.states.items()]
        (self.folder / "states").write_text("\n".join(lines))

    def of(self, spares=0, least=1, launch="srun python", **axes):
        slurm = SlurmConfig(spare_nodes=spares, min_nodes=least)
        return JobNodes(launch.split(), self.environ, slurm, ParallelConfig(**axes))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return Cluster(tmp_path, monkeypatch)


def test_a_job_without_losses_is_started_as_it_was_asked_for_and_outlives_a_node(cluster):
    command = cluster.of().command()
    no_kill, name, *program = command.words[1:]
    assert (no_kill, program) == ("--no-kill", ["python"])
    assert name.startswith("--job-name=hpc_tune-")
    assert list(command.nodes) == ["n1", "n2", "n3"]
    spared = cluster.of(spares=1).command()
    assert spared.words[1:4] == ["--nodes=2", "--ntasks=4", "--nodelist=n1,n2"]


def test_what_slurm_and_a_probe_find_goes_before_what_was_accused(cluster):
    nodes = cluster.of()
    cluster.states["n3"] = "down*"
    cluster.write()
    found, lost = nodes.exclude_faulty_nodes(
        ["n1", "n2", "n3"], {"n1": "the launcher says: x"}, False
    )
    assert (list(found), lost) == (["n3"], True)
    assert found["n3"] == "Slurm says that it is down and does not respond"
    assert cluster.of()._slurm.find_unhealthy_nodes(["n1"]) == {}
    cluster.states["n1"] = "mixed*"
    cluster.write()
    assert cluster.of()._slurm.find_unhealthy_nodes(["n1"]) == {
        "n1": "Slurm says that it does not respond"
    }
    cluster.states["n1"] = "mixed"
    cluster.mute = ["n2"]
    cluster.write()
    found, lost = nodes.exclude_faulty_nodes(["n1", "n2"], {}, False)
    assert (list(found), lost) == (["n2"], True)
    assert "probe" in found["n2"]
    command = nodes.command()
    assert (list(command.nodes), command.num_missing_nodes) == (["n1"], 2)
    assert command.summary == "on 1 of 3 nodes, 2 ranks"


def test_a_node_that_slurm_has_taken_from_the_job_is_not_used(cluster):
    nodes = cluster.of()
    cluster.nodes = "n[1,3]"
    cluster.write()
    found, lost = nodes.exclude_faulty_nodes(["n1", "n2", "n3"], {}, True)
    assert (found, lost) == ({"n2": "Slurm has taken it out of the job"}, True)


def test_accusations_against_all_nodes_say_nothing_and_a_spare_is_tried_after_a_second_time(
    cluster,
):
    nodes, used = cluster.of(spares=1), ["n1", "n2"]
    assert nodes.exclude_faulty_nodes(used, {"n1": "x", "n2": "x"}, False) == ({}, False)
    found, lost = nodes.exclude_faulty_nodes(used, {}, False)
    assert (list(found), lost) == (["n2"], False)
    assert list(nodes.command().nodes) == ["n1", "n3"]
    # No spare is left.
    assert nodes.exclude_faulty_nodes(["n1", "n3"], {}, False) == ({}, False)


def test_an_accused_node_is_found_by_its_name_with_and_without_a_domain(cluster):
    accused = {"n2.site.org": "the report"}
    found, lost = cluster.of(spares=1).exclude_faulty_nodes(
        ["n1", "n2"], accused, False, certain_suspects=[*accused]
    )
    assert (found, lost) == ({"n2": "the report"}, False)


@pytest.mark.parametrize("progressed", [False, True])
def test_a_node_that_answers_is_tried_once_more_before_it_is_left_out(cluster, caplog, progressed):
    nodes, used = cluster.of(spares=1), ["n1", "n2"]
    assert nodes.exclude_faulty_nodes(used, {"n1": "killed"}, progressed) == ({}, False)
    assert "node n1 is tried once more before it is left out: killed" in caplog.text
    assert list(nodes.command().nodes) == used
    assert nodes.exclude_faulty_nodes(used, {"n2": "killed"}, progressed) == ({}, False), (
        "another's first"
    )
    assert nodes.exclude_faulty_nodes(used, {"n1": "killed"}, progressed) == (
        {"n1": "killed"},
        True,
    )
    assert list(nodes.command().nodes) == ["n2", "n3"]


def test_nodes_that_are_lost_or_whose_ranks_exit_without_a_word_are_not_tried_again():
    for text, has_report, names in (
        (KILLED, False, set()),
        (NODE_FAILED, True, {"n2"}),
        ("srun: error: n2: tasks 2-3: Exited with exit code 9", False, {"n2"}),
        ("srun: error: n2: tasks 2-3: Exited with exit code 9", True, set()),
    ):
        lines = LauncherOutputParser()
        for line in text.splitlines():
            lines.read(line)
        assert lines.find_certain_suspects(has_report) == names


def test_probes_that_fail_everywhere_accuse_nobody(cluster):
    cluster.mute = ["n1", "n2", "n3"]
    cluster.write()
    assert cluster.of().exclude_faulty_nodes(["n1", "n2", "n3"], {}, False) == ({}, False)


def test_on_fewer_nodes_a_layout_that_divides_and_not_below_the_fewest(cluster):
    nodes = cluster.of(least=2, tensor=2, replicate=3)
    nodes.left_out["n3"] = "x"
    assert nodes.explain_node_shortage() is None
    assert list(nodes.command().settings) == ["parallel.replicate=2"]
    nodes.left_out["n2"] = "x"
    assert nodes.explain_node_shortage() == "1 of 3 nodes are left, fewer than slurm.min_nodes=2"
    # Four ranks are a multiple of a stage's, six are not: one node waits.
    nodes = JobNodes(
        ["srun", "python"],
        cluster.environ | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x4)"},
        SlurmConfig(),
        ParallelConfig(tensor=4),
    )
    nodes.left_out["n4"] = "x"
    assert (list(nodes.command().nodes), nodes.command().num_missing_nodes) == (["n1", "n2"], 2)


@pytest.mark.parametrize(
    ("launch", "own"),
    [
        ("srun python", None),
        ("srun -J mine python", "mine"),
        ("mpirun -np 6 python", "prted"),
        ("site/start-ranks python3.11", "python3.11"),
    ],
)
def test_steps_of_the_launcher_end_before_the_next_start_and_those_of_others_do_not(
    cluster, launch, own
):
    nodes = cluster.of(launch=launch)
    words = [word for word in nodes.command().words if word.startswith("--job-name=")]
    name = own or words[0].partition("=")[2]
    assert nodes.command().words.count(f"--job-name={name}") == (own is None)
    steps = ["7.batch batch", "7.3 bash", f"7.4 {name}", "7.5 another-run", f"70.1 {name}"]
    steps += ["7.6 hpc_tune-guard"]
    (cluster.folder / "steps").write_text("\n".join(steps))
    nodes.end_steps()
    assert (cluster.folder / "cancelled").read_text().split() == ["7.4"]


def test_one_guard_watches_the_first_node_from_another(cluster):
    nodes, guards = cluster.of(), cluster.folder / "guards"

    def guarding_nodes(num):
        until_s = time.monotonic() + 20
        while not guards.exists() or guards.read_text().count("--nodelist") < num:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return re.findall(r"--nodelist=(\S+)", guards.read_text())

    for _ in range(2):
        nodes.command()
    assert guarding_nodes(1) == ["n2"]
    nodes.left_out["n2"] = "x"
    nodes.command()
    assert guarding_nodes(2) == ["n2", "n3"]


@pytest.mark.parametrize(
    ("state", "nodes", "requeues"),
    [
        ("RUNNING Reason=None", "n2", True),
        ("RUNNING Reason=None", "n[1-2]", False),
        ("FAILED Reason=JobLaunchFailure", "n2", True),
        ("COMPLETING Reason=None", "n2", False),  # its user has ended it
        ("CANCELLED Reason=None", "n2", False),
    ],
)
def test_the_guard_requeues_a_job_whose_first_node_is_lost_and_no_other(
    tmp_path, state, nodes, requeues
):
    scontrol = tmp_path / "scontrol"
    hosts = "n1\\nn2" if "[" in nodes else nodes
    scontrol.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"show job") printf '   JobState={state}\\n   ReqNodeList=n1\\n   NodeList={nodes}\\n' ;;
"show hostnames") printf '{hosts}\\n' ;;
*) echo "$@" >> {tmp_path}/asked ;;
esac
"""
    )
    scontrol.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["sh", "-c", slurm._GUARD_SCRIPT, "guard", "n1", "7", "0.05"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    try:
        process.wait(timeout=20 if requeues else 0.5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(timeout=20)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * requeues


def test_mpirun_without_a_list_of_hosts_is_started_as_it_is(tmp_path, caplog):
    nodes = JobNodes(["mpirun", "-np", "4", "python"], {}, SlurmConfig(spare_nodes=1))
    assert nodes.command().words == ["mpirun", "-np", "4", "python"]
    assert nodes.explain_node_shortage() is None
    assert "slurm.spare_nodes=1 has no effect: the job has no second node that is known" in (
        caplog.text
    )


def test_mpirun_gets_a_hostfile_of_the_nodes_that_are_left(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n1\nn1\nn2\nn2\n")
    nodes = JobNodes([str(mpirun), "-np", "4", "python"], {"PBS_NODEFILE": str(nodefile)})
    nodes.left_out["n1"] = "x"
    command = nodes.command()
    assert command.words[3:] == ["-n", "2", "python"]
    with open(command.words[2], encoding="utf-8") as file:
        assert file.read() == "n2 slots=2\n"


SUPERVISE = """
import os, sys
from pathlib import Path
from hpc_tune import log, supervise
from hpc_tune.cluster.nodes import JobNodes
from hpc_tune.config.parallel import ParallelConfig
log.configure_logging(0)
supervise._OUTCOME_WAIT_S = 0.2
launch, run_dir = ["srun", "python"], Path(sys.argv[1])
nodes = JobNodes(launch, os.environ, parallel=ParallelConfig(replicate=3, shard=2))
sys.exit(supervise.Supervisor(launch, [], run_dir, ["true"], False, nodes=nodes).run())
"""
DONE = '{"status": "done", "reason": "all steps done", "exit_code": 0}'


def supervised(cluster, fails):
    """Supervise a run whose first start ``fails``, as shell says; return what is left of it."""
    run_dir = cluster.folder / "run"
    run_dir.mkdir()
    (run_dir / "events.jsonl").touch()
    srun = cluster.folder / "srun"
    done = f"echo '{DONE}' > {run_dir}/outcome.json"
    train = f"if [ -e tried ]; then {done}; else touch tried; {fails}; fi"
    text = srun.read_text() + f'\ncase "$*" in *train*) {train};; esac\n'
    srun.write_text(text)
    argv = [sys.executable, "-c", SUPERVISE, str(run_dir)]
    environ = os.environ | cluster.environ
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = (run_dir / "starts.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return done.stderr, [json.loads(line) for line in lines], events


def test_the_start_after_a_failure_is_without_the_accused_node_and_all_files_say_so(cluster):
    said = "srun: error: n2: tasks 2-3: Exited with exit code 9"
    stderr, (first, last), events = supervised(cluster, f'echo "{said}" >&2; exit 9')
    why = f"the launcher says: {said}"
    assert (first["nodes"], first["left_out"]) == (["n1", "n2", "n3"], {})
    assert (last["nodes"], last["left_out"], last["missing"]) == (["n1", "n3"], {"n2": why}, 1)
    assert not first["lost_nodes"]
    assert said in stderr.splitlines(), "what the launcher prints is passed on"
    assert f"node n2 is left out from now on: {why}" in stderr
    assert "on 2 of 3 nodes, 4 ranks, with parallel.replicate=2: the global batch" in stderr
    assert "--nodes=2 --ntasks=4 --nodelist=n1,n3" in stderr
    assert [(event["kind"], event["node"]) for event in events] == [("left_out", "n2")]


def test_a_node_that_cannot_start_python_is_no_mistake_in_the_configuration(cluster):
    """The shell's code for a program that is not there is that of wrong settings, too."""
    cluster.mute = ["n3"]
    cluster.write()
    stderr, (first, last), _ = supervised(cluster, "exit 2")
    assert (first["exit_code"], first["lost_nodes"]) == (1, True)
    assert list(last["left_out"]) == ["n3"]


@pytest.mark.parametrize("kills", [1, 2])
def test_a_rank_that_is_killed_once_runs_on_the_same_nodes_again(cluster, kills):
    """Killed again it costs its node, and that is no crash that gives the run up."""
    said = "srun: error: n2: tasks 2-3: Killed"
    fails = f"touch tried; [ $(ls tried* | wc -l) -lt {kills} ] && mv tried tried-$$"
    stderr, starts, events = supervised(cluster, f'{fails}; echo "{said}" >&2; exit 137')
    why = f"the launcher says: {said}"
    assert [start["lost_nodes"] for start in starts] == [False, True, False][:kills] + [False]
    assert starts[1]["nodes"] == ["n1", "n2", "n3"]
    assert f"node n2 is tried once more before it is left out: {why}" in stderr
    left_out = {} if kills == 1 else {"n2": why}
    assert (starts[-1]["status"], starts[-1]["left_out"]) == ("done", left_out)
    assert [event["node"] for event in events] == [*left_out]
