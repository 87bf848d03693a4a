"""Whoever keeps the address and the key of an episode gets nothing more from them when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from test_whole_episodes import ended, server

pytestmark = pytest.mark.anyio

QUESTION = {"instruction": "What is 6 times 7? Submit it.", "answer": {"value": "42"}}
ASK = {"model": "m", "messages": [{"role": "user", "content": "one more"}]}
CLIENT = {"name": "late", "version": "1"}
ACCEPT = {"accept": "application/json, text/event-stream"}


def request(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def submission(answer: str) -> dict[str, Any]:
    return request("tools/call", name="submit", arguments={"answer": answer})


async def test_an_answer_after_the_end_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        episode = await stage.episode(task=QUESTION)
        headers = {**ACCEPT, "authorization": f"Bearer {episode['episode_key']}"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            hello = request("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=CLIENT)
            made = await client.post(episode["tool_url"], json=hello)
            client.headers["mcp-session-id"] = made.headers["mcp-session-id"]
            assert (await client.post(episode["tool_url"], json=submission("41"))).status_code == 200
            await stage.post(episode, "finish")
            before = await ended(stage, episode)
            assert (before["status"], before["reward"]) == ("completed", 0.0)
            for url, body in ((episode["tool_url"], submission("42")), (episode["tool_url"], hello)):
                assert (await client.post(url, json=body)).status_code == 410
            assert (await client.post(f"{episode['model_url']}/v1/chat/completions", json=ASK)).status_code == 410
        assert await stage.get(episode) == before
