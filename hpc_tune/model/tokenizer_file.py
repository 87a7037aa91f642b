"""Whether transformers reads a tokenizer as tokenizer.json says it, and what is taken if not.

Some classes of transformers 5 take vocabulary and merges from tokenizer.json and drop its
normalizer and pre-tokenizer for their own: a model then gets other tokens than it was trained with.
``PreTrainedTokenizerFast`` reads the whole file. Both are tried on ``PROBES``, on pieces of the
vocabulary and on control tokens in text; where they differ, the file is right.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import first_line
from hpc_tune.log import log

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
WHOLE_FILE_CLASS = "PreTrainedTokenizerFast"  # transformers 5 calls it TokenizersBackend
PROBES = (
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
_NUM_PIECES = 512
_NUM_SPECIAL_TOKENS = 64
_MAX_SHOWN = 12
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def match_tokenizer_file(tokenizer: Any, directory: Path) -> Any:
    """Return ``tokenizer`` if it makes the tokens of its tokenizer.json, else one that does.

    What differs is logged. Without tokenizer.json there is nothing to compare with.
    """
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        return tokenizer
    by_file = _Encoded.encode_file(file)
    made = by_file.difference(tokenizer.backend_tokenizer)
    if made is None and by_file.ends == _find_added_ends(tokenizer.backend_tokenizer):
        return tokenizer
    if not has_own_class(tokenizer):
        if made is not None:
            log.info(
                "%s: tokenizer_config.json changes tokens of tokenizer.json, and is read as "
                "transformers reads it: %s",
                directory,
                made,
            )
        return tokenizer
    whole = read_whole_file(directory)
    found = _difference(tokenizer, whole, by_file.texts)
    if found is None:
        return tokenizer
    log.info(
        "%s: text becomes the tokens of its tokenizer.json. The class %s, which transformers takes "
        "for it, would make others: %s. Exports name %s, which reads the whole file",
        directory,
        type(tokenizer).__name__,
        found,
        WHOLE_FILE_CLASS,
    )
    _keep_roles(whole, tokenizer)
    return whole


def has_own_class(tokenizer: Any) -> bool:
    """Return whether a tokenizer is of a class of its own, not of the one that reads the file."""
    from transformers import PreTrainedTokenizerFast

    return type(tokenizer) is not PreTrainedTokenizerFast


def read_whole_file(directory: Path) -> Any:
    """Return the tokenizer of a directory as its tokenizer.json and tokenizer_config.json say."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


def name_whole_file_class(tokenizer: Any, out: Path) -> None:
    """Let those who load the tokenizer files in ``out`` by transformers get the same tokens.

    ``tokenizer`` makes those that were trained with. tokenizer_config.json is written anew only
    where the class that is taken by it makes others.
    """
    file = out / TOKENIZER_CONFIG
    texts = _make_probes(tokenizer.backend_tokenizer)
    if _difference_of_loaded(out, tokenizer, texts) is None:
        return
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": WHOLE_FILE_CLASS}
    for role in _TOKEN_ROLES:
        if (text := getattr(tokenizer, role, None)) and not settings.get(role):
            settings[role] = str(text)
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    if found := _difference_of_loaded(out, tokenizer, texts):
        log.warning(
            "transformers' AutoTokenizer reads the exported tokenizer differently from how the run "
            "read it, whatever tokenizer_class says: %s. Load it by %s.from_pretrained",
            found,
            WHOLE_FILE_CLASS,
        )


def may_have_own_class(directory: Path) -> bool:
    """Return whether transformers may take a class of its own for a tokenizer.json.

    It takes that which tokenizer_config.json names, or one by the type of model of config.json.
    """
    file = directory / TOKENIZER_CONFIG
    if not file.is_file() or not (directory / TOKENIZER_FILE).is_file():
        return False
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class")
    is_whole = named in (WHOLE_FILE_CLASS, "TokenizersBackend", None)
    return not is_whole or (directory / "config.json").is_file()


