import ast
import sys

import pytest

from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import house_table  # noqa: E402
from house_table import circles_in, functions_in, module_state  # noqa: E402

CLASS = "class C:\n    def __init__(self):\n        self.x = 1\n    def f(self):\n        "


def test_functions_are_counted_from_def_and_without_self():
    text = "@d\ndef f(a, /, b, *c, d: x.RunConfig = 1, **e):\n    def g(): pass\n\n    return g"
    text += "\nclass C:\n    @classmethod\n    def h(cls, config: TrainConfig) -> RunConfig: pass"
    f, g, h = sorted(functions_in({"a.py": ast.parse(text)}))
    assert f == ("a.py", "f", 4, 5, True)
    assert (g, h) == (("a.py", "g", 1, 0, False), ("a.py", "h", 1, 1, False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("X = 0\ndef f():\n    global X\n    X = 1", ["a.py X"]),
        ("X: list[int] = []\ndef f():\n    X.append(1)", ["a.py X"]),
        ("X = []\ndef f():\n    X[0] += 1", ["a.py X"]),
        ("X = []\ndef f():\n    del X[0]", ["a.py X"]),
        ("X = Path()\ndef f():\n    X.size = 1", ["a.py X"]),
        (f"{CLASS}self.x = 2\nX = C[int](1)", ["a.py X"]),
        (f"{CLASS}return self.x\nX = C()", []),
        ("X = {1: 2}\ndef f():\n    return X[1] + X.get(2)", []),
        ("def f():\n    X = []\n    X.append(1)", []),
    ],
)
def test_a_name_at_the_top_whose_value_changes_is_module_state(text, expected):
    assert module_state({"a.py": ast.parse(text)}) == expected


def test_a_circle_is_counted_once_and_the_table_has_each_figure(tmp_path, capsys):
    package = tmp_path / "ours"
    package.mkdir()
    texts = {
        "__init__": "",
        "a": "from ours.b import f\ndef long():\n" + "    pass\n" * 60,
        "b": "from ours import c\nX = []\ndef f(a, b, c, d, e, f, g, h, *i: RunConfig): X.pop()",
        "c": "assert a.b\nfrom ours.a import f",
        "d": "from ours.e import f\nraise a",
        "e": "def f():\n    from ours.d import g",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert circles_in(package) == [["ours.a", "ours.b", "ours.c"], ["ours.d", "ours.e"]]
    house_table.main(package)
    now = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert now == ["5 / 2, the longest 62", "71", "0", "2", "1 / 61", "1", "1:1", "1", "1"]
