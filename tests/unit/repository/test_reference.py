import dataclasses
import re
import sys

from hpc_tune.config.load import field_names
from hpc_tune.train.metrics import StepMetrics
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402


def test_the_page_of_settings_is_what_the_tool_writes():
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == reference.page(), "run python tools/reference.py"
    assert all(f"| `{name}` |" in written for name in field_names())


def test_every_metric_of_a_step_is_explained():
    page = (ROOT / "docs" / "files.md").read_text()
    section = page.partition("## metrics.jsonl")[2].partition("A line of an evaluation")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(explained) == sorted(f.name for f in dataclasses.fields(StepMetrics))
