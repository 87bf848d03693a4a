"""The clients that OpenEnv publishes, unchanged, each from reset to reward."""

from __future__ import annotations

import anyio.to_thread
import httpx
import pytest
from openenv.core import GenericEnvClient, MCPToolClient
from openenv_support import ANSWER, TASK, base_url

from control_support import Door
from turnstile_server.control.openenv.openenv_types import TurnstileAction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_the_generic_client_drives_an_episode_to_its_reward(door: Door) -> None:
    async with GenericEnvClient(base_url=base_url(door)) as env:
        begun = await env.reset(task=TASK, seed=1)
        assert begun.observation["instruction"] == TASK["instruction"]
        replied = await env.step({"type": "generate", "prompt": begun.observation["instruction"], "max_tokens": 4})
        assert replied.observation["message"]["role"] == "assistant"
        await env.step({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": ANSWER}})
        ended = await env.step({"type": "finish"})
        assert (ended.reward, ended.done) == (1.0, True)
        assert (await env.state())["status"] == "completed"


async def test_the_tool_client_drives_an_episode_to_its_reward(door: Door) -> None:
    async with MCPToolClient(base_url=base_url(door)) as env:
        await env.reset(task=TASK)
        assert [tool.name for tool in await env.list_tools()] == ["submit"]
        assert "received" in await env.call_tool("submit", answer=ANSWER)
        with pytest.raises(RuntimeError, match="tool_not_found"):
            await env.call_tool("no_such_tool")
        async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
            ended = await http.post(f"/episodes/{(await env.state()).episode_id}/finish")
        assert ended.json()["reward"] == 1.0
        # The client keeps of a result what it knows; the end of the episode is in what it keeps.
        told = await env.step(TurnstileAction(type="wait"))
        assert (told.reward, told.done) == (1.0, True)


def _blocking(door: Door) -> tuple[float | None, bool]:
    with GenericEnvClient(base_url=base_url(door)).sync() as env:
        env.reset(task=TASK)
        env.step({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "no"}})
        ended = env.step({"type": "finish"})
        return ended.reward, ended.done


async def test_the_blocking_client_too(door: Door) -> None:
    assert await anyio.to_thread.run_sync(_blocking, door) == (0.0, True)


async def test_a_refusal_reaches_the_client_as_its_error(door: Door) -> None:
    async with GenericEnvClient(base_url=base_url(door)) as env:
        with pytest.raises(RuntimeError, match=r"name one task.*VALIDATION_ERROR"):
            await env.reset(task=TASK, task_id="add-slugify")
