"""The server's end of a helper's connection (wire format: ``helper/turnstile_helper/frames.py``).

Owns the connection and the task that serves it. What must hold: what comes in is bounded, by frame and by
request; a cancelled ``call`` kills the command it waited for; when the connection ends, for whatever reason,
every open request raises SandboxFailed and every later one too. The helper is not trusted: where everything in a
sandbox runs under one uid, an agent can speak in its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from anyio.abc import ByteStream

from turnstile_server.errors import SandboxDeath, SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.protocol import StandardStreams

_LOG = logging.getLogger(__name__)
_READ_BYTES = 256 << 10
_MAX_QUEUED = 128 << 20
"""Bytes of frames that wait for a helper to read them. Requests and carried connections keep far below by their
windows; only a helper that answers without reading gets here."""

_UNBOUNDED = 1 << 62
"""Size of standard input that ends with its command."""

_LATE_S = 1.0
"""A time-out that is noticed this much later than it was due shows that the server itself was held up."""


@dataclass(frozen=True, slots=True)
class HelperReply:
    """The end of a request: its fields, and everything that was written to stdout and stderr."""

    fields: Mapping[str, Any]
    stdout: bytes
    stderr: bytes


class HelperRequest:
    """One open request. It ends exactly once: with its reply, or with SandboxFailed."""

    def __init__(
        self,
        client: HelperClient,
        number: int,
        max_output: int,
        on_line: Callable[[bytes], None] | None,
        streams: StandardStreams | None,
    ) -> None:
        self.number = number
        self.ended = anyio.Event()
        self._client = client
        self._max_output = max_output
        self._on_line = on_line
        self._caller = streams
        self._streams = {1: bytearray(), 2: bytearray()}
        self._window = anyio.Event()
        self._unacknowledged = 0
        """Bytes of standard input that were sent and not yet taken."""
        self._outcome: HelperReply | SandboxFailed | None = None

    def kill(self) -> None:
        """Asks the helper to kill the command; no-op after the end."""
        if not self.ended.is_set():
            self._client.send({"op": "kill", "id": self.number})

    async def finish(self) -> HelperReply:
        """Waits for the reply. Raises SandboxFailed. Cancelling it kills the command."""
        try:
            await self.ended.wait()
        except anyio.get_cancelled_exc_class():
            self.kill()
            raise
        return self.result()

    def result(self) -> HelperReply:
        """The reply of a request that has ended. Raises SandboxFailed."""
        if isinstance(self._outcome, HelperReply):
            return self._outcome
        raise self._outcome or RuntimeError("the request has not ended")

    async def send_input(self, data: bytes) -> None:
        """Sends standard input as fast as the helper takes it. Returns early when the request ends."""
        view = memoryview(data)
        for start in range(0, len(view), frames.CHUNK):
            part = view[start : start + frames.CHUNK]
            while self._unacknowledged + len(part) > frames.WINDOW and not self.ended.is_set():
                self._window = anyio.Event()
                await self._window.wait()
            if self.ended.is_set():
                return
            self._unacknowledged += len(part)
            self._client.send({"op": "data", "id": self.number}, part)

    @property
    def goes_on(self) -> bool:
        """Its standard input comes while it runs."""
        return self._caller is not None

    async def send_rest(self) -> None:
        """Sends the standard input that comes while it runs, and then its end."""
        if self._caller is None:
            return
        while data := await self._caller.next_input():
            await self.send_input(data)
        if not self.ended.is_set():
            self._client.send({"op": "data", "id": self.number, "last": True})

    def take(self, header: Mapping[str, Any], payload: bytes) -> bool:
        """Handles one frame of this request; True: it was the last. Raises FrameError for a frame that breaks the
        protocol."""
        event = header.get("ev")
        if event == "ack":
            self._unacknowledged -= int(header["n"])
            self._window.set()
        elif event == "out" and self._caller is not None and header["stream"] == 1:
            self._caller.take_output(payload)
        elif event == "out":
            stream = self._streams[header["stream"]]
            stream += payload
            if len(stream) > self._max_output:
                raise frames.FrameError("a request's output is larger than was asked for")
        elif event == "line" and self._on_line is not None:
            if len(payload) > frames.MAX_LINE:
                raise frames.FrameError("the latest line is longer than it may be")
            self._on_line(payload)
        elif event == "end":
            self.end(HelperReply(header, bytes(self._streams[1]), bytes(self._streams[2])))
            return True
        else:
            raise frames.FrameError(f"an event {event!r} is not known")
        return False

    def end(self, outcome: HelperReply | SandboxFailed) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self.ended.set()
        self._window.set()


class HelperClient:
    """Requests to one helper. ``stream`` comes from ``SandboxSockets``, which has checked the helper's token, or
    is the standard input and output of a container's first program."""

    def __init__(self, stream: ByteStream, decoder: frames.Decoder, name: str, tasks: BackgroundTasks) -> None:
        self.carried: Callable[[Mapping[str, Any], bytes], None] | None = None
        """Takes the frames of carried connections; None: there are none."""
        self.diagnose: Callable[[], Awaitable[SandboxDeath]] | None = None
        """The backend's answer to what ended the sandbox, asked when the connection has ended."""
        self.lost = anyio.Event()
        """Set when the connection has ended, and ``death`` is known."""
        self.death = SandboxDeath.INSIDE
        self._stream = stream
        self._decoder = decoder
        self._name = name
        self._tasks = tasks
        self._requests: dict[int, HelperRequest] = {}
        self._next = 1
        self._lost_reason: str | None = None
        # Bounded by its users: one header for each request, and payloads by the requests' input windows.
        self._queue, self._queued = anyio.create_memory_object_stream[bytes](math.inf)
        self._queued_bytes = 0
        self._connection = tasks.start(self._serve, name=f"helper client {name}")

    def begin(
        self,
        header: Mapping[str, Any],
        *,
        max_output: int = 0,
        on_line: Callable[[bytes], None] | None = None,
        streams: StandardStreams | None = None,
    ) -> HelperRequest:
        """Sends a request. ``max_output``: most bytes that each of its streams may bring. ``on_line`` gets the
        latest line of its output, where the header asks for it, ``streams`` its standard output as it is written.

        Raises SandboxFailed, and FrameError for a header that is too long.
        """
        self._check()
        request = HelperRequest(self, self._next, max_output, on_line, streams)
        self._next += 1
        self._requests[request.number] = request
        try:
            self.send({**header, "id": request.number})
        except frames.FrameError:
            del self._requests[request.number]
            raise
        return request

    def begin_detached(
        self,
        header: Mapping[str, Any],
        *,
        data: bytes,
        max_output: int,
        timeout_s: float | None,
        on_line: Callable[[bytes], None] | None = None,
    ) -> HelperRequest:
        """Like ``call``, but returns at once: standard input and time-out are seen to in the background."""
        request = self.begin({**header, "stdin_size": len(data)}, max_output=max_output, on_line=on_line)
        if data or timeout_s is not None:
            attend = partial(self._attend, request, data, timeout_s)
            self._tasks.start(attend, name=f"request {request.number} of {self._name}")
        return request

    async def call(
        self,
        header: Mapping[str, Any],
        *,
        data: bytes = b"",
        max_output: int = 0,
        timeout_s: float | None,
        on_line: Callable[[bytes], None] | None = None,
        streams: StandardStreams | None = None,
    ) -> HelperReply:
        """One request to its end, with ``data`` as its standard input, and what ``streams`` have after it. Raises
        SandboxFailed. Cancelling it kills the command. Without a reply after ``timeout_s`` the connection is given
        up."""
        await self.settled()
        size = len(data) if streams is None else _UNBOUNDED
        request = self.begin(
            {**header, "stdin_size": size}, max_output=max_output, on_line=on_line, streams=streams
        )
        try:
            await self._attend(request, data, timeout_s)
        except anyio.get_cancelled_exc_class():
            request.kill()
            raise
        reply = request.result()
        if "error" in reply.fields:
            raise SandboxFailed(f"the sandbox's helper failed: {reply.fields['error']}")
        return reply

    def send(self, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
        """Queues a frame. Raises SandboxFailed, and FrameError for a header that is too long."""
        self._check()
        frame = frames.encode(dict(header), payload)
        self._queued_bytes += len(frame)
        if self._queued_bytes > _MAX_QUEUED:
            self.lose("the sandbox's helper does not read what it is sent")
            self._check()
        self._queue.send_nowait(frame)

    def lose(self, reason: str, death: SandboxDeath | None = None) -> None:
        """Ends the connection (the helper then kills everything and exits) and, when its backend has said what
        ended it, every open request. ``death``: known already, so the backend is not asked."""
        if self._lost_reason is not None:
            return
        self._lost_reason = reason
        if death is not None or self.diagnose is None:
            self._end_all(death or SandboxDeath.INSIDE)
        else:
            # While the sandbox is as it was found: a helper that lost its connection exits, whatever came before.
            self._tasks.start(partial(self._diagnose, self.diagnose), name=f"diagnose {self._name}")

    def explain(self, why: str) -> None:
        """For ``diagnose``: added to the sentence that open requests end with."""
        self._lost_reason = f"{self._lost_reason}: {why}"

    async def close(self) -> None:
        self.lose("the sandbox was destroyed", SandboxDeath.OUTSIDE)
        await self.lost.wait()
        await self._connection.ended.wait()

    async def settled(self) -> None:
        """Returns at once while the connection stands, else when ``death`` is known."""
        if self._lost_reason is not None:
            await self.lost.wait()

    async def _diagnose(self, diagnose: Callable[[], Awaitable[SandboxDeath]]) -> None:
        death = SandboxDeath.INSIDE
        try:
            death = await diagnose()
        finally:
            self._end_all(death)

    def _end_all(self, death: SandboxDeath) -> None:
        self.death = death
        self.lost.set()
        self._connection.cancel()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.end(SandboxFailed.of(death, self._lost_reason or ""))

    def _check(self) -> None:
        if self._lost_reason is not None:
            raise SandboxFailed.of(self.death, self._lost_reason)

    async def _attend(self, request: HelperRequest, data: bytes, timeout_s: float | None) -> None:
        """Sends a request's input and waits for its end. A helper that does not answer in time is of no use: its
        connection is given up, which ends the request."""
        async with anyio.create_task_group() as sending:
            if data or request.goes_on:
                sending.start_soon(self._send, request, data)
            with anyio.move_on_after(timeout_s) as waiting:
                await request.ended.wait()
            if waiting.cancelled_caught and anyio.current_time() > waiting.deadline + _LATE_S:
                # This server did not run either, or its machine: the reply may lie here unread.
                with anyio.move_on_after(timeout_s):
                    await request.ended.wait()
            if not request.ended.is_set():
                self.lose(f"the sandbox's helper did not answer within {timeout_s:g} s")
                await request.ended.wait()
            sending.cancel_scope.cancel()

    async def _send(self, request: HelperRequest, data: bytes) -> None:
        with suppress(SandboxFailed):  # which the request's end tells
            await request.send_input(data)
            await request.send_rest()

    async def _serve(self) -> None:
        reason = "the sandbox ended: its helper is gone"
        death: SandboxDeath | None = SandboxDeath.OUTSIDE  # where this is cancelled
        try:
            async with anyio.create_task_group() as both:
                both.start_soon(self._write)
                reason, death = await self._read()
                both.cancel_scope.cancel()
        finally:
            self.lose(reason, death)
            self._queue.close()
            self._queued.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _write(self) -> None:
        try:
            async for frame in self._queued:
                await self._stream.send(frame)
                self._queued_bytes -= len(frame)
        except anyio.BrokenResourceError:
            return  # the reader sees the same, and says why

    async def _read(self) -> tuple[str, SandboxDeath | None]:
        """Handles frames until the connection ends: why it ended, and by whom where that is known."""
        try:
            while True:
                for header, payload in self._decoder.feed(await self._stream.receive(_READ_BYTES)):
                    self._take(header, payload)
        except anyio.EndOfStream:
            return "the sandbox ended: its helper is gone", None
        except anyio.BrokenResourceError as error:
            return f"the connection to the sandbox broke: {error.__cause__ or error}", None
        except SandboxFailed as error:  # given up while a frame was answered
            return error.message, error.death
        except (frames.FrameError, KeyError, TypeError, ValueError, OverflowError) as error:
            _LOG.warning("a sandbox's helper broke the protocol", extra={"sandbox": self._name})
            return f"the sandbox's helper broke the protocol: {error}", SandboxDeath.INSIDE

    def _take(self, header: Mapping[str, Any], payload: bytes) -> None:
        if "conn" in header:
            if self.carried is None:
                raise frames.FrameError("no connections are carried")
            self.carried(header, payload)
            return
        number = header["id"]
        request = self._requests.get(number)
        if request is None:
            raise frames.FrameError(f"there is no request {number!r}")
        if request.take(header, payload):
            del self._requests[number]
