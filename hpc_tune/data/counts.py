"""Counts of what became of raw data: its rows (``ReadFindings``), its examples (``Counters``)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

ANSWER_BEYOND_SEQ_LEN = "the answer begins after seq_len"  # why an example is dropped
_MAX_SHOWN_BAD_ROWS = 5
_MAX_COLUMN_NAMES = 30
_MAX_REASONS = 20
_TEMPLATE_EXAMPLE = "such as data.chat_template=chatml where turns are ChatML's"
_REMARKS = {
    "truncated": "cut at seq_len",
    "split": "texts split into pieces of seq_len",
    "unclear_answers": "answers not learned: the chat template does not show where they are",
    "unended_answers": "answers end with no special token: the model will not learn where to stop"
    " (let the chat template end the assistant's turns with one)",
    "ended_by_next": "answers learned with the special token that opens the next turn: the chat"
    " template ends them with none",
    "empty_answers": "empty answers not learned",
    "marked_answers": "answers not learned, as the data mark them",
    "unmarked_answers": "answers not learned: the chat template marks others ({% generation %})",
    "lost_reasoning": "answers whose reasoning the chat template leaves out",
    "written_reasoning": "answers without reasoning, learned with an empty reasoning block that the"
    " chat template writes",
    "joined_starts": "answers whose first token includes the end of the prompt: a model that is"
    " given the prompt alone sees other tokens",
    "unended_texts": "texts and answers without an end token: the tokenizer names none (eos_token),"
    " so the model will not learn where to stop",
    "null_contents": "messages whose content is null, taken as empty",
    "lost_calls": "answers whose tool calls the chat template leaves out (data.chat_template"
    f" takes one that writes them, {_TEMPLATE_EXAMPLE})",
    "lost_tools": "rows whose tools the chat template does not show (data.chat_template takes one"
    f" that does, {_TEMPLATE_EXAMPLE})",
    "own_controls": "special tokens in answers, such as those of calls, learned as such",
    "control_texts": "special tokens typed into messages, taken as plain text",
    "bad_rows": "bad rows skipped, as data.bad_rows says",
    "control_tokens": "special tokens in plain text, taken as such (as text if the tokenizer has"
    " split_special_tokens)",
    "weighted": "documents with weights in the loss other than 0 and 1",
    "cut_prompts": "prompts cut from the left, for the answers to fit into seq_len",
    "cut_others": "prompts cut from the left before the answer of another row, by which KTO"
    " estimates how far the model has moved",
    "unpaired": "pairs taken as two labeled answers each",
    "unmatched": "labeled answers without another row's answer to the same prompt, by which KTO"
    " estimates how far the model has moved",
}
# Counted only for preferences.
PREFERENCE_COUNTERS = ("cut_prompts", "cut_others", "unpaired", "unmatched")
# Written into a file only if not zero: other files stay as they were before these existed.
OPTIONAL_COUNTERS = (
    "weighted",
    "written_reasoning",
    "joined_starts",
    "unmarked_answers",
    "cut_tokens",
    "cut_lengths",
)
_ROLE_REMARKS = {
    "left_out": "messages of role {role} that the chat template leaves out (data.chat_template"
    f" takes one that writes them, {_TEMPLATE_EXAMPLE})",
    "other_answers": "messages of role {role} not learned: only those of role assistant are",
}


@dataclass
class Counters:
    """What became of the examples of a source.

    ``cut_tokens``: tokens cut from examples longer than ``seq_len``, all tokens of those dropped.
    ``cut_lengths``: how many such examples there are, by length rounded up (``round_up_length``).
    """

    examples: int = 0
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    truncated: int = 0
    split: int = 0
    unclear_answers: int = 0
    unended_answers: int = 0
    ended_by_next: int = 0
    empty_answers: int = 0
    marked_answers: int = 0
    unmarked_answers: int = 0
    lost_reasoning: int = 0
    written_reasoning: int = 0
    joined_starts: int = 0
    lost_calls: int = 0
    lost_tools: int = 0
    unended_texts: int = 0
    null_contents: int = 0
    own_controls: int = 0
    control_texts: int = 0
    bad_rows: int = 0
    control_tokens: int = 0
    cut_prompts: int = 0
    cut_others: int = 0
    unpaired: int = 0
    unmatched: int = 0
    weighted: int = 0
    cut_tokens: int = 0
    cut_lengths: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    other_answers: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def count_dropped_example(self, reason: str) -> None:
        """Count one example that becomes no document."""
        _increment_count(self.dropped, reason, "other reasons")

    def count_truncation(self, length: int, kept_tokens: int) -> None:
        """Count an example of ``length`` tokens, more than fit, that was cut to ``kept_tokens``."""
        self.cut_tokens += length - kept_tokens
        key = str(round_up_length(length))
        self.cut_lengths[key] = self.cut_lengths.get(key, 0) + 1

    def count_role(self, counter_name: str, role: str) -> None:
        """Count a message of a role in the field ``counter_name``."""
        _increment_count(getattr(self, counter_name), role, "others")

    def add(self, other: "Counters") -> None:
        """Add another part's counts to these."""
        for name, value in asdict(other).items():
            total = getattr(self, name)
            if isinstance(total, dict):
                for key, count in value.items():
                    total[key] = total.get(key, 0) + count
            else:
                setattr(self, name, total + value)

    def __str__(self) -> str:
        """Return one line for a person."""
        summary = (
            f"{self.examples:,} examples -> {self.documents:,} documents, {self.tokens:,} tokens,"
            f" {self.loss_tokens:,} of them learned"
        )
        return "; ".join([summary, *self.remarks()])

    def remarks(self) -> list[str]:
        """Return what was cut, not learned and dropped, one phrase each."""
        counts = {remark: getattr(self, name) for name, remark in _REMARKS.items()}
        parts = [f"{count:,} {remark}" for remark, count in counts.items() if count]
        for name, remark in _ROLE_REMARKS.items():
            roles = sorted(getattr(self, name).items())
            parts += [f"{count:,} {remark.format(role=role)}" for role, count in roles]
        parts += [f"{count:,} dropped: {reason}" for reason, count in sorted(self.dropped.items())]
        return parts


