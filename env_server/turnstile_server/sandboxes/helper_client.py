"""The server's end of a helper's connection (format: ``helper/turnstile_helper/frames.py``).

Owns the connection and one reading task. Holds: what comes in is bounded, by frame and by request; a cancelled
``finish`` kills what it waited for; when the connection ends, for whatever reason, every open request raises
SandboxFailed and every later one too. Trusts the helper with nothing: where all runs under one uid, an agent can
speak for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.helper.turnstile_helper import frames

_LOG = logging.getLogger(__name__)
_READ = 256 << 10


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request: its fields, and what was written to stdout and stderr."""

    fields: Mapping[str, Any]
    stdout: bytes
    stderr: bytes


class Request:
    """One request under way. Ended exactly once: with its reply, or with SandboxFailed."""

    def __init__(self, link: HelperLink, number: int, max_output: int) -> None:
        self._link = link
        self._number = number
        self._max_output = max_output
        self._streams = {1: bytearray(), 2: bytearray()}
        self._window = asyncio.Event()
        self._untaken = 0
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # Nobody need be waiting: a detached command's sandbox may be destroyed before anyone asks for its end.
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def kill(self) -> None:
        if not self.future.done():
            self._link.send({"op": "kill", "id": self._number})

    def give_up_after(self, timeout_s: float | None) -> None:
        """Ends the connection when there is no reply by then: a helper that does not answer is of no use."""
        if timeout_s is None:
            return
        timer = asyncio.get_running_loop().call_later(
            timeout_s, self._link.lose, f"the sandbox's helper did not answer within {timeout_s:g} s"
        )
        self.future.add_done_callback(lambda _: timer.cancel())

    async def finish(self) -> Reply:
        """The reply. Cancelled: kills the request."""
        try:
            return await asyncio.shield(self.future)
        except asyncio.CancelledError:
            self.kill()
            raise

    async def send_input(self, data: bytes) -> None:
        """Sends standard input as fast as it is taken. Ends early when the request does."""
        view = memoryview(data)
        for start in range(0, len(view), frames.CHUNK):
            part = view[start : start + frames.CHUNK]
            while self._untaken + len(part) > frames.WINDOW and not self.future.done():
                self._window.clear()
                await self._window.wait()
            if self.future.done():
                return
            self._untaken += len(part)
            self._link.send({"op": "data", "id": self._number}, part)

    def take(self, header: Mapping[str, Any], payload: bytes) -> bool:
        """One frame of this request's. True: it was the last. Raises FrameError for what may not be."""
        event = header.get("ev")
        if event == "ack":
            self._untaken -= int(header["n"])
            self._window.set()
        elif event == "out":
            stream = self._streams[header["stream"]]
            stream += payload
            if len(stream) > self._max_output:
                raise frames.FrameError("a request's output is larger than was asked for")
        elif event == "end":
            self.end(Reply(header, bytes(self._streams[1]), bytes(self._streams[2])))
            return True
        else:
            raise frames.FrameError(f"an event {event!r} is not known")
        return False

    def end(self, outcome: Reply | SandboxFailed) -> None:
        if not self.future.done():
            if isinstance(outcome, Reply):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)
        self._window.set()


class HelperLink:
    """From ``SandboxSockets.dialed_in``, which has checked the token."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: frames.Decoder, name: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._name = name
        self._requests: dict[int, Request] = {}
        self._next = 1
        self._lost: str | None = None
        self.lost = asyncio.Event()
        """Set when the connection has ended."""
        self._reading = asyncio.create_task(self._read(), name=f"helper link {name}")

    def begin(self, header: Mapping[str, Any], *, max_output: int = 0) -> Request:
        """Sends a request. ``max_output``: most bytes that each of its streams may bring. Raises SandboxFailed."""
        request = Request(self, self._next, max_output)
        self._next += 1
        self._check()
        self._requests[request._number] = request
        try:
            self.send({**header, "id": request._number})
        except frames.FrameError:
            del self._requests[request._number]
            raise
        return request

    async def call(
        self,
        header: Mapping[str, Any],
        *,
        data: bytes = b"",
        max_output: int = 0,
        timeout_s: float | None,
    ) -> Reply:
        """One request to its end, with its standard input. Raises SandboxFailed."""
        request = self.begin({**header, "stdin_size": len(data)}, max_output=max_output)
        request.give_up_after(timeout_s)
        sending = asyncio.create_task(request.send_input(data)) if data else None
        try:
            reply = await request.finish()
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])
        if "error" in reply.fields:
            raise SandboxFailed(f"the sandbox's helper failed: {reply.fields['error']}")
        return reply

    def send(self, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
        """Queues a frame. What is queued is bounded: headers by their requests, payloads by the input window."""
        self._check()
        self._writer.write(frames.encode(dict(header), payload))

    def lose(self, reason: str) -> None:
        """Ends the connection (the helper then kills all and leaves) and every open request."""
        if self._lost is not None:
            return
        self._lost = reason
        self.lost.set()
        self._writer.transport.abort()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.end(SandboxFailed(reason))

    async def close(self) -> None:
        self.lose("the sandbox was destroyed")
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([self._reading])

    def _check(self) -> None:
        if self._lost is not None:
            raise SandboxFailed(self._lost)

    async def _read(self) -> None:
        reason = "the sandbox ended: its helper is gone"
        try:
            while data := await self._reader.read(_READ):
                for header, payload in self._decoder.feed(data):
                    self._take(header, payload)
        except (frames.FrameError, KeyError, TypeError, ValueError, OverflowError) as error:
            _LOG.warning("a sandbox's helper broke the protocol", extra={"sandbox": self._name})
            reason = f"the sandbox's helper broke the protocol: {error}"
        except OSError as error:
            reason = f"the connection to the sandbox broke: {error.strerror or error}"
        self.lose(reason)

    def _take(self, header: Mapping[str, Any], payload: bytes) -> None:
        number = header["id"]
        request = self._requests.get(number)
        if request is None:
            raise frames.FrameError(f"there is no request {number!r}")
        if request.take(header, payload):
            del self._requests[number]
