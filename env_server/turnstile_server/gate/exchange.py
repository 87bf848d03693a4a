"""One HTTP exchange with an agent: its body in, bytes out, and whether the agent is still there.

Holds: a body is read within its limits of size and time; a caller that takes no bytes for ``send_timeout_s`` is
gone; nothing is sent to a caller that is gone.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from turnstile_server.http.agent_request import CallerGone, discard_body, read_body
from turnstile_server.settings import GateSettings

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")


def unbuffered(content_type: str) -> list[Header]:
    """Headers of a response whose parts proxies must pass on as they come."""
    return [
        (b"content-type", content_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: GateSettings) -> None:
        self.method: str = scope["method"]
        self.query: bytes = scope["query_string"]
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        self.gone = False
        self._receive = receive
        self._send = send
        self._settings = settings
        self._ending = False
        self._body_read = False

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge, RequestTimeout, CallerGone."""
        limits = self._settings
        self._body_read = True
        try:
            return await read_body(
                self._receive, self.headers, "gate", limits.max_body_bytes, limits.body_timeout_s
            )
        except CallerGone:
            self.gone = True
            raise

    async def discard_body(self) -> None:
        """Before an answer that does not wait for the body. Raises CallerGone."""
        if not self._body_read:
            await discard_body(self._receive, self._settings.body_timeout_s)

    async def watch(self, responding: anyio.CancelScope) -> None:
        """Cancels ``responding`` when the caller goes. Run beside the response, after the body was read."""
        while not self._ending:
            message = await self._receive()
            # A server also says "disconnect" once the response is complete; that is not the caller's doing.
            if message["type"] == "http.disconnect" and not self._ending:
                self.gone = True
                responding.cancel()
                return

    async def start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The terminal bytes. When this returns they were handed to the connection of a caller still there."""
        await anyio.lowlevel.checkpoint()  # so that the watch has its say about a caller that just went
        if self.gone:
            raise CallerGone
        self._ending = True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, data: bytes, headers: list[Header] | None = None) -> None:
        length = (b"content-length", str(len(data)).encode())
        await self.start(status, [JSON, length, *(headers or [])])
        await self.end(b"" if self.method == "HEAD" else data)

    async def _put(self, message: dict[str, object]) -> None:
        with anyio.move_on_after(self._settings.send_timeout_s) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            self.gone = True
            raise CallerGone
