"""Which test modules a change concerns, by what imports what.

A test module's distance from a changed module of the product is the number of imports between them: 0 where the
test imports it itself. Nothing is listed by hand, so no package can be forgotten
(tests/scripts/test_affected_tests.py). What no test leads to by imports (a command that is loaded by name, a
program that runs in sandboxes, data, a task that ships) stands for the package that it lies in; any file outside
of the product for the test modules that name it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

from test_sources import ROOT, TESTS, modules_of_tests, source, sources_of

PRODUCT = {"turnstile": ROOT / "client", "turnstile_server": ROOT / "env_server"}
"""The packages, and the folders that they lie in."""


@cache
def product() -> grimp.ImportGraph:
    """The imports. A part that an entry point names counts as imported by the module that loads its group."""
    graph = grimp.build_graph(*PRODUCT, cache_dir=None)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    files = {path: path.read_text() for folder in PRODUCT.values() for path in folder.rglob("*.py")}
    for group, targets in groups.items():
        loaders = [_module(path) for path, text in files.items() if f'Plugins("{group}")' in text]
        for target in {target.partition(":")[0] for target in targets.values()}:
            for loader in loaders:
                if loader != target:
                    graph.add_import(importer=loader, imported=target)
    return graph


def _module(path: Path) -> str:
    folder = next(folder for folder in PRODUCT.values() if path.is_relative_to(folder))
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def distances(changed: Iterable[str]) -> dict[Path, int]:
    """Each test module that the changed paths (from the root) concern, with its distance from the nearest."""
    found: dict[Path, int] = {}
    modules: set[str] = set()
    for path in changed:
        inside = modules_of(path)
        modules |= inside
        if not inside:
            for test in tests_that_name(path):
                found[test] = 0
    for distance, names in enumerate(importers(modules)):
        for test in modules_of_tests():
            if test not in found and names & uses(test):
                found[test] = distance
    return found


def modules_of(path: str) -> set[str]:
    """The modules of the product that a path below its packages stands for; none for another path."""
    for folder in PRODUCT.values():
        if not (ROOT / path).is_relative_to(folder):
            continue
        parts = list((ROOT / path).relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found = {".".join(parts)} & product().modules
        while parts and not (found and is_tested(found)):
            parts.pop()
            package = ".".join(parts)
            if package in product().modules:
                found = {package, *product().find_descendants(package)}
        return found
    return set()


def is_tested(modules: set[str]) -> bool:
    """Whether a test imports one of them, or what imports them."""
    return any(names & used_by_tests() for names in importers(modules))


def importers(modules: set[str]) -> list[set[str]]:
    """``modules``, then those that import one of them, then those that import these, each module once."""
    rings, seen, ring = [], set(modules), set(modules)
    while ring:
        rings.append(ring)
        ring = {
            importer for module in ring for importer in product().find_modules_that_directly_import(module)
        } - seen
        seen |= ring
    return rings


@cache
def uses(test: Path) -> frozenset[str]:
    """The modules of the product that a test imports, by itself or through modules of the tests."""
    names = frozenset().union(*(source(path).imports for path in sources_of(test)))
    return names & product().modules


@cache
def used_by_tests() -> frozenset[str]:
    return frozenset().union(*(uses(test) for test in modules_of_tests()))


def tests_that_name(path: str) -> list[Path]:
    """A test module itself; those that use a module of the tests or name another file."""
    changed = ROOT / path
    if changed in modules_of_tests():
        return [changed]
    if changed.is_relative_to(TESTS) and changed.suffix == ".py":
        return [test for test in modules_of_tests() if changed in sources_of(test)]
    name = changed.stem if changed.suffix == ".py" else changed.name
    return [test for test in modules_of_tests() if name in source(test).text]
