"""Imports without what is not used, and without garbage collection."""

import gc
import sys
import weakref

import pytest

from hpc_tune import packages


def test_nothing_is_collected_meanwhile_and_all_is_as_before_afterwards(monkeypatch):
    monkeypatch.setattr(packages, "_HIDDEN_PACKAGES", ("a_library_that_nobody_has", "json"))
    loaded, kept = sys.modules["json"], gc.get_freeze_count()
    with packages.fast_imports():
        assert not gc.isenabled()
        with pytest.raises(ImportError):
            import a_library_that_nobody_has  # noqa: F401
        assert sys.modules["json"] is loaded, "what is imported already is not hidden"
        monkeypatch.setitem(sys.modules, "a_module", loaded)
    assert gc.isenabled()
    assert gc.get_freeze_count() > kept
    assert "a_library_that_nobody_has" not in sys.modules


def test_what_is_garbage_later_is_collected_if_nothing_was_imported():
    class Node:
        """An object that is garbage in a circle."""

    node = Node()
    node.me = node
    with packages.fast_imports():
        pass
    left = weakref.ref(node)
    del node
    gc.collect()
    assert left() is None


def test_an_import_that_fails_leaves_nothing_hidden(monkeypatch):
    monkeypatch.setattr(packages, "_HIDDEN_PACKAGES", ("a_library_that_nobody_has",))
    with pytest.raises(ValueError, match="broken"), packages.fast_imports():
        raise ValueError("broken")
    assert gc.isenabled()
    assert "a_library_that_nobody_has" not in sys.modules


def test_one_within_another_ends_with_the_outer_one():
    with packages.fast_imports():
        with packages.fast_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
