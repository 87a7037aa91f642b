import os
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_tune.config.constraints import check_config, find_compile_obstacle
from hpc_tune.config.load import (
    describe_fields,
    load_config,
    setting_metadata,
    setting_names,
    write_resolved_config,
)
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_USER_ERROR, ConfigError

# Names of settings that users rely on: they do not change.
PROMISED = [
    "model.path",
    "model.dtype",
    "tune.method",
    "tune.rank",
    "tune.alpha",
    "tune.dropout",
    "tune.targets",
    "data.path",
    "data.eval_path",
    "data.seq_len",
    "data.packing",
    "batch.global_size",
    "batch.micro_size",
    "optim.lr",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.clip_norm",
    "parallel.engine",
    "parallel.replicate",
    "parallel.shard",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.zero_stage",
    "parallel.offload_params",
    "parallel.offload_optimizer",
    "parallel.recompute",
    "memory.governor",
    "memory.host_limit",
    "train.max_steps",
    "train.epochs",
    "train.seed",
    "train.deterministic",
    "train.compile",
    "train.float8",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep",
    "checkpoint.resume",
    "run.dir",
    "run.device",
    "run.tensorboard",
    "run.trackers",
]

SOME = "train: {seed: 0}\n"  # a file that changes nothing


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def problem(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == EXIT_USER_ERROR
    return str(caught.value)


def test_an_override_beats_the_file_and_the_file_beats_the_default(write):
    file = write("optim: {lr: 0.5, beta1: 0.5}\n")
    config = load_config(file, ["optim.lr=0.25"])
    assert (config.optim.lr, config.optim.beta1, config.optim.beta2) == (0.25, 0.5, 0.999)


def test_the_last_override_of_a_key_wins(write):
    assert load_config(write(SOME), ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "---\n"])
def test_an_empty_file_is_refused(write, text):
    """It is a file that was never written, or whose disk was full."""
    assert "it contains no setting" in problem(write(text))


def test_a_file_that_changes_nothing_means_all_defaults(write):
    config = RunConfig().model_dump()
    config["optim"]["lr"] = 2e-4
    assert load_config(write(SOME)).model_dump() == config


def test_of_several_files_the_later_one_wins_field_by_field(tmp_path):
    texts = {
        "site.yaml": "run: {dir: /scratch, tags: [a, b]}\noptim: {lr: 1.0, beta1: 0.5}\n",
        "mine.yaml": "run: {tags: [c]}\noptim: {lr: 2.0}\ntrain: {seed: 3}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in texts]
    config = load_config(files, ["train.seed=4"])
    assert (config.run.dir, config.run.tags) == ("/scratch", ["c"])
    assert (config.optim.lr, config.optim.beta1, config.train.seed) == (2.0, 0.5, 4)
    assert load_config(files[::-1]).optim.lr == 1.0


def test_a_word_of_one_file_can_be_named_in_another(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {dir: '/runs/${run.name}'}\n")
    (tmp_path / "b.yaml").write_text("run: {name: x}\n")
    assert load_config([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]).run.dir == "/runs/x"


def test_a_part_that_is_there_twice_is_refused(write):
    text = "optim: {lr: 1}\ntrain: {}\noptim: {lr: 2}\n"
    assert problem(write(text)).endswith("not valid YAML: duplicate key optim (line 3, column 1)")
    said = problem(write(SOME), "optim={lr: 1, beta1: 0, lr: 2}")
    assert "cannot be applied: duplicate key lr (line 1, column 19)" in said


def test_a_key_that_overrides_a_merged_one_is_not_there_twice(write):
    text = "train: {<<: &x {seed: 1, max_steps: 3}, seed: 2}\nrun: {dir: a}\n"
    train = load_config(write(text)).train
    assert (train.seed, train.max_steps) == (2, 3)


def test_no_file_means_the_embedded_default_and_overrides_work_on_it():
    config = load_config(None, ["train.max_steps=7"])
    assert (config.model.path, config.tune.method) == ("builtin:tiny", "full")
    assert (config.train.max_steps, config.data.seq_len) == (7, 512)


@pytest.mark.parametrize("replaced", ["model.path=/m", "data.path=x.jsonl", "model={path: /m}"])
def test_a_model_or_data_of_ones_own_is_not_trained_with_values_for_a_toy(replaced):
    """lr 1e-3 on all weights for 40 steps, held-out docstrings, the folder runs/tiny."""
    config = load_config(None, [replaced, "optim.beta1=0.5"])
    want = RunConfig()
    assert (config.tune, config.batch, config.train) == (want.tune, want.batch, want.train)
    assert (config.data.eval_path, config.data.seq_len) == (None, want.data.seq_len)
    assert (config.optim.lr, config.optim.beta1) == (2e-4, 0.5)
    assert config.run.dir == want.run.dir


@pytest.mark.parametrize(
    "words", [[], ["data.path=builtin:pydocs:heldout"], ["tune.method=lora", "train.seed=5"]]
)
def test_the_built_in_model_and_data_keep_the_values_that_fit_them(words):
    config = load_config(None, words)
    assert (config.optim.lr, config.optim.warmup_steps, config.train.max_steps) == (1e-3, 5, 40)
    assert (config.data.seq_len, config.run.dir) == (512, "runs/tiny")


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        ([], 2e-4),
        (["tune.method=dora"], 2e-4),
        (["tune.method=qlora"], 2e-4),
        (["tune.method=full"], 1e-5),
        (["tune.method=full", "optim.lr=auto"], 1e-5),
        (["tune.method=full", "optim.lr=3e-5"], 3e-5),
    ],
)
def test_the_learning_rate_follows_the_method_unless_it_is_set(write, words, lr):
    config = load_config(write(SOME), words)
    assert config.optim.lr == config.optim.peak_lr == lr


