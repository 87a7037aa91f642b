"""Parts of files, as other tools name them: hpc_tune uses a file whole, or holds a share out.

train[:95%]      -> data.eval_fraction=0.05
train[:1000]     -> a command that writes these records to a file of their own
"""

import re
import shlex
from typing import Any

from hpc_tune.convert.outcomes import ForeignConfig, Ignored, Mapped, Outcome, Rule, Unsupported

# The records of a file, one list of JSON or one record a line; {part} is a slice of the list.
_COMMAND = (
    "import json,sys; t=open(sys.argv[1],encoding='utf-8-sig').read(); "
    "r=json.loads(t) if t.lstrip()[:1]=='[' else [json.loads(s) for s in t.split('\\n') if "
    "s.strip()]; [print(json.dumps(x)) for x in r[{part}]]"
)
_SLICE = re.compile(r"train\[(?:(\d+)(%?))?:(?:(\d+)(%?))?\]")
_MIN_TRAINED = 50  # percent; of which less is trained on is a part, and not data with a rest


def advise_cut(part: str, ours: str, file: Any = None) -> Unsupported:
    """Return how to write a part of a file; ``part`` is a slice of the list of records ``r``."""
    is_known = isinstance(file, str)
    if is_known and not file.endswith((".json", ".jsonl")):
        records = part.replace("len(r)", "their number")
        instead = f"write records {records} of {file} (the first is 0) to a file of their own; set "
        return Unsupported(f"{instead}{ours} to that", to_do=True)
    name = shlex.quote(file) if is_known else "FILE"
    which = "" if is_known else ", FILE being JSON or JSONL"
    command = f'python -c "{_COMMAND.format(part=part)}" {name} > part.jsonl'
    return Unsupported(
        f"write these records of a file to one of their own: {command}{which}; then set {ours} to "
        "part.jsonl",
        to_do=True,
    )


def first_records(ours: str) -> Rule:
    """Rule for a number of records at the beginning of each file."""

    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        if not str(value).isdecimal():
            return Unsupported("it is no number of records", to_do=True)
        return advise_cut(f":{value}", ours)

    return rule


def convert_split(value: Any, ours: str, file: Any, is_whole_data: bool) -> Outcome:
    """Return what becomes of a part of a file, such as train[:95%].

    ``is_whole_data``: the file is all the data, and nothing else says what is held out.
    """
    if value == "train":
        return Ignored("files are used whole; in a folder, those of the train split")
    found = _SLICE.fullmatch(str(value).replace(" ", ""))
    if found is None:
        return Unsupported(
            f"name the file of this part in {ours}: files are used whole", to_do=True
        )
    start, _, end, percent = found.groups()
    if is_whole_data and not start and percent and _MIN_TRAINED <= int(end) < 100:
        remark = "the rest is held out; a hash of each document chooses, not its position"
        return Mapped({"data.eval_fraction": (100 - int(end)) / 100}, remark)
    return advise_cut(
        f"{_slice_bound(*found.group(1, 2))}:{_slice_bound(*found.group(3, 4))}", ours, file
    )


def complement(value: Any) -> str | None:
    """Return the part that is all but ``value``: train[:95%] for train[95%:]."""
    found = re.fullmatch(r"train\[(\d+%):\]", str(value).replace(" ", ""))
    return f"train[:{found[1]}]" if found else None


def _slice_bound(number: str | None, percent: str | None) -> str:
    if number is None:
        return ""
    return f"round(len(r)*{number}/100)" if percent else number
