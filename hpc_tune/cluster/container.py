"""The words that start ranks in a container: Apptainer, Pyxis, or the EDF files of CSCS.

    image.sif, a folder            srun apptainer exec --nv --bind ... image.sif python
    image.sqsh, docker://, OWNER#  srun --container-image=... --container-mounts=... python (Pyxis)
    image.toml                     srun --environment=image.toml python (EDF)

Sources: https://apptainer.org/docs/user/latest/gpu.html, https://github.com/NVIDIA/pyxis,
https://docs.cscs.ch/software/container-engine/edf/
"""

import shlex
from pathlib import Path

from hpc_tune.config.scheduler import JobConfig
from hpc_tune.errors import ConfigError

_APPTAINER = "apptainer exec"
_GPUS = {"nvidia": "--nv", "amd": "--rocm"}


def with_container(settings: JobConfig, launch: str, folder: Path) -> str:
    """Return ``launch``, which starts the ranks, in a container if the settings name one (pure).

    ``folder``, which the job runs in, is bound too.

    Raises:
        ConfigError: if the settings do not go together.
    """
    image, name = settings.image, settings.section
    binds = [one if ":" in one else f"{one}:{one}" for one in (str(folder), *settings.binds)]
    if not image:
        if settings.binds:
            raise ConfigError(
                f"{name}.binds needs {name}.image; a {name}.container without it has its own --bind"
            )
        return f"{launch} {settings.container}".strip()
    if wrong := [one for one in binds if "," in one or one.count(":") > 2]:
        raise ConfigError(
            f"{name}.binds: {', '.join(wrong)}: expected FOLDER, FOLDER:WHERE or FOLDER:WHERE:ro, "
            "and no comma, which has another meaning for containers"
        )
    is_edf, is_pyxis = image.endswith(".toml"), image.endswith(".sqsh") or _is_remote(image)
    if not is_edf and not is_pyxis:
        gpus = f" {_GPUS[settings.gpu_maker]}" if settings.gpus_per_node else ""
        bound = shlex.quote(",".join(binds))
        command = f"{settings.container or _APPTAINER}{gpus} --bind {bound}"
        return f"{launch} {command} {shlex.quote(image)}"
    kind = "an EDF file" if is_edf else "an image for Pyxis"
    if not launch.startswith("srun"):
        raise ConfigError(
            f"{name}.image={image} is {kind}, for srun; found {name}.launch={launch!r}"
        )
    if settings.container:
        raise ConfigError(
            f"{name}.image={image} is {kind}, which srun itself starts; found {name}.container="
            f"{settings.container!r}, expected none"
        )
    if is_edf:
        if settings.binds:
            raise ConfigError(f"{name}.binds: the mounts of {image} stand in that file")
        return f"{launch} {shlex.quote(f'--environment={image}')}"
    options = (
        f"--container-image={image}",
        f"--container-mounts={','.join(binds)}",
        f"--container-workdir={folder}",
    )
    return f"{launch} {shlex.join(options)}"


def _is_remote(image: str) -> bool:
    """Return whether it is of a registry: Pyxis has docker://, enroot's has HOST#NAME:TAG."""
    return image.startswith("docker://") or "#" in image
