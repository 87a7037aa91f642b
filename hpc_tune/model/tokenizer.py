"""The tokenizer of a model directory, and whether it fits the model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_tune.config.data import NAMED_TEMPLATES, NamedTemplate, is_template_path, template_file
from hpc_tune.errors import DataError, first_line, require_utf8
from hpc_tune.files import explain_pointer_file, read_json_object
from hpc_tune.log import log
from hpc_tune.model.language import refuse_remote_code, require_model_directory

# -- Whether transformers tokenizes as tokenizer.json says, and what is used instead if not.
#
# Some classes of transformers 5 take only the vocabulary and merges from tokenizer.json and use
# their own normalizer and pre-tokenizer: a model then gets other tokens than it was trained with.
# ``PreTrainedTokenizerFast`` reads the whole file. Both are compared on ``PROBE_TEXTS``, on pieces
# of the vocabulary and on special tokens in text; where they differ, the file is right.


TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILE_CLASS = "PreTrainedTokenizerFast"  # transformers 5 calls it TokenizersBackend
PROBE_TEXTS = (
    "In  2023 there were 650841823 people in 12 cities; 3.14159, 1,000,000 and 0x7f.",
    "\n  It's what we'LL see:\r\n\r\n\tthe   end...  ",
    "def f(x_1, *, y=None):\n        return {'a': [x_1 ** 2, y // 3]}  # camelCase\n\n\n    pass\n",
    "<div class=\"a\">https://example.org/a?b=c&d=%20e</div> user@example.org #tag",
    "Die Größe, café and cafe\u0301, ﬁne ½ ² Å, Straße, naïve; ‘quotes’ — “dash”…",
    "Привет, мир! Ελληνικά. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया।",
    "今日は世界。中文字符，한국어 문장입니다. ภาษาไทย",
    "👍🏽 👩‍👩‍👧 🇳🇴 \u00a0\u200b\u3000x∑∞≠≤ \u2581a\x01",
    " leading", "  two", "trailing ", "A", "a\n\nb", "1", "12345678901",
)  # fmt: skip
_NUM_VOCABULARY_PIECES = 512
_NUM_SPECIAL_TOKENS = 64
_MAX_SHOWN_TOKENS = 12
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def ensure_tokenizer_matches_file(tokenizer: Any, directory: Path) -> Any:
    """Return ``tokenizer``, or one that reads the files as they are if its class does not.

    Differences are logged. Those that come from tokenizer_config.json are kept, as in transformers.
    Without tokenizer.json there is nothing to compare with.
    """
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        return tokenizer
    expected = _EncodedTexts.encode_probes_with_file(file)
    difference = expected.describe_difference(tokenizer.backend_tokenizer)
    if difference is None and expected.surrounding_ids == _find_surrounding_ids(
        tokenizer.backend_tokenizer
    ):
        return tokenizer
    if not has_own_class(tokenizer):
        if difference is not None:
            log.info(
                "%s: tokenizer_config.json changes tokens of tokenizer.json, and is followed as in "
                "transformers: %s",
                directory,
                difference,
            )
        return tokenizer
    file_tokenizer = load_tokenizer_from_json(directory)
    class_difference = _compare_texts(tokenizer, file_tokenizer, expected.texts)
    if class_difference is None:
        return tokenizer
    log.info(
        "%s: text is tokenized as its tokenizer.json says. The class %s, which transformers would "
        "use, makes other tokens: %s. Exports name %s, which reads the whole file",
        directory,
        type(tokenizer).__name__,
        class_difference,
        TOKENIZER_FILE_CLASS,
    )
    _copy_special_tokens(file_tokenizer, tokenizer)
    return file_tokenizer


def has_own_class(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a class of its own, not the one that reads the whole file."""
    from transformers import PreTrainedTokenizerFast

    return type(tokenizer) is not PreTrainedTokenizerFast


