"""What is wrong with the framework's own server does not show here (``docs/openenv.md`` lists it)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openenv_support import ANSWER, REPLY_S, TASK, Wire, base_url, ended, wired
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from control_support import Door, OpenDoor

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def paused(door: Door) -> Any:
    """The engine answers nothing until the test is over."""
    httpx.post(f"{base_url(door)}/engine/pause", json={"mode": "in_place"}).raise_for_status()
    yield
    httpx.post(f"{base_url(door)}/engine/resume").raise_for_status()


async def test_dropping_the_socket_cancels_the_running_step_and_the_episode(door: Door, paused: None) -> None:
    async with wired(door) as wire:
        episode_id = (await wire.reset())["episode_id"]
        await wire.send({"type": "step", "data": {"type": "generate", "prompt": "x"}})
        wire.connection.transport.abort()
    assert await ended(door, episode_id) == "cancelled"


async def test_a_close_frame_is_heeded_while_a_step_runs(door: Door, paused: None) -> None:
    async with wired(door) as wire:
        episode_id = (await wire.reset())["episode_id"]
        await wire.send({"type": "step", "data": {"type": "generate", "prompt": "x"}})
        await wire.send({"type": "close"})
        with pytest.raises(ConnectionClosed) as closed:
            await wire.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
    assert await ended(door, episode_id) == "cancelled"


async def test_a_detached_episode_outlives_its_socket_and_goes_on_elsewhere(door: Door) -> None:
    async with wired(door) as wire:
        episode_id = (await wire.reset(detached=True))["episode_id"]
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        action = {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": ANSWER}}
        told = (await http.post("/step", json={"episode_id": episode_id, "action": action})).json()
        assert (told["observation"]["status"], told["observation"]["step"]) == ("running", 1)
        last = await http.post("/step", json={"episode_id": episode_id, "action": {"type": "finish"}})
        assert last.json()["reward"] == 1.0


async def test_reset_gives_up_the_episode_before(door: Door) -> None:
    async with wired(door) as wire:
        first = (await wire.reset())["episode_id"]
        second = (await wire.reset())["episode_id"]
        assert await ended(door, first) == "cancelled"
        assert (await wire.ask({"type": "state"}))["data"]["episode_id"] == second


async def test_a_step_has_the_time_it_asks_for_and_says_when_it_is_over(door: Door, paused: None) -> None:
    async with wired(door) as wire:
        await wire.reset()
        told = await wire.step(type="generate", prompt="x", timeout_s=0.2)
        assert told["observation"]["error"]["error_type"] == "timeout"
        assert told["done"] is False


@pytest.mark.thorough
async def test_a_step_may_last_longer_than_the_framework_s_30_seconds(door: Door, paused: None) -> None:
    async with wired(door) as wire:
        await wire.reset()
        await wire.send({"type": "step", "data": {"type": "generate", "prompt": "x", "max_tokens": 2}})
        await anyio.sleep(35)  # by the framework's own clock
        async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as http:
            (await http.post("/engine/resume")).raise_for_status()
        told = (await wire.receive())["data"]
        assert told["observation"]["message"]["role"] == "assistant"


async def test_sockets_that_go_leave_no_slot_taken_and_a_full_server_says_so(open_door: OpenDoor) -> None:
    with open_door(episodes={"max_open": 2}) as door:
        for _ in range(4):
            async with wired(door) as gone:
                episode_id = (await gone.reset())["episode_id"]
                gone.connection.transport.abort()
            await ended(door, episode_id)
        async with wired(door) as late:
            async with wired(door) as first, wired(door) as second:
                freed = (await first.reset())["episode_id"]
                await second.reset()
                told = await late.ask({"type": "reset", "data": {"task": TASK}})
                assert (told["type"], told["data"]["code"]) == ("error", "CAPACITY_REACHED")
                assert told["data"]["type"] == "queue_full"
            await ended(door, freed)
            assert (await late.reset())["status"] == "running"


async def test_a_socket_too_many_is_told_so_and_closed(open_door: OpenDoor) -> None:
    with open_door(openenv={"max_sockets": 1}) as door:
        async with wired(door) as first:
            await first.ask({"type": "state"})
            async with wired(door) as second:
                told = await second.receive()
                assert told["data"]["code"] == "CAPACITY_REACHED"
                assert (told["data"]["active_sessions"], told["data"]["max_sessions"]) == (1, 1)
                with pytest.raises(ConnectionClosed):
                    await second.receive()
        with anyio.fail_after(REPLY_S):
            while True:
                async with wired(door) as third:
                    if (await third.ask({"type": "state"}))["type"] == "state":
                        break


async def test_nothing_passes_without_the_key(door: Door) -> None:
    url = door.url.replace("http://", "ws://")
    for path in ("/ws", "/k/wrong-key-0123456789/ws"):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(url + path, proxy=None):
                pass
        assert refused.value.response.status_code == 403
    async with connect(
        f"{url}/ws", proxy=None, additional_headers={"authorization": f"Bearer {door.key}"}
    ) as open_:
        assert (await Wire(open_).ask({"type": "state"}))["type"] == "state"
    async with httpx.AsyncClient(base_url=door.url, timeout=60) as stranger:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state"), ("POST", "/mcp")):
            assert (await stranger.request(method, path, json={})).status_code == 401


async def test_a_page_of_a_stranger_reaches_neither_mcp_nor_a_socket(door: Door) -> None:
    evil, key = "http://evil.example.com", {"authorization": f"Bearer {door.key}"}
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with httpx.AsyncClient(base_url=door.url, headers=key, timeout=60) as http:
        for header, status, kind in (
            ({"origin": evil}, 403, "origin_not_allowed"),
            ({"origin": "null"}, 403, "origin_not_allowed"),
            ({"host": "evil.example.com"}, 421, "host_not_allowed"),
        ):
            refused = await http.post("/mcp", json=ping, headers=header)
            assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
        assert (await http.post("/mcp", json=ping, headers={"origin": "http://localhost:6274"})).status_code == 200
    for path in ("/ws", "/mcp"):
        url = f"{door.url.replace('http://', 'ws://')}/k/{door.key}{path}"
        with pytest.raises(InvalidStatus) as closed:
            async with connect(url, proxy=None, additional_headers={"origin": evil}):
                pass
        assert closed.value.response.status_code == 403
        async with connect(url, proxy=None, additional_headers={"origin": door.url}):
            pass


async def test_the_key_of_a_socket_is_in_no_log(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with wired(door) as wire:
        await wire.ask({"type": "state"})
    assert "/ws" in caplog.text
    ours = [record for record in caplog.records if not record.name.startswith(("websockets.client", "httpcore"))]
    assert not any(door.key in record.getMessage() for record in ours)


def test_the_server_starts_without_the_package_in_memory() -> None:
    program = "import sys, turnstile_server.app; assert not {'openenv', 'gradio'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=REPLY_S)


class Served:
    """``turnstile serve`` as a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url


@pytest.fixture
def served(tmp_path: Path, tiny_model: Path) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    command = [sys.executable, "-m", "turnstile", "serve", "--model", str(tiny_model), "--data-dir", str(tmp_path)]
    command += ["--control-port", "0", "--agent-port", "0", "--durability", "process"]
    key = "k" * 20
    process = subprocess.Popen(
        command, env={**inherited, "TURNSTILE_CONTROL_KEY": key}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        yield Served(process, f"{ready['control_url']}/k/{key}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.thorough
async def test_the_server_stops_at_once_with_sockets_open(served: Served) -> None:
    async with connect(served.url.replace("http://", "ws://") + "/ws", proxy=None) as connection:
        wire = Wire(connection)
        await wire.reset()
        await wire.send({"type": "step", "data": {"type": "wait", "timeout_s": 60}})
        os.kill(served.process.pid, signal.SIGINT)
        with pytest.raises(ConnectionClosed) as closed:
            await wire.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
    assert await anyio.to_thread.run_sync(served.process.wait, REPLY_S) == 0
