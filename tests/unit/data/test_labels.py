"""Labels of one kind teach kto nothing, and kinds that do not weigh the same are told of."""

import re

import pytest

from hpc_tune.data.preferences import describe_label_imbalance, require_both_labels
from hpc_tune.errors import DataError


@pytest.mark.parametrize(
    ("good", "others", "words"),
    [
        (40, 0, "all 40 labels of a.jsonl are true: .*tune.objective=sft, which learns"),
        (0, 3, "all 3 labels of a.jsonl are false: .*give answers of both kinds$"),
    ],
)
def test_labels_of_one_kind_are_refused(good, others, words):
    with pytest.raises(DataError, match=words):
        require_both_labels(good, others, "a.jsonl")
    require_both_labels(1, 1, "a.jsonl")


@pytest.mark.parametrize(
    ("good", "others", "weights", "says"),
    [
        (10, 10, (1.0, 1.0), None),
        (13, 10, (1.0, 1.0), None),
        (10, 20, (2.0, 1.0), None),
        (20, 10, (1.0, 1.0), "2 times .*tune.undesirable_weight=2 makes it 1"),
        (10, 40, (1.0, 1.0), "0.25 times .*tune.desirable_weight=4 makes it 1"),
        (10, 40, (1.0, 2.0), "0.125 times .*tune.desirable_weight=8 makes it 1"),
        (10, 10, (2.0, 1.0), "2 times .*tune.desirable_weight=1 makes it 1"),
    ],
)
def test_weights_that_make_both_kinds_even_are_named(good, others, weights, says):
    said = describe_label_imbalance(good, others, *weights)
    assert said is None if says is None else re.search(says, said)
