"""What TensorBoard reads in the event files of a run."""

import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_tune.trackers.trackers import EventFile


def scalars(folder):
    """Return {tag: [(step, value), ...]} as TensorBoard shows them."""
    read = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, round(e.value, 6)) for e in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_values_are_read_by_tensorboard(tmp_path):
    file = EventFile(tmp_path, 0)
    for step in (1, 2):
        file.write(step, {"loss": 1 / step, "sent_bytes/broadcast": 2.0**40})
    file.close()
    file.write(3, {"loss": 0.0})
    assert scalars(tmp_path) == {
        "loss": [(1, 1.0), (2, 0.5)],
        "sent_bytes/broadcast": [(1, 2.0**40), (2, 2.0**40)],
    }


def test_the_steps_that_a_resume_does_again_are_shown_once(tmp_path):
    for start_step, value in [(0, 1.0), (2, 5.0)]:
        file = EventFile(tmp_path, start_step)
        for step in range(start_step + 1, 5):
            file.write(step, {"loss": value})
        file.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]}


def test_what_a_full_disk_does_not_take_is_missing_and_the_rest_is_read(tmp_path):
    file = EventFile(tmp_path, 0)
    file.write(1, {"loss": 1.0})
    [path] = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        file.write(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(3, {"loss": 3.0})
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (3, 3.0)]}


def test_a_folder_that_cannot_be_made_is_said_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/tensorboard"):
        EventFile(tmp_path / "file" / "tensorboard", 0)
