"""Print code metrics of the package beside their goals, as a Markdown table.

    python tools/house_table.py

tests/unit/repository/test_architecture.py enforces most of them, and names what exceeds a limit.
"""

import ast
from collections import Counter, namedtuple
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parent.parent / "hpc_tune"
MAX_LINES, MAX_PARAMETERS = 60, 8
MUTATING_METHODS = {
    "append",
    "extend",
    "insert",
    "pop",
    "remove",
    "clear",
    "add",
    "update",
    "setdefault",
}
MUTATING_METHODS |= {
    "discard",
    "popitem",
    "sort",
    "reverse",
    "appendleft",
    "popleft",
    "move_to_end",
}
DEF = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = namedtuple("Function", "file name num_lines num_parameters takes_config")
Trees = dict[str, ast.Module]  # by a file's path within the package


def main(package: Path = PACKAGE) -> None:
    """Print the table."""
    trees = {path: ast.parse(text) for path, text in read(package).items()}
    lines = [len(text.splitlines()) for text in read(package).values()]
    functions = functions_in(trees)
    lengths = [f.num_lines for f in functions]
    num_long = sum(num_lines > MAX_LINES for num_lines in lengths)
    num_wide = sum(f.num_parameters > MAX_PARAMETERS for f in functions)
    takers = sum(f.takes_config for f in functions)
    in_train = sum(path.startswith("train/") and path.count("/") == 1 for path in trees)
    kinds = Counter(type(node) for tree in trees.values() for node in ast.walk(tree))
    print(f"""| | now | goal |
|---|---|---|
| files / median lines | {len(lines)} / {median(lines):.0f}, the longest {max(lines)} \
| under 200 / 200, none over 600 |
| lines | {sum(lines)} | 45,000 |
| files of `train/`, what runs before training aside | {in_train} | 14 and `__init__` |
| circles between files | {len(circles_in(package))} | 0 |
| functions over {MAX_LINES} lines / longest | {num_long} / {max(lengths)} | 0 / 60 |
| more than {MAX_PARAMETERS} parameters | {num_wide} | 0 |
| asserts : raises | {kinds[ast.Assert]}:{kinds[ast.Raise]} | under 1:10 |
| functions that take the whole config | {takers} | under 15, at the top |
| module state | {len(module_state(trees))} | 0 outside of a documented seam |""")


def read(package: Path) -> dict[str, str]:
    """Return the text of each file by its path within the package."""
    files = sorted(f for f in package.rglob("*.py") if f.stat().st_size)
    return {f.relative_to(package).as_posix(): f.read_text(encoding="utf-8") for f in files}


def functions_in(trees: Trees) -> list[Function]:
    """Return every function; ``self`` and ``cls`` are no parameters."""
    found = []
    for file, node in ((file, node) for file, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, DEF):
            parameters = [p for p in ast.walk(node.args) if isinstance(p, ast.arg)]
            num_parameters = sum(p.arg not in ("self", "cls") for p in parameters)
            takes_config = any("RunConfig" in ast.unparse(p).partition(":")[2] for p in parameters)
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            found.append(Function(file, node.name, num_lines, num_parameters, takes_config))
    return found


def imports_of(file: Path) -> set[str]:
    """Return every dotted name that a file imports, also in functions or only for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import hides the layer"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def circles_in(package: Path) -> list[list[str]]:
    """Return the groups of files that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        own = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        reached[own.removesuffix(".__init__")] = imports_of(file)
    for own, names in reached.items():
        # In "a.b.c", c is either a file or something in the file a.b.
        files = {name if name in reached else name.rpartition(".")[0] for name in names}
        reached[own] = (files & reached.keys()) - {own}
    for middle, beyond in reached.items():
        for files in reached.values():
            files |= beyond if middle in files else set()
    circles = {tuple(sorted(f for f in reached[own] if own in reached[f])) for own in reached}
    return sorted(map(list, circles - {()}))


def module_state(trees: Trees) -> list[str]:
    """Return "file NAME" for each name at the top of a file whose value changes.

    It changes by ``global``, an attribute, an item, a method in MUTATING_METHODS, or because its
    class changes itself. Scopes are ignored: a local name that some file has at its top counts as
    that.
    """
    changed = set[str]().union(*map(_find_changed_names, trees.values()))
    found = []
    for file, node in ((file, node) for file, tree in trees.items() for node in tree.body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target, _, value = ast.unparse(node).partition(" = ")
            name, made_by = target.split(":")[0], value.replace("[", "(").split("(")[0]
            found += [f"{file} {name}"] if {name, made_by} & changed else []
    return found


def _find_changed_names(tree: ast.AST) -> set[str]:
    """Return names whose values are changed, and names of classes that change themselves."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name, body=body):
                methods = [f for f in body if isinstance(f, DEF) and f.name != "__init__"]
                found |= {name for method in methods if "self" in _find_changed_names(method)}
            case ast.Global(names):
                found |= {*names}
            case ast.Attribute(value, name, ctx) if (
                name in MUTATING_METHODS or type(ctx) is not ast.Load
            ):
                found.add(ast.unparse(value))
            case ast.Subscript(value, ctx=ast.Store() | ast.Del()):
                found.add(ast.unparse(value))
    return found


if __name__ == "__main__":
    main()
