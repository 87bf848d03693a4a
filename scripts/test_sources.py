"""The test modules, read without importing them: what they import, and which markers their tests may bear.

Collecting all tests costs a process 40 s of one core, so a suite is given only the modules that can hold its
tests. What is read here errs on the side of too much: a marker counts for a module that names it, or that uses a
name whose definition, in a module of the tests that it imports or in a ``conftest.py`` above it, leads to one
that does. ``tests/collection.py`` fails a run in which a test bears a marker that was not seen here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
MARK = re.compile(r"\bmark\.([a-z]\w*)")
WORD = re.compile(r"[A-Za-z_]\w*")
ADDS = {"append", "extend", "insert", "update", "add", "setdefault"}
HOOK = "pytest_"
"""A function of this name in a ``conftest.py`` acts on tests that do not name it."""


@dataclass(frozen=True)
class Source:
    """A Python file: the dotted names it imports, its words, its top-level statements with what they define."""

    text: str
    imports: frozenset[str]
    words: frozenset[str]
    markers: frozenset[str]
    statements: tuple[tuple[tuple[str, ...], str], ...]


@cache
def source(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    statements = tuple((tuple(defined(node)), statement(node, lines)) for node in tree.body)
    found = frozenset(WORD.findall(text))
    return Source(text, frozenset(imported(tree)), found, frozenset(MARK.findall(text)), statements)


def statement(node: ast.stmt, lines: list[str]) -> str:
    """The source of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def defined(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines or, as ``if CONDITION: NAMES.append(…)`` does, adds to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in ADDS:
            yield from (name.id for name in [part.func.value] if isinstance(name, ast.Name))


def imported(tree: ast.AST) -> Iterator[str]:
    """Each module that is imported, and each name that is imported from one: it may be a module too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@cache
def modules_of_tests() -> tuple[Path, ...]:
    return tuple(sorted(TESTS.rglob("test_*.py")))


@cache
def support_modules() -> dict[str, tuple[Path, ...]]:
    """The other modules of the tests, by the name they are imported under (its last part)."""
    found: defaultdict[str, tuple[Path, ...]] = defaultdict(tuple)
    for path in sorted(TESTS.rglob("*.py")):
        if not path.name.startswith("test_"):
            found[path.stem] = (*found[path.stem], path)
    return dict(found)


def imported_support(path: Path) -> Iterator[Path]:
    """The modules of the tests that one imports."""
    for name in sorted(source(path).imports):
        for part in name.split("."):
            yield from support_modules().get(part, ())


def conftests(module: Path) -> list[Path]:
    """The ``conftest.py`` files above a test module, but for that of all tests: its markers are in its prose."""
    folders = (folder for folder in module.parents if folder.is_relative_to(TESTS) and folder != TESTS)
    return [path for path in (folder / "conftest.py" for folder in folders) if path.is_file()]


@cache
def sources_of(module: Path) -> frozenset[Path]:
    """A test module, every ``conftest.py`` above it, and what these import of the tests' own modules."""
    found: set[Path] = set()
    wanted = [module, *conftests(module)]
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.add(path)
            wanted.extend(imported_support(path))
    return frozenset(found)


@cache
def marked_names(path: Path) -> dict[str, frozenset[str]]:
    """The names that a module of the tests defines or imports whose definitions lead to markers."""
    found: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
    for other in imported_support(path):
        if other != path:
            for name, markers in marked_names(other).items():
                found[name] |= markers
    statements = [
        (names, frozenset(MARK.findall(text)), WORD.findall(text)) for names, text in source(path).statements
    ]
    changed = True
    while changed:
        changed = False
        for names, markers, words in statements:
            led = markers.union(*(found[word] for word in words if word in found))
            for name in names:
                if not led <= found[name]:
                    found[name] |= led
                    changed = True
    return {name: markers for name, markers in found.items() if markers}


@cache
def possible_markers(module: Path) -> frozenset[str]:
    """The markers that tests of this module may bear."""
    own = source(module)
    found = set(own.markers)
    for path in (*imported_support(module), *conftests(module)):
        for name, markers in marked_names(path).items():
            if name in own.words or (path.name == "conftest.py" and name.startswith(HOOK)):
                found |= markers
    return frozenset(found)


def certain_markers(module: Path) -> frozenset[str]:
    """The markers that all tests of this module bear: those of its ``pytestmark``."""
    marks = "".join(text for names, text in source(module).statements if "pytestmark" in names)
    return frozenset(MARK.findall(marks))