def test_a_warm_up_in_steps_and_as_a_share_is_refused(write):
    said = problem(write("optim: {warmup_steps: 0, warmup_ratio: 0.1}\n"))
    assert "optim.warmup_steps=0 and optim.warmup_ratio=0.1 both set the warmup" in said


def test_values_are_read_as_yaml(write):
    config = load_config(
        write(SOME),
        [
            "optim.lr=2e-4",
            "tune.targets=[q_proj, v_proj]",
            "checkpoint.every_minutes=null",
            "memory.host_limit=64GiB",
            "train.time_limit=3.5h",
            "data.packing=false",
            "run.dir=a=b",
        ],
    )
    assert config.optim.lr == 2e-4
    assert config.tune.targets == ["q_proj", "v_proj"]
    assert config.checkpoint.every_minutes is None
    assert config.memory.host_limit == 64 * 1024**3
    assert config.train.time_limit == 12_600
    assert config.data.packing is False
    assert config.run.dir == "a=b"


@pytest.mark.parametrize("word", ["on", "off", "observe"])
def test_a_plain_on_or_off_of_yaml_is_the_word(write, word):
    """YAML 1.1 reads them as booleans."""
    assert load_config(write(f"memory: {{governor: {word}}}")).memory.governor == word
    assert load_config(write(SOME), [f"memory.governor={word}"]).memory.governor == word


