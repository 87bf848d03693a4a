"""Passes a request to a worker and its answer back, byte by byte and as they come.

What must hold: the worker sees the caller's method, path, query, headers and body, without the headers of the
connection, and is told by whom it was called; the caller sees the worker's status, headers and body; when the
caller hangs up, so does this. A broken answer breaks the caller's connection: it must not look whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import anyio
from multidict import CIMultiDict
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from turnstile_server.workers.link import WorkerLink

_LOG = logging.getLogger(__name__)
_OF_A_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that are not passed on (RFC 9110, section 7.6.1)."""
_FORWARDED = ("x-forwarded-host", "x-forwarded-proto", "authorization")

Told = Callable[[int, Mapping[str, str], bytes], None]
"""Is told status, headers and body of an answer that was read whole."""


def passed_headers(scope: Scope, link: WorkerLink, *, trust_forwarded: bool) -> CIMultiDict[str]:
    """A request's headers for a worker. It is told by X-Forwarded-Host which host the caller named, because the
    agents' address follows from that; what a caller says of it counts only with ``control.trust_forwarded``."""
    given = Headers(scope=scope)
    named = {each.strip().lower() for value in given.getlist("connection") for each in value.split(",")}
    dropped = _OF_A_CONNECTION | named | {*_FORWARDED, "content-length"}
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in given.items():
        if name not in dropped:
            passed.add(name, value)
    if "content-length" in given:
        passed["content-length"] = given["content-length"]
    hosts = given.getlist("host")
    if trust_forwarded and "x-forwarded-host" in given:
        passed["x-forwarded-host"] = given["x-forwarded-host"]
    elif len(hosts) == 1:
        passed["x-forwarded-host"] = hosts[0]
    if trust_forwarded and "x-forwarded-proto" in given:
        passed["x-forwarded-proto"] = given["x-forwarded-proto"]
    passed.update(link.authorization)
    return passed


def target_of(scope: Scope) -> str:
    """Path and query of a request, as they were sent."""
    raw = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    target: bytes = raw + (b"?" + query if query else b"")
    return target.decode("latin-1")


class ForwardedResponse(Response):
    """The answer of a worker. ``body``: of the request, where it was read already; else it is passed on as it
    comes. ``told`` is given an answer that is not long: it is read whole before it is sent. ``headers``: set in
    the request in place of the caller's."""

    def __init__(
        self,
        link: WorkerLink,
        *,
        trust_forwarded: bool,
        body: bytes | None = None,
        told: Told | None = None,
        headers: Mapping[str, str] | None = None,
        answer_headers: Callable[[list[tuple[bytes, bytes]]], list[tuple[bytes, bytes]]] | None = None,
    ) -> None:
        super().__init__()
        self._link = link
        self._trust_forwarded = trust_forwarded
        self._given = body
        self._told = told
        self._replaced = headers or {}
        self._answer_headers = answer_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passed = passed_headers(scope, self._link, trust_forwarded=self._trust_forwarded)
        passed.update(self._replaced)
        coming = _ComingBody(receive)
        body: Any = self._given
        if body is None:
            if _has_body(passed, scope):
                body = coming.pieces()
            else:
                coming.is_read()
        elif "content-length" in passed:
            passed["content-length"] = str(len(body))
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(coming.hung_up, tasks.cancel_scope, self._given is not None)
            try:
                async with self._link.request(scope["method"], target_of(scope), passed, body) as answer:
                    await self._pass_on(answer, send)
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group, which would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _pass_on(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        raw = [(name.lower(), value) for name, value in answer.raw_headers]
        raw = [each for each in raw if each[0].decode("latin-1") not in _OF_A_CONNECTION]
        if self._answer_headers is not None:
            raw = self._answer_headers(raw)
        start: Message = {"type": "http.response.start", "status": answer.status, "headers": raw}
        if self._told is not None:
            whole = await self._whole(answer)
            self._told(answer.status, answer.headers, whole)
            await send(start)
            await send({"type": "http.response.body", "body": whole})
            return
        await send(start)
        try:
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except aiohttp.ClientError as error:
            _LOG.warning("an answer of worker %d broke off: %s", self._link.number, error)
            return  # without its end: the listener closes the connection, and the caller sees that it is not whole
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            return await answer.read()
        except aiohttp.ClientError as error:
            raise self._link.broken(error) from error


def _has_body(headers: Mapping[str, str], scope: Scope) -> bool:
    if "content-length" in headers:
        return headers["content-length"].strip("0") != ""
    return "transfer-encoding" in Headers(scope=scope)


class _ComingBody:
    """The caller's body as it comes, and then whether the caller hangs up."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = anyio.Event()
        self._gone = False

    def is_read(self) -> None:
        """There is none."""
        self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                break
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                break
        self._read.set()

    async def hung_up(self, scope: anyio.CancelScope, read_already: bool) -> None:
        """Cancels ``scope`` when the caller hangs up."""
        if not read_already:
            await self._read.wait()
        while not self._gone:
            self._gone = (await self._receive())["type"] == "http.disconnect"
        scope.cancel()
