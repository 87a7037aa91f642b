import json
import logging
import math
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_tune import log as log_module
from hpc_tune.files import write_file
from hpc_tune.log import LOG_ON_RANK_0_ONLY, Progress, configure_logging, log, log_to_file
from hpc_tune.rundir.json_lines import JsonLinesWriter, drop_lines_after


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_object_is_on_the_disk_as_soon_as_it_is_written(tmp_path):
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.write(step=1, text="für")
    assert (tmp_path / "x.jsonl").read_text(encoding="utf-8") == '{"step": 1, "text": "für"}\n'
    lines.write(step=2)
    assert rows(tmp_path / "x.jsonl")[1] == {"step": 2}
    lines.close()


def test_a_name_that_is_no_utf_8_is_written_by_its_numbers(tmp_path):
    """As the folder of a run may be called, or a file in the words of an error."""
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.write(folder="/home/gr\udcf6", text="für")
    lines.close()
    assert rows(tmp_path / "x.jsonl") == [{"folder": "/home/gr\udcf6", "text": "für"}]
    write_file(tmp_path / "page.html", "/home/gr\udcf6 für")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "/home/gr\\udcf6 für"


def test_a_second_writer_appends(tmp_path):
    for step in (1, 2):
        lines = JsonLinesWriter(tmp_path / "x.jsonl")
        lines.write(step=step)
        lines.close()
    assert rows(tmp_path / "x.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLinesWriter(path)
    lines.write(step=3)
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 3}']


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_written_as_null(tmp_path, value):
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.write(loss=value, step=0)
    lines.close()
    assert (tmp_path / "x.jsonl").read_text() == '{"loss": null, "step": 0}\n'


def test_a_writer_without_a_path_and_a_closed_one_drop_what_they_get(tmp_path):
    nowhere = JsonLinesWriter(None)
    nowhere.write(step=1)
    nowhere.close()
    closed = JsonLinesWriter(tmp_path / "x.jsonl")
    closed.close()
    closed.write(step=1)
    closed.close()
    assert (tmp_path / "x.jsonl").read_text() == ""


def test_a_full_disk_costs_lines_and_is_said_once_with_the_path(capsys):
    configure_logging(0)
    full = JsonLinesWriter(Path("/dev/full"))
    for step in (1, 2):
        full.write(step=step)
    full.close()
    said = "warning: /dev/full cannot be written, lines are lost: No space left on device\n"
    assert capsys.readouterr().err == said


def test_a_line_that_finds_room_for_half_leaves_no_trace(tmp_path):
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.write(step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
    try:
        lines.write(step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.write(step=3)
    assert (tmp_path / "x.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_resume_drops_the_steps_that_it_does_again_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n{"step": 2, "eval_loss": 1}\n{"step": 2}\n5\n{}\n{"step": null}\n'
        '{"step": 3}\n{"step": 4, "lo'
    )
    drop_lines_after(path, 2)
    assert rows(path) == [{"step": 1}, {"step": 2, "eval_loss": 1}, {"step": 2}]
    drop_lines_after(path, 0)
    assert path.read_text() == ""


def test_dropping_from_a_file_that_does_not_exist_makes_none(tmp_path):
    drop_lines_after(tmp_path / "metrics.jsonl", 1)
    assert not list(tmp_path.iterdir())


def test_rank_0_speaks_and_the_others_only_warn_with_their_rank(capsys):
    configure_logging(0)
    log.info("step %d", 1)
    log.warning("careful")
    log.warning("careful, all", extra=LOG_ON_RANK_0_ONLY)
    configure_logging(3)
    log.info("unheard")
    log.warning("careful, all", extra=LOG_ON_RANK_0_ONLY)
    log.error("bad")
    said = capsys.readouterr()
    assert said.err == ("step 1\nwarning: careful\nwarning: careful, all\n[rank 3] error: bad\n")
    assert said.out == ""


def test_plain_progress_is_printed_first_last_and_rarely_between(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now_s[0])
    configure_logging(0)
    progress = Progress("step", total=100)
    for done in range(1, 101):
        now_s[0] += 1.0
        progress.update(done)
    progress.close()
    printed = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert printed == [*range(1, 100, 10), 100]


def test_progress_counts_its_rate_from_where_a_resume_began(monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now_s[0])
    configure_logging(0)
    progress = Progress("step", total=100, done=90)
    now_s[0] = 10.0
    progress.update(95, "loss 1.0")
    assert capsys.readouterr().err == "step 95/100  loss 1.0  10s left\n"


def test_disabled_progress_says_nothing(capsys):
    configure_logging(0)
    progress = Progress("step", total=2, enabled=False)
    progress.show(1, 2)
    progress.update(2)
    progress.close()
    assert capsys.readouterr().err == ""
    assert log.level == logging.INFO


def test_a_rank_has_a_file_with_the_time_of_each_line(tmp_path, capsys):
    file = tmp_path / "logs" / "rank-3.txt"
    configure_logging(rank=3)
    try:
        log.info("before")
        with log_to_file(file):
            log.info("only here")
            log.warning("here and on the screen")
        log.warning("after")
    finally:
        configure_logging(rank=0)
    lines = file.read_text(encoding="utf-8").splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert [re.sub(rf"^{when} ", "", line) for line in lines] == [
        "INFO    only here",
        "WARNING here and on the screen",
    ]
    assert capsys.readouterr().err.splitlines() == [
        "[rank 3] warning: here and on the screen",
        "[rank 3] warning: after",
    ]


def test_a_log_file_that_cannot_be_written_changes_nothing(tmp_path, capsys):
    (tmp_path / "logs").write_text("a file in place of the folder")
    with log_to_file(tmp_path / "logs" / "rank-0.txt"):
        log.warning("told")
    assert "Traceback" not in capsys.readouterr().err


def test_a_line_on_stderr_is_one_write_though_python_is_unbuffered():
    """A launcher that writes between a text and its newline would join its own line to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    program = "from hpc_tune.log import print_line; print_line('error: gone')"
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", program], stderr=theirs, check=True, timeout=60)
        assert ours.recv(1000) == b"error: gone\n"
