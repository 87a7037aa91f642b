"""What messages propose can be pasted: each setting is one, each value is taken, each command is.

The messages are the texts of the source; what is put in by {...} stands for any value.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from hpc_tune import cli
from hpc_tune.config.load import setting_names
from hpc_tune.config.schema import RunConfig
from hpc_tune.safe_yaml import load_yaml

ROOT = Path(__file__).parents[3] / "hpc_tune"
HOLE = "\0"  # in place of {...}
SECTIONS = "|".join(RunConfig.model_fields)
SETTING = re.compile(
    rf"(?<![\w./{HOLE}-])((?:{SECTIONS})\.[a-z]\w*)=(?:'([^']*)'|(\[[^\]]*\]|[^\s,;)'\"]*))"
)
COMMAND = re.compile(r"python -m hpc_tune ((?:--?)?\w[^,;:()`]*)")


def texts():
    """Yield (file, text) of each text that is no docstring, with HOLE in place of values."""
    for file in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        inner = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        bodies = (node.body for node in ast.walk(tree) if hasattr(node, "body"))
        first = (body[0] for body in bodies if isinstance(body, list) and body)
        inner |= {id(node.value) for node in first if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inner:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield str(file.relative_to(ROOT)), node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", HOLE) for part in node.values]
                yield (
                    str(file.relative_to(ROOT)),
                    "".join(part if isinstance(part, str) else HOLE for part in parts),
                )


TEXTS = list(texts())
SETTINGS = sorted(
    {(f, m[1], m[2] or m[3] or "") for f, text in TEXTS for m in SETTING.finditer(text)}
)
COMMANDS = sorted({(f, m[1].strip()) for f, text in TEXTS for m in COMMAND.finditer(text)})


def taken_by(field, value):
    try:
        TypeAdapter(field.annotation, config=None).validate_python(load_yaml(value))
    except (ValidationError, ValueError):
        return False
    return True


def test_each_setting_that_messages_propose_is_one():
    unknown = {(file, name) for file, name, _ in SETTINGS if name not in setting_names()}
    assert not unknown
    assert len(SETTINGS) > 100, "the search finds what it found"


def test_each_value_that_messages_propose_is_taken():
    fields = {
        f"{part}.{name}": field
        for part, section in RunConfig.model_fields.items()
        for name, field in type(section.default).model_fields.items()
    }
    refused = [
        (file, name, value)
        for file, name, value in SETTINGS
        if HOLE not in value
        and not re.search(r"\.\.\.|[A-Z]{2}|^\W*$|%[sdrg]|\{\w*\}", value)
        and not taken_by(fields[name], value.rstrip(".:|"))
    ]
    assert refused == []


@pytest.mark.parametrize(("file", "words"), COMMANDS)
def test_each_command_that_messages_propose_is_one(file, words):
    command, *rest = shlex.split(words.replace(HOLE, "X"), posix=True)
    assert command in cli.COMMANDS or command.startswith(("-", "X")) or "=" in command, words
    if command in cli.COMMANDS:
        flags = [name for name, _ in cli.COMMANDS[command][1]] + ["--help"]
        assert {word for word in rest if word.startswith("--")} <= {*flags}, words
