"""Imports without what is not used, and without garbage collection."""

import gc
import sys

import pytest

from hpc_tune import lazy_imports
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks


def test_nothing_is_collected_meanwhile_and_all_is_as_before_afterwards(monkeypatch):
    monkeypatch.setattr(lazy_imports, "_HIDDEN", ("a_library_that_nobody_has", "json"))
    loaded, kept = sys.modules["json"], gc.get_freeze_count()
    with lazy_imports.lazy_imports():
        assert not gc.isenabled()
        with pytest.raises(ImportError):
            import a_library_that_nobody_has  # noqa: F401
        assert sys.modules["json"] is loaded, "what is imported already is not hidden"
    assert gc.isenabled()
    assert gc.get_freeze_count() > kept
    assert "a_library_that_nobody_has" not in sys.modules


def test_an_import_that_fails_leaves_nothing_hidden(monkeypatch):
    monkeypatch.setattr(lazy_imports, "_HIDDEN", ("a_library_that_nobody_has",))
    with pytest.raises(ValueError, match="broken"), lazy_imports.lazy_imports():
        raise ValueError("broken")
    assert gc.isenabled()
    assert "a_library_that_nobody_has" not in sys.modules


def test_one_within_another_ends_with_the_outer_one():
    with lazy_imports.lazy_imports():
        with lazy_imports.lazy_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


WITHOUT_COMPILER = """
import sys
from hpc_tune.cli import main

def is_there():
    return "torch._dynamo.convert_frame" in sys.modules

found = [main(sys.argv[1:]), is_there()]
import torch
found += [torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item(), is_there()]
print(*found)
"""


def test_a_run_imports_no_compiler_and_who_wants_it_later_has_it(tmp_path):
    words = ["train.max_steps=1", "data.seq_len=64", "batch.global_size=1", f"run.dir={tmp_path}"]
    words += ["data.path=builtin:pydocs:heldout", "data.eval_path=null", "tune.method=lora"]
    words += ["run.report=false", "run.tensorboard=false"]
    argv = [*python(cold=True), "-c", WITHOUT_COMPILER, *words]
    done = run_ranks(argv, rank_environment(1), HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "False", "2.0", "True"]


SCANS = """
import sys
read = []

def note(event, arguments):
    if event == "open" and "transformers/models/" in str(arguments[0]):
        read.append(arguments[0])

sys.addaudithook(note)
if sys.argv[1] == "ours":
    from hpc_tune.lazy_imports import import_transformers
    import_transformers()
import transformers.models
scanned = [name for name in read if not name.endswith(".pyc")]
print(len(scanned), len(set(scanned)), sorted(transformers.models._import_structure))
"""


def test_transformers_reads_each_of_its_models_once_and_finds_the_same():
    found = {}
    for who in ("ours", "stock"):
        argv = [*python(cold=True), "-c", SCANS, who]
        done = run_ranks(argv, rank_environment(1), HANG_S)
        assert done.returncode == 0, done.stderr
        num_read, num_files, found[who] = done.stdout.split(maxsplit=2)
        assert int(num_read) < 1.1 * int(num_files) or who == "stock"
    assert found["ours"] == found["stock"]
