"""Sandboxes of a real Podman, rootful: what holds, a task that ships, whole episodes, nothing left.

``scripts/ci_podman.sh`` makes the engine, with the test image of Docker's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
import pytest
from light import SOLVE
from test_whole_episodes import played, server

from local import TURNSTILE

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

SCRIPT = Path(__file__).parents[2] / "scripts" / "ci_podman.sh"


@pytest.fixture(scope="module")
def podman(docker_image: str) -> Iterator[str]:
    """Its address."""
    folder = tempfile.mkdtemp(prefix="tp-")
    environment = {**os.environ, "TURNSTILE_CI_PODMAN": folder, "TURNSTILE_TEST_IMAGE": docker_image}
    try:
        subprocess.run([SCRIPT, "up"], env=environment, check=True)
        yield f"unix://{folder}/podman.sock"
    finally:
        subprocess.run([SCRIPT, "down"], env=environment, check=True)
        shutil.rmtree(folder, ignore_errors=True)


def turnstile(podman: str, *words: str, before: Sequence[str] = (), **more: str) -> str:
    environment = {**os.environ, "DOCKER_HOST": podman, "TURNSTILE_SANDBOXES__KIND": "docker", **more}
    done = subprocess.run(
        [*before, TURNSTILE, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def nothing_left(podman: str) -> bool:
    engine = docker.DockerClient(base_url=podman)
    try:
        return not engine.containers.list(all=True) and not engine.volumes.list()
    finally:
        engine.close()


def test_what_holds_under_docker_holds_under_podman(podman: str, docker_image: str, tmp_path: Path) -> None:
    said = turnstile(podman, "doctor", "--sandbox-image", docker_image, "--data-dir", str(tmp_path))
    assert "Docker (Podman) " in said
    assert "transport bind" in said
    for held in ("kept apart; a uid each", "none can be gained", "7 calls tried and refused"):
        assert held in said
    assert "memory       held for the sandbox as a whole" in said
    assert "All that was tried holds here." in said
    assert nothing_left(podman)


def test_a_task_that_ships_validates_under_a_podman_that_sees_no_file_of_the_servers(
    podman: str, docker_image: str
) -> None:
    words = ("tasks", "validate", "--only", "fix-calculator", "--image", docker_image)
    with tempfile.TemporaryDirectory(prefix="tp-") as own:
        apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', own]
        said = turnstile(podman, *words, before=apart, TURNSTILE_SANDBOXES__RUN_DIR=f"{own}/of")
    assert "1 of 1 tasks are sound" in said
    assert "Podman's own system call filter around ours" in said
    assert nothing_left(podman)


async def test_an_episode_under_podman_is_graded_and_leaves_nothing(
    podman: str, tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    sandboxes = {"kind": "docker", "docker_host": podman, "docker_image": docker_image}
    async with server(tiny_model, tmp_path, sandboxes=sandboxes) as stage:
        solved = await played(stage, env={"WORK": SOLVE})
        assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0), idle
    assert nothing_left(podman)
