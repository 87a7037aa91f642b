"""Whether a chat template can be read: told once, before any row is rendered.

transformers compiles a template when the first row is rendered, and again for each row that fails.
"""

from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_tune.errors import DataError


class _Generation(Extension):
    """Reads {% generation %} ... {% endgeneration %}, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse_syntax_errors(template: Any, where: str) -> None:
    """Refuse a template, or one of several by name, that Jinja cannot compile.

    Raises:
        DataError: with the place ``where`` it is, and the line.
    """
    several = template if isinstance(template, dict) else {"": template}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    for name, text in several.items():
        try:
            environment.compile(text or "")
        except TemplateSyntaxError as error:
            of = f" ({name})" if name else ""
            lines = (text or "").splitlines()
            line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
            shown = f": {line[:80]}" if line else ""
            raise DataError(
                f"{where}{of}, line {error.lineno}: the chat template cannot be read: "
                f"{(error.message or '').rstrip('.')}{shown}. Correct the line"
            ) from None
