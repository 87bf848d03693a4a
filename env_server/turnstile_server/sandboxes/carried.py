"""The server's end of connections that a helper carries over its own connection.

A sandbox without a mounted socket reaches the agent endpoint like this: the helper accepts a connection inside
and carries it as a stream of frames (``helper/turnstile_helper/frames.py``, "conn"); here each stream is joined
to the sandbox's listener, a Unix socket of the server's. What must hold, whatever the helper sends: at most
``max_connections`` streams at once; of each stream, at most a window is held in each direction; a slow stream
stops no other one and no command; a frame that breaks the format ends the sandbox.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.helper.turnstile_helper import frames

_READ_BYTES = 64 << 10

Send = Callable[[Mapping[str, Any], bytes], None]
"""Queues a frame for the helper."""


class CarriedConnections:
    """The streams of one sandbox. ``gate``: path of the listener's Unix socket. ``send``: to the helper;
    raises SandboxFailed when its connection has ended."""

    def __init__(self, gate: Path, max_connections: int, send: Send, name: str, tasks: BackgroundTasks) -> None:
        self._gate = gate
        self._max = max_connections
        self._helper = send
        self._name = name
        self._tasks = tasks
        self._last = 0
        """The latest stream's number: the helper counts from 1."""
        self._streams: dict[int, _Stream] = {}
        self._joined: set[BackgroundTask[None]] = set()
        self._closed = False

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        """Handles one frame. Raises FrameError for one that breaks the protocol."""
        number, do = header["conn"], header["do"]
        if do == "open":
            self._open(number)
        elif type(number) is not int or not 0 < number <= self._last:
            raise frames.FrameError(f"there is no connection {number!r}")
        elif (stream := self._streams.get(number)) is not None:
            stream.take(do, header, payload)

    async def close(self) -> None:
        """Cuts every stream; returns when nothing is left of them."""
        self._closed = True
        for joined in list(self._joined):
            joined.cancel()
        for joined in list(self._joined):
            await joined.ended.wait()

    def _send(self, header: Mapping[str, Any], payload: bytes) -> None:
        if self._closed:
            return
        try:
            self._helper(header, payload)
        except SandboxFailed:
            return  # the helper is gone: ``close`` follows, and ends every stream

    def _open(self, number: object) -> None:
        if number != self._last + 1:
            raise frames.FrameError(f"connection {number!r} does not follow {self._last}")
        self._last += 1
        if len(self._streams) >= self._max or len(self._joined) >= 2 * self._max:
            # The helper was told the bound; a stream it has ended may still be closing here.
            raise frames.FrameError(f"more than {self._max} connections are carried at once")
        if self._closed:
            return
        stream = _Stream(self._last, self._send, partial(self._streams.pop, self._last, None))
        self._streams[self._last] = stream
        name = f"connection {self._last} of {self._name}"
        task = self._tasks.start(partial(self._join, stream), name=name, shielded=False)
        stream.on_cut = task.cancel
        self._joined = {each for each in self._joined if not each.ended.is_set()}
        self._joined.add(task)

    async def _join(self, stream: _Stream) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gate:
            gate.setblocking(False)
            try:
                gate.connect(str(self._gate))
            except OSError:  # the listener is closed, or its queue is full: this client is refused
                stream.cut()
                return
            await stream.run(gate)


class _Stream:
    """One connection inside. It is over when both sides have ended, or one has cut it."""

    def __init__(self, number: int, send: Send, forget: Callable[[], object]) -> None:
        self.on_cut: Callable[[], None] = lambda: None
        self._number = number
        self._send = send
        self._forget = forget
        self._chunks: deque[bytes] = deque()
        self._held = 0
        """Bytes that the helper sent and was not told to be passed on: a window at most."""
        self._passed = 0
        """Bytes of those that the listener took, or that were dropped because it takes no more."""
        self._under_way = 0
        """Bytes that were sent to the helper and not yet passed on there."""
        self._client_ended = self._gate_ended = False
        self._came = anyio.Event()
        self._credit = anyio.Event()

    def take(self, do: object, header: Mapping[str, Any], payload: bytes) -> None:
        if do == "data":
            if self._client_ended or self._held + len(payload) > frames.CARRY_WINDOW:
                raise frames.FrameError("a carried connection brought more than its window")
            self._held += len(payload)
            if self._gate_ended:
                self._pass(len(payload))
            elif payload:
                self._chunks.append(payload)
                self._came.set()
        elif do == "took":
            taken = header["n"]
            if type(taken) is not int or not 0 <= taken <= self._under_way:
                raise frames.FrameError("a carried connection took what it was not sent")
            self._under_way -= taken
            self._credit.set()
        elif do == "end":
            self._client_ended = True
            self._came.set()
            self._forget_if_over()
        elif do == "cut":
            self._forget()
            self.on_cut()
        else:
            raise frames.FrameError(f"a carried connection has no {do!r}")

    def cut(self) -> None:
        self._forget()
        self._send({"conn": self._number, "do": "cut"}, b"")

    async def run(self, gate: socket.socket) -> None:
        """Until the listener has closed its side. What the client still sends after that is dropped, as a server
        that has answered drops it."""
        async with anyio.create_task_group() as both:
            both.start_soon(self._to_gate, gate)
            await self._from_gate(gate)
            both.cancel_scope.cancel()
        self._gate_ended = True
        self._chunks.clear()
        self._send({"conn": self._number, "do": "end"}, b"")
        self._pass(self._held - self._passed)
        self._forget_if_over()

    async def _from_gate(self, gate: socket.socket) -> None:
        while True:
            while self._under_way >= frames.CARRY_WINDOW:
                self._credit = anyio.Event()
                await self._credit.wait()
            try:
                data = gate.recv(min(_READ_BYTES, frames.CARRY_WINDOW - self._under_way))
            except BlockingIOError:
                await anyio.wait_readable(gate)
                continue
            except OSError:  # closed with unread bytes of the client's: all that was answered has come
                return
            if not data:
                return
            self._under_way += len(data)
            self._send({"conn": self._number, "do": "data"}, data)

    async def _to_gate(self, gate: socket.socket) -> None:
        try:
            while True:
                while not self._chunks and not self._client_ended:
                    self._came = anyio.Event()
                    await self._came.wait()
                if not self._chunks:
                    gate.shutdown(socket.SHUT_WR)
                    return
                view = memoryview(self._chunks.popleft())
                while view:
                    try:
                        written = gate.send(view)
                    except BlockingIOError:
                        await anyio.wait_writable(gate)
                        continue
                    self._pass(written)
                    view = view[written:]
        except OSError:
            return  # the listener takes no more; its answer may still be on its way

    def _pass(self, size: int) -> None:
        self._passed += size
        if self._passed >= frames.CARRY_WINDOW // 4 and not self._client_ended:
            self._held -= self._passed
            passed, self._passed = self._passed, 0
            self._send({"conn": self._number, "do": "took", "n": passed}, b"")

    def _forget_if_over(self) -> None:
        if self._client_ended and self._gate_ended:
            self._forget()
