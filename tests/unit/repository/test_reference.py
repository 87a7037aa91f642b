import ast
import sys

from hpc_tune.config.load import setting_names
from hpc_tune.rundir.facts import ENERGY_EVENT
from hpc_tune.rundir.json_lines import EVENT_FIELDS, EVENT_KINDS
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402


def test_the_page_of_settings_is_what_the_tool_writes():
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == reference.settings_page(), "run python tools/reference.py"
    assert all(f"| `{name}` |" in written for name in setting_names())


def test_the_page_of_files_has_every_field_as_it_is_declared():
    written = (ROOT / "docs" / "files.md").read_text()
    assert written == reference.files_page(written), "run python tools/reference.py"


def test_every_event_that_is_written_is_declared_with_its_fields():
    """Fields that are not named at the call, by ``**``, are not seen here."""
    kinds = set()
    for file in (ROOT / "hpc_tune").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(
                    func=ast.Attribute(value=writer, attr="write"),
                    args=[ast.Constant(value=str(kind)), *_],
                ) if ast.unparse(writer).endswith("events"):
                    names = {field.arg for field in call.keywords} - {None, *EVENT_FIELDS}
                    declared = " ".join(EVENT_KINDS[kind].fields).split()
                    assert names <= set(declared), (file, kind)
                    kinds.add(kind)
    assert kinds | {ENERGY_EVENT} == EVENT_KINDS.keys()
