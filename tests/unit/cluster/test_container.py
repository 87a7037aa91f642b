"""How ranks are started in a container: the words that srun gets."""

import shlex
from pathlib import Path

import pytest

from hpc_tune.cluster.slurm import render
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.errors import ConfigError

FOLDER = Path("/scratch/me/my run")


def started(**settings):
    """Return the launcher's words and Python of the ranks, as the script hands them on."""
    script = render(SlurmConfig(**settings), ["run.seed=1"], FOLDER)
    words = shlex.split(script.splitlines()[-1])
    launch, python = (words[words.index(name) + 1] for name in ("--launch", "--python"))
    return shlex.split(launch), shlex.split(python)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"gpus_per_node": 4}, ["--nv"]), ({"gpus_per_node": 8, "gpu_maker": "amd"}, ["--rocm"])],
)
def test_apptainer_shows_the_gpus_and_binds_the_folder(settings, flag):
    launch, python = started(image="/proj/torch.sif", binds=["/proj", "/a:/b:ro"], **settings)
    bound = "/scratch/me/my run:/scratch/me/my run,/proj:/proj,/a:/b:ro"
    srun = ["srun", "--kill-on-bad-exit=1"]
    assert launch == [*srun, "apptainer", "exec", *flag, "--bind", bound, "/proj/torch.sif"]
    assert python == ["python"]


def test_without_gpus_none_are_shown_and_a_site_may_have_other_words():
    launch, python = started(
        image="torch.sif", container="singularity exec", container_python="/my env/bin/python"
    )
    assert launch[2:5] == ["singularity", "exec", "--bind"]
    assert python == ["/my env/bin/python"]


@pytest.mark.parametrize(
    "image", ["t.sqsh", "docker://rocm/pytorch:7", "nvcr.io#nvidia/pytorch:26"]
)
def test_pyxis_is_asked_by_options_of_srun(image):
    launch, python = started(image=image, binds=["/proj"], gpus_per_node=4)
    assert launch[2:] == [
        f"--container-image={image}",
        f"--container-mounts={FOLDER}:{FOLDER},/proj:/proj",
        f"--container-workdir={FOLDER}",
    ]
    assert python == ["python"]


def test_an_edf_file_is_named_to_srun():
    assert started(image="/users/me/t.toml")[0][2:] == ["--environment=/users/me/t.toml"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"binds": ["/a"]}, "slurm.binds needs slurm.image"),
        ({"image": "t.toml", "binds": ["/a"]}, "the mounts of t.toml belong in that file"),
        ({"image": "t.sqsh", "launch": "mpirun -np 8"}, "for Pyxis, which needs srun; found"),
        ({"image": "t.sqsh", "container": "enroot start"}, "which srun itself starts"),
        ({"image": "t.sif", "binds": ["/a,b"]}, "and no comma, which has another meaning"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        started(**settings)
