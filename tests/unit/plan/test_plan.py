"""The plan command: phases, verdicts, and what it says would fit."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.build import build, resolve_dtype
from hpc_tune.model.experts import find_stacked_experts
from hpc_tune.model.language import read_config
from hpc_tune.plan import memory_model, report
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import MemorySettings, ModelBytes, PhaseMemory, memory_by_phase
from hpc_tune.plan.resolve import ModelShape, planned_dtype
from hpc_tune.plan.trace import TraceReport
from tests.support.mixtures import write_mixture
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

ROOT = Path(__file__).parents[3]
MIB, GIB = 1 << 20, 1 << 30
KB = 1024
TWO_NODES = ["--nodes", "2", "--host-memory", "768GB"]
LLAMA_70B = ["--config", "configs/llama3_70b_lora.yaml", "model.path=shape:llama3-70b"]
# All of the state, 12 bytes for each value, over 16 ranks and on the host.
FULL_70B = [
    "tune.method=full",
    "parallel.replicate=1",
    "parallel.shard=16",
    "parallel.offload_params=cpu",
]


def plan(*words, code=None):
    """Return what ``plan --json`` says."""
    argv = [*python(), "-m", "hpc_tune", "plan", "--json", *words]
    done = run_ranks(argv, rank_environment(1, {"SCRATCH": "/scratch"}), HANG_S, cwd=ROOT)
    assert done.returncode in ((0, 1) if code is None else (code,)), done.stderr
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr


def measured(*words):
    """Return the seconds of a plan, whether it fits or not, and its peak RSS in bytes."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_tune", "plan", *words],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "SCRATCH": "/scratch"},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    took_s, rss = time.monotonic() - began_s, usage.ru_maxrss * KB
    print(f"{took_s:.1f} s, {rss / MIB:.0f} MiB")
    assert process.returncode in (0, 1)
    return took_s, rss


def phase(said, name):
    return next(p for p in said["phases"] if p["name"] == name)


def import_s():
    """Return the seconds that this machine takes to import what a plan works with."""
    words = "import torch, transformers.models.llama.modeling_llama, peft"
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", words], check=True, capture_output=True)
    return time.monotonic() - began_s


def test_70b_with_lora_fits_on_two_nodes():
    said = plan(*TWO_NODES, *LLAMA_70B)
    assert said["fits"]
    assert said["advice"] == []
    names = [p["name"] for p in said["phases"]]
    assert names == [
        "load",
        "compile",
        "first step",
        "steady",
        "evaluate",
        "save, training waits",
        "save, in the background",
        "merge, in one process",
    ]
    # An eighth of 141 GB of weights, and the adapters with gradients and two moments.
    load = phase(said, "load")["device_bytes"]
    # Beside them the context, and NCCL's of the world, of shards and of copies, and NVLS.
    context = 1.5 * GIB + (3 * 600 + 2304) * MIB
    assert 1.0 < (load - context) / (141.1e9 / 8 + 4 * 828.4e6) < 1.035
    assert 4096 * 8 <= said["tokens_that_fit"] < 4096 * 16


@pytest.mark.soak
def test_70b_on_16_ranks_is_answered_in_20_seconds():
    took_s, rss = measured(*TWO_NODES, *LLAMA_70B)
    # Where the import takes more than 4 s, all takes longer by as much.
    assert took_s < 20 * max(1.0, import_s() / 4)
    assert rss < 1.5e9


@pytest.mark.full
def test_70b_in_full_cannot_be_saved_from_one_rank_but_streamed():
    gathered = plan(*TWO_NODES, *LLAMA_70B, *FULL_70B, "--save", "gathered")
    assert [p["name"] for p in gathered["phases"] if not p["fits"]] == ["save"]
    found = phase(gathered, "save")
    # What is padded to equal shards is not saved.
    held = 3 * gathered["trace"]["weight_bytes"] * 16
    assert found["first_bytes"] == pytest.approx(held, rel=1e-3)
    assert found["node_bytes"] > 768e9
    assert "gathering 788 GiB on one rank" in gathered["advice"][0]
    streamed = plan(*TWO_NODES, *LLAMA_70B, *FULL_70B)
    assert streamed["fits"]
    assert phase(streamed, "save, training waits")["node_bytes"] < 768e9
    # Where there is no room for copies of all that is written, training waits.
    assert phase(streamed, "save, in the background")["optional"]


