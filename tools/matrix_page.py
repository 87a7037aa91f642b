"""docs/models.md: the table of tools/matrix.py and what is refused, read and written.

A matrix of some architectures, methods or layouts replaces only their cells.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

METHODS = ("lora", "experts", "full", "dora", "qlora")
# Headings of columns, by the names in rows and notes.
LAYOUTS = {
    "one": "one rank",
    "shard": "shard 2",
    "tensor": "tensor 2",
    "pipeline": "pipeline 2",
    "zero3": "ZeRO-3",
    "expert": "expert 2",
    "expert4": "shard 4, expert 2",
}
_HEADER = f"| architecture | packed | method | {' | '.join(LAYOUTS.values())} |"
_REFUSED_HEADING = "## What is refused, and why"
_ALL_ROWS_LABEL = "in all"
_NOTE = re.compile(r"- \*\*(?P<about>[\w ,]+)\*\* \((?P<names>[\w., -]+)\): (?P<text>.*)")
_TEXT = """\
A small model of each architecture, with random weights, was trained for a few steps with
stock transformers, peft and AdamW, and with hpc_tune. A number is the largest relative
difference between their losses at a step; `-` is refused before a run begins, for the
reasons below. `3e-04 of 4e-04`: the stock tools' own losses change by the second number
when all weights change by a ten-millionth. Your own model is checked in the same way at
its first start. `experts`: LoRA on the routed experts of a mixture too; `expert 2`:
`parallel.expert`, for mixtures; `shard 4, expert 2`: on four ranks, two of which share an
expert. An empty cell was not tried.
"""


class Note(NamedTuple):
    """Why an architecture is refused in ``about``: a method, a layout or both; or "" for all."""

    name: str
    about: str
    text: str


@dataclass
class Page:
    """Cells by architecture and method, of which the first says if rows are packed; and notes."""

    rows: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> "Page":
        """Return what a written page holds."""
        table, _, notes = text.partition(_REFUSED_HEADING)
        page = cls()
        for found in map(_NOTE.match, notes.splitlines()):
            if found:
                about = found["about"].replace(_ALL_ROWS_LABEL, "")
                names = found["names"].split(", ")
                page.notes += [Note(name, about, found["text"]) for name in names]
        for line in table.splitlines():
            name, *cells = line[2:-2].split(" | ") if line.startswith("| ") else [""]
            if len(cells) > 2 and name != "architecture":
                packed, method, *gaps = cells
                page.rows[name, method] = [packed, *gaps, *[""] * (len(LAYOUTS) - len(gaps))]
        return page

    def update(
        self,
        new: "Page",
        names: Collection[str],
        methods: Collection[str],
        layouts: Collection[str],
    ) -> "Page":
        """Return this page, updated with a matrix of these architectures, methods and layouts."""

        def is_kept(note: Note) -> bool:
            return note.name not in names or any(
                part in every and part not in tried
                for part in note.about.split(", ")
                for every, tried in ((METHODS, methods), (LAYOUTS, layouts))
            )

        rows = dict(self.rows)
        for key, cells in new.rows.items():
            old = rows.get(key, [""] * (1 + len(LAYOUTS)))
            pairs = zip(LAYOUTS, cells[1:], old[1:], strict=True)
            kept = [cell if layout in layouts else before for layout, cell, before in pairs]
            rows[key] = [cells[0], *kept]
        refused = {name for name in names if not any(key[0] == name for key in new.rows)}
        rows = {key: cells for key, cells in rows.items() if key[0] not in refused}
        notes = [note for note in self.notes if is_kept(note)]
        return Page(rows, list(dict.fromkeys([*notes, *new.notes])))

    def text(self, versions: str, known_names: Sequence[str]) -> str:
        """Return the page as Markdown, with architectures in the order of ``known_names``."""
        order = {name: number for number, name in enumerate(known_names)}
        rows = sorted(self.rows, key=lambda key: (order[key[0]], METHODS.index(key[1])))
        lines = [
            "# Models\n",
            f"Made by `python tools/matrix.py --out docs/models.md` with {versions}.\n",
            _TEXT,
            _HEADER,
            "|---|---|---" + "|---" * len(LAYOUTS) + "|",
        ]
        for name, method in rows:
            packed, *gaps = self.rows[name, method]
            lines.append(f"| {name} | {packed} | {method} | {' | '.join(gaps)} |")
        alike: dict[tuple[str, str], list[str]] = {}
        for note in sorted(self.notes, key=lambda note: (note.about, order[note.name])):
            alike.setdefault((note.about, note.text), []).append(note.name)
        notes = [
            f"- **{about or _ALL_ROWS_LABEL}** ({', '.join(names)}): {text}"
            for (about, text), names in alike.items()
        ]
        return "\n".join([*lines, "", _REFUSED_HEADING, "", *notes, ""])
