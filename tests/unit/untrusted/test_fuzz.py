"""Settings, variables, manifests and run directories of any content: a clear error or success.

What stands in data has a file of its own.
"""

import contextlib
import hashlib
import io
import json
import subprocess

import yaml
from hypothesis import strategies as st

from hpc_tune import cli
from hpc_tune.checkpoint.locate import describe_checkpoints, locate
from hpc_tune.checkpoint.store import (
    FORMAT,
    MANIFEST,
    Store,
    _hash_of,
    find_damage,
    read_state,
    verify_checkpoint,
)
from hpc_tune.cluster.launchers import find_launch_info, rank_hint
from hpc_tune.cluster.slurm import render
from hpc_tune.config.load import load_config, setting_names
from hpc_tune.convert.llama_factory import LLAMA_FACTORY
from hpc_tune.convert.torchtune import TORCHTUNE
from hpc_tune.errors import CheckpointError, ConfigError, WorldError
from hpc_tune.report.page import write_report
from hpc_tune.report.watch import watch_run
from hpc_tune.rundir import outcome
from hpc_tune.rundir.json_lines import drop_lines_after
from hpc_tune.units import parse_bytes, parse_seconds
from hpc_tune.world.discover import World, discover
from tests.support.fuzz import JSON, YAML_TEXTS, damaged, flips, fuzz, said
from tests.support.training import give_manifest

NAMES = sorted(setting_names())
TREES = st.dictionaries(
    st.sampled_from(sorted({n.split(".")[0] for n in NAMES})) | st.text(max_size=6),
    st.dictionaries(
        st.sampled_from(sorted({n.split(".")[1] for n in NAMES})) | st.text(max_size=6),
        JSON,
        max_size=4,
    )
    | JSON,
    max_size=4,
)


@fuzz(
    TREES.map(lambda tree: yaml.safe_dump(tree).encode())
    | st.binary(max_size=80)
    | YAML_TEXTS.map(str.encode)
)
def test_configurations(folder, data):
    file = folder / "c.yaml"
    file.write_bytes(data)
    try:
        config = load_config(str(file))
    except ConfigError as error:
        said(error)
        return
    again = yaml.safe_dump(config.model_dump(), sort_keys=False)
    (folder / "again.yaml").write_text(again, encoding="utf-8")
    assert load_config(str(folder / "again.yaml")) == config


KEYS = st.sampled_from([*NAMES, "model", "x.y", "a[0]", ".", "a." * 600 + "b", "train.seed.x"])
OVERRIDES = st.tuples(KEYS, JSON | st.text(max_size=12) | YAML_TEXTS).map(
    lambda pair: f"{pair[0]}={json.dumps(pair[1]) if not isinstance(pair[1], str) else pair[1]}"
)


@fuzz(st.lists(OVERRIDES | st.text(max_size=20), max_size=4))
def test_overrides(folder, overrides):
    try:
        config = load_config(None, overrides)
    except ConfigError as error:
        said(error)
        return
    try:
        script = render(config.slurm, overrides, folder)
    except ConfigError as error:
        said(error)
        return
    parsed = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True)
    assert parsed.returncode == 0, (script, parsed.stderr)


@fuzz(st.text(max_size=20) | st.from_regex(r"[\d.]{1,8} ?[A-Za-z]{0,3}", fullmatch=True))
def test_sizes_and_durations(folder, text):
    for parse in (parse_bytes, parse_seconds):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            said(error, repr(text))


STATES = st.fixed_dictionaries(
    {},
    optional={
        "step": JSON, "config": JSON | TREES, "evals": JSON, "layout": JSON, "eval_loss": JSON,
        "total_steps": JSON, "surplus": JSON,
    },
)  # fmt: skip


@fuzz(st.binary(max_size=60) | STATES | flips(2000))
def test_manifests(folder, drawn):
    """Bytes that are none, whole ones of another content, and damaged ones."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    give_manifest(checkpoint, **(drawn if isinstance(drawn, dict) else {}))
    manifest = checkpoint / "manifest.json"
    if isinstance(drawn, bytes):
        manifest.write_bytes(drawn)
    elif isinstance(drawn, tuple):
        manifest.write_bytes(damaged(manifest.read_bytes()[:2000], drawn))
    for look in (
        lambda: locate(folder / "run"),
        lambda: describe_checkpoints(folder / "run", True),
    ):
        try:
            look()
        except (CheckpointError, ConfigError) as error:
            said(error)
    Store(folder / "run" / "checkpoints", 1, None, True).prune(checkpoint)


ENTRIES = st.dictionaries(
    st.sampled_from(["rank-0-of-1.safetensors", "manifest.json", "../x", "/etc/passwd", ""])
    | st.text(max_size=6),
    st.fixed_dictionaries({"bytes": JSON, "sha256": JSON}) | JSON,
    max_size=3,
)


@fuzz(
    st.fixed_dictionaries(
        {"format": st.just(FORMAT) | JSON, "files": ENTRIES | JSON, "state": JSON}
    )
)
def test_what_manifests_say_of_files(folder, body):
    """Sealed by their own hash, as whoever writes one can seal it."""
    (folder / MANIFEST).write_text(json.dumps(body | {"sha256": _hash_of(body)}))
    for look in (verify_checkpoint, read_state, find_damage):
        try:
            look(folder)
        except CheckpointError as error:
            said(error)


@fuzz(st.binary(max_size=60) | flips(2000))
def test_damaged_checkpoints(folder, drawn):
    """A checkpoint of a run, with any file of it damaged, is refused and left as it is."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    data = bytes(range(256)) * 8
    for file in ("rank-0-of-1.safetensors", "weights-0.safetensors"):
        (checkpoint / file).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body = {"format": FORMAT, "files": {"rank-0-of-1.safetensors": entry}, "state": {}}
    (checkpoint / MANIFEST).write_text(json.dumps(body | {"sha256": _hash_of(body)}))
    verify_checkpoint(checkpoint)
    changed = drawn if isinstance(drawn, bytes) else damaged(data, drawn)
    (checkpoint / "rank-0-of-1.safetensors").write_bytes(changed)
    store = Store(checkpoint.parent, 1)
    assert store.latest_checkpoint() == (checkpoint if changed == data else None)
    assert (checkpoint / "rank-0-of-1.safetensors").read_bytes() == changed


