"""Sessions that HTTP and a socket share, as OpenEnv's tool client uses them since 0.5: one episode in both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from openenv_support import ANSWER, TASK, Wire, base_url, ended
from websockets.asyncio.client import connect

from control_support import Door, OpenDoor, one_process

pytestmark = pytest.mark.anyio
OTHER = {"instruction": "What is six times nine?", "answer": {"kind": "exact", "value": "54"}}


@asynccontextmanager
async def attached(door: Door, session: str) -> AsyncIterator[Wire]:
    address = base_url(door).replace("http://", "ws://")
    async with connect(f"{address}/ws?session_id={session}", proxy=None) as connection:
        yield Wire(connection)


@pytest.fixture
async def http(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as client:
        yield client


async def rpc(http: httpx.AsyncClient, method: str, **params: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer: dict[str, Any] = (await http.post("/mcp", json=body)).json()
    return answer


async def opened(http: httpx.AsyncClient) -> str:
    session: str = (await rpc(http, "openenv/session/create"))["result"]["session_id"]
    return session


async def submit(http: httpx.AsyncClient, session: str) -> dict[str, Any]:
    return await rpc(http, "tools/call", session_id=session, name="submit", arguments={"answer": ANSWER})


async def refused(door: Door, session: str) -> tuple[dict[str, Any], int]:
    async with attached(door, session) as wire:
        told = await wire.receive()
        with anyio.fail_after(30):
            await wire.connection.wait_closed()
        assert wire.connection.close_code is not None
        return told["data"], wire.connection.close_code


async def test_reset_on_the_socket_and_tools_over_http_are_one_episode(
    http: httpx.AsyncClient, door: Door
) -> None:
    session = await opened(http)
    before = {each["episode_id"] for each in (await http.get("/episodes")).json()["episodes"]}
    async with attached(door, session) as wire:
        begun = await wire.reset()
        assert begun["instruction"] == TASK["instruction"]
        assert [
            each["name"] for each in (await rpc(http, "tools/list", session_id=session))["result"]["tools"]
        ] == ["submit"]
        await submit(http, session)
        state = (await wire.ask({"type": "state"}))["data"]
        assert (state["episode_id"], state["step_count"]) == (begun["episode_id"], 1)
    assert (await rpc(http, "openenv/session/close", session_id=session))["result"]["session_id"] == session
    assert await ended(door, begun["episode_id"]) == "completed"
    after = {each["episode_id"] for each in (await http.get("/episodes")).json()["episodes"]}
    assert after - before == {begun["episode_id"]} == {session}
    assert (await http.get(f"/episodes/{session}")).json()["reward"] == 1.0


async def test_a_further_reset_ends_the_episode_before_and_tools_follow_it(
    http: httpx.AsyncClient, door: Door
) -> None:
    session = await opened(http)
    async with attached(door, session) as wire:
        first = await wire.reset(task=OTHER)
        second = await wire.reset()
        assert first["episode_id"] != second["episode_id"]
        assert await ended(door, first["episode_id"]) == "cancelled"
        await submit(http, session)
    await rpc(http, "openenv/session/close", session_id=session)
    assert await ended(door, second["episode_id"]) == "completed"
    assert (await http.get(f"/episodes/{second['episode_id']}")).json()["reward"] == 1.0


async def test_a_session_outlives_its_socket_and_takes_another(http: httpx.AsyncClient, door: Door) -> None:
    session = await opened(http)
    async with attached(door, session) as wire:
        begun = await wire.reset()
    async with attached(door, session) as wire:
        assert (await wire.ask({"type": "state"}))["data"]["episode_id"] == begun["episode_id"]
        busy, code = await refused(door, session)
        assert (busy["type"], code) == ("conflict", 1008)
        assert "socket already" in busy["message"]
    await submit(http, session)
    await rpc(http, "openenv/session/close", session_id=session)
    assert await ended(door, begun["episode_id"]) == "completed"


async def test_a_close_with_a_socket_waits_for_it_and_then_the_session_is_over(
    http: httpx.AsyncClient, door: Door
) -> None:
    session = await opened(http)
    async with attached(door, session) as wire:
        begun = await wire.reset()
        assert (await rpc(http, "openenv/session/close", session_id=session))["result"] == {
            "session_id": session,
            "closed": False,
            "closing": True,
        }
        assert (await wire.ask({"type": "state"}))["data"]["done"] is False
    assert await ended(door, begun["episode_id"]) == "cancelled"
    gone, code = await refused(door, session)
    assert "was closed" in gone["message"]
    assert code == 1008
    assert "was closed" in (await submit(http, session))["error"]["message"]


async def test_a_session_without_an_episode_is_closed_and_one_that_never_was_is_refused(
    http: httpx.AsyncClient, door: Door
) -> None:
    session = await opened(http)
    assert (await rpc(http, "openenv/session/close", session_id=session))["result"]["closed"] is True
    assert (await http.get(f"/episodes/{session}")).status_code == 404
    unknown, code = await refused(door, "ep_never")
    assert (unknown["type"], code) == ("not_found", 1008)
    assert "openenv/session/create" in unknown["message"]


async def test_a_session_with_parameters_begins_at_once_and_a_socket_plays_it(
    http: httpx.AsyncClient, door: Door
) -> None:
    session = (await rpc(http, "openenv/session/create", task=TASK))["result"]["session_id"]
    assert (await http.get(f"/episodes/{session}")).json()["status"] == "running"
    async with attached(door, session) as wire:
        assert (await wire.ask({"type": "state"}))["data"]["episode_id"] == session
        following = await wire.reset()
        assert await ended(door, session) == "cancelled"
        await submit(http, session)
        assert (await wire.ask({"type": "state"}))["data"]["episode_id"] == following["episode_id"]
    await rpc(http, "openenv/session/close", session_id=session)
    assert await ended(door, following["episode_id"]) == "completed"


async def test_a_reset_and_a_call_at_the_same_time_leave_one_episode(http: httpx.AsyncClient, door: Door) -> None:
    session = await opened(http)
    async with attached(door, session) as wire:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(partial(rpc, http, "tools/list", session_id=session))
            begun = await wire.reset()
        state = (await wire.ask({"type": "state"}))["data"]
        assert (state["episode_id"], state["status"]) == (begun["episode_id"], "running")
        running = (await http.get("/episodes", params={"status": "running"})).json()["episodes"]
        assert [each["episode_id"] for each in running] == [begun["episode_id"]]
        await submit(http, session)
    await rpc(http, "openenv/session/close", session_id=session)
    assert await ended(door, begun["episode_id"]) == "completed"


@pytest.mark.slow
@one_process
async def test_sessions_are_bounded(open_door: OpenDoor) -> None:
    with open_door(openenv={"max_sessions": 1}) as door:
        async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
            session = await opened(http)
            async with attached(door, session) as wire:
                await wire.reset()
                full = (await rpc(http, "openenv/session/create"))["error"]
                assert "openenv.max_sessions" in full["message"]
            await rpc(http, "openenv/session/close", session_id=session)
            assert await ended(door, session) == "cancelled"
            left = await opened(http)
            async with attached(door, left) as wire:
                await wire.reset()
            assert "error" in await rpc(http, "openenv/session/create"), "its episode runs on"
            await http.post(f"/episodes/{left}/cancel")
            assert await ended(door, left) == "cancelled"
            assert await opened(http) != left, "nobody closed it, and it plays no more"
