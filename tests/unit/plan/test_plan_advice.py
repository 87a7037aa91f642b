"""What plan, submit and a start say to a user: one machine, and advice that holds."""

import pytest

from hpc_tune import cli
from hpc_tune.config.constraints import check_job
from hpc_tune.config.load import load_config
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.errors import ConfigError
from hpc_tune.memory.policy import Phase
from hpc_tune.model.config_json import find_nearest_model_shape
from hpc_tune.plan import report
from hpc_tune.plan.hardware import Machine, requested_machine
from hpc_tune.plan.memory_model import PhaseMemory
from hpc_tune.plan.report import Remedy, describe_sufficient_remedies
from hpc_tune.train.startup.preflight import _describe_shortage

GIB = 1 << 30
RECOMPUTE = Remedy("recompute", {"parallel.recompute": "full"})
ROWS = Remedy("batch.micro_size=20 instead of 40", {"batch.micro_size": 20}, "batch.micro_size")
MORE = Remedy("more nodes")


def test_only_what_is_enough_alone_is_advised():
    said = describe_sufficient_remedies(
        [RECOMPUTE, ROWS, MORE], lambda changes: "batch.micro_size" in changes
    )
    assert said == ["batch.micro_size=20 instead of 40", "more nodes"]


def test_a_number_is_lowered_until_the_run_fits_with_it():
    said = describe_sufficient_remedies([ROWS], lambda changes: changes["batch.micro_size"] <= 16)
    assert said == ["batch.micro_size=16 instead of 40"]


def test_where_nothing_is_enough_alone_it_is_said_how_much_together_is():
    assert describe_sufficient_remedies(
        [RECOMPUTE, ROWS, MORE], lambda changes: len(changes) == 2
    ) == ["together: parallel.recompute=full batch.micro_size=20", "more nodes"]
    assert describe_sufficient_remedies([RECOMPUTE, ROWS], lambda changes: False) == [
        "not even with parallel.recompute=full batch.micro_size=20"
    ]


def test_a_configuration_is_changed_by_whole_names():
    config = load_config(None, ["model.path=/m", "train.seed=3"])
    changed = config.with_changes({"parallel.recompute": "full", "data.seq_len": 7})
    assert (changed.parallel.recompute, changed.data.seq_len, changed.train.seed) == ("full", 7, 3)


@pytest.mark.full
def test_what_a_plan_of_several_rows_advises_does_fit(capsys, monkeypatch):
    monkeypatch.setattr(report, "_REMEDY_CHECKS_LIMIT_S", 900.0)  # on a busy machine, too
    words = ["plan", "--cpu", "--gpus-per-node", "1", "--host-memory", "24GiB"]
    words += ["model.path=shape:llama3-8b", "batch.micro_size=8", "data.seq_len=8192"]
    assert cli.main(words) == 1
    said = [line[4:] for line in capsys.readouterr().out.splitlines() if line.startswith("  - ")]
    assert said
    assert not any(line.endswith("(not checked)") for line in said)
    settings = [[w.strip(",") for w in line.split() if "=" in w] for line in said]
    for changes in settings:
        assert cli.main([*words, *changes]) == 0, changes


SECTION = SlurmConfig(nodes=2, gpus_per_node=4, memory="100G")


@pytest.mark.parametrize(
    ("slurm", "named", "uses_cpus", "machine", "num_assumed"),
    [
        (SECTION, (None, None, None, None), False, Machine(2, 4, 80 * GIB, 100 * GIB), 1),
        (SECTION, (3, 8, 40 * GIB, GIB), False, Machine(3, 8, 40 * GIB, GIB), 0),
        (SECTION, (None, None, None, None), True, Machine(2, 4, None, 100 * GIB), 0),
        (
            SlurmConfig(nodes=2, tasks_per_node=6, memory="3000"),
            (None, None, None, None),
            False,
            Machine(2, 6, None, 3000 << 20),
            0,
        ),
        (
            SlurmConfig(memory="0", nodes=2),
            (None, None, None, None),
            False,
            Machine(2, 1, None, 512 * GIB),
            1,
        ),
        (SlurmConfig(), (None,) * 4, False, Machine(1, 8, 80 * GIB, 512 * GIB), 3),
    ],
)
def test_the_machine_of_a_plan_is_what_is_named_or_the_slurm_section(
    slurm, named, uses_cpus, machine, num_assumed
):
    found, assumed = requested_machine(slurm, *named, uses_cpus)
    assert found == machine
    assert len(assumed) == num_assumed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.replicate=2", "parallel.shard=8"], "slurm.nodes=2 slurm.gpus_per_node=8"),
        (["parallel.shard=2", "run.device=cpu"], "slurm.nodes=1 slurm.tasks_per_node=2"),
        (["parallel.tensor=4", "slurm.gpus_per_node=6"], "a multiple of 4 ranks"),
        (["parallel.replicate=1", "parallel.shard=1", "slurm.nodes=2"], "1 rank, and"),
        (["parallel.shard=8", "slurm.gpus_per_node=4", "slurm.nodes=2"], None),
        (["parallel.tensor=4", "slurm.gpus_per_node=8"], None),
        (["parallel.context=4", "slurm.gpus_per_node=8"], None),
        (["parallel.context=4", "parallel.tensor=4", "slurm.gpus_per_node=8"], "asks for 2 of"),
        (
            ["parallel.context=3", "slurm.gpus_per_node=8"],
            "must divide the number of ranks of replicate x shard",
        ),
        ([], None),
    ],
)
def test_a_job_that_is_too_small_for_its_layout_is_refused(settings, said):
    config = load_config(None, ["model.path=/m", *settings])
    problems = check_job(config.slurm, config.parallel, config.run.device)
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


