"""What --help says, and what is said of a command that does not exist."""

import difflib
import textwrap
from collections.abc import Mapping

from hpc_tune import __version__
from hpc_tune.config.load import describe_fields


def unknown_command(word: str, commands: Mapping[str, str]) -> str:
    """Return what to say of a word that is neither a command nor a setting."""
    near = difflib.get_close_matches(word, commands, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{word!r} is neither a command ({', '.join(commands)}) nor key=value{hint}"


def overview(commands: Mapping[str, str]) -> str:
    """Return what --help says: each of ``commands`` with its line, and all settings."""
    width = max(map(len, commands))
    shown = "\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items())
    return (
        f"hpc_tune {__version__}: fine-tune large language models on HPC clusters\n\n"
        "usage: python -m hpc_tune [COMMAND] [--config FILE] [key=value ...]\n"
        "       mpirun -np 16 python -m hpc_tune --config FILE\n\n"
        f"commands (COMMAND --help says more):\n{shown}\n\n{settings_text()}"
    )


def settings_text() -> str:
    """Return every setting with its default and what it is for."""
    lines = ["settings (in FILE as part: {key: value}, or part.key=value):"]
    for name, kind, default, prose in describe_fields():
        shown = str(default).lower() if isinstance(default, bool) else default
        shown = "unset" if default is None else shown
        lines.append(f"  {name} = {shown}  ({kind})")
        lines += textwrap.wrap(prose, 92, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
