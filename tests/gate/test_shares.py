"""Bounds that are taken before a body is read, and that no episode can use up for the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketStream, TaskGroup
from conversation import body, raw, reply_ids, url
from gate_support import Stage, says, staged
from starlette.types import Message
from stepped_clock import loop_clock

from turnstile_server.errors import RequestTimeout
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.connections import Seat
from turnstile_server.http.fair_share import FairShare
from turnstile_server.http.intake import BodyReader, Intake, Reservation
from waiting import wait_until

pytestmark = pytest.mark.anyio

MIB = 1 << 20
LONG = {"body_stall_s": 60, "body_timeout_s": 600}
"""For bodies: longer than a busy machine takes for a step of a test. A test lets that time pass by the clock."""
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


class Answers:
    """What comes on each of the connections, in the order in which it comes."""

    def __init__(self, tasks: TaskGroup, connections: list[SocketStream]) -> None:
        self.statuses: list[int] = []
        self.types: list[str] = []
        for connection in connections:
            tasks.start_soon(self._note, connection)

    async def _note(self, connection: SocketStream) -> None:
        status, _, said = await answered(connection)
        self.statuses.append(status)
        self.types.append(said["error"].get("type", ""))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The declared sizes of the bodies that have got room or were refused it. A refusal is only told when the time
    for the rest of its body is over."""
    noted: list[int] = []
    reserve = Intake.reserve

    def note(self: Intake, owner: str, declared: int, section: str) -> Reservation:
        noted.append(declared)
        return reserve(self, owner, declared, section)

    monkeypatch.setattr(Intake, "reserve", note)
    return noted


async def reply_status(stage: Stage, episode: dict[str, Any]) -> int:
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    async with raw(episode) as client:
        return (await client.post(url(episode), json=body())).status_code


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_half_sent_bodies_of_one_episode_refuse_only_its_own_calls(
    tiny_model: Path, tmp_path: Path, begun: list[Seat], path: str
) -> None:
    limits = {"max_calls": 8, "max_calls_per_episode": 6, **LONG}
    tools = {"max_requests_per_episode": 4}
    async with staged(tiny_model, tmp_path, gate=limits, tools=tools) as stage, AsyncExitStack() as stack:
        greedy, other = await stage.episode(), await stage.episode()
        begun.clear()
        connections = [await stack.enter_async_context(half_sent(greedy, path=path)) for _ in range(12)]
        await wait_until(lambda: len(begun) == 12)
        for _ in range(5):
            assert await reply_status(stage, other) == 200
        with loop_clock() as clock:
            status, headers, _ = await clock.pass_while(answered(connections[-1]))
        assert (status, headers.get("retry-after")) == (429, "1")


async def test_many_greedy_episodes_leave_room_for_another_one(
    tiny_model: Path, tmp_path: Path, begun: list[Seat]
) -> None:
    limits = {"max_calls": 16, "max_calls_per_episode": 8, **LONG}
    async with staged(tiny_model, tmp_path, gate=limits) as stage, AsyncExitStack() as stack:
        for _ in range(6):
            greedy = await stage.episode()
            begun.clear()
            for _ in range(8):
                await stack.enter_async_context(half_sent(greedy))
            await wait_until(lambda: len(begun) == 8)
        for _ in range(3):
            assert await reply_status(stage, await stage.episode()) == 200


@pytest.mark.parametrize("path", [PATHS[kind] for kind in ("chat", "anthropic", "count", "mcp")])
async def test_declared_bytes_beyond_the_episodes_limit_are_refused_before_they_are_read(
    tiny_model: Path, tmp_path: Path, sizes: list[int], path: str
) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_per_episode": 3 * MIB, **LONG}
    tools = {"max_body_bytes": 2 * MIB, "body_timeout_s": 600}
    async with staged(tiny_model, tmp_path, gate=limits, tools=tools) as stage:
        episode, other = await stage.episode(), await stage.episode()
        async with half_sent(episode, size=2 * MIB, path=path) as first:
            await wait_until(lambda: 2 * MIB in sizes)
            async with half_sent(episode, size=2 * MIB, path=path) as second:
                await wait_until(lambda: sizes.count(2 * MIB) == 2)
                assert await reply_status(stage, other) == 200
                with loop_clock() as clock:
                    status, headers, said = await clock.pass_while(answered(second))
                assert (status, headers["retry-after"]) == (429, "1")
                assert path == PATHS["mcp"] or headers["x-should-retry"] == "true"
                assert "max_body_bytes_per_episode" in json.dumps(said)
            with loop_clock() as clock:
                assert (await clock.pass_while(answered(first)))[0] == 408
        assert await reply_status(stage, episode) == 200


