import pytest

from hpc_tune.config.schema import ParallelConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.errors import ConfigError
from hpc_tune.plan.account import ModelSize
from hpc_tune.plan.choose import choose_layout

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


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ({"replicate": 4}, Layout(4, 1)),
        ({"shard": 4}, Layout(1, 4)),
        ({"replicate": 1}, Layout(1, 4)),
        ({"shard": 1}, Layout(4, 1)),
        ({"replicate": 4, "shard": 1}, Layout(4, 1)),
        ({"replicate": 1, "shard": 4}, Layout(1, 4)),
    ],
)
@pytest.mark.parametrize("bytes_per_rank", [1, 1 << 40])
def test_axes_that_are_set_are_kept_whatever_fits(axes, layout, bytes_per_rank):
    chosen, why = choose_layout(ParallelConfig(**axes), 4, FULL, bytes_per_rank)
    assert chosen == layout
    assert why.startswith("as configured, ")


@pytest.mark.parametrize(
    "axes",
    [{"replicate": 3}, {"shard": 3}, {"replicate": 2}, {"shard": 2}, {"shard": 8}]
    + [{"replicate": 2, "shard": 2}, {"replicate": 1, "shard": 1}],
)
def test_axes_that_do_not_make_the_world_are_refused_with_what_would(axes):
    with pytest.raises(ConfigError, match="set parallel.replicate=4 or parallel.shard=4"):
        choose_layout(ParallelConfig(**axes), 4, FULL, 1 << 40)


def test_a_layout_prints_its_axes():
    assert str(Layout(2, 8)) == "replicate 2 x shard 8"
