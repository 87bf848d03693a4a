"""The transport of calls to servers: httpx's settings, its failures, and the retries that are always safe.

A call is sent again when no byte of it had left, or when it may be repeated (reads, and creations, which always
carry an idempotency key). Every other failure is raised at once.
"""

from __future__ import annotations

import os
import ssl
import time
from typing import Any, TypeVar

import anyio
import httpx

from turnstile import errors
from turnstile._placement import ServerPool
from turnstile._requests import ApiCall, ApiReply, headers_of, read
from turnstile._retry import ClientSettings

T = TypeVar("T")

_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""Failures before a byte of the request had left."""
STARTING = "server_starting"
"""The error of a server that does not serve yet."""


def checked_key(key: str | None) -> str | None:
    """The control key as given. Raises InvalidRequest for one that no HTTP header can carry."""
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise errors.InvalidRequest("the control key has characters that no header can carry")
    return key


def client_arguments(settings: ClientSettings) -> dict[str, Any]:
    """Keyword arguments of ``httpx.Client`` and ``httpx.AsyncClient``. Raises InvalidRequest."""
    limits = httpx.Limits(
        max_connections=settings.max_connections,
        max_keepalive_connections=settings.max_connections,
        keepalive_expiry=settings.keepalive_s,
    )
    return {"limits": limits, "trust_env": settings.trust_env, "verify": _authorities()}


def _authorities() -> ssl.SSLContext | bool:
    """Whose certificates are believed: those that ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` name, else httpx's.

    httpx reads these only where it may take proxies from the environment too. Raises InvalidRequest.
    """
    file, folder = os.environ.get("SSL_CERT_FILE") or None, os.environ.get("SSL_CERT_DIR") or None
    if file is None and folder is None:
        return True
    try:
        return ssl.create_default_context(cafile=file, capath=folder)
    except OSError as error:
        raise errors.InvalidRequest(f"SSL_CERT_FILE names {file}, which cannot be used: {error}") from error


class Transport:
    """The connections of one client. Belongs to the event loop that first uses it."""

    def __init__(self, pool: ServerPool, key: str | None, settings: ClientSettings) -> None:
        self._pool = pool
        self._key = key
        self._settings = settings
        self._http = httpx.AsyncClient(**client_arguments(settings))

    async def close(self) -> None:
        await self._http.aclose()

    async def send(
        self, server: str, call: ApiCall[T], *, retry_unsent: bool = True, wait_start: bool = True
    ) -> T:
        """Sends ``call`` to ``server`` and returns the answer. ``retry_unsent``: try again where no connection
        came about. ``wait_start``: try again, ``start_s`` at most, while the server says that it starts, which has
        had no effect.

        Raises the typed error of a refusal, Timeout, ServerUnavailable, ProtocolError; InvalidRequest on a closed
        client.
        """
        deadline = time.monotonic() + (self._settings.start_s if wait_start else 0.0)
        while True:
            try:
                return await self._send(server, call, retry_unsent=retry_unsent)
            except errors.ServerUnavailable as error:
                if error.type != STARTING or time.monotonic() >= deadline:
                    raise
                await anyio.sleep(error.retry_after_s or self._settings.retry_delay_s)

    async def _send(self, server: str, call: ApiCall[T], *, retry_unsent: bool) -> T:
        if self._http.is_closed:
            raise errors.InvalidRequest("the client is closed")
        for delay in self.delays():
            if delay:
                await anyio.sleep(delay)
            try:
                response = await self._http.request(**self._arguments(server, call))
            except httpx.RequestError as error:
                failure, sent = error, not isinstance(error, _UNSENT)
            except RuntimeError as error:  # the interpreter is ending: asyncio resolves no more names
                raise errors.ServerUnavailable(f"{server} could not be asked: {error}", server=server) from error
            else:
                self._pool.reached(server)
                reply = ApiReply(response.status_code, dict(response.headers), response.content)
                return read(call, reply, server)
            if not sent:
                self._pool.unreachable(server)
            if not (call.repeatable if sent else retry_unsent):
                break
        if sent and isinstance(failure, httpx.TimeoutException):
            raise errors.Timeout(f"{server} did not answer {call.method} {call.path} in time", server=server)
        message = str(failure) or type(failure).__name__
        raise errors.ServerUnavailable(
            f"{server} could not be asked: {message}", server=server, may_have_happened=sent
        )

    def delays(self) -> list[float]:
        """The pause before each attempt, in seconds; the first has none."""
        return [0.0, *(self._settings.retry_delay_s * 2**n for n in range(self._settings.retries))]

    def _arguments(self, server: str, call: ApiCall[Any]) -> dict[str, Any]:
        return {
            "method": call.method,
            "url": server + call.path,
            "params": call.params,
            "content": call.body,
            "headers": headers_of(call, self._key),
            "timeout": httpx.Timeout(self._settings.answer_s + call.extra_s, connect=self._settings.connect_s),
        }