async def test_chunks_are_reserved_as_they_come(tiny_model: Path, tmp_path: Path) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_per_episode": 3 * MIB, **LONG}
    async with staged(tiny_model, tmp_path, gate=limits) as stage:
        episode = await stage.episode()
        async with (
            half_sent(episode, size=2 * MIB),
            half_sent(episode, sent=b" " * (3 * MIB // 2), chunked=True) as second,
        ):
            await second.send(b"0\r\n\r\n")
            status, _, said = await answered(second)
            assert (status, said["error"]["code"]) == (429, "too_many_bytes")


async def test_bodies_of_many_episodes_are_bounded_over_all_and_leave_room_for_small_ones(
    tiny_model: Path, tmp_path: Path, sizes: list[int]
) -> None:
    limits = {"max_body_bytes": 2 * MIB, "max_body_bytes_total": 8 * MIB, **LONG}
    async with staged(tiny_model, tmp_path, gate=limits) as stage, AsyncExitStack() as stack:
        greedy = [await stage.episode() for _ in range(8)]
        other = await stage.episode()
        connections = [await stack.enter_async_context(half_sent(one, size=2 * MIB)) for one in greedy]
        await wait_until(lambda: sizes.count(2 * MIB) == 8)
        assert await reply_status(stage, other) == 200
        answers = Answers(await stack.enter_async_context(anyio.create_task_group()), connections)
        with loop_clock() as clock:
            await clock.pass_until(lambda: len(answers.statuses) == 8)
        assert sorted(answers.statuses) == [408] * 3 + [429] * 5


async def test_a_body_that_stops_coming_is_408_and_one_that_comes_slowly_is_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"body_stall_s": 60, "min_body_rate": 1, "body_timeout_s": 3000}
    async with staged(tiny_model, tmp_path, gate=limits) as stage:
        loop = asyncio.get_running_loop()
        episode = await stage.episode()
        stage.engine.answers = [says(reply_ids(stage, "fine"))]
        whole = json.dumps(body()).encode().ljust(300)
        began = loop.time()
        async with half_sent(episode, size=300, sent=whole[:30]) as stalled:
            with loop_clock() as clock:
                status, headers, said = await clock.pass_while(answered(stalled))
        assert loop.time() - began >= 60
        assert (status, said["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
        assert "came too slowly" in said["error"]["message"]
        async with half_sent(episode, size=300, sent=whole[:30]) as slow:
            for start in range(30, 300, 30):
                with loop_clock() as clock:
                    await clock.let_pass(10)
                await slow.send(whole[start : start + 30])
            assert (await answered(slow))[0] == 200


@dataclass(frozen=True)
class Limits:
    """The section of a listener, with small bounds."""

    max_body_bytes_total: int = 1000
    max_body_bytes: int = 1000

    def bounds_of(self, part: type[ListenerBounds]) -> ListenerBounds:
        return part(body_timeout_s=0.9, body_stall_s=0.6, min_body_rate=100)


@pytest.mark.parametrize("before_s", [0.0, 0.3, 0.55])
async def test_a_body_that_came_while_the_process_stood_still_is_read(before_s: float) -> None:
    """The event loop runs what is due, such as the end of the time for a body, before it reads the socket."""
    loop = asyncio.get_running_loop()
    coming = anyio.Event()

    async def receive() -> Message:
        await coming.wait()
        return {"type": "http.request", "body": b"rest", "more_body": False}

    intake = Intake("gate", Limits())
    with intake.reserving("one", 4, "gate") as reservation:
        reader = BodyReader(receive, reservation, intake, Limits(), "gate")
        with loop_clock(stands=True) as clock:
            loop.call_later(1.0, coming.set)  # due after the body's deadlines; a stall makes them all due at once
            loop.call_later(before_s, clock.jump, 1.5)
            assert (await clock.pass_while(reader.next()))["body"] == b"rest"


@pytest.mark.parametrize(("stall_s", "most_s"), [(0.0, 0.6), (1.0, 2.1)])
async def test_a_stall_gives_a_body_that_time_and_no_more(stall_s: float, most_s: float) -> None:
    intake = Intake("gate", Limits())
    with intake.reserving("one", 4, "gate") as reservation, loop_clock(stands=True) as clock:
        reader = BodyReader(anyio.sleep_forever, reservation, intake, Limits(), "gate")
        began = clock.time()
        asyncio.get_running_loop().call_later(0.1, clock.jump, stall_s)
        with pytest.raises(RequestTimeout):
            await clock.pass_while(reader.next())
        assert 0.55 + stall_s < clock.time() - began < most_s + 0.2


async def test_who_asks_before_it_sends_is_refused_without_sending(tiny_model: Path, tmp_path: Path) -> None:
    """No time-out answers in its place: they are far longer than this test may take."""
    async with staged(tiny_model, tmp_path, gate={**LONG, "head_timeout_s": 600}) as stage:
        at = urlsplit(url(await stage.episode()))
        head = f"POST {at.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n"
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(head.encode())
            status, headers, _ = await answered(connection)
        assert (status, headers["connection"]) == (401, "close")


async def test_bodies_of_control_requests_are_bounded_and_must_keep_coming(
    tiny_model: Path, tmp_path: Path, sizes: list[int]
) -> None:
    control = {"max_body_bytes": 2 * MIB, "max_body_bytes_total": 6 * MIB, **LONG}
    async with staged(tiny_model, tmp_path, control=control) as stage, AsyncExitStack() as stack:
        at = {"model_url": str(stage.control.base_url).rstrip("/"), "episode_key": "none"}
        halves = [
            await stack.enter_async_context(half_sent(at, size=2 * MIB, path=path))
            for path in ("/episodes", "/engine/pause", "/episodes")
        ]
        answers = Answers(await stack.enter_async_context(anyio.create_task_group()), halves)
        await wait_until(lambda: sizes.count(2 * MIB) == 3)
        with loop_clock() as clock:
            await clock.pass_until(lambda: len(answers.statuses) == 3)
        assert sorted(zip(answers.statuses, answers.types, strict=True)) == [
            (408, "request_timeout"),
            (408, "request_timeout"),
            (429, "too_many_bytes"),
        ]
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
