"""Rewards that a world's tools give to turns: with the turn that called them, in the record and in the samples."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from gate_support import Stage, staged

from turnstile.models import Episode, EpisodeCreated, EpisodeRequest, TaskRef
from turnstile_server.testing.world_play import WorldAgent, WorldServer, play_agent, world_server
from waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[WorldServer]:
    async with world_server(Path(__file__).with_name("stepping_worlds.py"), {}) as running:
        yield running


async def turn(created: EpisodeCreated) -> None:
    headers = {"authorization": f"Bearer {created.episode_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
        (await http.post(f"{created.model_url}/v1/chat/completions", json=body)).raise_for_status()


async def played(server: WorldServer, *turns: list[tuple[str, dict[str, Any]]]) -> Episode:
    """An episode whose turns call these tools."""
    created = await server.server.create(EpisodeRequest(task=TaskRef(id="stepping")))
    await server._running(created.episode_id)

    async def agent(agent: Any) -> None:
        for calls in turns:
            await turn(created)
            for name, arguments in calls:
                await agent.call(name, **arguments)

    await play_agent(agent, "Go.", created.tool_url or "", created.episode_key or "")
    await server.server.control.post(f"/episodes/{created.episode_id}/finish")
    return await server.server.wait_for_end(created.episode_id)


@pytest.mark.slow
async def test_each_turn_has_what_its_own_calls_were_given(server: WorldServer) -> None:
    episode = await played(
        server,
        [("go", {"reward": 0.25}), ("look", {})],
        [("look", {})],
        [("go", {"reward": 1.0}), ("later", {}), ("fails", {}), ("look", {})],
    )
    assert (episode.reward, list(episode.turn_rewards.values())) == (1.0, [0.25, 0.5])
    reply = await server.server.control.get(
        f"/episodes/{episode.episode_id}/samples", headers={"accept": "application/json"}
    )
    given = {
        span["turn_id"]: reward
        for sample in reply.json()["samples"]
        for span, reward in zip(sample["turn_spans"], sample["turn_rewards"], strict=False)
        if reward is not None
    }
    assert given == episode.turn_rewards


async def wait_for_status(stage: Stage, episode: dict[str, Any], status: str) -> None:
    async def has_it() -> bool:
        return bool((await stage.get(episode))["status"] == status)

    await wait_until(has_it)


@pytest.mark.slow
async def test_rewards_of_turns_outlive_a_server_that_dies_while_it_grades(
    tiny_model: Path, tmp_path: Path
) -> None:
    sources = (str(Path(__file__).with_name("stepping_worlds.py")),)
    killed = tmp_path / "killed"

    async def agent(agent: WorldAgent) -> None:
        await agent.call("go", reward=0.25)
        await agent.call("wait_for", path=str(killed))

    async with staged(tiny_model, tmp_path / "data", tasks={"sources": sources}) as stage:
        created = await stage.episode(task={"id": "slow"})
        await wait_for_status(stage, created, "running")
        async with stage.agent(created) as model:
            await model.chat.completions.create(model="m", messages=[{"role": "user", "content": "Go."}])
        await play_agent(agent, "", created["tool_url"], created["episode_key"])
        [turn] = (await stage.get(created, "/turns"))["turns"]
        async with anyio.create_task_group() as group:
            group.start_soon(stage.post, created, "finish")
            await wait_for_status(stage, created, "grading")
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
            (tmp_path / "copy").rename(killed)  # what a kill would leave; and the world goes on
    async with staged(tiny_model, killed) as stage:
        found = await stage.get(created)
        assert (found["status"], found["turn_rewards"]) == ("failed", {turn["turn_id"]: 0.25})


async def test_a_step_reward_that_is_no_number_is_no_way_to_have_no_reward(server: WorldServer) -> None:
    episode = await played(server, [("odd", {})])
    assert (episode.reward, episode.turn_rewards) == (0.0, {})
    assert "step_reward is nan" in episode.grading["summary"][0]
