"""Configs of other tools as tests change them, and what came of them as tests look at it."""

import re

import yaml

from hpc_tune.convert import convert as command


def theirs(text, **changes):
    """Return a config with values changed, by key with __ for the dot; None takes one out."""
    tree = yaml.safe_load(text)
    for key, value in changes.items():
        *parts, name = key.split("__")
        part = tree
        for step in parts:
            part = part.setdefault(step, {})
        if value is None:
            part.pop(name, None)
        else:
            part[name] = value
    return tree


def settings(converted):
    return {f"{p}.{k}": v for p, part in converted.config.items() for k, v in part.items()}


def on_four_ranks(text, changes):
    return settings(command.convert(theirs(text, **changes), 4))


def line_of(lines, key):
    """Return the line that has a key, by itself or among others with the same remark."""
    for line in lines:
        shown = "\n".join(getattr(line, "keys", (str(line),)))
        if re.search(rf"^{re.escape(key)}( =| \(|:|$)", shown, re.MULTILINE):
            return str(line)
    return None
