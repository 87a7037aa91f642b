"""The tokenizer of a model directory, and whether it fits the model."""

from pathlib import Path
from typing import Any

from hpc_tune.errors import DataError, first_line
from hpc_tune.model.config_json import config_json
from hpc_tune.model.language import refuse_code, require_directory


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Any:
    """Return the fast tokenizer of a model directory, with ``chat_template`` (a file) if given.

    Raises:
        DataError: if it, its directory or the template is missing, or it has no fast form.
    """
    require_directory(directory)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and tokenizers raise for odd files
        refuse_code(directory, "tokenizer_config.json", error)
        files = sorted(file.name for file in directory.glob("*token*"))
        raise DataError(
            f"{directory}: no usable tokenizer (found {', '.join(files) or 'no file of one'}: "
            f"{first_line(error)}); copy tokenizer.json and tokenizer_config.json of the model "
            "into it, or fetch it whole: hf download NAME --local-dir DIR"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(f"{directory}: its tokenizer has no fast form (tokenizer.json is missing)")
    _require_vocabulary(directory, tokenizer)
    _require_embeddings(directory, tokenizer)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"data.chat_template={chat_template} cannot be read: {why}") from None
    return tokenizer


def _require_vocabulary(directory: Path, tokenizer: Any) -> None:
    """Refuse what transformers makes of tokenizer_config.json alone: a few special tokens."""
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise DataError(
            f"{directory}: its tokenizer has {len(tokenizer)} special tokens and no others; "
            "tokenizer.json, or its vocabulary (such as vocab.json and merges.txt), is missing: "
            "copy them from the model into it"
        )


def embedding_rows(directory: Path) -> int | None:
    """Return how many embeddings a model has by its config.json; None if that does not say."""
    try:
        config = config_json(directory)
        rows = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # an error where the model is built
    return rows if isinstance(rows, int) else None


def _require_embeddings(directory: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for.

    Those for images and sound, which text rarely has, are no reason: Gemma 3's small ones have one.
    Prepared data that has one is refused where it is opened.
    """
    rows = embedding_rows(directory)
    names = ("image_token", "audio_token", "video_token", "boi_token", "eoi_token")
    tokens = tokenizer.init_kwargs | tokenizer.init_kwargs.get("model_specific_special_tokens", {})
    media = {str(tokens.get(name)) for name in names}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if rows is None or max(vocabulary.values(), default=-1) < rows:
        return
    beyond = sorted(token for token, number in vocabulary.items() if number >= rows)
    if extra := [token for token in beyond if token not in media]:
        raise DataError(
            f"{directory}: its tokenizer has {max(vocabulary.values()) + 1} tokens and the model "
            f"embeddings for {rows}; there is none for {', '.join(extra[:3])}. Take the model's "
            "own tokenizer, or resize the model's embeddings first (resize_token_embeddings)"
        )
