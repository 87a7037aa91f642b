"""The command line: parses the arguments, runs one command, prints an error once.

arguments -> parse: options and RunConfig -> a function of commands.py -> exit code
"""

import argparse
import difflib
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hpc_tune import __version__
from hpc_tune.cluster.launchers import rank_hint, world_size_hint
from hpc_tune.commands import ALL_RANK_COMMANDS, COMMANDS, SETTINGS_ARGUMENTS
from hpc_tune.config.load import (
    config_flag_hint,
    describe_fields,
    load_config,
    mask_secrets,
    setting_names,
)
from hpc_tune.errors import EXIT_DONE, ConfigError, HpcTuneError
from hpc_tune.log import configure_logging, log, print_line
from hpc_tune.packages import shadowing_package_warnings

OTHER_RANKS_WAIT_S = 3.0  # so that rank 0 prints the error before the launcher kills it
_WAIT_FOR_RANK_0_S = 10.0  # if rank 0 has not ended the job by then, only this rank has the problem
_PROG = "python -m hpc_tune"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    configure_logging(rank_hint(os.environ))
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        run, _ = COMMANDS[options.command]
        if not _runs_on_this_rank(options.command):
            return EXIT_DONE
        if not rank_hint(os.environ):
            for warning in shadowing_package_warnings():
                log.warning(warning)
        return run(options)
    except HpcTuneError as error:
        return _print_error(error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command, with its ``config`` if it takes settings.

    Raises:
        ConfigError: for wrong arguments or settings. SystemExit: after --help or --version.
    """
    arguments = list(argv)
    first = arguments[0] if arguments else ""
    if first not in (*COMMANDS, "-h", "--help", "--version"):
        if first and not first.startswith("-") and "=" not in first:
            known_names = ", ".join(COMMANDS)
            hint = config_flag_hint(first) or _suggest_name(first, COMMANDS)
            raise ConfigError(f"{first!r} is neither a command ({known_names}) nor key=value{hint}")
        arguments.insert(0, "train")
    # argparse reads only one group of settings; settings after another option are in ``rest``.
    options, rest = _build_parser().parse_known_args(arguments)
    takes_settings = "settings" in options
    unknown = [word for word in rest if word.startswith("-") or not takes_settings]
    if unknown:
        hint = "; settings are written key=value, as train.seed=7" if takes_settings else ""
        suggestion = _suggest_name(unknown[0], dict(COMMANDS[options.command][1]))
        raise ConfigError(f"unknown argument {unknown[0]}{suggestion or hint}")
    if takes_settings:
        options.settings = [*options.settings, *rest]
        data = _data_settings(options) if "data" in options else []
        options.config = load_config(options.files, [*options.settings, *data])
    return options


def _data_settings(options: argparse.Namespace) -> list[str]:
    """Return the data.path setting for the argument DATA of a command; empty without DATA.

    If DATA is itself a setting (NAME=VALUE), it is moved to ``options.settings``.

    Raises:
        ConfigError: if nothing names the data, or two arguments do.
    """
    data = options.data
    if data is not None and data.partition("=")[0] in setting_names():
        options.settings, data = [data, *options.settings], None
    names = ("data.path=", "data.sources=")
    in_settings = [word for word in options.settings if word.startswith(names)]
    if data is not None and in_settings:
        raise ConfigError(f"{data} and {in_settings[-1]} both name the data; leave one of them out")
    if data is None and not in_settings and not options.files:
        raise ConfigError("nothing names the data: give DATA, or a --config FILE that does")
    return [] if data is None else [f"data.path={data}"]


def _runs_on_this_rank(command: str) -> bool:
    """Return whether this process runs the command; most commands run in one process only.

    Raises:
        ConfigError: for ``supervise`` on several ranks, as each of them would start all ranks.
    """
    rank = rank_hint()
    if command in ALL_RANK_COMMANDS or (rank == 0 and world_size_hint() == 1):
        return True
    if command == "supervise":
        raise ConfigError(
            "supervise was started on several ranks; start it once, without a launcher: it starts "
            "the ranks itself, with the command that --launch names"
        )
    if rank == 0:
        log.warning("%s needs one process: only rank 0 runs it", command)
    return rank == 0


class _Parser(argparse.ArgumentParser):
    """Raises errors instead of printing them on every rank, and keeps line breaks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from hpc_tune.probe.software import bug_report_lines

        print("\n".join(bug_report_lines()))
        parser.exit()


def _build_parser() -> _Parser:
    parser = _Parser(
        prog=_PROG,
        usage=f"{_PROG} [COMMAND] [--config FILE] [key=value ...]\n"
        f"       mpirun -np 16 {_PROG} --config FILE",
        description=f"hpc_tune {__version__}: fine-tune large language models on HPC clusters",
        epilog=_settings_text(),
    )
    parser.add_argument(
        "--version", action=_PrintVersion, nargs=0, help="print what bug reports need"
    )
    commands = parser.add_subparsers(
        title="commands",
        metavar="COMMAND --help",
        dest="command",
        prog=_PROG,
        help="print a command's arguments",
    )
    for name, (run, arguments) in COMMANDS.items():
        text, epilog = run.__doc__, parser.epilog if SETTINGS_ARGUMENTS[0] in arguments else None
        command = commands.add_parser(name, help=text, description=text, epilog=epilog)
        for argument, kwargs in arguments:
            command.add_argument(argument, **kwargs)
    return parser


def _suggest_name(word: str, known_names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known_names), n=1)
    if matches and word.startswith("-") and not matches[0].startswith("-"):
        return f"; {matches[0].upper()} is given without a name"
    return f"; did you mean {matches[0]}?" if matches else ""


def _settings_text() -> str:
    lines = ["settings (in FILE as part: {key: value}, here as part.key=value):"]
    for name, kind, default, prose in describe_fields():
        default_text = str(default).lower() if isinstance(default, bool) else default
        default_text = "unset" if default is None else default_text
        lines.append(f"  {name} = {default_text}  ({kind})")
        lines += textwrap.wrap(prose, 92, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _print_error(error: HpcTuneError) -> int:
    """Print the error once: on rank 0, or on a rank that still lives when rank 0 would be done."""
    rank, had_world = rank_hint(os.environ), "torch" in sys.modules
    if rank:
        time.sleep(OTHER_RANKS_WAIT_S if had_world else _WAIT_FOR_RANK_0_S)
    if not (rank and had_world):
        prefix = f"rank {rank}: " if rank else ""
        print_line(mask_secrets(f"hpc_tune: {prefix}{error}"))
    return error.exit_code