def test_submit_refuses_a_layout_that_its_job_has_not_the_ranks_for(capsys):
    assert cli.main(["submit", "--dry-run", "parallel.replicate=2", "parallel.shard=8"]) == 2
    assert "need 16 ranks, and the slurm section asks for 1" in capsys.readouterr().err
    assert cli.main(["submit", "--dry-run"]) == 0
    assert "no slurm setting is given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "shape:llama3-70b"),
        ("/models/Meta-Llama-3-8B", "shape:llama3-8b"),
        ("Qwen/Qwen3-32B", "shape:qwen3-32b"),
        ("tiiuae/falcon-7b", "shape:falcon-7b"),
    ],
)
def test_a_model_that_is_not_here_is_planned_by_the_shape_likest_to_it(path, shape):
    assert find_nearest_model_shape(path) == shape


def test_a_plan_without_the_model_names_a_shape(capsys):
    assert cli.main(["plan", "model.path=meta-llama/Llama-3.1-70B", "data.path=x"]) == 2
    assert "model.path=shape:llama3-70b" in capsys.readouterr().err


def test_a_phase_that_does_not_fit_says_what_it_lacks():
    machine = Machine(1, 1, None, 900 << 20)
    phase = PhaseMemory(Phase.STEADY, 0, 4 * GIB)
    assert list(_describe_shortage(phase, machine)) == [
        "a step needs 4.00 GiB of host memory per node; there are 900 MiB"
    ]
    phase = PhaseMemory(Phase.LOAD, 90 * GIB, GIB)
    assert list(_describe_shortage(phase, Machine(1, 1, 80 * GIB, 64 * GIB))) == [
        "loading needs 90.0 GiB of each device's memory; there are 80.0 GiB"
    ]


@pytest.mark.parametrize(
    ("setting", "replaced"),
    [
        ("optim.warmup_ratio=0.1", "optim.warmup_steps"),
        ("data.eval_fraction=0.1", "data.eval_path"),
        ("train.epochs=2", "train.max_steps"),
    ],
)
def test_a_default_of_the_tiny_run_gives_way_to_what_the_user_sets(setting, replaced):
    config = load_config(None, [setting])
    part, _, name = replaced.partition(".")
    assert getattr(getattr(config, part), name) is None


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (["a.jsonl"], "a.jsonl"),
        (["data.path=[a,b]"], ["a", "b"]),
        (["--config", "FILE"], "mine"),
        (["--config", "FILE", "data.seq_len=9"], "mine"),
        (["a.jsonl", "--config", "FILE", "data.seq_len=9"], "a.jsonl"),
    ],
)
def test_the_data_to_show_are_those_that_are_named(tmp_path, words, paths):
    (tmp_path / "c.yaml").write_text("data: {path: mine}")
    words = [f"{tmp_path}/c.yaml" if word == "FILE" else word for word in words]
    options = cli.parse(["show", *words])
    assert options.config.data.path == paths
    assert (options.config.data.seq_len == 9) == ("data.seq_len=9" in words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "data.path=[b,c]"], "both name the data"),
        ([], "nothing names the data"),
        (["train.seed=3"], "nothing names the data"),
    ],
)
def test_data_that_are_named_twice_or_not_at_all_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        cli.parse(["show", *words])


def test_a_setting_by_its_name_in_other_tools_is_told_ours():
    with pytest.raises(ConfigError, match="did you mean optim.lr"):
        load_config(None, ["optim.learning_rate=1e-4"])
