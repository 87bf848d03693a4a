"""An MCP server on standard streams, in front of one over streamable HTTP: messages pass, neither side is changed.

Specification: https://modelcontextprotocol.io/specification/2025-11-25/basic/transports. Holds: every request gets
one response, an error at least; messages keep their order where it matters (``initialize`` and notifications are
delivered before anything after them is read); a response whose connection is lost is fetched again where the
protocol lets it; a cancelled request gets no response.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import httpx

Message = dict[str, Any]
Write = Callable[[bytes], Awaitable[None]]

_META_VERSION = "io.modelcontextprotocol/protocolVersion"
_ACCEPT = "application/json, text/event-stream"
_PARSE_ERROR, _INVALID_REQUEST, _FAILED = -32700, -32600, -32000
DRAIN_S = 10.0
"""Time for requests that run when the client has said its last."""
_NOTIFY_S = 10.0
"""Time for the server to accept a notification."""
_RETRY_S = 1.0
"""Time before a lost stream is asked for again, where the server names none."""
_RESUMES = 5
"""Most requests in a row for a lost stream that bring nothing new."""


class _Lost(Exception):
    """The response cannot be had; the text says why."""


class McpBridge:
    """One client on standard streams. ``http`` carries the key in its headers; ``write`` sends one line."""

    def __init__(self, http: httpx.AsyncClient, url: str, write: Write) -> None:
        self._http = http
        self._url = url
        self._write = write
        self._session: dict[str, str] = {}
        """Headers of the session: its id and the protocol version that was agreed on."""
        self._running: dict[str | int, anyio.CancelScope] = {}
        self._cancelled: set[str | int] = set()

    async def run(self, lines: AsyncIterator[bytes]) -> None:
        """Serves until the lines end and the requests that run then are answered; these for ``DRAIN_S`` at most.

        Closes the session at its end.
        """
        try:
            async with anyio.create_task_group() as listening:
                async with anyio.create_task_group() as requests:
                    async for line in lines:
                        if line.strip():
                            await self._take(line, requests, listening)
                    requests.cancel_scope.deadline = anyio.current_time() + DRAIN_S
                listening.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def close(self) -> None:
        """Ends the session. A server that is gone needs no end."""
        headers, self._session = self._session, {}
        if "mcp-session-id" in headers:
            with anyio.move_on_after(_RETRY_S):
                try:
                    await self._http.delete(self._url, headers=headers)
                except httpx.HTTPError:
                    return

    async def _take(self, line: bytes, requests: anyio.abc.TaskGroup, listening: anyio.abc.TaskGroup) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            await self._fail(None, _PARSE_ERROR, f"not JSON: {error}")
            return
        if not isinstance(message, dict):
            await self._fail(None, _INVALID_REQUEST, "a message is one JSON object; batches are not served")
            return
        method, request_id = message.get("method"), message.get("id")
        if method is None or request_id is None:
            await self._notify(message)
            if method == "notifications/initialized" and self._session:
                listening.start_soon(self._listen)
        elif not isinstance(request_id, str | int):
            await self._fail(None, _INVALID_REQUEST, "the id of a request is a string or a whole number")
        elif method == "initialize":
            await self._request(message, request_id)
        else:
            requests.start_soon(self._request, message, request_id)

    async def _notify(self, message: Message) -> None:
        """A notification, or the answer to a request of the server."""
        if message.get("method") == "notifications/cancelled":
            params = message.get("params")
            cancelled = params.get("requestId") if isinstance(params, dict) else None
            if isinstance(cancelled, str | int) and cancelled in self._running:
                self._cancelled.add(cancelled)
                if not self._session:  # without sessions a request is cancelled by closing its response
                    self._running[cancelled].cancel()
        try:
            headers = self._headers(message)
            await self._http.post(self._url, json=message, headers=headers, timeout=_NOTIFY_S)
        except httpx.HTTPError:
            return  # what has no answer has no error either; requests will tell

    async def _request(self, message: Message, request_id: str | int) -> None:
        with anyio.CancelScope() as scope:
            self._running[request_id] = scope
            try:
                await self._forward(message, request_id)
            except (_Lost, httpx.HTTPError) as error:
                await self._fail(request_id, _FAILED, str(error) or type(error).__name__)
        # The id may be in use again once its response is written.
        if self._running.get(request_id) is scope:
            del self._running[request_id]
        self._cancelled.discard(request_id)

    async def _forward(self, message: Message, request_id: str | int) -> None:
        headers = self._headers(message)
        stream = _Stream()
        try:
            async with self._http.stream("POST", self._url, json=message, headers=headers) as response:
                if not _is_stream(response):
                    await self._pass_body(message, response, request_id)
                    return
                self._note_session(response)
                if await self._pass_events(message, response, stream, request_id):
                    return
        except httpx.TransportError as error:
            if stream.last_id is None:
                raise _Lost(f"the server cannot be reached, or the connection was lost: {error}") from error
        await self._resume(message, stream, request_id)

    async def _resume(self, message: Message, stream: _Stream, request_id: str | int) -> None:
        """Fetches the rest of a stream that ended without its response."""
        tries = 0
        while stream.last_id is not None and self._session and tries < _RESUMES:
            seen = stream.last_id
            await anyio.sleep(stream.retry_s)
            headers = {**self._headers(message), "last-event-id": stream.last_id}
            try:
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if not _is_stream(response):
                        raise _Lost(f"the rest of the response cannot be had (HTTP {response.status_code})")
                    if await self._pass_events(message, response, stream, request_id):
                        return
            except httpx.TransportError:
                tries += 1
                continue
            tries = 0 if stream.last_id != seen else tries + 1
        raise _Lost("the connection was lost before the response came")

    async def _listen(self) -> None:
        """Passes on the messages that the server sends on its own, until it ends the stream. A server may offer no
        such stream."""
        try:
            async with self._http.stream(
                "GET", self._url, headers={**self._session, "accept": _ACCEPT}
            ) as response:
                if _is_stream(response):
                    await self._pass_events({}, response, _Stream(), None)
        except httpx.HTTPError:
            return

    async def _pass_body(self, message: Message, response: httpx.Response, request_id: str | int) -> None:
        body = await response.aread()
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise _Lost(f"HTTP {response.status_code}: {body[:200].decode(errors='replace')}") from None
        if not isinstance(answer, dict) or not ({"result", "error"} & answer.keys()):
            raise _Lost(f"HTTP {response.status_code}, and no JSON-RPC response")
        self._note_session(response)
        # A refusal of the HTTP layer names no request; on these streams it must.
        await self._pass(message, {**answer, "id": request_id}, request_id)

    async def _pass_events(
        self, message: Message, response: httpx.Response, stream: _Stream, request_id: str | int | None
    ) -> bool:
        """Passes what comes; True: the response was among it."""
        async for data in stream.events(response):
            try:
                event = json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and await self._pass(message, event, request_id):
                return True
        return False

    async def _pass(self, message: Message, event: Message, request_id: str | int | None) -> bool:
        is_response = request_id is not None and "method" not in event and event.get("id") == request_id
        if is_response and message.get("method") == "initialize":
            self._note_version(event)
        if not (is_response and request_id in self._cancelled):
            await self._say(event)
        return is_response

    def _note_session(self, response: httpx.Response) -> None:
        if session_id := response.headers.get("mcp-session-id"):
            self._session["mcp-session-id"] = session_id

    def _note_version(self, answer: Message) -> None:
        version = (answer.get("result") or {}).get("protocolVersion")
        if isinstance(version, str):
            self._session["mcp-protocol-version"] = version

    def _headers(self, message: Message) -> dict[str, str]:
        """Headers of the message: of its session, or what 2026-07-28 repeats from the body."""
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        meta = params.get("_meta")
        version = meta.get(_META_VERSION) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            return {**self._session, "accept": _ACCEPT}
        headers = {"accept": _ACCEPT, "mcp-protocol-version": version, "mcp-method": str(message.get("method"))}
        name = params.get("name", params.get("uri"))
        return headers if not isinstance(name, str) else {**headers, "mcp-name": name}

    async def _fail(self, request_id: str | int | None, code: int, text: str) -> None:
        await self._say({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text}})

    async def _say(self, message: Message) -> None:
        await self._write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class _Stream:
    """Server-sent events, over as many responses as they take."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.retry_s = _RETRY_S

    async def events(self, response: httpx.Response) -> AsyncIterator[str]:
        """The data of each event that has some."""
        data: list[str] = []
        async for line in response.aiter_lines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if any(data):
                    yield "\n".join(data)
                data = []
            elif name == "data":
                data.append(value)
            elif name == "id":
                self.last_id = value
            elif name == "retry" and value.isascii() and value.isdecimal():
                self.retry_s = int(value) / 1000


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")
