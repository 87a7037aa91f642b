"""Reads the README and the pages of docs/: their commands, the output that they show, links.

    page -> fenced blocks -> commands, each with its place and the output that the page shows
    a run of the commands -> output by command -> which shown lines were not printed

A ``console`` block has commands after ``$`` and their output below; a ``bash`` block is one
command. A block below ``<!-- not run: REASON -->`` is only checked.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_tune import cli
from hpc_tune.commands import COMMANDS
from hpc_tune.config.load import load_config, setting_names
from hpc_tune.errors import ConfigError
from tests.support.ranks import ROOT

DOCS = ROOT / "docs"
REASONS = (
    "installs",
    "needs the internet",
    "needs a GPU",
    "needs a large model",
    "needs Slurm",
    "needs PBS",
    "takes minutes",
)
COMMAND_LANGUAGES = ("bash", "console")
MARK = "@@@ command "
_NOT_RUN = re.compile(r"<!-- not run: (.*) -->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PARTS = sorted({name.partition(".")[0] for name in setting_names()})
_SETTING = re.compile(rf"(?<![\w./-])({'|'.join(_PARTS)})\.([a-z_0-9]+)")
_FILES = ("jsonl", "json", "yaml", "md", "py", "sh", "h5", "parquet", "txt")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_UNIT = re.compile(r"\b0 (?:[KMGT]i)?B\b")
_HEREDOC = re.compile(r"<<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^cat > (\S+) " + _HEREDOC.pattern, re.MULTILINE | re.DOTALL)
_DURATION = re.compile(r"\b0h0m\b|\b0m0s\b|\b0s\b")


@dataclass(frozen=True)
class Command:
    """What a reader types at once, and the lines of output that the page shows below it.

    ``place`` is the page and the line; ``not_run`` the reason why it is only checked.
    """

    text: str
    shown: tuple[str, ...]
    place: str
    not_run: str | None


def pages() -> list[Path]:
    """Return the pages of docs/ by name, then those of single centers and the README."""
    return [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("sites/*.md")), ROOT / "README.md"]


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page in order.

    Raises:
        ValueError: if a block is left open, or a mark is not right above a block.
    """
    found: list[Command] = []
    language: str | None = None
    not_run: str | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if language is not None and line == "```":
            if language in COMMAND_LANGUAGES:
                found += _commands_in(lines, f"{page.name}:{start}", language, not_run)
            language, not_run = None, None
        elif language is not None:
            lines.append(line)
        elif line.startswith("```"):
            language, lines, start = line[3:], [], number + 1
            if not_run is not None and language not in COMMAND_LANGUAGES:
                raise ValueError(f"{page.name}:{number}: nothing is run of a {language} block")
        elif mark := _NOT_RUN.fullmatch(line):
            not_run = mark[1]
        elif not_run is not None:
            raise ValueError(f"{page.name}:{number}: a mark stands right above its block")
    if language is not None:
        raise ValueError(f"{page.name}:{start}: the block is not closed")
    return found


def script_of(commands: Sequence[Command]) -> str:
    """Return the commands as one script that says on stdout where each begins."""
    lines = ["exec 2>&1"]
    for number, command in enumerate(commands):
        lines += [f"printf '\\n%s\\n' '{MARK}{number}'", command.text]
    return "\n".join([*lines, ""])


def files_of(commands: Sequence[Command]) -> dict[str, str]:
    """Return the files that a reader writes by ``cat > FILE <<'END'``."""
    return {name: text for c in commands for name, text in _FILE.findall(c.text)}


def outputs_of(printed: str) -> list[str]:
    """Return the output of each command that was started."""
    return re.split(rf"^{MARK}\d+\n", printed, flags=re.MULTILINE)[1:]


def missing_lines(shown: Sequence[str], printed: str) -> list[str]:
    """Return the first shown line that was not printed, in the order of the page.

    Numbers, their units and column widths may differ. ``...`` stands for any text, and alone on a
    line for any lines. Other output between two shown lines is an error.
    """
    came = [_plain(line) for line in printed.splitlines() if line.strip()]
    at, is_free = 0, True
    for line in shown:
        if not line.strip():
            continue
        if line.strip() == "...":
            is_free = True
            continue
        pattern = re.compile(".*".join(map(re.escape, _plain(line).split("..."))))
        allowed = range(at, len(came)) if is_free else range(at, min(at + 1, len(came)))
        hit = next((n for n in allowed if pattern.fullmatch(came[n])), None)
        if hit is None:
            return [line]
        at, is_free = hit + 1, False
    return []


