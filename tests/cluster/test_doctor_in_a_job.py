"""The doctor as the README starts it, by srun over two nodes of a real Slurm."""

import json
import shlex
import sys

import pytest

from tests.support.ranks import HANG_S, ROOT

pytestmark = pytest.mark.full

OPTIONS = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=8"]


def test_it_looks_at_both_nodes_and_finds_another_version_on_one(cluster, tmp_path):
    told = tmp_path / "torch-1.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    planted = f"[ $SLURMD_NODENAME = n1 ] || export PYTHONPATH={tmp_path}:$PYTHONPATH; exec "
    doctor = [sys.executable, "-m", "hpc_tune", "doctor", "--json", "run.device=cpu"]
    command = planted + shlex.join([*doctor, f"run.dir={tmp_path}"])
    script = shlex.join(["srun", *OPTIONS, "--overcommit", "bash", "-c", command])
    said = cluster.job(script, "doctor", *OPTIONS, f"--chdir={ROOT}", timeout=HANG_S)
    out, err = ((cluster.folder / f"doctor.{kind}").read_text() for kind in ("out", "err"))
    assert said["ExitCode"] == "1:0", out + err

    told = json.loads(out)
    assert [rank["node"] for rank in told["ranks"]] == [0, 0, 1, 1]
    assert {rank["launcher"] for rank in told["ranks"]} == {"slurm"}
    across = [pair["ranks"] for pair in told["links"]["pairs"] if pair["nodes"] == [0, 1]]
    assert across == [[0, 2]]
    errors = [one["text"] for one in told["findings"] if one["level"] == "error"]
    assert len(errors) == 1
    assert errors[0].startswith("torch differs: 1.0 on ")
