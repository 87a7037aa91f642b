"""What docs/troubleshooting.md quotes is what the code says: a reader searches for it there."""

import ast
import functools
import re

import pytest

from tests.support.ranks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
COLUMN = re.compile(r"^\| (.*?) \|", re.MULTILINE)
QUOTED = re.compile(r"`([^`]*)`")
NOT_MESSAGES = ("world   1 rank on 1 node via single",)  # put together from several texts


def texts_of(tree):
    """Yield the texts of a file, with a line break for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
            yield "".join(map(str, parts))


@functools.cache
def said():
    """All texts of the package."""
    return "\n\n".join(
        text
        for file in sorted((ROOT / "hpc_tune").rglob("*.py"))
        for text in texts_of(ast.parse(file.read_text(encoding="utf-8")))
    )


def quoted(page):
    """Return the messages in the first column of the tables."""
    spans = [text for cell in COLUMN.findall(page) for text in QUOTED.findall(cell)]
    return [text for text in spans if " " in text]


def missing(message):
    """Return what of a message no text of the code has; ... stands for what is filled in."""
    parts = (part.strip() for part in message.split("..."))
    return [part for part in parts if len(part) > 3 and part not in said()]


def test_the_page_quotes_messages():
    assert len(quoted(PAGE.read_text())) > 12


@pytest.mark.parametrize("message", quoted(PAGE.read_text()))
def test_a_quoted_message_is_in_the_code(message):
    assert message in NOT_MESSAGES or missing(message) == []


def test_a_message_that_is_not_in_the_code_is_found():
    assert missing("could not reach rank 0 ... on a Monday") == ["on a Monday"]
