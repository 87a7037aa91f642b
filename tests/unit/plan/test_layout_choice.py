import re

import pytest
from transformers import FalconConfig, LlamaConfig, LongcatFlashConfig, NemotronHConfig

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.errors import ConfigError
from hpc_tune.memory.policy import MODEL_STATE_MEMORY_SHARE
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.resolve import check_layout, choose_layout, choose_reshard, resolve, with_layout
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, static_bytes

FULL = ModelSize(0, 100, 0, 400)  # 1600 bytes on one rank


@pytest.mark.parametrize(
    ("world_size", "bytes_per_rank", "layout"),
    [
        (1, 10, Layout(1, 1)),  # nothing to shard over
        (4, 2666, Layout(1, 4)),  # 0.6 x 2666 = 1599.6
        (4, 2667, Layout(4, 1)),  # 0.6 x 2667 = 1600.2
        (16, 1 << 30, Layout(16, 1)),
    ],
)
def test_unset_axes_replicate_where_the_model_fits_and_else_shard(
    world_size, bytes_per_rank, layout
):
    chosen, why = choose_layout(ParallelConfig(), world_size, FULL, bytes_per_rank)
    assert chosen == layout
    assert chosen.size == world_size
    assert "(1.56 KiB of " in why
    assert ("no rank can" in why) == (layout.shard > 1)
    assert ("does not fit" in why) == (bytes_per_rank == 10)


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ({"replicate": 4}, Layout(4, 1)),
        ({"shard": 4}, Layout(1, 4)),
        ({"replicate": 1}, Layout(1, 4)),
        ({"shard": 1}, Layout(4, 1)),
        ({"replicate": 4, "shard": 1}, Layout(4, 1)),
        ({"replicate": 1, "shard": 4}, Layout(1, 4)),
        ({"replicate": 2}, Layout(2, 2)),
        ({"shard": 2}, Layout(2, 2)),
        ({"replicate": 2, "shard": 2}, Layout(2, 2)),
        ({"shard": 2, "tensor": 2}, Layout(1, 2, 2)),
        ({"shard": 1, "pipeline": 4}, Layout(1, 1, 1, 4)),
        ({"replicate": 1, "tensor": 2, "pipeline": 2}, Layout(1, 1, 2, 2)),
    ],
)
@pytest.mark.parametrize("bytes_per_rank", [1, 1 << 40])
def test_axes_that_are_set_are_kept_whatever_fits(axes, layout, bytes_per_rank):
    chosen, why = choose_layout(ParallelConfig(**axes), 4, FULL, bytes_per_rank)
    assert chosen == layout
    assert why.startswith("as configured, ")


@pytest.mark.parametrize(
    ("axes", "advice"),
    [
        ({"tensor": 3}, "start a multiple of 3 ranks, or change parallel.tensor=3"),
        ({"tensor": 2, "pipeline": 4}, "start a multiple of 8 ranks"),
        ({"tensor": 2, "shard": 4}, "set parallel.shard to 1 or 2, or leave it out"),
        ({"shard": 8}, "start a multiple of 8 ranks, or set parallel.shard to 1 or 2 or 4, or"),
        ({"replicate": 3}, "set parallel.replicate to 1 or 2 or 4, or leave it out"),
        ({"replicate": 2, "shard": 4}, "start 8 ranks, or set parallel.replicate=1 with"),
    ],
)
def test_axes_beyond_the_world_are_refused_with_what_would_work(axes, advice):
    with pytest.raises(ConfigError, match=advice):
        choose_layout(ParallelConfig(**axes), 4, FULL, 1 << 40)


