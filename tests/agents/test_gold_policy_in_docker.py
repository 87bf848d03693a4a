"""Every shipped task is solved by an agent in a sandbox whose model says the task's known solution."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from anyio import to_thread

from scripted.gold import gold_script
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile.models import Episode
from turnstile_server.demo.local_server import serve
from turnstile_server.tasks.registry import load_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

AT_ONCE = 2


async def test_each_task_gives_its_gold_policy_the_full_reward_and_exact_tokens(
    tiny_model: Path, tmp_path: Path, docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_SANDBOXES__KIND", "docker")
    monkeypatch.setenv("TURNSTILE_SANDBOXES__DOCKER_IMAGE", docker_image)
    tasks = list(await to_thread.run_sync(load_tasks, ()))
    assert len(tasks) >= 10
    slots = asyncio.Semaphore(AT_ONCE)
    async with (
        scripted_policy(tiny_model, gold_script(tasks)) as url,
        serve(tiny_model, tmp_path / "data", engine_url=url) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):

        async def play(task_id: str) -> Episode:
            async with slots, await client.create_episode({"id": task_id}, agent="tool-loop") as episode:
                ended = await episode.wait(600)
                assert (await episode.audit()).passed, task_id
                return ended

        async with asyncio.TaskGroup() as group:
            playing = {task.id: group.create_task(play(task.id)) for task in tasks}
    ended = {name: one.result() for name, one in playing.items()}
    assert {name: (one.reward, one.error, one.stats.breaks) for name, one in ended.items()} == {
        task.id: (1.0, None, {}) for task in tasks
    }
    for one in ended.values():
        assert one.stats.trained_tokens == one.stats.sampled_tokens > 0
