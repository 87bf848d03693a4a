"""Whole episodes on Harbor's own docker environment, whose helpers dial the server: real Harbor, real Docker.

Harbor needs Python 3.12 and has one of its own (``TURNSTILE_HARBOR_PYTHON``, made of ``scripts/harbor.txt``), in
which ``harbor_program`` plays; ``tests/sandboxes/test_harbor_environments.py`` has the providers that fail.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import docker
import pytest
from dialled_hosts import free_port

from local import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("harbor_program.py")
SWEEP = Path(__file__).with_name("harbor_sweep_program.py")
OURS = re.compile(r"turnstile-sb-\w+(-main-1|_default)")
PAGE = ROOT / "docs" / "cluster.md"
TESTS = ("", "gate", "engines", "episodes", "sandboxes", "start")


def shut_network(folder: Path) -> Path:
    """The file for Docker Compose that the page shows."""
    section = PAGE.read_text("utf-8").partition("\n## Sandboxes at a provider\n")[2]
    path = folder / "shut-network.yaml"
    path.write_text(re.findall(r"shut-network.yaml <<END\n(.*?)\nEND\n", section, re.DOTALL)[0], "utf-8")
    return path


def link_address(engine: docker.DockerClient) -> str:
    """This machine, as containers reach it."""
    [bridge] = engine.networks.list(names=["bridge"])
    return f"{bridge.attrs['IPAM']['Config'][0]['Gateway']}:{free_port()}"


def turnstile_for(folder: Path) -> str:
    """A PYTHONPATH with Turnstile, what says that it is installed, and the tests."""
    [info] = Path(str(distribution("turnstile-rl").locate_file(""))).glob("turnstile_rl-*.dist-info")
    places = folder / "places"
    places.mkdir()
    (places / info.name).symlink_to(info)
    ours = [ROOT / "client", ROOT / "env_server", places, *(ROOT / "tests" / name for name in TESTS)]
    return os.pathsep.join(map(str, ours))


@pytest.fixture(scope="module")
def seen(tiny_model: Path, docker_image: str) -> Iterator[dict[str, Any]]:
    """What the program saw, and what was there after it, and after the next start."""
    engine = docker.from_env()

    def there() -> list[str]:
        """Containers and networks of Compose's: other tests have sandboxes of their own meanwhile."""
        found = [*engine.containers.list(all=True, ignore_removed=True), *engine.networks.list()]
        return [str(each.name) for each in found if OURS.fullmatch(str(each.name))]

    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as name:
        folder = Path(name)
        plugins = folder / "docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(Path(os.environ["TURNSTILE_COMPOSE"]) / "docker-compose")
        environment = {**os.environ, "DOCKER_CONFIG": str(plugins.parent), "PYTHONPATH": turnstile_for(folder)}
        run_dir = folder / "run"
        sandboxes = {
            "kind": "harbor:docker",
            "link_address": link_address(engine),
            "docker_image": docker_image,
            "docker_python": "image",
            "harbor_options": {"extra_docker_compose": [str(shut_network(folder))]},
            "run_dir": str(run_dir),
        }

        def run(code: int, *words: object) -> str:
            command = [os.environ["TURNSTILE_HARBOR_PYTHON"], *map(str, words), json.dumps(sandboxes)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
            return done.stdout.splitlines()[-1]

        before = there()
        try:
            found: dict[str, Any] = json.loads(run(-signal.SIGKILL, PROGRAM, tiny_model, folder))
            found["left"] = sorted({*there()} - {*before})
            found["said"] = run(0, SWEEP, run_dir)
            found["swept"] = sorted({*there()} - {*before})
            found["files"] = list((run_dir / "harbor").rglob("*"))
            yield found
        finally:
            for container in engine.containers.list(all=True, ignore_removed=True):
                if container.name in {*there()} - {*before}:
                    container.remove(force=True)
            engine.close()


def test_episodes_on_harbors_docker_environment_are_graded(seen: dict[str, Any]) -> None:
    solved, idle = seen["solved"], seen["idle"]
    assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
    assert solved["stats"]["turns"] == 2
    assert "thought 2 times" in solved["agent_output"]
    assert "[]" in solved["agent_output"], "the order to dial was gone"
    assert (idle["status"], idle["reward"]) == ("completed", 0.0), idle


def test_what_its_environment_holds_was_tried(seen: dict[str, Any]) -> None:
    assert seen["described"]["isolated"] is True
    for words in ("harbor:docker: network shut but for the link", "a uid for each user", "memory and cpus"):
        assert words in seen["described"]["description"]


def test_what_a_killed_server_leaves_is_removed_by_the_next_start(seen: dict[str, Any]) -> None:
    container, network = seen["left"]
    assert container.removesuffix("-main-1") == network.removesuffix("_default")
    assert seen["swept"] == []
    assert seen["files"] == []
    assert "that is enough" in seen["said"]
