"""What data/ asks of a tokenizer, and the fingerprint that ties prepared data to it.

``transformers`` is not imported here: its fast tokenizers satisfy ``FastTokenizer`` as they are.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

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
        """Each token and its number, added tokens included."""

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""


def require_fast(tokenizer: Any) -> FastTokenizer:
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
    """Return whether control tokens in plain text are text, by ``split_special_tokens``."""
    return bool(getattr(tokenizer, "split_special_tokens", False))


def num_ids(tokenizer: FastTokenizer) -> int:
    """Return the highest token number plus one: more than there are tokens, if some are unused."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def fingerprint(tokenizer: FastTokenizer) -> str:
    """Return a sha256 over everything that decides which tokens and masks a text becomes.

    That is the backend (vocabulary, merges, normaliser, pre-tokeniser, added tokens), the special
    tokens, the chat template in use, and whether control tokens in plain text are text. Truncation
    and padding are left out: calls change them, and preparing turns both off.
    """
    backend = json.loads(require_fast(tokenizer).backend_tokenizer.to_str())
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