@pytest.mark.full
def test_what_does_not_fit_is_told_with_what_would():
    small = ["--gpus-per-node", "1", "--device-memory", "24GiB", "--host-memory", "64GiB"]
    words = [
        "model.path=shape:llama3-8b",
        "parallel.replicate=1",
        "batch.micro_size=8",
        "parallel.recompute=none",
    ]
    said = plan("--config", "configs/llama3_8b_lora.yaml", *small, *words, code=1)
    assert not phase(said, "steady")["fits"]
    assert said["advice"]
    for advice in said["advice"]:
        changes = [word.strip(",") for word in advice.split() if "=" in word]
        more = plan("--config", "configs/llama3_8b_lora.yaml", *small, *words, *changes)
        assert more["fits"], advice


@pytest.mark.full
def test_gpus_without_a_kernel_for_documents_have_masks():
    words = ["--config", "configs/llama3_8b_lora.yaml", "model.path=shape:llama3-8b"]
    steady = [phase(plan(*words, *more), "steady") for more in ((), ("--masked",))]
    without, masked = (found["device_bytes"] for found in steady)
    assert masked - without > 4096 * 4096  # a byte for each pair of tokens


def test_rows_of_one_token_can_be_planned_too():
    said = plan("data.seq_len=1", "--gpus-per-node", "1", "--device-memory", "0", code=0)
    assert said["tokens_that_fit"] == 1


@pytest.mark.full
def test_the_sequence_length_that_is_said_to_fit_does():
    """And with 1.1 times as much the governor would have to act: a host is filled to 85%."""
    machine = ["--gpus-per-node", "2", "--device-memory", "0", "--host-memory", "4GiB"]
    said = plan("data.seq_len=65536", *machine, code=1)
    longest = said["tokens_that_fit"]
    assert f"steady: data.seq_len={longest} or less" in said["advice"]
    found = plan(f"data.seq_len={longest}", *machine, code=0)
    assert found["fits"]
    assert phase(found, "steady")["node_bytes"] <= 0.85 * 4 * GIB
    longer = plan(f"data.seq_len={longest * 11 // 10}", *machine)
    assert phase(longer, "steady")["node_bytes"] > 0.85 * 4 * GIB


@pytest.mark.soak
def test_405b_on_512_ranks_is_answered_in_a_minute():
    words = ["--config", "configs/llama3_405b_lora.yaml", "model.path=shape:llama3-405b"]
    took_s, rss = measured("--nodes", "64", "--host-memory", "2TB", *words)
    assert took_s < 60
    assert rss < 1.5e9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "much"], "--device-memory: 'much' is not a size"),
        (["--nodes", "0"], "--nodes: found 0, expected at least 1"),
        (["--gpus-per-node", "3", "parallel.shard=2"], "expected replicate x shard"),
        (["model.path=/nowhere"], "/nowhere: no such directory here"),
        (["--hosts", "3"], "unknown argument --hosts"),
    ],
)
def test_a_mistake_is_one_message(words, said):
    found = plan(*words, code=2)
    assert said in found
    assert "Traceback" not in found


TRACE = TraceReport(
    layout="replicate 4",
    world_size=4,
    rank=0,
    num_layers=10,
    num_micro=1,
    reshard="block",
    weight_bytes=1000 * MIB,
    adapter_bytes=10 * MIB,
    gradient_bytes=10 * MIB,
    optimizer_bytes=20 * MIB,
    activation_bytes=300 * MIB,
    peak_bytes=1340 * MIB,
    evaluation_bytes=1100 * MIB,
    loaded_bytes=1040 * MIB,
    idle_bytes=1040 * MIB,
    heap_peak_bytes=1500 * MIB,
    heap_evaluation_bytes=1150 * MIB,
    trace_s=0.0,
)
PROCESS, LEFT, TRIMMED = (284 + 20) * MIB + 10 * 900 * 1024, 32 * MIB, 12 * MIB
LARGEST, UNIT = 64 * MIB, 48 * MIB


def by_name(
    machine, trace=TRACE, save="streamed", overrides=(), trained=10 * MIB, is_full=False, **files
):
    config = load_config(None, [*overrides])
    threads = machine.cores_per_rank if config.run.threads == "auto" else config.run.threads
    settings = MemorySettings(
        config.parallel,
        config.checkpoint,
        step_tokens=1024,
        compile_threads=threads if config.train.compile else None,
        has_governor=config.memory.governor == "on",
        save=save,
        form=config.tune.form,
        has_reference=config.tune.has_reference,
    )
    model = ModelBytes(trained, LARGEST, UNIT, is_full, **files)
    phases = memory_by_phase(trace, machine, model, settings)
    return {phase.name: phase for phase in phases}


