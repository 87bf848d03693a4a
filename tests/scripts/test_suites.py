"""The suites take every test, and each process only what is its own."""

from __future__ import annotations

import re
from itertools import chain, combinations
from pathlib import Path

import pytest

from collection import FirstCases, parts
from figures import table
from suites import SUITES, THOROUGH, command
from test_sources import ROOT, modules_of_tests, possible_markers

MARKERS = sorted(frozenset().union(*(suite.any_of | suite.none_of for suite in SUITES.values())))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
RUN = (ROOT / ".ci" / "run").read_text()


def test_every_marker_is_known_to_the_suites() -> None:
    declared = set(
        re.findall(r'^  "(\w+): ', PYPROJECT.partition("markers = [")[2].partition("\n]")[0], re.MULTILINE)
    )
    assert declared == {*MARKERS, THOROUGH, "cases"}


@pytest.mark.parametrize("everything", [False, True])
def test_whatever_markers_a_test_bears_a_suite_plays_it_unless_it_is_thorough(everything: bool) -> None:
    whole = [suite for suite in SUITES.values() if not suite.only]
    for some in chain.from_iterable(combinations(MARKERS, size) for size in range(len(MARKERS) + 1)):
        borne = frozenset(some) | ({"docker"} if {"container", "runsc"} & set(some) else set())
        assert any(suite.plays(borne, everything=everything) for suite in whole), borne
        thorough = borne | {THOROUGH}
        assert any(suite.plays(thorough, everything=everything) for suite in whole) == everything, thorough


def test_every_suite_is_played_by_ci_run() -> None:
    played = set(re.findall(r"^ +suite ([\w-]+) ", RUN, re.MULTILINE))
    assert set(SUITES) <= played


def test_a_suite_has_only_the_modules_that_can_hold_its_tests() -> None:
    docker = SUITES["docker"].modules(everything=False)
    assert docker
    assert all("docker" in possible_markers(module) for module in docker)
    assert len(docker) < len(modules_of_tests()) / 2


def test_a_command_names_the_tests_and_leaves_out_the_thorough_ones() -> None:
    line = command(SUITES["engines"], ["-x"], everything=False)
    assert line[line.index("-m") + 1] == "(sglang or vllm) and not container and not thorough"
    assert "-x" in line
    assert all(Path(ROOT, word).is_file() for word in line if word.endswith(".py"))
    line = command(SUITES["engines"], ["tests/engines/test_vllm_server.py"], everything=True)
    assert line[line.index("-m") + 1] == "(sglang or vllm) and not container"
    assert [word for word in line if word.endswith(".py")] == ["tests/engines/test_vllm_server.py"]


def test_parts_hold_each_module_once_in_order_and_take_about_the_same_time() -> None:
    modules = [ROOT / "tests" / f"test_{number}.py" for number in range(40)]
    seconds = {module.relative_to(ROOT).as_posix(): float(number % 7) for number, module in enumerate(modules)}
    found = parts(modules, seconds, 3)
    assert [module for part in found for module in part] == modules
    sums = [sum(seconds[module.relative_to(ROOT).as_posix()] for module in part) for part in found]
    assert max(sums) < 1.4 * min(sums)


def test_cases_after_the_first_are_thorough(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.cases(2)\n@pytest.mark.parametrize('n', range(5))\ndef test_one(n): pass\n"
        "@pytest.mark.parametrize('n', range(3))\ndef test_other(n): pass\n"
    )
    pytester.inline_run("-m", "not thorough", plugins=[FirstCases()]).assertoutcome(passed=5)


def test_the_table_has_a_row_for_each_suite_and_their_sum() -> None:
    assert table().splitlines()[-1].startswith("| all | ")
