"""A mounted MCP server that is reached by URL: the SDK's streamable HTTP, within bounds.

The SDK bounds one event of a stream. Here the body of a plain JSON answer is bounded too, and notifications are
counted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import mcp_types as mcp
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from turnstile_server.own_tools.server_link import Flooded, ServerLink
from turnstile_server.own_tools.stdio import variable
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import ServerSpec

_CONNECT_S = 10.0
_SEND_S = 30.0


class _TooLarge(httpx2.StreamError):
    """The SDK answers a call whose body raises a StreamError with an error of its own."""


def http_headers(spec: ServerSpec) -> dict[str, str]:
    """``headers`` with the values of their variables. Raises MissingVariable."""
    return {header: variable(name) for header, name in spec.headers.items()}


@asynccontextmanager
async def http_streams(
    spec: ServerSpec, settings: ToolSettings, link: ServerLink
) -> AsyncIterator[TransportStreams]:
    """Opens the connection; leaving the block ends the session at the server."""
    assert spec.url is not None
    most = settings.own_max_result_bytes

    async def bound(response: httpx2.Response) -> None:
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, most)

    # A call's time is kept where tools are called, so reading has none here.
    timeout = httpx2.Timeout(_SEND_S, connect=_CONNECT_S, read=None)
    async with (
        httpx2.AsyncClient(
            headers=http_headers(spec), timeout=timeout, event_hooks={"response": [bound]}
        ) as client,
        streamable_http_client(spec.url, http_client=client, max_sse_event_size=most) as (from_server, to_server),
        anyio.create_task_group() as tasks,
    ):
        to_session, counted = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def count() -> None:
            async with to_session:
                async for message in from_server:
                    if isinstance(message, SessionMessage) and isinstance(
                        message.message, mcp.JSONRPCNotification
                    ):
                        try:
                            link.notified()
                        except Flooded as error:
                            link.lose(str(error))
                            return
                    await to_session.send(message)
            link.lose("it closed the connection")

        tasks.start_soon(count)
        yield counted, to_server
        counted.close()
        tasks.cancel_scope.cancel()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > self._most:
                raise _TooLarge(f"the result has more than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