def load_tokenizer_from_json(directory: Path) -> Any:
    """Return a directory's tokenizer exactly as tokenizer.json and tokenizer_config.json say."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


def fix_exported_tokenizer_class(tokenizer: Any, out: Path) -> None:
    """Make transformers tokenize by the files in ``out`` just as ``tokenizer`` does.

    ``tokenizer`` is the one that the run trained with. tokenizer_config.json is rewritten only if
    the class that transformers takes by it makes other tokens.
    """
    file = out / TOKENIZER_CONFIG
    texts = _make_probe_texts(tokenizer.backend_tokenizer)
    if _compare_auto_tokenizer(out, tokenizer, texts) is None:
        return
    settings = json.loads(file.read_text(encoding="utf-8")) | {
        "tokenizer_class": TOKENIZER_FILE_CLASS
    }
    for role in _TOKEN_ROLES:
        if (text := getattr(tokenizer, role, None)) and not settings.get(role):
            settings[role] = str(text)
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    if difference := _compare_auto_tokenizer(out, tokenizer, texts):
        log.warning(
            "transformers' AutoTokenizer reads the exported tokenizer differently from how the run "
            "read it, whatever tokenizer_class says: %s. Load it with %s.from_pretrained",
            difference,
            TOKENIZER_FILE_CLASS,
        )


def may_have_own_class(directory: Path) -> bool:
    """Return whether transformers may use a class of its own for a tokenizer.json.

    It uses the class that tokenizer_config.json names, or one for the model type in config.json.
    """
    file = directory / TOKENIZER_CONFIG
    if not file.is_file() or not (directory / TOKENIZER_FILE).is_file():
        return False
    class_name = read_json_object(file).get("tokenizer_class")
    is_whole = class_name in (TOKENIZER_FILE_CLASS, "TokenizersBackend", None)
    return not is_whole or (directory / "config.json").is_file()


def _compare_auto_tokenizer(directory: Path, tokenizer: Any, texts: list[str]) -> str | None:
    """Return how AutoTokenizer's tokenizer of a directory differs from ``tokenizer``, or None."""
    from transformers import AutoTokenizer

    try:
        auto_tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        return _compare_texts(auto_tokenizer, tokenizer, texts)
    except Exception as error:  # whatever a class raises that cannot be built from the file
        return first_line(error)


@dataclass(frozen=True)
class _EncodedTexts:
    """Texts and a backend's tokens; ``surrounding_ids``: those that it puts around a text."""

    texts: list[str]
    ids: list[list[int]]
    surrounding_ids: list[int]
    format_tokens: Callable[[Sequence[int]], str]

    @classmethod
    def encode_probes_with_file(cls, file: Path) -> "_EncodedTexts":
        """Encode texts that show how a tokenizer.json splits text."""
        from tokenizers import Tokenizer

        raw_tokenizer = Tokenizer.from_file(str(file))
        return cls.encode_texts(raw_tokenizer, _make_probe_texts(raw_tokenizer))

    @classmethod
    def encode_texts(cls, backend: Any, texts: list[str]) -> "_EncodedTexts":
        """Encode texts with a backend, switching off its truncation and padding.

        They are encoded one by one: a batch would start threads, and their number, which cannot be
        changed afterwards, is only decided later.
        """
        backend.no_truncation()
        backend.no_padding()
        ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        tokens = {number: str(backend.id_to_token(number)) for row in ids for number in row}

        def format_tokens(row: Sequence[int]) -> str:
            shown_tokens = [tokens[number] for number in row[:_MAX_SHOWN_TOKENS]]
            return f"[{' '.join(shown_tokens)}{' ...' if len(row) > _MAX_SHOWN_TOKENS else ''}]"

        return cls(texts, ids, _find_surrounding_ids(backend), format_tokens)

    def describe_difference(self, backend: Any) -> str | None:
        """Return where another backend's tokens differ from these, or None if they do not."""
        other = _EncodedTexts.encode_texts(backend, self.texts)
        for text, a, b in zip(self.texts, other.ids, self.ids, strict=True):
            if a != b:
                start = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
                actual = f"{text[:60]!r} has {other.format_tokens(a[start:])}"
                return f"{actual} where the file has {self.format_tokens(b[start:])}"
        return None


def _find_surrounding_ids(backend: Any) -> list[int]:
    ids: list[int] = backend.encode("", add_special_tokens=True).ids
    return ids


