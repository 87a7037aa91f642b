"""Chat templates and the tokenizer's class in an export: what its users get is what was trained.

tokenizer_config.json            one template, or several by name, of older transformers
chat_template.jinja              the one called default
additional_chat_templates/*.jinja    the others
"""

import json
from pathlib import Path
from typing import Any

from hpc_tune.errors import DataError
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.tokenizer_file import name_whole_file_class

TEMPLATE, OTHERS = "chat_template.jinja", "additional_chat_templates"
_CONFIG = "tokenizer_config.json"


def write_template(template: str | None, base: Path, out: Path) -> None:
    """Put the chat templates into an export that has the tokenizer's files of ``base`` otherwise.

    ``template`` is the one that was trained with, where it is not the base's: it replaces all. An
    export whose tokenizer.json transformers would read in another way names a class that does not.
    """
    if template is not None:
        _write(template, out)
    try:
        tokenizer = load_tokenizer(base)
    except DataError:
        return  # nothing was rendered or tokenized with it, then
    if template is None:
        _carry(tokenizer.chat_template, base, out)
    name_whole_file_class(tokenizer, out)


def _write(template: str, out: Path) -> None:
    """Write one template, also where older transformers look for it."""
    (out / TEMPLATE).write_text(template, encoding="utf-8")
    file = out / _CONFIG
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": template}
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _carry(templates: Any, base: Path, out: Path) -> None:
    """Write those of the base's templates that are not in the files that were copied."""
    in_config = json.loads((out / _CONFIG).read_text("utf-8")) if (out / _CONFIG).is_file() else {}
    if not templates or (in_config.get("chat_template") and not (base / OTHERS).is_dir()):
        return
    named = templates if isinstance(templates, dict) else {"default": templates}
    for name, text in named.items():
        file = out / TEMPLATE if name == "default" else out / OTHERS / f"{name}.jinja"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
