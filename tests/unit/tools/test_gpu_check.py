"""What tools/gpu_check.py does with its parts, by parts that take a moment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_check  # noqa: E402 - it lies beside what it imports
import gpu_jobs  # noqa: E402
import gpu_ladder  # noqa: E402
from gpu_losses import COMPILED_VARIANTS, EAGER_VARIANTS, Variant, bound_of, references_of  # noqa: E402
from gpu_parts import Check, Part, run_parts  # noqa: E402
from gpu_qlora import find_max_blocks  # noqa: E402
from gpu_task import Task  # noqa: E402

TELL = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); from gpu_task import Task; "
TELL += "task = Task.of_arguments(); "
TELLS = TELL + "task.tell('first', gap=0.5); "


def part(name, code, limit_s=60.0, needs=()):
    return Part(name, limit_s, "a part of the test", ("-c", code), needs)


def checked(tmp_path, *parts, minutes=5.0, device="cuda"):
    check = Check(tmp_path, device, minutes, {"date": "today"})
    passed = run_parts(parts, check)
    return passed, json.loads((tmp_path / "gpu-check.json").read_text())


def statuses(told):
    return {one["name"]: one["status"] for one in told["parts"]}


def test_a_part_that_fails_stops_no_other_and_its_last_words_are_kept(tmp_path, capsys):
    passed, told = checked(
        tmp_path,
        part("raises", TELLS + "raise SystemExit('the words of its end')"),
        part("tells", TELLS + "task.tell('second', 'failed', 'too far')"),
        part("silent", "pass"),
        part("fine", TELLS),
    )
    assert not passed
    assert statuses(told) == {
        **{"raises": "failed", "tells": "failed", "silent": "failed", "fine": "passed"}
    }
    raises, tells, silent, fine = told["parts"]
    assert "the words of its end" in raises["tail"]
    assert raises["figures"] == [{"name": "first", "status": "passed", "gap": 0.5}]
    assert tells["reason"] == "second"
    assert silent["reason"] == "it reported nothing"
    assert fine["tail"] == ""
    assert "the words of its end" in (tmp_path / "gpu-check.log").read_text()
    printed = capsys.readouterr().out
    assert "start   fine: a part of the test (at most 60 s)" in printed
    assert "second: failed: too far" in printed
    assert "1 passed: fine" in printed


def test_what_is_missing_is_skipped_by_name(tmp_path):
    passed, told = checked(
        tmp_path,
        part("needy", "raise SystemExit(3)", needs=("json", "no_such_package")),
        part("skips", TELL + "task.tell('all', 'skipped', 'needs a GPU')"),
        part("partly", TELLS + "task.tell('float8', 'skipped', 'needs torchao')"),
    )
    assert passed
    assert [(one["status"], one["reason"]) for one in told["parts"]] == [
        ("skipped", "needs no_such_package"),
        ("skipped", "needs a GPU"),
        ("passed", "without float8"),
    ]


def test_without_a_gpu_the_other_parts_are_not_tried(tmp_path):
    looks = part("looks", TELL + "task.tell('machine', card=None, driver='1.2')")
    passed, told = checked(tmp_path, looks, part("later", TELLS))
    assert passed
    assert statuses(told) == {"looks": "passed", "later": "skipped"}
    assert told["parts"][1]["reason"] == "no GPU was found"
    assert (told["card"], told["driver"]) == (None, "1.2")


# It hides from its process group, as what mpirun or a test starts does.
HIDES = TELLS + "import subprocess as s; "
HIDES += "s.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "


@pytest.fixture
def left(tmp_path, monkeypatch):
    """The processes that this test has started and that are left; they end with it."""
    monkeypatch.setenv("HPC_TUNE_TEST_MARK", str(tmp_path))

    def find():
        found = []
        for folder in Path("/proc").iterdir():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"HPC_TUNE_TEST_MARK={tmp_path}".encode() in environment:
                found.append(int(folder.name))
        return found

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


def test_a_part_is_killed_with_all_its_processes_at_its_limit(tmp_path, left):
    began_s = time.monotonic()
    passed, told = checked(
        tmp_path,
        part("hangs", HIDES + "import time; time.sleep(600)", limit_s=2.0),
        part("leaves", HIDES),
    )
    assert time.monotonic() - began_s < 60
    assert not passed
    assert [(one["status"], one["reason"]) for one in told["parts"]] == [
        ("cut", "not done after 2 s"),
        ("passed", ""),
    ]
    assert told["parts"][0]["figures"] == [{"name": "first", "status": "passed", "gap": 0.5}]
    assert left() == []


def test_no_part_begins_when_the_time_for_all_is_over(tmp_path):
    passed, told = checked(tmp_path, part("late", TELLS), minutes=0.05)
    assert not passed
    assert told["parts"][0]["reason"] == "no time was left"


CUT = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tools"]
import signal, gpu_check
from pathlib import Path
from gpu_parts import Check, Part, run_parts
signal.signal(signal.SIGTERM, gpu_check._end)
check = Check(Path({out!r}), "cpu", 5.0, {{}})
run_parts([Part("waits", 600.0, "", ("-c", {code!r}))], check)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_cut_off_has_given_what_it_had(tmp_path, left, number):
    code = TELLS + "import time; time.sleep(600)"
    program = CUT.format(root=str(ROOT), out=str(tmp_path), code=code)
    check = subprocess.Popen([sys.executable, "-c", program])
    file = tmp_path / "gpu-check.json"
    until_s = time.monotonic() + 60
    while not (file.exists() and "first" in file.read_text()) and time.monotonic() < until_s:
        time.sleep(0.05)
    os.kill(check.pid, number)
    check.wait(60)
    told = json.loads(file.read_text())
    assert told["parts"][0]["figures"] == [{"name": "first", "status": "passed", "gap": 0.5}]
    if number == signal.SIGTERM:
        assert left() == [], "what it had started ends with it"


def test_the_parts_are_listed_with_their_limits(capsys):
    assert gpu_check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["doctor", "tests", "losses", "speed", "trainer", "qlora", "saves", "ladder"]
    assert [line.split()[0] for line in lines[:-1]] == names
    assert lines[0].split()[1:3] == ["60", "s"]


def test_a_part_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--only", "doctor,speeed"])
    assert "speeed: expected some of doctor, tests" in capsys.readouterr().err


def test_the_runs_cover_each_method_with_each_way():
    runs = [*EAGER_VARIANTS, *COMPILED_VARIANTS]
    assert len({one.name for one in runs}) == len(runs)
    for method in ("lora", "full", "dora", "qlora"):
        own = [one for one in runs if one.method == method]
        assert {one.dtype for one in own} == {"fp32", "bf16"}
        assert {one.packed for one in own} == {True, False}
        assert len({one.recompute for one in own}) >= 2
    for way in ("none", "selective", "full"):
        assert {one.dtype for one in runs if one.recompute == way} == {"fp32", "bf16"}
    assert {one.method for one in runs if one.float8} == {"lora", "full"}
    assert {one.method for one in runs if one.offload} == {"lora", "full"}
    assert {one.method for one in runs if one.taken} == {"lora", "full", "qlora"}


def test_bounds_follow_from_what_is_computed_with():
    fp32, bf16 = Variant("lora", "fp32", True), Variant("lora", "bf16", True, "full")
    assert bound_of(fp32, [5.0], 0.0) == 1e-4
    assert bound_of(bf16, [5.0], 0.01) == pytest.approx(4 * 0.01 + 1e-3)
    assert bound_of(Variant("full", "bf16", True, float8=True), [5.0, 4.0], 0.0) == 0.1
    assert [one.name for one in references_of(bf16)] == ["lora fp32, packed", "lora bf16, packed"]


def test_as_many_blocks_are_measured_as_time_and_memory_allow():
    # A block: 1 s to load, 0.5 s of each of 5 steps, 1 GB. All of them: 4 s and 10 GB.
    def took(num):
        step_s = 0.5 * num
        return {
            **{"load_s": 4.0 + num, "first_step_s": step_s, "step_s": step_s},
            "peak_bytes": (10 + num) * 10**9,
        }

    found = {2: took(2), 8: took(8)}
    assert find_max_blocks(found, 5, left_s=4 + 20 * 3.5, room_bytes=80 * 10**9) == 20
    assert find_max_blocks(found, 5, left_s=1000.0, room_bytes=30 * 10**9) == 20
    assert find_max_blocks(found, 5, left_s=10.0, room_bytes=80 * 10**9) < 8
    assert find_max_blocks(found, 5, left_s=4 + 20 * 3.5, room_bytes=None) == 20


DIES = """
import json, sys
file, results, first = sys.argv[1:]
for job in json.load(open(file))[int(first):]:
    if job["name"] == "dies":
        sys.exit(3)
    with open(results, "a") as out:
        out.write("0\\n")