def test_on_cpus_a_frozen_base_that_is_whole_is_pages_of_the_file():
    phases = by_name(Machine(1, 4, None, 64 * GIB))
    assert phases["load"] == PhaseMemory("load", 0, PROCESS + 40 * MIB + 32 * MIB)
    buffers = 2 * 1024 * 24  # two steps of one row
    assert phases["steady"].rank_bytes == PROCESS + 500 * MIB + LEFT + buffers
    assert phases["evaluate"].rank_bytes == PROCESS + 150 * MIB + TRIMMED + buffers


def test_a_save_that_training_waits_for_holds_a_piece_and_no_more_than_the_largest_tensor():
    machine, buffers = Machine(1, 4, None, 64 * GIB), 2 * 1024 * 24
    words = ["checkpoint.background=false"]
    for largest, piece in ((1 << 30, 16 * MIB), (MIB, MIB)):
        phases = by_name(machine, overrides=words, largest_trained=largest)
        idle = PROCESS + 40 * MIB + TRIMMED + buffers
        assert phases["save, training waits"].rank_bytes == idle + piece


@pytest.mark.parametrize(
    ("objective", "bytes_per_token", "has_reference"),
    [("sft", 24, False), ("dpo", 32, True), ("simpo", 32, False), ("kto", 64, True)],
)
def test_pairs_take_more_in_the_loader_and_a_reference_what_an_evaluation_takes(
    objective, bytes_per_token, has_reference
):
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=[f"tune.objective={objective}"])
    buffers = 2 * 1024 * bytes_per_token  # two steps of one row
    assert phases["steady"].rank_bytes == PROCESS + 500 * MIB + LEFT + buffers
    assert ("reference" in phases) is has_reference
    if has_reference:
        assert phases["reference"].rank_bytes == phases["evaluate"].rank_bytes - buffers


def test_copies_for_a_save_are_on_the_rank_that_writes_replicated_values():
    phases = by_name(Machine(1, 4, None, 64 * GIB))
    steady, saved = phases["steady"], phases["save, in the background"]
    assert saved.rank_bytes - steady.rank_bytes == 16 * MIB
    assert saved.first_bytes == 3 * 10 * MIB


@pytest.mark.parametrize(
    ("words", "is_full", "each", "first"),
    [
        (["parallel.shard=4"], True, 30 * MIB // 4, 0),
        (["parallel.shard=2", "parallel.replicate=2"], True, 0, 30 * MIB),  # two of four write
        (["parallel.zero_stage=2"], False, 30 * MIB // 4, 0),
    ],
)
def test_copies_of_sharded_values_are_on_the_ranks_that_write_them(words, is_full, each, first):
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=words, is_full=is_full)
    steady, saved = phases["steady"], phases["save, in the background"]
    assert saved.rank_bytes - steady.rank_bytes == 16 * MIB + each
    assert saved.first_bytes == first


def test_on_gpus_the_host_has_a_copy_of_all_that_is_saved():
    """Also where that is more than the copies on CPUs, or as much as the user grants."""
    large = {"trained": 200 * MIB}
    for machine, words, copied in (
        (Machine(1, 4, 80 * GIB, 64 * GIB), [], 608 * MIB),  # blocks of 16
        (Machine(1, 4, 80 * GIB, 64 * GIB), ["checkpoint.staging_bytes=100MiB"], 100 * MIB),
        (Machine(1, 4, None, 64 * GIB), [], 256 * MIB),
    ):
        phases = by_name(machine, overrides=words, **large)
        assert phases["save, in the background"].first_bytes == copied


def test_a_model_of_small_tensors_is_read_in_small_pieces():
    machine = Machine(1, 4, None, 64 * GIB)
    model = ModelBytes(10 * MIB, 3 * MIB, UNIT)
    config = load_config(None, [])
    settings = MemorySettings(config.parallel, config.checkpoint, step_tokens=1024)
    load = memory_by_phase(TRACE, machine, model, settings)[0]
    assert load.rank_bytes == PROCESS + 40 * MIB + 2 * 3 * MIB


@pytest.mark.parametrize("name", ["auto", "fp32", "bf16"])
def test_on_cpus_a_plan_is_of_the_dtype_that_a_run_computes_with(name):
    assert planned_dtype(name, uses_gpu=False) == resolve_dtype(name, torch.device("cpu"))


KINDS = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 6, "layer_types": KINDS}, None),
        (
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6, "layer_types": KINDS}},
            "text_config",
        ),
    ],
)
def test_a_shallower_model_lists_only_its_own_blocks(config, part, tmp_path):
    """Configurations that list the kind of each block are refused with a wrong number of them."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 2]}))
    shape = ModelShape(tmp_path, torch.float32, TuneConfig(), seed=0)
    assert shape.num_blocks == 6
    for num, expected in ((4, KINDS[:4]), (8, KINDS + KINDS[:2])):
        (folder := tmp_path / str(num)).mkdir()
        assert shape.with_blocks(num, folder).num_blocks == num
        written = json.loads((folder / "config.json").read_text())
        own = written if part is None else written[part]
        own_before = config if part is None else config[part]
        assert own.items() >= {"num_hidden_layers": num, "layer_types": expected}.items()
        assert own.keys() - {"eos_token_id"} == own_before.keys()
        assert written["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "said", "name"),
    [("longcat_flash", {"num_layers": 5}, "num_layers"), ("gpt2", {"n_layer": 5}, "n_layer")],
)
def test_blocks_are_counted_by_the_name_that_a_family_has_for_them(kind, said, name, tmp_path):
    """LongCat's blocks have two layers of attention, which num_hidden_layers counts."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **said}))
    shape = ModelShape(tmp_path, torch.float32, TuneConfig(), seed=0)
    assert shape.num_blocks == 5
    (tmp_path / "3").mkdir()
    assert shape.with_blocks(3, tmp_path / "3").num_blocks == 3
    assert json.loads((tmp_path / "3" / "config.json").read_text())[name] == 3


