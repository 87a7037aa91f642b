"""Count how the package is built, beside what it is to become: a Markdown table, then offenders.

    python tools/house_table.py

Counted in all .py files of hpc_tune:

circles         groups of files that import each other, directly or through others; an import inside
                a function counts, one for types alone does not
functions       methods and nested functions too, from ``def`` to the last line; parameters without
                self and cls, ``*args`` and ``**kwargs`` as one each
whole config    functions with a parameter whose annotation mentions RunConfig
module state    a name at the top of a file, if a function rebinds it by ``global``, sets or deletes
                its attributes or items, or calls a method of MUTATING on it; also an object made at
                the top of a file of a class that changes itself: a method besides __init__ sets an
                attribute of self. Names of other files are seen where they are imported by name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parent.parent / "hpc_tune"
MAX_FILE_LINES, MAX_LINES, MAX_PARAMETERS = 400, 60, 8
MUTATING = {
    *("append", "appendleft", "extend", "insert", "remove", "pop", "popleft", "clear", "sort"),
    *("reverse", "add", "discard", "update", "setdefault", "popitem", "move_to_end"),
}
GOALS = {
    "files / median lines": "about 110 / 80-300, none over 400",
    "circles between files": "0",
    "functions over 60 lines / longest": "0 / 60, the loop 80",
    "more than 8 parameters": "0",
    "asserts : raises": "under 1:10",
    "functions that take the whole config": "under 15, at the top",
    "module state": "0 outside of a documented seam",
}
DEF = (ast.FunctionDef, ast.AsyncFunctionDef)
Trees = dict[str, ast.Module]  # by a file's path within the package


@dataclass(frozen=True)
class Function:
    """A function; ``name`` begins with the classes and functions around it."""

    file: str
    name: str
    num_lines: int
    num_parameters: int
    takes_config: bool


def main(package: Path = PACKAGE) -> None:
    """Print the table and the offenders."""
    files = {path: len(text.splitlines()) for path, text in read(package).items()}
    trees = {path: ast.parse(text) for path, text in read(package).items()}
    functions = functions_in(trees)
    circles, state = circles_in(package), module_state(trees, package.name)
    long = [f for f in functions if f.num_lines > MAX_LINES]
    wide = [f for f in functions if f.num_parameters > MAX_PARAMETERS]
    takers = [f for f in functions if f.takes_config]
    cells = (
        f"{len(files)} / {median(files.values()):.0f}, the longest {max(files.values())}",
        f"{len(circles)}",
        f"{len(long)} / {max(f.num_lines for f in functions)}",
        f"{len(wide)}",
        f"{count(trees, ast.Assert)}:{count(trees, ast.Raise)}",
        f"{len(takers)}",
        f"{len(state)}",
    )
    print("| | now | goal |\n|---|---|---|")
    for (what, goal), now in zip(GOALS.items(), cells, strict=True):
        print(f"| {what} | {now} | {goal} |")
    _print("files over 400 lines", [f"{f} {n}" for f, n in files.items() if n > MAX_FILE_LINES])
    _print("circles", [" ".join(circle) for circle in circles])
    _print("over 60 lines", [f"{f.file} {f.name} {f.num_lines}" for f in long])
    _print("more than 8 parameters", [f"{f.file} {f.name} {f.num_parameters}" for f in wide])
    _print("take the whole config", [f"{f.file} {f.name}" for f in takers])
    _print("module state", state)


def read(package: Path) -> dict[str, str]:
    """Return the text of each file by its path within the package."""
    files = sorted(package.rglob("*.py"))
    return {f.relative_to(package).as_posix(): f.read_text(encoding="utf-8") for f in files}


def functions_in(trees: Trees) -> list[Function]:
    """Return every function, method and nested function."""
    found = []
    for file, tree in trees.items():
        for name, node, parameters in _functions(tree):
            annotations = [ast.unparse(p.annotation) for p in parameters if p.annotation]
            takes_config = any("RunConfig" in annotation for annotation in annotations)
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            found.append(Function(file, name, num_lines, len(parameters), takes_config))
    return found


def count(trees: Trees, kind: type[ast.AST]) -> int:
    """Return how many nodes of a kind there are."""
    return sum(isinstance(node, kind) for tree in trees.values() for node in ast.walk(tree))


def imports_of(file: Path, for_types: bool = True) -> set[str]:
    """Every dotted name that a file imports, inside functions and, on request, for types alone."""
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unseen = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for body in node.body
        for inner in ast.walk(body)
    }
    for node in ast.walk(tree):
        if node in unseen and not for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import hides the layer"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def circles_in(package: Path) -> list[list[str]]:
    """Return the groups of files that import each other, directly or through others."""
    needs: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        needs[".".join(parts).removesuffix(".__init__")] = imports_of(file, for_types=False)
    for own, found in needs.items():
        # Of "a.b.c" either c is a file, or something in the file a.b.
        modules = {name if name in needs else name.rpartition(".")[0] for name in found}
        needs[own] = (modules & needs.keys()) - {own}
    reached = {own: _reached(own, needs) for own in needs}
    circles = {
        tuple(sorted(other for other in reached[own] if own in reached[other]))
        for own in needs
        if own in reached[own]
    }
    return sorted(map(list, circles))


def module_state(trees: Trees, package: str) -> list[str]:
    """Return "file NAME" for each name at the top of a file whose value functions change."""
    changing = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and _changes_itself(node)
    }
    at_top = {
        (file, name): value for file, tree in trees.items() for name, value in _assigned(tree)
    }
    found = {
        place
        for place, value in at_top.items()
        if isinstance(value, ast.Call) and ast.unparse(value.func).split("[")[0] in changing
    }
    rebound: set[tuple[str, str]] = set()
    for file, tree in trees.items():
        known = {name: (where, name) for where, name in at_top if where == file}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                origin = "/".join((node.module or "").split(".")[1:]) + ".py"
                known |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
        for _, function, _ in _functions(tree):
            found |= {known[name] for name in _changed_by(function) & known.keys()}
        rebound |= {
            (file, name)
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
            for name in node.names
        }
    return [f"{file} {name}" for file, name in sorted(found & at_top.keys() | rebound)]


def _functions(
    node: ast.AST, around: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[ast.arg]]]:
    """Yield name, function and parameters, less self and cls."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEF):
            named, extra = child.args, (child.args.vararg, child.args.kwarg)
            parameters = [*named.posonlyargs, *named.args, *named.kwonlyargs, *filter(None, extra)]
            is_static = "staticmethod" in map(ast.unparse, child.decorator_list)
            if isinstance(node, ast.ClassDef) and not is_static:
                parameters = parameters[1:]
            yield around + child.name, child, parameters
        if isinstance(child, (*DEF, ast.ClassDef)):
            yield from _functions(child, f"{around}{child.name}.")
        else:
            yield from _functions(child, around)