def nested(values):
    tree = {}
    for key, value in values.items():
        *parts, last = key.removesuffix(".*").split(".")
        inside = tree
        for part in parts:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[last] = value
    return tree


THEIRS = st.one_of(
    st.dictionaries(
        st.sampled_from(sorted(tool.rules)),
        JSON | st.sampled_from(["${seed}", "${x.y}", "a_b", "torch.optim.AdamW", "lora"]),
        max_size=8,
    ).map(lambda values, start=start: start | nested(values))
    for tool, start in (
        (LLAMA_FACTORY, {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora"}),
        (TORCHTUNE, {"optimizer": {}, "model": {"_component_": "torchtune.models.x.lora_x"}}),
    )
)


@fuzz(
    st.tuples(
        THEIRS.map(lambda tree: yaml.safe_dump(tree).encode())
        | YAML_TEXTS.map(str.encode)
        | st.binary(max_size=60),
        st.integers(-1, 9),
    )
)
def test_configs_of_other_tools(folder, drawn):
    data, ranks = drawn
    (folder / "theirs.yaml").write_bytes(data)
    words = ["convert", str(folder / "theirs.yaml")]
    words += ["--ranks", str(ranks), "--out", str(folder / "ours.yaml")]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = cli.main(words)
    assert code in (0, 2)
    assert told.getvalue().strip()
    assert "Traceback" not in told.getvalue()
    assert (folder / "ours.yaml").exists() == (code == 0)


VARIABLES = st.dictionaries(
    st.sampled_from(
        [
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
            *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMIX_RANK"),
            *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES"),
            *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
            *(
                "SLURM_STEP_TASKS_PER_NODE",
                "SLURM_STEP_NUM_NODES",
                "SLURM_JOB_ID",
                "SLURM_MPI_TYPE",
            ),
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
            *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE", "SLURM_STEP_NODELIST"),
        ]
    ),
    st.integers(-2, 20).map(str)
    | st.sampled_from(["", "4(x2)", "2(x3),1", "none", "pmix", "9" * 5000, "4294967291", "٣", "²"])
    | st.text(max_size=6),
    max_size=10,
)


@fuzz(VARIABLES)
def test_variables_of_launchers(folder, environ):
    assert rank_hint(environ) >= 0
    try:
        info = find_launch_info(environ)
        if not info.uses_mpi:
            world, _ = discover(environ)
            assert isinstance(world, World)
            assert 0 <= world.rank < world.size
            assert 0 <= world.local_rank < world.local_size <= world.size
    except WorldError as error:
        said(error)


LINES = st.lists(
    (
        st.fixed_dictionaries(
            {"step": JSON, "loss": JSON, "time": JSON, "step_s": JSON},
            optional={"host_bytes": JSON, "comm_s": JSON, "most_work_s": JSON, "eval_loss": JSON},
        )
        | st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["start", "memory", "layout", "checkpoint", "governor"])
                | JSON
            },
            optional={
                "time": st.floats(0, 2e9),
                "phases": JSON,
                "step": JSON,
                "versions": JSON,
                "command": JSON,
                "size": JSON,
                "bytes": JSON,
                "total_steps": JSON,
            },
        )  # fmt: skip
    ).map(lambda row: json.dumps(row).encode())
    | st.binary(max_size=30),
    max_size=4,
).map(b"\n".join)


@fuzz(st.tuples(LINES, LINES, JSON, TREES, st.binary(max_size=30)), few=15)  # it draws figures
def test_what_lies_in_run_directories(folder, drawn):
    metrics, events, told, tree, words = drawn
    (folder / "memory").mkdir()
    (folder / "memory" / "node-0.json").write_bytes(words)
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "events.jsonl").write_bytes(events)
    (folder / "outcome.json").write_text(json.dumps(told))
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(tree))
    outcome.read_outcome(folder)
    outcome.read_heartbeats(folder)
    write_report([folder])
    with contextlib.redirect_stdout(io.StringIO()):
        watch_run(folder, 1.0, show_once=True)
    drop_lines_after(folder / "metrics.jsonl", 3)
    assert not [f for f in folder.rglob("*") if f.suffix == ".tmp"]
