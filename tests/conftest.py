"""What all tests share."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

# Two tests at a time, and whatever else this machine does: a second thread in each would wait for
# its core by spinning. Ranks decide about theirs by themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ten thousand lines of tests are rewritten for their asserts, and each Python that a test starts
# compiles hpc_tune: once, whatever the shell that starts them says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Prepared data that all tests and workers share (tests/support/training.py). The first process
# makes the folder, its workers have its environment.
if "HPC_TUNE_TEST_DATA" not in os.environ:
    os.environ["HPC_TUNE_TEST_DATA"] = tempfile.mkdtemp(prefix="hpc-tune-data-")
    atexit.register(shutil.rmtree, os.environ["HPC_TUNE_TEST_DATA"], ignore_errors=True)

# One server of ranks for all workers, which lives as long as the first process does.
if warm.place() is None:
    warm.make_place()

# Under nohup, or in the background of a shell, these are ignored, and so they would be by each
# program that a test starts.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

SHOWN_LINES = 30

# The files that take longest, the longest first: one that begins late is what all workers wait for.
LONGEST = (
    "ranks/test_layouts.py",
    "cluster/test_several_hosts.py",
    "unit/train/test_architecture_check.py",
    "unit/step/test_messages.py",
    "unit/plan/test_trace.py",
    "ranks/test_pressure.py",
    "unit/tools/test_install.py",
    "ranks/test_docs.py",
    "unit/test_supervise.py",
    "ranks/test_auto_on_links.py",
    "unit/engine/test_fake_cuda.py",
    "unit/plan/test_plan.py",
    "ranks/test_train_ends.py",
    "unit/checkpoint/test_export.py",
    "unit/data/test_data_prepare.py",
    "ranks/test_crashes.py",
    "ranks/test_load_memory.py",
    "unit/untrusted/test_fuzz.py",
    "unit/world/test_liveness.py",
    "unit/world/test_world_rendezvous.py",
)

# What is imported stays; looking through it for garbage again and again is a tenth of collecting
# the tests, and a second of each gc.collect() in one.
gc.disable()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Begin with the files that take longest."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Begin to collect garbage, of what tests make alone."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail a test that leaves a micro-batch behind, which the models of others would read."""
    result = yield
    if (module := sys.modules.get("hpc_tune.model.micro_batch")) is not None:
        context = module.batch_context
        left, context.batch = context.batch, module.MicroBatch()
        if left != module.MicroBatch():
            pytest.fail(
                "this test leaves a micro-batch in hpc_tune.model.micro_batch.batch_context"
            )
    return result


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Fail a file of tests that leaves a process group behind, which the next run cannot join, or
    the lock of a run, which ends its process when the run's folder is gone.
    """
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this file of tests leaves torch.distributed's process group initialized")
    if any(thread.name == "run-lock" for thread in threading.enumerate()):
        pytest.fail("this file of tests leaves a run's lock, which ends this process later")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Show of what ranks printed before a failure the end, where the cause is."""
    if call.excinfo is not None and isinstance(
        call.excinfo.value, AssertionError | pytest.fail.Exception
    ):
        error = call.excinfo.value
        lines = str(error).splitlines()
        if len(lines) > SHOWN_LINES:
            left_out = len(lines) - SHOWN_LINES
            text = "\n".join([f"({left_out} lines left out)", *lines[-SHOWN_LINES:]])
            error.args = (text,)
            if isinstance(error, pytest.fail.Exception):
                error.msg = text
    return (yield)
