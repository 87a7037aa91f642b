"""Secrets, which no file or line that others read may hold: how they are known, and their mask.

A user's name with a password in a URL; the value of a variable of the environment whose name says
that it is one (HF_TOKEN, WANDB_API_KEY); such a NAME=value in a command; tokens by their prefix.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
_SECRET_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS"
_SECRET_NAME = re.compile(rf"(?:\w+_)?(?:{_SECRET_WORDS})")
_MIN_CHARS = 8  # a shorter value may be part of any text
_SECRET_PATTERN = re.compile(
    r"(?P<before>\w://)[^\s/@:]*:[^\s/@]+(?=@)"
    rf"|(?P<name>\b[A-Z0-9_]*(?:{_SECRET_WORDS})=)\S+"
    r"|(?P<query>[?&][\w-]*(?:token|key|secret|password|signature)=)[^\s&]+"
    r"|\b(?:hf_|gh[opsu]_|sk-)[A-Za-z0-9]{20,}"
)


def mask_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return ``text`` with *** in the place of each secret."""
    for name, value in environ.items():
        if len(value) >= _MIN_CHARS and _SECRET_NAME.fullmatch(name):
            text = text.replace(value, MASK)
    return _SECRET_PATTERN.sub(
        lambda found: next((kept for kept in found.groups() if kept), "") + MASK, text
    )


def find_secrets(
    settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield a problem for each setting that holds a secret, without it."""
    for name, value in settings.items():
        text = str(value)
        if isinstance(value, str | list) and (masked := mask_secrets(text, environ)) != text:
            yield (
                f"{name}={masked}: there is a secret in it, and settings are written into files "
                "and reports; leave it in the environment, which each rank inherits"
            )
