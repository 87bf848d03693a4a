"""Plays the quick tests with the lowest versions that pyproject.toml allows (`make lowest`): are its bounds true?

    python scripts/lowest.py                          every environment, then writes scripts/lowest.txt
    python scripts/lowest.py --only server [PYTEST…]  this environment, with these options and paths

Each bound of an environment is a constraint (`pydantic>=2.13` becomes `pydantic==2.13`), so bounds that contradict
each other fail here. uv's `--resolution lowest-direct` alone does not say so: it gives up the lowest version of
one package for that of another. All other packages, the tools of tests too, have uv.lock's versions where these
fit.

torch is the exception: it keeps the one version that pyproject.toml constrains it to, because older CPU builds
are on no index that every machine has. Its bound is not proved here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

from constraints import LOCK, constraints
from test_sources import ROOT

PLAYED: Final = ROOT / "scripts" / "lowest.txt"
PROJECT: Final = "turnstile-rl"
LOWEST_PYTHON: Final = (3, 11)
NOT_PLAYED: Final = frozenset({"dev", "docs", "ray"})
"""Extras of tools: nobody depends on their bounds; and Ray, whose tests have an environment of their own."""
LEFT_OUT: Final = (
    # A budget of the client with the packages of today: older ones of others take more memory.
    "tests/client/test_import_cost.py::test_an_import_stays_under_60_megabytes",
    # Compares the bounds with what was played last, which this is about to write.
    "tests/structure/test_dependencies.py::test_make_lowest_was_played_with_the_bounds_of_today",
)
CLIENT_TESTS: Final = (
    "tests/client/test_client_retry.py",
    "tests/client/test_groups.py",
    "tests/client/test_hostile_text.py",
    "tests/client/test_placement.py",
    "tests/client/test_statistics_by.py",
    "tests/client/test_wire.py",
)
"""Those that need no server: the shared fixtures do, so they are played without conftest.py."""


@dataclass(frozen=True)
class Environment:
    """The extras that are installed together; ``tools``: packages of `dev` that its tests need (None: all)."""

    extras: frozenset[str]
    tools: frozenset[str] | None = None


def project() -> dict[str, Any]:
    read: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return read


def environments(pyproject: Mapping[str, Any]) -> dict[str, Environment]:
    """Two: the thin client makes do with lower versions than a server."""
    extras = frozenset(pyproject["project"]["optional-dependencies"]) - NOT_PLAYED
    return {
        "client": Environment(frozenset(), tools=frozenset({"pytest", "pytest-timeout", "hypothesis"})),
        "server": Environment(extras),
    }


def requirements(pyproject: Mapping[str, Any], extras: frozenset[str], *, base: bool) -> Iterator[Requirement]:
    """What an installation with ``extras`` asks for by itself; without ``base``, for their sake alone."""
    named = pyproject["project"]["optional-dependencies"]
    lines = [
        *(pyproject["project"]["dependencies"] if base else ()),
        *(line for one in extras for line in named[one]),
    ]
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if requirement.name == PROJECT:
            yield from requirements(pyproject, frozenset(requirement.extras), base=False)
        elif marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def lower_bounds(pyproject: Mapping[str, Any], environment: Environment) -> dict[str, Version]:
    """The lowest version of each requirement whose bound ``environment`` proves.

    It is the highest of the requirement's bounds there, or what the project constrains it to.
    """
    asked = list(requirements(pyproject, environment.extras, base=True))
    constrained = [Requirement(line) for line in pyproject["tool"]["uv"]["constraint-dependencies"]]
    found: dict[str, Version] = {}
    for requirement in (*asked, *constrained):
        bounds = [Version(one.version) for one in requirement.specifier if one.operator in {">=", "=="}]
        if not bounds:
            raise ValueError(f"pyproject.toml: {requirement} has no lower bound")
        if requirement not in constrained or requirement.name in found:
            found[requirement.name] = max(found.get(requirement.name, bounds[0]), *bounds)
    return found


def tools(pyproject: Mapping[str, Any], wanted: frozenset[str] | None) -> list[str]:
    """The requirements of `dev` that are packages of others."""
    lines = pyproject["project"]["optional-dependencies"]["dev"]
    names = {line: Requirement(line).name for line in lines}
    return [line for line, name in names.items() if name != PROJECT and (wanted is None or name in wanted)]


def compile_pins(*arguments: str | Path) -> None:
    """Runs `uv pip compile` with the index that pip is configured with."""
    here = Path(sys.executable).parent
    asked = subprocess.run(
        [here / "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    index = ["--default-index", asked.stdout.strip()] if asked.returncode == 0 else []
    subprocess.run([here / "uv", "pip", "compile", *arguments, "--quiet", *index], cwd=ROOT, check=True)


def resolve(pyproject: Mapping[str, Any], environment: Environment, python: str) -> list[str]:
    """``name==version`` of every package, sorted.

    Raises CalledProcessError after uv said which bounds conflict.
    """
    bounds = lower_bounds(pyproject, environment)
    with tempfile.TemporaryDirectory() as folder:
        exact, asked, pins = (Path(folder, name) for name in ("exact.txt", "tools.in", "pins.txt"))
        exact.write_text("".join(f"{name}=={version}\n" for name, version in bounds.items()))
        asked.write_text("\n".join(tools(pyproject, environment.tools)))
        locked = constraints(tomllib.loads(LOCK.read_text()))
        # What the output already holds, uv keeps where it can.
        pins.write_text("\n".join(line for line in locked if line.split("==")[0] not in bounds))
        extras = [word for extra in sorted(environment.extras) for word in ("--extra", extra)]
        options = ["--python", python, "--no-header", "--no-annotate"]
        compile_pins("pyproject.toml", asked, *extras, "--constraints", exact, "--output-file", pins, *options)
        return sorted(line for line in pins.read_text().splitlines() if not line.startswith(("#", "--", "-e")))


def install(directory: Path, pins: Sequence[str], python: str) -> None:
    """Makes the environment, where it is not there with these versions, and puts this checkout into it."""
    torch = [pin for pin in pins if pin.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pin for pin in pins if pin not in torch) + "\n")
        file.flush()
        command: list[str | Path] = [ROOT / "scripts" / "install_pinned.sh", file.name, directory]
        subprocess.run(command, env=os.environ | {"PYTHON": python}, check=True)
    if torch:  # by pip, which finds the CPU build where this machine has it; it does nothing if that is there
        index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
        command = [directory / "bin" / "pip", "install", "--quiet", "--no-deps", *index, *torch]
        subprocess.run(command, check=True)
    install_ours: list[str | Path] = [
        ROOT / "scripts" / "pip_install.sh",
        directory,
        "--no-deps",
        "--editable",
        ROOT,
    ]
    subprocess.run(install_ours, check=True)


def play(name: str, python: Path, given: Sequence[str]) -> int:
    """Plays an environment's tests, or ``given``; returns pytest's exit status."""
    if name == "client":
        return play_client(python, given)
    suite: list[str | Path] = [python, ROOT / "scripts" / "suites.py", "test"]
    command = [*suite, *(f"--deselect={test}" for test in LEFT_OUT), *given]
    # The quick suite is the same in `make everything`: its thorough cases say nothing more about versions.
    return subprocess.run(command, env=os.environ | {"TURNSTILE_EVERYTHING": ""}, check=False).returncode


def play_client(python: Path, given: Sequence[str]) -> int:
    """Imports every module that needs no extra, asks the command line for help, plays what needs no server."""
    subprocess.run([python, ROOT / "scripts" / "import_client.py"], check=True)
    subprocess.run([python.with_name("turnstile"), "--help"], stdout=subprocess.DEVNULL, check=True)
    command: list[str | Path] = [python.with_name("pytest"), "-q", "--noconftest", *(given or CLIENT_TESTS)]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "client")])
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def recorded() -> dict[str, dict[str, Version]]:
    """What scripts/lowest.txt says was played: environment, package, version."""
    found: dict[str, dict[str, Version]] = {}
    for line in PLAYED.read_text().splitlines():
        if section := re.fullmatch(r"\[(\w+)\]", line):
            found[section[1]] = {}
        elif pin := re.match(r"([\w.-]+)==(\S+)", line):
            found[next(reversed(found))][pin[1]] = Version(pin[2])
    return found


def record(played: Mapping[str, Sequence[str]]) -> None:
    lines = [
        "# Written by `make lowest`: the versions that the quick tests are played with, for each environment."
    ]
    for name, pins in played.items():
        lines += ["", f"[{name}]", *pins]
    PLAYED.write_text("\n".join(lines) + "\n")


def lowest_python() -> str:
    """The interpreter to play with: the lowest that the project allows."""
    if sys.version_info[:2] == LOWEST_PYTHON:
        return str(Path(sys.executable).resolve())
    name = "python{}.{}".format(*LOWEST_PYTHON)
    found = shutil.which(name)
    if found is None:
        sys.exit(f"lowest.py: there is no {name} here, the lowest that the project allows: install it")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays the quick tests with the lowest versions.")
    parser.add_argument("--only", metavar="ENVIRONMENT", help="client or server")
    options, given = parser.parse_known_args()
    pyproject, python = project(), lowest_python()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile"
    played, failed = {}, []
    for name, environment in environments(pyproject).items():
        if options.only not in {None, name}:
            continue
        print(f"lowest: {name}", flush=True)
        played[name] = resolve(pyproject, environment, python)
        directory = cache / f"lowest-{name}"
        install(directory, played[name], python)
        if play(name, directory / "bin" / "python", given):
            failed.append(name)
    if failed:
        print(f"lowest: FAILED: {', '.join(failed)}")
    elif not options.only and not given:
        record(played)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
