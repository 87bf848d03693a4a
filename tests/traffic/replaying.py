"""Plays a recording against a running server: the same requests, in the same order, answered by the same words.

In process, without ports: requests go to the agent app, an ASGI application. Order is kept by events, not by
time: a model's words are held until the recording has them end, so calls that were in flight together are so
again. The ids that the gate gave to turns and calls are new; they are put into later requests in place of the
recorded ones.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
from gate_support import Prompted, Stage
from gate_support import Said as Chunk
from starlette.types import Message, Scope

from agents_matrix.recording import Call, RecordedEpisode, Said
from agents_matrix.traffic import CURRENT, TracedRequest
from turnstile_server.episodes.service import Episodes
from turnstile_server.errors import error_of_type
from turnstile_server.gate.episode_limits import ConversationHeaders
from turnstile_server.gate.session import EpisodeSession

SETTLED_AFTER = 100
"""Rounds of the event loop: many times what a request takes to its refusal, or a chunk to its caller."""
STUCK_S = 60.0
"""A replay that waits longer for one event will wait for ever: the traffic takes another way than recorded."""


class OtherWay(AssertionError):
    """The gate treats the traffic so differently that it cannot be played: look at the change, or record anew."""


@dataclass
class Replayed:
    """One recorded call, played again."""

    call: Call
    heard: TracedRequest
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    call_id: str = ""
    """The gate's name for the generation."""
    engine: anyio.Event = field(default_factory=anyio.Event)
    """The engine was asked."""
    release: anyio.Event = field(default_factory=anyio.Event)
    """The engine may answer."""
    leave: anyio.Event = field(default_factory=anyio.Event)
    """The caller goes away."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """The server is done with it."""


class Replay:
    def __init__(
        self, stage: Stage, recording: RecordedEpisode, episode: dict[str, Any], calls: EpisodeSession
    ) -> None:
        self.calls: list[Replayed] = []
        self._stage = stage
        self._recording = recording
        self._episode = episode
        self._tree = calls.tree
        self._in_flight = calls.in_flight
        self._new: dict[bytes, bytes] = {}
        self._playing: dict[int, Replayed] = {}

    async def run(self) -> None:
        """Raises OtherWay."""
        self._stage.engine.answers = [self._answer]
        async with anyio.create_task_group() as tasks:
            for number, (what, index) in enumerate(self._recording.header.events):
                try:
                    with anyio.fail_after(STUCK_S):
                        await self._event(tasks, what, index)
                except TimeoutError as error:
                    raise OtherWay(f"event {number} ({what} {index}) does not come about") from error
            tasks.cancel_scope.cancel()

    async def _event(self, tasks: anyio.abc.TaskGroup, what: str, index: int) -> None:
        if what == "asked":
            one = Replayed(self._recording.calls[index], self._heard(index))
            self.calls.append(one)
            self._playing[index] = one
            tasks.start_soon(self._ask, one)
            await self._taken(one)
            return
        one = self._playing[index]
        one.release.set()
        if what == "gone":
            await _settle()  # what the model had said is on its way
            one.leave.set()
        if what == "spoke":
            while one.call_id in self._in_flight:  # noqa: ASYNC110 - the gate announces no commits
                await anyio.sleep(0.001)
            return
        await one.over.wait()
        await self._settled(one)

    def _heard(self, index: int) -> TracedRequest:
        call = self._recording.calls[index]
        body = call.body.encode()
        for old, new in self._new.items():
            body = body.replace(old, new)
        return TracedRequest(call.method, call.path, call.query, call.headers, bytearray(body))

    async def _taken(self, one: Replayed) -> None:
        """Returns when the engine was asked, or the server has responded; for a call that waits for another's
        reply, as soon as all wait."""
        if one.call.said is None:
            await _settle()
            return
        async with anyio.create_task_group() as either:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                either.cancel_scope.cancel()

            either.start_soon(first, one.engine)
            either.start_soon(first, one.over)

    async def _settled(self, one: Replayed) -> None:
        """The ids of the turn that the call became stand in its answer; from here on they are known."""
        while one.leave.is_set() and self._in_flight:  # noqa: ASYNC110 - the gate announces no ends
            await anyio.sleep(0.001)
        for node in self._tree:
            turn = node.turn
            mark = turn.turn_id.removeprefix("turn_").encode()
            if mark in one.answer:
                if one.call.turn is not None:
                    old = one.call.turn.encode()
                    self._new |= {old: mark, _signature(old): _signature(mark)}
                made = [call.id or "" for call in turn.reply.tool_calls]
                self._new |= {
                    old.encode(): new.encode() for old, new in zip(one.call.call_ids, made, strict=False)
                }

    async def _ask(self, one: Replayed) -> None:
        CURRENT.set(one.heard)
        body = [{"type": "http.request", "body": bytes(one.heard.body), "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await one.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            one.status = message.get("status", one.status)
            one.answer += message.get("body", b"")

        try:
            await self._stage.owner(self._episode).apps.agent(self._scope(one), receive, send)
        finally:
            one.over.set()

    def _scope(self, one: Replayed) -> Scope:
        path = f"/e/{self._episode['episode_id']}{one.call.path}"
        headers = [(name.encode(), value.encode("latin-1")) for name, value in one.call.headers]
        return {
            "type": "http",
            "http_version": "1.1",
            "method": one.call.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": one.call.query.encode("latin-1"),
            "headers": [*headers, (b"authorization", f"Bearer {self._episode['episode_key']}".encode())],
            "scheme": "http",
            "server": ("turnstile", 80),
        }

    async def _answer(self, prompted: Prompted) -> AsyncIterator[Chunk | Exception]:
        one = next(one for one in self.calls if one.heard is CURRENT.get())
        one.call_id = prompted.rid
        one.engine.set()
        await one.release.wait()
        said = one.call.said
        if said is None:
            raise OtherWay(f"{one.call.path}: the engine was not asked when this was recorded, and now it is")
        async for chunk in self._words(said, prompted):
            yield chunk

    async def _words(self, said: Said, prompted: Prompted) -> AsyncIterator[Chunk | Exception]:
        ids = self._stage.encode(said.text)
        if said.finish is not None:
            yield Chunk(ids, said.finish)
            return
        if ids:
            yield Chunk(ids)
        if said.refusal is not None:
            error = error_of_type(said.refusal.type, said.refusal.message)
            error.retry_after_s = said.refusal.retry_after_s
            yield error
            return
        await prompted.aborted.wait()
        yield Chunk([], "abort")


async def _settle() -> None:
    """Lets everybody run who can. Nothing that is waited for here leaves the event loop."""
    for _ in range(SETTLED_AFTER):
        await anyio.lowlevel.checkpoint()


def _signature(mark: bytes) -> bytes:
    """A turn's id as the signatures of thoughts have it."""
    return base64.b64encode(b"turn_" + mark)


async def replay(stage: Stage, recording: RecordedEpisode) -> tuple[dict[str, Any], Replay]:
    """The episode, still running, and what was played. Raises OtherWay."""
    episode = await stage.episode(limits={"max_turns": recording.header.max_turns})
    episodes = stage.owner(episode).apps.tools
    assert isinstance(episodes, Episodes)
    calls = episodes.open_episode(episode["episode_id"], episode["episode_key"])
    threads = recording.header.threads
    calls.conversation_headers = ConversationHeaders(threads.name, threads.parent)
    played = Replay(stage, recording, episode, calls)
    await played.run()
    return episode, played