def problems_of(text: str, folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the commands of a page in ``folder``; run nothing."""
    text = _HEREDOC.sub("", text)
    found = []
    for words in _simple_commands(text, environ):
        for at in range(len(words) - 1):
            if words[at : at + 2] == ["-m", "hpc_tune"]:
                found += _problems_of_call(words[at + 2 :])
        if words[0] == "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            found += [f"make {word}: no such target" for word in words[1:] if word not in targets]
        if words[0] == "sbatch":
            found += _problems_of_script(words[1:])
        if words[0] == "qsub" and (given := re.search(r"SETTINGS=([^,]*)", " ".join(words))):
            found += _problems_of_script([words[-1], *given[1].removesuffix(words[-1]).split()])
    return found + [f"{path}: no such file" for path in _missing_paths(text, folder)]


def unknown_settings(text: str) -> list[str]:
    """Return the settings and options that the text of a page names but that do not exist."""
    known = set(setting_names())
    found = []
    for code in _CODE.findall(text):
        named = [(m[0], m[2]) for m in _SETTING.finditer(code)]
        found += [name for name, field in named if name not in known and field not in _FILES]
        words = code.split()
        if words[0] in COMMANDS:
            _, arguments = COMMANDS[words[0]]
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            found += [f"{words[0]} {option}" for option in sorted(given - dict(arguments).keys())]
    return found


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    return [target for target in local if not (page.parent / target).exists()]


def _commands_in(
    lines: Sequence[str], place: str, language: str, not_run: str | None
) -> Iterator[Command]:
    if language == "bash":
        yield Command("\n".join(lines), (), place, not_run)
        return
    typed: list[str] = []
    shown: list[str] = []
    for line in lines:
        if typed and not shown and typed[-1].endswith("\\"):
            typed.append(line)
        elif line.startswith("$ "):
            if typed:
                yield Command("\n".join(typed), tuple(shown), place, not_run)
            typed, shown = [line[2:]], []
        elif not typed:
            raise ValueError(f"{place}: output stands above the first command")
        else:
            shown.append(line)
    if typed:
        yield Command("\n".join(typed), tuple(shown), place, not_run)


def _plain(line: str) -> str:
    """Return a line without what differs from machine to machine."""
    plain = _NUMBER.sub("0", line)
    plain = _DURATION.sub("0s", _UNIT.sub("0 B", plain))
    return re.sub(r"\s+", " ", plain).strip()


def _simple_commands(text: str, environ: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the words of each simple command, with variables and without redirections."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"\s\d?>>?(?:&\d|\s*\S+)", " ", text)
    text = re.sub(r"\$\{?(\w+)(?::-[^}]*)?\}?", lambda m: environ.get(m[1], "1"), text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def _problems_of_call(words: Sequence[str]) -> list[str]:
    """Parse the arguments as the command does, and validate its settings; start nothing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli.parse(words)
    except ConfigError as error:
        return [str(error)]
    return []


def _problems_of_script(words: Sequence[str]) -> list[str]:
    """Check a batch script of the repository and the settings behind its name."""
    [at] = [n for n, word in enumerate(words) if word.endswith((".sh", ".pbs"))]
    script, settings = ROOT / words[at], words[at + 1 :]
    if not script.is_file():
        return [f"{words[at]}: no such script"]
    config = re.search(r"--config (\S+)", script.read_text())
    try:
        load_config(str(ROOT / config[1]) if config else None, settings)
    except ConfigError as error:
        return [f"{words[at]} {' '.join(settings)}: {error}"]
    return []


def _missing_paths(text: str, folder: Path) -> list[str]:
    """Return the words that look like files of the repository but are not there."""
    homes = "configs|docs|hpc_tune|pbs|slurm|tests|tools|benchmarks"
    named = re.findall(rf"(?<![\w./-])(?:{homes})/[\w./-]+", text)
    return [name for name in named if not (folder / name).exists() and not (ROOT / name).exists()]
