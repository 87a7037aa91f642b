"""Chat templates and the tokenizer's class in an export: what its users get is what was trained.

tokenizer_config.json            one template, or several by name, of older transformers
chat_template.jinja              the one called default
additional_chat_templates/*.jinja    the others
"""

import json
import shutil
from pathlib import Path

from hpc_tune.errors import DataError
from hpc_tune.model.tokenizer import load_tokenizer, read_processor_template
from hpc_tune.model.tokenizer_file import may_have_own_class, name_whole_file_class

TEMPLATE, OTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_CONFIG = "tokenizer_config.json"


def write_template(template: str | None, base: Path, out: Path) -> None:
    """Put the chat templates into an export that has the tokenizer's files of ``base`` otherwise.

    ``template`` is the one that was trained with, where it is not the base's: it replaces all. An
    export whose tokenizer.json transformers would read in another way names a class that does not.
    """
    if template is not None:
        _write(template, out)
    else:
        _copy_missing(base, out)
    if may_have_own_class(out):
        try:
            name_whole_file_class(load_tokenizer(base), out)
        except DataError:
            return  # a tokenizer that cannot be loaded has made no tokens


def _write(template: str, out: Path) -> None:
    """Write one template, also where older transformers look for it."""
    (out / TEMPLATE).write_text(template, encoding="utf-8")
    file = out / _CONFIG
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": template}
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _copy_missing(base: Path, out: Path) -> None:
    """Write those of the base's templates that are not in the files that were copied."""
    for file in sorted((base / OTHER_TEMPLATES).glob("*.jinja")):
        (out / OTHER_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, out / OTHER_TEMPLATES / file.name)
    config = json.loads((out / _CONFIG).read_text("utf-8")) if (out / _CONFIG).is_file() else {}
    if (out / TEMPLATE).exists() or config.get("chat_template"):
        return
    if found := read_processor_template(base):
        named = found[1] if isinstance(found[1], dict) else {"default": found[1]}
        for name, text in named.items():
            file = out / TEMPLATE if name == "default" else out / OTHER_TEMPLATES / f"{name}.jinja"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
