"""Rules of the house that no other tool holds: sizes of modules, names of classes, circles of imports.

The packages' order and who may import whom are in pyproject.toml (import-linter).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "env_server" / "turnstile_server"
PACKAGES = {"turnstile": ROOT / "client" / "turnstile", "turnstile_server": SERVER}
MOST_LINES = 700
FEW_LINES = 20
MOST_SMALL_MODULES = 5
PROGRAMS = (
    "agents/specs",
    "tasks/shipped",
    "tasks/inside",
    "sandboxes/helper/turnstile_helper",
    "grading/inside",
    "replay/inside",
)
"""Run inside sandboxes, on their own: not part of the server's modules."""

SAME_IDEA = {
    "TurnstileError": "the base error of the client and that of the server",
    "Conflict": "the client raises the error that the server answered with",
    "Gone": "the same",
    "InvalidRequest": "the same",
    "NotFound": "the same",
}
"""Class names that stand twice, and why that is one idea."""


def modules(*, programs: bool) -> Iterator[Path]:
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).as_posix()
            if "tasks/shipped" in inside or (not programs and inside.startswith(PROGRAMS)):
                continue
            yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    assert [name(path) for path in modules(programs=True) if lines(path) > MOST_LINES] == []


def test_few_modules_are_too_small_for_a_file_of_their_own() -> None:
    small = [name(path) for path in modules(programs=False) if lines(path) < FEW_LINES]
    small = [path for path in small if not path.endswith(("/__init__.py", "/__main__.py"))]
    assert len(small) < MOST_SMALL_MODULES, small


def test_a_class_name_stands_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in modules(programs=False):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name(path))
    repeated = {cls: paths for cls, paths in found.items() if len(paths) > 1 and not cls.startswith("_")}
    assert {cls: paths for cls, paths in repeated.items() if cls not in SAME_IDEA} == {}
    assert set(SAME_IDEA) <= set(repeated), "a name that stands once needs no excuse"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_package_says_what_it_holds() -> None:
    silent = []
    for path in modules(programs=True):
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text())):
            silent.append(name(path))
    assert silent == []