def test_variables_and_other_keys_are_interpolated(write, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    file = write("model: {path: '${oc.env:SCRATCH}/m'}\nrun: {dir: '${model.path}/run'}\n")
    assert load_config(file).run.dir == "/scratch/me/m/run"
    assert load_config(file, ["model.path=/else"]).run.dir == "/else/run"
    assert load_config(file, ["run.dir=${oc.env:SCRATCH}/r"]).run.dir == "/scratch/me/r"


def test_a_variable_that_is_not_set_is_named_with_its_key(write, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    message = problem(write("run: {dir: '${oc.env:NOPE}/x'}"))
    assert "run.dir needs NOPE, which is not set in the environment; export it" in message


def test_an_unset_variable_does_not_hide_the_other_problems(write, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    message = problem(write("run: {dir: '${oc.env:NOPE}/x'}"), "lonely")
    assert message.startswith("2 problems in the configuration:\n")
    assert "'lonely' is not key=value" in message
    assert "run.dir needs NOPE" in message


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("train.max_stepz=1", "train.max_steps"),
        ("trian.seed=1", "train"),
        ("optim.warmup_step=1", "optim.warmup_steps"),
        ("lr=1", "optim.lr"),
        ("train.lr=1", "optim.lr"),
        ("model.seq_len=1", "data.seq_len"),
        ("lora.r=8", "tune.rank"),
        ("lora={r: 8}", "tune.rank"),
        ("peft.use_dora=true", "tune.method"),
        ("training.per_device_train_batch_size=4", "batch.micro_size"),
        ("tokenizer.max_seq_len=512", "data.seq_len"),
        ("val_set_size=0.1", "data.eval_fraction"),
        ("clip_grad_norm=1", "optim.clip_norm"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(write, override, near):
    message = problem(write(SOME), override)
    assert "no such key" in message
    assert near in message.partition("did you mean ")[2]


def test_each_name_of_another_tool_stands_for_one_setting():
    aliases = Counter(
        name for metadata in setting_metadata().values() for name in metadata.aliases.split()
    )
    assert max(aliases.values()) == 1
    taken = {key.rpartition(".")[2] for key in setting_names()}
    assert not aliases.keys() & (taken - {"dataset"}), "the same name here goes before it"


def test_each_key_of_a_section_that_there_is_not_is_named(write):
    message = problem(write("lora: {r: 8, lora_alpha: 16}"))
    assert "lora.r: no such key" in message
    assert "lora.lora_alpha: no such key" in message


def test_an_unknown_key_without_a_near_one_points_to_the_list(write):
    assert problem(write("zzz: 1")).endswith("--help lists all keys")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.seed=abc", "train.seed='abc': Input should be a valid integer"),
        ("train.seed=1.5", "train.seed=1.5: "),
        ("train.seed=-1", "train.seed=-1: Input should be greater than or equal to 0"),
        ("tune.rank=0", "tune.rank=0: Input should be greater than 0"),
        ("tune.dropout=1", "tune.dropout=1: Input should be less than 1"),
        ("tune.method=lorra", "tune.method='lorra': Input should be 'lora', 'dora'"),
        ("batch.micro_size=many", "batch.micro_size='many': Input should be a valid integer"),
        ("batch.micro_size=many", "parse string as an integer; or: Input should be 'auto'"),
        ("batch.micro_size=0", "batch.micro_size=0: Input should be greater than 0"),
        ("memory.host_limit=lots", "memory.host_limit='lots': 'lots' is not a size"),
        ("memory.host_limit=0", "memory.host_limit=0: Input should be greater than 0"),
        ("memory.host_limit=640", "640 is 640 bytes of memory, less than any run takes; write its"),
        ("run.tags=first, look", "Input should be a valid list, such as [first, look]"),
        ("slurm.time=4h", "slurm.time='4h': Slurm takes MINUTES, HH:MM:SS or DAYS-HH:MM:SS"),
        ("slurm.time=4", "slurm.time=4 is 4m00s to Slurm, and the run stops slurm.leave_before=5m"),
        ("slurm.memory=700GiB", "slurm.memory='700GiB': Slurm takes a whole number with K, M, G"),
        ("slurm.memory=700", "slurm.memory='700': Slurm reads 700 as 700 MB; write the unit"),
        ("config=a.yaml", "config: no such key in "),
        ("config=a.yaml", "pass a settings file by --config FILE"),
        ("train.profile=5", "train.profile=5: 5 is not STEP:COUNT"),
        ("train.profile=0:2", "train.profile='0:2': '0:2' is not STEP:COUNT"),
        ("train.time_limit=soon", "train.time_limit='soon': 'soon' is not a duration"),
        ("optim.lr=.inf", "optim.lr=inf: Input should be a finite number"),
        ("optim.lr=.nan", "optim.lr=nan: "),
        ("run.dir=", "run.dir=None: Input should be a valid string"),
        ("train=5", "train=5: Input should be a valid dictionary"),
        ("train.seed.deep=1", "train.seed={'deep': 1}: Input should be a valid integer"),
        ("parallel.zero_stage=4", "parallel.zero_stage=4: Input should be 1, 2 or 3"),
    ],
)
def test_a_wrong_value_says_field_value_and_what_is_expected(write, override, said):
    assert said in problem(write(SOME), override)


@pytest.mark.parametrize("override", ["train.seed", "=5", "", "--seed"])
def test_an_override_without_an_equals_sign_is_shown_how(write, override):
    assert f"{override!r} is not key=value, such as train.max_steps=100" in problem(
        write(SOME), override
    )


def test_a_file_of_settings_without_its_option_is_shown_how(write):
    message = problem(write(SOME), "configs/my.yaml")
    assert message.endswith("is not key=value; pass a settings file by --config configs/my.yaml")


def test_an_override_that_is_no_yaml_is_refused_by_name(write):
    message = problem(write(SOME), "run.tags=[1,")
    assert "'run.tags=[1,' cannot be applied" in message
    assert "quote a setting that contains a space" in message
    assert "quote" not in problem(write(SOME), "run.dir={a: [}")


def test_all_problems_are_reported_at_once_and_each_once(write):
    message = problem(
        write("train: {sede: 1}\ntune: {targets: q_proj}\noptim: {lr: -1}\n"), "novalue", "novalue"
    )
    lines = message.splitlines()
    assert lines[0] == "4 problems in the configuration:"
    for said in (
        "'novalue' is not key=value",
        "train.sede: no such key",
        "tune.targets='q_proj': Input should be a valid list, such as [q_proj]; or: Input should",
        "optim.lr=-1: Input should be greater than 0",
    ):
        assert sum(said in line for line in lines) == 1


def test_a_missing_file_names_the_near_ones(tmp_path):
    for name in ("llama_lora.yaml", "llama_full.yaml", "notes.txt"):
        (tmp_path / name).write_text("")
    message = problem(str(tmp_path / "llama_lroa.yaml"))
    assert "llama_lroa.yaml: no such file; similar names there: llama_lora.yaml" in message
    assert "notes.txt" not in message
    assert problem(str(tmp_path / "no" / "x.yaml")).endswith("x.yaml: no such file")


def test_a_missing_file_in_a_folder_that_may_not_be_listed_is_said_to_be_missing(
    tmp_path, monkeypatch
):
    def refuse(folder):
        raise PermissionError(f"{folder}: permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert problem(str(tmp_path / "x.yaml")).endswith("x.yaml: no such file")


def test_a_folder_and_a_binary_file_cannot_be_read(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    assert "cannot be read" in problem(str(tmp_path))
    assert "cannot be read" in problem(str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "[]", "5", "just words", "false"])
def test_a_file_that_is_no_mapping_is_refused(write, text):
    assert "expected 'part:' with 'key: value' below it" in problem(write(text))


@pytest.mark.parametrize(
    "text", ["a: b: c", "train: {seed: 1", "\tx: 1", "x: !!python/object:os.system 1"]
)
def test_bad_yaml_says_where(write, text):
    message = problem(write(text))
    assert "not valid YAML" in message
    assert "line 1" in message


@pytest.mark.parametrize(
    "override",
    [
        "tune.method=lora",
        "tune.method=dora",
        "tune.method=full",
        "tune.method=qlora",
        "model.dtype=fp32",
        "parallel.engine=native",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.offload_params=cpu",
        "parallel.recompute=full",
        "parallel.recompute=selective",
        "parallel.replicate=4",
        "parallel.shard=4",
        "memory.governor=observe",
        "memory.governor=on",
        "train.compile=false",
        "train.compile=true",
    ],
)
def test_what_this_version_can_do_is_accepted(write, override):
    assert check_config(load_config(write(SOME), [override])) == []


def test_float8_is_refused_with_all_that_stands_against_it_and_what_would_work(write):
    text = (
        "train: {float8: true}\nrun: {device: cpu}\nmodel: {dtype: fp32}\n"
        "tune: {method: qlora}\nparallel: {tensor: 2}\n"
    )
    message = problem(write(text))
    for said in (
        "needs a GPU, but run.device=cpu; use train.float8=false",
        "model.dtype=fp32; use bf16 or auto",
        "set train.compile=true",
        "use lora or full",
        "train.float8=true with parallel.tensor > 1",
        "packed 4-bit weights are not split along heads; use parallel.shard",
    ):
        assert said in message
    assert check_config(load_config(write(SOME), ["train.float8=true", "train.compile=true"])) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tune.method=qlora"], "whose base is in 4 bits; use tune.method=lora or dora"),
        (["tune.method=full"], "tune.base_dtype=fp8 has no effect with tune.method=full"),
        (["parallel.tensor=2"], "packed rows are not split along heads; use parallel.shard"),
        (["parallel.zero_stage=3"], "DeepSpeed would split the rows of packed bytes; use zero"),
        (["train.float8=true", "train.compile=true"], "leave train.float8 out"),
    ],
)
def test_what_a_float8_base_does_not_go_with_is_refused(write, overrides, said):
    assert check_config(load_config(write(SOME), ["tune.base_dtype=fp8"])) == []
    assert said in problem(write(SOME), "tune.base_dtype=fp8", *overrides)


def test_compiling_tensor_slices_is_refused(write):
    message = problem(write(SOME), "train.compile=true", "parallel.tensor=2")
    assert "train.compile=true with parallel.tensor > 1 is not available" in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.zero_stage=1", "parallel.offload_optimizer=cpu"],
        ["parallel.engine=deepspeed", "parallel.zero_stage=2", "tune.method=dora"],
        ["parallel.zero_stage=3", "parallel.offload_params=cpu", "tune.method=full"],
        [
            "parallel.zero_stage=3",
            "parallel.offload_params=nvme",
            "parallel.offload_optimizer=nvme",
            "parallel.offload_path=/scratch",
        ],
    ],
)
def test_deepspeed_settings_that_fit_are_accepted(write, overrides):
    assert check_config(load_config(write(SOME), overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("parallel.engine=deepspeed", "needs parallel.zero_stage=1, 2 or 3"),
        ("parallel.offload_optimizer=cpu", "offload_optimizer=cpu needs parallel.zero_stage"),
        ("parallel.offload_params=nvme", "offload_params=nvme needs parallel.zero_stage"),
        ("parallel.zero_stage=2 parallel.engine=native", "is DeepSpeed's"),
        ("parallel.zero_stage=2 parallel.tensor=2", "leave tensor out"),
        ("parallel.zero_stage=2 parallel.pipeline=2", "leave pipeline out"),
        ("parallel.zero_stage=3 parallel.shard=2", "leave shard out"),
        ("parallel.zero_stage=3 parallel.reshard=step", "reshard=step has no effect"),
        ("parallel.zero_stage=3 tune.method=dora", "use zero_stage 1 or 2"),
        ("parallel.zero_stage=2 parallel.offload_params=cpu", "needs parallel.zero_stage=3"),
        ("parallel.zero_stage=2 parallel.offload_optimizer=nvme", "needs parallel.zero_stage=3"),
        ("parallel.zero_stage=3 parallel.offload_params=nvme", "needs parallel.offload_path"),
        ("parallel.zero_stage=3 parallel.offload_path=/scratch", "offload_path has no effect"),
    ],
)
def test_deepspeed_settings_that_cannot_be_are_refused(write, overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write(SOME), overrides.split())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("parallel.row_pieces=4 train.compile=true", "a compiled graph computes whole rows"),
        ("parallel.row_pieces=4 parallel.zero_stage=3", "use zero_stage 1 or 2"),
        ("parallel.row_pieces=4 tune.dropout=0.1", "dropout masks are drawn for whole rows"),
        ("parallel.offload_activations=true", "so it needs parallel.recompute=full, found none"),
        (
            "parallel.offload_activations=true parallel.recompute=full train.compile=true",
            "a compiled graph keeps its own inputs",
        ),
        (
            "parallel.offload_activations=true parallel.recompute=full run.device=cpu",
            "has no effect with run.device=cpu",
        ),
    ],
)
def test_long_rows_refuse_what_goes_not_with_them(write, overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write(SOME), overrides.split())


