"""Chat templates by name: hpc_tune/chat_templates/NAME.jinja, and what each asks of a tokenizer.

They write what the published tokenizers' own templates do, with the answers marked.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_tune.config.data import DataConfig

TEMPLATE_FOLDER = Path(__file__).resolve().parent.parent / "chat_templates"
TEMPLATE_SUFFIX = ".jinja"


@dataclass(frozen=True)
class NamedTemplate:
    """The token that ends an answer, None for the tokenizer's eos_token, and the other controls."""

    end: str | None
    controls: tuple[str, ...] = ()


def _make_template(end: str | None, controls: str = "") -> NamedTemplate:
    return NamedTemplate(end, tuple(controls.split()))


NAMED_TEMPLATES = {
    "chatml": _make_template("<|im_end|>", "<|im_start|>"),
    "deepseek-v3": _make_template(
        "<｜end▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> "
        "<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜> <｜tool▁outputs▁end｜>",
    ),
    "gemma": _make_template("<end_of_turn>", "<start_of_turn>"),
    "gemma3": _make_template("<end_of_turn>", "<start_of_turn>"),
    "granite": _make_template("<|end_of_text|>", "<|start_of_role|> <|end_of_role|>"),
    "llama2": _make_template(None),
    "llama3": _make_template("<|eot_id|>", "<|start_header_id|> <|end_header_id|>"),
    "mistral": _make_template(
        None,
        "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS]",
    ),
    "phi3": _make_template("<|end|>", "<|system|> <|user|> <|assistant|>"),
    "phi4": _make_template("<|im_end|>", "<|im_start|> <|im_sep|>"),
    "qwen2.5": _make_template("<|im_end|>", "<|im_start|>"),
    "qwen3": _make_template("<|im_end|>", "<|im_start|>"),
    "tulu": _make_template(None),
    "zephyr": _make_template(None),
}


def is_template_path(chat_template: str) -> bool:
    """Return whether data.chat_template is a file's path, which no name can be taken for."""
    return "/" in chat_template or chat_template.endswith(TEMPLATE_SUFFIX)


def template_file(chat_template: str) -> Path:
    """Return the file of a known name, or the path."""
    if is_template_path(chat_template) or chat_template not in NAMED_TEMPLATES:
        return Path(chat_template)
    return TEMPLATE_FOLDER / f"{chat_template}{TEMPLATE_SUFFIX}"


def find_unknown_templates(data: DataConfig) -> Iterator[str]:
    """Yield a problem for each chat template that is neither a known name nor a path."""
    given = {"data.chat_template": data.chat_template}
    for setting in ("sources", "eval_sources"):
        for at, source in enumerate(getattr(data, setting) or []):
            given[f"data.{setting}.{at}.chat_template"] = source.chat_template
    for setting, value in given.items():
        if value is None or is_template_path(value) or value in NAMED_TEMPLATES:
            continue
        near = difflib.get_close_matches(value.lower(), NAMED_TEMPLATES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        here = f"; for the file of that name write ./{value}" if Path(value).is_file() else ""
        yield (
            f"{setting}={value} is no known chat template, which are {', '.join(NAMED_TEMPLATES)}, "
            f"and no path, which ends in {TEMPLATE_SUFFIX} or has a slash{hint or here}"
        )
