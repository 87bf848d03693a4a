"""A client that loses its connection in mid-call, over real sockets: what it can fetch, and what is stopped."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from mcp_types import JSONRPCNotification, JSONRPCResponse
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, PlayedEpisode, alive, mcp_stage, text_of

from bounded import bounded
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.events import SessionEvents
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

LONG = "echo $$ > pid.part; mv pid.part pid; until [ -e go ]; do sleep 0.02; done; echo done"
"""Tells its process id in the file ``pid``, waits for the file ``go``."""


class Caller:
    """A client of one session, by plain HTTP, whose connections a test cuts."""

    def __init__(self, http: httpx.AsyncClient, sandbox: SubprocessSandbox, headers: dict[str, str]) -> None:
        self.http = http
        self.headers = headers
        self.folder = anyio.Path(sandbox.workdir)

    async def pid(self) -> int:
        await wait_until((self.folder / "pid").exists)
        return int(await (self.folder / "pid").read_text())

    async def go(self) -> None:
        await (self.folder / "go").touch()

    async def begin(self, command: str = LONG, *, request_id: int = 7, token: str | None = None) -> str:
        """Calls bash, and closes the connection after the first event; that event's id."""
        params: dict[str, Any] = {"name": "bash", "arguments": {"command": command}}
        if token is not None:
            params["_meta"] = {"progressToken": token}
        call = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
        async with self.http.stream("POST", "", json=call, headers=self.headers) as response:
            assert response.status_code == 200
            async for event in events_of(response):
                return event["id"]
        raise AssertionError("the stream ended without an event")

    async def resume(self, event_id: str) -> list[dict[str, Any]]:
        """The messages of a resumed stream, which ends by itself."""
        headers = {**self.headers, "last-event-id": event_id}
        async with self.http.stream("GET", "", headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            return [json.loads(event["data"]) async for event in events_of(response) if event.get("data")]

    async def send(self, method: str, **params: Any) -> None:
        answer = await self.http.post(
            "", json={"jsonrpc": "2.0", "method": method, "params": params}, headers=self.headers
        )
        assert answer.status_code == 202


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    event: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(":")
            event[name] = value.removeprefix(" ")
        elif event.keys() - {""}:
            yield event
            event = {}


@asynccontextmanager
async def calling(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, version: str = "2025-11-25"
) -> AsyncIterator[Caller]:
    accept = {"accept": "application/json, text/event-stream", "authorization": f"Bearer {episode.key}"}
    client = {"name": "test", "version": "1"}
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": client}
    opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    async with httpx.AsyncClient(base_url=stage.tool_url(episode), headers=accept, timeout=PATIENCE_S) as http:
        opened = await http.post("", json=opening)
        headers = {"mcp-session-id": opened.headers["mcp-session-id"], "mcp-protocol-version": version}
        caller = Caller(http, sandbox, headers)
        await caller.send("notifications/initialized")
        yield caller


@pytest.fixture
def episode(stage: McpStage, sandbox: SubprocessSandbox) -> PlayedEpisode:
    return stage.episodes.begin("e1", sandbox)


async def test_a_client_that_comes_back_gets_the_result_and_the_stream_ends(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        event_id = await caller.begin()
        pid = await caller.pid()
        await wait_until(lambda: stage.endpoint.requests_in_flight == 0)
        assert alive(pid)
        messages: list[dict[str, Any]] = []

        async def resume() -> None:
            messages.extend(await caller.resume(event_id))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            await wait_until(lambda: stage.endpoint.requests_in_flight == 1)
            await caller.go()
        (message,) = messages
        assert message["id"] == 7
        assert message["result"]["content"][0]["text"] == "done\n[exit status 0]"
        assert await caller.resume(event_id) == messages  # kept for another loss


async def test_a_result_that_came_while_nobody_listened_is_fetched(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        event_id = await caller.begin()
        pid = await caller.pid()
        await caller.go()
        await wait_until(lambda: not alive(pid))
        (message,) = await caller.resume(event_id)
        assert message["result"]["content"][0]["text"] == "done\n[exit status 0]"


async def test_a_client_that_comes_back_when_it_has_all_is_told_that_there_is_no_stream(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    """Older TypeScript clients (Gemini CLI 0.61) ask after every stream: with its last id, then without one."""
    async with calling(stage, episode, sandbox) as caller:
        call = {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": {}}
        async with caller.http.stream("POST", "", json=call, headers=caller.headers) as response:
            first, *_, last = [event["id"] async for event in events_of(response)]
        (message,) = await caller.resume(first)
        assert message["id"] == 7
        for headers in ({"last-event-id": last}, {}):
            answer = await caller.http.get("", headers={**caller.headers, **headers})
            assert answer.status_code == 405, answer.text


async def test_a_client_that_does_not_come_back_in_time_leaves_no_process(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with mcp_stage(tmp_path, resume_s=0.3) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with calling(stage, episode, sandbox) as caller:
            event_id = await caller.begin()
            pid = await caller.pid()
            await wait_until(lambda: not alive(pid))
            (message,) = await caller.resume(event_id)
            assert message["result"]["isError"]
            assert message["result"]["content"][0]["text"] == "the call was stopped"


async def test_a_client_that_listens_again_has_all_the_time_there_is(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with mcp_stage(tmp_path, resume_s=0.3) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with calling(stage, episode, sandbox) as caller:
            event_id = await caller.begin()
            pid = await caller.pid()
            with anyio.move_on_after(0.6):
                await caller.resume(event_id)
            assert alive(pid)  # while it was listened to; lost again, it has its time again
            await wait_until(lambda: not alive(pid))


@pytest.mark.parametrize("how", ["cancelled", "deleted", "ended"])
async def test_a_call_that_waits_for_its_client_is_stopped_like_any_other(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, how: str
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        event_id = await caller.begin()
        pid = await caller.pid()
        await wait_until(lambda: stage.endpoint.requests_in_flight == 0)
        assert alive(pid)
        if how == "cancelled":
            await caller.send("notifications/cancelled", requestId=7)
            await wait_until(lambda: not alive(pid))
            (message,) = await caller.resume(event_id)
            assert message["error"]["message"] == "Request cancelled"
        elif how == "deleted":
            assert (await caller.http.delete("", headers=caller.headers)).status_code == 200
        else:
            episode.end()
        await wait_until(lambda: not alive(pid))
    await wait_until(lambda: how != "ended" or not stage.endpoint.episodes_served)


@pytest.mark.parametrize("how", ["deleted", "ended"])
async def test_a_resumed_stream_ends_with_its_session_and_its_episode(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, how: str
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        event_id = await caller.begin()
        await caller.pid()
        await wait_until(lambda: stage.endpoint.requests_in_flight == 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller.resume, event_id)
            await wait_until(lambda: stage.endpoint.requests_in_flight == 1)
            if how == "deleted":
                await caller.http.delete("", headers=caller.headers)
            else:
                episode.end()


async def test_without_an_event_the_client_cannot_come_back_and_the_call_is_stopped(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with calling(stage, episode, sandbox, "2025-06-18") as caller:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller.begin)
            pid = await caller.pid()
            tasks.cancel_scope.cancel()
        await wait_until(lambda: not alive(pid))


async def test_with_the_setting_at_zero_a_call_ends_with_its_connection(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with (
        mcp_stage(tmp_path, resume_s=0, progress_s=0.05) as stage,
        calling(stage, stage.episodes.begin("e1", sandbox), sandbox, "2025-06-18") as caller,
    ):
        await caller.begin(token="t")
        pid = await caller.pid()
        await wait_until(lambda: not alive(pid))


async def test_an_older_client_comes_back_with_the_id_of_its_progress(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with (
        mcp_stage(tmp_path, progress_s=0.05) as stage,
        calling(stage, stage.episodes.begin("e1", sandbox), sandbox, "2025-06-18") as caller,
    ):
        event_id = await caller.begin(token="t")
        await caller.go()
        messages = await caller.resume(event_id)
        assert {message.get("method") for message in messages[:-1]} <= {"notifications/progress"}
        assert messages[-1]["result"]["content"][0]["text"] == "done\n[exit status 0]"


async def test_sessions_with_the_same_request_ids_do_not_mix(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with calling(stage, episode, sandbox) as one, calling(stage, episode, sandbox) as two:
        first, second = await one.begin("echo one; sleep 0.3"), await two.begin("echo two; sleep 0.3")
        assert (await one.resume(first))[0]["result"]["content"][0]["text"] == "one\n[exit status 0]"
        assert (await two.resume(second))[0]["result"]["content"][0]["text"] == "two\n[exit status 0]"
        answer = await two.http.get("", headers={**two.headers, "last-event-id": first})
        assert answer.status_code == 400
        assert "cannot be resumed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("event_id", ["1", "9.9.9", ".", "x" * 5000, "é".encode("latin-1")])
async def test_an_unknown_event_is_refused(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, event_id: Any
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        headers = [*caller.headers.items(), ("last-event-id", event_id)]
        answer = await caller.http.get("", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["data"] == {"type": "invalid_request"}


async def test_a_long_response_is_closed_and_the_official_client_comes_back_for_the_result(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with mcp_stage(tmp_path, stream_max_s=0.1, retry_s=0.05) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with stage.client(episode) as client:
            result = await client.call_tool("bash", {"command": "sleep 0.5; echo done"})
            assert text_of(result) == "done\n[exit status 0]"


async def test_a_session_keeps_its_version_whatever_a_header_says(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with calling(stage, episode, sandbox) as caller:
        caller.headers["mcp-protocol-version"] = "2025-03-26"
        event_id = await caller.begin("echo on")
        (message,) = await caller.resume(event_id)
        assert message["id"] == 7


def message(method: str | None, size: int = 0) -> Any:
    if method is None:
        return JSONRPCResponse(jsonrpc="2.0", id=1, result={"text": "x" * size})
    return JSONRPCNotification(jsonrpc="2.0", method=method, params={"text": "x" * size})


async def replayed(events: SessionEvents, event_id: str) -> list[str]:
    """The methods of what a resumed stream brings; "" is the response."""
    methods: list[str] = []

    async def keep(event: Any) -> None:
        methods.append(event.message.model_dump().get("method", ""))

    await events.replay(event_id, keep)
    return methods


async def test_what_is_kept_is_bounded_and_notifications_go_first() -> None:
    events = SessionEvents(bounded(ToolSettings, max_events=3))
    first = events.store("1", None)
    for number in range(5):
        events.store("1", message(f"n{number}"))
    events.store("1", message(None))
    assert await replayed(events, first) == ["n3", "n4", ""]
    second = events.store("2", None)
    events.store("2", message(None))
    third = events.store("3", None)
    events.store("3", message(None))
    assert await replayed(events, first) == [""]
    events.store("4", None)
    events.store("4", message(None))
    assert not events.knows(first)
    assert [events.knows(event_id) for event_id in (second, third)] == [True, True]


async def test_bytes_and_time_are_bounds_too() -> None:
    events = SessionEvents(bounded(ToolSettings, max_event_bytes=1024, keep_events_s=0))
    large = events.store("1", None)
    events.store("1", message(None, 2000))
    assert not events.knows(large)
    old = events.store("2", None)
    events.store("2", message(None))
    await anyio.sleep(0.01)  # so that the clock goes on
    events.store("3", None)
    assert not events.knows(old)


async def test_an_id_that_is_used_again_begins_a_new_stream() -> None:
    events = SessionEvents(ToolSettings())
    first = events.store("1", None)
    events.store("1", message("a"))
    events.store("1", message(None))
    second = events.store("1", None)
    events.store("1", message("b"))
    events.store("1", message(None))
    assert await replayed(events, first) == ["a", ""]
    assert await replayed(events, second) == ["b", ""]
