"""Tests of values that hypothesis draws: few examples in make test, twenty times as many in soak.

HPC_TUNE_FUZZ=N sets the number of examples in soak.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FEW = 60
MANY = int(os.environ.get("HPC_TUNE_FUZZ", "0"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["auto", "lora", "1", "0", "-1", "1e400", "80GiB", "1:2", "${a}", "${oc.env:X}"]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def fuzz(strategy: st.SearchStrategy, few: int = FEW):
    """Make a test from a function of (folder, drawn value), with few examples and with many."""

    def decorate(check):
        @pytest.mark.timeout(1800)
        @pytest.mark.parametrize(
            "num",
            [few, pytest.param(MANY or 20 * few, marks=pytest.mark.soak)],
            ids=["few", "many"],
        )
        def test(num, tmp_path):
            quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]

            @settings(max_examples=num, deadline=20_000, suppress_health_check=quiet, database=None)
            @given(strategy)
            def one(drawn):
                folder = Path(tempfile.mkdtemp(dir=tmp_path))
                check(folder, drawn)
                shutil.rmtree(folder)

            one()

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        return test

    return decorate


# Pieces of YAML that go beyond trees of scalars.
YAML_PIECES = (
    *("a: ", "model: ", "path: ", "x", "1", "\n", "\n  ", "\n    ", "- ", "[", "]", "{", "}", ", "),
    *(": ", "? ", "&a ", "*a", "<<: ", "!!int ", "!!float ", "!!bool ", "!!null ", "!!timestamp "),
    *("!!binary ", "!!set ", "!!omap ", "!!str ", "!!map ", "!!seq ", "!x ", "!!python/name:os "),
    *("'", '"', "|\n", ">\n", "---\n", "...", "%YAML 9.9\n", "~", "${a}", "${model.path}", "${"),
    *("2020-01-01", "2020-99-99", "0x", "0b1", "1:99", ".inf", ".nan", "1e9", "\\x00", "\t", "#"),
    *("train: ", "data: ", "run: ", "[" * 400, "${oc.env:HOME}", "${oc.env:NONE,1}", "?"),
)
YAML_TEXTS = st.lists(st.sampled_from(YAML_PIECES), max_size=14).map("".join)


def said(error: Exception, word: str = "") -> None:
    """Check that an error has a message with ``word`` in it and no traceback."""
    assert str(error).strip()
    assert word in str(error)
    assert "Traceback" not in str(error)


def flips(size):
    """Draw the places and values of changed bytes, and where the file is cut."""
    change = st.tuples(st.integers(0, size - 1), st.integers(0, 255))
    return st.tuples(st.lists(change, min_size=1, max_size=8), st.integers(size // 2, size))


def damaged(data, drawn):
    changes, cut = drawn
    copy = bytearray(data)
    for place, value in changes:
        copy[place] = value
    return bytes(copy[:cut])
