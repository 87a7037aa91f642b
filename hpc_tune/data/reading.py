"""How rows become examples: under which names their fields are read, and which rows are used.

    row -> data.columns, well-known names -> to_example (records.py) -> this part of the documents

What is worth reporting is counted in ``ReadFindings``, chunk by chunk.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpc_tune.config.data import DataForm
from hpc_tune.data.counts import ReadFindings
from hpc_tune.data.fields import (
    ADVANTAGE_FIELDS,
    CHAT_FIELDS,
    CHOSEN_FIELDS,
    LABEL_FIELDS,
    PREFERENCE_FIELDS,
    REJECTED_FIELDS,
    WrongRecord,
    refuse_advantages,
)
from hpc_tune.data.preferences import (
    PAIR_FIELDS,
    LabeledAnswers,
    PreferencePair,
    has_label,
    to_labeled_answers,
    to_pair,
)
from hpc_tune.data.records import (
    EXPECTED_FIELDS_TEXT,
    FORMS,
    Chat,
    Completion,
    Example,
    NoLearnedTextError,
    Text,
    Tokens,
    to_example,
)
from hpc_tune.errors import DataError

BadRowPolicy = Literal["refuse", "skip"]
SplitPart = Literal["all", "train", "held-out"]
ParsedRow = Example | Tokens | PreferencePair | LabeledAnswers
_QUESTION_FIELDS = ("instruction", "prompt", "question", "query")
_ANSWER_FIELDS = ("output", "completion", "answer", "response")
KNOWN_FIELDS = frozenset(
    itertools.chain(
        *(form.own_fields + form.shared_fields for form in FORMS),
        _QUESTION_FIELDS,
        _ANSWER_FIELDS,
        PREFERENCE_FIELDS,
        ADVANTAGE_FIELDS,
        ("label", "context", "system_prompt"),
    )
)
_READERS: dict[DataForm, Callable[[Any], ParsedRow]] = {
    "answers": to_example,
    "pairs": to_pair,
    "labels": to_labeled_answers,
}


@dataclass(frozen=True)
class ReadOptions:
    """How a source is read.

    ``columns``: (name in the data, field that it is read as). ``part``: which documents are read,
    if the share ``held_out`` of them is split off. ``form``: what rows are read as.
    """

    columns: tuple[tuple[str, str], ...] = ()
    bad_rows: BadRowPolicy = "refuse"
    held_out: float = 0.0
    part: SplitPart = "all"
    form: DataForm = "answers"

    @property
    def known_fields(self) -> frozenset[str]:
        """The fields that rows may have."""
        return KNOWN_FIELDS if self.form == "answers" else KNOWN_FIELDS | PAIR_FIELDS


DEFAULT_READ_OPTIONS = ReadOptions()


def choose_columns(
    file: Any, names: Sequence[str], reading: ReadOptions, findings: ReadFindings
) -> list[str]:
    """Return the columns of a table that are read.

    Raises:
        DataError: if none is known, one occurs twice, or one of data.columns is missing.
    """
    columns = dict(reading.columns)
    if missing := [name for name in columns if name not in names]:
        raise DataError(_explain_missing_columns(str(file), missing, names))
    chosen_columns = [name for name in names if name in reading.known_fields or name in columns]
    if not chosen_columns:
        raise DataError(f"{file} has the columns {', '.join(names)}; {EXPECTED_FIELDS_TEXT}")
    if duplicates := sorted({name for name in chosen_columns if chosen_columns.count(name) > 1}):
        raise DataError(f"{file} has the column {duplicates[0]} twice; give each a name of its own")
    findings.note_columns(columns, (name for name in names if name not in chosen_columns))
    return chosen_columns


def require_columns(source: str, reading: ReadOptions, findings: ReadFindings) -> None:
    """Check that each name in data.columns was found in some row.

    Raises:
        DataError: if one was not: it is misspelled, or belongs to other data.
    """
    if missing := [name for name, _ in reading.columns if name not in findings.used]:
        raise DataError(
            _explain_missing_columns(source, missing, [*findings.used, *findings.unread])
        )


def _explain_missing_columns(source: str, missing: Sequence[str], names: Sequence[str]) -> str:
    return (
        f"data.columns names {', '.join(missing)}, but {source} has the columns "
        f"{', '.join(sorted(names)) or '(none)'}"
    )


def read_example(row: Any, reading: ReadOptions, findings: ReadFindings) -> ParsedRow | None:
    """Return the example of a row; None if it is not to be learned, or not in ``reading.part``.

    Raises:
        WrongRecord: if the row is not a valid example.
        DataError: if only one part is read, and the row is a piece of a text.
    """
    if isinstance(row, WrongRecord):
        raise row
    if isinstance(row, Chat | Completion | Text | Tokens):
        if reading.form != "answers":
            raise WrongRecord("found text or an answer, expected rows with fields for preferences")
        return row if _is_in_requested_split(row, reading, findings) else None
    names: dict[str, str] = {}
    if isinstance(row, dict):
        row, names = _rename_fields(row, reading, findings)
    try:
        if isinstance(row, dict):
            refuse_advantages(row)
        example = _READERS[reading.form](row)
    except NoLearnedTextError:
        findings.num_marked += 1
        return None
    except WrongRecord as error:
        notes = [f"{old} is read as {new}" for old, new in names.items()]
        if isinstance(row, dict) and (other_columns := sorted(set(findings.unread) - row.keys())):
            notes.append(f"further columns: {', '.join(other_columns)}")
        raise WrongRecord(f"{error} ({', '.join(notes)})" if notes else str(error)) from error
    return example if _is_in_requested_split(example, reading, findings) else None


def _rename_fields(
    row: dict[str, Any], reading: ReadOptions, findings: ReadFindings
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a row with its fields under the names they are read as, and the renamed {old: new}."""
    names = {old: new for old, new in reading.columns if old in row}
    fields = dict(row)
    if reading.columns:
        targets = {new for _, new in reading.columns}
        forms = [form for form in FORMS if targets.intersection(form.own_fields)]
        foreign = {
            name for form in FORMS if forms and form not in forms for name in form.own_fields
        }
        groups = (CHOSEN_FIELDS, REJECTED_FIELDS, LABEL_FIELDS)
        is_form_set = reading.form == "answers" and bool(forms)  # data.columns says what is learned
        foreign.update(*(g for g in groups if is_form_set or targets.intersection(g)))
        fields = {k: v for k, v in row.items() if k not in names and k not in foreign | targets}
    new_row = {**fields, **{new: row[old] for old, new in names.items()}}
    is_pair = reading.form == "pairs" or (reading.form == "labels" and not has_label(new_row))
    if not is_pair and (known_renames := _find_known_renames(new_row)):
        # A field without a value may have the name that another one is read under.
        taken_names = {new for old, new in known_renames.items() if old != new}
        new_row = {
            known_renames.get(name, name): value
            for name, value in new_row.items()
            if name in known_renames or name not in taken_names
        }
        names = {old: known_renames.get(new, new) for old, new in names.items()}
        names |= {old: new for old, new in known_renames.items() if old in fields}
    form = next((form for form in FORMS if new_row.get(form.required_fields[0]) is not None), None)
    form_fields = {*form.own_fields, *form.shared_fields} if form else set()
    form_fields.discard("response")  # it is read only under another name
    if reading.form != "answers":
        form_fields = {*PAIR_FIELDS} if is_pair else {*form_fields, *LABEL_FIELDS}
    read_fields = form_fields.intersection(fields) | names.keys()
    findings.read_as |= names
    findings.note_columns(
        read_fields, (name for name in row if name not in read_fields and row[name] is not None)
    )
    return new_row, names


