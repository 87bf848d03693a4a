"""`kill -9` of a server that runs sixteen episodes: acknowledged turns are there, sandboxes are removed, the
client sees the failure and repeats its rollouts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
import yaml
from light import LIGHT, TASK

from local import TURNSTILE
from turnstile import AsyncClient, Rollout
from turnstile.models import EpisodeStatus, Fault, Turn
from turnstile_server.data_dir import owner_of
from turnstile_server.demo.local_server import descendants, running
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

KEY = "control-key-of-the-killed"
EPISODES = 8
SERVER_S = 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(
    params=[pytest.param("local", marks=pytest.mark.slow), pytest.param("docker", marks=pytest.mark.docker)]
)
def sandbox(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of sandboxes and the image of Docker's."""
    image = request.getfixturevalue("docker_image") if request.param == "docker" else "unused"
    return request.param, image


class Servers:
    """Servers one after the other, on one data directory and one address."""

    def __init__(self, model: Path, folder: Path, sandbox: str, image: str) -> None:
        specs = folder / "specs"
        specs.mkdir()
        talkative = LIGHT.model_copy(update={"env": {**LIGHT.env, "TURNS": "3", "STAY": "12"}})
        (specs / "light.yaml").write_text(yaml.safe_dump(talkative.model_dump(mode="json")))
        self.port = free_port()
        self._folders = ("--model", str(model), "--data-dir", str(folder / "data"), "--agent-specs", str(specs))
        self._kind = ("--sandbox", sandbox, "--sandbox-image", image)
        self._log = folder / "server.log"

    @asynccontextmanager
    async def one(self) -> AsyncIterator[anyio.abc.Process]:
        ports = ("--control-port", str(self.port), "--agent-port", "0")
        limits = {"TURNSTILE_EPISODES__MAX_RUNNING": str(EPISODES), "TURNSTILE_GRADING__PARALLEL": "4"}
        with self._log.open("ab") as log:
            async with await anyio.open_process(
                [TURNSTILE, "serve", *ports, *self._folders, *self._kind],
                env={**os.environ, **limits, "TURNSTILE_CONTROL_KEY": KEY},
                stderr=log,
            ) as process:
                try:
                    assert process.stdout is not None
                    with anyio.fail_after(SERVER_S):
                        assert json.loads(await process.stdout.receive())["event"] == "ready"
                    yield process
                finally:
                    if process.returncode is None:
                        process.terminate()
                    with anyio.move_on_after(30, shield=True):
                        await process.wait()


def acknowledged(turns: list[Turn]) -> set[str]:
    """Turns that the agent got the reply of: it tells the id of one reply in its next call."""
    said = [message.content for turn in turns for message in turn.new_messages if message.role == "user"]
    return {text.split(" after ")[1].replace("chatcmpl-", "turn_") for text in said if " after chatcmpl-" in text}


def containers(data_dir: Path) -> list[str]:
    label = f"label=turnstile.owner={owner_of(data_dir)}"
    listed = subprocess.run(["docker", "ps", "-aq", "--filter", label], check=True, capture_output=True, text=True)
    return listed.stdout.split()


@pytest.mark.thorough
async def test_a_killed_server_loses_nothing_and_its_episodes_are_played_again(
    tiny_model: Path, tmp_path: Path, sandbox: tuple[str, str]
) -> None:
    kind, image = sandbox
    servers = Servers(tiny_model, tmp_path, kind, image)
    rollouts: list[Rollout] = []
    async with (
        AsyncClient(f"http://127.0.0.1:{servers.port}", key=KEY) as client,
        anyio.create_task_group() as tasks,
    ):

        async def collect() -> None:
            limits = {"max_completion_tokens": 16}
            async for rollout in client.rollouts([TASK], agent="light", n=EPISODES, limits=limits):
                rollouts.append(rollout)

        async with servers.one() as server:
            tasks.start_soon(collect)
            await wait_until(lambda: in_the_middle(client), within_s=SERVER_S)
            family = descendants(server.pid)
            assert len(family) > EPISODES or kind == "docker"
            server.kill()
            await server.wait()
        await wait_until(lambda: not family & running())
        if kind == "docker":
            assert len(containers(tmp_path / "data")) >= EPISODES
        async with servers.one():
            first = [episode async for episode in client.episodes() if episode.error is not None]
            assert len(first) == EPISODES
            for episode in first:
                assert episode.status is EpisodeStatus.FAILED
                assert episode.error is not None
                assert (episode.error.type, episode.error.fault) == ("server_restarted", Fault.INFRASTRUCTURE)
                assert episode.reward is None
                turns = list(await client.episode(episode.episode_id).turns())
                assert acknowledged(turns) <= {turn.turn_id for turn in turns}
                samples = await client.episode(episode.episode_id).samples()
                untrained = {
                    row.turn_id: row.reason for row in samples.untrained if row.reason != "id_without_token"
                }
                assert not acknowledged(turns) & set(untrained), "the agent had them and went on"
                assert set(untrained.values()) <= {"undelivered", "delivery_unknown"}
                trained = {span.turn_id for row in samples.samples for span in row.turn_spans if span.trained}
                assert trained | set(untrained) == {turn.turn_id for turn in turns}
            assert sum(episode.stats.turns for episode in first) >= EPISODES
            await wait_until(lambda: len(rollouts) >= EPISODES, within_s=200)
    assert [rollout.error for rollout in rollouts] == [None] * EPISODES
    assert {rollout.reward for rollout in rollouts} == {0.0}
    assert {rollout.attempts for rollout in rollouts} == {2}
    assert len({rollout.group_id for rollout in rollouts}) == 1
    if kind == "docker":
        assert containers(tmp_path / "data") == []


async def in_the_middle(client: AsyncClient) -> bool:
    """All run, none is done, and each has a turn or two."""
    shown: list[Any] = []
    async for episode in client.episodes():
        shown.append(await client.episode(episode.episode_id).status())
    return len(shown) == EPISODES and all(
        episode.status is EpisodeStatus.RUNNING and episode.stats.turns >= 1 for episode in shown
    )