@pytest.mark.parametrize("others", [[], ["tune.dropout=0.1"], ["parallel.zero_stage=3"]])
def test_a_whole_row_is_one_piece(write, others):
    load_config(write(SOME), ["parallel.row_pieces=1", *others])


@pytest.mark.parametrize(
    "long_rows_note", [["parallel.row_pieces=2"], ["parallel.offload_activations=true"]]
)
def test_auto_does_not_compile_what_is_done_for_long_rows(write, long_rows_note):
    config = load_config(write(SOME), ["parallel.recompute=full", *long_rows_note])
    assert "train.compile=true with " + long_rows_note[0].partition("=")[
        0
    ] in find_compile_obstacle(config.parallel, config.tune, config.train, False)


@pytest.mark.parametrize("shard", ["", "parallel.shard=6"])
def test_experts_are_spread_over_a_divisor_of_the_shards(write, shard):
    words = ["parallel.expert=4", *shard.split()]
    said = "over ranks of parallel.shard, which is (unset|6); set that to 4 or a multiple of it"
    with pytest.raises(ConfigError, match=said):
        load_config(write(SOME), words)
    for shards in (4, 12):
        load_config(write(SOME), ["parallel.expert=4", f"parallel.shard={shards}"])


def test_adapters_on_no_layer_are_refused(write):
    assert "tune.targets=[] names no layer; name some" in problem(write("tune: {targets: []}\n"))


