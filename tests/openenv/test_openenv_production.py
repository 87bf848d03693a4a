"""Production mode: tools over ``/mcp``, nothing of the simulation on any path; the published client end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest
from openenv.core import GenericEnvClient, MCPToolClient
from openenv_support import ANSWER, REPLY_S, TASK, base_url, ended, wired

from control_support import Door, OpenDoor

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    file: Path = tmp_path_factory.mktemp("tasks") / "one.yaml"
    file.write_text("- {id: six-times-seven, instruction: 6 * 7?, answer: {kind: exact, value: '42'}}\n")
    return {"sources": [str(file)]}


@pytest.fixture(scope="module")
def production(open_door: OpenDoor, tasks: dict[str, list[str]]) -> Iterator[Door]:
    with open_door(openenv={"mode": "production"}, tasks=tasks) as running:
        yield running


@pytest.fixture(scope="module")
def simulation(open_door: OpenDoor, tasks: dict[str, list[str]]) -> Iterator[Door]:
    with open_door(tasks=tasks) as running:
        yield running


def client(door: Door) -> MCPToolClient:
    made = MCPToolClient(base_url=base_url(door))
    made.use_production_mode = True
    return made


async def episodes(door: Door) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        found: list[dict[str, Any]] = (await http.get("/episodes")).json()["episodes"]
        return found


@pytest.mark.parametrize("mode", ["simulation", "production"])
async def test_the_tool_client_s_production_mode_lists_calls_and_closes(
    production: Door, simulation: Door, mode: str
) -> None:
    server = production if mode == "production" else simulation
    async with client(server) as env:
        names = [tool.name for tool in await env.list_tools()]
        assert "submit" in names
        assert "received" in await env.call_tool("submit", answer=ANSWER)
        with pytest.raises(RuntimeError, match="there is no tool 'dance'"):
            await env.call_tool("dance")
        [newest, *_] = await episodes(server)
        assert newest["status"] == "running"
    assert await ended(server, newest["episode_id"]) == "completed"
    [newest, *_] = await episodes(server)
    assert (newest["task"]["id"], newest["reward"]) == ("six-times-seven", 1.0)


def _blocking(door: Door) -> Any:
    with client(door).sync() as env:
        assert env.list_tools()
        return env.call_tool("submit", answer=ANSWER)


async def test_the_blocking_tool_client_too(production: Door) -> None:
    assert "received" in await anyio.to_thread.run_sync(_blocking, production)


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset"), ("POST", "/step"), ("GET", "/state")])
async def test_simulation_is_no_route(production: Door, method: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=base_url(production), timeout=REPLY_S) as http:
        assert (await http.request(method, path, json={})).status_code == 404
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert path not in paths
        assert {"/mcp", "/health", "/metadata", "/schema"} <= paths.keys()


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "reset", "data": {"task": TASK}},
        {"type": "step", "data": {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "1"}}},
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "state"},
        {"type": "state", "more": 1},
    ],
)
async def test_simulation_is_refused_on_the_socket_too(production: Door, frame: dict[str, Any]) -> None:
    before = await episodes(production)
    async with wired(production) as wire:
        told = await wire.ask(frame)
        assert (told["type"], told["data"]["code"]) == ("error", "UNKNOWN_TYPE")
        assert "production mode" in told["data"]["message"]
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert (await wire.ask({"type": "mcp", "data": ping}))["data"]["result"] == {}
    assert await episodes(production) == before


async def test_the_generic_client_is_told_why_it_cannot_reset(production: Door) -> None:
    async with GenericEnvClient(base_url=base_url(production)) as env:
        with pytest.raises(RuntimeError, match=r"production mode \(openenv.mode\)"):
            await env.reset()
