"""Numbers of every size over OpenEnv: exact, or refused in the caller's own shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openenv_support import ANSWER, TASK, base_url, wired

from control_support import Door

pytestmark = pytest.mark.anyio

SEED = 2**128 - 1
METADATA: dict[str, Any] = {"entropy": SEED, "deep": [-(2**200)], "float": 1e300}

BAD_RESETS = [
    '"seed": N'.replace("N", str(2**128)),
    '"seed": 1e999',
    '"attempt": N'.replace("N", str(2**64)),
    '"sampling": {"top_k": N}'.replace("N", str(2**70)),
    '"limits": {"wall_s": 1e999}',
    '"metadata": {"n": 1e999}',
    '"metadata": {"n": N}'.replace("N", str(2**1024)),
    '"self": 1',
]


async def shown(door: Door, episode_id: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
        return dict((await http.get(f"/episodes/{episode_id}")).json())


async def test_wide_integers_arrive_exactly_by_every_way_in(door: Door) -> None:
    fields: dict[str, Any] = {"task": TASK, "seed": SEED, "metadata": METADATA}
    async with wired(door) as wire:
        by_socket = (await wire.reset(**fields))["episode_id"]
        seen = await shown(door, by_socket)
        assert (seen["seed"], seen["metadata"]) == (SEED, METADATA)
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
        by_http = (await http.post("/reset", json=fields)).json()["observation"]["episode_id"]
        call = {"jsonrpc": "2.0", "id": 2**100, "method": "openenv/session/create", "params": fields}
        answer = (await http.post("/mcp", json=call)).json()
        assert answer["id"] == 2**100
        for episode_id in (by_http, answer["result"]["session_id"]):
            seen = await shown(door, episode_id)
            assert (seen["seed"], seen["metadata"]) == (SEED, METADATA)
            assert (await http.post(f"/episodes/{episode_id}/cancel")).status_code == 200


@pytest.mark.parametrize("field", BAD_RESETS)
async def test_a_reset_beyond_a_range_is_refused_by_name(door: Door, field: str) -> None:
    body = '{"task": {"instruction": "t"}, FIELD}'.replace("FIELD", field)
    name = field.split('"')[1]
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
        response = await http.post("/reset", content=body)
        assert response.status_code == 422, response.text
        assert name in response.json()["error"]["message"]
        rpc = '{"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": BODY}'
        answer = (await http.post("/mcp", content=rpc.replace("BODY", body))).json()
        assert answer["error"]["code"] == -32602, answer
        assert name in answer["error"]["message"]
    async with wired(door) as wire:
        told = await wire.ask('{"type": "reset", "data": BODY}'.replace("BODY", body))
        assert (told["type"], told["data"]["code"]) == ("error", "VALIDATION_ERROR"), told
        assert name in told["data"]["message"]
        assert (await wire.reset())["episode_id"]  # the socket goes on


@pytest.mark.parametrize("number", ["NaN", "Infinity", "9" * 5000])
async def test_what_is_no_json_number_is_refused_as_such(door: Door, number: str) -> None:
    body = '{"task": {"instruction": "t"}, "seed": N}'.replace("N", number, 1)
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
        assert (await http.post("/reset", content=body)).status_code == 400
        rpc = '{"jsonrpc": "2.0", "id": N, "method": "ping"}'.replace("N", number)
        assert (await http.post("/mcp", content=rpc)).json()["error"]["code"] == -32700
    async with wired(door) as wire:
        told = await wire.ask('{"type": "reset", "data": BODY}'.replace("BODY", body))
        assert (told["type"], told["data"]["code"]) == ("error", "INVALID_JSON"), told


BAD_STEPS = [
    ("max_tokens", '"type": "generate", "prompt": "x", "max_tokens": N', str(2**64)),
    ("timeout_s", '"type": "generate", "prompt": "x", "timeout_s": N', "1e999"),
    ("timeout_s", '"type": "wait", "timeout_s": N', str(2**2000)),
    ("messages", '"type": "generate", "messages": [{"role": "user", "content": "x", "n": N}]', "1e999"),
    ("tools", '"type": "generate", "prompt": "x", "tools": [{"n": N}]', str(2**1024)),
    ("arguments", '"type": "call_tool", "tool_name": "submit", "arguments": {"answer": N}', "1e999"),
    ("completion_ids", '"type": "generate", "completion_ids": [N], "logprobs": [0]', str(2**31)),
    ("logprobs", '"type": "generate", "completion_ids": [1], "logprobs": [N]', "1e999"),
]


@pytest.mark.parametrize(("name", "template", "number"), BAD_STEPS)
async def test_a_step_beyond_a_range_is_refused_by_name(door: Door, name: str, template: str, number: str) -> None:
    action = "{" + template.replace("N", number) + "}"
    async with wired(door) as wire:
        await wire.reset()
        told = await wire.ask('{"type": "step", "data": ACTION}'.replace("ACTION", action))
        assert (told["type"], told["data"]["code"]) == ("error", "VALIDATION_ERROR"), told
        assert name in told["data"]["message"]
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
        response = await http.post(
            "/step", content='{"episode_id": "ep_1", "action": ACTION}'.replace("ACTION", action)
        )
        assert response.status_code == 422, response.text
        assert name in response.json()["error"]["message"]


async def test_wide_integers_in_a_step_are_no_failure_of_the_server(door: Door) -> None:
    wide = 2**100
    async with wired(door) as wire:
        await wire.reset()
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": wide}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        data = await wire.step(type="generate", prompt="x", tools=[tool], max_tokens=2)
        assert data["observation"]["message"]["role"] == "assistant"
        said = await wire.step(type="call_tool", tool_name="submit", arguments={"answer": ANSWER, "n": wide})
        assert said["observation"]["result"] or said["observation"]["error"]
