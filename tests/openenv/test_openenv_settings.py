"""Settings of OpenEnv's routes that no other suite turns."""

from __future__ import annotations

import asyncio
import json

import anyio
import pytest
from openenv_support import REPLY_S, TASK, base_url, ended, wired

from control_support import OpenDoor

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_an_answer_is_held_back_for_no_longer_than_wait_s(open_door: OpenDoor) -> None:
    with open_door(openenv={"wait_s": 0.05}) as door:
        async with wired(door) as wire:
            await wire.reset()
            assert (await wire.step(type="wait"))["done"] is False


@pytest.mark.slow
async def test_a_peer_that_answers_no_ping_is_gone(open_door: OpenDoor) -> None:
    with open_door(openenv={"ping_interval_s": 0.05, "ping_timeout_s": 0.2}) as door:
        host, port = door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = base_url(door).removeprefix(door.url) + "/ws"
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        handshake = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{upgrade}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
        writer.write(handshake.encode())
        await reader.readuntil(b"\r\n\r\n")
        reset = json.dumps({"type": "reset", "data": {"task": TASK, "episode_id": "no-pong"}}).encode()
        # One masked text frame with a 16-bit length (RFC 6455, section 5.2); the mask is zero.
        writer.write(bytes([0x81, 0xFE, *len(reset).to_bytes(2, "big"), 0, 0, 0, 0]) + reset)
        with anyio.fail_after(REPLY_S):
            while b"no-pong" not in (read := await reader.read(1 << 16)):
                assert read, "the socket was closed before reset was answered"
        assert await ended(door, "no-pong") == "cancelled"
        writer.close()
