"""OpenEnv over HTTP: every request names its episode; JSON-RPC on ``/mcp`` for trainers and standard clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openenv_support import ANSWER, REPLY_S, TASK, base_url, ended, wired

from control_support import Door, OpenDoor, one_process

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as client:
        yield client


async def step(http: httpx.AsyncClient, episode_id: str, **action: Any) -> dict[str, Any]:
    answer = await http.post("/step", json={"episode_id": episode_id, "action": action})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def rpc(http: httpx.AsyncClient, method: str, query: str = "", **params: Any) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    answer = await http.post(f"/mcp{query}", json=message)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    assert (told["jsonrpc"], told["id"]) == ("2.0", 7)
    return told


async def test_an_episode_from_reset_to_reward_with_its_state_in_full(http: httpx.AsyncClient) -> None:
    begun = (await http.post("/reset", json={"task": TASK, "metadata": {"row": 1}})).json()
    episode_id = begun["observation"]["episode_id"]
    await step(http, episode_id, type="generate", prompt="Hello", max_tokens=4)
    await step(http, episode_id, type="call_tool", tool_name="submit", arguments={"answer": ANSWER})
    last = await step(http, episode_id, type="finish")
    assert (last["done"], last["reward"]) == (True, 1.0)
    state = (await http.get("/state", params={"episode_id": episode_id})).json()
    assert (state["step_count"], state["status"], state["reward"], state["turns"]) == (3, "completed", 1.0, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/reset", "{", 400, "JSON"),
        ("/reset", "[]", 400, "object"),
        ("/reset", '{"task_id": "no-such-task"}', 422, "no-such-task"),
        ("/reset", '{"task": {"instruction": "x"}, "colour": 1}', 422, "colour"),
        ("/step", '{"action": {"type": "wait"}}', 422, "episode_id"),
        ("/step", '{"episode_id": "e", "action": {"type": "dance"}}', 422, "action.type"),
        ("/step", '{"episode_id": "nobody", "action": {"type": "wait"}}', 404, "nobody"),
    ],
)
async def test_what_cannot_be_done_has_the_control_door_s_error(
    http: httpx.AsyncClient, path: str, body: str, status: int, said: str
) -> None:
    answer = await http.post(path, content=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


async def test_without_an_episode_there_are_tools_and_an_empty_state(http: httpx.AsyncClient) -> None:
    tools = (await http.post("/step", json={"action": {"type": "list_tools"}})).json()["observation"]["tools"]
    assert "submit" in {tool["name"] for tool in tools}
    assert (await http.get("/state")).json()["episode_id"] is None


async def test_an_episode_of_rest_can_be_waited_for_but_not_played(http: httpx.AsyncClient) -> None:
    created = (await http.post("/episodes", json={"task": TASK})).json()
    action = {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "1"}}
    refused = await http.post("/step", json={"episode_id": created["episode_id"], "action": action})
    assert refused.status_code == 409
    assert (await step(http, created["episode_id"], type="finish"))["done"] is True


async def test_a_caller_that_hangs_up_takes_its_step_with_it_and_nothing_else(door: Door) -> None:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        episode_id = (await http.post("/reset", json={"task": TASK})).json()["observation"]["episode_id"]
        body = {"episode_id": episode_id, "action": {"type": "wait", "timeout_s": 60}}
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/step", json=body, timeout=0.2)
        assert (await http.get("/state", params={"episode_id": episode_id})).json()["status"] == "running"
        await step(http, episode_id, type="finish")


async def test_schema_and_metadata_tell_what_there_is(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/schema")).json()
    assert {"type", "tool_name", "arguments", "messages", "timeout_s"} <= schema["action"]["properties"].keys()
    assert {"tools", "result", "message", "status"} <= schema["observation"]["properties"].keys()
    assert {"episode_id", "step_count", "status", "reward"} <= schema["state"]["properties"].keys()
    assert (await http.get("/metadata")).json()["name"] == "turnstile"


async def test_json_rpc_sessions_are_detached_episodes(http: httpx.AsyncClient, door: Door) -> None:
    session = (await rpc(http, "openenv/session/create", task=TASK))["result"]["session_id"]
    listed = await rpc(http, "tools/list", session_id=session)
    assert [tool["name"] for tool in listed["result"]["tools"]] == ["submit"]
    called = await rpc(http, "tools/call", session_id=session, name="submit", arguments={"answer": ANSWER})
    assert called["result"]["data"] == called["result"]["content"][0]["text"]
    assert (await rpc(http, "openenv/session/close", session_id=session))["result"]["closed"] is True
    shown = (await http.get(f"/episodes/{session}")).json()
    assert (shown["status"], shown["reward"]) == ("completed", 1.0)


async def test_a_session_in_which_nothing_was_done_is_cancelled(http: httpx.AsyncClient, door: Door) -> None:
    session = (await rpc(http, "openenv/session/create", task=TASK))["result"]["session_id"]
    await rpc(http, "tools/list", session_id=session)
    await rpc(http, "openenv/session/close", session_id=session)
    assert await ended(door, session) == "cancelled"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", -32700),
        ("{}", -32600),
        ("[]", -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "dance"}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": []}', None),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": [1]}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "submit"}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"session_id": "nobody"}}', -32602),
    ],
)
async def test_json_rpc_errors_have_their_codes(http: httpx.AsyncClient, body: str, code: int | None) -> None:
    answer = await http.post("/mcp", content=body)
    assert answer.status_code == 200
    assert answer.json().get("error", {}).get("code") == code


async def test_json_rpc_lists_all_tools_where_no_episode_is_named(http: httpx.AsyncClient) -> None:
    tools = (await rpc(http, "tools/list"))["result"]["tools"]
    assert {"bash", "submit"} <= {tool["name"] for tool in tools}
    assert all(tool["inputSchema"]["type"] == "object" for tool in tools)


async def test_a_notification_is_accepted_without_an_answer(http: httpx.AsyncClient) -> None:
    answer = await http.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (answer.status_code, answer.content) == (202, b"")


async def test_a_standard_mcp_client_plays_the_episode_that_the_address_names(door: Door) -> None:
    async with wired(door) as wire:
        episode_id = (await wire.reset(detached=True))["episode_id"]
    url = f"{base_url(door)}/mcp?episode_id={episode_id}"
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
        with anyio.fail_after(REPLY_S):
            about = await session.initialize()
            assert about.server_info.name == "turnstile"
            assert [tool.name for tool in (await session.list_tools()).tools] == ["submit"]
            called = await session.call_tool("submit", {"answer": ANSWER})
            assert called.is_error is False
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        assert (await step(http, episode_id, type="finish"))["reward"] == 1.0


@pytest.mark.slow
@one_process
async def test_ended_episodes_are_kept_up_to_the_bound_and_open_ones_always(open_door: OpenDoor) -> None:
    with open_door(openenv={"kept": 1}) as door:
        async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
            ids = []
            for number in range(4):
                begun = (await http.post("/reset", json={"task": TASK})).json()
                ids.append(begun["observation"]["episode_id"])
                if number:
                    await step(http, ids[-1], type="finish")
            counts = [
                (await http.get("/state", params={"episode_id": episode_id})).json()["step_count"]
                for episode_id in ids[1:]
            ]
            assert counts == [0, 1, 1]
            submit = {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": ANSWER}}
            assert (await step(http, ids[0], **submit))["observation"]["is_error"] is False