def _find_known_renames(row: dict[str, Any]) -> dict[str, str]:
    """Return {name: read as} for fields with well-known names, such as question and answer.

    Raises:
        WrongRecord: if either of two fields could be meant.
    """
    keys = [name for name, value in row.items() if value is not None]
    system = {"system_prompt": "system"} if "system_prompt" in keys and "system" not in keys else {}
    if any(name in keys for name in CHAT_FIELDS):
        return system
    if "text" in keys:
        return {}
    questions = [name for name in _QUESTION_FIELDS if name in keys]
    answers = [name for name in _ANSWER_FIELDS if name in keys]
    if not questions or not answers:
        return {}
    pairs = {
        f.required_fields[0]: f.required_fields[1] for f in FORMS if len(f.required_fields) > 1
    }
    names: dict[str, str] = {}
    question = next((q for q, a in pairs.items() if q in keys and a in keys), None)
    if question is None:
        for several in (questions, answers):
            if len(several) > 1:
                raise WrongRecord(
                    f"found the fields {' and '.join(several)}, and either could be meant; say "
                    f"which: data.columns={{{questions[0]}: prompt, {answers[0]}: completion}}"
                )
        # ms-swift's query and response have a history, as alpaca's instruction and output do.
        is_swift = [*questions, *answers] == ["query", "response"] and bool(row.get("history"))
        is_alpaca = questions == ["instruction"] or "context" in keys or is_swift
        question = "instruction" if is_alpaca else "prompt"
        names = {questions[0]: question, answers[0]: pairs[question]}
    if "context" in keys and "input" not in keys and question == "instruction":
        names["context"] = "input"
    return {old: new for old, new in (names | system).items() if old != new}


def _is_in_requested_split(
    example: ParsedRow, reading: ReadOptions, findings: ReadFindings
) -> bool:
    """Return whether an example is in the part that is read.

    A hash of its content decides, not its position or the kind of its file. Duplicates are in the
    same part.

    Raises:
        WrongRecord: if the content cannot be hashed: nested too deeply, or not valid Unicode.
        DataError: if a part is asked for, and the example is a piece of a longer text.
    """
    if isinstance(example, Text) and not (example.begins and example.ends):
        if reading.part != "all":
            raise DataError(
                "data.eval_fraction splits off whole documents, and a text of several MiB is one "
                "document; cut it into files or rows, or set data.eval_path"
            )
        return True
    try:
        if reading.part == "all" and isinstance(example, Text):
            example.text.encode()  # all that can be wrong is checked; JSON would double the memory
            return True
        data = _content_bytes(example)
    except RecursionError:
        raise WrongRecord("nested too deeply") from None
    except UnicodeEncodeError:
        raise WrongRecord(
            "one half of a surrogate pair in it (such as \\ud83d alone in JSON); cut text between "
            "characters"
        ) from None
    if reading.part == "all":
        return True
    digest = hashlib.blake2b(data, digest_size=8).digest()
    is_held_out = int.from_bytes(digest, "big") < reading.held_out * 2**64
    is_wanted = is_held_out == (reading.part == "held-out")
    findings.num_elsewhere += not is_wanted
    return is_wanted


def _content_bytes(example: ParsedRow) -> bytes:
    """Return bytes that are the same for two examples if they are duplicates."""
    if isinstance(example, Tokens):
        return example.token_ids.astype("<i8").tobytes()
    text = json.dumps(_json_value(example), ensure_ascii=False, sort_keys=True, default=_json_value)
    return text.encode()


def _json_value(value: Any) -> Any:
    if isinstance(value, ParsedRow):  # weights make no difference to duplicates
        return {k: v for k, v in vars(value).items() if k not in ("weight", "weights")}
    return sorted(value) if isinstance(value, frozenset) else str(value)