def test_settings_without_an_effect_are_refused(write):
    assert "tune.dropout has no effect" in problem(write("tune: {method: full, dropout: 0.1}\n"))
    assert "tune.rslora has no effect" in problem(write("tune: {method: full, rslora: true}\n"))
    for targets in ("[]", "[q_proj]", "[all-linear, experts]"):
        assert "tune.targets has no effect with tune.method=full; leave it out" in problem(
            write(f"tune: {{method: full, targets: {targets}}}\n")
        )
    assert "optim.lora_b_ratio=16 has no effect" in problem(
        write("tune: {method: full}\noptim: {lora_b_ratio: 16}\n")
    )
    assert "decay_ratio=0.2 has no effect without optim.schedule=wsd" in problem(
        write("optim: {decay_ratio: 0.2}\n")
    )
    assert "optim.decay_ratio" in problem(write("optim: {schedule: wsd, decay_ratio: 1.1}\n"))
    assert "restarts=2 has no effect without optim.schedule=cosine_with_restarts" in problem(
        write("optim: {schedule: wsd, restarts: 2}\n")
    )
    assert "add up to more than all steps" in problem(
        write("optim: {schedule: wsd, decay_ratio: 0.6, warmup_ratio: 0.5}\n")
    )
    assert problem(write("train: {eval_every_steps: 5}\n")) == (
        "train.eval_every_steps needs data.eval_path, data.eval_fraction or data.eval_sources"
    )
    assert "train.stop_after_evals=3 needs train.eval_every_steps" in problem(
        write("train: {stop_after_evals: 3}\ndata: {eval_fraction: 0.1}\n")
    )
    assert "train.stop_after_evals needs data.eval_path, " in problem(
        write("train: {stop_after_evals: 3}\n")
    )
    assert "no effect without parallel.pipeline" in problem(write("parallel: {stages_per_rank: 2}"))
    assert "no effect without tune.method=full" in problem(write("parallel: {reduce_dtype: bf16}"))
    assert "without optim.reference_batch" in problem(write("optim: {batch_scaling: linear}"))


