"""Write docs/settings.md, with every setting, and every field of JSON lines in docs/files.md.

python tools/reference.py [--out docs]
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import formatannotation, getdoc
from pathlib import Path
from typing import get_args

from hpc_tune.config.load import describe_fields
from hpc_tune.config.schema import RunConfig
from hpc_tune.rundir.json_lines import (
    EVENT_FIELDS,
    EVENT_KINDS,
    EvalMetrics,
    ExpertTokens,
    RankTimes,
    StepMetrics,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
LINES = {
    "metrics.jsonl": (StepMetrics, EvalMetrics),
    "ranks.jsonl": (RankTimes,),
    "experts.jsonl": (ExpertTokens,),
}
HEAD = """\
# Settings

Every setting of a run. In a file a section is `section: {key: value}`; on the command line
`section.key=value` overrides it. `python -m hpc_tune --help` prints the same. Written by
`python tools/reference.py`.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write into")
    out = parser.parse_args(arguments).out
    (out / "settings.md").write_text(settings_page(), encoding="utf-8")
    files = (DOCS / "files.md").read_text(encoding="utf-8")
    (out / "files.md").write_text(files_page(files), encoding="utf-8")


def settings_page() -> str:
    """Return the page of settings as Markdown."""
    lines = [HEAD]
    sections = itertools.groupby(describe_fields(), key=lambda field: field[0].partition(".")[0])
    for section, fields in sections:
        model = RunConfig.model_fields[section].annotation
        lines += [f"## {section}", "", f"{(model.__doc__ or '').strip()}", ""]
        rows = [
            (f"`{name}`", f"`{kind}`", f"`{_format_default(default)}`", description)
            for name, kind, default, description in fields
        ]
        lines += [*_table("| setting | type | default | |", rows), ""]
    return "\n".join(lines)


def files_page(page: str) -> str:
    """Return the page of files with its sections on files of JSON lines as declared in code."""
    sections = {name: _lines_of(kinds) for name, kinds in LINES.items()}
    for name, lines in {**sections, "events.jsonl": _events()}.items():
        before, head, rest = page.partition(f"## {name}\n")
        _, next_head, after = rest.partition("\n## ")
        page = "\n".join([f"{before}{head}", *lines]) + f"\n{next_head}{after}"
    return page


def _lines_of(kinds: Iterable[type]) -> Iterator[str]:
    for number, kind in enumerate(kinds):
        declared = [(field.name, *get_args(field.type)) for field in dataclasses.fields(kind)]
        rows = [(f"`{name}`", f"`{formatannotation(of)}`", text) for name, of, text in declared]
        yield from ([""] if number else [])
        yield from ((getdoc(kind) or "").replace("\n", " "), "")
        yield from _table("| field | type | what it is |", rows)


def _events() -> Iterator[str]:
    yield from (f"Each line has {_fields(EVENT_FIELDS)}. The kinds:", "")
    rows = [
        (f"`{name}`", kind.occasion, _fields(kind.fields)) for name, kind in EVENT_KINDS.items()
    ]
    yield from _table("| kind | when | more fields |", rows)


def _fields(fields: Mapping[str, tuple[type, str]]) -> str:
    return "; ".join(
        f"{', '.join(f'`{name}`' for name in names.split())} ({about})"
        for names, (_, about) in fields.items()
    )


def _table(head: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield head
    yield "|" + "---|" * (head.count("|") - 1)
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _format_default(default: object) -> str:
    if default is None:
        return "unset"
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    main()