def test_unset_axes_take_what_tensor_and_pipeline_leave():
    parallel = ParallelConfig(tensor=2, pipeline=2)
    assert choose_layout(parallel, 8, FULL, 1 << 40)[0] == Layout(2, 1, 2, 2)
    assert choose_layout(parallel, 8, FULL, 100)[0] == Layout(1, 2, 2, 2)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "axes", "expected"),
    [
        (8, 4, {}, Layout(2, 4)),
        (8, 4, {"tensor": 2}, Layout(2, 2, 2)),
        (16, 4, {"pipeline": 2}, Layout(2, 4, 1, 2)),
        (8, 8, {}, Layout(1, 8)),  # one node
        (8, 3, {}, Layout(1, 8)),  # a copy would lie on two nodes
        (8, 2, {}, Layout(1, 8)),  # half of the model does not fit
        (8, 1, {}, Layout(1, 8)),  # nodes with different numbers of ranks
    ],
)
def test_a_model_that_a_node_can_hold_is_sharded_within_each(
    world_size, ranks_per_node, axes, expected
):
    quarter = static_bytes(FULL, Layout(1, 4))
    room = int(quarter / MODEL_STATE_MEMORY_SHARE) + 1
    parallel = ParallelConfig(**axes)
    assert choose_layout(parallel, world_size, FULL, room, ranks_per_node)[0] == expected


def test_all_that_a_model_cannot_do_is_said_at_once():
    parallel = ParallelConfig(tensor=3, pipeline=8, stages_per_rank=5)
    layout = Layout(1, 1, 3, 8)
    with pytest.raises(ConfigError) as caught:
        check_layout(layout, parallel, LlamaConfig())
    assert "parallel.tensor=3 does not divide 11008 intermediate features, 32 att" in str(
        caught.value
    )
    assert "use 1, 2, 4, 8, 16, 32" in str(caught.value)
    assert "makes 40 stages of 32 decoder blocks; use at most 32 stages" in str(caught.value)
    check_layout(Layout(1, 1, 4, 8), ParallelConfig(), LlamaConfig())


def test_more_stages_than_blocks_of_two_layers_each_are_refused():
    model = LongcatFlashConfig(num_layers=2)
    with pytest.raises(ConfigError, match="makes 4 stages of 2 decoder blocks; use at most 2"):
        check_layout(Layout(1, 1, 1, 4), ParallelConfig(), model)
    check_layout(Layout(1, 1, 1, 2), ParallelConfig(), model)


def test_a_family_without_a_plan_is_refused():
    with pytest.raises(
        ConfigError, match=r"(?s)no plan for splitting a falcon.*no plan for cutting"
    ):
        check_layout(Layout(1, 1, 2, 2), ParallelConfig(), FalconConfig())
    with pytest.raises(ConfigError, match="no plan for cutting a nemotron_h model into stages"):
        check_layout(Layout(1, 1, 1, 2), ParallelConfig(), NemotronHConfig())


def test_gathered_weights_stay_where_they_fit():
    size = ModelSize(1000, 0, 1000, 0)
    layout = Layout(1, 4)
    assert choose_reshard(ParallelConfig(), size, layout, 1667) == "step"
    assert choose_reshard(ParallelConfig(), size, layout, 1666) == "block"
    assert choose_reshard(ParallelConfig(reshard="micro"), size, layout, 1) == "micro"


def test_what_is_resolved_leaves_nothing_open_and_is_resolved_to_itself():
    size, machine = ModelSize(1000, 10, 2000, 40), Machine(2, 4, 1667, 0)
    first = resolve(ParallelConfig(tensor=2), size, LlamaConfig(), machine, rank=5)
    assert first.layout == Layout(2, 2, 2)
    assert first.coordinates == first.layout.coordinates(5)
    axes = ("replicate", "shard", "tensor", "pipeline", "reshard")
    assert [getattr(first.parallel, axis) for axis in axes] == [2, 2, 2, 1, "block"]
    again = resolve(first.parallel, size, LlamaConfig(), machine, rank=5)
    assert (again.layout, again.parallel) == (first.layout, first.parallel)


