"""Malformed and odd bodies: each gets 200 or a refusal that names a reason, never a fault of the server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conversation import TOOL, raw, reply_ids, turns, url
from gate_support import says, staged
from mutations import mutated

pytestmark = pytest.mark.anyio

VALID: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "r",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "t"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "stream": False,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
    "stop": ["x"],
    "temperature": 1,
    "n": 1,
    "response_format": {"type": "text"},
    "metadata": {"k": "v"},
}


@pytest.mark.parametrize("seed", range(4))
async def test_no_body_makes_the_gate_fail(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    async with staged(tiny_model, tmp_path, gate={"max_refusals": 10**6}) as stage:
        stage.engine.answers = [says(reply_ids(stage, "ok"))]
        episode = await stage.episode()
        served = 0
        async with raw(episode) as client:
            for _ in range(150):
                content = json.dumps(mutated(pick, VALID))
                response = await client.post(url(episode), content=content)
                assert response.status_code in (200, 400), (response.text, content)
                if response.status_code == 400:
                    assert response.json()["error"]["code"] == "invalid_request", (response.text, content)
                served += response.status_code == 200
        assert len(await turns(stage, episode)) == served > 20
        report = (await stage.control.post(f"/episodes/{episode['episode_id']}/audit")).json()
        assert report["passed"], report["invariants"]
