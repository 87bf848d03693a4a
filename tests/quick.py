"""A pytest plug-in: remembers how long each test took here, and with ``--quick=SECONDS`` runs only the quick ones.

Seconds are kept in pytest's cache (.pytest_cache), by test id: set-up and call together. A test that never ran
here counts as UNKNOWN_S. The choice depends only on the cache as it is at the start, so that all of xdist's
workers choose the same tests. With TURNSTILE_MODULE_SECONDS=FILE the seconds of each test's module are added to
the end of that file (`.ci/run`, scripts/figures.py).
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

KEY = "turnstile/seconds"
QUICK_S = 1.0
"""A test that took longer is not quick, whatever time is left."""
UNKNOWN_S = 0.3
CORES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", type=float, default=None, metavar="SECONDS", help="run quick tests for so long")


def pytest_configure(config: pytest.Config) -> None:
    """Without the cache (``-p no:cacheprovider``) nothing is remembered, and every test counts as unknown."""
    if config.pluginmanager.hasplugin("cacheprovider") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config), "turnstile-seconds")


def remembered(config: pytest.Config) -> dict[str, float]:
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return {}
    assert config.cache is not None
    seconds: dict[str, float] = config.cache.get(KEY, {})
    return seconds


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = config.getoption("--quick")
    if limit is None:
        return
    known = remembered(config)
    left = limit * CORES
    chosen: set[str] = set()
    for item in sorted(items, key=lambda item: known.get(item.nodeid, UNKNOWN_S)):
        seconds = known.get(item.nodeid, UNKNOWN_S)
        if seconds > QUICK_S or seconds > left:
            break
        left -= seconds
        chosen.add(item.nodeid)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


class Seconds:
    """Adds up the phases of each test and writes them at the end of the session; in xdist's controller only."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        assert self._config.cache is not None
        new = {test: round(seconds, 3) for test, seconds in self._seconds.items()}
        self._config.cache.set(KEY, remembered(self._config) | new)
        if file := os.environ.get("TURNSTILE_MODULE_SECONDS"):
            with Path(file).open("a") as lines:
                lines.writelines(f"{test.partition('::')[0]}\t{spent}\n" for test, spent in new.items())
