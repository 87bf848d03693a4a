"""The suites of tests: which tests each plays, with how many processes. The one table for make and for `.ci/run`.

    python scripts/suites.py slow                      plays the suite
    python scripts/suites.py slow tests/start -k kill  the same, of a folder, with further options of pytest
    python scripts/suites.py --files docker            the modules that can hold its tests

`.ci/run` and `make test-…` leave out the tests marked `thorough`: products of what one test proves already, and
longer plays. With TURNSTILE_EVERYTHING=1 (`make everything`) each suite plays them too, with more examples of each
property.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from test_sources import ROOT, certain_markers, modules_of_tests, possible_markers

EVERYTHING = "TURNSTILE_EVERYTHING"
THOROUGH = "thorough"
APART = ["--dist", "each", "-o", "console_output_style=classic"]
"""Each process chooses its own part. Without percentages: xdist takes each process's part for the whole."""


@dataclass(frozen=True)
class Suite:
    """Tests that bear one of ``any_of`` (where it names some) and none of ``none_of``.

    ``share`` says how processes get their tests: `load` one by one, so that each collects all of them;
    `loadfile` a module at a time, where its tests share what one of them changes, such as an engine's weights;
    `folders` by its part of the modules, which is all that a process collects (tests/collection.py); `markers` one
    process for each of ``any_of``, so that what its tests share, such as an engine, is started once. ``only``:
    modules instead of those that the markers lead to; ``also``: further ones of `make everything`.
    """

    any_of: frozenset[str] = frozenset()
    none_of: frozenset[str] = frozenset()
    processes: int = 2
    share: str = "load"
    only: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def plays(self, borne: frozenset[str], *, everything: bool) -> bool:
        """Whether it plays a test that bears these markers, in a module that it plays."""
        none_of = self.none_of if everything else self.none_of | {THOROUGH}
        return (not self.any_of or bool(self.any_of & borne)) and not none_of & borne

    def expression(self, *, everything: bool) -> str:
        """For ``pytest -m``."""
        without = sorted(self.none_of if everything else self.none_of | {THOROUGH})
        parts = [f"({' or '.join(sorted(self.any_of))})"] if self.any_of else []
        return " and ".join(parts + [f"not {marker}" for marker in without])

    def modules(self, *, everything: bool) -> list[Path]:
        """The modules that can hold tests of this suite."""
        if self.only:
            return [ROOT / path for path in (*self.only, *(self.also if everything else ()))]
        none_of = self.none_of if everything else self.none_of | {THOROUGH}
        return [
            module
            for module in modules_of_tests()
            if (not self.any_of or self.any_of & possible_markers(module))
            and not none_of & certain_markers(module)
        ]


def markers(*names: str) -> frozenset[str]:
    return frozenset(names)


REAL_ENGINES = markers("sglang", "vllm")
PLAYED_APART = markers("cheats", "cluster", "trainers")
SUITES = {
    "test": Suite(
        none_of=markers("slow", "docker", "container", "agents", "browser", "runsc") | PLAYED_APART | REAL_ENGINES,
        processes=5,  # they wait more than they compute, and each collects its own part only
        share="folders",
    ),
    "slow": Suite(
        markers("slow"), markers("docker", "agents", "browser") | PLAYED_APART | REAL_ENGINES, processes=4
    ),
    # Other tests of servers ask one for an order, a bound or a journal that several do not share. That each
    # route is joined is held by tests/workers, in the suite `test`.
    "workers": Suite(
        none_of=markers("docker"),
        processes=2,
        share="folders",
        only=("tests/control/test_control_api.py", "tests/gate/test_retries.py"),
        also=(
            "tests/gate/test_disconnects.py",
            "tests/gate/test_failures.py",
            "tests/gate/test_lost_replies.py",
            "tests/openenv/test_openenv_http.py",
            "tests/openenv/test_openenv_mcp.py",
            "tests/openenv/test_openenv_sessions.py",
            "tests/traffic/test_replay.py",
        ),
        environment={"TURNSTILE_TEST_WORKERS": "2"},
    ),
    "browser": Suite(markers("browser")),
    "docker": Suite(markers("docker"), markers("container", "agents", "runsc") | REAL_ENGINES, processes=3),
    "runsc": Suite(markers("runsc"), processes=0),
    # What a container played is looked at by the next test of its module.
    "container": Suite(markers("container"), share="loadfile"),
    # One work that cheats after another, each in a sandbox of its own.
    "cheats": Suite(markers("cheats"), markers("docker"), processes=4),
    # A module's tests share their cluster or their engine.
    "cluster": Suite(markers("cluster"), share="loadfile"),
    # Each trainer has a Python of its own; what one played is looked at by the next test of its module.
    "trainers": Suite(markers("trainers"), share="loadfile"),
    "agents": Suite(markers("agents"), REAL_ENGINES, processes=3),
    "engines": Suite(REAL_ENGINES, markers("container"), processes=len(REAL_ENGINES), share="markers"),
}


def command(suite: Suite, given: Sequence[str], *, everything: bool) -> list[str]:
    """pytest's command line. ``given``: further options, and paths instead of the suite's modules."""
    paths = [word for word in given if (ROOT / word.partition("::")[0]).exists()]
    modules = paths or [module.relative_to(ROOT).as_posix() for module in suite.modules(everything=everything)]
    line = [str(Path(sys.executable).with_name("pytest")), "-m", suite.expression(everything=everything)]
    if everything:
        line += ["--hypothesis-profile=thorough"]
    if suite.processes and not any(word.startswith("-n") for word in given):
        line += ["-n", str(suite.processes)]
        match suite.share:
            case "folders":
                line += [*APART, "--by-folders"]
            case "markers":
                line += [*APART, f"--by-markers={','.join(sorted(suite.any_of))}"]
            case _:
                line += ["--dist", suite.share]
    return [*line, *(word for word in given if word not in paths), *modules]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plays a suite of tests.", usage="suites.py [--files] SUITE [PYTEST…]"
    )
    parser.add_argument("--files", action="store_true", help="print the modules that can hold its tests")
    parser.add_argument("suite", choices=SUITES)
    options, given = parser.parse_known_args()
    suite, everything = SUITES[options.suite], os.environ.get(EVERYTHING) == "1"
    line = command(suite, given, everything=everything)
    if options.files:
        print("\n".join(module.relative_to(ROOT).as_posix() for module in suite.modules(everything=everything)))
        return 0
    return subprocess.run(line, cwd=ROOT, env=os.environ | suite.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