def test_combinations_that_cannot_be_are_refused(write):
    message = problem(write("tune: {method: dora}\nparallel: {tensor: 2}\n"))
    assert "tune.method=dora with parallel.tensor > 1" in message
    assert "use lora, or parallel.shard" in message


def test_what_is_written_is_read_back_as_the_same_configuration(tmp_path):
    config = load_config(
        None,
        [
            "tune.method=dora",
            "tune.targets=[q_proj]",
            "memory.governor=off",
            "memory.host_limit=1.5GiB",
            "train.time_limit=1-12:00:00",
            "run.dir='null'",
            "run.name='1e3'",
        ],
    )
    write_resolved_config(config, tmp_path / "config.resolved.yaml")
    assert load_config(str(tmp_path / "config.resolved.yaml")) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.resolved.yaml"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(exclude_characters="$\\~", exclude_categories=["C"]), min_size=1),
    st.floats(1e-30, 1e30),
    st.integers(0, 2**31 - 1),
)
def test_any_value_survives_being_written_and_read(tmp_path, text, lr, seed):
    config = RunConfig.model_validate(
        {"run": {"dir": text}, "optim": {"lr": lr}, "train": {"seed": seed}}
    )
    write_resolved_config(config, tmp_path / "c.yaml")
    assert load_config(str(tmp_path / "c.yaml")) == config