def _difference_of_loaded(directory: Path, tokenizer: Any, texts: list[str]) -> str | None:
    """Return where what AutoTokenizer makes of a directory differs from ``tokenizer``."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        return _difference(loaded, tokenizer, texts)
    except Exception as error:  # whatever a class raises that cannot be made of the file
        return first_line(error)


@dataclass(frozen=True)
class _Encoded:
    """Texts with the tokens that a backend makes of them; ``ends``: what it puts around a text."""

    texts: list[str]
    ids: list[list[int]]
    ends: list[int]
    names: Callable[[Sequence[int]], str]

    @classmethod
    def encode_file(cls, file: Path) -> "_Encoded":
        """Encode what shows how a tokenizer.json cuts text."""
        from tokenizers import Tokenizer

        raw = Tokenizer.from_file(str(file))
        return cls.encode_texts(raw, _make_probes(raw))

    @classmethod
    def encode_texts(cls, backend: Any, texts: list[str]) -> "_Encoded":
        """Encode texts by a backend, whose truncation and padding are switched off.

        One by one: a batch would start threads, whose number is settled later, and for good.
        """
        backend.no_truncation()
        backend.no_padding()
        ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        tokens = {number: str(backend.id_to_token(number)) for row in ids for number in row}

        def names(row: Sequence[int]) -> str:
            shown = [tokens[number] for number in row[:_MAX_SHOWN]]
            return f"[{' '.join(shown)}{' ...' if len(row) > _MAX_SHOWN else ''}]"

        return cls(texts, ids, _find_added_ends(backend), names)

    def difference(self, backend: Any) -> str | None:
        """Return where another backend makes other tokens than this one; None where it does not."""
        other = _Encoded.encode_texts(backend, self.texts)
        for text, a, b in zip(self.texts, other.ids, self.ids, strict=True):
            if a != b:
                at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
                shown = f"{text[:60]!r} has {other.names(a[at:])}"
                return f"{shown} where the file has {self.names(b[at:])}"
        return None


def _find_added_ends(backend: Any) -> list[int]:
    ids: list[int] = backend.encode("", add_special_tokens=True).ids
    return ids


def _difference(tokenizer: Any, whole: Any, texts: list[str]) -> str | None:
    """Return where a tokenizer of transformers differs from the one that reads the whole file."""
    one, two = tokenizer.backend_tokenizer, whole.backend_tokenizer
    if (first := _find_added_ends(one)) != (second := _find_added_ends(two)):
        names = [
            [backend.id_to_token(n) for n in ids] for backend, ids in ((one, first), (two, second))
        ]
        return f"around a text it has {names[0]} where the file has {names[1]}"
    return _Encoded.encode_texts(two, texts).difference(one)


def _make_probes(raw: Any) -> list[str]:
    """Return texts that show how a tokenizer cuts, some of its own vocabulary among them."""
    size, added = raw.get_vocab_size(), raw.get_added_tokens_decoder()
    pieces = [raw.decode([number]) for number in range(0, size, max(1, size // _NUM_PIECES))]
    rows = ["".join(pieces[at : at + 8]) for at in range(0, len(pieces), 8)]
    rows += [" ".join(pieces[at : at + 8]) for at in range(0, len(pieces), 8)]
    controls = [token.content for token in added.values()][:_NUM_SPECIAL_TOKENS]
    return [*PROBES, *rows, *(f"a {text} b{text}\n{text}c" for text in controls)]


def _keep_roles(whole: Any, tokenizer: Any) -> None:
    """Keep the special tokens that a class knows by itself, where the file has them."""
    vocabulary = whole.get_vocab()
    for role in _TOKEN_ROLES:
        text = getattr(tokenizer, role)  # None where the class has no such token
        if getattr(whole, role) is None and text is not None and str(text) in vocabulary:
            setattr(whole, role, str(text))
