"""What the batch scripts of all schedulers have in common (pure).

settings of a section -> directives of its scheduler, in its own file
                      -> the folder, variables, modules, files to source -> ``supervise``
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_tune.cluster.container import with_container
from hpc_tune.config.scheduler import JobConfig
from hpc_tune.errors import ConfigError

# A directive ends a value at white space, and a comment or a quote changes what follows.
_WORD = re.compile(r"[\w@%+=:,./\[\]|&*^-]+")


def check_settings(settings: JobConfig, directives: Sequence[tuple[str, str]], mark: str) -> None:
    """Refuse ``directives``, (setting, value) each, that a line of ``mark`` cannot hold.

    Raises:
        ConfigError: naming every one of them; or too many nodes that are needed.
    """
    name = settings.section
    wrong = [f"{name}.{field}={value!r}" for field, value in directives if not _is_word(value)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: a line of {mark} takes letters, digits and "
            "@ % + = : , . / [ ] | & * - _, no space and no quotes"
        )
    if settings.min_nodes > settings.nodes:
        raise ConfigError(
            f"{name}.min_nodes={settings.min_nodes} of {name}.nodes={settings.nodes}: expected no "
            "more than there are"
        )


def _is_word(value: str) -> bool:
    return _WORD.fullmatch(value) is not None


def environment_lines(
    settings: JobConfig, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines that go to ``folder`` and make what ``supervise`` needs available.

    ``variables`` are set first: a file of the user's own may set them otherwise.
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


def supervise_line(settings: JobConfig, launch: str, arguments: Sequence[str], folder: Path) -> str:
    """Return the line that keeps ``train ARGUMENTS`` going, its ranks started by ``launch``.

    Raises:
        ConfigError: if no command line can be made of the settings.
    """
    started = with_container(settings, launch, folder)
    _require_valid_command(settings, launch, started, [*arguments, str(folder)])
    words = ["python", "-m", "hpc_tune", "supervise", "--launch", started]
    if settings.container or settings.image:
        words += ["--python", shlex.quote(settings.container_python)]
    return f"exec {shlex.join([*words, *arguments])}"


def sourced_files(settings: JobConfig) -> dict[str, str]:
    """Return the files that the script sources, by the setting that names them."""
    venv = settings.venv and f"{settings.venv}/bin/activate"
    files = {"env_file": settings.env_file, "venv": venv}
    return {name: file for name, file in files.items() if file}


def _require_valid_command(
    settings: JobConfig, launch: str, started: str, others: Sequence[str]
) -> None:
    texts = [started, *settings.modules, settings.env_file or "", settings.venv or "", *others]
    texts.append(settings.container_python)
    name = settings.section
    if any("\0" in text for text in texts):
        raise ConfigError("a setting contains a null character, which no script can hold")
    if any(word.startswith("-") for word in settings.modules):
        raise ConfigError(f"{name}.modules={settings.modules}: expected names, found an option")
    try:
        shlex.split(started)
    except ValueError as error:
        raise ConfigError(
            f"{name}.launch={launch!r} and {name}.container={settings.container!r} are not words "
            f"of a command: {error}"
        ) from None