"""


def test_runs_go_on_behind_one_that_ends_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_jobs, "PROGRAM", tmp_path / "program.py")
    gpu_jobs.PROGRAM.write_text(DIES)
    jobs = [gpu_jobs.Job(name, ()) for name in ("fine", "dies", "dies", "fine", "dies")]
    launch, until_s = gpu_jobs.Launch("some", jobs, tmp_path), time.monotonic() + 60
    while not launch.is_over and time.monotonic() < until_s:
        launch.look()
        time.sleep(0.01)
    assert launch.codes == [0, 3, 3, 0, 3]


FREE_RUN = [5.0, 4.0]


@pytest.mark.parametrize(
    ("codes", "rungs", "losses", "said"),
    [
        ([0], ["split_micro_batches"], [5.0, 4.001], None),
        ([75, 75, 0], [], [5.0, 4.0], None),
        ([0], [], [5.0, 4.0], "it never met the limit"),
        ([75, 75], ["recompute"], [5.0], "it was not done after 2 starts"),
        ([75, 1], [], [5.0], "a start ended neither done"),
        ([75, 0], [], [5.0, 4.5], "the losses differ by 0.5 from those"),
        ([75, 0], [], [5.0], "the losses differ by inf from those"),
    ],
)
def test_a_ladder_is_judged_by_how_each_start_ended_and_by_the_losses(
    tmp_path, codes, rungs, losses, said
):
    for name, some in ((gpu_ladder.FREE_RUN, FREE_RUN), (gpu_ladder.LIMITED_RUN, losses)):
        run_dir = gpu_jobs.run_of(tmp_path, name)
        run_dir.mkdir()
        lines = [json.dumps({"step": n + 1, "loss": loss}) for n, loss in enumerate(some)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
    events = [{"kind": "governor", "step": 2, "action": rung} for rung in rungs]
    (run_dir / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    task = Task(tmp_path / "figures", tmp_path, "cuda", time.monotonic() + 60)
    gpu_ladder._tell(task, codes, ["why"] * len(codes))
    told = json.loads(task.figures.read_text())
    assert told["rungs"] == [f"step 2: {rung}" for rung in rungs]
    assert told["status"] == ("passed" if said is None else "failed")
    if said is not None:
        assert said in told["reason"]
