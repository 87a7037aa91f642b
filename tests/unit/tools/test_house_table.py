import ast
import sys

import pytest

from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import house_table  # noqa: E402
from house_table import circles_in, count, functions_in, module_state  # noqa: E402


def functions_of(text):
    return functions_in({"a.py": ast.parse(text)})


def state_of(**texts):
    return module_state({f"{name}.py": ast.parse(text) for name, text in texts.items()}, "ours")


def package_of(directory, **texts):
    package = directory / "ours"
    package.mkdir()
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    return package


def test_lines_are_counted_from_def_to_the_last_line_of_functions_methods_and_nested_ones():
    text = """
@decorated
def outer(x):
    '''Two lines

    of a docstring.'''
    async def inner():
        return 1

    return inner


class C:
    def method(self): pass
"""
    found = {f.name: f.num_lines for f in functions_of(text)}
    assert found == {"outer": 8, "outer.inner": 2, "C.method": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): pass", 0),
        ("def f(a, /, b, *args, c=1, **kwargs): pass", 5),
        ("def f(self, a): pass", 2),
        ("class C:\n    def f(self, a, *, b): pass", 2),
        ("class C:\n    @classmethod\n    def f(cls, a): pass", 1),
        ("class C:\n    @staticmethod\n    def f(a, b): pass", 2),
        ("class C:\n    def m(self):\n        def f(a, b): pass", 2),
    ],
)
def test_parameters_are_counted_without_self(text, expected):
    assert [f.num_parameters for f in functions_of(text)][-1] == expected


@pytest.mark.parametrize(
    ("parameter", "takes"),
    [
        ("config: RunConfig", True),
        ("*, config: RunConfig | None = None", True),
        ("config: 'schema.RunConfig'", True),
        ("make: Callable[[RunConfig], int]", True),
        ("config: TrainConfig", False),
        ("RunConfig", False),
    ],
)
def test_a_parameter_annotated_with_the_whole_config_is_seen(parameter, takes):
    assert [f.takes_config for f in functions_of(f"def f({parameter}): pass")] == [takes]


def test_a_field_or_a_result_is_no_parameter():
    text = (
        "class C:\n    config: RunConfig\n    def f(self) -> RunConfig:\n        x: RunConfig = 1"
    )
    assert [f.takes_config for f in functions_of(text)] == [False]


def test_asserts_and_raises_are_counted_in_all_files():
    trees = {
        "a.py": ast.parse("assert x\ndef f():\n    assert y\n    raise ValueError"),
        "b.py": ast.parse("try:\n    pass\nexcept ValueError:\n    raise"),
    }
    assert (count(trees, ast.Assert), count(trees, ast.Raise)) == (2, 2)


def test_each_circle_is_counted_once_with_all_its_files(tmp_path):
    package = package_of(
        tmp_path,
        __init__="",
        a="from ours.b import f",
        b="import ours.a\nfrom ours import c",
        c="from ours.b import g",
        d="from ours.e import f",
        e="def f():\n    from ours.d import g",
        f="from ours.a import g\nfrom ours.f import h",
    )
    assert circles_in(package) == [["ours.a", "ours.b", "ours.c"], ["ours.d", "ours.e"]]


def test_a_name_that_a_function_rebinds_is_module_state_of_its_own_file():
    rebinding = "def f():\n    global X\n    X = 1"
    assert state_of(a=f"X = 0\n{rebinding}") == ["a.py X"]
    assert state_of(a="X = 0", b=f"from ours.a import X\n{rebinding}") == ["b.py X"]


@pytest.mark.parametrize(
    "change", ["X.append(1)", "X[0] = 1", "X[0] += 1", "del X[0]", "X.size = 1"]
)
def test_a_name_whose_value_a_function_changes_is_module_state(change):
    assert state_of(a=f"X: list[int] = []\ndef f():\n    {change}") == ["a.py X"]
    importing = f"from ours.a import X as Y\ndef f():\n    {change.replace('X', 'Y')}"
    assert state_of(a="X = []", b=importing) == ["a.py X"]


@pytest.mark.parametrize(
    "text",
    [
        "X = []\nX.append(1)",  # while the file is imported
        "X = {1: 2}\ndef f():\n    return X[1] + X.get(2)",
        "X = []\ndef f():\n    X = []\n    X.append(1)",
        "X = []\ndef f(X):\n    X.append(1)",
        "def f():\n    X = []\n    X.append(1)",
        "class C:\n    def __init__(self):\n        self.x = 1\nX = C()",
        "X = Path('a')",
    ],
)
def test_a_name_that_no_function_changes_is_none(text):
    assert state_of(a=text) == []


def test_an_object_of_a_class_that_changes_itself_is_module_state():
    text = "class C(Generic[T]):\n    def put(self, x):\n        self.x = x\n"
    assert state_of(a=text, b="from ours.a import C\nX: C[int] = C[int](1)\nY = D()") == ["b.py X"]


def test_the_table_has_each_count_beside_its_goal_and_names_the_offenders(tmp_path, capsys):
    package = package_of(
        tmp_path,
        a="from ours.b import f\n" + "def long():\n" + "    pass\n" * 60,
        b="import ours.a\nX = []\ndef f(a, b, c, d, e, f, g, h, i: RunConfig):\n    X.pop()\n",
        c="assert x\n" * 2 + "raise y\n" + "\n" * 398,
    )
    house_table.main(package)
    printed = capsys.readouterr().out
    # a has 62 lines, b 4, c 401
    for now in (
        "files / median lines | 3 / 62, the longest 401",
        "circles between files | 1",
        "functions over 60 lines / longest | 1 / 61",
        "more than 8 parameters | 1",
        "asserts : raises | 2:1",
        "functions that take the whole config | 1",
        "module state | 1",
    ):
        assert f"| {now} | " in printed
    offenders = ("c.py 401", "ours.a ours.b", "a.py long 61", "b.py f 9", "b.py f", "b.py X")
    assert [line.strip() for line in printed.splitlines() if line.startswith(" ")] == [*offenders]


def test_the_package_itself_can_be_counted(capsys):
    house_table.main()
    assert capsys.readouterr().out.startswith("| | now | goal |\n|---|---|---|\n| files / median")
