"""Whether a tokenizer has the control tokens of a chat template that is taken by its name."""

from pathlib import Path
from typing import Any

from hpc_tune.config.chat_templates import NAMED_TEMPLATES, NamedTemplate, is_path
from hpc_tune.errors import DataError
from hpc_tune.log import log


def require_template_tokens(chat_template: str, tokenizer: Any, directory: Path) -> None:
    """Check the tokens of a template by name; a path is not looked at.

    Without the other control tokens a model can learn the form, without the last it cannot end.

    Raises:
        DataError: if what ends an answer is no single token.
    """
    if is_path(chat_template):
        return
    template = NAMED_TEMPLATES[chat_template]
    if not _has_end(template, tokenizer):
        fitting = [name for name, other in NAMED_TEMPLATES.items() if _has_all(other, tokenizer)]
        end = template.end or "the end token (eos_token)"
        lacks = f"{end} is no token of" if template.end else "there is none in"
        others = f"one whose tokens it has: {', '.join(fitting)}; or to " if fitting else ""
        raise DataError(
            f"data.chat_template={chat_template} ends answers with {end}, and {lacks} the "
            f"tokenizer of {directory}: the model would not learn to stop. Set "
            f"data.chat_template to {others}a file of your own that ends answers with a token of "
            "it; or take a model whose tokenizer has it"
        )
    if missing := [text for text in template.controls if not _is_token(text, tokenizer)]:
        log.warning(
            "data.chat_template=%s: %s %s of the tokenizer of %s; they are cut into pieces as "
            "other text is: rows get longer, the model has to learn them anew, and cannot "
            "tell them from the same text typed by people",
            chat_template,
            ", ".join(missing),
            "is no token" if len(missing) == 1 else "are no tokens",
            directory,
        )


def _has_all(template: NamedTemplate, tokenizer: Any) -> bool:
    return _has_end(template, tokenizer) and all(
        _is_token(text, tokenizer) for text in template.controls
    )


def _has_end(template: NamedTemplate, tokenizer: Any) -> bool:
    end = template.end or tokenizer.eos_token
    return end is not None and _is_token(end, tokenizer)


def _is_token(text: str, tokenizer: Any) -> bool:
    """Return whether a text is one token wherever it stands, as added tokens are."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return text in {token.content for token in added}