@pytest.mark.parametrize("is_string", [False, True])
def test_blocks_are_counted_by_the_list_of_their_kinds(is_string, tmp_path):
    """Nemotron-H has no number of blocks; published files spell the list as a string."""
    said = {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*M"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    kinds = read_config(tmp_path).layers_block_type
    if not is_string:
        said = {"model_type": "nemotron_h", "layers_block_type": kinds}
        (tmp_path / "config.json").write_text(json.dumps(said))
    shape = ModelShape(tmp_path, torch.float32, TuneConfig(), seed=0)
    assert shape.num_blocks == 5
    for num, expected in ((3, kinds[:3]), (8, kinds + kinds[:3])):
        (folder := tmp_path / str(num)).mkdir()
        assert shape.with_blocks(num, folder).num_blocks == num
        assert read_config(folder).layers_block_type == expected


def test_on_cpus_a_base_of_another_dtype_than_the_files_is_private():
    phases = by_name(Machine(1, 4, None, 64 * GIB), mapped_share=0.0)
    assert phases["load"].rank_bytes == PROCESS + 1040 * MIB + 32 * MIB


def test_on_cpus_what_the_files_have_in_other_pieces_is_private():
    phases = by_name(Machine(1, 4, None, 64 * GIB), mapped_share=0.25)
    assert phases["load"].rank_bytes == PROCESS + 790 * MIB + 32 * MIB


def test_experts_that_lie_one_by_one_in_the_files_are_not_mapped(tmp_path):
    """By the shapes in the files: of a small mixture all but its stacks are there as they are."""
    write_mixture("qwen3_moe", tmp_path / "model")
    built = build(
        tmp_path / "model", torch.float32, TuneConfig(method="lora"), 0, reads_weights=False
    )
    stacks = sum(
        p.numel() for _, part in find_stacked_experts(built.module) for p in part.parameters(False)
    )
    frozen = sum(p.numel() for p in built.module.parameters() if not p.requires_grad)
    dtypes, largest, share = report._inspect_stored_weights(tmp_path / "model", built)
    assert dtypes == {torch.float32}
    assert 0 < stacks < frozen
    assert share == pytest.approx(1 - stacks / frozen)
    assert largest <= 4 * max(p.numel() for p in built.module.parameters())


def test_on_cpus_shards_are_private():
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=["parallel.shard=4"])
    assert phases["load"].rank_bytes == PROCESS + 1040 * MIB + 32 * MIB


