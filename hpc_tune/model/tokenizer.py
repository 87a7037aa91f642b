"""The tokenizer of a model directory, and whether it fits the model."""

import json
from pathlib import Path
from typing import Any

from hpc_tune.config.chat_templates import template_file
from hpc_tune.errors import DataError, first_line, raise_if_out_of_files, require_utf8
from hpc_tune.log import log
from hpc_tune.model.config_json import read_config_json
from hpc_tune.model.language import refuse_code, require_directory
from hpc_tune.model.named_template import require_template_tokens
from hpc_tune.model.template_syntax import refuse_syntax_errors
from hpc_tune.model.tokenizer_file import TOKENIZER_FILE, match_tokenizer_file, read_whole_file
from hpc_tune.pointer_file import why_pointer


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Any:
    """Return the fast tokenizer of a model directory, with ``chat_template`` if one is given.

    That is a file, or a name of config/chat_templates.py.

    Raises:
        DataError: if it, its directory or the template is missing, it has no fast form, or the
            template cannot be read, or ends answers with no token of it. ConfigError: if the
            directory's name is no text.
    """
    require_directory(directory)
    require_utf8(str(directory))  # the tokenizers library takes no other
    for file in sorted(directory.iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt") and (pointer := why_pointer(file)):
            raise DataError(pointer)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and tokenizers raise for odd files
        refuse_code(directory, "tokenizer_config.json", error)
        tokenizer = _load_without_class(directory, error)
    if not tokenizer.is_fast:
        raise DataError(f"{directory}: its tokenizer has no fast form (tokenizer.json is missing)")
    tokenizer = match_tokenizer_file(tokenizer, directory)
    _require_vocabulary(directory, tokenizer)
    _set_end_token(tokenizer, directory)
    _require_embeddings(directory, tokenizer)
    if chat_template is None:
        if not tokenizer.chat_template and (found := read_processor_template(directory)):
            tokenizer.chat_template = found[1]
            log.info("%s: the chat template is that of %s", directory, found[0])
    else:
        tokenizer.chat_template = _read_template(chat_template)
        require_template_tokens(chat_template, tokenizer, directory)
    return tokenizer


def _read_template(chat_template: str) -> str:
    """Return the text of data.chat_template, a path or a known name; DataError if unreadable."""
    file = template_file(chat_template)
    if pointer := why_pointer(file):
        raise DataError(pointer)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"data.chat_template={chat_template} cannot be read: {why}") from None
    refuse_syntax_errors(text, f"data.chat_template={chat_template}")
    return text


def _load_without_class(directory: Path, error: Exception) -> Any:
    """Return the tokenizer that tokenizer.json is, where transformers' class fails by ``error``."""
    try:
        if not (directory / TOKENIZER_FILE).is_file():
            raise error
        tokenizer = read_whole_file(directory)
    except Exception:  # of the same kinds
        files = sorted(file.name for file in directory.glob("*token*"))
        raise DataError(
            f"{directory}: no usable tokenizer (found {', '.join(files) or 'no file of one'}: "
            f"{first_line(error)}); copy tokenizer.json and tokenizer_config.json of the model "
            "into it, or fetch it whole: hf download NAME --local-dir DIR"
        ) from None
    log.info(
        "%s: its tokenizer.json is used; the class that tokenizer_config.json names cannot be "
        "built from it (%s)",
        directory,
        first_line(error),
    )
    return tokenizer


def _set_end_token(tokenizer: Any, directory: Path) -> None:
    """Take the end token of the model's configuration where the tokenizer names none.

    An empty name, as early conversions of LLaMA have it, would be read as the unknown token.
    """
    for role in ("bos_token", "eos_token"):
        if not getattr(tokenizer, role):
            setattr(tokenizer, role, None)
    if tokenizer.eos_token is not None:
        return
    named = _read_json(directory / "special_tokens_map.json").get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    found = [("special_tokens_map.json", named)]
    for file in ("generation_config.json", "config.json"):
        ends = _read_json(directory / file).get("eos_token_id")
        for number in ends if isinstance(ends, list) else [ends]:
            if type(number) is int and number >= 0:
                found.append((file, tokenizer.convert_ids_to_tokens(number)))
    vocabulary = tokenizer.get_vocab()
    for file, token in found:
        if token in vocabulary:
            tokenizer.eos_token = token
            log.info(
                "%s: its tokenizer names no end token (eos_token); texts and answers end with %s, "
                "the end of %s",
                directory,
                token,
                file,
            )
            return


def stop_ids(tokenizer: Any, directory: Path) -> set[int]:
    """Return the tokens at which transformers stops to generate with the model of a directory.

    They are those of generation_config.json, or else of config.json, and the tokenizer's end token,
    at which servers stop as well.
    """
    for file in ("generation_config.json", "config.json"):
        named = _read_json(directory / file).get("eos_token_id")
        if named is not None:
            break
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}


def read_processor_template(directory: Path) -> tuple[str, Any] | None:
    """Return the file and the chat template of a model's processor; several are a dict by name.

    Models with images have it there, and none in the tokenizer's files.
    """
    for file in ("chat_template.json", "processor_config.json"):
        template = _read_json(directory / file).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if template:
            return file, template
    return None


def _read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where there is none that can be read."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise_if_out_of_files(error)
        return {}
    return settings if isinstance(settings, dict) else {}


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
        config = read_config_json(directory)
        rows = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise_if_out_of_files(error)
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
    media = {str(tokens[name]) for name in names if tokens.get(name)}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if rows is None or max(vocabulary.values(), default=-1) < rows:
        return
    beyond = sorted(token for token, number in vocabulary.items() if number >= rows)
    if extra := [token for token in beyond if token not in media]:
        raise DataError(
            f"{directory}: its tokenizer has {max(vocabulary.values()) + 1} tokens, the model has "
            f"embeddings for {rows}; there is none for {', '.join(extra[:3])}. Take the model's "
            "own tokenizer, or resize the model's embeddings first (resize_token_embeddings)"
        )
