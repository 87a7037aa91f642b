"""parallel.layout=auto without ranks: which layouts are looked at, and which is taken."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import FalconConfig, LlamaConfig

from hpc_tune.autotune import search
from hpc_tune.autotune.candidates import (
    legal_layouts,
    predict_candidates,
    rank_orders,
    ring_order,
    row_sharing_layouts,
)
from hpc_tune.autotune.search import (
    Measurements,
    choice_from_json,
    choice_lines,
    choice_to_json,
    choose_layout_for_command,
    compute_from_data_sheet,
    measurements_from_data_sheet,
    search_layout,
)
from hpc_tune.config.constraints import allows_expert_parallel, allows_tensor_parallel, check_config
from hpc_tune.config.load import load_config
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError
from hpc_tune.memory.policy import Phase
from hpc_tune.model.build import build
from hpc_tune.model.experts import max_expert_parallel_size
from hpc_tune.plan.hardware import CLUSTERS, Machine
from hpc_tune.plan.memory_model import PhaseMemory
from hpc_tune.plan.resolve import max_micro_rows
from hpc_tune.plan.step_time import ComputeTimes, Network, StepWork
from hpc_tune.probe.links import Link, Links
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, WeightGroup, measure_model_size
from tests.support.mixtures import write_mixture

MODEL = LlamaConfig(num_hidden_layers=7, num_attention_heads=8, num_key_value_heads=4)
COMPUTE = ComputeTimes(block_s=1e-5, head_s=1e-5, update_s=0.0)
GIB = 1 << 30


def sized(frozen=(0, 0), trained=(0, 0)):
    """A model whose values and bytes are all in slices of its blocks."""
    weights = tuple(
        WeightGroup("blocks", "slice", is_trained, False, *both)
        for is_trained, both in ((False, frozen), (True, trained))
        if both[0]
    )
    return ModelSize(frozen[0], trained[0], frozen[1], trained[1], 0, weights)


def config(**parts):
    return RunConfig.model_validate({"tune": {"method": "lora"}, **parts})


def network(size, rate=1e9, nodes=None, slow=()):
    nodes = nodes or range(size)
    pairs = [
        Link((a, b), (nodes[a], nodes[b]), 1e-5, dict(slow).get((a, b), rate))
        for a in range(size)
        for b in range(a + 1, size)
    ]
    return Network.from_links(Links(tuple(pairs), ()), nodes)


def legal(num_ranks, **parts):
    settings = config(**parts)
    allow_tensor_parallel = allows_tensor_parallel(settings.tune, settings.train)
    return legal_layouts(settings.parallel, MODEL, num_ranks, allow_tensor_parallel)


def ranked(settings, work, room, compute, net):
    """The candidates on ranks with GPUs of ``room`` bytes, the fastest first."""
    layouts = legal_layouts(settings.parallel, MODEL, len(net.nodes))
    machine = Machine(len(net.nodes), 1, room, 0)
    return predict_candidates(
        layouts, settings.parallel, settings.batch, work, machine, compute, net
    )


def test_every_way_to_multiply_to_four_and_to_fewer_is_looked_at():
    found = legal(4)
    by_size = {n: [layout for layout in found if layout.size == n] for n in (1, 2, 3, 4)}
    # 3 axes have no factor of 3 in the heads: tensor 3 is not legal.
    assert {n: len(layouts) for n, layouts in by_size.items()} == {1: 1, 2: 4, 3: 3, 4: 10}
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        ({"parallel": {"tensor": 2}}, {"tensor": {2}}),
        ({"parallel": {"shard": 1, "pipeline": 2}}, {"shard": {1}, "pipeline": {2}}),
        ({"tune": {"method": "qlora"}}, {"tensor": {1}}),
        ({"tune": {"method": "dora"}}, {"tensor": {1}}),
        ({"train": {"compile": True}}, {"tensor": {1}}),
    ],
)
def test_what_is_set_is_kept_and_what_cannot_be_is_not_looked_at(parts, left):
    found = legal(4, **parts)
    assert found
    for axis, values in left.items():
        assert {getattr(layout, axis) for layout in found} == values


def test_of_many_ranks_only_some_numbers_are_looked_at():
    sizes = {layout.size for layout in legal(24)}
    assert sizes == {1, 2, 4, 8, 16, 24}


def test_the_first_rank_always_works_and_slow_links_are_left_out():
    slow = {(1, 2): 1e6, (2, 3): 1e6, (2, 4): 1e6, (0, 2): 1e6, (2, 5): 1e6, (2, 6): 1e6}
    net = network(7, slow=slow)
    assert rank_orders(net, 6)
    assert all(0 in order for order in rank_orders(net, 6))
    assert all(2 not in order for order in rank_orders(net, 6))
    assert (0, 1, 2, 3, 4, 5, 6) in rank_orders(net, 7)
    assert len(rank_orders(network(4), 4)) == 24
    assert all(0 in order for order in rank_orders(network(4), 2))


@pytest.mark.parametrize(
    ("micro_size", "layout", "rows"),
    [
        ("auto", Layout(4, 1), 16),
        ("auto", Layout(1, 1, 1, 4), 4),
        ("auto", Layout(2, 1, 1, 2), 4),
        (2, Layout(1, 1, 1, 4), 2),
    ],
)
def test_pipelines_are_counted_with_the_micro_batches_that_a_run_takes(micro_size, layout, rows):
    settings = config(batch={"global_size": 64, "micro_size": micro_size})
    assert max_micro_rows(settings.batch, layout) == rows


def test_experts_are_spread_over_every_number_of_shards_that_divides_them():
    def spread(num_experts, **parts):
        parallel = config(**parts).parallel
        found = legal_layouts(parallel, MODEL, 4, True, num_experts)
        return {(one.shard, one.tensor, one.expert) for one in found if one.size == 4}

    dense = spread(1)
    assert {expert for *_, expert in dense} == {1}
    assert spread(8) - dense == {(2, 1, 2), (4, 1, 2), (4, 1, 4)}
    assert spread(6) - dense == {(2, 1, 2), (4, 1, 2)}
    assert dense <= spread(8) & spread(6)
    assert spread(8, parallel={"layout": "auto", "expert": 2}) == {(2, 1, 2), (4, 1, 2)}
    assert not spread(1, parallel={"layout": "auto", "expert": 2})


def test_what_cannot_be_with_spread_experts_is_known():
    def allowed(**parts):
        settings = config(**parts)
        return allows_expert_parallel(settings.parallel, settings.train)

    assert allowed()
    assert allowed(parallel={"layout": "auto"})
    assert allowed(tune={"method": "qlora"})
    assert not allowed(train={"compile": True})
    assert not check_config(config(parallel={"layout": "auto", "expert": 2}))
    assert check_config(config(parallel={"layout": "auto", "expert": 2, "shard": 3}))


def test_a_number_of_ranks_that_experts_cannot_be_spread_over_is_refused():
    parallel = {"layout": "auto", "expert": 2}
    settings = config(model={"path": "shape:llama3-8b"}, parallel=parallel)
    with pytest.raises(ConfigError, match="experts of a llama model cannot be split over ranks"):
        choose_layout_for_command(settings, Machine(1, 2, 80 * GIB, 512 * GIB), None, "h100-ib400")


def test_tokens_are_sent_where_gathering_all_experts_takes_longer(tmp_path):
    directory = write_mixture("mixtral", tmp_path, num_local_experts=8)
    built = build(directory, torch.float32, config().tune, 0, reads_weights=False)
    work = StepWork(measure_model_size(built.module), built.config, 4, 0, 4)
    assert max_expert_parallel_size(built.module) == 8

    def fastest(seq_len):
        settings = config(batch={"global_size": 4, "micro_size": 1}, parallel={"shard": 4})
        layouts = legal_layouts(settings.parallel, built.config, 4, False, 8)
        machine = Machine(4, 1, GIB, 0)
        of_rows = replace(work, seq_len=seq_len)
        places = (settings.parallel, settings.batch, of_rows, machine, COMPUTE, network(4, 1e7))
        return predict_candidates(layouts, *places)[0].layout

    assert fastest(8) == Layout(1, 4, expert=4)
    assert fastest(8192) == Layout(1, 4)


def best(room, net, size, parts=None, compute=COMPUTE, rows=64):
    settings = config(batch={"global_size": rows, "micro_size": 1}, **(parts or {}))
    work = StepWork(size, MODEL, rows, 128, 2)
    return [c.layout for c in ranked(settings, work, room, compute, net)]


ADAPTERS = sized(frozen=(10**9, 2 * GIB), trained=(10**6, 1 << 22))


def test_a_base_that_fits_is_replicated_and_one_that_does_not_is_cut_by_the_links():
    assert best(8 * GIB, network(4), ADAPTERS)[0] == Layout(4, 1)
    # 2 GiB at 1 GB/s for each micro-batch is long; activations are not.
    slow = best(GIB, network(4, rate=1e9), ADAPTERS)
    assert slow[0].pipeline == 4
    assert all(layout.shard * layout.pipeline * layout.tensor > 2 for layout in slow)
    hides = ComputeTimes(1e-5, 1e-5, 0.0, sync_s=1e-5, overlaps=True)
    # Eight micro-batches fill a pipeline badly.
    assert best(GIB, network(4, rate=1e12), ADAPTERS, None, hides, rows=8)[0].shard > 1


def test_of_orders_that_are_as_fast_the_one_with_the_fastest_neighbors_is_taken():
    net = network(3, slow={(0, 1): 1e8})
    shared = ComputeTimes(1e-3, 1e-3, 0.0, sharing=3.0)  # what a rank waits for, another computes
    settings = config(parallel={"pipeline": 3}, batch={"global_size": 64, "micro_size": 1})
    work = StepWork(ADAPTERS, MODEL, 64, 128, 2)
    [found] = ranked(settings, work, 8 * GIB, shared, net)
    assert found.ranks in ((0, 2, 1), (1, 2, 0))


def test_fewer_ranks_are_taken_where_more_are_slower():
    everything = sized(trained=(10**9, 4 * GIB))
    slow = best(64 * GIB, network(4, rate=1e6), everything, {"tune": {"method": "full"}})
    assert slow[0] == Layout(1, 1)


@pytest.mark.soak
def test_among_512_ranks_the_layouts_are_compared_in_seconds():
    """It took minutes when each order of ranks was looked for again for each layout."""
    measured = measurements_from_data_sheet(CLUSTERS["h100-ib400"], 64, 8)
    net = Network.from_links(measured.links, measured.nodes)
    work = StepWork(ADAPTERS, MODEL, 512, 128, 2)
    began_s = time.monotonic()
    found = ranked(config(), work, 64 * GIB, COMPUTE, net)
    assert len(found) > 100
    assert time.monotonic() - began_s < 30


# --- the plan command -------------------------------------------------------------------------


def test_a_slow_pair_is_kept_out_of_a_pipeline_and_the_table_says_what_was_chosen():
    settings = load_config(
        None, ["parallel=auto", "parallel.pipeline=4", "batch.micro_size=1", "data.seq_len=128"]
    )
    pairs = [
        Link((a, b), (a, b), 1e-5, 1e3 if (a, b) == (1, 2) else 1e9)
        for a in range(4)
        for b in range(a + 1, 4)
    ]
    measured = Measurements((0, 1, 2, 3), Links(tuple(pairs), ()), COMPUTE)
    choice = search_layout(settings, Machine(4, 1, None, 8 * GIB), measured)
    assert choice.best.layout == Layout(1, 1, 1, 4)
    neighbors = list(zip(choice.best.ranks, choice.best.ranks[1:], strict=False))
    assert (1, 2) not in neighbors
    assert (2, 1) not in neighbors
    lines = choice_lines(choice)
    assert choice_from_json(choice_to_json(choice)) == (
        replace(choice.best, memory="", fits=None),
        lines,
    )
    assert "pipeline 4" in lines[1]
    assert lines[1].endswith("<- this one")


def test_a_named_machine_is_planned_without_measuring_and_the_rest_of_the_plan_is_of_its_layout():
    settings = load_config(None, ["parallel=auto"])
    machine = Machine(2, 2, 80 * GIB, 512 * GIB)
    choice, used, chosen = choose_layout_for_command(settings, machine, None, "h100-ib400")
    assert chosen.parallel.layout == "simple"
    assert chosen.parallel.replicate == choice.best.layout.replicate
    assert used.world_size == choice.best.layout.size


@pytest.mark.full
def test_what_one_plan_has_shown_of_others_is_not_planned_again(caplog):
    """Each plan of a 70B model takes half a minute; there are 35 layouts of 16 ranks."""
    settings = load_config(None, ["parallel=auto", "batch.micro_size=64"])
    machine = Machine(2, 8, int(2.2 * GIB), 512 * GIB)
    caplog.set_level("INFO")
    with pytest.raises(
        ConfigError,
        match=r"(?s)the smallest need that was found is .* of 2.20 GiB per rank, with .*recompute",
    ):
        choose_layout_for_command(settings, machine, None, "h100-ib400")
    planned = [r.getMessage() for r in caplog.records if "planning" in r.getMessage()]
    assert 1 <= len(planned) <= 6, planned


FAST_LINKS = Links(tuple(Link((0, n), (0, 0), 1e-6, 1e11) for n in (1, 2, 3)), ())
FOUR = Measurements((0,) * 4, FAST_LINKS, COMPUTE)


def test_neighbors_share_rows_by_every_number_that_divides_the_ranks():
    layouts = [Layout(1, 1), Layout(2, 8), Layout(1, 4, 2), Layout(1, 2, 4)]
    idle, others = row_sharing_layouts(layouts, MODEL, global_rows=4, max_sharing_ranks=8)
    assert [(found.replicate, found.context) for found in idle] == [(2, 2), (2, 4), (2, 8)]
    assert [(found.tensor, found.context) for found in others] == [(2, 2), (2, 4), (4, 2)]
    mixed = SimpleNamespace(
        model_type="qwen3_next", num_attention_heads=8, layer_types=["linear_attention"]
    )
    assert row_sharing_layouts(layouts, mixed, 4, 8) == ([], [])
    idle, others = row_sharing_layouts(layouts, MODEL, global_rows=4, max_sharing_ranks=4)
    assert [found.context for found in idle] == [2, 4]
    assert [(found.tensor, found.context) for found in others] == [(2, 2)]


@pytest.mark.parametrize(("rows", "context"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_that_would_have_no_row_share_one(rows, context):
    words = [f"batch.global_size={rows}", "batch.micro_size=1", "data.seq_len=4096"]
    settings = load_config(None, ["parallel=auto", "parallel.tensor=1", *words])
    choice = search_layout(settings, Machine(1, 4, 80 * GIB, 512 * GIB), FOUR)
    assert choice.best.layout == Layout(4, 1, context=context)
    said = f"ranks share rows: a step has {rows} for 4 ranks"
    assert (said in "\n".join(choice_lines(choice))) == (context > 1)


def test_rows_of_a_model_with_masks_of_its_own_stay_whole(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = FalconConfig(vocab_size=512, architectures=["FalconForCausalLM"], **sizes)
    model.save_pretrained(tmp_path)
    words = ["batch.global_size=1", "batch.micro_size=1", "data.seq_len=4096"]
    words += [f"model.path={tmp_path}", "parallel.tensor=1", "parallel.pipeline=1"]
    settings = load_config(None, ["parallel=auto", *words])
    choice = search_layout(settings, Machine(1, 4, 80 * GIB, 512 * GIB), FOUR)
    assert choice.best.layout.context == 1


@pytest.mark.parametrize(
    ("words", "tokens", "context", "said"),
    [
        ((), 4096, 1, ""),
        ((), 2048, 2, "2 ranks share each row: no layout fits in which each has whole ones"),
        ((), 1024, 4, "4 ranks share each row: no layout fits in which each has whole ones"),
        (("parallel.context=2",), 2048, 2, ""),
        (("parallel.context=2",), 1024, None, "none of"),
        (("train.compile=true",), 2048, None, "none of"),
    ],
)
def test_rows_are_shared_where_no_rank_can_hold_whole_ones(
    words, tokens, context, said, monkeypatch
):
    """Plans say that a rank can hold so many ``tokens`` of a row."""
    planned = []

    def plan(config, machine):
        planned.append(config.parallel.context)
        fits = config.data.seq_len // config.parallel.context <= tokens
        phase = PhaseMemory(Phase.STEADY, GIB, GIB)
        return SimpleNamespace(steady_phase=phase, tokens_that_fit=4096, fits=fits, advice=["more"])

    monkeypatch.setattr(search, "make_plan", plan)
    monkeypatch.setattr(search, "fits_without_plan", lambda most, machine: False)
    limits = ["batch.global_size=8", "batch.micro_size=1", "data.seq_len=4096"]
    limits += ["parallel.tensor=1", "parallel.pipeline=1"]
    settings = load_config(None, ["parallel=auto", *limits, *words])
    machine = Machine(1, 4, 80 * GIB, 512 * GIB)
    if context is None:
        with pytest.raises(ConfigError, match=said):
            search_layout(settings, machine, FOUR)
        return
    choice = search_layout(settings, machine, FOUR)
    assert choice.best.layout == Layout(4, 1, context=context)
    lines = "\n".join(choice_lines(choice))
    assert said in lines
    assert ("share" in lines) == bool(said)
    assert ", context" in lines or context == 1
    assert planned == sorted(planned), "whole rows first"


def test_the_ring_of_the_measurement_goes_around_a_slow_link():
    assert ring_order(network(4)) == (0, 1, 2, 3)
    slow = network(4, slow=[((0, 1), 1e7)])
    order = ring_order(slow)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2, 3]
    assert 1 not in (order[1], order[-1])


def test_what_cannot_be_chosen_is_said():
    settings = load_config(None, ["parallel=auto"])
    machine = Machine(1, 4, 80 * GIB, 512 * GIB)
    with pytest.raises(ConfigError, match="doctor --json"):
        choose_layout_for_command(settings, machine, None, None)
    with pytest.raises(ConfigError, match="h100-ib400"):
        choose_layout_for_command(settings, machine, None, "cray-1")
    impossible = load_config(None, ["parallel=auto", "parallel.tensor=3"])
    with pytest.raises(
        ConfigError, match="no layout of up to 4 ranks is possible: parallel.tensor=3"
    ):
        choose_layout_for_command(impossible, machine, None, "h100-ib400")


def test_a_file_that_doctor_did_not_write_is_refused(tmp_path):
    file = tmp_path / "doctor.json"
    unmeasured = {"links": {"pairs": [], "collectives": []}}
    texts = [json.dumps({**unmeasured, "ranks": [{"node": 0}] * num}) for num in (0, 2)]
    pair = {"ranks": [0, 1], "nodes": [0, 0], "latency_s": "slow", "bytes_per_s": 1e9}
    slow = {"links": {**unmeasured["links"], "pairs": [pair]}, "ranks": [{"node": 0}] * 2}
    for text in ("", "{}", '{"links": 1, "ranks": []}', "[" * 10**5, *texts, json.dumps(slow)):
        file.write_text(text)
        with pytest.raises(ConfigError, match="doctor --json"):
            Measurements.read(file)
    with pytest.raises(ConfigError, match="no such|No such"):
        Measurements.read(tmp_path / "gone.json")


def test_measured_links_survive_the_way_to_the_plan(tmp_path):
    links = Links((Link((0, 1), (0, 0), 1e-5, 1e9),), (), 3, 2.0, (1, 0))
    told = Measurements((0, 0), links, COMPUTE)
    file = tmp_path / "measured.json"
    file.write_text(told.to_json())
    assert Measurements.read(file) == told
    assert told.positions_in_link_order([0, 1]) == [1, 0]
    without = {**json.loads(told.to_json()), "compute": None}
    file.write_text(json.dumps(without))
    assert Measurements.read(file).compute is None


def test_a_machine_of_the_table_has_the_links_of_its_data_sheet():
    cluster = CLUSTERS["h100-ib400"]
    measured = measurements_from_data_sheet(cluster, 2, 8)
    net = Network.from_links(measured.links, measured.nodes)
    assert net.rate(0, 7) == cluster.intra_node_bytes_per_s
    assert net.rate(3, 12) == cluster.inter_node_bytes_per_s
    model = SimpleNamespace(
        num_hidden_layers=2, hidden_size=10, vocab_size=100, tie_word_embeddings=True
    )
    size = ModelSize(5_000, 100, 10_000, 400)
    compute = compute_from_data_sheet(cluster, size, model, 16, recompute=False)
    # 4 flops per frozen value and 6 per trained one, of which the head has 4 x 1000
    whole = 4 * 5_000 + 6 * 100 + 6 * 2 * 10 * 16
    flops = (2 * compute.block_s + compute.head_s) * 0.4 * cluster.flops
    assert flops == pytest.approx(whole)


@pytest.mark.parametrize("layout", ["auto", "simple"])
def test_auto_and_zero_do_not_go_together(layout):
    parallel = ParallelConfig(layout=layout, zero_stage=2, engine="deepspeed")
    problems = check_config(RunConfig(parallel=parallel))
    assert any("parallel.layout=auto" in problem for problem in problems) == (layout == "auto")