def test_on_gpus_the_host_holds_the_process_and_what_streams():
    phases = by_name(Machine(1, 4, 80 * GIB, 64 * GIB))
    assert phases["steady"].device_bytes == int(1340 * MIB * 1.03) + 1536 * MIB
    assert phases["steady"].rank_bytes == PROCESS + 1478 * MIB + 2 * 1024 * 24
    assert phases["steady"].node_bytes(Machine(1, 4, 1, 1)) == 4 * phases["steady"].rank_bytes


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, (8 - 7) + 8),  # an fp32 copy of 7 MiB and its gradient, each in a block of 8
        (3, 16 - 10),  # gradients of 10 MiB
    ],
)
def test_an_offloaded_optimizer_is_on_the_host(stage, more):
    trace = replace(TRACE, optimizer_bytes=21 * MIB, gradient_bytes=10 * MIB)
    words = [f"parallel.zero_stage={stage}"]
    there = by_name(Machine(1, 4, 80 * GIB, 64 * GIB), trace, overrides=words)
    words += ["parallel.offload_optimizer=cpu"]
    away = by_name(Machine(1, 4, 80 * GIB, 64 * GIB), trace, overrides=words)
    for phase in ("steady", "evaluate"):
        moved = there[phase].device_bytes - away[phase].device_bytes
        assert moved == pytest.approx(21 * MIB * 1.03, abs=2)
        grown = away[phase].rank_bytes - there[phase].rank_bytes
        assert grown == (21 + more) * MIB


@pytest.mark.parametrize("stage", [1, 2])
def test_the_optimizer_of_zero_is_this_ranks_share_of_copies_and_moments(stage):
    resolved = SimpleNamespace(
        parallel=SimpleNamespace(zero_stage=stage), layout=SimpleNamespace(size=8)
    )
    trained = replace(TRACE, gradient_bytes=800 * MIB, optimizer_bytes=1600 * MIB)
    assert memory_model.adapt_to_deepspeed_zero(trained, resolved).optimizer_bytes == 3 * 100 * MIB


@pytest.mark.parametrize("governor", ["on", "off"])
def test_a_run_does_without_copies_for_a_save_if_the_governor_may_decide(governor):
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=[f"memory.governor={governor}"])
    optional = [phase.name for phase in phases.values() if phase.optional]
    assert optional == (["save, in the background"] if governor == "on" else [])


def test_a_gathered_save_is_all_state_on_one_rank():
    phases = by_name(Machine(1, 4, 80 * GIB, 64 * GIB), save="gathered")
    assert phases["save"].first_bytes == 3 * 10 * MIB
    assert "save, in the background" not in phases


def test_a_save_for_which_training_waits_copies_nothing():
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=["checkpoint.background=false"])
    assert "save, in the background" not in phases


def test_compile_workers_count():
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=["train.compile=true"])
    # An eighth of a rank's 16 GiB is two workers.
    assert phases["compile"].rank_bytes - phases["steady"].rank_bytes == 2 * GIB
    assert phases["compile"].spare_bytes == GIB
    alone = ["train.compile=true", "run.threads=1"]
    phases = by_name(Machine(1, 4, None, 64 * GIB), overrides=alone)
    assert phases["compile"].rank_bytes - phases["steady"].rank_bytes == GIB


def test_a_merge_holds_one_tensor_at_a_time():
    phases = by_name(Machine(2, 4, 80 * GIB, 64 * GIB))
    assert phases["merge, in one process"].node_bytes(Machine(2, 4, 1, 1)) == (153 + 130 + 80) * MIB


@pytest.mark.parametrize(
    ("shards", "of_weights", "of_gradients"),
    [
        ({}, 0, 0),
        ({64 * MIB: 12}, 0, 0),
        ({33 * MIB: 1}, 31 * MIB, 31 * MIB),
        # 528 MiB in blocks of 512 and 64.
        ({33 * MIB: 16}, 48 * MIB, 16 * 31 * MIB),
    ],
)
def test_offloaded_weights_share_pinned_blocks_and_each_gradient_has_one(
    shards, of_weights, of_gradients
):
    machine, words = Machine(1, 4, 80 * GIB, 64 * GIB), ["parallel.offload_params=cpu"]
    for is_full, more in ((False, of_weights), (True, of_weights + of_gradients)):
        plain, pinned = (
            by_name(machine, replace(TRACE, shards=of), overrides=words, is_full=is_full)
            for of in ({}, shards)
        )
        for name, found in pinned.items():
            grown = 0 if "merge" in name else more
            assert found == replace(plain[name], rank_bytes=plain[name].rank_bytes + grown)


def test_the_copies_of_a_gpus_save_stay_and_no_later_phase_has_more_than_that_save():
    machine = Machine(1, 4, 80 * GIB, 64 * GIB)
    phases = by_name(machine, trained=200 * MIB, overrides=["parallel.shard=4"], is_full=True)
    kept = 160 * MIB  # 150 MiB in blocks of 16
    most = phases["save, in the background"]
    assert most.rank_bytes == phases["steady"].rank_bytes + 16 * MIB + kept
    assert most.rank_bytes >= phases["evaluate"].rank_bytes + kept
