"""An engine of sandboxes that dies under an episode: whose fault it is, and that the next episode works."""

from __future__ import annotations

import os
from pathlib import Path

import docker
import pytest
from light import SOLVE, TASK
from test_whole_episodes import ended, played, server

from engine_forwarder import engine_over_tcp
from turnstile_server.data_dir import owner_of
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow]


async def test_its_episodes_fail_as_infrastructure_and_the_next_one_is_graded_when_it_is_back(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    with engine_over_tcp(os.environ["DOCKER_HOST"]) as engine:
        settings = {
            "kind": "docker",
            "docker_image": docker_image,
            "docker_host": engine.url,
            "docker_transport": "stream",
            "docker_timeout_s": 20,
        }
        async with server(tiny_model, tmp_path, sandboxes=settings) as stage:
            created = await stage.episode(task=TASK, agent="light", env={"STAY": "1000"})

            async def two_turns() -> bool:
                return bool((await stage.get(created))["stats"]["turns"] >= 2)

            await wait_until(two_turns)
            engine.cut()
            running = await ended(stage, created)
            assert (running["status"], running["reward"]) == ("failed", None), running
            assert (running["error"]["type"], running["error"]["fault"]) == ("sandbox_failed", "infrastructure")
            begun = await played(stage)
            assert (begun["error"]["type"], begun["error"]["fault"]) == ("sandbox_unavailable", "infrastructure")
            engine.open()
            after = await played(stage, env={"WORK": SOLVE})
            assert (after["status"], after["reward"], after["error"]) == ("completed", 1.0, None), after
    volumes = docker.from_env().volumes
    for left in volumes.list(filters={"label": f"{OWNER_LABEL}={owner_of(tmp_path / 'data')}"}):
        left.remove()  # the helper's copy stays for the server's next start
