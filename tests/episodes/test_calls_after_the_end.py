"""Whoever keeps the address and the key of an episode gets nothing more from them when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gate_support import Stage
from light import SOLVE, TASK
from test_whole_episodes import ended, server

pytestmark = pytest.mark.anyio

QUESTION = {"instruction": "What is 6 times 7? Submit it.", "answer": {"value": "42"}}
ASK = {"model": "m", "messages": [{"role": "user", "content": "one more"}]}
ACCEPT = {"accept": "application/json, text/event-stream"}


def submission(answer: str) -> dict[str, Any]:
    params = {"name": "submit", "arguments": {"answer": answer}}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


async def called(episode: dict[str, Any], field: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {**ACCEPT, "authorization": f"Bearer {episode['episode_key']}"}
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        return await client.post(episode[field] + path, json=body)


async def assert_closed(stage: Stage, episode: dict[str, Any]) -> None:
    """The model API and the MCP endpoint say that it has ended, and its record stays as it is."""
    before = await stage.get(episode)
    for field, path, body in (("model_url", "/v1/chat/completions", ASK), ("tool_url", "", submission("42"))):
        assert (await called(episode, field, path, body)).status_code == 410
    assert await stage.get(episode) == before


async def test_an_answer_after_the_end_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        episode = await stage.episode(task=QUESTION)
        assert (await called(episode, "tool_url", "", submission("41"))).status_code == 200
        await stage.post(episode, "finish")
        assert (await ended(stage, episode))["reward"] == 0.0
        await assert_closed(stage, episode)


async def test_a_daemon_of_the_agent_is_gone_with_its_sandbox(tiny_model: Path, tmp_path: Path) -> None:
    """It waits until the work was collected, to solve the task then."""
    later = (
        "import os, signal, time\nfor each in (signal.SIGTERM, signal.SIGHUP): signal.signal(each, signal.SIG_IGN)\n"
        f"if os.fork() == 0:\n    os.setsid()\n    time.sleep(2)\n    {SOLVE}\n    os._exit(0)\n"
    )
    async with server(tiny_model, tmp_path) as stage:
        episode = await stage.episode(task=TASK, agent="light", env={"WORK": later})
        shown = await ended(stage, episode)
        assert (shown["status"], shown["reward"]) == ("completed", 0.0), shown
        await assert_closed(stage, episode)
