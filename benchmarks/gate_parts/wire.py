"""A minimal HTTP/1.1 for this benchmark, so that the engine and the client cost next to nothing.

Both sides keep connections open. Bodies have a content-length, or come in chunks and end with the empty chunk.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

LAST_CHUNK = b"0\r\n\r\n"
FIRST_TEXT = re.compile(rb'"content": ?"[^"]')
"""The first text of a Chat Completions reply, streamed or not; a chunk with the role alone does not match."""
OVERLAP = 16
"""Bytes, more than ``FIRST_TEXT`` takes, that are looked at again with the next read."""


def content_length(head: bytes) -> int | None:
    at = head.lower().find(b"content-length:")
    return None if at < 0 else int(head[at + 15 : head.find(b"\r\n", at)])


class Inbox:
    """Collects one message at a time: head up to the empty line, then the body."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.head = b""
        self._due: int | None = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """(head, body) when the message is complete. Bytes of a next message must not follow in ``data``."""
        self._parts.append(data)
        self._size += len(data)
        if not self.head:
            joined = b"".join(self._parts)
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return None
            self.head = joined[: end + 4]
            self._parts, self._size = [joined[end + 4 :]], len(joined) - end - 4
            self._due = content_length(self.head)
            if self._due is None and b"chunked" not in self.head.lower():
                self._due = 0
        if self._due is None:
            tail = self._parts[-1] if len(self._parts[-1]) >= len(LAST_CHUNK) else b"".join(self._parts)
            if not tail.endswith(LAST_CHUNK):
                return None
        elif self._size < self._due:
            return None
        message = self.head, b"".join(self._parts)
        self._parts, self._size, self.head = [], 0, b""
        return message


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds from the first byte sent to the first and to the last byte received."""

    status: int
    body: bytes
    sent_at: float
    first_s: float
    total_s: float
    text_at: float
    """When the first text had come (``time.perf_counter``); 0.0 where none did."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answered] | None = None
        self._sent = self._first = self._text_at = 0.0
        self._seen = b""

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return protocol

    async def request(self, head: bytes, parts: Sequence[bytes]) -> Answered:
        """``head`` without content-length and without its empty line."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        size = sum(len(part) for part in parts)
        self._first = self._text_at = 0.0
        self._seen = b""
        message = b"".join([head, b"content-length: %d\r\n\r\n" % size, *parts])
        self._sent = time.perf_counter()
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._first = self._first or now
        if not self._text_at:
            self._seen += data
            if FIRST_TEXT.search(self._seen):
                self._text_at = now
            self._seen = self._seen[-OVERLAP:]
        message = self._inbox.feed(data)
        if message is not None and self._answer is not None:
            head, body = message
            status, first_s = int(head[9:12]), self._first - self._sent
            self._answer.set_result(Answered(status, body, self._sent, first_s, now - self._sent, self._text_at))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))


@dataclass(frozen=True, slots=True)
class Paced:
    """A piece that is written ``wait_s`` seconds after the one before it. ``written`` is told when
    (``time.perf_counter``, which on Linux is one clock for all processes)."""

    data: bytes
    wait_s: float
    written: Callable[[float], None] | None = None


Piece = bytes | Paced
Answerer = Callable[[bytes, bytes], Sequence[Piece]]


class ServerConnection(asyncio.Protocol):
    """Answers each request with the pieces that ``answer(head, body)`` gives, one write per loop turn."""

    def __init__(self, answer: Answerer) -> None:
        self._inbox = Inbox()
        self._answer = answer
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        message = self._inbox.feed(data)
        if message is not None:
            self._next(self._answer(*message), 0)

    def _next(self, pieces: Sequence[Piece], at: int) -> None:
        loop, piece = asyncio.get_running_loop(), pieces[at]
        if isinstance(piece, Paced):
            loop.call_later(piece.wait_s, self._write, pieces, at)
        elif at:
            loop.call_soon(self._write, pieces, at)
        else:
            self._write(pieces, at)

    def _write(self, pieces: Sequence[Piece], at: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        piece = pieces[at]
        if isinstance(piece, Paced):
            if piece.written is not None:
                piece.written(time.perf_counter())
            piece = piece.data
        self._transport.write(piece)
        if at + 1 < len(pieces):
            self._next(pieces, at + 1)


def json_response(body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]


def event_response(events: Sequence[bytes]) -> list[bytes]:
    """Server-sent events, one chunk and one write each."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    framed = [b"data: " + event + b"\n\n" for event in (*events, b"[DONE]")]
    chunks = [b"%x\r\n" % len(data) + data + b"\r\n" for data in framed]
    return [head + chunks[0], *chunks[1:-1], chunks[-1] + LAST_CHUNK]
