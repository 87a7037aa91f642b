"""Write docs/settings.md: every setting with its type, default and description.

python tools/reference.py [--out docs/settings.md]
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from hpc_tune.config.load import describe_fields
from hpc_tune.config.schema import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

Every setting of a run. In a file a section is `section: {key: value}`; on the command line
`section.key=value` overrides it. `python -m hpc_tune --help` prints the same. Written by
`python tools/reference.py`.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    parser.parse_args(arguments).out.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    sections = itertools.groupby(describe_fields(), key=lambda field: field[0].partition(".")[0])
    for section, fields in sections:
        model = RunConfig.model_fields[section].annotation
        lines += [f"## {section}", "", f"{(model.__doc__ or '').strip()}", ""]
        lines += ["| setting | type | default | |", "|---|---|---|---|"]
        for name, kind, default, description in fields:
            cells = (f"`{name}`", f"`{kind}`", f"`{_shown(default)}`", description)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(default: object) -> str:
    if default is None:
        return "unset"
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    main()
