"""What the batch scripts of all schedulers have in common (pure).

settings of a section -> directives of its scheduler, in its own file
                      -> the folder, variables, modules, files to source -> ``supervise``
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_tune.config.scheduler import JobConfig
from hpc_tune.errors import ConfigError

# -- The words that start ranks in a container: Apptainer, Pyxis, or the EDF files of CSCS.
#
#     image.sif, a folder            srun apptainer exec --nv --bind ... image.sif python
#     image.sqsh, docker://, OWNER#  srun --container-image=... --container-mounts=... python  Pyxis
#     image.toml                     srun --environment=image.toml python  EDF
#
# Sources: https://apptainer.org/docs/user/latest/gpu.html, https://github.com/NVIDIA/pyxis,
# https://docs.cscs.ch/software/container-engine/edf/


_APPTAINER = "apptainer exec"
_GPU_OPTIONS = {"nvidia": "--nv", "amd": "--rocm"}


def wrap_in_container(settings: JobConfig, launch: str, folder: Path) -> str:
    """Return ``launch``, which starts the ranks, in a container if the settings name one (pure).

    ``folder``, in which the job runs, is bound too, except with an EDF file or without an image.

    Raises:
        ConfigError: if the settings contradict each other.
    """
    image, name = settings.image, settings.section
    binds = [bind if ":" in bind else f"{bind}:{bind}" for bind in (str(folder), *settings.binds)]
    if not image:
        if settings.binds:
            raise ConfigError(
                f"{name}.binds needs {name}.image; without it, give {name}.container its own --bind"
            )
        return f"{launch} {settings.container}".strip()
    if wrong := [bind for bind in binds if "," in bind or bind.count(":") > 2]:
        raise ConfigError(
            f"{name}.binds: {', '.join(wrong)}: expected FOLDER, FOLDER:WHERE or FOLDER:WHERE:ro, "
            "and no comma, which has another meaning for containers"
        )
    is_edf, is_pyxis = image.endswith(".toml"), image.endswith(".sqsh") or _is_remote(image)
    if not is_edf and not is_pyxis:
        gpus = f" {_GPU_OPTIONS[settings.gpu_maker]}" if settings.gpus_per_node else ""
        bind_list = shlex.quote(",".join(binds))
        command = f"{settings.container or _APPTAINER}{gpus} --bind {bind_list}"
        return f"{launch} {command} {shlex.quote(image)}"
    kind = "an EDF file" if is_edf else "an image for Pyxis"
    if not launch.startswith("srun"):
        raise ConfigError(
            f"{name}.image={image} is {kind}, which needs srun; found {name}.launch={launch!r}"
        )
    if settings.container:
        raise ConfigError(
            f"{name}.image={image} is {kind}, which srun itself starts; found {name}.container="
            f"{settings.container!r}, expected none"
        )
    if is_edf:
        if settings.binds:
            raise ConfigError(f"{name}.binds: the mounts of {image} belong in that file")
        return f"{launch} {shlex.quote(f'--environment={image}')}"
    options = (
        f"--container-image={image}",
        f"--container-mounts={','.join(binds)}",
        f"--container-workdir={folder}",
    )
    return f"{launch} {shlex.join(options)}"


def _is_remote(image: str) -> bool:
    """Return whether the image is in a registry: docker:// of Pyxis, or enroot's HOST#NAME:TAG."""
    return image.startswith("docker://") or "#" in image


# -- What the batch scripts of all schedulers have in common.


# A directive ends a value at white space, and a comment or a quote changes what follows.
_DIRECTIVE_VALUE = re.compile(r"[\w@%+=:,./\[\]|&*^-]+")


def check_settings(
    settings: JobConfig, directives: Sequence[tuple[str, str]], directive_prefix: str
) -> None:
    """Refuse ``directives``, pairs of (setting, value), that a directive's line cannot hold.

    ``directive_prefix``: the word that such a line begins with, such as #SBATCH.

    Raises:
        ConfigError: naming all of them; or if ``settings.min_nodes`` exceeds ``settings.nodes``.
    """
    name = settings.section
    wrong = [f"{name}.{key}={v!r}" for key, v in directives if not _DIRECTIVE_VALUE.fullmatch(v)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: a line of {directive_prefix} takes letters, digits and "
            "@ % + = : , . / [ ] | & * - _, no space and no quotes"
        )
    if settings.min_nodes > settings.nodes:
        raise ConfigError(
            f"{name}.min_nodes={settings.min_nodes} exceeds {name}.nodes={settings.nodes}: "
            "expected at most that many"
        )


def environment_lines(
    settings: JobConfig, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines that change to ``folder`` and make available what ``supervise`` needs.

    ``variables`` are set first, so that the user's own file can override them.
    """
    yield "set -eo pipefail"
    yield f"cd {shlex.quote(str(folder))}"
    for name, value in (variables or {}).items():
        yield f"export {name}={shlex.quote(value)}"
    if settings.modules:
        yield f"module load {shlex.join(settings.modules)}"
    for file in sourced_files(settings).values():
        # Without a slash bash would look for it along PATH first.
        yield f"source {shlex.quote(file if '/' in file else f'./{file}')}"


def format_supervise_line(
    settings: JobConfig, launch: str, arguments: Sequence[str], folder: Path
) -> str:
    """Return the line that keeps ``train ARGUMENTS`` going, with its ranks started by ``launch``.

    ``folder``: in which the job runs.

    Raises:
        ConfigError: if the settings contradict each other or do not form a command line.
    """
    rank_command = wrap_in_container(settings, launch, folder)
    _require_valid_command(settings, launch, rank_command, [*arguments, str(folder)])
    words = ["python", "-m", "hpc_tune", "supervise", "--launch", rank_command]
    if settings.container or settings.image:
        words += ["--python", shlex.quote(settings.container_python)]
    return f"exec {shlex.join([*words, *arguments])}"


def sourced_files(settings: JobConfig) -> dict[str, str]:
    """Return the files that the script sources, by the setting that names them."""
    venv = settings.venv and f"{settings.venv}/bin/activate"
    files = {"env_file": settings.env_file, "venv": venv}
    return {name: file for name, file in files.items() if file}


def _require_valid_command(
    settings: JobConfig, launch: str, rank_command: str, other_texts: Sequence[str]
) -> None:
    texts = [
        rank_command,
        *settings.modules,
        settings.env_file or "",
        settings.venv or "",
        *other_texts,
    ]
    texts.append(settings.container_python)
    name = settings.section
    if any("\0" in text for text in texts):
        raise ConfigError("a setting contains a null character, which no script can hold")
    if any(word.startswith("-") for word in settings.modules):
        raise ConfigError(f"{name}.modules={settings.modules}: expected names, found an option")
    try:
        shlex.split(rank_command)
    except ValueError as error:
        raise ConfigError(
            f"{name}.launch={launch!r} with {name}.container={settings.container!r} cannot be "
            f"split into the words of a shell command: {error}; check the quotes"
        ) from None
