"""What a rank of 4,096 does, on a world that is not there, against a rank of 16."""

import json

import pytest

from tests.support.ranks import HANG_S, ROOT, python, rank_environment, run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    command = [*python(), "-m", "tests.support.fake_world", str(folder), "16", "4096"]
    done = run_ranks(command, rank_environment(1), HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("of_16", "of_4096"), [("0 of 16", "0 of 4096"), ("15 of 16", "4095 of 4096")]
)
@pytest.mark.parametrize("phase", ["start", "step", "end"])
def test_messages_files_and_groups_of_a_rank_do_not_grow_with_the_world(
    told, of_16, of_4096, phase
):
    few, many = told[of_16][phase], told[of_4096][phase]
    # Objects from all ranks are the one thing that grows; who waits for a disk asks by the clock.
    left_out = {"object_bytes"} | ({"all_reduce"} if phase == "end" else set())
    assert {k: v for k, v in many.items() if k not in left_out} == {
        k: v for k, v in few.items() if k not in left_out
    }


def test_a_steady_step_is_two_sums_and_one_message_of_control_and_opens_no_file(told):
    for rank in told.values():
        # the gradients and the loss; and at the boundary what each rank says
        assert rank["step"] == {"all_reduce": 2, "numbers": 1}


def test_a_rank_opens_each_file_of_the_model_a_few_times_however_many_tensors_it_has(told):
    # config.json, model.safetensors for its header and for its tensors, data.h5, its own log
    assert told["4095 of 4096"]["start"]["opens"] <= 9
    assert told["4095 of 4096"]["end"].get("opens", 0) <= 1


def test_what_all_ranks_tell_all_others_stays_under_a_kilobyte_each(told):
    assert told["4095 of 4096"]["end"]["object_bytes"] > 4096, "the last rank is told something"
    for phase in ("start", "step", "end"):
        assert told["4095 of 4096"][phase].get("object_bytes", 0) < 4096 * 1024
