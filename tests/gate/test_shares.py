"""Bounds that are taken before a body is read, and that no episode can use up for the others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketStream
from conversation import body, raw, reply_ids, url
from gate_support import Stage, says, staged
from starlette.types import Message

from turnstile_server.errors import RequestTimeout
from turnstile_server.http.fair_share import FairShare
from turnstile_server.http.intake import BodyReader, Intake

pytestmark = pytest.mark.anyio

MIB = 1 << 20
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
    "count": "/v1/messages/count_tokens",
    "mcp": "/mcp",
}


@asynccontextmanager
async def half_sent(
    episode: dict[str, Any],
    *,
    size: int = 1000,
    sent: bytes = b"{",
    path: str = PATHS["chat"],
    chunked: bool = False,
) -> AsyncIterator[SocketStream]:
    """A connection with a request of the episode whose body is not whole."""
    at = urlsplit(episode["model_url"])
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    key = f"x-api-key: {episode['episode_key']}"
    head = f"POST {at.path}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{key}\r\n{length}\r\n\r\n"
    async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
        await connection.send(head.encode())
        await connection.send(b"%x\r\n%b\r\n" % (len(sent), sent) if chunked else sent)
        yield connection


async def answered(connection: SocketStream) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the answer on a connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += await connection.receive()
    head, _, rest = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(rest) < int(headers["content-length"]):
        rest += await connection.receive()
    return int(status.split()[1]), headers, json.loads(rest)


async def call(stage: Stage, episode: dict[str, Any]) -> int:
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    async with raw(episode) as client:
        return (await client.post(url(episode), json=body())).status_code


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_half_sent_bodies_of_one_episode_refuse_only_its_own_calls(
    tiny_model: Path, tmp_path: Path, path: str
) -> None:
    limits = {"max_calls": 8, "max_calls_per_episode": 6, "body_stall_s": 0.5}
    tools = {"max_requests_per_episode": 4}
    async with staged(tiny_model, tmp_path, gate=limits, tools=tools) as stage, AsyncExitStack() as stack:
        greedy, other = await stage.episode(), await stage.episode()
        connections = [await stack.enter_async_context(half_sent(greedy, path=path)) for _ in range(12)]
        with anyio.fail_after(30):
            status, headers, _ = await answered(connections[-1])
        assert (status, headers.get("retry-after")) == (429, "1")
        for _ in range(5):
            assert await call(stage, other) == 200


async def test_many_greedy_episodes_leave_room_for_another_one(tiny_model: Path, tmp_path: Path) -> None:
    limits = {"max_calls": 16, "max_calls_per_episode": 8, "body_stall_s": 5}
    async with staged(tiny_model, tmp_path, gate=limits) as stage, AsyncExitStack() as stack:
        for _ in range(6):
            greedy = await stage.episode()
            for _ in range(8):
                await stack.enter_async_context(half_sent(greedy))
        for _ in range(3):
            assert await call(stage, await stage.episode()) == 200


@pytest.mark.parametrize("path", [PATHS[kind] for kind in ("chat", "anthropic", "count", "mcp")])
async def test_declared_bytes_beyond_the_episodes_limit_are_refused_before_they_are_read(
    tiny_model: Path, tmp_path: Path, path: str
) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_per_episode": 3 * MIB, "body_stall_s": 1.5}
    async with staged(tiny_model, tmp_path, gate=limits, tools={"max_body_bytes": 2 * MIB}) as stage:
        episode, other = await stage.episode(), await stage.episode()
        async with half_sent(episode, size=2 * MIB, path=path) as first:
            await anyio.sleep(0.05)
            async with half_sent(episode, size=2 * MIB, path=path) as second:
                with anyio.fail_after(30):
                    status, headers, said = await answered(second)
                assert (status, headers["retry-after"]) == (429, "1")
                assert path == PATHS["mcp"] or headers["x-should-retry"] == "true"
                assert "max_body_bytes_per_episode" in json.dumps(said)
            assert await call(stage, other) == 200
            with anyio.fail_after(30):
                assert (await answered(first))[0] == 408
        assert await call(stage, episode) == 200


async def test_chunks_are_reserved_as_they_come(tiny_model: Path, tmp_path: Path) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_per_episode": 3 * MIB, "body_stall_s": 2}
    async with staged(tiny_model, tmp_path, gate=limits) as stage:
        episode = await stage.episode()
        async with (
            half_sent(episode, size=2 * MIB),
            half_sent(episode, sent=b" " * (3 * MIB // 2), chunked=True) as second,
        ):
            await second.send(b"0\r\n\r\n")
            with anyio.fail_after(30):
                status, _, said = await answered(second)
            assert (status, said["error"]["code"]) == (429, "too_many_bytes")


async def test_bodies_of_many_episodes_are_bounded_over_all_and_leave_room_for_small_ones(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_total": 8 * MIB, "body_stall_s": 1.5}
    async with staged(tiny_model, tmp_path, gate=limits) as stage, AsyncExitStack() as stack:
        greedy = [await stage.episode() for _ in range(8)]
        other = await stage.episode()
        connections = [await stack.enter_async_context(half_sent(one, size=2 * MIB)) for one in greedy]
        assert await call(stage, other) == 200
        statuses = []
        with anyio.fail_after(30):
            for connection in connections:
                statuses.append((await answered(connection))[0])
        assert statuses.count(429) == 5, statuses
        assert statuses.count(408) == 3, statuses


async def test_a_body_that_stops_coming_is_408_and_one_that_comes_slowly_is_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"body_stall_s": 0.6, "min_body_rate": 100, "body_timeout_s": 30}
    async with staged(tiny_model, tmp_path, gate=limits) as stage:
        episode = await stage.episode()
        stage.engine.answers = [says(reply_ids(stage, "fine"))]
        whole = json.dumps(body()).encode().ljust(300)
        began = time.monotonic()
        async with half_sent(episode, size=300, sent=whole[:30]) as stalled:
            status, headers, said = await answered(stalled)
        assert (status, said["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
        assert "body_stall_s" in said["error"]["message"]
        assert 0.5 < time.monotonic() - began < 15
        async with half_sent(episode, size=300, sent=whole[:30]) as slow:
            for start in range(30, 300, 30):
                await anyio.sleep(0.1)
                await slow.send(whole[start : start + 30])
            assert (await answered(slow))[0] == 200


@dataclass(frozen=True)
class Bounds:
    max_body_bytes_total: int = 1000
    max_body_bytes: int = 1000
    body_timeout_s: float = 0.9
    body_stall_s: float = 0.6
    min_body_rate: int = 100


@pytest.mark.parametrize("before_s", [0.0, 0.3, 0.55])
async def test_a_body_that_came_while_the_process_stood_still_is_read(before_s: float) -> None:
    """The event loop runs what is due, such as the end of the time for a body, before it reads the socket."""
    loop = asyncio.get_running_loop()
    coming = anyio.Event()

    async def receive() -> Message:
        await coming.wait()
        return {"type": "http.request", "body": b"rest", "more_body": False}

    intake = Intake("gate", Bounds())
    with intake.reserving("one", 4, "gate") as reservation:
        reader = BodyReader(receive, reservation, intake, Bounds(), "gate")
        loop.call_later(1.0, coming.set)  # due after the body's deadlines; a stall makes them all due at once
        loop.call_later(before_s, time.sleep, 1.5)
        assert (await reader.next())["body"] == b"rest"


@pytest.mark.parametrize(("stall_s", "most_s"), [(0.0, 0.6), (1.0, 2.1)])
async def test_a_stall_gives_a_body_that_time_and_no_more(stall_s: float, most_s: float) -> None:
    intake = Intake("gate", Bounds())
    with intake.reserving("one", 4, "gate") as reservation:
        reader = BodyReader(anyio.sleep_forever, reservation, intake, Bounds(), "gate")
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, time.sleep, stall_s)
        with pytest.raises(RequestTimeout):
            await reader.next()
    assert 0.55 + stall_s < time.monotonic() - began < most_s + 3


async def test_who_asks_before_it_sends_is_refused_without_sending(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        at = urlsplit(url(await stage.episode()))
        head = f"POST {at.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n"
        began = time.monotonic()
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(head.encode())
            status, headers, _ = await answered(connection)
        assert (status, headers["connection"]) == (401, "close")
        assert time.monotonic() - began < 4


async def test_bodies_of_control_requests_are_bounded_and_must_keep_coming(
    tiny_model: Path, tmp_path: Path
) -> None:
    control = {"max_body_bytes": 2 * MIB, "max_body_bytes_total": 6 * MIB, "body_stall_s": 0.5}
    async with staged(tiny_model, tmp_path, control=control) as stage, AsyncExitStack() as stack:
        at = {"model_url": str(stage.control.base_url).rstrip("/"), "episode_key": "none"}
        halves = [
            await stack.enter_async_context(half_sent(at, size=2 * MIB, path=path))
            for path in ("/episodes", "/engine/pause", "/episodes")
        ]
        said = []
        with anyio.fail_after(30):
            for half in halves:
                status, _, error = await answered(half)
                said.append((status, error["error"]["type"]))
        assert sorted(said) == [(408, "request_timeout"), (408, "request_timeout"), (429, "too_many_bytes")]
        assert (await stage.control.get("/episodes")).status_code == 200


def test_one_owner_gets_half_and_many_leave_room() -> None:
    share = FairShare(100)
    while share.take("a"):
        pass
    assert share.held("a") == 50
    while share.take("b"):
        pass
    assert (share.held("b"), share.take("c")) == (25, True)
    for owner in "ab":
        share.give(owner, share.held(owner))
    assert share.taken == 1
    share.give("c")
    assert all(share.take(str(one)) for one in range(100))
    assert not share.take("one more")


def test_what_is_larger_than_the_whole_waits_for_the_others_and_is_then_let_in() -> None:
    share = FairShare(10)
    assert share.take("small", 1)
    assert not share.take("large", 20)
    share.give("small", 1)
    assert share.take("large", 20)
    assert not share.take("small", 1)
