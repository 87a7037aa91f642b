"""Skips tests of what an older transformers lacks, and says which version has it."""

import pytest
import transformers

from hpc_tune.packages import parse_release

RELEASE = parse_release(transformers.__version__)
# The first version that has a family, among the versions that setup.py allows.
SINCE = {
    "nemotron_h_omni": "5.18",
    "bailing_hybrid": "5.20",
    "muse_spark": "5.20",
    "unlimited_ocr": "5.20",
    "mistral_large4": "5.22",
    "dots3_note": "5.23",
    "inkling2": "5.23",
}


def since(version: str, lacks: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs this version; ``lacks`` says what older ones do."""
    reason = f"transformers before {version} {lacks}"
    return pytest.mark.skipif(parse_release(version) > RELEASE, reason=reason)


def skip_without(family: str) -> None:
    """Skip the test if transformers does not know the family yet."""
    version = SINCE.get(family)
    if version and parse_release(version) > RELEASE:
        pytest.skip(f"transformers before {version} has no {family}")