def test_zero_keeps_its_axes_unset():
    asked = ParallelConfig(zero_stage=3, engine="deepspeed")
    resolved = resolve(asked, FULL, LlamaConfig(), Machine(1, 4, 100, 0))
    assert resolved.layout == Layout(1, 4)
    assert (resolved.parallel.shard, resolved.parallel.zero_stage) == (None, 3)


def test_nodes_with_different_numbers_of_ranks_hold_no_copies_of_their_own():
    """Three ranks on two nodes: the machine has two for each."""
    quarter = static_bytes(FULL, Layout(1, 4))
    machine = Machine(2, 4, int(quarter / MODEL_STATE_MEMORY_SHARE) + 1, 0)
    even, uneven = (
        resolve(ParallelConfig(), FULL, LlamaConfig(), machine, num_ranks).layout
        for num_ranks in (8, 6)
    )
    assert (even, uneven) == (Layout(2, 4), Layout(1, 6))


def test_a_layout_prints_its_axes():
    assert str(Layout(2, 8)) == "replicate 2 x shard 8"
    assert str(Layout(1, 2, 8, 4)) == "replicate 1 x shard 2 x tensor 8 x pipeline 4"
    assert str(Layout(1, 4, expert=2)) == "replicate 1 x shard 4, expert 2"


def test_checkpoints_say_over_how_many_ranks_experts_are_spread_if_they_are():
    axes = {"replicate": 1, "shard": 4, "tensor": 1, "pipeline": 1}
    assert Layout(1, 4).saved_axes == axes
    assert Layout(1, 4, expert=2).saved_axes == {**axes, "expert": 2}


def test_the_shard_axis_is_ranks_with_the_same_experts_x_ranks_that_they_are_spread_over():
    layout = Layout(2, 4, expert=2)
    assert layout.groups("shard") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.groups("expert") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("expert_shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("replicate", "expert_shard") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    parallel = ParallelConfig(shard=4, expert=2)
    assert choose_layout(parallel, 8, FULL, 1 << 40)[0] == layout
    assert with_layout(parallel, layout).expert == 2


def test_every_rank_has_a_place_of_its_own_and_tensor_ranks_are_neighbors():
    layout = Layout(2, 3, 4, 5)
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert len(set(places)) == layout.size == 120
    assert [p.tensor for p in places[:5]] == [0, 1, 2, 3, 0]
    assert [p.shard for p in places[:13:4]] == [0, 1, 2, 0]
    assert {p.data for p in places} == set(range(layout.data_parallel_size))
    for data in range(layout.data_parallel_size):
        assert sum(p.counts_rows for p in places if p.data == data) == 1


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"replicate": 2, "shard": 8}, 8, [{"replicate": 1}, {"shard": 4}]),
        ({"replicate": 3, "shard": 4}, 8, [{"replicate": 2}]),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 16, [{"replicate": 4}, {"shard": 4}]),
        ({"replicate": 4, "shard": 4}, 4, [{"replicate": 1}, {"shard": 1}]),
        ({"replicate": 1, "shard": 1}, 4, [{"replicate": 4}, {"shard": 4}]),
        ({"replicate": 3, "shard": 5}, 8, []),
    ],
)
def test_what_is_proposed_for_axes_that_do_not_multiply_to_the_ranks_does(given, ranks, expected):
    parallel = ParallelConfig(**given)
    with pytest.raises(ConfigError) as refused:
        choose_layout(parallel, ranks, FULL, 1 << 30)
    proposed = re.findall(r"(?:set|or) parallel\.(\w+)=(\d+) with", str(refused.value))
    assert [{name: int(size)} for name, size in proposed] == expected
    for change in expected:
        layout, _ = choose_layout(ParallelConfig(**given | change), ranks, FULL, 1 << 30)
        assert layout.size == ranks
    neither = ParallelConfig(**given | {"replicate": None, "shard": None})
    assert choose_layout(neither, ranks, FULL, 1 << 30)[0].size == ranks