def _compare_texts(tokenizer: Any, file_tokenizer: Any, texts: list[str]) -> str | None:
    """Return where a tokenizer differs from the one that reads the whole file, or None."""
    backend, file_backend = tokenizer.backend_tokenizer, file_tokenizer.backend_tokenizer
    if (first := _find_surrounding_ids(backend)) != (second := _find_surrounding_ids(file_backend)):
        names = [
            [b.id_to_token(n) for n in ids] for b, ids in ((backend, first), (file_backend, second))
        ]
        return f"around a text it has {names[0]} where the file has {names[1]}"
    return _EncodedTexts.encode_texts(file_backend, texts).describe_difference(backend)


def _make_probe_texts(raw_tokenizer: Any) -> list[str]:
    """Return texts that show how a tokenizer splits text, some made from its own vocabulary."""
    size, added_tokens = raw_tokenizer.get_vocab_size(), raw_tokenizer.get_added_tokens_decoder()
    pieces = [
        raw_tokenizer.decode([n]) for n in range(0, size, max(1, size // _NUM_VOCABULARY_PIECES))
    ]
    rows = ["".join(pieces[start : start + 8]) for start in range(0, len(pieces), 8)]
    rows += [" ".join(pieces[start : start + 8]) for start in range(0, len(pieces), 8)]
    control_tokens = [token.content for token in added_tokens.values()][:_NUM_SPECIAL_TOKENS]
    return [*PROBE_TEXTS, *rows, *(f"a {text} b{text}\n{text}c" for text in control_tokens)]


def _copy_special_tokens(file_tokenizer: Any, tokenizer: Any) -> None:
    """Copy the special tokens that a class sets by itself, if they are in the file's vocabulary."""
    vocabulary = file_tokenizer.get_vocab()
    for role in _TOKEN_ROLES:
        text = getattr(tokenizer, role)  # None where the class has no such token
        if getattr(file_tokenizer, role) is None and text is not None and str(text) in vocabulary:
            setattr(file_tokenizer, role, str(text))


# -- Whether a tokenizer has the special tokens of a named chat template.


def require_template_tokens(chat_template: str, tokenizer: Any, directory: Path) -> None:
    """Check the special tokens of a named template; a template given by its path is not checked.

    A model can learn the format without its other special tokens, but not how to stop without the
    end token.

    Raises:
        DataError: if the text that ends an answer is not a single token.
    """
    if is_template_path(chat_template):
        return
    template = NAMED_TEMPLATES[chat_template]
    if not _has_end_token(template, tokenizer):
        fitting = [
            name for name, other in NAMED_TEMPLATES.items() if _has_all_tokens(other, tokenizer)
        ]
        end_token = template.end_token or "the end token (eos_token)"
        fault = f"{end_token} is no token of" if template.end_token else "there is none in"
        advice = f"one whose tokens it has: {', '.join(fitting)}; or to " if fitting else ""
        raise DataError(
            f"data.chat_template={chat_template} ends answers with {end_token}, and {fault} the "
            f"tokenizer of {directory}: the model would not learn to stop. Set "
            f"data.chat_template to {advice}a file of your own that ends answers with one of the "
            "tokenizer's tokens; or take a model whose tokenizer has that end token"
        )
    if missing := [text for text in template.control_tokens if not _is_token(text, tokenizer)]:
        log.warning(
            "data.chat_template=%s: %s %s of the tokenizer of %s; they are cut into pieces like "
            "ordinary text: rows get longer, the model has to learn them from scratch, and cannot "
            "tell them from the same text typed by users",
            chat_template,
            ", ".join(missing),
            "is no token" if len(missing) == 1 else "are no tokens",
            directory,
        )


def _has_all_tokens(template: NamedTemplate, tokenizer: Any) -> bool:
    return _has_end_token(template, tokenizer) and all(
        _is_token(text, tokenizer) for text in template.control_tokens
    )


def _has_end_token(template: NamedTemplate, tokenizer: Any) -> bool:
    end_token = template.end_token or tokenizer.eos_token
    return end_token is not None and _is_token(end_token, tokenizer)


def _is_token(text: str, tokenizer: Any) -> bool:
    """Return whether a text is one token wherever it occurs, as added tokens are."""
    added_tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return text in {token.content for token in added_tokens}


# -- Whether a chat template can be compiled: reported once, before any row is rendered.
#
# transformers compiles a template only when the first row is rendered, and again for each row that
# fails.


class _GenerationTag(Extension):
    """Reads {% generation %} ... {% endgeneration %}, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse_syntax_errors(template: Any, location: str) -> None:
    """Refuse a template, or a dict of named templates, that Jinja cannot compile.

    Raises:
        DataError: naming the template's ``location``, and the line.
    """
    templates = template if isinstance(template, dict) else {"": template}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    for name, text in templates.items():
        try:
            environment.compile(text or "")
        except TemplateSyntaxError as error:
            suffix = f" ({name})" if name else ""
            lines = (text or "").splitlines()
            line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
            excerpt = f": {line[:80]}" if line else ""
            raise DataError(
                f"{location}{suffix}, line {error.lineno}: the chat template cannot be read: "
                f"{(error.message or '').rstrip('.')}{excerpt}. Correct the line"
            ) from None


# -- The tokenizer of a model directory.


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Any:
    """Return the fast tokenizer of a model directory, with ``chat_template`` if one is given.

    ``chat_template`` is a file, or a name that config/data.py defines.

    Raises:
        DataError: if the tokenizer, its directory or the template is missing, the tokenizer has no
            fast form, has tokens without an embedding or no ordinary tokens, or lacks the token
            that ends the template's answers, or the template cannot be read.
        ConfigError: if the directory's name is not valid UTF-8.
    """
    require_model_directory(directory)
    require_utf8(str(directory))  # the tokenizers library needs it
    for file in sorted(directory.iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt") and (
            pointer := explain_pointer_file(file)
        ):
            raise DataError(pointer)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and tokenizers raise for odd files
        refuse_remote_code(directory, "tokenizer_config.json", error)
        tokenizer = _load_without_class(directory, error)
    if not tokenizer.is_fast:
        raise DataError(f"{directory}: its tokenizer has no fast form (tokenizer.json is missing)")
    tokenizer = ensure_tokenizer_matches_file(tokenizer, directory)
    _require_vocabulary(directory, tokenizer)
    _set_end_token(tokenizer, directory)
    _require_embeddings(directory, tokenizer)
    if chat_template is None:
        if not tokenizer.chat_template and (file_template := read_processor_template(directory)):
            tokenizer.chat_template = file_template[1]
            log.info("%s: the chat template is taken from %s", directory, file_template[0])
    else:
        tokenizer.chat_template = _read_template(chat_template)
        require_template_tokens(chat_template, tokenizer, directory)
    return tokenizer


def _read_template(chat_template: str) -> str:
    """Read the text of data.chat_template, a path or a known name; DataError if unreadable."""
    file = template_file(chat_template)
    if pointer := explain_pointer_file(file):
        raise DataError(pointer)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"data.chat_template={chat_template} cannot be read: {reason}") from None
    refuse_syntax_errors(text, f"data.chat_template={chat_template}")
    return text


def _load_without_class(directory: Path, error: Exception) -> Any:
    """Load tokenizer.json by itself after transformers' class failed with ``error``."""
    try:
        if not (directory / TOKENIZER_FILE).is_file():
            raise error
        tokenizer = load_tokenizer_from_json(directory)
    except Exception:  # whatever they raise, as above
        files = sorted(file.name for file in directory.glob("*token*"))
        raise DataError(
            f"{directory}: no usable tokenizer (found {', '.join(files) or 'no tokenizer files'}: "
            f"{first_line(error)}); copy tokenizer.json and tokenizer_config.json of the model "
            "into it, or fetch it whole: hf download NAME --local-dir DIR"
        ) from None
    log.info(
        "%s: transformers cannot load the tokenizer class that tokenizer_config.json names, so "
        "tokenizer.json is loaded without it (%s)",
        directory,
        first_line(error),
    )
    return tokenizer


def _set_end_token(tokenizer: Any, directory: Path) -> None:
    """Take the end token from the model's configuration if the tokenizer names none.

    An empty name, as in early conversions of LLaMA, would be read as the unknown token.
    """
    for role in ("bos_token", "eos_token"):
        if not getattr(tokenizer, role):
            setattr(tokenizer, role, None)
    if tokenizer.eos_token is not None:
        return
    eos_token = read_json_object(directory / "special_tokens_map.json").get("eos_token")
    eos_token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    candidates = [("special_tokens_map.json", eos_token)]
    for file in ("generation_config.json", "config.json"):
        ends = read_json_object(directory / file).get("eos_token_id")
        for number in ends if isinstance(ends, list) else [ends]:
            if type(number) is int and number >= 0:
                candidates.append((file, tokenizer.convert_ids_to_tokens(number)))
    vocabulary = tokenizer.get_vocab()
    for file, token in candidates:
        if token in vocabulary:
            tokenizer.eos_token = token
            log.info(
                "%s: its tokenizer names no end token (eos_token); texts and answers end with %s, "
                "the end token in %s",
                directory,
                token,
                file,
            )
            return


def stop_ids(tokenizer: Any, directory: Path) -> set[int]:
    """Return the token ids at which generation with a directory's model stops.

    transformers stops at those in generation_config.json, or else in config.json; servers also stop
    at the tokenizer's end token.
    """
    for file in ("generation_config.json", "config.json"):
        eos_ids = read_json_object(directory / file).get("eos_token_id")
        if eos_ids is not None:
            break
    ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    return {number for number in (tokenizer.eos_token_id, *ids) if type(number) is int}


def read_processor_template(directory: Path) -> tuple[str, Any] | None:
    """Return the file and chat template of a model's processor, or None if it has no template.

    Several templates are a dict. Some models that process images have a template only there.

    Raises:
        DataError: if it is neither a text nor texts by name.
    """
    for file in ("chat_template.json", "processor_config.json"):
        template = read_json_object(directory / file).get("chat_template")
        if isinstance(template, list):
            entries = [entry if isinstance(entry, dict) else {} for entry in template]
            template = {entry.get("name"): entry.get("template") for entry in entries}
        texts = template if isinstance(template, dict) else {"default": template}
        if template and not all(map(_is_named_template, texts.items())):
            raise DataError(
                f"{directory / file}: chat_template: expected a text, or texts by their names"
            )
        if template:
            return file, template
    return None


def _is_named_template(item: tuple[Any, Any]) -> bool:
    name, text = item
    # An export writes each to a file of its name.
    return isinstance(name, str) and isinstance(text, str) and Path(name).name == name != ""


def _require_vocabulary(directory: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer made from tokenizer_config.json alone: it has only special tokens."""
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise DataError(
            f"{directory}: its tokenizer has {len(tokenizer)} special tokens and no others; "
            "tokenizer.json, or its vocabulary (such as vocab.json and merges.txt), is missing: "
            "copy them from the model into it"
        )


def read_num_embeddings(directory: Path) -> int | None:
    """Return how many embeddings a model has according to its config.json; None if not stated."""
    config = read_json_object(directory / "config.json")  # if damaged, building the model fails
    text = config.get("text_config") or config
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    return rows if isinstance(rows, int) else None


def _require_embeddings(directory: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for.

    Tokens for images and sound, which are rare in text, are accepted: Gemma 3's small models have
    one. Prepared data that contains such a token is refused when it is opened.
    """
    rows = read_num_embeddings(directory)
    names = ("image_token", "audio_token", "video_token", "boi_token", "eoi_token")
    tokens = tokenizer.init_kwargs | tokenizer.init_kwargs.get("model_specific_special_tokens", {})
    media = {str(tokens[name]) for name in names if tokens.get(name)}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if rows is None or max(vocabulary.values(), default=-1) < rows:
        return
    unembedded_tokens = sorted(token for token, number in vocabulary.items() if number >= rows)
    if extra := [token for token in unembedded_tokens if token not in media]:
        raise DataError(
            f"{directory}: its tokenizer has {max(vocabulary.values()) + 1} tokens, the model has "
            f"embeddings for {rows}; there is none for {', '.join(extra[:3])}. Take the model's "
            "own tokenizer, or resize the model's embeddings first (resize_token_embeddings)"
        )