def round_up_length(length: int) -> int:
    """Round a number of tokens up to 6 significant bits, that is by about 3% at most."""
    step = 1 << max(length.bit_length() - 6, 0)
    return -(-length // step) * step


def _increment_count(counts: dict[str, int], key: str, overflow_key: str) -> None:
    """Count ``key``, or ``overflow_key`` if there are too many keys already."""
    if key not in counts and len(counts) >= _MAX_REASONS:
        key = overflow_key
    counts[key] = counts.get(key, 0) + 1


@dataclass
class ReadFindings:
    """What was found while rows were read."""

    num_bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    read_as: dict[str, str] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    num_elsewhere: int = 0
    num_marked: int = 0

    @property
    def has_room_for_bad_row(self) -> bool:
        """Whether the next bad row's reason would be kept; finding its line takes time."""
        return len(self.first_bad) < _MAX_SHOWN_BAD_ROWS

    def count_bad_row(self, problem: str) -> None:
        """Count a bad row."""
        self.num_bad += 1
        if self.has_room_for_bad_row:
            self.first_bad.append(problem)

    def note_columns(
        self, used_names: Iterable[str] = (), unread_names: Iterable[str] = ()
    ) -> None:
        """Add names of columns that were read, or were not."""
        self.used += [name for name in used_names if name not in self.used]
        new_names = [name for name in unread_names if name not in self.unread]
        self.unread += new_names[: max(_MAX_COLUMN_NAMES - len(self.unread), 0)]

    def add(self, other: "ReadFindings") -> None:
        """Add the findings of a later chunk."""
        self.num_bad += other.num_bad
        self.num_elsewhere += other.num_elsewhere
        self.num_marked += other.num_marked
        self.first_bad = [*self.first_bad, *other.first_bad][:_MAX_SHOWN_BAD_ROWS]
        self.read_as |= other.read_as
        self.note_columns(other.used, other.unread)

    def lines(self) -> list[str]:
        """Return what the user should know, in lines."""
        lines = []
        if self.read_as:
            names = ", ".join(f"{old} as {new}" for old, new in sorted(self.read_as.items()))
            lines.append(f"columns read under another name: {names} (data.columns can change that)")
        if unread := [name for name in self.unread if name not in self.read_as]:
            ellipsis = ", ..." if len(unread) >= _MAX_COLUMN_NAMES else ""
            names = ", ".join(name or '""' for name in sorted(unread))
            lines.append(f"columns not read: {names}{ellipsis}")
        if self.num_marked:
            lines.append(f"{self.num_marked:,} rows left out, as the data mark them")
        if self.num_bad:
            num_unshown = self.num_bad - len(self.first_bad)
            row_texts = [*self.first_bad, *([f"and {num_unshown:,} more"] if num_unshown else [])]
            lines.append(f"{self.num_bad:,} bad rows skipped: " + "; ".join(row_texts))
        return lines