def test_what_is_written_has_every_field(tmp_path):
    write_resolved_config(RunConfig(), tmp_path / "c.yaml")
    tree = yaml.safe_load((tmp_path / "c.yaml").read_text())
    written = {f"{part}.{key}" for part, fields in tree.items() for key in fields}
    assert written == set(setting_names())


def test_every_promised_field_exists():
    assert not set(PROMISED) - set(setting_names())


def test_every_field_has_a_type_and_prose():
    described = {name: (kind, prose) for name, kind, _, prose in describe_fields()}
    assert described.keys() == set(setting_names())
    for name, (kind, prose) in described.items():
        assert prose.endswith("."), f"{name} has no sentence"
        assert len(prose) > 15, f"{name}: {prose}"
        assert kind, f"{name} has no type"
        assert "typing" not in kind, f"{name}: {kind} is not for users"
    assert described["tune.method"][0] == "lora | dora | qlora | full"
    assert described["batch.micro_size"][0] == "int | auto"


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("words", [(), ("parallel.recompute=full",), ("parallel.layout=auto",)])
def test_parallel_auto_is_short_for_its_layout(write, words, in_file):
    path = write("parallel: auto" if in_file else SOME)
    config = load_config(path, words if in_file else ("parallel=auto", *words))
    assert config.parallel.layout == "auto"
    assert config.parallel.recompute == ("full" if "parallel.recompute=full" in words else "none")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("parallel=automatic", "such as parallel.layout=..., or auto"),
        ("parallel=ddp", "DDP is parallel.replicate, FSDP parallel.shard"),
        (
            "tune=lora",
            "tune='lora': Input should be a valid dictionary of settings, such as tune.method=",
        ),
    ],
)
def test_a_word_in_the_place_of_a_part_is_refused_with_what_belongs_there(word, said):
    with pytest.raises(ConfigError) as error:
        load_config(None, [word])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r'run.name="\ud83d"', r"run\.name=\\ud83d': expected text that can be written as UTF-8"),
        ("data.path=caf\udce9.jsonl", "in this shell; export LC_ALL=C.UTF-8"),
    ],
)
def test_text_that_no_file_could_hold_is_refused(text, said):
    """A half of a character in YAML, and a name on the command line that is not UTF-8."""
    with pytest.raises(ConfigError, match=said):
        load_config(None, [text])


