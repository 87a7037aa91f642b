"""The chat templates of a tokenizer: one, or several by name, with a date that stays.

A template that prints today's date would make other tokens of the same data tomorrow: in its place
it gets TEMPLATE_DATE.
"""

import re
from datetime import datetime
from typing import Any

from hpc_tune.data.answers import mark_generation_blocks
from hpc_tune.data.tokenizer import FastTokenizer

TEMPLATE_DATE = datetime(2026, 1, 1)
_NOW = "strftime_now"
_DATE = re.compile(rf"""{_NOW}\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")
_DATE_CALL = re.compile(rf"{_NOW}\s*\(")
_DIRECTIVES = (*(f"%-{c}" for c in "dmHIMSyj"), *(f"%{c}" for c in "aAbBcdeFHIjmMpSTuUwWxXyYZz"))


class ChatTemplates:
    """The templates of a tokenizer, with a fixed date."""

    def __init__(self, chat_template: Any) -> None:
        """Take what a tokenizer has: the text of a template, a dict of several, or nothing."""
        several = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
        self._named = {
            name: (fixed := fix_date(template), mark_generation_blocks(fixed))
            for name, template in several.items()
            if template
        }

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._named)

    def choose(self, has_tools: bool) -> tuple[str, str | None]:
        """Return the template of a row as transformers chooses it, and the same with marks if any.

        Raises:
            ValueError: if there are several and none is called default.
        """
        name = "tool_use" if has_tools and "tool_use" in self._named else "default"
        if name not in self._named:
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(self._named)} and none called "
                "default; set data.chat_template"
            )
        return self._named[name]


def fix_date(template: str) -> str:
    """Return a chat template that prints TEMPLATE_DATE where it would print today's date."""
    fixed = _DATE.sub(lambda found: repr(TEMPLATE_DATE.strftime(found["format"])), template)
    if not _DATE_CALL.search(fixed):
        return fixed
    # The format is computed by the template itself.
    formatted = "(format | string)"
    for directive in _DIRECTIVES:
        formatted += f" | replace('{directive}', '{TEMPLATE_DATE.strftime(directive)}')"
    # Behind the empty text jinja keeps a line end at the beginning of the template.
    return f"{{% macro {_NOW}(format) %}}{{{{ {formatted} }}}}{{% endmacro %}}{{{{ '' }}}}{fixed}"


def find_template_date(tokenizer: FastTokenizer) -> str:
    """Return the date that chat templates print in place of today's; empty if none prints one."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    is_dated = any(_DATE_CALL.search(text) for text in texts)
    return TEMPLATE_DATE.date().isoformat() if is_dated else ""
