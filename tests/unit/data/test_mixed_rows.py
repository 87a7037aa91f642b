"""Rows of several sources: one stream in any world, from any place."""

import collections
from dataclasses import replace

import numpy as np
import pytest

from hpc_tune.data.loader import Loader
from hpc_tune.data.order import MixturePhase, MixtureSource, SampleOrder, source_seed
from hpc_tune.data.packed_rows import MixedRows, PackedRows
from hpc_tune.errors import ConfigError
from tests.support.data import store_of_lengths

ORDER = SampleOrder(64, packing=True, seed=3)
SIZES = {"a": 60, "b": 25, "c": 90}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    found = {}
    for name, size in SIZES.items():
        store = store_of_lengths(folder / f"{name}.h5", rng.integers(2, 60, size).tolist())
        found[name] = PackedRows(store, replace(ORDER, seed=source_seed(ORDER.seed, name)))
    return found


def parts_of(packed, **shares):
    return {
        name: MixtureSource(
            rows.store.attributes.content,
            None,
            rows.num_rows,
            rows.store.num_tokens - rows.store.num_documents,
            **shares[name],
        )
        for name, rows in packed.items()
        if name in shares
    }


def mixed(packed, **weights):
    parts = parts_of(packed, **{name: {"weight": weight} for name, weight in weights.items()})
    return MixedRows({name: packed[name] for name in parts}, [MixturePhase(parts)])


def loader(rows, **changes):
    values = {"global_size": 10, "total_rows": 230, "micro_size": 2, **changes}
    return Loader(rows, ORDER, **values)


def rows_in(batches):
    return sorted(
        (row, tuple(tokens.tolist()))
        for batch in batches
        if batch.num_tokens
        for row, tokens in zip(batch.rows, batch.labels_BT[:, :63], strict=True)
    )


def content(batches):
    """Rows by their number, without what their width in a batch adds."""
    return [(row, tuple(t for t in tokens if t >= 0)) for row, tokens in rows_in(batches)]


def steps_of(one):
    steps = []
    while step := one.next_step():
        steps.append(step)
    one.close()
    return steps


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_and_micro_batches_give_the_same_rows(packed, size):
    rows = mixed(packed, a=0.5, b=0.2, c=0.3)
    alone = steps_of(loader(rows))
    ranks = [steps_of(loader(rows, rank=r, size=size, micro_size=3)) for r in range(size)]
    assert len(alone) == 23
    for number, step in enumerate(alone):
        together = [batch for steps in ranks for batch in steps[number]]
        assert sorted(content(together)) == content(step)


def test_each_document_comes_as_often_as_its_source_says(packed):
    epochs = {"a": 2, "b": 3, "c": 1}
    parts = parts_of(packed, **{name: {"epochs": n} for name, n in epochs.items()})
    rows = MixedRows(packed, [MixturePhase(parts)])
    seen = collections.Counter()
    for number in range(rows.num_rows):
        source, row = rows.source_and_row(number)
        name = rows.names[source]
        seen.update((name, document) for document in packed[name].sampler.documents_of(row))
    assert seen == {(name, d): epochs[name] for name in SIZES for d in range(SIZES[name])}


@pytest.mark.parametrize("steps_before", [0, 1, 9, 22])
def test_a_loader_goes_on_at_any_step_in_another_world(packed, steps_before):
    rows = mixed(packed, a=0.5, b=0.2, c=0.3)
    whole = steps_of(loader(rows))
    before = loader(rows, size=2)
    for _ in range(steps_before):
        before.next_step()
    state = before.state()
    before.close()
    after = []
    for rank in range(3):
        one = loader(mixed(packed, a=0.5, b=0.2, c=0.3), rank=rank, size=3, micro_size=4)
        one.restore(state)
        after.append(steps_of(one))
    for number, step in enumerate(whole[steps_before:]):
        together = [batch for steps in after for batch in steps[number]]
        assert sorted(content(together)) == content(step)


def test_a_source_has_its_own_order_whatever_is_beside_it(packed):
    def rows_of_a(rows):
        places = map(rows.source_and_row, range(200))
        at = rows.names.index("a")
        return [row for source, row in places if source == at][:40]

    two, three = mixed(packed, a=0.5, b=0.5), mixed(packed, a=0.5, b=0.2, c=0.3)
    assert rows_of_a(two) == rows_of_a(three) == list(range(40))
    assert len({source_seed(seed, name) for seed in range(20) for name in SIZES}) == 60


def test_a_position_in_another_mixture_is_refused(packed):
    state = loader(mixed(packed, a=0.5, b=0.5)).state()
    other = loader(mixed(packed, a=0.6, b=0.4))
    with pytest.raises(ConfigError, match="not what this run was trained on"):
        other.restore(state)
    with pytest.raises(ConfigError, match="not what this run was trained on"):
        other.restore({key: value for key, value in state.items() if key != "phases"})
    plain = Loader(packed["a"], ORDER, global_size=4)
    with pytest.raises(ConfigError, match="is not the data this run was trained on"):
        plain.restore(state)


def test_padding_is_that_of_the_rows(packed):
    rows = mixed(packed, a=0.5, b=0.2, c=0.3)
    used = sum(
        len(tokens) for number in range(rows.num_rows) for ((tokens, _),) in rows.read(number).sides
    )
    assert rows.padding == pytest.approx(1 - used / (rows.num_rows * 64), abs=0.02)