def test_fields_of_text_take_what_is_written(tmp_path):
    """YAML 1.1 reads a time as seconds, a date as a date and 0123 as 83."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "slurm: {time: 12:00:00, job_name: 0123, account: 2026-11-25, memory: 70000}\n"
        "run: {tags: [a], name: 1e3}\ntrain: {max_steps: 12}\n"
    )
    config = load_config(str(file), ["run.dir=20261125", "slurm.qos=1_000", "run.tags=[x, 01]"])
    slurm, run = config.slurm, config.run
    assert (slurm.time, slurm.job_name, slurm.account) == ("12:00:00", "0123", "2026-11-25")
    assert (slurm.memory, slurm.qos) == ("70000", "1_000")
    assert (run.dir, run.name, run.tags) == ("20261125", "1e3", ["x", "01"])
    assert config.train.max_steps == 12
    assert load_config(None, ["data.eval_path=null"]).data.eval_path is None


@pytest.mark.parametrize(
    "text", ["007", "2024-01-01", "12:00:00", "on", "no", "1_0", "1e3", "0x1f", ".5", "true"]
)
def test_a_name_is_what_is_written_whatever_yaml_takes_it_for(write, text):
    base = f"run: &all {{name: {text}, tags: [1, on, {text}]}}\nslurm: {{time: 12:00:00}}\n"
    run = load_config(write(base)).run
    assert (run.name, run.tags) == (text, ["1", "on", text])
    run = load_config(write(SOME), [f"run.name={text}", f"run={{tags: [{text}]}}"]).run
    assert (run.name, run.tags) == (text, [text])


def test_what_is_quoted_unset_or_taken_from_elsewhere_stays_so(write):
    text = "train: &x {seed: 1}\nrun: {name: '~', dir: \"007\"}\ndata: {eval_path: ~}\n"
    config = load_config(write(text))
    assert (config.run.name, config.run.dir, config.data.eval_path) == ("~", "007", None)
    text = "run: {<<: &of_all {name: 007}, dir: a}\nslurm: {job_name: 1, <<: {qos: 2}}\n"
    config = load_config(write(text))
    assert (config.run.name, config.run.dir) == ("007", "a")
    assert (config.slurm.job_name, config.slurm.qos) == ("1", "2")


def test_home_and_environment_are_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: ~/runs/x}\ndata: {cache: '$SCRATCH/data'}\nslurm: {venv: ~/.venv}\n"
    )
    config = load_config(str(file), ["model.path=${oc.env:SCRATCH}/m", "slurm.container=$NOBODY"])
    assert (config.run.dir, config.data.cache) == ("/home/me/runs/x", "/scratch/me/data")
    assert (config.model.path, config.slurm.container) == ("/scratch/me/m", "$NOBODY")
    monkeypatch.delenv("SCRATCH")
    words = (
        r"data\.cache=\$SCRATCH/data: SCRATCH is not set in the environment; "
        r"set it, or write out the path$"
    )
    with pytest.raises(ConfigError, match=words):
        load_config(str(file))


def test_a_setting_that_names_no_other_is_named_with_its_key(write):
    message = problem(write("model: {path: '${nothing}/m'}"))
    assert "'nothing' not found (key model.path)" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.eval_fraction=0.1", "data.eval_path=e.jsonl"], "both say what is held out"),
        (["data.eval_fraction=0.1", "data.path=d.h5"], "d.h5 is prepared"),
        (["data.columns={a: prompt}", "data.path=d.h5"], "data.columns has no effect on prepared"),
        (["data.bad_rows=skip", "data.path=d.h5"], "data.bad_rows has no effect on prepared"),
        (["data.columns={a: promt}"], "a: promt is not one of messages"),
        (["data.columns={a: prompt, b: prompt}"], "two columns are read as the same field"),
        (["data.path={a: b}"], "data.path="),
        (["data.path=[a, $NOBODY/b]"], "data.path=$NOBODY/b: NOBODY is not set in the environment"),
    ],
)
def test_settings_of_data_that_cannot_be_are_refused(write, overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write("train: {seed: 1}"), overrides)


def test_paths_of_data_may_be_a_list_also_on_the_command_line(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = write("data: {path: [~/a.jsonl, b], columns: {x: prompt}, eval_fraction: 0.1}\n")
    config = load_config(file)
    assert config.data.path == ["/home/me/a.jsonl", "b"]
    config = load_config(file, ["data.path=[c,~/d]", "data.columns.x=text"])
    assert (config.data.path, config.data.columns) == (["c", "/home/me/d"], {"x": "text"})
    write_resolved_config(config, tmp_path / "resolved.yaml")
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_columns_without_a_space_behind_the_colon_are_told_what_is_missing():
    with pytest.raises(ConfigError, match=r"a:prompt has no value; put a space after the colon"):
        load_config(None, ["data.columns={a:prompt}"])


def test_trackers_need_no_brackets():
    assert load_config(None, ["run.trackers=wandb"]).run.trackers == ["wandb"]
    for both in ("[wandb,mlflow]", "wandb,mlflow", "wandb, mlflow"):
        assert load_config(None, [f"run.trackers={both}"]).run.trackers == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match="run.trackers"):
        load_config(None, ["run.trackers=wandbb"])


def test_a_path_that_the_locale_cannot_spell_is_told_and_a_name_is_taken(write, monkeypatch):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(
        ConfigError, match=r"run\.dir='gr\\xf6\\xdfe': file names are ascii in this shell"
    ):
        load_config([write("run: {dir: größe}")], [])
    assert load_config([write("run: {name: größe}")], []).run.name == "größe"


@pytest.mark.parametrize(
    ("said", "found"),
    [("ib0", "ib0"), ("[hsn0, hsn1]", "hsn0,hsn1"), ("hsn0,hsn1", "hsn0,hsn1"), ("null", None)],
)
def test_the_network_may_be_several_interfaces(said, found):
    assert load_config(None, [f"run.interface={said}"]).run.interface == found


@pytest.mark.parametrize("said", ["[lo, lo]", "hsn0,hsn1,hsn0"])
def test_an_interface_that_is_named_twice_is_refused(said):
    with pytest.raises(ConfigError, match="named more than once: .*; name each interface once"):
        load_config(None, [f"run.interface={said}"])
