"""Counts of the rows that experts get: read once for each layer and micro-batch."""

import pytest
import torch
import torch.distributed as dist

from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.expert_parallel import _TokenExchange
from hpc_tune.model.micro_batch import MicroBatch, batch_context

NUM_EXPERTS = 4


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}"
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def exchange(group):
    """Return a function that makes a layer's exchange, and notes what it counts in ``read``."""

    class Noting(_TokenExchange):
        def _exchange_row_counts(self, sent, num_rows):
            self.read.append(sent.tolist())
            return super()._exchange_row_counts(sent, num_rows)

    def make():
        made = Noting(group, CountedCollectives(torch.device("cpu")), NUM_EXPERTS)
        made.read = []
        return made

    return make


def test_layers_of_micro_batches_in_flight_are_recomputed_with_their_own_counts(exchange):
    layers, ids = (exchange(), exchange()), {}
    batches = [MicroBatch(recompute_cache={}) for _ in range(3)]
    for n, batch in enumerate(batches):
        for m, layer in enumerate(layers):
            ids[n, m] = torch.arange(1 + n + m) % NUM_EXPERTS
            with batch_context.use_batch(batch):
                layer.exchange_counts(ids[n, m])
    for n, m in ((1, 1), (0, 1), (0, 0), (2, 1), (1, 0), (2, 0)):
        with batch_context.use_batch(batches[n]):
            rows, send, receive = layers[m].exchange_counts(ids[n, m])
        assert send == receive == [1 + n + m]
        assert rows.tolist() == [torch.bincount(ids[n, m], minlength=NUM_EXPERTS).tolist()]
    for m, layer in enumerate(layers):
        counts = [torch.bincount(ids[n, m], minlength=NUM_EXPERTS).tolist() for n in range(3)]
        assert layer.read == counts, "in the first passes alone"


def test_a_router_that_chooses_anew_when_recomputed_ends_the_run(exchange):
    layer = exchange()
    with batch_context.use_batch(MicroBatch(recompute_cache={})):
        layer.exchange_counts(torch.tensor([0, 1, 1]))
        with pytest.raises(RuntimeError, match="a recomputed router chose other experts"):
            layer.exchange_counts(torch.tensor([0, 0, 1]))


def test_where_nothing_may_be_kept_each_pass_counts(exchange):
    layer = exchange()
    for ids_S in (torch.tensor([0, 1]), torch.tensor([0, 1, 3])):
        assert layer.exchange_counts(ids_S)[1] == [len(ids_S)]
    assert len(layer.read) == 2
