"""What data/ needs from a tokenizer, and the fingerprint that ties prepared data to it.

``transformers`` is not imported here: its fast tokenizers satisfy ``FastTokenizer`` as they are.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from hpc_tune.data.answers import mark_generation_blocks
from hpc_tune.errors import DataError


class FastTokenizer(Protocol):
    """The part of ``transformers.PreTrainedTokenizerFast`` that preparing data uses."""

    name_or_path: str
    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def backend_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` inside."""

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens as text."""

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """The special tokens by role."""

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> Any:
        """Render messages to text."""

    def get_vocab(self) -> dict[str, int]:
        """Each token and its ID, added tokens included."""

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""


def require_fast_tokenizer(tokenizer: Any) -> FastTokenizer:
    """Return the tokenizer if it is a fast one.

    Raises:
        DataError: if it has no ``backend_tokenizer`` (a "slow", pure Python tokenizer).
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"the tokenizer {tokenizer_name(tokenizer)} ({type(tokenizer).__name__}) has no"
            " tokenizer.json; the loss mask needs a fast tokenizer. Convert it once with"
            " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return tokenizer


def tokenizer_name(tokenizer: Any) -> str:
    """Return the name or path under which the tokenizer was loaded."""
    return str(getattr(tokenizer, "name_or_path", "") or "unnamed")


def splits_special_tokens(tokenizer: FastTokenizer) -> bool:
    """Return whether special tokens in plain text are read as text (``split_special_tokens``)."""
    return bool(getattr(tokenizer, "split_special_tokens", False))


def num_ids(tokenizer: FastTokenizer) -> int:
    """Return the highest token ID plus one: more than the number of tokens if IDs are unused."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def fingerprint(tokenizer: FastTokenizer) -> str:
    """Return a sha256 over all of a tokenizer that decides which tokens and masks a text becomes.

    That is the backend (vocabulary, merges, normalizer, pre-tokenizer, added tokens), the special
    tokens, the chat templates, and whether special tokens in plain text are text. Truncation
    and padding are left out: calls change them, and preparing turns both off.
    """
    backend = json.loads(require_fast_tokenizer(tokenizer).backend_tokenizer.to_str())
    backend.pop("truncation", None)
    backend.pop("padding", None)
    parts: tuple[Any, ...] = (
        backend,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
    )
    if splits_special_tokens(tokenizer):
        parts = (*parts, "split_special_tokens")
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


# -- The chat templates of a tokenizer: one, or several by name, with a fixed date.
#
# A template that prints today's date would make other tokens of the same data tomorrow, so it gets
# TEMPLATE_DATE instead.


TEMPLATE_DATE = datetime(2026, 1, 1)
_DATE_FUNCTION = "strftime_now"
_LITERAL_DATE_CALL = re.compile(
    rf"""{_DATE_FUNCTION}\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)"""
)
_DATE_CALL = re.compile(rf"{_DATE_FUNCTION}\s*\(")
_DATE_DIRECTIVES = (
    *(f"%-{c}" for c in "dmHIMSyj"),
    *(f"%{c}" for c in "aAbBcdeFHIjmMpSTuUwWxXyYZz"),
)


class ChatTemplates:
    """The templates of a tokenizer, with a fixed date."""

    def __init__(self, chat_template: Any) -> None:
        """Take what a tokenizer has: the text of a template, a dict of several, or nothing."""
        templates = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
        self._templates_by_name = {
            name: (text := freeze_template_date(template), mark_generation_blocks(text))
            for name, template in templates.items()
            if template
        }

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._templates_by_name)

    def choose(self, has_tools: bool) -> tuple[str, str | None]:
        """Return the template that transformers chooses, and ``mark_generation_blocks`` of it.

        Raises:
            ValueError: if it would be the one called default, and there is none.
        """
        name = "tool_use" if has_tools and "tool_use" in self._templates_by_name else "default"
        if name not in self._templates_by_name:
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(self._templates_by_name)} and "
                "none called default; set data.chat_template"
            )
        return self._templates_by_name[name]


def freeze_template_date(template: str) -> str:
    """Return a chat template that prints TEMPLATE_DATE where it would print today's date."""
    fixed = _LITERAL_DATE_CALL.sub(
        lambda match: repr(TEMPLATE_DATE.strftime(match["format"])), template
    )
    if not _DATE_CALL.search(fixed):
        return fixed
    # The format is computed by the template itself.
    expression = "(format | string)"
    for directive in _DATE_DIRECTIVES:
        expression += f" | replace('{directive}', '{TEMPLATE_DATE.strftime(directive)}')"
    # After {{ '' }}, Jinja keeps a newline at the beginning of the template.
    macro = f"{{% macro {_DATE_FUNCTION}(format) %}}{{{{ {expression} }}}}{{% endmacro %}}"
    return f"{macro}{{{{ '' }}}}{fixed}"


def find_template_date(tokenizer: FastTokenizer) -> str:
    """Return the date that chat templates print in place of today's; empty if none prints one."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    is_dated = any(_DATE_CALL.search(text) for text in texts)
    return TEMPLATE_DATE.date().isoformat() if is_dated else ""
