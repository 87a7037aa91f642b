"""The schedule as a pure function, run on queues instead of a network."""

from collections import deque

import pytest

from hpc_tune.step.layout import balance_stages, schedule_passes


def simulate(ranks, chunks, num_micro):
    """Run all ranks with FIFO edges, one pass at a time; return the most passes in flight by rank.

    A message is (kind, stage, micro): a rank that takes another one than it waits for, or that
    waits for ever, fails.
    """
    plans = [deque(schedule_passes(r, ranks, chunks, num_micro)) for r in range(ranks)]
    last = ranks * chunks - 1
    edges = {(r, kind): deque() for r in range(ranks) for kind in ("forward", "backward")}
    in_flight, most = [0] * ranks, [0] * ranks
    while any(plans):
        moved = False
        for rank, plan in enumerate(plans):
            if not plan:
                continue
            at = plan[0]
            stage = at.chunk * ranks + rank
            inbox = edges[rank, at.kind]
            if stage != (0 if at.kind == "forward" else last):
                if not inbox:
                    continue
                assert inbox.popleft() == (stage, at.micro_batch), "messages come in another order"
            plan.popleft()
            moved = True
            in_flight[rank] += 1 if at.kind == "forward" else -1
            most[rank] = max(most[rank], in_flight[rank])
            if at.kind == "forward" and stage < last:
                edges[(rank + 1) % ranks, "forward"].append((stage + 1, at.micro_batch))
            if at.kind == "backward" and stage > 0:
                edges[(rank - 1) % ranks, "backward"].append((stage - 1, at.micro_batch))
        assert moved, "every rank waits"
    assert not any(edges.values())
    return most


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_micro", [1, 2, 5, 16])
def test_one_stage_per_rank_ends_and_holds_no_more_than_the_stages_behind_it(ranks, num_micro):
    most = simulate(ranks, 1, num_micro)
    assert most == [min(num_micro, ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_stages_end_with_messages_in_order(ranks, chunks, rounds):
    simulate(ranks, chunks, ranks * rounds)


def test_every_pass_comes_once_and_forward_before_backward():
    passes = schedule_passes(1, 4, 2, 8)
    assert len(passes) == len(set(passes)) == 2 * 2 * 8
    done = set()
    for at in passes:
        if at.kind == "backward":
            assert (at.chunk, at.micro_batch) in done
        done.add((at.chunk, at.micro_batch))


@pytest.mark.parametrize(
    ("blocks", "stages", "ranks", "head", "counts"),
    [
        (4, 2, 2, 0.0, [2, 2]),
        (4, 4, 4, 9.0, [1, 1, 1, 1]),
        (5, 2, 2, 0.0, [3, 2]),
        (30, 2, 2, 4.0, [17, 13]),
        (30, 4, 2, 4.0, [9, 9, 8, 4]),  # 17 blocks on a rank, 13 and the head on the other
        (80, 8, 8, 0.6, [10] * 8),
        (12, 3, 3, 6.0, [6, 5, 1]),
    ],
)
def test_blocks_are_spread_so_that_the_head_slows_nobody(blocks, stages, ranks, head, counts):
    spread = balance_stages(blocks, stages, head, ranks)
    assert [len(d) for d in spread] == counts
    assert [b for d in spread for b in d] == list(range(blocks))
