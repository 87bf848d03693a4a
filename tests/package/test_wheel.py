"""The package as most users have it: built, installed into a fresh environment, used in an empty folder.

The environment has no editable install and no path of the checkout. Only PyTorch is not fetched again: its files
are linked from this environment, and are the ones that pip would unpack. Everything else comes from the index, at
the versions of uv.lock. The environment has no pip, as those that uv makes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from local import ROOT
from turnstile_server.demo.local_server import descendants, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UV = str(Path(sys.executable).with_name("uv"))
TINY = "turnstile_server/demo/tiny/model.safetensors"
README_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Built:
    wheel: Path
    sdist: Path


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the wheel. ``folder`` was empty, and is where commands run."""

    programs: Path
    folder: Path

    def env(self, **more: str) -> dict[str, str]:
        """The whole environment of a command: nothing of this process but the certificates for the index."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("SSL_", "UV_"))}
        paths = [str(self.programs), str(self.programs.parent / "tools"), "/usr/bin", "/bin", "/usr/sbin"]
        home = self.folder.parent / "home"
        return {**kept, "PATH": ":".join(paths), "HOME": str(home), "OMP_NUM_THREADS": "1", **more}

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def shell(self, line: str, **env: str) -> str:
        """What ``line`` prints; it must succeed."""
        done = self.run("bash", "-euc", line, **env)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel that is built from it: what the sdist lacks, the wheel lacks too."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", "--quiet", "--out-dir", folder, ROOT], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def install(folder: Path, requirement: str, *, torch: bool, with_packages: tuple[str, ...] = ()) -> Installed:
    environment = folder / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    made = Installed(environment / "bin", folder / "empty")
    made.folder.mkdir()
    (environment / "tools").mkdir()
    (environment / "tools" / "uv").symlink_to(UV)
    if torch:
        here = Path(sysconfig.get_paths()["purelib"])
        there = next(environment.glob("lib/python*/site-packages"))
        for part in [*here.glob("torch"), *here.glob("torch-*.dist-info"), *here.glob("torchgen")]:
            if subprocess.run(["cp", "-al", part, there], stderr=subprocess.DEVNULL, check=False).returncode:
                subprocess.run(["cp", "-a", part, there], check=True)  # another file system
    pins = folder / "constraints.txt"
    command = [sys.executable, str(ROOT / "scripts" / "constraints.py")]
    pins.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    into = ["--quiet", "--python", str(made.programs / "python"), "--constraint", str(pins)]
    subprocess.run([UV, "pip", "install", *into, requirement, *with_packages], check=True)
    return made


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    requirement = f"turnstile-rl[embedded,gym] @ {built.wheel.as_uri()}"
    return install(tmp_path_factory.mktemp("whole"), requirement, torch=True, with_packages=("openai",))


def test_the_policy_is_in_the_wheel_once_and_in_the_sdist_with_what_a_reader_needs(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
    assert [name for name in names if name.endswith(".safetensors")] == [TINY]
    assert "turnstile_server/engines/vllm/extension/turnstile_vllm.py" in names
    viewer = {name.rpartition("/")[2] for name in names if name.startswith("turnstile_server/viewer/")}
    assert viewer == {"__init__.py", "LICENSES.txt", "app.css", "app.js", "index.html"}
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"turnstile", "turnstile_server"}
    with tarfile.open(built.sdist) as sdist:
        parts = {"/".join(name.split("/")[1:]) for name in sdist.getnames()}
    assert {"ui/src/main.tsx", "ui/package-lock.json"} <= parts
    assert not any("node_modules" in part or part.startswith("ui/build/") for part in parts)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "uv.lock", "examples/grpo/grpo.py", "Makefile"} <= parts
    assert [part for part in parts if part.endswith("tiny/model.safetensors")] == [f"env_server/{TINY}"]


def test_the_version_is_that_of_the_build(built: Built, installed: Installed) -> None:
    version = built.wheel.name.split("-")[1]
    done = installed.run("turnstile", "--version")
    assert (done.stdout, done.stderr) == (f"turnstile {version}\n", "")


def test_without_the_server_the_demo_says_what_to_install(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> None:
    thin = install(tmp_path_factory.mktemp("thin"), built.wheel.as_uri(), torch=False)
    for command in ("demo", "serve"):
        refused = thin.run("turnstile", command)
        assert refused.returncode == 2
        assert "pip install 'turnstile-rl[embedded]'" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert "episodes" in thin.shell("turnstile --help")
    thin.shell("python -c 'import turnstile, turnstile.exporters.slime'")


@pytest.mark.thorough
def test_the_demo_plays_in_an_empty_folder(installed: Installed) -> None:
    played = installed.shell("turnstile demo --sandbox local --errands 3 --rollouts 2 --least 0")
    assert "of 6 episodes, by the policy's own sampling" in played
    assert "Passed: every token accounted for, audit passed, nothing left running." in played
    assert not list(installed.folder.iterdir())


@pytest.mark.thorough
def test_agents_are_installed_without_pip(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    spec = (
        "name: packed\nversion: '1'\nsummary: Has a package.\ncommand: ['true']\ninstall: {pip: [sniffio==1.3.1]}"
    )
    (tmp_path / "specs" / "packed.yaml").write_text(spec)
    there = {
        "TURNSTILE_AGENTS__INSTALL_DIR": str(tmp_path / "agents"),
        "TURNSTILE_AGENTS__SPECS": json.dumps([str(tmp_path / "specs")]),
    }
    said = installed.shell("turnstile agents install packed tool-loop", **there)
    assert said.count("is installed") == 2
    # For the carried Python too, where there is a Docker engine.
    found = list((tmp_path / "agents").glob("packed-*/python"))
    assert found
    assert all((packages / "sniffio").is_dir() for packages in found)
    assert all(list((packages / "sniffio" / "__pycache__").glob("*.pyc")) for packages in found), "compiled"


# The README


def section(name: str) -> str:
    text = (ROOT / "README.md").read_text("utf-8")
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def lines(text: str) -> Iterator[str]:
    """The commands of every shell block."""
    for block in blocks(text, "bash"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())


@contextmanager
def serving(installed: Installed, line: str) -> Iterator[str]:
    """The control URL of the server that ``line`` starts, on free ports; nothing of it may stay."""
    ports = {"TURNSTILE_CONTROL__PORT": "0", "TURNSTILE_GATE__PORT": "0", "TURNSTILE_SANDBOXES__KIND": "local"}
    with (installed.folder.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(line, comments=True),
            cwd=installed.folder,
            env=installed.env(**ports),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert ready, (installed.folder.parent / "server.log").read_text()
        yield json.loads(ready)["control_url"]
    finally:
        family = descendants(process.pid)
        process.terminate()
        process.wait(60)
        process.stdout.close()
    assert process.returncode == 0
    assert not family & running()


def test_the_readme_plays_as_written(installed: Installed) -> None:
    """Ports are free ones here; all else is as it stands there."""
    use = section("Use it")
    outputs: dict[str, str] = {}
    commands = list(lines(use))
    start = next(line for line in commands if line.startswith("turnstile serve"))
    before, after = commands[: commands.index(start)], commands[commands.index(start) + 1 :]
    for line in before:
        installed.shell(line)
    with serving(installed, start) as url:
        for code in [*blocks(use, "python"), *blocks(section("Agents and tasks of your own"), "python")]:
            assert README_URL in code
            done = installed.run("python", "-c", code.replace(README_URL, url))
            assert done.returncode == 0, done.stderr
            outputs[code] = done.stdout
        for line in after:
            elsewhere = {} if line.startswith("turnstile run") else {"TURNSTILE_URL": url}
            outputs[line] = installed.shell(line, TURNSTILE_SANDBOXES__KIND="local", **elsewhere)
    rollouts, external = (outputs[code] for code in outputs if code.startswith("from pathlib"))
    assert len(re.findall(r"completed [01]\.0 None", rollouts)) == 4, rollouts
    assert "trained_tokens=" in external
    (run,) = (text for line, text in outputs.items() if line.startswith("turnstile run"))
    assert "over 16 graded of 16 rollouts" in run
    (validated,) = (text for line, text in outputs.items() if "validate" in line)
    assert "4 of 4 tasks are sound." in validated
    samples = (installed.folder / "samples.jsonl").read_text().splitlines()
    versions = {type(entry) for line in samples for entry in json.loads(line)["weight_version"]}
    assert versions == {str, type(None)}
    assert looked_at(installed, "turnstile-data") == 5  # four rollouts, and an external agent
    assert looked_at(installed, "rollouts") == 16


def looked_at(installed: Installed, folder: str) -> int:
    """How many episodes the viewer shows of a folder, without a server; its pages are in the wheel."""
    command = ["turnstile", "ui", folder, "--no-browser", "--model", "tiny"]
    with (installed.folder.parent / "viewer.log").open("ab") as log:
        viewer = subprocess.Popen(
            command, cwd=installed.folder, env=installed.env(), stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert viewer.stdout is not None
    try:
        address, _, key = viewer.stdout.readline().strip().partition("#key=")
        assert key, (installed.folder.parent / "viewer.log").read_text()
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"<!doctype html>" in page.read()
        listed = urllib.request.Request(
            f"{address.removesuffix('/ui')}/episodes?view=summary&offset=0",
            headers={"authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(listed, timeout=60) as answer:
            total: int = json.load(answer)["total"]
    finally:
        viewer.send_signal(signal.SIGINT)
        viewer.wait(60)
        viewer.stdout.close()
    return total


@pytest.mark.thorough
def test_the_gymnasium_loop_plays_as_written(installed: Installed) -> None:
    text = section("Train on it")
    (code,) = blocks(text, "python")
    start = re.search(r"`(turnstile serve [^`]+)`", text)
    assert start is not None
    with serving(installed, f"{start[1]} --data-dir gym-data") as url:
        key = (installed.folder / "gym-data" / "control.key").read_text().strip()
        done = installed.run("python", "-c", f"URL, KEY = {url!r}, {key!r}\n{code}")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"reward [\d.]+, \d+ turns, [1-9]\d* tokens", done.stdout)) == 4, done.stdout
