"""Predicted seconds of a step, against arithmetic written out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.plan.step_time import ComputeTimes, Network, StepWork, step_time
from hpc_tune.probe.links import CollectiveTime, Link, Links
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, WeightGroup


def model(layers, head_blocks):
    """Of 1000 features, with a head that has the values of ``head_blocks`` blocks."""
    words = max(1, round(head_blocks * VALUES / layers / 1000))
    sizes = {"num_hidden_layers": layers, "hidden_size": 1000, "vocab_size": words}
    return SimpleNamespace(**sizes, tie_word_embeddings=False)


# 8 blocks of 100 MB; adapters of 1 MB; a row has 10 tokens.
VALUES = 400_000_000 + 250_000
BASE = WeightGroup("blocks", "slice", False, False, 400_000_000, 800_000_000)
OF_ADAPTERS = WeightGroup("blocks", "slice", True, False, 250_000, 1_000_000)
TRAINED = WeightGroup("blocks", "slice", True, False, 200_000_000, 800_000_000)
ADAPTERS = ModelSize(400_000_000, 250_000, 800_000_000, 1_000_000, 0, (BASE, OF_ADAPTERS))
ALL = ModelSize(0, 200_000_000, 0, 800_000_000, 0, (TRAINED,))
MODEL = model(8, head_blocks=2)
# 0.1 s per token: 8 blocks of 0.01 s and a head of two blocks.
COMPUTE = ComputeTimes(block_s=0.01, head_s=0.02, update_s=0.0)


def network(size, rate, latency=0.0, nodes=None, slow=(), lanes=1.0):
    """All pairs alike, but for ``slow``: {pair: rate}."""
    nodes = nodes or list(range(size))
    pairs = [
        Link((a, b), (nodes[a], nodes[b]), latency, dict(slow).get((a, b), rate))
        for a in range(size)
        for b in range(a + 1, size)
    ]
    return Network.from_links(Links(tuple(pairs), (), 0, lanes), nodes)


def seconds(layout, net, size=ADAPTERS, rows=8, compute=COMPUTE, ranks=None, micro=1, **parallel):
    work = StepWork(size, MODEL, rows, 10, 2)
    settings = ParallelConfig(**{"reshard": "block", **parallel})
    order = ranks or range(layout.size)
    return step_time(work, layout, order, settings, micro, compute, net)


def test_one_rank_computes_and_sends_nothing():
    found = seconds(Layout(1, 1), network(1, 1e9))
    assert found.seconds == pytest.approx(8 * 10 * 0.1)
    assert found.comm_s == 0


def test_replicas_share_the_rows_and_add_up_the_adapters():
    found = seconds(Layout(4, 1), network(4, 1e6))
    # 2 (n - 1) / n of 1 MB at 1 MB/s
    assert found.comm_s == pytest.approx(2 * 3 / 4)
    assert found.seconds == pytest.approx(2 * 10 * 0.1 + found.comm_s)
    assert found.comm_share == pytest.approx(1.5 / 3.5)


def test_rows_that_do_not_divide_make_the_ranks_wait_for_the_fullest():
    assert seconds(Layout(4, 1), network(4, 1e15), rows=9).seconds == pytest.approx(3 * 10 * 0.1)


@pytest.mark.parametrize(("reshard", "gatherings"), [("block", 4), ("micro", 2), ("step", 1)])
def test_a_sharded_base_is_gathered_as_often_as_it_is_dropped(reshard, gatherings):
    found = seconds(Layout(1, 4), network(4, 1e9), reshard=reshard)
    # each of two micro-batches forward and backward; (n - 1) / n of 800 MB at 1 GB/s
    adapters_s = 2 * 3 / 4 * 1e6 / 1e9
    assert found.comm_s == pytest.approx(gatherings * 3 / 4 * 0.8 + adapters_s)


def test_gathering_hides_behind_compute_where_it_can():
    hides = ComputeTimes(0.01, 0.02, 0.0, overlaps=True)
    found = seconds(Layout(1, 4), network(4, 1e9), compute=hides)
    assert found.seconds == pytest.approx(2 + 4 * 0.6 - 2 + 1.5e-3)
    first_s = 2 * 2 * 0.06 / 9  # of nine units, in each of two micro-batches
    assert seconds(Layout(1, 4), network(4, 1e10), compute=hides).comm_s == pytest.approx(
        first_s + 1.5e-4
    )


def test_all_trained_and_sharded_reduces_in_fp32_and_over_the_replicas():
    found = seconds(Layout(2, 2), network(4, 1e9), ALL, reshard="step")
    gathered = 1 / 2 * 0.4  # 16 bit weights, once
    scattered, summed = 1 / 2 * 0.8, 2 * 1 / 2 * 0.4
    assert found.comm_s == pytest.approx(gathered + scattered + summed)


def test_a_pipeline_fills_and_drains_once():
    # Four stages of ten units: 3, 2, 2 and a head with one block; 8 micro-batches.
    found = seconds(Layout(1, 1, 1, 4), network(4, 1e15))
    assert found.seconds == pytest.approx((7 * 0.03 + 0.1) * 10)
    # Eight stages of a block each, the last one with the head: the ranks have 2, 2, 2 and 4 units.
    interleaved = seconds(Layout(1, 1, 1, 4), network(4, 1e15), stages_per_rank=2)
    assert interleaved.seconds == pytest.approx((7 * 0.04 + 0.04 + 0.06 / 2) * 10)


def test_stages_gather_one_after_the_other_or_with_each_micro_batch():
    net, layout = network(4, 1e9), Layout(1, 2, 1, 2)
    # The stages gather 5/8 and 3/8 of 800 MB over two ranks; 4 micro-batches, the adapters' 5/8.
    adapters_s = 2 * 1 / 2 * 0.625e6 / 1e9
    found = seconds(layout, net, reshard="step")
    stage_hops_s = 2 * 20_000 / (1e9 / 2)
    assert found.comm_s == pytest.approx(0.25 + 0.15 + adapters_s + stage_hops_s, rel=1e-3)
    found = seconds(layout, net, reshard="micro")
    assert found.seconds == pytest.approx(4 * 0.75 + 0.65 + adapters_s + stage_hops_s, rel=1e-3)


def test_a_pipelines_messages_take_time_twice_or_hold_up_every_micro_batch():
    # 10 tokens x 1000 values x 2 bytes
    hop_s = 20_000 / 1e6
    found = seconds(Layout(1, 1, 1, 2), network(2, 1e6))
    assert found.seconds == pytest.approx((7 * 0.05 + 0.1) * 10 + 2 * hop_s)
    hop_s = 20_000 / 1e4
    slow = seconds(Layout(1, 1, 1, 2), network(2, 1e4))
    assert slow.seconds == pytest.approx(7 * hop_s + 0.1 * 10 + 2 * hop_s)
    assert slow.comm_s == pytest.approx(slow.seconds - (7 * 0.05 + 0.1) * 10)


def test_the_tensor_axis_sums_four_times_per_block_and_micro_batch():
    found = seconds(Layout(1, 1, 2), network(2, 1e6))
    one_s, sums = 2 * 1 / 2 * 20_000 / 1e6, 8 * 4
    # The first block's last one is not needed; the embedding, and the head with three numbers for
    # each of ten tokens.
    sums += -1 + 1 + 1
    of_tokens_s = 2 * 1 / 2 * 10 * 3 * 4 / 1e6
    assert found.comm_s == pytest.approx(8 * (sums * one_s + of_tokens_s))
    assert found.seconds == pytest.approx(8 * 10 * 0.1 / 2 + found.comm_s)


def test_each_stage_of_a_pipeline_sums_up_its_own_blocks():
    """Of ten blocks and a head that costs as much as 2.4, or nothing, on four stages."""
    one_s = 2 * 1 / 2 * 20_000 / 1e6  # 10 tokens x 1000 values x 2 bytes, over 2 ranks at 1 MB/s
    net, layout = network(8, 1e6), Layout(1, 1, 2, 4)
    settings = ParallelConfig(reshard="block")
    for head_s, blocks in ((0.024, (3, 3, 3, 1)), (0.0, (3, 3, 2, 2))):
        compute = ComputeTimes(block_s=0.01, head_s=head_s, update_s=0.0)
        work = StepWork(ADAPTERS, model(10, head_s / 0.01), 8, 10, 2)
        found = step_time(work, layout, range(8), settings, 1, compute, net)
        stages_s = [num * (10 * 0.01 / 2 + 4 * one_s) for num in blocks]
        # The first has the embedding's sum in place of its first block's last, the last the head's.
        stages_s[-1] += 10 * head_s / 2 + one_s + 2 * 1 / 2 * 10 * 3 * 4 / 1e6
        stage_hops_s = 3 * 20_000 / 1e6
        assert found.seconds == pytest.approx(7 * max(stages_s) + sum(stages_s) + 2 * stage_hops_s)


def test_where_processors_are_shared_a_waiting_rank_gives_its_own_away():
    shared = ComputeTimes(0.01, 0.02, 0.0, sharing=2.0)
    # Four ranks on two cores do not compute faster than two.
    four, two, one = (
        seconds(Layout(n, 1), network(4, 1e15), compute=shared).seconds for n in (4, 2, 1)
    )
    assert four == pytest.approx(2 * 10 * 0.1)
    assert two == pytest.approx(4 * 10 * 0.05)
    assert one == pytest.approx(8 * 10 * 0.05)
    # A pipeline's bubbles are filled by the other ranks' work.
    found = seconds(Layout(1, 1, 1, 4), network(4, 1e15), compute=shared).seconds
    assert found == pytest.approx(max((7 * 0.03 + 0.1) * 10 / 2, 8 * 0.1 * 10 / 4))


def test_the_order_of_ranks_keeps_a_slow_link_out_of_the_ring():
    net = network(4, 1e9, slow={(0, 1): 1e6})
    straight, around = (
        seconds(Layout(4, 1), net, ranks=order).comm_s for order in ((0, 1, 2, 3), (0, 2, 1, 3))
    )
    assert straight == pytest.approx(2 * 3 / 4 * 1)
    assert around == pytest.approx(2 * 3 / 4 * 1e-3)


def test_groups_that_leave_a_node_at_once_share_its_network():
    # Two nodes of two ranks; both replicas of a shard pair talk across.
    nodes = [0, 0, 1, 1]
    alone = network(4, 1e6, nodes=nodes)
    layout = Layout(2, 1, 2)  # tensor within the node, replicas across
    tensor_s = seconds(Layout(1, 1, 2), network(2, 1e6)).comm_s / 2  # half of the rows
    shared = seconds(layout, alone).comm_s - tensor_s
    assert shared == pytest.approx(2 * 1 / 2 * 0.5 * 2)
    two_cards = network(4, 1e6, nodes=nodes, lanes=2.0)
    assert seconds(layout, two_cards).comm_s - tensor_s == pytest.approx(2 * 1 / 2 * 0.5)


def test_what_collectives_were_measured_to_take_corrects_what_links_promise():
    pair = Link((0, 1), (0, 1), 0.0, 1e6)
    measured = (
        CollectiveTime("all-reduce", 16, 0.25, 0.0),
        CollectiveTime("all-reduce", 1_000_000, 1.25, 0.0),  # 1 s beside latency, as promised
        CollectiveTime("all-gather", 16, 0.5, 0.0),
        CollectiveTime("all-gather", 2_000_000, 3.5, 0.0),  # 3 s, promised are 1/2 x 2
    )
    net = Network.from_links(Links((pair,), measured), (0, 1))
    assert net.collective_s("all_gather", [[0, 1]], 2e6) == pytest.approx(3.0)
    assert net.collective_s("all_reduce", [[0, 1]], 1e6) == pytest.approx(1.0)
    assert seconds(Layout(2, 1), net).comm_s == pytest.approx(1.0)


def test_each_collective_waits_for_its_ranks_as_a_tree_does():
    waits = ComputeTimes(0.01, 0.02, 0.0, sync_s=0.1)
    net = network(4, 1e15)
    # adapters, and the four small sums of a step
    assert seconds(Layout(4, 1), net, compute=waits).comm_s == pytest.approx(5 * 0.1)
    # two micro-batches, forward and backward, of nine units; then as above
    found = seconds(Layout(1, 4), net, compute=waits).comm_s
    assert found == pytest.approx((2 * 2 * 9 + 5) * 0.1)
    found = seconds(Layout(2, 1, 2), net, compute=waits).comm_s
    assert found == pytest.approx((4 * (8 * 4 - 1 + 1 + 2) + 1) * 0.05 + 4 * 0.1)


def test_gathered_weights_take_new_memory_and_a_copy():
    copies = ComputeTimes(0.01, 0.02, 0.0, unshard_s=1e-9)
    found = seconds(Layout(1, 4), network(4, 1e15), compute=copies, reshard="step")
    assert found.comm_s == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("layout", "size", "copy_s", "waits_s"),
    [
        # A block takes 0.1 s: a third of it forward, the rest again and backward. The last block's
        # input comes back while nothing is computed.
        (Layout(1, 1), ADAPTERS, 0.02, 0.02),
        (Layout(1, 1), ADAPTERS, 0.05, 8 * (0.05 - 0.1 / 3) + 0.05),
        (Layout(1, 1), ADAPTERS, 0.1, 8 * (0.1 - 0.1 / 3) + 7 * (0.1 - 0.2 / 3) + 0.1),
        # Half the work, and the same inputs.
        (Layout(1, 1, 2), ADAPTERS, 0.04, 8 * (0.04 - 0.05 / 3) + 7 * (0.04 - 0.1 / 3) + 0.04),
        # Of four passes the first; inputs are in fp32.
        (Layout(1, 1), ALL, 0.02, 8 * (0.04 - 0.1 / 4) + 0.04),
    ],
)
def test_blocks_wait_for_copies_of_their_inputs_that_take_longer_than_they(
    layout, size, copy_s, waits_s
):
    # 10 tokens x 1000 values x 2 bytes
    copies = replace(COMPUTE, host_copy_s=copy_s / 20_000)
    net = network(layout.size, 1e15)
    moved = seconds(layout, net, size, compute=copies, recompute="full", offload_activations=True)
    kept = seconds(layout, net, size, compute=copies, recompute="full")
    assert moved.seconds - kept.seconds == pytest.approx(8 * waits_s, rel=1e-6)
    assert moved.comm_s == pytest.approx(kept.comm_s)


def test_two_ranks_that_gather_alone_use_both_directions_of_one_link():
    pairs = tuple(Link((a, b), (a, b), 0.0, 2e6, 1e6) for a in range(4) for b in range(a + 1, 4))
    net = Network.from_links(Links(pairs, ()), range(4))
    assert net.collective_s("all_gather", [[0, 1], [2, 3]], 4e6) == pytest.approx(1 / 2 * 4)
    assert net.collective_s("all_gather", [[0, 1, 2, 3]], 4e6) == pytest.approx(3 / 4 * 2)
    assert net.collective_s("all_reduce", [[0, 1], [2, 3]], 4e6) == pytest.approx(2 * 1 / 2 * 2)


def test_what_each_rank_sends_to_each_other_shares_the_links_that_leave_a_node():
    pairs = [
        Link((a, b), (a // 2, b // 2), 0.0, 4e6 if a // 2 == b // 2 else 1e6)
        for a in range(4)
        for b in range(a + 1, 4)
    ]
    net = Network.from_links(Links(tuple(pairs), ()), (0, 0, 1, 1))
    assert net.collective_s("all_to_all", [[0, 1]], 4e6) == pytest.approx(1 / 2 * 4 / 4)
    # A quarter for each of the two on the other node, by both ranks of a node.
    assert net.collective_s("all_to_all", [[0, 1, 2, 3]], 4e6) == pytest.approx(2 * 2 / 4 * 4)
    assert net.collective_s("all_to_all", [[0, 2], [1, 3]], 4e6) == pytest.approx(2 * 1 / 2 * 4)
    wide = replace(net, lanes=2.0)
    assert wide.collective_s("all_to_all", [[0, 1, 2, 3]], 4e6) == pytest.approx(2 / 4 * 4)


def test_a_pair_that_was_not_measured_is_as_another_of_its_nodes():
    nodes = (0, 0, 1, 1, 2, 2)
    pairs = (
        Link((0, 1), (0, 0), 1e-6, 9e9),
        Link((0, 2), (0, 1), 1e-5, 1e9),
        Link((0, 4), (0, 2), 1e-5, 2e9),
    )
    net = Network.from_links(Links(pairs, ()), nodes)
    assert net.rate(1, 3) == 1e9
    assert net.rate(1, 5) == 2e9
    assert net.rate(4, 5) == 9e9, "the same node: as others"
    assert net.rate(2, 4) == 1.5e9, "nodes 1 and 2 were not measured: the median across nodes"