def _reached(start: str, needs: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = needs[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names assigned at the top of a file, and what to."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (target.id, node.value) for target in targets if isinstance(target, ast.Name)
            )


def _changes_itself(node: ast.ClassDef) -> bool:
    """Whether a method of a class, besides __init__, sets an attribute of self."""
    return any(
        isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and ast.unparse(inner.value) == "self"
        for method in node.body
        if isinstance(method, DEF) and method.name != "__init__"
        for inner in ast.walk(method)
    )


def _changed_by(function: ast.AST) -> set[str]:
    """Return the names from outside of a function whose values it changes."""
    bound: set[str] = set()
    changed: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.arg(name) | ast.Name(name, ast.Store()):
                bound.add(name)
            case ast.Attribute(value, _, ast.Store() | ast.Del()):
                changed.add(ast.unparse(value))
            case ast.Subscript(value, _, ast.Store() | ast.Del()):
                changed.add(ast.unparse(value))
            case ast.Call(ast.Attribute(value, method)) if method in MUTATING:
                changed.add(ast.unparse(value))
    return changed - bound


def _print(what: str, offenders: list[str]) -> None:
    print(f"\n{what}: {len(offenders)}")
    for offender in offenders:
        print(f"    {offender}")


if __name__ == "__main__":
    main()
