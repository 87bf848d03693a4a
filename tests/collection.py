"""A pytest plug-in: what each process collects.

``--by-folders`` with xdist's ``--dist each``: a process collects and plays its own part of the modules, so that
all together collect the tests once. Parts are neighbouring modules (they share what their folder sets up) of
about the same time, by ``.ci/figures.json``. ``--by-markers`` likewise: a process plays the tests of its marker.

In every run each test's markers are held against what ``scripts/test_sources.py`` read from the sources, because
suites are given modules by that.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from figures import module_seconds
from suites import SUITES
from test_sources import ROOT, possible_markers

MODULE_S = 0.5
"""What a module is taken for that is not in the figures, and what each takes besides its tests, in seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--by-folders", action="store_true", help="with --dist each: a part of the modules per process"
    )
    parser.addoption("--by-markers", help="with --dist each: a process for the tests of each of these markers")


def parts(modules: list[Path], seconds: dict[str, float], count: int) -> list[list[Path]]:
    """``modules`` in their order, cut into ``count`` parts of about the same number of seconds."""
    weights = [MODULE_S + seconds.get(module.relative_to(ROOT).as_posix(), 0.0) for module in modules]
    cut: list[list[Path]] = [[] for _ in range(count)]
    total, passed = sum(weights), 0.0
    for module, weight in zip(modules, weights, strict=True):
        cut[min(count - 1, int(count * (passed + weight / 2) / total))].append(module)
        passed += weight
    return cut


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FirstCases(), "first-cases")
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    # A process that takes the place of a dead one has the next number.
    number = int(worker["workerid"].removeprefix("gw")) % worker["workercount"]
    if config.getoption("by_folders"):
        own = parts(named_modules(config), module_seconds(), worker["workercount"])[number]
        config.args[:] = [str(module) for module in own]
    if config.getoption("by_markers"):
        config.pluginmanager.register(OneMarker(config, number), "one-marker")


def named_modules(config: pytest.Config) -> list[Path]:
    """The test modules that the command line names, by themselves or by their folders."""
    named = [config.invocation_params.dir / word for word in config.args]
    return sorted({module for path in named for module in (path.rglob("test_*.py") if path.is_dir() else [path])})


class OneMarker:
    """Keeps the tests of the marker of this number; a test that bears several is the first one's."""

    def __init__(self, config: pytest.Config, number: int) -> None:
        self._config = config
        self._number = number
        self._markers: list[str] = config.getoption("by_markers").split(",")

    def _number_of(self, item: pytest.Item) -> int:
        borne = {mark.name for mark in item.iter_markers()}
        return next((number for number, name in enumerate(self._markers) if name in borne), 0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        others = [item for item in items if self._number_of(item) != self._number]
        self._config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if self._number_of(item) == self._number]


class FirstCases:
    """Marks `thorough` what follows the first cases of a test that is marked `cases`."""

    @pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: defaultdict[tuple[Path, str], int] = defaultdict(int)
        for item in items:
            mark = item.get_closest_marker("cases")
            if mark is not None and isinstance(item, pytest.Function):
                test = item.path, item.originalname
                seen[test] += 1
                if seen[test] > mark.args[0]:
                    item.add_marker(pytest.mark.thorough)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hold each test's markers against the sources: after the hooks of folders' conftest.py, which were registered
    later, and before pytest leaves tests out by their markers."""
    known = frozenset().union(*(suite.any_of | suite.none_of for suite in SUITES.values()))
    for item in items:
        unseen = known & {mark.name for mark in item.iter_markers()} - possible_markers(item.path)
        if unseen:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {', '.join(sorted(unseen))}, which scripts/test_sources.py does not see:"
                " name the marker in the module, in what it imports of the tests, or in a conftest.py above it"
            )
