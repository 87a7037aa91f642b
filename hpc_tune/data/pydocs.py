"""``builtin:pydocs``: questions about Python's standard library, its docstrings as answers.

Real text that every machine has offline: a few thousand pairs such as "What does json.dumps do?".
The source files are parsed, never imported. One top-level module in about ten (by a hash of its
name) is held out for evaluation.
"""

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PYDOCS_NAME = "builtin:pydocs"
PYDOCS_HELDOUT_NAME = "builtin:pydocs:heldout"

MIN_ANSWER_CHARS = 30
MAX_ANSWER_CHARS = 1000
_SKIPPED_MODULES = {
    "antigravity", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "this",
    "tkinter", "turtledemo",
}  # fmt: skip
_ROOT = Path(sysconfig.get_path("stdlib"))
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "_vendor"}


def list_pydocs_modules(heldout: bool) -> list[str]:
    """Return the top-level modules of one split, sorted."""
    names = sorted(sys.stdlib_module_names - _SKIPPED_MODULES)
    return [name for name in names if _is_heldout(name) == heldout and _module_files(name)]


def read_pydocs_module(name: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs for a top-level module and all within it."""
    seen = set()
    for dotted, path in _module_files(name):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates that a distributor leaves among the sources
            continue
        for pair in _module_pairs(dotted, tree):
            if pair not in seen:
                seen.add(pair)
                yield pair


def _is_heldout(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


def _module_files(name: str) -> list[tuple[str, Path]]:
    """Return (dotted module name, source file) of a top-level module, sorted."""
    if (_ROOT / f"{name}.py").is_file():
        return [(name, _ROOT / f"{name}.py")]
    sources = []
    for path in sorted((_ROOT / name).rglob("*.py")) if (_ROOT / name).is_dir() else []:
        parts = path.relative_to(_ROOT).with_suffix("").parts
        if not _SKIPPED_FOLDERS.intersection(parts):
            sources.append((".".join(parts).removesuffix(".__init__"), path))
    return sources


def _module_pairs(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    answer = _answer(tree)
    if answer:
        yield f"What is the Python module {module} for?", answer
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_pair(module, node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            answer = _answer(node)
            if answer:
                yield f"What is the Python class {module}.{node.name}?", answer
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _function_pair(f"{module}.{node.name}", member)


def _function_pair(
    owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, str]]:
    answer = _answer(node)
    if answer and not node.name.startswith("_"):
        signature = f"{node.name}({ast.unparse(node.args)})"
        yield f"What does {owner}.{node.name} do? Its signature is {signature}", answer


def _answer(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the docstring's first paragraphs up to the limit, "" if nothing is fit to learn."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + 2 + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    kept = kept.strip()
    return kept if MIN_ANSWER_CHARS <= len(kept) <= MAX_ANSWER_CHARS else ""
