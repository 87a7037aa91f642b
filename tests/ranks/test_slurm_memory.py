"""Under Slurm's --mem: where a job without the governor is killed, one with it is not."""

import shlex
import sys
from pathlib import Path

import pytest

from hpc_tune.memory.host import HostLimit, oom_kills
from hpc_tune.units import format_bytes
from tests.ranks.test_pressure import HUNGRY, LIMIT, MIB, WAYS
from tests.support.ranks import find_mpirun, rank_environment
from tests.support.slurm import slurm
from tests.support.training import outcome

SHORT = "a leak of 200 MB/s within a step"
MOST_STARTS = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


def submit(cluster, run_dir, way, num_bytes, *overrides, n=1):
    """Run it as a job of its own; return the job's state, rank's exit code and number of kills.

    mpirun starts ranks as a step of their own, whose group is gone when it has ended: the kills are
    those of the whole machine.
    """
    words = [*HUNGRY, f"run.dir={run_dir}", f"data.cache={run_dir.parent / 'data'}", *overrides]
    argv = [sys.executable, "-m", "tests.support.greedy", way, str(num_bytes), *words]
    if n > 1:
        argv = [find_mpirun(), "-np", str(n), *argv]
    exports = "\n".join(
        f"export {name}={shlex.quote(value)}"
        for name, value in rank_environment(n).items()
        if not name.startswith("SLURM") and name.isidentifier()
    )
    script = f"""
{exports}
cd {shlex.quote(str(ROOT))}
{shlex.join(argv)}
printf '\\ncode %d\\n' $?
"""
    out = run_dir.with_suffix(".out")
    out.parent.mkdir(parents=True, exist_ok=True)
    everywhere = HostLimit(1, "the machine")
    before = oom_kills(everywhere)
    job = cluster.job(script, out, f"--mem={n * LIMIT // MIB}M", f"--ntasks={n}")
    text = out.read_text()
    said = [line.split() for line in text.splitlines()]
    [code] = [int(words[1]) for words in said if words[:1] == ["code"]]
    return job, code, oom_kills(everywhere) - before, text


def check_way(cluster, tmp_path, name, n=1):
    way, num_bytes, overrides = WAYS[name]
    off = ("memory.governor=off", *overrides)
    job, code, kills, text = submit(cluster, tmp_path / "off", way, num_bytes, *off, n=n)
    assert kills > 0, text
    assert code not in (0, 75), text
    assert n > 1 or job["JobState"] == "OUT_OF_MEMORY", job
    for number in range(MOST_STARTS):
        planted = way if number == 0 or way in ("batch", "eval") else "none"
        run_dir = tmp_path / "on"
        job, code, kills, text = submit(cluster, run_dir, planted, num_bytes, *overrides, n=n)
        assert kills == 0, text
        assert code in (0, 75), text
        assert job["JobState"] == "COMPLETED", job
        if code == 0:
            print(f"{name}, {n} ranks: done at start {number + 1}")
            return
        reason = outcome(run_dir)["reason"]
        assert reason.startswith("host memory of "), reason
        assert f"of {format_bytes(n * LIMIT)}" in reason, reason
        print(f"{name}, {n} ranks: {reason}")
    pytest.fail(f"not done after {MOST_STARTS} starts: {text}")


def test_a_job_that_slurm_would_have_killed_leaves_and_then_finishes(tmp_path, cluster):
    check_way(cluster, tmp_path, SHORT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(WAYS))
def test_it_does_in_every_way_with_ranks_of_mpirun(tmp_path, cluster, name):
    check_way(cluster, tmp_path, name, n=2)
