"""Whose a run directory is, where other hosts are values and clocks are not asked."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_tune.errors import ConfigError
from hpc_tune.rundir.owner import (
    LOCK_FILE,
    RunDirMovedError,
    RunLock,
    find_owner,
    has_owner_died,
    is_owner_alive,
    make_owner,
    read_nonce,
    release_lock,
    require_shared_dir,
)

HERE = make_owner("mine", Path("run"), {"SLURM_JOB_ID": "7"})
# A rank 0 of which this process can know nothing but the file.
FAR = replace(HERE, nonce="theirs", host="far", place="another machine", pid=1, job="6")


def gone():
    """A process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return replace(HERE, nonce="theirs", pid=child.pid, start="1")


def mark(folder, me=HERE, lost=lambda error: None, touch_every_s=0.05, silent_s=0.6):
    return RunLock(folder, me, lost, touch_every_s, silent_s)


def left(folder, owner, age_s=0.0):
    """Leave the mark of ``owner``, touched that long ago."""
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))
    then_s = time.time() - age_s
    os.utime(folder / LOCK_FILE, (then_s, then_s))


@pytest.mark.parametrize(
    ("owner", "known"),
    [
        (HERE, True),
        (replace(HERE, start="1"), False),  # another process has that number now
        (gone(), False),
        (replace(HERE, folder="/original"), None),  # its mark was copied with the folder
        (FAR, None),
        (replace(FAR, job="7"), None),  # perhaps another step of the same job
        (replace(FAR, job="7", restart="1"), False),
        (replace(FAR, job="", restart="1"), None),
    ],
)
def test_whether_an_owner_lives_is_known_here_or_from_a_requeue(owner, known):
    assert is_owner_alive(owner, HERE) is known


def test_a_folder_is_taken_touched_and_given_back(tmp_path):
    own = mark(tmp_path)
    own.acquire()
    assert read_nonce(tmp_path / LOCK_FILE) == "mine"
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    until_s = time.monotonic() + 60
    while (tmp_path / LOCK_FILE).stat().st_mtime < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_a_job_on_this_host_is_refused_by_name_at_once(tmp_path):
    own = mark(tmp_path)
    own.acquire()
    words = rf"in use by job 7 on host {HERE.host}, pid {os.getpid()}, since 20.*wait until"
    with pytest.raises(ConfigError, match=words):
        mark(tmp_path, replace(HERE, nonce="second"), silent_s=1e9).acquire()
    own.close()


def test_a_job_on_another_host_is_refused_when_it_gives_a_sign(tmp_path):
    left(tmp_path, FAR, age_s=0.1)
    over = threading.Event()

    def touch():
        while not over.wait(0.05):
            os.utime(tmp_path / LOCK_FILE)

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.raises(ConfigError, match="in use by job 6 on host far, pid 1, since"):
        mark(tmp_path, silent_s=600).acquire()
    over.set()
    thread.join()
    assert read_nonce(tmp_path / LOCK_FILE) == "theirs"


@pytest.mark.parametrize("owner", [gone(), replace(FAR, job="7", restart="1")])
def test_what_is_known_to_be_gone_is_taken_over_at_once(tmp_path, owner):
    left(tmp_path, owner)
    own = mark(tmp_path, silent_s=1e9)
    own.acquire()
    assert read_nonce(tmp_path / LOCK_FILE) == "mine"
    own.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nonce": 1}', None])
def test_what_gives_no_sign_for_long_is_taken_over(tmp_path, text):
    left(tmp_path, FAR)
    if text is not None:
        (tmp_path / LOCK_FILE).write_text(text)
    began_s = time.monotonic()
    own = mark(tmp_path)
    own.acquire()
    assert read_nonce(tmp_path / LOCK_FILE) == "mine"
    assert time.monotonic() - began_s > 0.5, "it was given time"
    own.close()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[" * 10**5,
        *(json.dumps(asdict(FAR) | {k: []}).encode() for k in ("pid", "since_s")),
    ],
)
def test_a_mark_of_another_kind_names_nobody_and_is_taken_over_too(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert find_owner(tmp_path) is None
    assert read_nonce(tmp_path / LOCK_FILE) in (None, FAR.nonce)
    assert not has_owner_died(tmp_path)
    own = mark(tmp_path)
    own.acquire()
    assert read_nonce(tmp_path / LOCK_FILE) == "mine"
    own.close()


def test_the_age_of_a_mark_is_not_measured_with_this_hosts_clock(tmp_path, monkeypatch):
    left(tmp_path, FAR)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    own, ending = mark(tmp_path, silent_s=30), threading.Timer(0.5, (tmp_path / LOCK_FILE).unlink)
    ending.start()
    own.acquire()
    assert not ending.is_alive(), "it has waited"
    own.close()


def test_of_several_that_take_over_at_once_one_stays(tmp_path):
    left(tmp_path, gone())
    marks = [mark(tmp_path, replace(HERE, nonce=str(n))) for n in range(6)]

    def take(one):
        try:
            one.acquire()
        except ConfigError:
            return None
        return one

    with ThreadPoolExecutor(6) as pool:
        [own] = [one for one in pool.map(take, marks) if one is not None]
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_folder_was_taken_over_hears_of_it(tmp_path):
    """It was stopped for an hour, or cut off from its file system."""
    heard, told = threading.Event(), []
    own = mark(tmp_path, lost=lambda error: (told.append(str(error)), heard.set()))
    own.acquire()
    left(tmp_path, FAR)
    assert heard.wait(60)
    assert "was taken over by job 6 on host far" in told[0]
    own.close()
    assert read_nonce(tmp_path / LOCK_FILE) == "theirs", "another's mark is left alone"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_job_whose_folder_was_renamed_hears_of_it(tmp_path, is_replaced):
    folder = tmp_path / "run"
    folder.mkdir()
    heard, told = threading.Event(), []
    own = mark(folder, lost=lambda error: (told.append(error), heard.set()))
    own.acquire()
    own.remember_folder_inode()
    failed = OSError("no such file")
    assert own.cause_of(failed) is failed
    folder.rename(tmp_path / "elsewhere")
    if is_replaced:
        folder.mkdir()
    assert heard.wait(60)
    assert f"run.dir={folder} was renamed, removed or replaced" in str(told[0])
    assert isinstance(own.cause_of(failed), RunDirMovedError)
    own.close()
    assert (tmp_path / "elsewhere" / LOCK_FILE).exists()
    assert not is_replaced or list(folder.iterdir()) == []


def test_any_rank_of_a_start_gives_its_folder_back_and_no_others(tmp_path):
    left(tmp_path, FAR)
    release_lock(tmp_path, "mine")
    assert (tmp_path / LOCK_FILE).exists()
    release_lock(tmp_path, "theirs")
    release_lock(tmp_path, "theirs")
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_folder_that_another_host_has_of_its_own_is_refused(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    own = mark(ours)
    own.acquire()
    require_shared_dir(ours, "mine", "n0")
    with pytest.raises(ConfigError, match="is not the folder of that name on n0, where rank 0 is"):
        require_shared_dir(theirs, "mine", "n0", limit_s=0.1)
    own.close()


def test_a_folder_that_shows_late_on_another_host_is_waited_for(tmp_path):
    late = threading.Timer(0.3, left, [tmp_path, FAR])
    late.start()
    require_shared_dir(tmp_path, "theirs", "far")
