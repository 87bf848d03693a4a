"""The container plays with the host's engine, over its socket and over TCP: its sandboxes are its neighbours.

The server's container is hardened and gets none of the flags that bubblewrap needs. The engine does not see one
file of it: everything a sandbox needs travels over the engine's connection.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_support import STOP_S, Container, started
from image_builds import base_image, run
from play import NPM_AGENT, OWN_AGENT, SHIPPED_TASK, play, play_all

from engine_forwarder import EngineForwarder
from engine_gateway import engine_gateway
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.anyio,
    pytest.mark.timeout(1500),
]

SERVER = {"MODEL": "tiny", "ENGINE__KIND": "embedded", "SANDBOXES__KIND": "docker"}
INSIDE = "/var/run/docker.sock"
OWNER_OF = (
    "from turnstile_server.data_dir import owner_of; from pathlib import Path; print(owner_of(Path('/data')))"
)


def engine_socket() -> Path:
    address = os.environ.get("DOCKER_HOST", f"unix://{INSIDE}")
    assert address.startswith("unix://"), "these tests mount the engine's socket: DOCKER_HOST must name one"
    return Path(address.removeprefix("unix://"))


def mounted_socket() -> tuple[str, ...]:
    """The flags of docs/sandboxes.md."""
    socket = engine_socket()
    return ("-v", f"{socket}:{INSIDE}", "--group-add", str(socket.stat().st_gid))


@dataclass(frozen=True)
class Beside:
    """A serving container, and the label's value of what it makes on the engine."""

    container: Container
    owner: str

    @property
    def sandboxes(self) -> list[str]:
        listed = run("docker", "ps", "-a", "-q", "--filter", f"label={OWNER_LABEL}={self.owner}")
        return listed.split()


@contextlib.asynccontextmanager
async def serving_beside_its_sandboxes(image: str, *flags: str, **settings: str) -> AsyncIterator[Beside]:
    """A hardened container with the host's engine. The volumes that it leaves there are removed."""
    with started(image, *flags, **SERVER, SANDBOXES__DOCKER_IMAGE=base_image(), **settings) as container:
        await container.ready()
        made = Beside(container, container.run("python3", "-c", OWNER_OF))
        try:
            yield made
            run("docker", "stop", "--time", str(STOP_S), container.name, timeout_s=STOP_S + 30)
            assert container.state["ExitCode"] == 0, container.log
            assert made.sandboxes == []
        finally:
            run("docker", "rm", "-f", container.name, ok=False)
            filters = ("--filter", f"label={OWNER_LABEL}={made.owner}")
            for sandbox in made.sandboxes:
                run("docker", "rm", "-f", sandbox, ok=False)
            for volume in run("docker", "volume", "ls", "-q", *filters).split():
                run("docker", "volume", "rm", volume)


@pytest.mark.thorough
async def test_with_the_engines_socket_it_plays_groups_that_are_graded_and_audited(embedded_image: str) -> None:
    async with serving_beside_its_sandboxes(embedded_image, *mounted_socket()) as beside:
        beside.container.install_agents(OWN_AGENT, NPM_AGENT)
        await play_all(beside.container)
        assert "transport stream (the engine does not see this server's" in beside.container.log
        assert "on a carried Python 3.11" in beside.container.log  # made at the first start
        assert beside.sandboxes == []


@pytest.mark.thorough
async def test_with_the_engine_over_tcp_it_plays_and_a_stop_leaves_no_container(embedded_image: str) -> None:
    gateway = engine_gateway()
    forwarder = EngineForwarder(str(engine_socket()), gateway)
    forwarder.open()
    try:
        address = {"SANDBOXES__DOCKER_HOST": f"tcp://{gateway}:{forwarder.port}"}
        async with serving_beside_its_sandboxes(embedded_image, **address) as beside:
            beside.container.install_agents(OWN_AGENT)
            await play(beside.container, OWN_AGENT, [SHIPPED_TASK])
    finally:
        forwarder.cut()


@pytest.mark.thorough
async def test_a_socket_of_a_group_that_it_is_not_in_is_said_at_start_with_the_flag_to_add(
    embedded_image: str,
) -> None:
    socket = engine_socket()
    with started(embedded_image, "-v", f"{socket}:{INSIDE}", **SERVER) as container:
        run("docker", "wait", container.name)
        assert container.state["ExitCode"] != 0
        assert f"uid 10001 may not use the engine's socket {INSIDE}" in container.log
        assert f"--group-add {socket.stat().st_gid}" in container.log
